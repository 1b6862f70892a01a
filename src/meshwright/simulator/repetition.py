"""Do all steps repeat the first one, some time Δ later each? Then one step tells what a steady step is.

A program without prologue and epilogue, whose steps meet in the order of streams and in the queues for links alone. Let
every stream whose first instruction waits for nothing end its step at Δ. Then step 2 is step 1 moved by Δ if

    streams   each other stream ends its step no later than Δ after what its first instruction waits for has come
    links     each shared link is given back no later than Δ after it was first wanted

for then the step before delays nothing, and every later step repeats it by induction. The spans of a steady step, cut
to the window of `simulation`, are those of the first one cut to (T - Δ, T), where T is its end. Where one of these does
not hold, later steps may still come to repeat themselves, and have to be simulated.
"""

from __future__ import annotations

import numpy as np

from meshwright.simulator.arrivals import find_arrivals, links_of, uses_shared_links
from meshwright.simulator.prices import Prices
from meshwright.simulator.simulate import Run
from meshwright.spec import Program


def step_distance(program: Program, prices: Prices, run: Run) -> int | None:
    """Δ in ps, of the run of one step; None where it is not sure.

    It is not where instructions wait for those of an earlier step, or need only some of what they wait for. Processor
    time that transfers take depends on all that runs, so neither is it where that is charged.
    """
    if program.crosses_steps or program.prologue.num_instructions or program.epilogue.num_instructions:
        return None
    if prices.host_ps.any():
        return None
    if len(program.body.join_instruction):
        return None
    network, end_ps = run.network, run.end_ps
    used = np.flatnonzero(np.diff(network.stream_offsets))
    first, last_ps = network.stream_offsets[used], end_ps[network.stream_offsets[used + 1] - 1]
    begins = network.wait_offsets[first] == network.wait_offsets[first + 1]
    distance = int(last_ps[begins].max(initial=0))
    if bool((last_ps[begins] != distance).any()):
        return None
    chosen = uses_shared_links(network)
    wanting = np.flatnonzero(chosen)
    chosen[first] = True
    arrival_ps = find_arrivals(network, end_ps, chosen)
    if bool((last_ps > arrival_ps[first] + distance).any()):
        return None
    wanted = np.full(run.unrolled.num_links, np.iinfo(np.int64).max - distance)
    freed = np.zeros(run.unrolled.num_links, np.int64)
    links, user = links_of(network, wanting)
    np.minimum.at(wanted, links, arrival_ps[wanting][user])
    np.maximum.at(freed, links, end_ps[wanting][user])
    return None if bool((freed > wanted + distance).any()) else distance
