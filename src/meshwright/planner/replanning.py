"""Plan again for machines that changed (a device was lost or added, a link slowed), starting from the old plan.

    starts      the old number of stages on the present devices, cut by the work of the layers; also one stage fewer or
                more, one stage, and equal numbers of replicas with few idle devices
    changes     of boundaries, microbatches and layouts (`methods.auto`), until the time ends

The cost model keeps op costs and stage memory, which depend on device kinds (`CostModel.on_machines`). So mostly
costs of links are new.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import CostModel
from meshwright.cost.memory import MemoryLimit
from meshwright.cost.without import without_devices
from meshwright.planner.choices import Choices
from meshwright.planner.methods.auto import improve
from meshwright.planner.methods.slicing import slicing
from meshwright.planner.plans import Plans
from meshwright.planner.problem import Problem, divisors
from meshwright.planner.search import search_plans
from meshwright.planner.search_method import Limits, Proposal, SearchState, Steps
from meshwright.spec import Graph, Plan, PlanError, Recompute, StagePlan, format_count
from meshwright.spec.recompute import RECOMPUTE_NAMES, name_recompute
from meshwright.spec.scenario import Scenario
from meshwright.spec.schedules import BASIC_SCHEDULES

_HALVINGS = 40
# Microbatch sizes of the starts: the plan's own and its neighbours.
_NEAR_SIZES = 4
# Time limit in seconds: users and devices wait for the new plan.
DEADLINE_S = 0.7


def replan(
    plan: Plan,
    graph_for: Callable[[int], Graph],
    cost: CostModel,
    *,
    memory: MemoryLimit | None = None,
    prices: Scenario | None = None,
    limits: Limits | None = None,
) -> Plans:
    """Return plans for changed machines, starting from ``plan``, which was made for the machines before the change.

    ``cost`` is the cost model of the present machines: from `apply_scenario` or `without_devices`, or of another
    cluster. Sharding, recompute, ZeRO, exchange and offload stay the same; stages, replicas, microbatches and devices
    are chosen again. The search takes `DEADLINE_S` seconds unless ``limits`` has another deadline; without a deadline,
    the result is deterministic. Raises NoFeasiblePlanError if no plan fits into memory, PlanError if the plan is of
    another graph.
    """
    _refuse_policy(plan)
    graph = graph_for(plan.microbatch_size)
    if plan.graph_hash != graph.content_hash:
        raise PlanError(
            f"The plan to start from is for graph {plan.graph_hash}, but the graph given is {graph.content_hash}. Give "
            "the plan's model, or plan without a plan to start from (--from)."
        )
    given = cost.cluster.num_ranks
    cost = _in_whole_teams(cost, plan.sharding.width)
    left_out = given - cost.cluster.num_ranks
    schedule = plan.schedule if plan.schedule in BASIC_SCHEDULES else "1f1b"
    # On other machines, rank numbers mean other devices.
    idle = plan.idle if len(plan.idle) + plan.num_devices == cost.cluster.num_ranks else ()
    problem = Problem(
        graph_for=graph_for,
        cluster=cost.cluster,
        workload=plan.workload,
        cost=cost,
        choices=Choices(
            shardings=(plan.sharding,),
            zero=(plan.exchange.zero,),
            shard_sizes=(plan.exchange.shard_size,),
            recompute=(_recompute_of(plan, graph),),
            offload=(plan.offload,),
            idle=(idle,),
            schedules=(schedule,),
            microbatch_sizes=() if graph.batch_size is None else (graph.batch_size,),
        ),
        exchange=plan.exchange,
        memory=memory or MemoryLimit(),
        prices=prices or Scenario(),
        model=plan.model,
        model_sizes=plan.model_sizes,
        may_idle=True,
        compiled=plan.compiled,
    )
    begun = replace(plan, schedule=schedule, schedule_hash="", idle=idle)

    def replanning(problem: Problem, state: SearchState) -> Steps:
        if schedule != plan.schedule:
            state.note(f"The schedule {plan.schedule} was replaced by {schedule}: a new plan is gpipe or 1f1b.")
        if plan.idle and not idle:
            state.note("The old plan left devices idle on other machines; the new plan may use all devices.")
        if left_out:
            state.note(
                f"{format_count(left_out, 'device')} that cannot fill a team of {plan.sharding.width} on their node "
                "were left out; ranks count the remaining devices."
            )
        yield from _from_plan(problem, state, begun)

    return search_plans(problem, replanning, limits or Limits(max_plans=4, deadline_s=DEADLINE_S))


def _refuse_policy(plan: Plan) -> None:
    if plan.exchange.policy:
        raise PlanError(
            f"The plan follows the exchange policy {plan.exchange.policy}, which is not kept on other machines. Plan "
            "for them with --exchange, or start from a plan without a policy."
        )


def replan_seconds(plan: Plan, graph: Graph, cost: CostModel) -> float | None:
    """Return the step time in seconds of the best new plan on the machines of a cost model; None if no plan fits.

    The new plan uses all devices or, if no such plan exists, the next smaller power of two. ZeRO, exchange and offload
    are those of ``plan``; a graph that was captured for one microbatch size keeps it. The search is exact slicing of
    the whole graph, which takes longer than `replan`.
    """
    _refuse_policy(plan)
    count = cost.cluster.num_ranks
    for num_devices in dict.fromkeys((count, 2 ** (count.bit_length() - 1))):
        try:
            problem = Problem(
                graph_for=lambda _: graph,
                cluster=cost.cluster,
                workload=plan.workload,
                cost=cost,
                choices=Choices(
                    num_devices=(num_devices,),
                    microbatch_sizes=() if graph.batch_size is None else (graph.batch_size,),
                    schedules=(plan.schedule,) if plan.schedule in BASIC_SCHEDULES else BASIC_SCHEDULES,
                    zero=(plan.exchange.zero,),
                    shard_sizes=(plan.exchange.shard_size,),
                    offload=(plan.offload,),
                ),
                exchange=plan.exchange,
                compiled=plan.compiled,
            )
            found = search_plans(problem, "slicing", Limits(max_plans=1))
        except PlanError:
            continue
        return found.best.step_time_s
    return None


def _in_whole_teams(cost: CostModel, width: int) -> CostModel:
    """Return the machines without devices that do not fill a team on their node; unchanged if teams span nodes."""
    nodes = [node.num_devices for node in cost.cluster.nodes]
    if max(nodes) < width or not any(count % width for count in nodes):
        return cost
    ends = accumulate(nodes)
    return without_devices(
        cost, {end - 1 - k for end, count in zip(ends, nodes, strict=True) for k in range(count % width)}
    )


def _from_plan(problem: Problem, state: SearchState, plan: Plan) -> Steps:
    """Propose the starts and improve the best of them; if none fits, slice the graph again."""
    for start in dict.fromkeys(_starts(problem, plan)):
        yield Proposal(start)
        if state.best is not None and state.seconds_left() <= 0:
            return
    if state.best is None:
        yield from slicing(problem, state)
    else:
        yield from improve(problem, state)


def _starts(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """Yield plans with the current number of stages, one, one fewer or one more on the existing devices.

    Some have other microbatch sizes.
    """
    (space,) = problem.spaces()
    num_stages = len({stage.ranks for stage in plan.stages})
    shapes = list(_shapes(space.num_ranks, num_stages, len(problem.graph_for(plan.microbatch_size).layers)))
    sizes = space.microbatch_sizes
    near = sorted(sizes, key=lambda size: (abs(math.log(size / plan.microbatch_size)), size))[:_NEAR_SIZES]
    # Smaller microbatches divide more evenly over fewer devices.
    for size in near:
        graph = space.graph_for(size)
        costs = space.cost.estimate_ops(graph, size, space.cluster.device_kind(0))
        seconds = costs.layers_s(graph)
        count = space.workload.global_batch // size
        for replicas in shapes if size == plan.microbatch_size else shapes[:2]:
            if max(replicas) <= count:
                edges = [0, *accumulate(replicas)]
                bounds = _cut(seconds, np.array(replicas))
                stages = tuple(
                    StagePlan(start=start, stop=stop, ranks=tuple(range(first, last)))
                    for (start, stop), (first, last) in zip(bounds, pairwise(edges), strict=True)
                )
                whole = problem.graph_for(size).content_hash
                yield replace(plan, stages=stages, num_microbatches=count, graph_hash=whole)


def _shapes(num_ranks: int, num_stages: int, num_layers: int) -> Iterator[list[int]]:
    """Yield numbers of replicas per stage: for the same number of stages first, then for others.

    They are as equal as possible, or equal with some ranks left over.
    """
    wanted = (num_stages, 1, num_stages - 1, num_stages + 1)
    counts = [n for n in dict.fromkeys(wanted) if 1 <= n <= min(num_ranks, num_layers)]
    for n in counts:
        yield [num_ranks // n + (place < num_ranks % n) for place in range(n)]
    # With equal replicas some devices may be idle, while the others wait less for each other.
    for n in (*counts, *(n for n in divisors(num_ranks) if n <= min(2 * num_stages, num_layers))):
        yield [num_ranks // n] * n


def _cut(seconds: NDArray[np.float64], replicas: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Cut layers into one stage per number of replicas so that the largest seconds per replica are minimal."""
    low, high = 0.0, float(seconds.sum())
    edges = _fill(seconds, replicas, high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        tried = _fill(seconds, replicas, middle)
        low, high, edges = (low, middle, tried) if tried[-1] == len(seconds) else (middle, high, edges)
    return list(pairwise(edges))


def _fill(seconds: NDArray[np.float64], replicas: NDArray[np.int64], most: float) -> list[int]:
    """Return the edges of stages filled one after the other, up to ``most`` seconds per replica.

    Each stage gets at least one layer.
    """
    edges, sums = [0], np.concatenate([[0.0], np.cumsum(seconds)])
    for place, count in enumerate(replicas.tolist()):
        start = edges[-1]
        stop = int(np.searchsorted(sums, sums[start] + most * count * (1 + 1e-12), side="right")) - 1
        left = len(replicas) - place - 1
        edges.append(min(max(stop, start + 1), len(seconds) - left))
    return edges


def _recompute_of(plan: Plan, graph: Graph) -> str:
    """Return what a plan recomputes, in words or layers."""
    if word := name_recompute(graph, Recompute(plan.recompute, plan.keeps)):
        return word
    raise PlanError(
        "The plan to start from recomputes parts of layers that no --recompute word describes; expected "
        f"{', '.join(RECOMPUTE_NAMES)}, or whole layers. Plan without a plan to start from (--from)."
    )
