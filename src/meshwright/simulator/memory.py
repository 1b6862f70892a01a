"""How many bytes does each rank hold over time, and which part of memory owns the peak?

An instruction takes ``allocate_bytes`` of its cost class when it starts and gives back ``free_bytes`` when it ends.
The streams of a rank are merged in time, what is freed before what is taken at the same moment, for an allocator
would reuse the bytes. Within a stream the order of the program holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.compiled import compiled

Times = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryUse:
    """From ``time_ps`` on ``rank`` uses ``in_use_bytes``; ordered by rank and time. ``peak_parts_bytes`` (R, P)."""

    rank: NDArray[np.int32]
    time_ps: Times
    in_use_bytes: NDArray[np.int64]
    peak_parts_bytes: NDArray[np.int64]


def follow_memory(
    stream_ranks: NDArray[np.int32],
    stream_offsets: Times,
    cost_class: NDArray[np.int32],
    start_ps: Times,
    end_ps: Times,
    allocate_bytes: NDArray[np.int64],
    free_bytes: NDArray[np.int64],
    resident_bytes: NDArray[np.int64],
) -> MemoryUse:
    """Follow the bytes in use of all ranks; arguments as in `Prices`, times per instruction."""
    acts = (allocate_bytes != 0).any(axis=1) | (free_bytes != 0).any(axis=1)
    ids = np.flatnonzero(acts[cost_class])
    offsets = np.searchsorted(ids, stream_offsets)
    num_ranks = len(resident_bytes)
    first_stream = np.searchsorted(stream_ranks, np.arange(num_ranks + 1)).astype(np.int64)
    capacity = 2 * len(ids) + num_ranks
    changes = np.concatenate([allocate_bytes, -free_bytes]).astype(np.int64)
    class_of, part_of = np.nonzero(changes)
    rank, time_ps = np.empty(capacity, np.int32), np.empty(capacity, np.int64)
    in_use = np.empty(capacity, np.int64)
    peak = np.zeros(resident_bytes.shape, np.int64)
    count = _merge_ranks(
        first_stream,
        offsets.astype(np.int64),
        np.stack([start_ps[ids], end_ps[ids]]),
        cost_class[ids],
        len(allocate_bytes),
        np.searchsorted(class_of, np.arange(2 * len(allocate_bytes) + 1)),
        part_of,
        changes[class_of, part_of],
        resident_bytes.astype(np.int64),
        (rank, time_ps, in_use),
        peak,
    )
    return MemoryUse(rank=rank[:count], time_ps=time_ps[:count], in_use_bytes=in_use[:count], peak_parts_bytes=peak)


@compiled
def _merge_ranks(
    first_stream: Times,
    offsets: Times,
    times: Times,
    cost_class: NDArray[np.int32],
    num_classes: int,
    change_offsets: Times,
    part_of: Times,
    change: NDArray[np.int64],
    resident: NDArray[np.int64],
    series: tuple[NDArray[np.int32], Times, NDArray[np.int64]],
    peak: NDArray[np.int64],
) -> int:
    """Walk through the moments of each rank in order; event 2i is the start of instruction i, 2i + 1 its end.

    What class c changes at its start is ``change_offsets[c : c + 2]`` of ``part_of`` and ``change``, at its end that of
    ``num_classes`` + c; most change few parts.
    Parts are added one by one: numba takes seconds to compile arithmetic on whole arrays.
    """
    count, num_parts = 0, resident.shape[1]
    event = 2 * offsets[:-1]
    now = np.empty(num_parts, np.int64)
    for rank in range(len(resident)):
        first, last = first_stream[rank], first_stream[rank + 1]
        total = 0
        for part in range(num_parts):
            now[part] = peak[rank, part] = resident[rank, part]
            total += now[part]
        highest = total
        count = _note(series, count, rank, 0, total)
        while True:
            stream = _next_stream(first, last, event, offsets, times)
            if stream < 0:
                break
            i, phase = event[stream] >> 1, event[stream] & 1
            event[stream] += 1
            row = phase * num_classes + cost_class[i]
            for k in range(change_offsets[row], change_offsets[row + 1]):
                now[part_of[k]] += change[k]
                total += change[k]
            if total > highest:
                highest = total
                for part in range(num_parts):
                    peak[rank, part] = now[part]
            count = _note(series, count, rank, times[phase, i], total)
    return count


@compiled
def _next_stream(first: int, last: int, event: Times, offsets: Times, times: Times) -> int:
    """The stream of a rank whose next event is the earliest, ends before starts; -1 when none is left."""
    best, best_time, best_phase = -1, 0, 0
    for stream in range(first, last):
        if event[stream] >= 2 * offsets[stream + 1]:
            continue
        phase = event[stream] & 1
        time = times[phase, event[stream] >> 1]
        if best < 0 or time < best_time or (time == best_time and phase > best_phase):
            best, best_time, best_phase = stream, time, phase
    return best


@compiled
def _note(
    series: tuple[NDArray[np.int32], Times, NDArray[np.int64]], count: int, rank: int, time: int, total: int
) -> int:
    """Add a moment to the series, or overwrite the last if it is the same; return the new length."""
    ranks, moments, in_use = series
    if count and ranks[count - 1] == rank and moments[count - 1] == time:
        count -= 1
    ranks[count] = rank
    moments[count] = time
    in_use[count] = total
    return count + 1
