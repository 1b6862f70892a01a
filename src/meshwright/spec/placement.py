"""Placement: the rank of every op of a graph, as a JSON document like a plan; its stages (`slice_stages`).

A placement is a list of **stages**. A stage is a set of ops that one rank computes without communication in between:
the values that it reads from other ranks arrive before it starts, and the values that it sends leave when it ends. Each
stage reads only results of earlier stages in the list, so ranks that run their stages in this order cannot deadlock.
Unlike the stages of a `Plan`, these are arbitrary sets of ops, a rank may have any number of them, and they form a
directed acyclic graph: branches of a model run in parallel.

Ops that are `replicable` belong to no stage: every rank that needs their results computes them. If ops on several ranks
read a parameter, its gradients are summed over these ranks.

A placement with ``degrees`` is for a graph whose layers are split. `planner.methods.flexflow` divides the model's ops
into layers and splits each layer along each of its dims into the given number of parts; each part is an op.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from meshwright.spec.errors import GraphMismatchError, PlanError
from meshwright.spec.html import Printer, html_table
from meshwright.spec.made_with import UNKNOWN, MadeWith
from meshwright.spec.plan import MAX_MICROBATCH_STAGES, Plan, check_plan
from meshwright.spec.precision import upgraded_precision
from meshwright.spec.program import MAX_IDLE_RANKS
from meshwright.spec.slices import Channel, StageSlice, slice_graph
from meshwright.spec.units import format_count
from meshwright.spec.workload import Workload

if TYPE_CHECKING:
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.graph import Graph


# The number of ranks that a message lists.
_SHOWN_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStage:
    """A stage of a placement: the ops (ids, ascending) that ``rank`` computes without communication in between."""

    rank: int
    ops: tuple[int, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The stage's rank as a tuple: placed stages have no replicas."""
        return (self.rank,)

    @property
    def turns(self) -> tuple[int, ...]:
        """The replica of each microbatch in turn (as in `StagePlan`): always replica 0."""
        return (0,)

    def rank_of(self, microbatch: int) -> int:  # noqa: ARG002 - the same rank for all
        """Return the rank that computes a microbatch: the stage's rank for all of them."""
        return self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The ops of one graph on the devices of one cluster, for one workload; rank r is device r.

    Each of ``stages`` reads only results of earlier stages. ``degrees`` has a row for each layer of the model: the
    number of parts along each of its dims. It is empty if ops are not split; a graph with split layers is valid for one
    microbatch size only. ``model``, ``cluster``, ``graph_hash``, ``model_sizes`` and ``made_with`` are as in a `Plan`.
    Raises PlanError for a placement that cannot match any graph.
    """

    model: str
    graph_hash: str
    cluster: str
    workload: Workload
    stages: tuple[PlacedStage, ...]
    num_microbatches: int = 1
    degrees: tuple[tuple[int, ...], ...] = ()
    model_sizes: tuple[tuple[str, int], ...] = ()
    made_with: MadeWith = UNKNOWN

    SCHEMA_VERSION: ClassVar[int] = 2
    upgraded = staticmethod(upgraded_precision)

    def __post_init__(self) -> None:
        _check_parts(self)

    @property
    def microbatch_size(self) -> int:
        """Number of samples in one microbatch."""
        return self.workload.global_batch // self.num_microbatches

    @property
    def num_ranks(self) -> int:
        """Number of ranks up to the highest one that computes; lower ranks may be idle."""
        return 1 + max(stage.rank for stage in self.stages)

    @property
    def num_tracks(self) -> int:
        """Number of ranks in a timeline, as `Plan.num_tracks`."""
        return self.num_ranks

    @property
    def used_share(self) -> float:
        """The share of a step's samples whose gradients are used, as `Plan.used_share`."""
        return 1.0

    @property
    def num_devices(self) -> int:
        """Number of devices that take part: one per rank."""
        return self.num_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the indices of a rank's stages, in the order in which the rank runs them."""
        return tuple(index for index, stage in enumerate(self.stages) if stage.rank == rank)

    def describe(self) -> str:
        """Return one line for people: ``31 ops on 2 ranks (20, 11), 5 stages, 1 microbatch of 8``."""
        counts = [sum(len(self.stages[index].ops) for index in self.stages_of(r)) for r in range(self.num_ranks)]
        shown = ", ".join(map(str, counts[:_SHOWN_RANKS])) + (", …" if len(counts) > _SHOWN_RANKS else "")
        microbatches = format_count(self.num_microbatches, "microbatch", "microbatches")
        return (
            f"{format_count(sum(counts), 'op')} on {format_count(self.num_ranks, 'rank')} ({shown}), "
            f"{format_count(len(self.stages), 'stage')}, {microbatches} of {self.microbatch_size}"
        )

    def _repr_html_(self) -> str:
        rows = ((index, stage.rank, len(stage.ops)) for index, stage in enumerate(self.stages))
        return html_table(self._summary(), ("stage", "rank", "ops"), rows, len(self.stages))

    def _repr_pretty_(self, printer: Printer, cycle: bool) -> None:  # noqa: ARG002 - IPython's signature
        printer.text(self._summary())

    def _summary(self) -> str:
        return f"Placement of {self.model} on {self.cluster}: {self.describe()}"


def check_fit(plan: Plan | Placement, graph: Graph, cluster: Cluster | None = None) -> None:
    """Raise PlanError unless a plan or a placement matches the graph and, if given, the cluster."""
    if isinstance(plan, Placement):
        check_placement(plan, graph, cluster)
    else:
        check_plan(plan, graph, cluster)


def check_placement(placement: Placement, graph: Graph, cluster: Cluster | None = None) -> None:
    """Raise PlanError unless the placement matches the graph (hash, ops, order, batch) and, if given, the cluster."""
    if placement.graph_hash != graph.content_hash:
        raise GraphMismatchError(
            f"The placement was made for graph {placement.graph_hash} of {placement.model!r}, but this graph is "
            f"{graph.content_hash} ({graph.name!r}). "
            + (
                "The placement belongs to the model split into parts, as `meshwright run` makes them, or the model has "
                "changed. Plan again."
                if placement.degrees
                else "The model, its shapes or the loss changed since; place it again."
            )
        )
    graph.check_batch_size(placement.microbatch_size)
    if placement.workload.kind != graph.mode:
        raise PlanError(
            f"The placement is for {placement.workload.kind}, but the graph was captured for {graph.mode}; capture it "
            "in that mode."
        )
    if any(op.phase == "backward" for op in graph.ops):
        raise PlanError(
            f"Graph {graph.name!r} holds its own backward, whose ops cannot be placed; place the graph of the model "
            "alone."
        )
    _check_ops(placement, graph)
    if cluster is not None and placement.num_ranks > cluster.num_ranks:
        raise PlanError(
            f"The placement uses rank {placement.num_ranks - 1}, but cluster {cluster.name!r} has {cluster.num_ranks} "
            "devices. Give a larger cluster or place again for this one."
        )


def _check_ops(placement: Placement, graph: Graph) -> None:
    """Check that every op occurs once, stages follow those that they read, and random ops keep the graph's order."""
    stage_of: dict[int, int] = {}
    for index, stage in enumerate(placement.stages):
        for op in stage.ops:
            if not 0 <= op < len(graph.ops) or op in stage_of or graph.ops[op].replicable:
                what = "a second time" if op in stage_of else "which the graph lacks or every rank computes for itself"
                raise PlanError(f"Stage {index} of the placement names op {op}, {what}. Place the graph again.")
            stage_of[op] = index
    missing = [i for i, op in enumerate(graph.ops) if not op.replicable and i not in stage_of]
    if missing:
        raise PlanError(
            f"The placement leaves out {len(missing)} ops of the graph, the first is {graph.ops[missing[0]].name!r}; "
            "every op needs a rank. Place the graph again."
        )
    maker = {tensor: op for op in stage_of for tensor in graph.ops[op].outputs}
    latest_random = 0
    for op in sorted(stage_of):
        late = [i for i in graph.ops[op].inputs if i in maker and stage_of[maker[i]] > stage_of[op]]
        if late:
            raise PlanError(
                f"Op {graph.ops[op].name!r} is in stage {stage_of[op]} of the placement, but reads "
                f"{graph.tensors[late[0]].name!r}, which a later stage makes. Place the graph again."
            )
        if graph.ops[op].random:
            if stage_of[op] < latest_random:
                raise PlanError(
                    f"Op {graph.ops[op].name!r} draws random numbers in an earlier stage of the placement than an op "
                    "that precedes it in the graph, so the numbers would differ from those of one process. Place the "
                    "graph again."
                )
            latest_random = stage_of[op]


def _check_parts(placement: Placement) -> None:
    if not placement.stages:
        raise PlanError("The placement has no stages; expected at least one.")
    highest = len(placement.stages) + MAX_IDLE_RANKS
    for index, stage in enumerate(placement.stages):
        if not 0 <= stage.rank < highest:
            raise PlanError(f"Stage {index} of the placement is on rank {stage.rank}; expected 0 to {highest - 1}.")
        if not stage.ops or any(a >= b for a, b in zip(stage.ops, stage.ops[1:], strict=False)):
            raise PlanError(
                f"Stage {index} of the placement has ops {list(stage.ops[:8])}; expected at least one, ascending. "
                "Place the graph again."
            )
    batch, count = placement.workload.global_batch, placement.num_microbatches
    if count < 1 or batch % count:
        raise PlanError(
            f"A global batch of {batch} samples does not divide into {count} microbatches. "
            f"Choose a number of microbatches that divides {batch}."
        )
    if count * len(placement.stages) > MAX_MICROBATCH_STAGES:
        raise PlanError(
            f"{count} microbatches in {len(placement.stages)} stages were given; programs are limited to "
            f"{MAX_MICROBATCH_STAGES} (microbatches times stages). Choose larger microbatches."
        )


_Pair = tuple[int, int]


def slice_stages(graph: Graph, plan: Plan | Placement) -> tuple[StageSlice, ...]:
    """Return the ops, inputs and outputs of each stage of a plan or of a placement.

    Raises PlanError if the plan or placement does not match the graph.
    """
    return slice_placement(graph, plan) if isinstance(plan, Placement) else slice_graph(graph, plan.bounds)


# The result is the same `StageSlice`s that cut layers have. Rules, in addition to those of `slices`:
#
# - A tensor is sent to another rank once, from its maker to the first stage there that reads it. That stage passes it
#   to later ones of its rank, which costs nothing; gradients return the same way, so they are summed on each rank
#   before they are sent.
# - A replicable op is computed by the first stage of every rank that needs it, and passed on.
# - A gradient passes to each value on which the loss depends in a way that autograd follows, and only from stages that
#   have a backward themselves.
@lru_cache(maxsize=64)
def slice_placement(graph: Graph, placement: Placement) -> tuple[StageSlice, ...]:
    """Return the ops, inputs and outputs of each stage of a placement.

    Raises PlanError if the placement does not match the graph.
    """
    check_placement(placement, graph)
    needs, carried = _Walk(graph, placement).run()
    random_stages = [index for index, need in enumerate(needs) if any(graph.ops[op].random for op in need.ops)]
    rng = set(itertools.pairwise(random_stages))
    for pair in rng:
        carried.setdefault(pair, [])
    gradients, differentiated = _gradients(graph, needs, carried)
    channels = [
        Channel(
            source=source,
            target=target,
            tensors=tuple(sorted(tensors)),
            gradients=tuple(sorted(gradients[source, target])),
            carries_rng=(source, target) in rng,
        )
        for (source, target), tensors in sorted(carried.items())
    ]
    incoming, outgoing = defaultdict(list), defaultdict(list)
    for channel in channels:
        incoming[channel.target].append(channel)
        outgoing[channel.source].append(channel)
    return tuple(
        StageSlice(
            index=index,
            ops=tuple(sorted(need.ops)),
            parameters=_of_role(graph, need, "parameter"),
            buffers=_of_role(graph, need, "buffer"),
            inputs=tuple(sorted(need.inputs)),
            outputs=tuple(need.outputs),
            incoming=tuple(incoming[index]),
            outgoing=tuple(outgoing[index]),
            draws_random=index in random_stages,
            has_backward=index in differentiated,
        )
        for index, need in enumerate(needs)
    )


@dataclass(slots=True)
class _Need:
    ops: set[int]
    state: set[int] = field(default_factory=set)
    inputs: set[int] = field(default_factory=set)
    outputs: list[int] = field(default_factory=list)


class _Walk:
    """Visits the stages in order and notes where each gets the values that it reads."""

    def __init__(self, graph: Graph, placement: Placement) -> None:
        self._graph = graph
        self._stages = placement.stages
        self._producer = {tensor: op for op, item in enumerate(graph.ops) for tensor in item.outputs}
        self._maker = {
            tensor: index
            for index, stage in enumerate(placement.stages)
            for op in stage.ops
            for tensor in graph.ops[op].outputs
        }
        # For each rank: the first stage that has a tensor, made there or received.
        self._held: dict[int, dict[int, int]] = defaultdict(dict)

    def run(self) -> tuple[list[_Need], dict[_Pair, list[int]]]:
        """The needs of all stages, and the tensors that pass between each two."""
        needs = [_Need(ops=set(stage.ops)) for stage in self._stages]
        carried: dict[_Pair, list[int]] = defaultdict(list)
        for tensor in dict.fromkeys(self._graph.outputs):
            # Outputs that no stage makes (inputs, state, replicable results) are yielded by the last stage.
            needs[self._maker.get(tensor, len(needs) - 1)].outputs.append(tensor)
        for index, need in enumerate(needs):
            todo = [*(i for op in sorted(need.ops) for i in self._graph.ops[op].inputs), *need.outputs]
            self._find(index, need, todo, carried)
        return needs, carried

    def _find(self, index: int, need: _Need, todo: list[int], carried: dict[_Pair, list[int]]) -> None:
        held, seen = self._held[self._stages[index].rank], set()
        for tensor in (i for op in need.ops for i in self._graph.ops[op].outputs):
            held[tensor] = index
        while todo:
            tensor = todo.pop()
            if tensor in seen:
                continue
            seen.add(tensor)
            role = self._graph.tensors[tensor].role
            if role in ("parameter", "buffer", "constant"):
                need.state.add(tensor)
            elif role == "input":
                need.inputs.add(tensor)
            elif tensor in held:
                if held[tensor] != index:
                    carried[held[tensor], index].append(tensor)
            elif tensor in self._maker:
                carried[self._maker[tensor], index].append(tensor)
                held[tensor] = index
            else:
                op = self._producer[tensor]
                need.ops.add(op)
                held.update(dict.fromkeys(self._graph.ops[op].outputs, index))
                todo += self._graph.ops[op].inputs


def _gradients(
    graph: Graph, needs: list[_Need], carried: dict[_Pair, list[int]]
) -> tuple[dict[_Pair, list[int]], set[int]]:
    """The tensors whose gradients return between each two stages, and the stages that have a backward."""
    found: dict[_Pair, list[int]] = defaultdict(list)
    differentiated: set[int] = set()
    if graph.mode != "training":
        return found, differentiated
    flowing = flowing_ops(graph)
    leaving: dict[int, list[int]] = defaultdict(list)
    arriving: dict[int, list[int]] = defaultdict(list)
    for source, target in carried:
        leaving[source].append(target)
        arriving[target].append(source)
    loss = graph.outputs[0] if graph.has_loss else None
    for index in reversed(range(len(needs))):
        returned = {tensor for target in leaving[index] for tensor in found[index, target]}
        yields_loss = loss in needs[index].outputs and graph.tensors[graph.outputs[0]].requires_grad
        if not returned and not yields_loss:
            continue
        differentiated.add(index)
        wanted = returned | {i for op in needs[index].ops if op in flowing for i in graph.ops[op].inputs}
        for source in arriving[index]:
            here = [i for i in carried[source, index] if i in wanted and graph.tensors[i].requires_grad]
            found[source, index] += here
    return found, differentiated


def flowing_ops(graph: Graph) -> set[int]:
    """Return the ids of the ops through which a gradient of the loss may pass.

    Tensors of one storage count as one, because the gradient of a tensor written in place is that of the written value.
    """
    tensors, flowing = graph.tensors, set()
    reached = {tensors[graph.outputs[0]].storage} if graph.has_loss and graph.outputs else set()
    for index in reversed(range(len(graph.ops))):
        op = graph.ops[index]
        if any(tensors[i].requires_grad and tensors[i].storage in reached for i in op.outputs):
            flowing.add(index)
            reached.update(tensors[i].storage for i in op.inputs if tensors[i].requires_grad)
    return flowing


def _of_role(graph: Graph, need: _Need, role: str) -> tuple[int, ...]:
    return tuple(tensor for tensor in sorted(need.state) if graph.tensors[tensor].role == role)
