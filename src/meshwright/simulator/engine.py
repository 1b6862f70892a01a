"""When does each instruction of ordered streams end? A worklist with a lazy heap; exact, int64 picoseconds.

The model, ``queued`` contention: an instruction may start when the one before it in its stream has ended and all
that it waits for has happened (an instruction's end, or a mark: a moment inside its span). It then *requests* the
links of its route, all at once. Each link serves requests by (request time, stream); streams are numbered rank by
rank. It starts at max(request, all links free) and holds them for its duration. A collective is one instruction per
member; it requests when its last member has arrived, in the name of the lowest stream among the members, and all
members end together. A start is fixed at the request, so a link may idle while a transfer of several links waits
for another.

How it is computed:
1. Run each stream until it meets a wait that is not known, an incomplete collective or a *shared* link.
   Compute, waits, marks and private links need no order in time.
2. A request for a shared link goes into a heap keyed (time, stream).
3. Only when the worklist is empty, the smallest request is granted, and streams run on.

Why that is exact: when the worklist is empty, every future event follows from some heap entry, so it cannot be
earlier than the smallest key. The condition: holding a link, and a mark raised meanwhile, takes at least 1 ps
(`check_prices` sees to it). A link is private when one stream takes part in every request for it (`links.py`), for
then its requests form a chain. Source: our own experiments with worklist, event heap and recorded link order; tests
compare with a plain event-driven simulation.

An end that is not known yet holds -1, or -(stream + 2): the head of the list of streams that wait for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.compiled import compiled
from meshwright.simulator.heap import pop, push

Ids = NDArray[np.int64]
Times = NDArray[np.int64]
Column = NDArray[np.int32]

# Values of State.cursor that are not positions in `waits`.
FRESH = -1  # the stream has not looked at its next instruction
GRANTED = -2  # the end of its next instruction is in `ready_ps`


class Network(NamedTuple):
    """What is simulated; nothing in it changes. Instruction ids run stream by stream, ``n`` of them.

    Wait w is for the moment ``wait_shift_ps[w]`` (0 or, for a mark, less) after the end of instruction ``waits[w]``;
    ``route`` is -1 where no link is needed; ``collective`` is -1 for work of one stream, and ``collective_owner`` is
    the lowest stream among its members.
    """

    stream_offsets: Ids
    duration_ps: Times
    wait_offsets: Ids
    waits: Ids
    wait_shift_ps: Times
    route: Column
    route_offsets: Ids
    route_links: Column
    route_shared: NDArray[np.bool_]
    collective: Column
    collective_size: Column
    collective_owner: Column


class State(NamedTuple):
    """What changes while streams run: ends per instruction, then columns per stream, per link and per collective.

    ``members`` heads the list of streams that have arrived at a collective, linked like those who wait for an end.
    """

    end_ps: Times
    position: Ids
    cursor: Ids
    ready_ps: Times
    next_waiter: Ids
    stack: Ids
    heap_time: Times
    heap_stream: Ids
    link_free_ps: Times
    arrived: Column
    arrival_ps: Times
    members: Ids


def run_network(network: Network, num_links: int) -> tuple[Times, Ids]:
    """Simulate; return the end of each instruction in ps, shape (n,), and where each stream stopped, shape (streams,).

    A stream that stopped before its last instruction waits for ever; ends that are not known are negative.
    """
    num_streams, num_collectives = len(network.stream_offsets) - 1, len(network.collective_size)
    state = State(
        end_ps=np.full(len(network.duration_ps), -1, np.int64),
        position=network.stream_offsets[:-1].copy(),
        cursor=np.full(num_streams, FRESH, np.int64),
        ready_ps=np.zeros(num_streams, np.int64),
        next_waiter=np.full(num_streams, -1, np.int64),
        stack=np.arange(num_streams, dtype=np.int64)[::-1].copy(),
        heap_time=np.empty(num_streams, np.int64),
        heap_stream=np.empty(num_streams, np.int64),
        link_free_ps=np.zeros(num_links, np.int64),
        arrived=np.zeros(num_collectives, np.int32),
        arrival_ps=np.zeros(num_collectives, np.int64),
        members=np.full(num_collectives, -1, np.int64),
    )
    _run(network, state)
    return state.end_ps, state.position


@compiled
def _run(network: Network, state: State) -> None:
    # Arrays are taken out of the tuples once, and the walk over waits is written out: an array that is handed to a
    # function in the innermost loop has its references counted each time, which made the loop ten times as slow.
    offsets, duration, wait_offsets, waits, shift, route, route_offsets, links, shared, collective = network[:10]
    size, owner = network[10:]
    end, position, cursor, ready, next_waiter, stack, heap_time, heap_stream, link_free = state[:9]
    arrived, arrival, members = state[9:]
    top, num_requests = len(position), 0
    while top > 0 or num_requests > 0:
        if top == 0:
            stream, time = heap_stream[0], heap_time[0]
            num_requests = pop(heap_time, heap_stream, num_requests)
            i = position[stream]
            time = _take_links(route_offsets, links, link_free, route[i], time, duration[i])
            top = _resume(collective[i], stream, time, members, next_waiter, cursor, ready, stack, top)
            continue
        top -= 1
        stream = stack[top]
        i, time, w = position[stream], ready[stream], cursor[stream]
        while i < offsets[stream + 1]:
            if w != GRANTED:
                w = wait_offsets[i] if w == FRESH else w
                while w < wait_offsets[i + 1] and end[waits[w]] >= 0:
                    time = max(time, end[waits[w]] + shift[w])
                    w += 1
                if w < wait_offsets[i + 1]:
                    next_waiter[stream], end[waits[w]] = end[waits[w]], -(stream + 2)
                    cursor[stream], ready[stream] = w, time
                    break
                c, r, requester = collective[i], route[i], stream
                if c >= 0:
                    time = _join(c, stream, time, arrived, arrival, members, next_waiter)
                    requester = np.int64(owner[c])
                    if arrived[c] < size[c]:
                        break
                if r >= 0 and shared[r]:
                    num_requests = push(heap_time, heap_stream, num_requests, time, requester)
                    break
                time = (
                    time + duration[i] if r < 0 else _take_links(route_offsets, links, link_free, r, time, duration[i])
                )
                if c >= 0:
                    top = _resume(c, stream, time, members, next_waiter, cursor, ready, stack, top)
                    break
            top = _finish(end, i, time, next_waiter, stack, top)
            i += 1
            w = np.int64(FRESH)
        position[stream] = i


@compiled
def _join(
    collective: int, stream: int, time: int, arrived: Column, arrival: Times, members: Ids, next_waiter: Ids
) -> int:
    """One more member has arrived at a collective and waits for the others; return the latest arrival."""
    arrived[collective] += 1
    arrival[collective] = max(arrival[collective], time)
    next_waiter[stream] = members[collective]
    members[collective] = stream
    return int(arrival[collective])


@compiled
def _take_links(offsets: Ids, links: Column, free: Times, route: int, time: int, duration: int) -> int:
    """Hold the links of a route for a duration from the first moment at which all are free; return its end."""
    for q in range(offsets[route], offsets[route + 1]):
        time = max(time, free[links[q]])
    time += duration
    for q in range(offsets[route], offsets[route + 1]):
        free[links[q]] = time
    return time


@compiled
def _resume(
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
    """Let ``stream``, or all members of a collective, run on with the end of the instruction known; return the top."""
    member = stream if collective < 0 else members[collective]
    while member >= 0:
        cursor[member] = GRANTED
        ready[member] = end
        stack[top] = member
        top += 1
        member = next_waiter[member] if collective >= 0 else np.int64(-1)
    return top


@compiled
def _finish(end: Times, i: int, time: int, next_waiter: Ids, stack: Ids, top: int) -> int:
    """Write the end of ``i`` and wake the streams that wait for it; return the top of the stack."""
    waiter = end[i]
    end[i] = time
    while waiter < -1:
        stream = -(waiter + 2)
        waiter = next_waiter[stream]
        stack[top] = stream
        top += 1
    return top
