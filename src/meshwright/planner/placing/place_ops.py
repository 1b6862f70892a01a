"""Place every op of a graph on a device, so that one step takes as little time as possible.

    tasks        find ops that can only be placed together (`op_tasks`), and chains of tasks, which move as a whole
    candidates   all on one device; pipelines of equal parts; list schedules of tasks, of chains (`placement_search`)
    step time    simulate the program of each candidate: one step from a cold start
    search       move chains of the best candidate, the heaviest first, while the step becomes shorter

So in the simulator, the result is never slower than the fastest single device on which the model fits. The search is
deterministic. If memory does not suffice, list scheduling is repeated with lower memory limits, because it counts only
what ops hold permanently. Placing ops and inserting one send and receive per tensor and destination is TensorFlow's
idea (Abadi et al., OSDI 2016, 3.2.1); moving ops under a simulator is FlexFlow's (Jia, Zaharia, Aiken, MLSys 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from meshwright.cost import CostModel
from meshwright.cost.memory import MemoryLimit
from meshwright.planner.placing.op_tasks import Constraints
from meshwright.planner.placing.placement_search import PlaceProblem, search_placement
from meshwright.planner.rank_layouts import memory_limit
from meshwright.simulator import simulate_plan
from meshwright.spec import Cluster, Graph, GraphError, NoFeasiblePlanError, Placement, PlanError, Workload

# The most simulated placements. One with a few hundred stages takes some hundredths of a second.
MAX_SIMULATED = 200


def place(
    graph: Graph,
    cluster: Cluster,
    workload: Workload,
    *,
    devices: Sequence[int] | None = None,
    constraints: Constraints | None = None,
    num_microbatches: int = 1,
    cost: CostModel | None = None,
    memory: MemoryLimit | None = None,
    model: str = "",
    model_sizes: tuple[tuple[str, int], ...] = (),
    max_simulated: int = MAX_SIMULATED,
) -> Placement:
    """Place every op of a graph on one of the ``devices`` (ranks of the cluster, by default all).

    Args:
        graph: the captured model, for training or inference as the workload says.
        cluster: the devices and their links.
        workload: the work of one step.
        devices: the ranks that may be used.
        constraints: further constraints on devices of ops.
        num_microbatches: number of microbatches per step; with several, devices can work at the same time.
        cost: the cost model (default: the cluster's datasheet figures).
        memory: how much memory of each device may be used.
        model: the reference to the model that the placement file records.
        model_sizes: the requested sizes that differ from the model's own, also recorded.
        max_simulated: the most placements that may be simulated, at least 1.

    Raises:
        PlanError: unknown names or devices, or a workload that does not match the graph.
        NoFeasiblePlanError: contradicting constraints, or no placement fits into memory.
    """
    ranks = tuple(range(cluster.num_ranks)) if devices is None else tuple(devices)
    _check(graph, cluster, workload, ranks, num_microbatches, max_simulated)
    problem = PlaceProblem(
        graph=graph,
        cluster=cluster,
        workload=workload,
        ranks=ranks,
        constraints=constraints or Constraints(),
        num_microbatches=num_microbatches,
        cost=cost or CostModel(cluster=cluster, precision=workload.precision),
        limits_bytes=tuple(memory_limit(cluster, rank, memory or MemoryLimit()) for rank in ranks),
        model=model or graph.name,
        model_sizes=model_sizes,
    )
    return search_placement(problem, max_simulated)


def seconds_on_one_device(
    placement: Placement,
    graph: Graph,
    cluster: Cluster,
    *,
    devices: Sequence[int],
    cost: CostModel,
    memory: MemoryLimit | None = None,
) -> float | None:
    """Return the seconds of the placement's step on the fastest of single devices; None if it fits on no device."""
    kinds = {cluster.device_kind(device).name: device for device in reversed(devices)}
    seconds = []
    for device in kinds.values():
        with suppress(NoFeasiblePlanError):
            one = place(
                graph,
                cluster,
                placement.workload,
                devices=(device,),
                num_microbatches=placement.num_microbatches,
                cost=cost,
                memory=memory,
            )
            seconds.append(simulate_plan(one, graph, cluster, cost=cost).timeline.duration_s)
    return min(seconds, default=None)


def _check(
    graph: Graph,
    cluster: Cluster,
    workload: Workload,
    ranks: tuple[int, ...],
    num_microbatches: int,
    max_simulated: int,
) -> None:
    strange = [rank for rank in ranks if not 0 <= rank < cluster.num_ranks]
    if strange or not ranks or len(set(ranks)) < len(ranks):
        raise PlanError(
            f"The devices {list(ranks)} were given; expected some of 0 to {cluster.num_ranks - 1}, the ranks of "
            f"cluster {cluster.name!r}, each once."
        )
    if num_microbatches < 1 or workload.global_batch % num_microbatches:
        raise PlanError(
            f"A global batch of {workload.global_batch} samples does not divide into {num_microbatches} microbatches. "
            f"Choose a number of microbatches that divides {workload.global_batch}."
        )
    if workload.kind != graph.mode:
        raise PlanError(
            f"The workload is {workload.kind}, but the graph was captured for {graph.mode}; capture it in that mode."
        )
    if max_simulated < 1:
        raise PlanError(f"max_simulated={max_simulated} was given; expected at least 1.")
    if any(op.phase == "backward" for op in graph.ops):
        raise GraphError(
            f"Graph {graph.name!r} contains its own backward ops, which cannot be placed; give the forward graph."
        )
    if all(op.replicable for op in graph.ops):
        raise GraphError(f"Graph {graph.name!r} has nothing to place: every op can be computed anywhere.")
