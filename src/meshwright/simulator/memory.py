"""Bytes that each rank holds over time, and the parts of memory at its peak.

An instruction allocates ``allocate_bytes`` of its cost class when it starts and frees ``free_bytes`` when it ends.
The streams of a rank are merged in time; at the same moment frees come before allocations, because an allocator
would reuse the bytes. Within a stream the order of the program holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled

Times = NDArray[np.int64]

# Later than every moment.
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryUse:
    """From ``time_ps`` on, ``rank`` uses ``in_use_bytes``; ordered by rank and time. ``peak_parts_bytes`` (R, P)."""

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
    """Follow the bytes in use of all ranks; arguments as in `ProgramCosts`, times per instruction."""
    changes = np.concatenate([allocate_bytes, -free_bytes]).astype(np.int64)
    acts = (changes != 0).any(axis=1).reshape(2, -1).any(axis=0)
    capacity = 2 * int(np.count_nonzero(acts[cost_class])) + len(resident_bytes)
    rank, time_ps, in_use = np.empty(capacity, np.int32), np.empty(capacity, np.int64), np.empty(capacity, np.int64)
    peak = resident_bytes.astype(np.int64)
    count = _merge_ranks(
        np.searchsorted(stream_ranks, np.arange(len(resident_bytes) + 1)),
        (stream_offsets, cost_class, start_ps, end_ps),
        acts,
        changes,
        changes.sum(axis=1),
        (rank, time_ps, in_use),
        peak,
    )
    return MemoryUse(rank=rank[:count], time_ps=time_ps[:count], in_use_bytes=in_use[:count], peak_parts_bytes=peak)


@compiled
def _merge_ranks(
    first_stream: Times,
    network: tuple[Times, NDArray[np.int32], Times, Times],
    acts: NDArray[np.bool_],
    changes: NDArray[np.int64],
    sums: NDArray[np.int64],
    series: tuple[NDArray[np.int32], Times, NDArray[np.int64]],
    peak: NDArray[np.int64],
) -> int:
    """Scan the moments of each rank in order; moment 2i is the start of instruction i, 2i + 1 its end.

    ``changes[c]`` are the changes by part at the start of an instruction of class c, ``changes[c + classes]`` those at
    its end; ``sums`` holds their totals, ``acts`` marks the classes that change anything. ``peak`` (R, P) initially
    holds the resident bytes, and is set to the peak.
    """
    stream_offsets, cost_class, start_ps, end_ps = network
    ranks, moments, in_use = series
    count = 0
    # Per stream of the rank that changes anything: number, next moment, its time, and the next moment at the peak.
    mine, event = np.empty(len(stream_offsets), np.int64), np.empty(len(stream_offsets), np.int64)
    time, at_peak = np.empty(len(stream_offsets), np.int64), np.empty(len(stream_offsets), np.int64)
    for rank in range(len(peak)):
        total, number = peak[rank].sum(), 0
        for stream in range(first_stream[rank], first_stream[rank + 1]):
            i = _next_acting(acts, cost_class, stream_offsets[stream], stream_offsets[stream + 1])
            if i < stream_offsets[stream + 1]:
                mine[number], event[number], time[number], at_peak[number] = stream, 2 * i, start_ps[i], 2 * i
                number += 1
        highest = total
        ranks[count], moments[count], in_use[count] = rank, 0, total
        while number:
            s = 0
            for other in range(1, number):
                # Ends before starts.
                if time[other] < time[s] or (time[other] == time[s] and event[other] & 1 > event[s] & 1):
                    s = other
            i, is_end, moment = event[s] >> 1, event[s] & 1, time[s]
            if moment == _NEVER:
                break
            total += sums[cost_class[i] + is_end * len(acts)]
            if is_end:
                last = stream_offsets[mine[s] + 1]
                i = _next_acting(acts, cost_class, i + 1, last)
                event[s], time[s] = 2 * i, start_ps[i] if i < last else _NEVER
            else:
                event[s], time[s] = event[s] + 1, end_ps[i]
            if total > highest:
                highest = total
                _copy_first(number, event, at_peak)
            if moments[count] != moment:
                count += 1
                ranks[count], moments[count] = rank, moment
            in_use[count] = total
        count += 1
        for s in range(number):
            _apply(changes, cost_class, 2 * stream_offsets[mine[s]], at_peak[s], peak[rank])
    return count


@compiled
def _copy_first(number: int, given: Times, made: Times) -> None:
    """Copy ``number`` elements; a slice takes seconds to compile, for its check of shapes."""
    for k in range(number):
        made[k] = given[k]


@compiled
def _apply(changes: NDArray[np.int64], cost_class: NDArray[np.int32], begin: int, end: int, parts: Times) -> None:
    """Add the changes of moments ``begin`` to ``end`` of a stream, by part."""
    for k in range(begin, end):
        row = cost_class[k >> 1] + (k & 1) * (len(changes) // 2)
        for part in range(len(parts)):
            parts[part] += changes[row, part]


@compiled
def _next_acting(acts: NDArray[np.bool_], cost_class: NDArray[np.int32], i: int, end: int) -> int:
    """Return the first instruction from ``i`` on that changes memory; ``end`` if none before it does."""
    while i < end and not acts[cost_class[i]]:
        i += 1
    return i
