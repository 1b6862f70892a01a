"""Seconds of every possible stage i:j of a graph at one microbatch size.

They are whole picoseconds internally, so that stages of equal layers are exactly equal. One stage takes

    t(i, j) = Σ over its ops of (forward + backward + accumulate) + overhead per instruction

``accumulate`` is charged to every microbatch, although the first of a step does not pay it. Instructions are a forward
and a backward, and in every stage but the first one receiving and one returning.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import CostModel
from meshwright.cost.offload import HostCosts
from meshwright.planner.stage_tables.rectangles import Integers
from meshwright.planner.stage_tables.structure import Structure
from meshwright.spec import DeviceKind, Graph, Offload, Workload
from meshwright.spec.offload import ON_DEVICE
from meshwright.spec.units import PICOSECONDS_PER_SECOND

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSecondsTable:
    """Seconds of stages i:j on one kind of device, (L, L + 1): one microbatch, its backward, the optimizer step.

    ``accumulate`` is the part of ``backward`` that the first microbatch of a step does not take.
    """

    total: Floats
    backward: Floats
    accumulate: Floats
    optimizer: Floats


def stage_seconds(
    graph: Graph,
    structure: Structure,
    batch_size: int,
    workload: Workload,
    cost: CostModel,
    kind: DeviceKind,
    offload: Offload = ON_DEVICE,
) -> StageSecondsTable:
    """Return the seconds of all stages on one device kind.

    An offloaded optimizer takes the time that it has with all ranks stepping.
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
