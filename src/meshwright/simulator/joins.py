"""k-of-n joins: instructions that continue when k of their n waits have happened.

The time of a join is the k-th smallest time of its waits. The join *closes* at that time or when its predecessor in its
stream has ended, whichever is later. The engine computes streams ahead of virtual time, so a wait whose time becomes
known late may have an early time. A join with k or more known times therefore waits in the heap of requests, with the
k-th smallest as its key: when it reaches the top, no earlier time can become known (`engine`). At equal times joins
come before requests, so that their consequences are known when links are granted. A join closes at once when all its
times are known, or when the k-th smallest is not later than the end of its predecessor.

Each wait of a join has a *slot*, numbered in the order in which joins are opened. An unfinished instruction keeps a
list of its waiters, in which ``num_streams + slot`` stands for a slot (`sharing`). A closed join leaves its slots in
such lists, where they are skipped. A stream has at most one open join, and keeps the k smallest times of that join in a
heap with the largest on top.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.simulator.network import Network
from meshwright.simulator.sharing import Column, Ids, Times, push
from meshwright.spec import ProgramError

NONE = -1


class Joins(NamedTuple):
    """The joins of a network and their state.

    ``need`` (n,) is the number of waits that each join needs, 0 for other instructions. Per slot: ``slot_after``, the
    next waiter of the same list; ``slot_stream``, the stream; ``slot_wait``, the wait as in `Network` (empty if the
    network has no marks). ``mark_shift_ps`` is that of the network. ``next`` (1,) is the first free slot. Per stream:
    ``first``, the first slot of the open join (-1: no open join); ``needed`` and ``known``, the numbers of waits that
    it needs and whose times are known; ``key_ps``, its time in the heap of requests (-1: not in the heap);
    ``is_queued``, whether the stream is on the stack to check the join again; ``smallest_offsets``, where its smallest
    times begin in ``smallest_ps``.
    """

    need: Column
    slot_after: Column
    slot_stream: Column
    slot_wait: Column
    mark_shift_ps: Times
    first: Ids
    next: Ids
    needed: Ids
    known: Ids
    key_ps: Times
    is_queued: NDArray[np.bool_]
    smallest_offsets: Ids
    smallest_ps: Times


def prepare_joins(network: Network) -> Joins | None:
    """Return the joins of a network, all closed; None if there are no joins, for which a faster loop is compiled.

    Raises ProgramError if joins have more waits than 32 bits can number.
    """
    return make_joins(network) if len(network.join_instruction) else None


def make_joins(network: Network) -> Joins:
    """Return the joins of a network, all closed. Raises as `prepare_joins`."""
    num_streams, ids = len(network.stream_offsets) - 1, network.join_instruction.astype(np.int64)
    need = np.zeros(len(network.cost_class), np.int32)
    need[ids] = network.join_need
    streams = np.searchsorted(network.stream_offsets, ids, side="right") - 1
    num_waits = network.wait_offsets[ids + 1].astype(np.int64) - network.wait_offsets[ids]
    most, num_slots = np.zeros(num_streams, np.int64), int(num_waits.sum())
    if num_streams + num_slots >= np.iinfo(np.int32).max - 2:
        raise ProgramError(
            f"The program's joins have {num_slots} waits; fewer than 2^31 can be simulated. Simulate fewer steps."
        )
    np.maximum.at(most, streams, network.join_need)
    return Joins(
        need=need,
        slot_after=np.empty(num_slots, np.int32),
        slot_stream=np.empty(num_slots, np.int32),
        slot_wait=np.empty(num_slots if len(network.mark_instruction) else 0, np.int32),
        mark_shift_ps=network.mark_shift_ps,
        first=np.full(num_streams, NONE),
        next=np.zeros(1, np.int64),
        needed=np.zeros(num_streams, np.int64),
        known=np.zeros(num_streams, np.int64),
        key_ps=np.full(num_streams, NONE),
        is_queued=np.zeros(num_streams, np.bool_),
        smallest_offsets=np.cumsum(most) - most,
        smallest_ps=np.empty(int(most.sum()), np.int64),
    )


@compiled
def open_join(network: Network, joins: Joins, end: Times, stream: int, i: int) -> None:
    """Open the join ``i``: record the waits whose times are known, and register slots as waiters of the others."""
    first, begin = joins.next[0], network.wait_offsets[i]
    num_streams, num_waits = len(joins.first), network.wait_offsets[i + 1] - begin
    joins.first[stream], joins.next[0] = first, first + num_waits
    joins.needed[stream], joins.known[stream] = joins.need[i], 0
    for slot in range(first, first + num_waits):
        k, shift = np.int64(network.waits[begin + slot - first]), np.int64(0)
        if k < 0:
            shift, k = network.mark_shift_ps[~k], np.int64(network.mark_instruction[~k])
        if end[k] < 0:
            joins.slot_after[slot], joins.slot_stream[slot] = end[k], stream
            if len(joins.slot_wait) > 0:
                joins.slot_wait[slot] = network.waits[begin + slot - first]
            end[k] = -(num_streams + slot + 2)
        else:
            _take(joins, stream, int(end[k] + shift))


@compiled
def _take(joins: Joins, stream: int, moment: int) -> None:
    """Record one more known moment of a stream's open join; keep it in the heap if it is among the smallest."""
    top, size, need = joins.smallest_offsets[stream], joins.known[stream], joins.needed[stream]
    joins.known[stream] += 1
    if size < need:
        child = size
        while child > 0 and joins.smallest_ps[top + (child - 1) // 2] < moment:
            joins.smallest_ps[top + child] = joins.smallest_ps[top + (child - 1) // 2]
            child = (child - 1) // 2
        joins.smallest_ps[top + child] = moment
    elif moment < joins.smallest_ps[top]:
        hole, child = 0, 1
        while child < need:
            if child + 1 < need and joins.smallest_ps[top + child + 1] > joins.smallest_ps[top + child]:
                child += 1
            if joins.smallest_ps[top + child] <= moment:
                break
            joins.smallest_ps[top + hole] = joins.smallest_ps[top + child]
            hole, child = child, 2 * child + 1
        joins.smallest_ps[top + hole] = moment


@compiled
def look_at_join(joins: Joins, stream: int, num_waits: int, time: int) -> tuple[int, bool, bool]:
    """Check the open join of a stream.

    Returns (time, closes, enters): the closing time as far as it is known, whether the join closes now, and whether it
    has to enter the heap of requests with that time. The given ``time`` is the end of the predecessor.
    """
    joins.is_queued[stream] = False
    if joins.known[stream] < joins.needed[stream]:
        return time, False, False
    moment = joins.smallest_ps[joins.smallest_offsets[stream]]
    if moment <= time or joins.known[stream] == num_waits:
        joins.first[stream], joins.key_ps[stream] = NONE, NONE
        return max(time, moment), True, False
    is_new = joins.key_ps[stream] != moment
    joins.key_ps[stream] = moment
    return moment, False, is_new


@compiled
def close_join(
    network: Network,
    joins: Joins,
    stream: int,
    time: int,
    position: Ids,
    cursor: Ids,
    ready: Times,
    stack: Ids,
    top: int,
) -> int:
    """Handle a join that was removed from the heap of requests: if ``time`` is still valid, let its stream continue.

    Returns the new top of the stack.
    """
    if joins.key_ps[stream] == time:
        joins.first[stream], joins.key_ps[stream] = NONE, NONE
        cursor[stream], ready[stream] = network.wait_offsets[position[stream] + 1], time
        # Under `fair` a mark of the same moment may already have put it on the stack.
        if not joins.is_queued[stream]:
            stack[top] = stream
            top += 1
        joins.is_queued[stream] = False
    return top


@compiled
def finish_for_joins(joins: Joins, end: Times, i: int, time: int, next_waiter: Ids, stack: Ids, top: int) -> int:
    """Record the end of ``i``, wake the streams that wait for it and update the joins that wait for it.

    Returns the new top of the stack.
    """
    waiter, num_streams = end[i], len(joins.first)
    end[i] = time
    while waiter < -1:
        stream = -(waiter + 2)
        if stream < num_streams:
            waiter = next_waiter[stream]
            stack[top] = stream
            top += 1
            continue
        slot = stream - num_streams
        waiter, stream = np.int64(joins.slot_after[slot]), np.int64(joins.slot_stream[slot])
        if joins.first[stream] < 0 or slot < joins.first[stream]:
            continue
        moment = time
        if len(joins.slot_wait) > 0 and joins.slot_wait[slot] < 0:
            moment += joins.mark_shift_ps[~joins.slot_wait[slot]]
        _take(joins, int(stream), moment)
        if joins.known[stream] >= joins.needed[stream] and not joins.is_queued[stream]:
            joins.is_queued[stream] = True
            stack[top] = stream
            top += 1
    return top


@compiled
def drop_stale(joins: Joins, heap_time: Times, heap_stream: Ids, size: int) -> int:
    """Remove joins whose time has changed from the heap of requests; return its new size.

    The heap holds requests as their stream, joins as their stream minus the number of streams.
    """
    num_streams, kept = len(joins.first), 0
    for place in range(size):
        time, code = heap_time[place], heap_stream[place]
        if code < 0:
            if joins.key_ps[code + num_streams] != time:
                continue
            # Keep one entry per join, and mark it by a negated time, which is restored below.
            joins.key_ps[code + num_streams] = ~time
        kept = push(heap_time, heap_stream, kept, time, code)
    for stream in range(num_streams):
        if joins.key_ps[stream] < NONE:
            joins.key_ps[stream] = ~joins.key_ps[stream]
    return kept
