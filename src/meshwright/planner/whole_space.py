"""The whole space (`whole_space`): the choices of all plans that the runtime can execute; a comparison of schedules.

Every choice that the caller gives restricts the space. The others have these values:

    axes         tensor (with and without sequence parallelism), context, expert: sizes that split the graph, in teams
                 within a node; teams with expert parallelism may span nodes
    states       ZeRO 0 to 3, over all replicas or within nodes (HSDP)
    recompute    none, op, full; op only if layers are not compiled
    schedules    1f1b, gpipe, interleaved with 2 or 4 stages per rank; zb-h1 only if layers are not compiled
    devices      all; on an unequal cluster, also all without its slow kinds and nodes, unless their number is given
    offload      nothing; only if no plan fits: optimizer states, parameters and activations in host memory

`compare_schedules` simulates one plan's stages under several schedules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from meshwright.cost import CostModel
from meshwright.cost.memory import backend_of
from meshwright.planner.adoption import adopt_schedule
from meshwright.planner.choices import Choices
from meshwright.planner.evaluate import RankedPlan, evaluate_plans
from meshwright.planner.left_out import idle_sets
from meshwright.planner.problem import divisors
from meshwright.planner.short import shorten
from meshwright.planner.space import list_shardings
from meshwright.program import OwnSchedule, lower_graph, max_in_flight
from meshwright.simulator import Contention
from meshwright.spec import (
    Cluster,
    Graph,
    MeshwrightError,
    Offload,
    OpPlacement,
    Plan,
    Sharding,
    StageSlice,
    Workload,
    recompute_choices,
    slice_graph,
)
from meshwright.spec.exchange import Axis, ZeroStage
from meshwright.spec.offload import ON_DEVICE
from meshwright.spec.recompute import RecomputeName
from meshwright.spec.schedules import BASIC_SCHEDULES
from meshwright.spec.sharding import AXES
from meshwright.spec.teams import team_cluster


def compare_schedules(
    plan: Plan,
    graph: Graph,
    cluster: Cluster,
    schedules: Iterable[str | OwnSchedule],
    *,
    cost: CostModel | None = None,
    contention: Contention = "queued",
) -> tuple[RankedPlan, ...]:
    """Simulate a plan under its own schedule, then under each of ``schedules``; return the predictions in this order.

    Schedules that give the same plan are simulated once. Raises the errors of `adopt_schedule`.
    """
    cost = cost or CostModel(cluster=cluster, precision=plan.workload.precision)
    plans = dict.fromkeys([plan, *(adopt_schedule(plan, schedule, graph, cost) for schedule in schedules)])
    return evaluate_plans(tuple(plans), graph, cluster, cost, contention=contention)


def schedule_rows(items: Sequence[RankedPlan], graph: Graph, cost: CostModel) -> list[dict[str, Any]]:
    """Return one dict per plan of `compare_schedules`.

    Keys: ``schedule``, ``step_s``, ``samples_per_s``, ``bubble_share``, ``in_flight`` (for each stage, the most
    microbatches that a replica holds at once), ``activations_bytes`` (the largest total of these microbatches on a
    rank); of the fullest rank ``peak_bytes`` and ``limit_bytes``; ``fits``.
    """
    return [_row(item, graph, cost) for item in items]


def _row(item: RankedPlan, graph: Graph, cost: CostModel) -> dict[str, Any]:
    plan, rank = item.plan, item.fullest_rank
    stages = slice_graph(graph, plan.bounds)
    in_flight = [max_in_flight(plan, stage.index) if stage.has_backward else 1 for stage in stages]
    kept = [count * _kept_bytes(plan, graph, stage, cost) for count, stage in zip(in_flight, stages, strict=True)]
    return {
        "schedule": plan.schedule,
        "step_s": item.step_time_s,
        "samples_per_s": item.samples_per_s,
        "bubble_share": item.bubble_fraction,
        "in_flight": in_flight,
        "activations_bytes": max(sum(kept[s] for s in plan.stages_of(rank)) for rank in range(plan.num_ranks)),
        "peak_bytes": item.peak_memory_bytes[rank],
        "limit_bytes": item.memory_limit_bytes[rank],
        "fits": item.fits,
    }


def _kept_bytes(plan: Plan, graph: Graph, stage: StageSlice, cost: CostModel) -> int:
    """Return the bytes that a microbatch keeps on a device of a stage from its forward to its backward."""
    device = backend_of(cost.cluster.device_kind(plan.stages[stage.index].ranks[0]))
    is_away = plan.offload.activations == "host"
    memory = cost.stage_memory(
        graph, stage, plan.microbatch_size, plan.workload, device=device, activations_away=is_away
    )
    return memory.microbatch_bytes


# A size of an axis is used if it leaves at most this share of the work at the previous size: half the work where all
# ops are split, nearly all of it where none is.
_LEAST_GAIN = 0.95
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1")
# Compiled layers compute all gradients in one backward, and are recomputed as a whole.
COMPILED_SCHEDULES = ("1f1b", "gpipe", "interleaved")
COMPILED_RECOMPUTE: tuple[RecomputeName, ...] = ("none", "full")
RECOMPUTE: tuple[RecomputeName, ...] = ("none", "op", "full")
ZERO: tuple[ZeroStage, ...] = (0, 1, 2, 3)
# Each doubling halves the bubble and doubles the transfers (Narayanan et al. 2021, section 2.2).
NUM_CHUNKS = (2, 4)
# The largest number of devices for expert parallelism, as in DeepSeek-V3's training (technical report, 2024, section
# 3.2).
MAX_EXPERT_RANKS = 64
# Cheaper ways first.
LAST_RESORTS = (
    Offload(optimizer="host"),
    Offload(activations="host"),
    Offload(optimizer="host", activations="host"),
    Offload(optimizer="host", parameters="host"),
    Offload(optimizer="host", parameters="host", activations="host"),
)


def whole_space(
    graph: Graph,
    cluster: Cluster,
    workload: Workload,
    *,
    compiled: bool = False,
    tensor: Sequence[int] | None = None,
    sequence_parallel: bool | None = None,
    context: Sequence[int] | None = None,
    expert: Sequence[int] | None = None,
    placements: tuple[OpPlacement, ...] = (),
    zero: Sequence[ZeroStage] | None = None,
    shard_sizes: Sequence[int] | None = None,
    recompute: Sequence[str] | None = None,
    offload: Sequence[Offload] | None = None,
    schedules: Sequence[str] | None = None,
    num_chunks: Sequence[int] | None = None,
    num_devices: Sequence[int] = (),
    idle: Sequence[tuple[int, ...]] | None = None,
    num_stages: Sequence[int] = (),
    microbatch_sizes: Sequence[int] = (),
) -> Choices:
    """Return the choices of a search: the given values, and all useful values of the choices that are not given.

    A choice is not given if it is None or empty; the values of these are listed at the module. ``graph`` may be that of
    any microbatch size. Raises PlanError for given values that exclude each other, as `list_shardings` and `Choices`
    do.
    """
    training = workload.kind == "training"
    if zero is None:
        shares = any(shard_sizes or ()) or any(item.parameters == "host" for item in offload or ())
        zero = ((1, 2, 3) if any(shard_sizes or ()) else (3,) if shares else ZERO) if training else (0,)
    if shard_sizes is None:
        shard_sizes = _sizes_within_nodes(cluster) if any(zero) else (0,)
    if recompute is None:
        words = (COMPILED_RECOMPUTE if compiled else RECOMPUTE) if training else ("none",)
        # A model may have no repeated blocks, and blocks may have no op that is kept, so that words mean the same.
        known = recompute_choices(graph)
        named = {known[word]: word for word in ("op", "full", "none")}
        recompute = tuple(word for word in words if named[known[word]] == word)
    if schedules is None:
        schedules = (COMPILED_SCHEDULES if compiled else SCHEDULES) if training else BASIC_SCHEDULES
    if num_chunks is None:
        num_chunks = NUM_CHUNKS
    return Choices(
        num_devices=tuple(num_devices),
        idle=tuple(idle) if idle is not None else idle_sets(cluster, workload) if not num_devices else ((),),
        shardings=tuple(
            _shardings(graph, cluster, tensor, context, expert, sequence_parallel, placements, num_devices)
        ),
        zero=tuple(zero),
        shard_sizes=tuple(shard_sizes),
        recompute=tuple(recompute),
        offload=(ON_DEVICE,) if offload is None else tuple(offload),
        last_resorts=tuple(_last_resorts(cluster, zero)) if offload is None and training else (),
        microbatch_sizes=tuple(microbatch_sizes),
        schedules=tuple(schedules),
        num_stages=tuple(num_stages),
        num_chunks=tuple(num_chunks),
    )


def _sizes_within_nodes(cluster: Cluster) -> tuple[int, ...]:
    """Return the shard sizes: all replicas (0), or divisors of a node's devices if there are several nodes."""
    sizes = {node.num_devices for node in cluster.nodes if node.num_devices}
    if len(cluster.nodes) == 1 or len(sizes) > 1:
        return (0,)
    return (0, *(size for size in divisors(sizes.pop()) if size > 1))


def _last_resorts(cluster: Cluster, zero: Sequence[int]) -> Iterator[Offload]:
    steps = all(node.host_memory_bandwidth_bytes_per_s > 0 for node in cluster.nodes)
    for away in LAST_RESORTS:
        if (away.optimizer == "device" or steps) and (away.parameters == "device" or 3 in zero):
            yield away


def _shardings(
    graph: Graph,
    cluster: Cluster,
    tensor: Sequence[int] | None,
    context: Sequence[int] | None,
    expert: Sequence[int] | None,
    sequence_parallel: bool | None,
    placements: tuple[OpPlacement, ...],
    num_devices: Sequence[int],
) -> Iterator[Sharding]:
    """Yield all combinations of the given sizes, and of the useful sizes of axes that are not given."""
    given: dict[Axis, Sequence[int] | None] = {"tensor": tensor, "context": context, "expert": expert}
    if placements or (sequence_parallel is not None and None not in given.values()):
        yield from list_shardings(
            tensor=tensor or (1,),
            context=context or (1,),
            expert=expert or (1,),
            sequence_parallel=bool(sequence_parallel),
            placements=placements,
        )
        return
    short = shorten(graph).graph
    sizes = {axis: value or tuple(_useful(short, cluster, axis)) for axis, value in given.items()}
    for combined in product(*(dict.fromkeys(sizes[axis]) for axis in AXES)):
        plain = Sharding(tensor=combined[0], context=combined[1], expert=combined[2])
        is_own = all(given[axis] is not None for axis, size in zip(AXES, combined, strict=True) if size > 1)
        if not is_own and not (_are_teams(cluster, plain) and _is_divided(num_devices, plain.width)):
            continue
        if plain.tensor == 1 or not sequence_parallel:
            yield plain
        if plain.tensor > 1 and sequence_parallel is not False:
            apart = replace(plain, sequence_parallel=True)
            if sequence_parallel or _differs(short, plain, apart):
                yield apart


def _useful(short: Graph, cluster: Cluster, axis: Axis) -> Iterator[int]:
    """Yield sizes of an axis that leave a device less to compute, or to hold, than the sizes before; 1 first."""
    within = min(node.num_devices for node in cluster.nodes if node.num_devices)
    most = min(cluster.num_ranks, MAX_EXPERT_RANKS) if axis == "expert" else within
    least = _burden(short, axis)
    yield 1
    for size in divisors(most)[1:]:
        with suppress(MeshwrightError):
            burden = _burden(lower_graph(short, _alone(axis, size), ()), axis)
            if burden < least * _LEAST_GAIN:
                least = burden
                yield size


def _alone(axis: Axis, size: int) -> Sharding:
    if axis == "tensor":
        return Sharding(tensor=size)
    return Sharding(context=size) if axis == "context" else Sharding(expert=size)


def _burden(graph: Graph, axis: Axis) -> float:
    """Return the quantity that an axis should reduce: parameters for expert, FLOPs for other axes."""
    if axis == "expert":
        return sum(graph.tensors[i].num_elements(1) for i in graph.parameters)
    return graph.total_flops.at(1)


def _are_teams(cluster: Cluster, sharding: Sharding) -> bool:
    """Return whether teams lie within nodes, as required for tensor and context, or experts span whole nodes."""
    within = min(node.num_devices for node in cluster.nodes if node.num_devices)
    if sharding.tensor * sharding.context > within or (sharding.expert == 1 and sharding.width > within):
        return False
    try:
        team_cluster(cluster, sharding.width)
    except MeshwrightError:
        return False
    return True


def _is_divided(num_devices: Sequence[int], width: int) -> bool:
    """Return whether teams can be formed of a given number of devices, or no number is given."""
    return not num_devices or any(count % width == 0 for count in num_devices)


def _differs(short: Graph, one: Sharding, other: Sharding) -> bool:
    """Return whether a device's graphs differ under two shardings."""
    try:
        return lower_graph(short, one, ()) != lower_graph(short, other, ())
    except MeshwrightError:
        return False
