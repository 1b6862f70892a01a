"""Which links are shared? Only they need requests in order of time; everything else streams can settle alone.

A link is **private** when one stream takes part in every request for it. Its requests then form a chain: the next
is not made before the last has ended. This is sufficient, found in one pass over the instructions, and true for
every link between two ranks that only one stream sends on, and for the links of a group that nobody else uses.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.compiled import compiled


@compiled
def find_shared_links(
    stream_offsets: NDArray[np.int64],
    resource: NDArray[np.int32],
    collective_route: NDArray[np.int32],
    route_offsets: NDArray[np.int64],
    route_links: NDArray[np.int32],
    num_links: int,
) -> NDArray[np.bool_]:
    """Whether a link needs order in time, shape (num_links,). ``resource`` is that of `Network`."""
    num_routes = len(route_offsets) - 1
    requests = np.zeros(num_links, np.int64)
    most = np.zeros(num_links, np.int64)
    mine = np.zeros(num_links, np.int64)
    counted = np.zeros(len(collective_route), np.bool_)
    for stream in range(len(stream_offsets) - 1):
        for i in range(stream_offsets[stream], stream_offsets[stream + 1]):
            route, c = np.int64(resource[i]), resource[i] - num_routes
            new = True
            if c >= 0:
                route, new = np.int64(collective_route[c]), not counted[c]
                counted[c] = True
            if route < 0:
                continue
            for q in range(route_offsets[route], route_offsets[route + 1]):
                link = route_links[q]
                mine[link] += 1
                most[link] = max(most[link], mine[link])
                if new:
                    requests[link] += 1
        for i in range(stream_offsets[stream], stream_offsets[stream + 1]):
            route, c = np.int64(resource[i]), resource[i] - num_routes
            if c >= 0:
                route = np.int64(collective_route[c])
            if route >= 0:
                for q in range(route_offsets[route], route_offsets[route + 1]):
                    mine[route_links[q]] = 0
    return most < requests
