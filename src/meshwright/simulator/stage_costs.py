"""What the instructions of one stage cost on one kind of device: seconds, when its buckets are ready, and bytes.

- forward: Σ forward_s over the stage's ops.
- backward: Σ backward_s, and Σ accumulate_s from the rank's second microbatch on; the last one of a step also copies
  the gradients into the stage's buckets (Σ fill). In two parts: `weights_share` of it, with Σ accumulate_s and Σ fill,
  makes gradients of parameters, the rest those of inputs.
- ready(k): Σ backward of the ops from the last one down to the first that uses a parameter of bucket k, and what
  filling the buckets up to k takes; not before ready(k - 1), for buckets leave in order.
- host: overhead_s per instruction that the rank issues, its own and those of the transfers that belong to it; the
  optimizer step pays for the all-reduces.
- clipping and a scale of the loss: passes over all gradients before the step.
- a sharded optimizer: its step, its states and what it needs meanwhile are those of one of n equal parts.

Memory, by part, as the walk through the stage's ops has it (`cost.memory.phases`): a computation takes at its start
what it has at its fullest, and gives back at its end what it does not leave behind. Gradients that are sent go when
their sending ends. Inputs of all microbatches are there all the time, buckets have buffers of their own, and what
messages take besides is told rank by rank (`buffers`). Between the two parts of a backward stays what the second one
reads: what ops with parameters saved, and the gradients of their outputs. What a stage hands to another one on its rank
is kept by its maker, and its gradient is there until the maker's backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import CostModel
from meshwright.cost.memory import Phase, backend_of
from meshwright.program import Bucket, num_bucket_copies, stays_on_rank
from meshwright.spec import DeviceKind, Graph, Op, Opcode, Placement, Plan, StageSlice
from meshwright.spec.memory import (
    BUCKETS,
    BUFFERS,
    GRADIENTS,
    INPUTS,
    MEMORY_PARTS,
    OPTIMIZER,
    PARAMETERS,
    RECEIVED,
    SAVED,
    SENT,
    STASHED,
    WORKSPACE,
)

Bytes = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardSeconds:
    """Seconds of a backward, or of its part for weights, and when inside it each bucket of the stage is ready.

    The first ones are of the rank's first microbatch of a step, ``later_*`` of the following ones; the last one takes
    `StageCosts.fill_s` on top, which ``ready_s`` and ``later_ready_s`` already hold.
    """

    seconds: float
    later_s: float
    ready_s: dict[int, float]
    later_ready_s: dict[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Seconds of a stage's instructions on one device kind: whole backwards, or gradients of inputs and of weights.

    ``stash_s`` copies the trained weights, ``merge_s`` adds the updates of other replicas to them.
    """

    forward_s: float
    backward: BackwardSeconds
    inputs_s: float
    weights: BackwardSeconds
    optimizer_s: float
    stash_s: float
    merge_s: float
    fill_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageBytes:
    """Bytes by part: always there, and (taken at the start, freed at the end) of each computation.

    ``microbatch_bytes`` is what stays of a forward until the backward.

    A part may grow until the end: then what is freed of it is negative. ``backwards``, and their part for ``weights``,
    by place, as in `StagePhases`; ``inputs`` is their other part. ``stash`` is a copy of the trained weights.
    """

    resident: Bytes
    microbatch_bytes: int
    forward: tuple[Bytes, Bytes]
    backwards: tuple[tuple[Bytes, Bytes], ...]
    inputs: tuple[Bytes, Bytes]
    weights: tuple[tuple[Bytes, Bytes], ...]
    optimizer: tuple[Bytes, Bytes]
    stash: Bytes


class OpSeconds(NamedTuple):
    """Seconds of a stage's ops, each of shape (ops,), and what its instructions take beside them.

    ``weights`` is the part of ``backward`` that may wait, ``accumulate`` comes on top from the second microbatch on.
    ``host_s`` is the host's time for a forward, for a backward or its part for inputs, and for that for weights; it
    comes before the ops. ``fill_s`` by bucket; ``first_uses`` as in `_first_uses`.
    """

    forward: Floats
    backward: Floats
    weights: Floats
    accumulate: Floats
    host_s: tuple[float, float, float]
    fill_s: dict[int, float]
    first_uses: dict[int, int]


def op_seconds(
    graph: Graph,
    plan: Plan | Placement,
    stage: StageSlice,
    buckets: tuple[Bucket, ...],
    kind: DeviceKind,
    cost: CostModel,
) -> OpSeconds:
    """Price the ops of a stage; arguments as of `stage_costs`."""
    prices = cost.price_ops(graph, plan.microbatch_size, kind)
    ops = np.array(stage.ops, np.int64)
    num_returned = sum(bool(channel.gradients) for channel in stage.incoming)
    num_answers = sum(bool(channel.gradients) for channel in stage.outgoing)
    issued = (1 + len(stage.incoming) + len(stage.outgoing), 1 + num_returned + num_answers, 1)
    return OpSeconds(
        forward=prices.forward_s[ops],
        backward=prices.backward_s[ops],
        weights=prices.backward_s[ops] * weights_shares(graph)[ops],
        accumulate=prices.accumulate_s[ops],
        host_s=(cost.overhead_s * issued[0], cost.overhead_s * issued[1], cost.overhead_s * issued[2]),
        fill_s={bucket.index: cost.bucket_seconds(graph, bucket.parameters, kind) for bucket in buckets},
        first_uses=_first_uses(graph, stage, buckets),
    )


def stage_costs(
    graph: Graph,
    plan: Plan | Placement,
    stage: StageSlice,
    buckets: tuple[Bucket, ...],
    kind: DeviceKind,
    cost: CostModel,
    num_shards: int = 1,
) -> StageCosts:
    """Price a stage for the plan's microbatches on one kind of device.

    ``buckets`` are those that the stage holds, ``num_shards`` the parts into which its optimizer states are cut.
    """
    seconds = op_seconds(graph, plan, stage, buckets, kind, cost)
    step_s = cost.optimizer_seconds(graph, stage.parameters, plan.workload.optimizer, kind, num_shards=num_shards)
    copy_s = cost.bucket_seconds(graph, stage.parameters, kind)
    checked_s = _passes_over_gradients(plan) * copy_s / num_shards
    forward_host_s, host_s, weights_host_s = seconds.host_s

    def backward(first: Floats, own_host_s: float) -> BackwardSeconds:
        later = first + seconds.accumulate
        return BackwardSeconds(
            seconds=float(first.sum()) + own_host_s,
            later_s=float(later.sum()) + own_host_s,
            ready_s=_ready_seconds(seconds.first_uses, first, own_host_s, seconds.fill_s),
            later_ready_s=_ready_seconds(seconds.first_uses, later, own_host_s, seconds.fill_s),
        )

    return StageCosts(
        forward_s=float(seconds.forward.sum()) + forward_host_s,
        backward=backward(seconds.backward, host_s),
        inputs_s=float((seconds.backward - seconds.weights).sum()) + host_s,
        weights=backward(seconds.weights, weights_host_s),
        optimizer_s=step_s + checked_s + cost.overhead_s * (1 + len(buckets)),
        stash_s=copy_s + cost.overhead_s,
        # Two passes, each as long as a copy: the own updates out of the sum, and the rest into the weights.
        merge_s=2 * copy_s + cost.overhead_s,
        fill_s=sum(seconds.fill_s.values()),
    )


def _passes_over_gradients(plan: Plan | Placement) -> float:
    """What clipping and unscaling read and write of all gradients, in copies of them (which read and write once)."""
    if isinstance(plan, Placement):
        return 0.0
    # The norm reads, clipping reads and writes; unscaling reads and writes, and looks for infinite values meanwhile.
    return 1.5 * plan.exchange.clip_norm + 1.0 * plan.exchange.loss_scale


def weights_share(graph: Graph, op: Op) -> float:
    """The share of an op's backward that makes gradients of parameters only, and so may wait.

    Products run one product for each gradient. Other ops make all gradients at once: none of it can wait if a gradient
    of something else is among them.
    """
    wanted = [graph.tensors[i] for i in dict.fromkeys(op.inputs) if graph.tensors[i].requires_grad]
    held = [tensor for tensor in wanted if tensor.role == "parameter"]
    if len(held) in (0, len(wanted)):
        return float(bool(held))
    if not (op.flops.fixed or op.flops.per_sample):
        return 0.0
    matrices = [sum(len(tensor.shape) > 1 for tensor in tensors) for tensors in (held, wanted)]
    return matrices[0] / matrices[1] if matrices[1] else len(held) / len(wanted)


@lru_cache(maxsize=16)
def weights_shares(graph: Graph) -> Floats:
    """`weights_share` of every op, shape (ops,)."""
    return np.array([weights_share(graph, op) for op in graph.ops])


def _first_uses(graph: Graph, stage: StageSlice, buckets: tuple[Bucket, ...]) -> dict[int, int]:
    """By bucket, the first of the stage's ops that uses one of its parameters."""
    bucket_of = {parameter: bucket.index for bucket in buckets for parameter in bucket.parameters}
    first: dict[int, int] = {}
    for place, op in enumerate(stage.ops):
        for tensor in graph.ops[op].inputs:
            if tensor in bucket_of:
                first.setdefault(bucket_of[tensor], place)
    return first


def _ready_seconds(
    first_uses: dict[int, int], backward_s: Floats, host_s: float, fill_s: dict[int, float]
) -> dict[int, float]:
    done = (host_s + np.cumsum(backward_s[::-1])[::-1]).tolist()
    ready: dict[int, float] = {}
    latest = filled = 0.0
    for bucket in sorted(fill_s):
        if bucket in first_uses:
            latest = max(latest, done[first_uses[bucket]])
        filled += fill_s[bucket]
        ready[bucket] = latest + filled
    return ready


def stage_bytes(
    graph: Graph,
    plan: Plan | Placement,
    stage: StageSlice,
    buckets: tuple[Bucket, ...],
    kind: DeviceKind,
    cost: CostModel,
    num_shards: int = 1,
) -> StageBytes:
    """Weigh a stage for the plan's microbatches on one kind of device; arguments as of `stage_costs`."""
    bucketed = frozenset(stage.parameters).intersection(i for bucket in buckets for i in bucket.parameters)
    memory = cost.stage_memory(
        graph, stage, plan.microbatch_size, plan.workload, device=backend_of(kind), bucketed=bucketed
    )
    size, width = plan.microbatch_size, plan.workload.float_bytes
    made, used = (
        sum(
            channel.backward_bytes(graph, size, width)
            for channel in channels
            if stays_on_rank(plan, channel.source, channel.target)
        )
        for channels in (stage.incoming, stage.outgoing)
    )
    num_inputs = -(-plan.num_microbatches // len(plan.stages[stage.index].ranks))
    phases = memory.phases
    # A gradient that goes to another stage of the rank changes hands instead of leaving.
    gone = by_part({SENT: made, RECEIVED: used - made})
    waiting = _kept_for_weights(graph, plan, stage)
    return StageBytes(
        resident=by_part(
            {
                PARAMETERS: memory.parameter_bytes,
                BUFFERS: memory.buffer_bytes,
                OPTIMIZER: -(-memory.optimizer_bytes // num_shards),
                BUCKETS: num_bucket_copies(plan) * sum(bucket.num_bytes for bucket in buckets),
                INPUTS: num_inputs * memory.input_bytes,
            }
        ),
        microbatch_bytes=memory.phases.forward.after_bytes,
        forward=_takes_and_frees(phases.forward),
        backwards=tuple(_takes_and_frees(phase, gone) for phase in phases.backwards),
        inputs=_takes_and_frees(_without(phases.backwards[0], GRADIENTS), gone - waiting),
        weights=tuple(_takes_and_frees(_only(phase, GRADIENTS, WORKSPACE), waiting) for phase in phases.backwards),
        optimizer=_takes_and_frees(_shared_workspace(phases.optimizer, num_shards)),
        stash=by_part({STASHED: _trained_bytes(graph, stage, width)}),
    )


def _trained_bytes(graph: Graph, stage: StageSlice, width: int) -> int:
    """Bytes of the weights of a stage that change."""
    return sum(graph.tensors[i].num_bytes(0, width) for i in stage.parameters if graph.tensors[i].requires_grad)


def _takes_and_frees(phase: Phase, gone: Bytes | int = 0) -> tuple[Bytes, Bytes]:
    """``gone`` are the bytes by part that go at the end besides."""
    most = np.array(phase.most, np.int64)
    return most, most - np.array(phase.after, np.int64) + gone


def _only(phase: Phase, *parts: int) -> Phase:
    """What a phase does to some parts of memory."""
    most, after = (tuple(n if part in parts else 0 for part, n in enumerate(row)) for row in (phase.most, phase.after))
    return Phase(most=most, after=after)


def _shared_workspace(phase: Phase, shards: int) -> Phase:
    """The optimizer's step over one of some equal parts of the parameters."""
    most = tuple(-(-n // shards) if part == WORKSPACE else n for part, n in enumerate(phase.most))
    return Phase(most=most, after=phase.after)


def _without(phase: Phase, *parts: int) -> Phase:
    return _only(phase, *(part for part in range(len(MEMORY_PARTS)) if part not in parts))


def _kept_for_weights(graph: Graph, plan: Plan | Placement, stage: StageSlice) -> Bytes:
    """What stays after a backward's part for inputs until that for weights is done, by part."""
    size, width = plan.microbatch_size, plan.workload.float_bytes
    shares = weights_shares(graph)
    later = [graph.ops[op] for op in stage.ops if shares[op] > 0]
    received = {graph.tensors[i].storage for channel in stage.incoming for i in channel.tensors}
    state = ("parameter", "buffer", "constant", "input")
    read = {graph.tensors[i].storage for op in later for i in op.saved} - received
    made = (i for op in later for i in op.outputs if graph.tensors[i].requires_grad)
    kept = [*(i for i in read if graph.tensors[i].role not in state), *made]
    return by_part({SAVED: sum(graph.tensors[i].num_bytes(size, width) for i in kept)})


def transfer_bytes(opcode: int, num_bytes: int) -> tuple[Bytes, Bytes]:
    """Bytes by part that a transfer takes at its start and frees at its end; the stage's own are in `stage_bytes`."""
    return by_part({}), by_part({SENT: num_bytes} if opcode == Opcode.SEND_GRADIENT else {})


def by_part(parts: dict[int, int]) -> Bytes:
    """A column entry: bytes of each part, shape (parts,)."""
    entry = np.zeros(len(MEMORY_PARTS), np.int64)
    for part, num_bytes in parts.items():
        entry[part] += num_bytes
    return entry
