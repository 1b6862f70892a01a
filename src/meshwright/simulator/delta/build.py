"""From a network and its ends to instructions whose needs can change (`graph`).

On links that are shared, each transfer or collective waits for the ones before it that had one of its links, in the
order of their requests (request time, stream), which the ends tell.
"""

from __future__ import annotations

import numpy as np

from meshwright.compiled import compiled
from meshwright.simulator.delta.graph import (
    AFTER,
    BEFORE,
    FIRST_WAIT,
    LINK_COUNT,
    MEMBER_AFTER,
    NOWHERE,
    REQUESTER,
    STREAM,
    WAIT_AFTER,
    WAIT_BEGIN,
    WAIT_COUNT,
    WAIT_ROOM,
    WAITER,
    DeltaGraph,
    empty_graph,
    link_waits,
    spread,
)
from meshwright.simulator.network import Network, collectives, durations, routes
from meshwright.simulator.waiters import Column, Ids, Times


def is_served_in_order(network: Network) -> bool:
    """Whether ends follow from durations and the order of requests for shared links alone.

    Not those of joins, which may take the moments that they wait for in another order, of what hosts issue beside their
    devices, nor of collectives whose members take different times.
    """
    if len(network.join_instruction) or network.has_hosts:
        return False
    collective, duration_ps = collectives(network), durations(network)
    joint = np.flatnonzero(collective >= 0)
    longest = np.zeros(len(network.collective_size), np.int64)
    longest[collective[joint]] = duration_ps[joint]
    return bool((longest[collective[joint]] == duration_ps[joint]).all())


def build_graph(network: Network, num_links: int, end_ps: Times) -> DeltaGraph:
    """All instructions of a network, which ended so, and behind them its marks."""
    count, num_marks = len(network.cost_class), len(network.mark_instruction)
    room, num_streams = count + num_marks, len(network.stream_offsets) - 1
    heads, member_after = _rings(np.append(collectives(network), np.full(num_marks, NOWHERE, np.int32)))
    before, after, stream = _streams(network.stream_offsets, num_marks)
    requester = _requesters(network, stream)
    num_waits = np.append(np.diff(network.wait_offsets), np.ones(num_marks, np.int64)).astype(np.int64)
    requests = np.flatnonzero((requester >= 0) & (heads[:count] == np.arange(count)))
    num_hops = np.zeros(room, np.int64)
    num_hops[requests] = np.diff(network.route_offsets)[routes(network)[requests]]
    begins = np.cumsum(num_waits + num_hops) - num_waits - num_hops
    graph = empty_graph(room, num_streams, int((num_waits + num_hops).sum()))
    graph.duration_ps[:room] = np.append(durations(network), network.mark_shift_ps)
    graph.end_ps[:room] = np.append(end_ps, end_ps[network.mark_instruction] + network.mark_shift_ps)
    graph.node[:, BEFORE], graph.node[:, AFTER] = before, after
    graph.node[:count, STREAM], graph.node[:count, REQUESTER] = stream, requester
    for column, values in (
        (MEMBER_AFTER, member_after),
        (WAIT_BEGIN, begins),
        (WAIT_COUNT, num_waits),
        (WAIT_ROOM, num_waits + num_hops),
    ):
        graph.node[:room, column] = values
    offsets = np.append(network.wait_offsets[:-1], len(network.waits) + np.arange(num_marks))
    awaited = np.append(np.where(network.waits < 0, count + ~network.waits, network.waits), network.mark_instruction)
    shifts: Ids = begins - offsets.astype(np.int64)
    graph.waits[np.repeat(shifts, num_waits) + np.arange(len(awaited))] = awaited
    if len(requests):
        graph.request_ps[:count] = _request_times(graph, heads[:count], requester)
        order = np.lexsort((requester[requests], graph.request_ps[requests]))
        _follow_links(graph, network, routes(network), requests[order], np.full(num_links, NOWHERE))
    spread(graph, _sort(graph, heads))
    return graph


def _rings(collective: Column) -> tuple[Ids, Ids]:
    """The first member of the collective of each instruction, and the next one; itself where it is alone."""
    count = len(collective)
    heads, member_after = np.arange(count), np.arange(count)
    joint = np.flatnonzero(collective >= 0)
    joint = joint[np.argsort(collective[joint], kind="stable")]
    number = collective[joint]
    if len(joint):
        starts = np.flatnonzero(np.diff(number, prepend=-1) != 0)
        sizes = np.diff(np.append(starts, len(joint)))
        heads[joint] = np.repeat(joint[starts], sizes)
        member_after[joint[:-1]] = joint[1:]
        member_after[joint[starts + sizes - 1]] = joint[starts]
    return heads, member_after


def _streams(offsets: Ids, num_marks: int) -> tuple[Ids, Ids, Column]:
    """Who comes before and after each instruction, mark and start of a stream, and the streams of instructions."""
    count, num_streams = int(offsets[-1]), len(offsets) - 1
    first_start = count + num_marks
    end = first_start + num_streams
    before, after = np.full(end + 1, end), np.full(end + 1, end)
    before[1:count], after[: max(count - 1, 0)] = np.arange(count - 1), np.arange(1, count)
    used = np.diff(offsets) > 0
    starts, first, last = np.arange(first_start, end)[used], offsets[:-1][used], offsets[1:][used] - 1
    before[first], after[starts], after[last] = starts, first, end
    return before, after, np.repeat(np.arange(num_streams, dtype=np.int32), np.diff(offsets))


def _requesters(network: Network, stream: Column) -> Column:
    """In whose name each instruction requests shared links, -1 where it does not."""
    collective = collectives(network)
    owner = np.where(collective >= 0, np.append(network.collective_owner, 0)[collective], stream)
    return np.where(routes(network) >= network.num_private, owner, NOWHERE).astype(np.int32)


@compiled
def _request_times(graph: DeltaGraph, heads: Ids, requester: Column) -> Times:
    """When each transfer or collective on shared links requests them, 0 elsewhere."""
    request = np.zeros(len(heads), np.int64)
    for i in range(len(heads)):
        if requester[i] >= 0:
            time = graph.end_ps[graph.node[i, BEFORE]]
            for w in range(graph.node[i, WAIT_BEGIN], graph.node[i, WAIT_BEGIN] + graph.node[i, WAIT_COUNT]):
                time = max(time, graph.end_ps[graph.waits[w]])
            request[heads[i]] = max(request[heads[i]], time)
    for i in range(len(heads)):
        request[i] = request[heads[i]]
    return request


@compiled
def _follow_links(graph: DeltaGraph, network: Network, route: Column, requests: Ids, holder: Ids) -> None:
    """Let each request, in their order, wait for those that held its links before."""
    for i in requests:
        begin = graph.node[i, WAIT_BEGIN] + graph.node[i, WAIT_COUNT]
        for q in range(network.route_offsets[route[i]], network.route_offsets[route[i] + 1]):
            link = network.route_links[q]
            if holder[link] >= 0:
                graph.waits[begin + graph.node[i, LINK_COUNT]] = holder[link]
                graph.node[i, LINK_COUNT] += 1
            holder[link] = i


@compiled
def _sort(graph: DeltaGraph, heads: Ids) -> Column:
    """Give all their keys; those that stand for their collectives, or for themselves, in an order that fits."""
    count = len(heads)
    missing, order = np.zeros(count, np.int64), np.empty(count, np.int32)
    for i in range(count):
        link_waits(graph, i, graph.node[i, WAIT_BEGIN], graph.node[i, WAIT_COUNT] + graph.node[i, LINK_COUNT])
        missing[heads[i]] += graph.node[i, WAIT_COUNT] + graph.node[i, LINK_COUNT] + (graph.node[i, BEFORE] < count)
    found, place = 0, 0
    for i in range(count):
        if heads[i] == i and missing[i] == 0:
            order[found], found = i, found + 1
    while place < found:
        member = np.int64(order[place])
        while True:
            graph.key[member] = place
            following = np.int64(graph.node[member, AFTER])
            if following < count:
                found = _found(heads[following], missing, order, found)
            w = graph.node[member, FIRST_WAIT]
            while w >= 0:
                found = _found(heads[graph.edge[w, WAITER]], missing, order, found)
                w = graph.edge[w, WAIT_AFTER]
            member = np.int64(graph.node[member, MEMBER_AFTER])
            if member == order[place]:
                break
        place += 1
    return order[:found]


@compiled
def _found(head: int, missing: Ids, order: Column, found: int) -> int:
    """One need less; return how many stand in the order then."""
    missing[head] -= 1
    if missing[head] == 0:
        order[found] = head
        return found + 1
    return found
