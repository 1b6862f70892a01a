"""Data of the engine: the columns of a network per instruction, stream, link and collective, and its mutable state.

Memory bandwidth limits the speed of the engine. So the engine keeps only 16 bytes per instruction with one wait (4 per
further wait) and 8 for its end: durations are looked up by cost class, and a resource or a wait is one number. Columns
that only reports need are computed on demand (`unroll`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.simulator.sharing import Column, Ids, Times


class Network(NamedTuple):
    """The immutable input of the engine: n instructions, numbered stream by stream.

    Instruction i takes ``class_ps[cost_class[i]]`` ps. Wait w is for the end of instruction ``waits[w]``, or, if that
    is negative, for mark ``~waits[w]``: the time ``mark_shift_ps`` (0 or less) after the end of ``mark_instruction``.

    ``resource`` is -1 for an instruction without links, r >= 0 for one that holds the links of route r, and
    ``num_routes + c`` for a member of collective c, which holds the links of ``collective_route[c]`` (-1: no links).
    The first ``num_private`` routes use links that no other stream uses. ``collective_owner`` is the lowest stream
    among the members.

    ``join_instruction`` lists, ascending, the instructions that continue when ``join_need`` of their waits have
    happened; all other instructions need all of their waits.

    The last four columns are the times of asynchronous hosts (`host_issue`): by cost class ``issue_ps``,
    ``earliest_ps`` and ``is_awaited``, by mark ``mark_earliest_ps``; each of shape (0,) if there are no such hosts.
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
        """Whether asynchronous hosts are simulated."""
        return len(self.issue_ps) > 0

    def with_hosts_ahead(self) -> Network:
        """Return the network without asynchronous hosts: every instruction is issued before its device is ready."""
        none = np.zeros(0, np.int64)
        return self._replace(issue_ps=none, earliest_ps=none, is_awaited=none.astype(np.bool_), mark_earliest_ps=none)


def durations(network: Network) -> Times:
    """Return the duration of each instruction in ps, shape (n,)."""
    return network.class_ps.take(network.cost_class)


def with_durations(network: Network, duration_ps: Times, mark_shift_ps: Times) -> Network:
    """Return the network with a duration for each instruction, shape (n,), and other mark shifts.

    The hosts' issue times stay. In ``earliest_ps``, the device's time after the issue changes in proportion to the
    duration.
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
    """Return the number of each instruction's collective, -1 for other instructions; shape (n,)."""
    numbers: Column = network.resource - np.int32(len(network.route_offsets) - 1)
    return np.maximum(numbers, -1, out=numbers)


def routes(network: Network) -> Column:
    """Return the route of each instruction, -1 if it holds no links; shape (n,)."""
    num_routes = len(network.route_offsets) - 1
    known = np.concatenate([np.arange(num_routes, dtype=np.int32), network.collective_route, np.array([-1], np.int32)])
    return known[network.resource]


def awaited_instructions(network: Network, waits: Column) -> Ids:
    """Return the instructions that the given waits are for; for a mark, the instruction that raises the mark."""
    awaited = waits.astype(np.int64)
    marked = waits < 0
    awaited[marked] = network.mark_instruction[~waits[marked]]
    return awaited


@compiled
def route_of(network: Network, i: int) -> int:
    """Return the route of one instruction, -1 if it holds no links."""
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
    """The mutable state of a run of the engine; times in ps.

    Per instruction: ``end_ps``; while the end is unknown, it encodes the waiting streams (`sharing`). Per link:
    ``link_free_ps``. Per collective c: ``arrived``, the number of members that have arrived; ``arrival_ps``, the latest
    arrival; ``members``, the stream that arrived last, which ``next_waiter`` links to the earlier ones. The other
    columns are per stream: ``position``, the current instruction; ``cursor``, its next wait; ``ready_ps``, when it can
    start as far as known. ``stack`` holds the streams that can continue, ``heap_time`` and ``heap_stream`` the requests
    for links.
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
    """Return the state at time 0, with every stream before its first instruction.

    ``end_ps`` gets ``num_marks`` more entries than there are instructions.
    """
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
