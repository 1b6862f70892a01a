"""Data of the engine: the columns of a network per instruction, stream, link and collective, and its mutable state.

The speed of the engine is that of the memory, so it keeps 16 bytes per instruction with one wait (4 per further wait)
and 8 for its end: durations are looked up by cost class, and a resource or a wait is one number each. Columns that only
reports need are computed on demand (`unroll.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.simulator.sharing import Column, Ids, Times


class Network(NamedTuple):
    """The immutable input of the engine. Instruction ids run stream by stream, ``n`` of them.

    Instruction i takes ``class_ps[cost_class[i]]``. A wait w is for the end of instruction ``waits[w]``, or, if that is
    negative, for mark ``~waits[w]``: the moment ``mark_shift_ps`` (0 or less) after the end of ``mark_instruction``.

    ``resource`` is -1 for work of one stream; r, from 0 on, for the links of route r; and ``num_routes + c`` for a
    member of collective c, which holds the links of ``collective_route[c]`` (-1: none). The first ``num_private``
    routes use links that no other stream uses. ``collective_owner`` is the lowest stream among the members.

    An instruction in ``join_instruction``, ascending, continues when ``join_need`` of its waits have happened; all
    others need all of their waits.

    The last four are the times of asynchronous hosts (`host_issue`): by class ``issue_ps``, ``earliest_ps`` and
    ``is_awaited``, by mark ``mark_earliest_ps``; each of shape (0,) if there are no such hosts.
    """

    stream_offsets: Ids
    cost_class: Column
    class_ps: Times
    wait_offsets: Column
    waits: Column
    mark_instruction: Column
    mark_shift_ps: Times
    resource: Column
    num_private: int
    route_offsets: Ids
    route_links: Column
    collective_route: Column
    collective_size: Column
    collective_owner: Column
    join_instruction: Column
    join_need: Column
    issue_ps: Times
    earliest_ps: Times
    is_awaited: NDArray[np.bool_]
    mark_earliest_ps: Times

    @property
    def has_hosts(self) -> bool:
        """Whether hosts issue asynchronously."""
        return len(self.issue_ps) > 0

    def with_hosts_ahead(self) -> Network:
        """Return the network in which everything is issued before the devices reach it."""
        none = np.zeros(0, np.int64)
        return self._replace(issue_ps=none, earliest_ps=none, is_awaited=none.astype(np.bool_), mark_earliest_ps=none)


def durations(network: Network) -> Times:
    """Return the duration of each instruction in ps, shape (n,)."""
    return network.class_ps.take(network.cost_class)


def with_durations(network: Network, duration_ps: Times, mark_shift_ps: Times) -> Network:
    """Return the network with a duration for each instruction, shape (n,), and other mark shifts.

    The hosts' issue times stay; in `earliest_ps` the device's part after the issue changes in proportion.
    """
    own_class = np.arange(len(duration_ps), dtype=np.int32)
    if network.has_hosts:
        network = _with_earliest(network, duration_ps)
    return network._replace(cost_class=own_class, class_ps=duration_ps, mark_shift_ps=mark_shift_ps)


def _with_earliest(network: Network, duration_ps: Times) -> Network:
    issue_ps, earliest_ps = network.issue_ps[network.cost_class], network.earliest_ps[network.cost_class]
    # The device's part after the last issue is between 0 and the device's whole time, so it is 0 where that is 0.
    share = duration_ps / np.maximum(durations(network), 1)
    earliest_ps = issue_ps + np.rint((earliest_ps - issue_ps) * share).astype(np.int64)
    return network._replace(
        issue_ps=issue_ps,
        earliest_ps=earliest_ps,
        is_awaited=network.is_awaited[network.cost_class],
        mark_earliest_ps=np.minimum(network.mark_earliest_ps, earliest_ps[network.mark_instruction]),
    )


def collectives(network: Network) -> Column:
    """Return the collective of each instruction, else -1, shape (n,)."""
    numbers: Column = network.resource - np.int32(len(network.route_offsets) - 1)
    return np.maximum(numbers, -1, out=numbers)


def routes(network: Network) -> Column:
    """Return the route of each instruction, -1 for none, shape (n,)."""
    num_routes = len(network.route_offsets) - 1
    known = np.concatenate([np.arange(num_routes, dtype=np.int32), network.collective_route, np.array([-1], np.int32)])
    return known[network.resource]


def awaited_instructions(network: Network, waits: Column) -> Ids:
    """Return the awaited instructions of some waits; for a mark, the instruction that raises it."""
    awaited = waits.astype(np.int64)
    marked = waits < 0
    awaited[marked] = network.mark_instruction[~waits[marked]]
    return awaited


@compiled
def route_of(network: Network, i: int) -> int:
    """Return the route of one instruction, -1 for none."""
    resource, num_routes = int(network.resource[i]), len(network.route_offsets) - 1
    return resource if resource < num_routes else int(network.collective_route[resource - num_routes])


@compiled
def need_of(network: Network, i: int) -> int:
    """Return the number of waits that an instruction needs: all, unless it is a join."""
    j = np.searchsorted(network.join_instruction, i)
    if j < len(network.join_instruction) and network.join_instruction[j] == i:
        return int(network.join_need[j])
    return int(network.wait_offsets[i + 1] - network.wait_offsets[i])


class NetworkState(NamedTuple):
    """The mutable state of a simulation.

    ``end_ps`` is per instruction, ``link_free_ps`` per link, ``arrived``, ``arrival_ps`` and ``members`` per
    collective, the others per stream. ``members[c]`` is the stream that arrived last at collective c; ``next_waiter``
    links it to the earlier ones.
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


def fresh_state(network: Network, num_links: int, num_marks: int = 0) -> NetworkState:
    """Return a state with every stream before its first instruction; ``num_marks`` ends more than instructions."""
    num_streams, num_collectives = len(network.stream_offsets) - 1, len(network.collective_size)
    # A stream has one request or open join; joins may be in the heap several times, with times that have changed since.
    num_entries = num_streams * (1 if not len(network.join_instruction) else 2)
    return NetworkState(
        end_ps=np.full(len(network.cost_class) + num_marks, -1, np.int64),
        position=network.stream_offsets[:-1].copy(),
        cursor=network.wait_offsets[network.stream_offsets[:-1]].astype(np.int64),
        ready_ps=np.zeros(num_streams, np.int64),
        next_waiter=np.full(num_streams, -1, np.int64),
        stack=np.arange(num_streams, dtype=np.int64)[::-1].copy(),
        heap_time=np.empty(num_entries, np.int64),
        heap_stream=np.empty(num_entries, np.int64),
        link_free_ps=np.zeros(num_links, np.int64),
        arrived=np.zeros(num_collectives, np.int32),
        arrival_ps=np.zeros(num_collectives, np.int64),
        members=np.full(num_collectives, -1, np.int64),
    )
