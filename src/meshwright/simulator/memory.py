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
    capacity = 2 * int(np.count_nonzero(acts[cost_class])) + len(resident_bytes)
    changes = np.concatenate([allocate_bytes, -free_bytes]).astype(np.int64)
    class_of, part_of = np.nonzero(changes)
    rank, time_ps, in_use = np.empty(capacity, np.int32), np.empty(capacity, np.int64), np.empty(capacity, np.int64)
    peak = np.zeros(resident_bytes.shape, np.int64)
    count = _merge_ranks(
        np.searchsorted(stream_ranks, np.arange(len(resident_bytes) + 1)),
        (stream_offsets, cost_class, start_ps, end_ps),
        acts,
        (np.searchsorted(class_of, np.arange(len(changes) + 1)), part_of, changes[class_of, part_of]),
        resident_bytes.astype(np.int64),
        (rank, time_ps, in_use),
        peak,
    )
    return MemoryUse(rank=rank[:count], time_ps=time_ps[:count], in_use_bytes=in_use[:count], peak_parts_bytes=peak)


@compiled
def _merge_ranks(
    first_stream: Times,
    network: tuple[Times, NDArray[np.int32], Times, Times],
    acts: NDArray[np.bool_],
    changes: tuple[Times, Times, NDArray[np.int64]],
    resident: NDArray[np.int64],
    series: tuple[NDArray[np.int32], Times, NDArray[np.int64]],
    peak: NDArray[np.int64],
) -> int:
    """Walk through the moments of each rank in order; an instruction has two, its start and its end.

    What class c, of those that ``acts`` names, changes at its start is ``offsets[c : c + 2]`` of ``part_of`` and
    ``change``, at its end that of (number of classes) + c; most change few parts.
    Parts are added one by one: numba takes seconds to compile arithmetic on whole arrays.
    """
    stream_offsets, cost_class, start_ps, end_ps = network
    change_offsets, part_of, change = changes
    ranks, moments, in_use = series
    count, num_parts = 0, resident.shape[1]
    now = np.empty(num_parts, np.int64)
    # Of the rank's streams that have a moment left: which instruction's, whether it is the end, when; and their number.
    place, last = np.empty(len(stream_offsets), np.int64), np.empty(len(stream_offsets), np.int64)
    is_end, time = np.empty(len(stream_offsets), np.int64), np.empty(len(stream_offsets), np.int64)
    for rank in range(len(resident)):
        total = np.int64(0)
        for part in range(num_parts):
            now[part] = peak[rank, part] = resident[rank, part]
            total += now[part]
        highest, left = total, 0
        for stream in range(first_stream[rank], first_stream[rank + 1]):
            i = _next_acting(acts, cost_class, stream_offsets[stream], stream_offsets[stream + 1])
            if i < stream_offsets[stream + 1]:
                place[left], last[left], is_end[left], time[left] = i, stream_offsets[stream + 1], 0, start_ps[i]
                left += 1
        ranks[count], moments[count], in_use[count] = rank, 0, total
        while left:
            s = _earliest(time, is_end, left)
            i, moment = place[s], time[s]
            row = cost_class[i] + is_end[s] * len(acts)
            total += _change(change_offsets, part_of, change, row, now)
            if total > highest:
                highest = total
                for part in range(num_parts):
                    peak[rank, part] = now[part]
            if moments[count] != moment:
                count += 1
                ranks[count], moments[count] = rank, moment
            in_use[count] = total
            if not is_end[s]:
                is_end[s], time[s] = 1, end_ps[i]
                continue
            i = _next_acting(acts, cost_class, i + 1, last[s])
            if i < last[s]:
                place[s], is_end[s], time[s] = i, 0, start_ps[i]
                continue
            left -= 1
            for column in (place, last, is_end, time):
                _close_gap(column, s, left)
        count += 1
    return count


@compiled
def _change(offsets: Times, part_of: Times, change: Times, row: int, now: Times) -> int:
    """Add the changes of a row to the parts, and return their sum."""
    added = 0
    for k in range(offsets[row], offsets[row + 1]):
        now[part_of[k]] += change[k]
        added += change[k]
    return added


@compiled
def _earliest(time: Times, is_end: Times, left: int) -> int:
    """Whose moment of those that are left is the earliest; ends before starts."""
    best = 0
    for other in range(1, left):
        if time[other] < time[best] or (time[other] == time[best] and is_end[other] > is_end[best]):
            best = other
    return best


@compiled
def _next_acting(acts: NDArray[np.bool_], cost_class: NDArray[np.int32], i: int, end: int) -> int:
    """The first instruction from ``i`` on that changes something; ``end`` if none before it does."""
    while i < end and not acts[cost_class[i]]:
        i += 1
    return i


@compiled
def _close_gap(column: Times, s: int, left: int) -> None:
    """Move what stands behind place ``s`` one place to the front."""
    for other in range(s, left):
        column[other] = column[other + 1]
