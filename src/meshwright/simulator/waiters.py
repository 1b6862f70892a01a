"""Waiting streams in linked lists, one list per instruction and per collective.

``next_waiter[stream]`` is the next stream of the list that a stream is in; it is in one at most. An unknown end
holds -1, or -(stream + 2): the head of the list of streams that wait for it. Streams that can continue are pushed on a
stack; all functions that push some return its new top.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled

Ids = NDArray[np.int64]
Times = NDArray[np.int64]
Column = NDArray[np.int32]

# Value of a stream's cursor instead of an index into the waits: the end of its next instruction is known.
GRANTED = -1


@compiled
def join(
    collective: int, stream: int, time: int, arrived: Column, arrival: Times, members: Ids, next_waiter: Ids
) -> int:
    """Add a member that has arrived at a collective and waits for the others; return the latest arrival."""
    arrived[collective] += 1
    arrival[collective] = max(arrival[collective], time)
    next_waiter[stream] = members[collective]
    members[collective] = stream
    return int(arrival[collective])


@compiled
def resume(
    collective: int,
    stream: int,
    end: int,
    members: Ids,
    next_waiter: Ids,
    cursor: Ids,
    ready: Times,
    stack: Ids,
    top: int,
) -> int:
    """Resume ``stream``, or all members of a collective, with the end of the instruction known."""
    member = stream if collective < 0 else members[collective]
    while member >= 0:
        cursor[member] = GRANTED
        ready[member] = end
        stack[top] = member
        top += 1
        member = next_waiter[member] if collective >= 0 else np.int64(-1)
    return top


@compiled
def finish(end: Times, i: int, time: int, next_waiter: Ids, stack: Ids, top: int) -> int:
    """Record the end of ``i`` and wake the streams that wait for it."""
    waiter = end[i]
    end[i] = time
    while waiter < -1:
        stream = -(waiter + 2)
        waiter = next_waiter[stream]
        stack[top] = stream
        top += 1
    return top
