"""Which links are shared? Only they need requests in order of time; everything else streams can settle alone.

A link is **private** when one stream takes part in every request for it. Its requests then form a chain: the next
is not made before the last has ended. This is sufficient, found in one pass over the instructions, and true for
every link between two ranks that only one stream sends on, and for the links of a group that nobody else uses.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled


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
    requests, most = np.zeros(num_links, np.int64), np.zeros(num_links, np.int64)
    mine, counted_for = np.zeros(num_links, np.int64), np.full(num_links, -1, np.int64)
    # A stream's requests for one route are alike, so that one of them tells of all.
    asked = np.full(num_routes, -1, np.int64)
    counted = np.zeros(len(collective_route), np.bool_)
    for stream in range(len(stream_offsets) - 1):
        for i in range(stream_offsets[stream], stream_offsets[stream + 1]):
            route, new = np.int64(resource[i]), True
            if route < 0:
                continue
            if route >= num_routes:
                c = route - num_routes
                route, new = np.int64(collective_route[c]), not counted[c]
                counted[c] = True
                if route < 0:
                    continue
            elif asked[route] == stream:
                continue
            else:
                asked[route] = stream
            for q in range(route_offsets[route], route_offsets[route + 1]):
                link = route_links[q]
                if counted_for[link] != stream:
                    counted_for[link], mine[link] = stream, 0
                mine[link] += 1
                most[link] = max(most[link], mine[link])
                requests[link] += new
    return most < requests
