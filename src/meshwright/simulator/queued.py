"""``queued`` contention: requests for shared links are granted one by one, first come first served.

The smallest (time, stream) is granted: it holds all links of its route from the first moment at or after its request at
which all are free, for its duration.
"""

from __future__ import annotations

from meshwright.cost.compiled import compiled
from meshwright.simulator.heap import pop
from meshwright.simulator.network import Network, State
from meshwright.simulator.waiters import Column, Ids, Times, resume


@compiled
def grant_first(network: Network, state: State, num_requests: int) -> tuple[int, int]:
    """Grant the first of the requests, if there is one; return how many streams can run on and the requests left."""
    if num_requests == 0:
        return 0, 0
    stream, time = state.heap_stream[0], state.heap_time[0]
    num_requests = pop(state.heap_time, state.heap_stream, num_requests)
    i = state.position[stream]
    route, duration = network.route[i], network.duration_ps[i]
    end = _take_links(network.route_offsets, network.route_links, state.link_free_ps, route, time, duration)
    c, ready = network.collective[i], state.ready_ps
    return resume(c, stream, end, state.members, state.next_waiter, state.cursor, ready, state.stack, 0), num_requests


@compiled
def _take_links(offsets: Ids, links: Column, free: Times, route: int, time: int, duration: int) -> int:
    """Hold the links of a route for a duration from the first moment at which all are free; return its end."""
    for q in range(offsets[route], offsets[route + 1]):
        time = max(time, free[links[q]])
    time += duration
    for q in range(offsets[route], offsets[route + 1]):
        free[links[q]] = time
    return time
