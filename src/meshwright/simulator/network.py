"""What the engine runs and what changes meanwhile: columns per instruction, stream, link and collective."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.simulator.waiters import Column, Ids, Times


class Network(NamedTuple):
    """What is simulated; nothing in it changes. Instruction ids run stream by stream, ``n`` of them.

    Wait w is for the moment ``wait_shift_ps[w]`` (0 or, for a mark, less) after the end of instruction ``waits[w]``;
    ``route`` is -1 where no link is needed; ``collective`` is -1 for work of one stream, and ``collective_owner`` is
    the lowest stream among its members.

    The engine reads narrower columns, for its speed is that of the memory: ``awaited`` is ``waits``, inverted (~) for
    marks, so that it looks at shifts of marks only; ``alone`` is False where others have a say: members of
    collectives and users of shared links.
    """

    stream_offsets: Ids
    duration_ps: Times
    wait_offsets: Column
    waits: Ids
    wait_shift_ps: Times
    awaited: Column
    route: Column
    route_offsets: Ids
    route_links: Column
    route_shared: NDArray[np.bool_]
    collective: Column
    collective_size: Column
    collective_owner: Column
    alone: NDArray[np.bool_]


def find_alone(route: Column, route_shared: NDArray[np.bool_], collective: Column) -> NDArray[np.bool_]:
    """The column `Network.alone`, shape (n,)."""
    needs_link: NDArray[np.bool_] = np.append(route_shared, False)[route]
    return (collective < 0) & ~needs_link


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


def fresh_state(network: Network, num_links: int, num_marks: int = 0) -> State:
    """Every stream stands before its first instruction, ready to run; ``num_marks`` more ends than instructions."""
    num_streams, num_collectives = len(network.stream_offsets) - 1, len(network.collective_size)
    return State(
        end_ps=np.full(len(network.duration_ps) + num_marks, -1, np.int64),
        position=network.stream_offsets[:-1].copy(),
        cursor=network.wait_offsets[network.stream_offsets[:-1]].astype(np.int64),
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
