"""A binary heap of (time, stream) in two arrays that the caller owns; equal times are ordered by stream.

Both functions return the new size. They exist because the compiled engine cannot use ``heapq`` without boxing its
entries.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled


@compiled
def push(times: NDArray[np.int64], streams: NDArray[np.int64], size: int, time: int, stream: int) -> int:
    """Add an entry."""
    child = size
    while child > 0:
        parent = (child - 1) >> 1
        if times[parent] < time or (times[parent] == time and streams[parent] <= stream):
            break
        times[child] = times[parent]
        streams[child] = streams[parent]
        child = parent
    times[child] = time
    streams[child] = stream
    return size + 1


@compiled
def pop(times: NDArray[np.int64], streams: NDArray[np.int64], size: int) -> int:
    """Remove the first entry; read it from index 0 before the call."""
    size -= 1
    time = times[size]
    stream = streams[size]
    hole = 0
    while True:
        child = 2 * hole + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            times[right] < times[child] or (times[right] == times[child] and streams[right] < streams[child])
        ):
            child = right
        if time < times[child] or (time == times[child] and stream <= streams[child]):
            break
        times[hole] = times[child]
        streams[hole] = streams[child]
        hole = child
    times[hole] = time
    streams[hole] = stream
    return size
