"""What the instructions of one stage cost on one kind of device: seconds, when its buckets are ready, and bytes.

- forward: Σ forward_s over the stage's ops.
- backward: Σ backward_s, and Σ accumulate_s from the rank's second microbatch on; the last one of a step also copies
  the gradients into the stage's buckets (Σ fill).
- ready(k): Σ backward of the ops from the last one down to the first that uses a parameter of bucket k, and what
  filling the buckets up to k takes; not before ready(k - 1), for buckets leave in order.
- host: overhead_s per instruction that the rank issues, its own and those of the transfers that belong to it; the
  optimizer step pays for the all-reduces.

Memory, by part, as the walk through the stage's ops has it (`cost.memory.phases`): a computation takes at its start
what it has at its fullest, and gives back at its end what it does not leave behind. Gradients that are sent go when
their sending ends. Inputs of all microbatches are there all the time, buckets have buffers of their own, and what
messages take besides is told rank by rank (`buffers`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import CostModel
from meshwright.cost.memory import Phase, backend_of
from meshwright.program import Bucket
from meshwright.spec import DeviceKind, Graph, Opcode, Plan, StageSlice
from meshwright.spec.memory import (
    BUCKETS,
    BUFFERS,
    INPUTS,
    MEMORY_PARTS,
    OPTIMIZER,
    PARAMETERS,
    SENT,
)

Bytes = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageCosts:
    """Seconds of a stage's instructions on one device kind, and the seconds after which each of its buckets is ready.

    ``backward_s`` and ``ready_s`` are of the rank's first microbatch of a step, ``later_*`` of the following ones;
    the last one takes ``fill_s`` on top, which ``ready_s`` and ``later_ready_s`` already hold.
    """

    forward_s: float
    backward_s: float
    later_backward_s: float
    optimizer_s: float
    ready_s: dict[int, float]
    later_ready_s: dict[int, float]
    fill_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageBytes:
    """Bytes by part: always there, and (taken at the start, freed at the end) of each computation.

    ``microbatch_bytes`` is what stays of a forward until the backward.

    A part may grow until the end: then what is freed of it is negative. ``backwards`` by place, as in `StagePhases`.
    """

    resident: Bytes
    microbatch_bytes: int
    forward: tuple[Bytes, Bytes]
    backwards: tuple[tuple[Bytes, Bytes], ...]
    optimizer: tuple[Bytes, Bytes]


def stage_costs(
    graph: Graph, plan: Plan, stage: StageSlice, buckets: tuple[Bucket, ...], kind: DeviceKind, cost: CostModel
) -> StageCosts:
    """Price a stage for the plan's microbatches on one kind of device; ``buckets`` are those that the stage holds."""
    prices = cost.price_ops(graph, plan.microbatch_size, kind)
    ops = np.array(stage.ops, np.int64)
    num_received, num_sent = len(stage.incoming), len(stage.outgoing)
    num_returned = sum(bool(channel.gradients) for channel in stage.incoming)
    num_answers = sum(bool(channel.gradients) for channel in stage.outgoing)
    first, later = prices.backward_s[ops], (prices.backward_s + prices.accumulate_s)[ops]
    backward_host_s = cost.overhead_s * (1 + num_returned + num_answers)
    fill_s = {bucket.index: cost.bucket_seconds(graph, bucket.parameters, kind) for bucket in buckets}
    step_s = cost.optimizer_seconds(graph, stage.parameters, plan.workload.optimizer, kind)
    return StageCosts(
        forward_s=float(prices.forward_s[ops].sum()) + cost.overhead_s * (1 + num_received + num_sent),
        backward_s=float(first.sum()) + backward_host_s,
        later_backward_s=float(later.sum()) + backward_host_s,
        optimizer_s=step_s + cost.overhead_s * (1 + len(buckets)),
        ready_s=_ready_seconds(graph, stage, buckets, first, backward_host_s, fill_s),
        later_ready_s=_ready_seconds(graph, stage, buckets, later, backward_host_s, fill_s),
        fill_s=sum(fill_s.values()),
    )


def _ready_seconds(
    graph: Graph,
    stage: StageSlice,
    buckets: tuple[Bucket, ...],
    backward_s: NDArray[np.float64],
    host_s: float,
    fill_s: dict[int, float],
) -> dict[int, float]:
    done = host_s + np.cumsum(backward_s[::-1])[::-1]
    first_use: dict[int, int] = {}
    for place, op in enumerate(stage.ops):
        for tensor in graph.ops[op].inputs:
            first_use.setdefault(tensor, place)
    ready: dict[int, float] = {}
    latest = filled = 0.0
    for bucket in sorted(buckets, key=lambda item: item.index):
        uses = [first_use[parameter] for parameter in bucket.parameters if parameter in first_use]
        latest = max([latest, *(float(done[place]) for place in uses)])
        filled += fill_s[bucket.index]
        ready[bucket.index] = latest + filled
    return ready


def stage_bytes(
    graph: Graph, plan: Plan, stage: StageSlice, buckets: tuple[Bucket, ...], kind: DeviceKind, cost: CostModel
) -> StageBytes:
    """Weigh a stage for the plan's microbatches on one kind of device."""
    bucketed = frozenset(stage.parameters).intersection(i for bucket in buckets for i in bucket.parameters)
    memory = cost.stage_memory(
        graph, stage, plan.microbatch_size, plan.workload, device=backend_of(kind), bucketed=bucketed
    )
    num_inputs = -(-plan.num_microbatches // len(plan.stages[stage.index].ranks))
    phases = memory.phases
    return StageBytes(
        resident=by_part(
            {
                PARAMETERS: memory.parameter_bytes,
                BUFFERS: memory.buffer_bytes,
                OPTIMIZER: memory.optimizer_bytes,
                BUCKETS: sum(bucket.num_bytes for bucket in buckets),
                INPUTS: num_inputs * memory.input_bytes,
            }
        ),
        microbatch_bytes=memory.phases.forward.after_bytes,
        forward=_takes_and_frees(phases.forward),
        backwards=tuple(_takes_and_frees(phase) for phase in phases.backwards),
        optimizer=_takes_and_frees(phases.optimizer),
    )


def _takes_and_frees(phase: Phase) -> tuple[Bytes, Bytes]:
    most = np.array(phase.most, np.int64)
    return most, most - np.array(phase.after, np.int64)


def transfer_bytes(opcode: int, num_bytes: int) -> tuple[Bytes, Bytes]:
    """Bytes by part that a transfer takes at its start and frees at its end; the stage's own are in `stage_bytes`."""
    return by_part({}), by_part({SENT: num_bytes} if opcode == Opcode.SEND_GRADIENT else {})


def by_part(parts: dict[int, int]) -> Bytes:
    """A column entry: bytes of each part, shape (parts,)."""
    entry = np.zeros(len(MEMORY_PARTS), np.int64)
    for part, num_bytes in parts.items():
        entry[part] += num_bytes
    return entry
