"""The method `latency`: find the plan with the least latency for a batch that arrives at once at idle devices.

The candidates are uniform pipelines of S stages with R replicas each and evenly cut layers. A batch of M microbatches
is answered after about

    F + (⌈M / R⌉ - 1) · max over stages of f        F, f: a microbatch's forward through all layers, and through a stage

seconds on the slowest device kind. This closed form ignores transfers, so several plans are simulated, the shortest
estimate first. More stages help a single microbatch only if one device cannot hold the layers; with several
microbatches, stages work at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from meshwright.planner.problem import Problem, divisors
from meshwright.planner.rank_layouts import slice_evenly
from meshwright.planner.search_method import Proposal, SearchState, Steps
from meshwright.planner.space import Space
from meshwright.spec import Plan, StagePlan

# The number of fitting plans that are simulated: per requested plan, and at least.
_PER_ANSWER, _LEAST = 4, 24
# The most simulated plans per wanted one, if memory is short.
_TRIES = 4


def latency(problem: Problem, state: SearchState) -> Steps:
    """Propose uniform pipelines of all settings, the shortest estimated latency first."""
    candidates = sorted((item for space in problem.spaces() for item in _candidates(space)), key=lambda item: item[0])
    state.count(considered=len(candidates))
    wanted, fitting = max(_PER_ANSWER * state.max_plans, _LEAST), 0
    for estimate_s, plan in islice(candidates, _TRIES * wanted):
        if fitting == wanted or (fitting and state.seconds_left() <= 0):
            return
        item = yield Proposal(plan, estimate_s)
        fitting += item is not None and item.fits


def _candidates(space: Space) -> Iterator[tuple[float, Plan]]:
    """Yield estimates in seconds with whole plans."""
    kinds = space.cluster.device_kinds
    for size in space.microbatch_sizes:
        graph = space.graph_for(size)
        passes = np.max([space.cost.estimate_ops(graph, size, kind).forward_s for kind in kinds], axis=0)
        seconds = np.add.reduceat(passes, [layer.start for layer in graph.layers])
        count = space.workload.global_batch // size
        for num_stages in divisors(space.num_ranks):
            # Ranks without a microbatch stay idle.
            replicas = min(space.num_ranks // num_stages, count)
            if num_stages > len(seconds) or (space.num_stages and num_stages not in space.num_stages):
                continue
            bounds = slice_evenly(seconds.tolist(), num_stages)
            longest = max(float(seconds[start:stop].sum()) for start, stop in bounds)
            stages = tuple(
                StagePlan(start=start, stop=stop, ranks=tuple(range(index * replicas, (index + 1) * replicas)))
                for index, (start, stop) in enumerate(bounds)
            )
            plan = space.make_plan(stages, size, space.schedules[0])
            yield float(seconds.sum()) + (-(-count // replicas) - 1) * longest, space.whole(plan)
