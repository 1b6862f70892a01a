"""Turn rows of measured steps into plans (`plan_step`), and evaluate them as the commands `plan` and `simulate` do.

A row's sizes become a graph (`templates`), its devices a cluster, its parallelism a `Plan`. Everything else has the
defaults of the command `plan`; gradients are summed as in our runtime. The columns of a row are mapped as follows:

    device, n_devices   whole nodes of the stated kind; a plan may use a part of a node
    tp, cp, ep, pp, dp  stages one after the other, in each stage its replicas, in each replica its mesh axes
    layers, vpp         layers are assigned to stages as in Megatron-LM and torchtitan (`templates.shapes.part_starts`)
    precision           fp16, bf16, fp8: mixed precision; bf16 under FSDP that reduces in 16 bits: 16-bit gradients
    recompute           full: every block; selective: attention, where it is not fused; op: torchtitan's policy
                        (`spec.recompute`)
    framework, date     software: whether attention is fused and how, the host, whether the exchange overlaps
    features            the optimizer, 16-bit gradients

Rows that no plan or template expresses raise `InexpressibleError`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshwright.cost import Basis, CostModel
from meshwright.cost.costs import Predictions
from meshwright.planner import RankedPlan, evaluate_plan, predict_step_interval
from meshwright.simulator.many import run_places
from meshwright.spec import (
    Cluster,
    DeviceKind,
    GradientExchange,
    Graph,
    MeshwrightError,
    Node,
    Optimizer,
    Plan,
    Recompute,
    Sharding,
    StagePlan,
    Workload,
    read_recompute,
)
from meshwright.templates import decoder_graph, residual_graph
from meshwright.templates.shapes import ResidualShape, TrainingSetup, part_starts
from meshwright.validation.schedule_sets import SCHEDULE_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from meshwright.cost.software import Software
    from meshwright.spec.precision import Precision
    from meshwright.spec.recompute import Ranges
    from meshwright.validation.step_rows import StepCase

_PRECISIONS: dict[str, Precision] = {
    "fp32": "float32",
    "fp16": "mixed-float16",
    "bf16": "mixed",
    "fp8": "float8",
}
# FLOPs of a forward, a backward and another forward over those of the first two.
_WITH_RECOMPUTE = 4 / 3
_SCORES = "aten.matmul"


class InexpressibleError(MeshwrightError):
    """A row states something that plans or templates cannot express; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A row of measured steps as a plan, with its graph, cluster and software."""

    graph: Graph
    cluster: Cluster
    plan: Plan
    software: Software

    def cost_model(self) -> CostModel:
        """Return the cost model of the row's cluster, precision and software, without the user's measurements."""
        return CostModel(cluster=self.cluster, precision=self.plan.workload.precision, software=self.software)


class StepPrediction(NamedTuple):
    """The prediction for a step: seconds with their 80 % interval, and bytes on the device that needs most.

    ``peak_flops_s``: the seconds that the model's FLOPs, including a recomputed forward, take at the peak rate of all
    devices.
    """

    seconds: float
    low_s: float
    high_s: float
    peak_bytes: int
    reserved_bytes: int
    num_parameters: int
    peak_flops_s: float


Found = StepPrediction | MeshwrightError


def name_obstacle(case: StepCase) -> str:
    """Return what prevents a row from becoming a plan, as a noun phrase; "" if it can become one."""
    if "Adafactor" in case.features:
        return "the optimizer Adafactor"
    if isinstance(case.shape, ResidualShape):
        # A mesh of Alpa's says between which devices its search could split ops, not how it split convolutions.
        split = (("pipeline stages", case.setup.pp), ("tensor parallelism", case.setup.tp))
        return next((f"{name} of a residual network" for name, size in split if size > 1), "")
    if case.shape.experts and not case.shape.experts.gated:
        return "experts without gates"
    if case.setup.dp % case.setup.ep:
        return f"ep = {case.setup.ep} experts' ranks that do not divide dp = {case.setup.dp}"
    if case.shape.root_norm and not case.software.fused_attention:
        return "attention that keeps its scores in a model with rotary positions"
    return ""


def plan_step(case: StepCase) -> PlannedStep:
    """Return the plan of a row. Raises InexpressibleError, which names the obstacle, if no plan can express the row."""
    setup, obstacle = case.setup, name_obstacle(case)
    if obstacle:
        raise InexpressibleError(obstacle)
    graph, cluster = _graph(case), _cluster(case.kind, case.node, setup.num_devices)
    replicas = setup.dp // setup.ep
    # One part of the model per stage and round of chunks; the stages of a round have the same ranks as those of others.
    first_ranks = [stage * replicas for _ in range(setup.chunks) for stage in range(setup.pp)]
    again = _recompute(case, graph)
    plan = Plan(
        model=graph.name,
        graph_hash=graph.content_hash,
        cluster=cluster.name,
        workload=Workload(
            global_batch=setup.microbatch_size * setup.num_microbatches * setup.dp,
            precision=_precision(case),
            optimizer=Optimizer.named("sgd-momentum" if "momentum" in case.features else "adamw"),
        ),
        stages=tuple(
            StagePlan(start=start, stop=stop, ranks=tuple(range(first, first + replicas)))
            for (start, stop), first in zip(_bounds(case, graph), first_ranks, strict=True)
        ),
        num_microbatches=setup.num_microbatches * replicas,
        schedule=SCHEDULE_NAMES[setup.schedule],
        exchange=GradientExchange(
            zero=setup.zero, overlap=case.software.overlap, shard_size=_shard_size(setup, case.node, replicas)
        ),
        sharding=Sharding(
            tensor=setup.tp,
            context=setup.cp,
            expert=setup.ep,
            sequence_parallel=setup.sequence_parallel and setup.tp > 1,
        ),
        recompute=again.ranges,
        keeps=again.keeps,
    )
    return PlannedStep(graph=graph, cluster=cluster, plan=plan, software=case.software)


def evaluate_step(planned: PlannedStep, cost: CostModel | None = None) -> RankedPlan:
    """Return the evaluated plan of a row, with the 80 % interval of its step time.

    ``cost``: a cost model of the same cluster, precision and software, whose cached results are reused. Raises
    PlanError for ops that the sharding cannot split.
    """
    graph, cluster, plan = planned.graph, planned.cluster, planned.plan
    cost = cost or planned.cost_model()
    item = evaluate_plan(plan, graph, cluster, cost)
    return replace(item, interval=predict_step_interval(plan, graph, cluster, cost))


def evaluate_steps(cases: Sequence[StepCase]) -> list[Found]:
    """Return, in the order of ``cases``, the prediction of each case, or the error that prevented it.

    Cases of one model on one kind of device are evaluated by one process and share intermediate results.
    """
    groups: dict[object, list[int]] = {}
    for place in sorted(range(len(cases)), key=lambda place: _order(cases[place])):
        case = cases[place]
        groups.setdefault((case.shape, case.setup.seq, case.kind.name), []).append(place)
    # The first one's time decides whether other processes pay, and long ones begin early.
    parts = sorted(groups.values(), key=lambda part: -_num_instructions(cases[part[0]]))
    found: dict[int, Found] = {}
    results = run_places(lambda index: list(_evaluate_alike([cases[i] for i in parts[index]])), len(parts))
    for part, mine in zip(parts, results, strict=True):
        found.update(zip(part, mine, strict=True))
    return [found[place] for place in range(len(cases))]


def predictions_of(found: Sequence[Found]) -> Predictions:
    """Return the predicted seconds with intervals, shape (n,), of the n results that are not errors."""
    kept = [item for item in found if isinstance(item, StepPrediction)]
    basis: Basis = "transferred"
    return Predictions(
        seconds=np.array([item.seconds for item in kept], np.float64),
        low_s=np.array([item.low_s for item in kept], np.float64),
        high_s=np.array([item.high_s for item in kept], np.float64),
        basis=(basis,) * len(kept),
    )


def _order(case: StepCase) -> tuple[int, ...]:
    """Puts cases with the same sharded graph and the same stages next to each other."""
    setup = case.setup
    return setup.tp, setup.cp, setup.ep, setup.pp, setup.chunks, setup.num_devices, setup.microbatch_size


def _num_instructions(case: StepCase) -> int:
    """About how long the program of a case is."""
    setup = case.setup
    return setup.pp * setup.chunks * setup.num_microbatches + getattr(case.shape, "layers", 1)


def _evaluate_alike(cases: Sequence[StepCase]) -> Iterator[Found]:
    costs: list[CostModel] = []
    for case in cases:
        try:
            planned = plan_step(case)
            asked = planned.cost_model()
            known = [cost for cost in costs if _alike(cost, asked)]
            cost = known[0] if known else asked
            costs += [] if known else [cost]
            item = evaluate_step(planned, cost)
        except MeshwrightError as error:
            yield error
            continue
        assert item.interval is not None
        passes = _WITH_RECOMPUTE if case.setup.recompute == "full" else 1.0
        yield StepPrediction(
            seconds=item.step_time_s,
            low_s=item.interval.low_s,
            high_s=item.interval.high_s,
            peak_bytes=max(item.peak_memory_bytes),
            reserved_bytes=max(item.reserved_bytes),
            num_parameters=planned.graph.num_parameters(),
            peak_flops_s=passes * (item.mfu or 0.0) * item.step_time_s,
        )


def _alike(one: CostModel, other: CostModel) -> bool:
    return (one.precision, one.software, one.cluster) == (other.precision, other.software, other.cluster)


def _graph(case: StepCase) -> Graph:
    shape = case.shape
    if isinstance(shape, ResidualShape):
        return residual_graph(shape)
    return decoder_graph(shape, case.setup.seq, fused_attention=case.software.fused_attention)


def _shard_size(setup: TrainingSetup, node: Node, replicas: int) -> int:
    """Replicas that shard states among each other, under hybrid sharding those of a node; 0 for all."""
    each = node.num_devices // (setup.tp * setup.cp * setup.ep)
    return each if setup.hybrid and 1 < each < replicas and replicas % each == 0 else 0


def _cluster(kind: DeviceKind, node: Node, num_devices: int) -> Cluster:
    """The nodes that hold this number of devices."""
    num_nodes = -(-num_devices // node.num_devices)
    return Cluster(
        name=f"{num_nodes}x{node.num_devices}x{kind.name}",
        device_kinds=(kind,),
        nodes=tuple(replace(node, name=f"node{i}") for i in range(num_nodes)),
    )


def _precision(case: StepCase) -> Precision:
    precision = _PRECISIONS[case.setup.precision]
    if precision == "mixed" and "16-bit gradients" in case.features:
        return "mixed-bf16-gradients"
    return precision


def _bounds(case: StepCase, graph: Graph) -> tuple[tuple[int, int], ...]:
    """Layer ranges of the parts of the model; the first one includes the embedding, the last one the head."""
    shape = case.shape
    if isinstance(shape, ResidualShape):
        return ((0, len(graph.layers)),)
    _, *starts, _ = part_starts(shape, case.setup)
    return tuple(pairwise([0, *(1 + start for start in starts), len(graph.layers)]))


def _recompute(case: StepCase, graph: Graph) -> Recompute:
    match case.setup.recompute:
        case "none":
            return Recompute()
        case "full" | "op" as word:
            return read_recompute(graph, word)
        case "selective":
            return Recompute(recompute_attention(graph))


def recompute_attention(graph: Graph) -> Ranges:
    """Return the ranges of ops from the first to the second matrix product of each attention that is not fused."""
    products = [i for i, op in enumerate(graph.ops) if op.kind.startswith(_SCORES)]
    return tuple((first, second + 1) for first, second in zip(products[::2], products[1::2], strict=True))
