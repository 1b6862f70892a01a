"""Carry a change from instruction to instruction: those that need what moved are looked at, in order, until none is.

What is to be looked at stands in a bit set over the places of the order (`graph`). An instruction that is looked
at alone costs some ten times as much as one of a sweep over all that come after it, so when a number of them have been,
the rest is swept.

A link that is shared serves requests in the order in which it did before; each waits for the one before it there. That
is the order of a full simulation as long as the (request, stream) of each is larger than those before it on its links:
otherwise the change is not carried.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.compiled import compiled
from meshwright.simulator.delta.graph import (
    AFTER,
    BEFORE,
    FIRST_WAIT,
    LINK_COUNT,
    MEMBER_AFTER,
    PLACE,
    REQUESTER,
    STREAM,
    WAIT_AFTER,
    WAIT_BEGIN,
    WAIT_COUNT,
    WAITER,
    WORD,
    DeltaGraph,
)
from meshwright.simulator.waiters import Column, Ids, Times

# An instruction that is looked at alone costs up to ten times as much as one of a sweep, and four times as much as one
# of a full run where links are shared: looking at such shares adds some twentieth to it (benchmarks/simulator.py).
SWEEP, GIVE_UP = 0.006, 0.0125
TURNED_OVER = -1
_MARKED = np.uint64(1)


class Log(NamedTuple):
    """Instructions that moved, with the ends and requests of before; room for one entry of each."""

    instruction: Column
    end_ps: Times
    request_ps: Times


def empty_log(room: int) -> Log:
    """No entries, and room for so many."""
    return Log(np.empty(room + 1, np.int32), np.empty(room + 1, np.int64), np.zeros(room + 1, np.int64))


@compiled
def carry(graph: DeltaGraph, changed: Ids, limit: int, sweeps: bool, log: Log) -> int:
    """Move what needs the changed instructions, and return the number of entries in the log.

    After looking at ``limit`` it sweeps over the rest, or gives up. `TURNED_OVER`: it gave up, or links would serve
    requests in another order; then everything is as it was.
    """
    word, last, noted, looked = len(graph.bits), -1, 0, 0
    for i in changed:
        word, last = min(word, graph.node[i, PLACE] // WORD), max(last, _look_at(graph, int(i)))
    while word <= last:
        if graph.bits[word] == 0:
            word += 1
            continue
        at = _lowest_bit(graph.bits[word])
        i = int(graph.order[word * WORD + at])
        if looked >= limit:
            graph.bits[word : last + 1] = 0
            if sweeps:
                return _sweep(graph, word, at, log, noted)
            take_back(graph, log, noted)
            return TURNED_OVER
        looked += 1
        graph.bits[word] &= graph.bits[word] - _MARKED
        time, request, in_order = arrival_of_all(graph, i)
        if not in_order:
            graph.bits[word : last + 1] = 0
            take_back(graph, log, noted)
            return TURNED_OVER
        time += graph.duration_ps[i]
        if time == graph.end_ps[i] and request == graph.request_ps[i]:
            continue
        member = i
        while True:
            log.instruction[noted] = member
            log.end_ps[noted], log.request_ps[noted] = graph.end_ps[member], graph.request_ps[member]
            graph.end_ps[member], graph.request_ps[member] = time, request
            noted, looked = noted + 1, looked + (member != i)
            following = int(graph.node[member, AFTER])
            if graph.node[following, STREAM] >= 0:
                last = max(last, _look_at(graph, following))
            last = max(last, _look_at_waiters(graph, member))
            member = int(graph.node[member, MEMBER_AFTER])
            if member == i:
                break
    return noted


@compiled
def _look_at(graph: DeltaGraph, i: int) -> int:
    """Note that an instruction is to be looked at; return its word."""
    place = graph.node[i, PLACE]
    graph.bits[place // WORD] |= _MARKED << np.uint64(place % WORD)
    return int(place // WORD)


@compiled
def _look_at_waiters(graph: DeltaGraph, i: int) -> int:
    """The same for all that wait for it; return the last word."""
    w, last = graph.node[i, FIRST_WAIT], -1
    while w >= 0:
        last = max(last, _look_at(graph, int(graph.edge[w, WAITER])))
        w = graph.edge[w, WAIT_AFTER]
    return last


@compiled
def _lowest_bit(word: np.uint64) -> int:
    """The place of the lowest bit of a word that is not 0."""
    place = 0
    for width in (32, 16, 8, 4, 2, 1):
        if (word >> np.uint64(place)) & ((_MARKED << np.uint64(width)) - _MARKED) == 0:
            place += width
    return place


@compiled
def arrival_of_all(graph: DeltaGraph, i: int) -> tuple[int, int, bool]:
    """When an instruction, or the collective that it stands for, starts; when it requests shared links; if in order."""
    time, member = 0, i
    while True:
        time = max(time, _arrival(graph, int(member)))
        member = int(graph.node[member, MEMBER_AFTER])
        if member == i:
            break
    if graph.node[i, REQUESTER] < 0:
        return time, 0, True
    request, in_order = time, True
    begin = graph.node[i, WAIT_BEGIN] + graph.node[i, WAIT_COUNT]
    for w in range(begin, begin + graph.node[i, LINK_COUNT]):
        k = graph.waits[w]
        earlier = graph.request_ps[k]
        in_order = in_order and (
            earlier < request or (earlier == request and graph.node[k, REQUESTER] < graph.node[i, REQUESTER])
        )
        time = max(time, int(graph.end_ps[k]))
    return time, request, in_order


@compiled
def _arrival(graph: DeltaGraph, i: int) -> int:
    """When all that an instruction needs has happened."""
    time, begin = int(graph.end_ps[graph.node[i, BEFORE]]), graph.node[i, WAIT_BEGIN]
    for w in range(begin, begin + graph.node[i, WAIT_COUNT]):
        time = max(time, int(graph.end_ps[graph.waits[w]]))
    return time


@compiled
def _sweep(graph: DeltaGraph, first_word: int, first_at: int, log: Log, noted: int) -> int:
    """Look at everything from a place on, where no links are shared; return the number of entries in the log."""
    # Arrays are taken out of the tuples once, as in `engine`; most wait for one other, which is no loop then. All ends
    # are noted, for a branch on whether they moved takes longer.
    end, duration, node, waits, order = graph.end_ps, graph.duration_ps, graph.node, graph.waits, graph.order
    used, moved, old_end = graph.used, log.instruction, log.end_ps
    for word in range(first_word, len(used)):
        for place in range(word * WORD + (first_at if word == first_word else 0), word * WORD + used[word]):
            i = int(order[place])
            if node[i, MEMBER_AFTER] != i:
                noted = _move_collective(graph, i, log, noted)
                continue
            time, w = end[node[i, BEFORE]], int(node[i, WAIT_BEGIN])
            stop = w + int(node[i, WAIT_COUNT])
            if w < stop:
                time = max(time, end[waits[w]])
                for further in range(w + 1, stop):
                    time = max(time, end[waits[further]])
            moved[noted], old_end[noted], end[i] = i, end[i], time + duration[i]
            noted += 1
    return noted


@compiled
def _move_collective(graph: DeltaGraph, i: int, log: Log, noted: int) -> int:
    """Note the ends of all members and write the new ones; return the number of entries in the log."""
    time, member = arrival_of_all(graph, i)[0] + graph.duration_ps[i], i
    while True:
        log.instruction[noted], log.end_ps[noted], graph.end_ps[member] = member, graph.end_ps[member], time
        noted, member = noted + 1, int(graph.node[member, MEMBER_AFTER])
        if member == i:
            return noted


@compiled
def take_back(graph: DeltaGraph, log: Log, noted: int) -> None:
    """Put the ends and requests of before back."""
    for entry in range(noted - 1, -1, -1):
        i = log.instruction[entry]
        graph.end_ps[i], graph.request_ps[i] = log.end_ps[entry], log.request_ps[entry]
