"""Find when each instruction of a finished run was ready to start, given when all instructions ended."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.simulator.network import Network, routes
from meshwright.simulator.sharing import Times


def uses_shared_links(network: Network) -> NDArray[np.bool_]:
    """Return whether each instruction's route has a link that other streams use, too; shape (n,)."""
    return routes(network) >= network.num_private


@compiled
def find_arrivals(network: Network, end_ps: Times, chosen: NDArray[np.bool_]) -> Times:
    """Return, in ps and of shape (n,), when the predecessor and all waits of each chosen instruction had ended.

    The result is 0 for instructions that are not chosen.
    """
    arrival_ps = np.zeros(len(end_ps), np.int64)
    for stream in range(len(network.stream_offsets) - 1):
        first, last = network.stream_offsets[stream], network.stream_offsets[stream + 1]
        for i in range(first, last):
            if chosen[i]:
                time = end_ps[i - 1] if i > first else 0
                for w in range(network.wait_offsets[i], network.wait_offsets[i + 1]):
                    wait = network.waits[w]
                    if wait >= 0:
                        time = max(time, end_ps[wait])
                    else:
                        time = max(time, end_ps[network.mark_instruction[~wait]] + network.mark_shift_ps[~wait])
                arrival_ps[i] = time
    return arrival_ps


def links_of(network: Network, instructions: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the links of the given instructions' routes, concatenated, and for each link its user.

    A user is an index into ``instructions``.
    """
    route = routes(network)[instructions]
    counts = np.diff(network.route_offsets)[route]
    places = np.repeat(network.route_offsets[:-1][route] - (np.cumsum(counts) - counts), counts)
    return network.route_links[places + np.arange(len(places))], np.repeat(np.arange(len(route)), counts)
