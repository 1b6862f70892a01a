"""The order of a graph by time, for networks whose links are shared: found again when requests came in another order.

Instructions stand by the moment at which they could begin, were their links free; at the same moment those that want no
shared links come first, as in the order of before, then the others by the stream in whose name they request. Each comes
after what it needs: whatever needs a transfer comes 1 ps after its request at least.
"""

from __future__ import annotations

import numpy as np

from meshwright.compiled import compiled
from meshwright.simulator.delta.carry import arrival_of_all
from meshwright.simulator.delta.graph import (
    LINK_COUNT,
    MEMBER_AFTER,
    NOWHERE,
    REQUESTER,
    WAIT_BEGIN,
    WAIT_COUNT,
    DeltaGraph,
    in_order,
    link_waits,
    spread,
    unlink_waits,
)
from meshwright.simulator.network import Network
from meshwright.simulator.waiters import Column, Ids, Times


def order_by_time(graph: DeltaGraph) -> None:
    """Put a graph in order of time, whose links serve requests in the order that its ends tell."""
    heads = in_order(graph)
    tie, time = _times(graph, heads)
    _stand(graph, heads[np.lexsort((tie, graph.node[heads, REQUESTER] >= 0, time))])


@compiled
def renew_order(graph: DeltaGraph, network: Network, route: Column, num_links: int) -> None:
    """The same where ends have changed, and with them the order in which links serve requests.

    The order of before is nearly that of now, so that sorting goes through it once.
    """
    heads = in_order(graph)
    tie, time = _times(graph, heads)
    for at in range(1, len(heads)):
        head, moment, own, wants = heads[at], time[at], tie[at], graph.node[heads[at], REQUESTER] >= 0
        place = at
        while place > 0 and time[place - 1] >= moment:
            others = graph.node[heads[place - 1], REQUESTER] >= 0
            if time[place - 1] == moment and (others < wants or (others == wants and tie[place - 1] < own)):
                break
            heads[place], time[place], tie[place] = heads[place - 1], time[place - 1], tie[place - 1]
            place -= 1
        heads[place], time[place], tie[place] = head, moment, own
    _follow_links(graph, network, route, heads, np.full(num_links, NOWHERE))
    _stand(graph, heads)


@compiled
def _times(graph: DeltaGraph, heads: Column) -> tuple[Times, Times]:
    """What decides at the same moment, and when each could begin; requests are noted."""
    tie, time = np.empty(len(heads), np.int64), np.empty(len(heads), np.int64)
    for at in range(len(heads)):
        head = int(heads[at])
        start, request, _ = arrival_of_all(graph, head)
        # A mark begins when it ends.
        tie[at], time[at] = at, start + min(0, int(graph.duration_ps[head]))
        if graph.node[head, REQUESTER] >= 0:
            tie[at], time[at], member = graph.node[head, REQUESTER], request, head
            while True:
                graph.request_ps[member] = request
                member = int(graph.node[member, MEMBER_AFTER])
                if member == head:
                    break
    return tie, time


@compiled
def _follow_links(graph: DeltaGraph, network: Network, route: Column, heads: Column, holder: Ids) -> None:
    """Let each request wait for those that now hold its links before it."""
    for i in heads:
        if graph.node[i, REQUESTER] < 0:
            continue
        first, stop = network.route_offsets[route[i]], network.route_offsets[route[i] + 1]
        begin, count, differs = graph.node[i, WAIT_BEGIN] + graph.node[i, WAIT_COUNT], 0, False
        for q in range(first, stop):
            before = holder[network.route_links[q]]
            if before >= 0:
                differs = differs or count >= graph.node[i, LINK_COUNT] or graph.waits[begin + count] != before
                count += 1
        if differs or count != graph.node[i, LINK_COUNT]:
            unlink_waits(graph, begin, graph.node[i, LINK_COUNT])
            graph.node[i, LINK_COUNT] = 0
            for q in range(first, stop):
                if holder[network.route_links[q]] >= 0:
                    graph.waits[begin + graph.node[i, LINK_COUNT]] = holder[network.route_links[q]]
                    graph.node[i, LINK_COUNT] += 1
            link_waits(graph, i, begin, graph.node[i, LINK_COUNT])
        for q in range(first, stop):
            holder[network.route_links[q]] = i


@compiled
def _stand(graph: DeltaGraph, heads: Column) -> None:
    """Stand these in the order given."""
    for at in range(len(heads)):
        member = heads[at]
        while True:
            graph.key[member] = at
            member = graph.node[member, MEMBER_AFTER]
            if member == heads[at]:
                break
    spread(graph, heads)
