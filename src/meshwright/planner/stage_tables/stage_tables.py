"""Seconds and bytes of every possible stage i:j (layers i to j - 1) at one microbatch size (`make_tables`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import CostModel, StageMemory
from meshwright.cost.host_costs import HostCosts
from meshwright.cost.memory import Backend, as_kept, backend_of, weigh_tensors
from meshwright.cost.memory.ledger import BACKWARD_FIRST, BACKWARD_LATER, FORWARD, NUM_MOMENTS, STEP
from meshwright.planner.stage_tables.structure import Integers, Structure
from meshwright.spec import RNG_STATE_BYTES, Cluster, DeviceKind, Graph, Offload, StageSlice, Workload, slice_graph
from meshwright.spec.offload import ON_DEVICE
from meshwright.spec.units import PICOSECONDS_PER_SECOND

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageBytesTable:
    """Bytes of all stages i:j, whole numbers as float64, shape (L, L + 1).

    ``static``: held all the time, including ``parameters`` and ``states`` (of the optimizer). Per microbatch in flight:
    ``flight`` (saved and received) and ``leaving`` (sent to later stages). ``inputs``: of one microbatch, held for the
    whole step. ``exchange``: gradients to reduce. ``most`` (2, L, L + 1, 4) is described in `SlicingProblem`; only
    ``most`` and ``leaving`` change in `settle`. ``crossing_forward`` and ``crossing_backward`` (L,): bytes that one
    microbatch sends over the boundary before layer i.
    """

    static: Floats
    parameters: Floats
    states: Floats
    flight: Floats
    leaving: Floats
    inputs: Floats
    exchange: Floats
    most: Floats
    crossing_forward: Floats
    crossing_backward: Floats

    def settle(self, i: int, j: int, memory: StageMemory, *, exchanges: bool) -> None:
        """Replace the lower bound of stage i:j by its exact memory; ``exchanges``: it reduces gradients."""
        extra = memory.microbatch_bytes - self.flight[i, j] - self.leaving[i, j]
        self.leaving[i, j] += extra
        self.most[int(exchanges), i, j] = memory.most_bytes()


# Bytes are those at the peak of a step. Static memory, what a microbatch keeps and what crosses boundaries are exact,
# found by rectangles (`structure`). What computations need in addition (`cost.memory.ledger`) is known exactly only
# from a walk through the stage's ops. Until a stage is walked, it has a lower bound from walks through single layers l,
#
#     forward      max over l of  saved(i, l) + F(l)  + received(i, j)
#     backward     max over l of  B(l) - received(l) + Σ over the layers m behind l of their largest change
#
# where a layer behind frees what it keeps or received and, in a first backward without a gradient reduction, leaves its
# gradients; with one they are in buckets. Bytes that only the single layer has are left out. If activations are in host
# memory, a microbatch keeps what the last layer saved, saved(i, l) is 0, and only the backward of the last layer
# counts. So no stage that fits is ever excluded, and `settle` replaces bounds by exact figures for the stages of plans
# that turn out not to fit.
def stage_bytes(
    graph: Graph,
    structure: Structure,
    batch_size: int,
    workload: Workload,
    cost: CostModel,
    *,
    activations_away: bool = False,
) -> StageBytesTable:
    """Return the bytes of all stages at a microbatch size; they are exact or lower bounds.

    ``structure`` must be that of `as_kept_least` of the graph. ``activations_away``: activations are in host memory
    between forward and backward (`cost.memory.away`). Raises GraphError for a batch size that the graph does not
    support.
    """
    graph.check_batch_size(batch_size)
    graph = as_kept_least(graph, workload, cost.cluster)
    training = workload.kind == "training"
    sizes, gradients, states = weigh_tensors(graph, batch_size, workload)
    layers = slice_graph(graph, [(layer, layer + 1) for layer in range(structure.num_layers)])
    # If nothing requires a gradient, a microbatch is held only while it is computed.
    starts = np.cumsum([0, *(layer.has_backward for layer in layers)])
    kept = (starts[None, :] > starts[:-1, None]).astype(np.int64)
    received, saved = structure.received.table(sizes), structure.saved.table(sizes) * kept
    known = None if activations_away else saved
    most = _lower_bounds(graph, layers, batch_size, workload, cost, sizes, gradients, known, received)
    if activations_away:
        # What the last layer saved stays; the rest is in host memory when a later layer computes.
        saved = np.append(0, saved.diagonal(1)) * kept
    crossing_forward = [_sum(sizes, tensors) for tensors in structure.crossing]
    for boundary in range(structure.num_layers):
        if structure.random and structure.random[0] < boundary <= structure.random[-1]:
            crossing_forward[boundary] += RNG_STATE_BYTES
    needing = [[i for i in tensors if training and graph.tensors[i].requires_grad] for tensors in structure.crossing]
    parameters, held = structure.parameters.table(sizes), structure.parameters.table(states)
    static = parameters + held + structure.buffers.table(sizes)
    return StageBytesTable(
        static=static.astype(np.float64),
        parameters=parameters.astype(np.float64),
        states=held.astype(np.float64),
        flight=((saved + received) * kept).astype(np.float64),
        leaving=(structure.sent.table(sizes) * kept).astype(np.float64),
        inputs=structure.inputs.table(sizes).astype(np.float64),
        exchange=structure.parameters.table(gradients).astype(np.float64),
        most=most,
        crossing_forward=np.array(crossing_forward, np.float64),
        crossing_backward=np.array([_sum(sizes, tensors) for tensors in needing], np.float64),
    )


def as_kept_least(graph: Graph, workload: Workload, cluster: Cluster) -> Graph:
    """Return the graph with the tensors that are kept for the backward on GPUs, or on CPUs if the cluster has no GPU.

    Of the two, GPUs keep less, so the bytes are lower bounds on mixed clusters.
    """
    return as_kept(graph, workload.numbers, _least(cluster))


def _least(cluster: Cluster) -> Backend:
    """Return the device type that keeps the least; GPUs keep less than CPUs."""
    return "cuda" if any(backend_of(kind) == "cuda" for kind in cluster.device_kinds) else "cpu"


def weigh_alone(
    graph: Graph,
    stage: StageSlice,
    batch_size: int,
    workload: Workload,
    cost: CostModel,
    *,
    exchanges: bool,
    activations_away: bool = False,
) -> StageMemory:
    """Return the memory of a stage from a walk through its ops, on the device type of `as_kept_least`.

    ``exchanges``: the stage reduces gradients, which lie in buckets.
    """
    device = _least(cost.cluster)
    trained = frozenset(i for i in stage.parameters if graph.tensors[i].requires_grad)
    bucketed = trained if exchanges else frozenset()
    return cost.stage_memory(
        graph,
        stage,
        batch_size,
        workload,
        device=device,
        bucketed=bucketed,
        activations_away=activations_away,
    )


def _lower_bounds(
    graph: Graph,
    layers: Sequence[StageSlice],
    batch_size: int,
    workload: Workload,
    cost: CostModel,
    sizes: Integers,
    gradients: Integers,
    saved: Integers | None,
    received: Integers,
) -> Floats:
    """Return ``most`` of all stages from walks through single layers, shape (2, L, L + 1, 4).

    ``saved`` is None if activations are in host memory.
    """
    alone = [weigh_alone(graph, layer, batch_size, workload, cost, exchanges=True) for layer in layers]
    count = len(layers)
    fullest = np.stack([memory.most_bytes() for memory in alone])
    brought = np.array([memory.received_bytes for memory in alone], np.float64)
    keeps = np.array([memory.microbatch_bytes for memory in alone], np.float64)
    users = np.bincount([i for layer in layers for i in layer.parameters], minlength=len(gradients))
    own = np.array([sum(int(gradients[i]) for i in layer.parameters if users[i] == 1) for layer in layers], np.float64)
    held = np.array([sum(int(gradients[i]) for i in layer.parameters) for layer in layers], np.float64)
    # Gradients of a value that come back from several stages are summed; within one stage perhaps not.
    summed = np.array([_sum(sizes, sent_to_several(layer)) for layer in layers], np.float64)
    most = np.zeros((2, count, count + 1, NUM_MOMENTS))
    inside = fullest[:, FORWARD] - brought
    before = saved[:, :-1] if saved is not None else np.zeros((count, count), np.int64)
    most[:, :, 1:, FORWARD] = received[:, 1:] + _running_most(before + inside[None, :])
    most[:, :, 1:, STEP] = _running_most(np.broadcast_to(fullest[:, STEP], (count, count)))
    for exchanges, moment, change, shared in (
        (0, BACKWARD_FIRST, own - keeps, held - own),
        (1, BACKWARD_FIRST, -keeps, held - own),
        (0, BACKWARD_LATER, -keeps, 0.0),
        (1, BACKWARD_LATER, -keeps, 0.0),
    ):
        behind = np.append(0.0, np.cumsum(change))
        value = fullest[:, moment] - brought - summed - shared - behind[1:]
        bound = behind[None, 1:] + _running_most(np.broadcast_to(value, (count, count)))
        if saved is None:
            # The last layer's backward comes first; the others depend on what is fetched for them.
            bound = np.broadcast_to(value + behind[1:], (count, count))
        most[exchanges, :, 1:, moment] = np.maximum(bound, 0.0)
    return most


def sent_to_several(layer: StageSlice) -> list[int]:
    """Return the tensors that a layer sends to several other layers, each of which returns a gradient."""
    counts = Counter(i for channel in layer.outgoing for i in channel.gradients)
    return [tensor for tensor, count in counts.items() if count > 1]


def _running_most(values: Floats) -> Floats:
    """Return the maxima of values[i, i..j] as entries [i, j], shape (L, L)."""
    count = len(values)
    reached = np.where(np.tri(count, k=-1, dtype=bool), -np.inf, values)
    most: Floats = np.maximum.accumulate(reached, axis=1)
    return np.where(np.isfinite(most), most, 0.0)


def _sum(sizes: Integers, tensors: Sequence[int]) -> int:
    return int(sizes[list(tensors)].sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSecondsTable:
    """Seconds of all stages i:j on one device kind, shape (L, L + 1).

    ``total``: forward and backward of one microbatch. ``backward``: of one microbatch; ``accumulate`` is the part of it
    that adds up gradients, which the first microbatch of a step does not need. ``optimizer``: one optimizer step.
    """

    total: Floats
    backward: Floats
    accumulate: Floats
    optimizer: Floats


# Seconds are whole picoseconds internally, so that stages of equal layers are exactly equal. One stage takes
#
#     t(i, j) = Σ over its ops of (forward + backward + accumulate) + overhead per instruction
#
# ``accumulate`` is charged to every microbatch, although the first of a step does not pay it. Instructions are a
# forward and a backward, and in every stage but the first one receiving and one returning.
def stage_seconds(
    graph: Graph,
    structure: Structure,
    batch_size: int,
    workload: Workload,
    cost: CostModel,
    kind: DeviceKind,
    offload: Offload = ON_DEVICE,
) -> StageSecondsTable:
    """Return the seconds of all stages i:j at a microbatch size on one device kind.

    The time of an offloaded optimizer assumes that all ranks take their optimizer step at once.
    """
    costs = cost.estimate_ops(graph, batch_size, kind)
    forward, accumulate = structure.op_picoseconds(costs.forward_s), structure.op_picoseconds(costs.accumulate_s)
    backward = structure.op_picoseconds(costs.backward_s + costs.accumulate_s)
    num_instructions = np.full((structure.num_layers, 1), 2)
    num_instructions[1:] += 2
    if workload.kind == "inference":
        backward, accumulate = np.zeros_like(backward), np.zeros_like(accumulate)
        num_instructions //= 2
    return StageSecondsTable(
        total=(forward + backward + _picoseconds(num_instructions * cost.serial_overhead_s(kind)))
        / PICOSECONDS_PER_SECOND,
        backward=backward / PICOSECONDS_PER_SECOND,
        accumulate=accumulate / PICOSECONDS_PER_SECOND,
        optimizer=structure.parameters.table(_optimizer_picoseconds(graph, workload, cost, kind, offload))
        / PICOSECONDS_PER_SECOND,
    )


def _optimizer_picoseconds(
    graph: Graph, workload: Workload, cost: CostModel, kind: DeviceKind, offload: Offload
) -> Integers:
    """Divide the optimizer step over all parameters in proportion to the time that each takes alone."""
    seconds = np.zeros(len(graph.tensors))
    trainable = [i for i in graph.parameters if graph.tensors[i].requires_grad]
    if workload.kind == "inference" or not trainable:
        return _picoseconds(seconds)
    if offload.optimizer != "device":
        hosts = HostCosts(cost, cost.cluster.num_ranks)
        sizes = np.array([workload.gradient_bytes(graph.tensors[i]) for i in trainable], np.float64)
        whole_s = hosts.bound_step_seconds(0, int(sizes.sum()), workload.optimizer, offload.optimizer)
        seconds[trainable] = whole_s * sizes / sizes.sum()
        return _picoseconds(seconds)
    alone = np.array([cost.optimizer_seconds(graph, (i,), workload.optimizer, kind) for i in trainable])
    together = cost.optimizer_seconds(graph, tuple(trainable), workload.optimizer, kind)
    seconds[trainable] = alone * (together / alone.sum())
    return _picoseconds(seconds)


def _picoseconds(seconds: Floats) -> Integers:
    return np.rint(seconds * PICOSECONDS_PER_SECOND).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tables:
    """The bytes of a graph's stages at one microbatch size, and their seconds by the name of the device kind.

    ``activations_away``: activations are in host memory between forward and backward.
    """

    graph: Graph
    microbatch_size: int
    num_microbatches: int
    bytes: StageBytesTable
    seconds: dict[str, StageSecondsTable]
    activations_away: bool = False


def make_tables(
    graph: Graph,
    structure: Structure,
    microbatch_size: int,
    cluster: Cluster,
    workload: Workload,
    cost: CostModel,
    offload: Offload = ON_DEVICE,
) -> Tables:
    """Return the estimates of all stages of a graph at a microbatch size, on all device kinds of the cluster.

    Raises GraphError for a microbatch size that the graph does not support.
    """
    away = offload.activations == "host"
    return Tables(
        graph=graph,
        microbatch_size=microbatch_size,
        num_microbatches=workload.global_batch // microbatch_size,
        bytes=stage_bytes(graph, structure, microbatch_size, workload, cost, activations_away=away),
        seconds={
            kind.name: stage_seconds(graph, structure, microbatch_size, workload, cost, kind, offload)
            for kind in cluster.device_kinds
        },
        activations_away=away,
    )


def settle_stage(
    tables: Tables, stage: StageSlice, layers: tuple[int, int], num_replicas: int, workload: Workload, cost: CostModel
) -> None:
    """Replace the lower bound of a stage's memory in the tables by its exact memory.

    ``layers`` are its first layer and end; ``num_replicas`` decides whether it reduces gradients.
    """
    exchanges = num_replicas > 1
    memory = weigh_alone(
        tables.graph,
        stage,
        tables.microbatch_size,
        workload,
        cost,
        exchanges=exchanges,
        activations_away=tables.activations_away,
    )
    tables.bytes.settle(*layers, memory, exchanges=exchanges)
