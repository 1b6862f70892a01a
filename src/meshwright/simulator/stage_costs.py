"""Times of one stage's instructions on one kind of device, in seconds, and when its buckets are ready.

- forward: Σ forward_s over the stage's ops.
- backward: Σ backward_s over the stage's ops, and Σ accumulate_s from the rank's second microbatch on; the first
  backward of a step also copies the gradients into the stage's buckets (Σ fill). If backwards have two parts, the part
  for weights takes `weights_share` of backward_s, with Σ accumulate_s and Σ fill, and the part for inputs the rest.
  Recompute belongs to backward_s, but not to the part for weights.
- ready(k): Σ backward of the ops from the last op down to the first op that uses a parameter of bucket k, and the time
  to fill the buckets up to k; not before ready(k - 1), because buckets are sent in order.
- compiled layers have one backward each, at the end of which all of their gradients are ready.
- host: overhead_s per instruction that the rank issues, including the transfers that belong to it; the all-reduces
  count for the optimizer step. On a CUDA device this is a part of the host's issue time (`host_issue`), otherwise of
  the instruction.
- states sharded over n replicas: the optimizer's step, its states and workspace are those of one of n equal parts;
  `state_shards` computes the waits of forwards and backwards; gathered parameters of two layers are in memory.
- clipping and loss scaling: passes over all gradients before the step.
- an optimizer on the host: the step on the device is only the runtime's overhead and these passes. Parameters that go
  to the host without being summed (`HostPiece`) are ready as buckets are, but need no copy.
- activations on the host: `saved_waits` computes the waits of forwards and backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import CostModel
from meshwright.cost.host_issue import load_host_calls
from meshwright.cost.optimizers import trainable_elements
from meshwright.program import Bucket, HostPiece
from meshwright.simulator.saved_waits import find_copies, saved_waits
from meshwright.simulator.state_shards import ALONE, StateShards, gather_waits
from meshwright.spec import DeviceKind, Graph, Op, Placement, Plan, StageSlice
from meshwright.spec.compiled_units import unit_starts

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardSeconds:
    """Seconds of a backward, or of its part for weights, and when inside it each bucket of the stage is ready.

    ``seconds`` and ``ready_s`` (by bucket index) are those of the rank's first microbatch of a step, including the time
    to fill the buckets; ``later_s`` and ``later_ready_s`` are those of the following microbatches.
    """

    seconds: float
    later_s: float
    ready_s: dict[int, float]
    later_ready_s: dict[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Seconds of a stage's instructions on one kind of device.

    ``backward`` is a whole backward; ``inputs_s`` and ``weights`` are the parts of a backward in two parts. The last
    backward of a step takes ``last_s`` more. ``stash_s``: a copy of the trained weights; ``merge_s``: adding the
    updates of other replicas to the weights. ``exchanged_s``: the seconds of (forward, backward, its part for weights)
    in which the rank waits for collectives inside; ``copied_s``: those of (forward, backward) in which it waits for
    copies of activations. ``ops``: the times of the single ops. ``issue``: of an asynchronous host, None without one.
    """

    forward_s: float
    backward: BackwardSeconds
    inputs_s: float
    weights: BackwardSeconds
    optimizer_s: float
    stash_s: float
    merge_s: float
    last_s: float
    exchanged_s: tuple[float, float, float]
    copied_s: tuple[float, float]
    ops: OpSeconds
    issue: StepIssue | None


class StepIssue(NamedTuple):
    """Host time to issue an optimizer step, and to issue one pass of copies over the stage's weights, in seconds."""

    optimizer_s: float
    copy_s: float


class OpIssue(NamedTuple):
    """Seconds in which a host issues a stage's ops, as measured on one host; arrays of shape (ops,).

    The fields have the meaning that they have in `OpSeconds`. ``instruction_s``: before the ops of (a forward, a
    backward or its part for inputs, its part for weights). ``fill_s``: by bucket, to issue the copies into it.
    """

    forward: Floats
    backward: Floats
    weights: Floats
    accumulate: Floats
    instruction_s: tuple[float, float, float]
    fill_s: dict[int, float]


class OpSeconds(NamedTuple):
    """Seconds of a stage's ops, each of shape (ops,), and the other times of its instructions.

    ``weights`` is the part of ``backward`` that may be deferred; ``accumulate`` is added from the second microbatch on.
    ``host_s``: the host's time before the ops of (a forward, a backward or its part for inputs, its part for weights).
    ``last_s``: after the ops of the last backward of a step, for sums across groups of replicas. ``fill_s``: by bucket,
    to fill it in the first backward. ``first_uses``: by bucket, the index of the stage's first op that uses one of its
    parameters. ``exchanged``, of shape (ops, 2): the part of forward and backward spent waiting for other ranks.
    ``copied_s``: seconds of (forward, backward) spent waiting for activations. ``issue``: the times of an asynchronous
    host, None without one.
    """

    forward: Floats
    backward: Floats
    weights: Floats
    accumulate: Floats
    host_s: tuple[float, float, float]
    fill_s: dict[int, float]
    last_s: float
    first_uses: dict[int, int]
    exchanged: Floats
    copied_s: tuple[float, float]
    issue: OpIssue | None


def op_seconds(
    graph: Graph,
    plan: Plan | Placement,
    stage: StageSlice,
    buckets: tuple[Bucket, ...],
    kind: DeviceKind,
    cost: CostModel,
    shards: StateShards = ALONE,
    pieces: tuple[HostPiece, ...] = (),
) -> OpSeconds:
    """Return the times of a stage's ops, including waits for gathers and copies; arguments as in `stage_costs`."""
    costs = cost.estimate_ops(graph, plan.microbatch_size, kind)
    ops = np.array(stage.ops, np.int64)
    num_returned = sum(bool(channel.gradients) for channel in stage.incoming)
    num_answers = sum(bool(channel.gradients) for channel in stage.outgoing)
    issued = (1 + len(stage.incoming) + len(stage.outgoing), 1 + num_returned + num_answers, 1)
    forward_s, backward_s = costs.forward_s[ops], costs.backward_s[ops]
    kept = {i for bucket in buckets for i in bucket.parameters}
    waits = gather_waits(graph, stage, forward_s, backward_s, shards, kind, cost, kept)
    copies = find_copies(graph, plan, stage, kind, cost, shards.ranks)
    waited = saved_waits(copies, forward_s + waits.forward, backward_s + waits.backward)
    serial_s = cost.serial_overhead_s(kind)
    return OpSeconds(
        forward=forward_s + waits.forward + waited[0],
        backward=backward_s + waits.backward + waited[1],
        weights=(costs.backward_s - costs.again_s)[ops] * weights_shares(graph)[ops],
        accumulate=costs.accumulate_s[ops],
        host_s=(serial_s * issued[0], serial_s * issued[1], serial_s * issued[2]),
        # Pieces for the host are copied directly from the gradients, without a bucket.
        fill_s={bucket.index: cost.bucket_seconds(graph, bucket.parameters, kind) for bucket in buckets}
        | {piece.index: 0.0 for piece in pieces},
        last_s=waits.last_s,
        first_uses=_first_uses(graph, stage, (*buckets, *pieces)),
        exchanged=costs.exchanged_s[ops] + np.stack([waits.forward, waits.backward], axis=1),
        copied_s=(float(waited[0].sum()), float(waited[1].sum())),
        issue=_op_issue(graph, ops, buckets, pieces, costs.issue_s, issued, cost.overhead_s),
    )


def _op_issue(
    graph: Graph,
    ops: NDArray[np.int64],
    buckets: tuple[Bucket, ...],
    pieces: tuple[HostPiece, ...],
    issue_s: Floats | None,
    issued: tuple[int, int, int],
    overhead_s: float,
) -> OpIssue | None:
    """Return an asynchronous host's times for the ops, each gradient copied into a bucket, and the runtime's loop."""
    if issue_s is None:
        return None
    calls = load_host_calls()
    backward = issue_s[ops, 1]
    return OpIssue(
        forward=issue_s[ops, 0],
        backward=backward,
        weights=backward * weights_shares(graph)[ops],
        accumulate=issue_s[ops, 2],
        instruction_s=(
            overhead_s * issued[0],
            overhead_s * issued[1] + calls.engine_s,
            overhead_s * issued[2] + calls.engine_s,
        ),
        fill_s={bucket.index: calls.call_s * len(bucket.parameters) for bucket in buckets}
        | {piece.index: 0.0 for piece in pieces},
    )


def step_issue(
    graph: Graph, plan: Plan | Placement, parameters: Sequence[int], cost: CostModel, num_instructions: int
) -> StepIssue:
    """Return the seconds in which an asynchronous host issues an optimizer step over ``parameters``.

    ``num_instructions``: the instructions of the program that the host issues for the step.
    """
    calls, optimizer = load_host_calls(), plan.workload.optimizer
    count, step_s = len(trainable_elements(graph, parameters)), 0.0
    if not steps_on_host(plan):
        step_s = cost.optimizer_issue_s(count, optimizer)
    if isinstance(plan, Plan):
        # The norm and clipping by it, and unscaling: one loop over all tensors each.
        step_s += count * (2 * plan.exchange.clip_norm + plan.scales_loss) * calls.foreach_operation_s
    return StepIssue(
        optimizer_s=step_s + cost.overhead_s * num_instructions, copy_s=count * calls.call_s + cost.overhead_s
    )


def stage_costs(
    graph: Graph,
    plan: Plan | Placement,
    stage: StageSlice,
    buckets: tuple[Bucket, ...],
    kind: DeviceKind,
    cost: CostModel,
    shards: StateShards = ALONE,
    pieces: tuple[HostPiece, ...] = (),
) -> StageCosts:
    """Return the times of a stage's instructions for the plan's microbatches on one kind of device.

    ``buckets`` are those with parameters of the stage, ``shards`` describes how replicas shard its states, ``pieces``
    are the stage's parameters whose gradients go to the host without being summed.
    """
    seconds = op_seconds(graph, plan, stage, buckets, kind, cost, shards, pieces)
    step_s = 0.0
    if not steps_on_host(plan):
        optimizer = plan.workload.optimizer
        step_s = cost.optimizer_seconds(graph, stage.parameters, optimizer, kind, num_shards=shards.states)
    inside_s = cost.teams.step_seconds(graph, stage.parameters, _summed_with_replicas(stage, buckets, shards))
    copy_s = cost.bucket_seconds(graph, stage.parameters, kind)
    checked_s = _passes_over_gradients(plan) * copy_s / shards.states
    forward_host_s, host_s, weights_host_s = seconds.host_s
    serial_s = cost.serial_overhead_s(kind)

    def backward(first: Floats, own_host_s: float) -> BackwardSeconds:
        later = first + seconds.accumulate
        return BackwardSeconds(
            seconds=float(first.sum()) + own_host_s + sum(seconds.fill_s.values()),
            later_s=float(later.sum()) + own_host_s,
            ready_s=_ready_seconds(seconds.first_uses, first, own_host_s, seconds.fill_s),
            later_ready_s=_ready_seconds(seconds.first_uses, later, own_host_s, dict.fromkeys(seconds.fill_s, 0.0)),
        )

    return StageCosts(
        forward_s=float(seconds.forward.sum()) + forward_host_s,
        backward=backward(seconds.backward, host_s),
        inputs_s=float((seconds.backward - seconds.weights).sum()) + host_s,
        weights=backward(seconds.weights, weights_host_s),
        optimizer_s=step_s + inside_s + checked_s + serial_s * (1 + len(buckets)),
        stash_s=copy_s + serial_s,
        # Two passes, each as long as a copy: subtract this rank's updates from the sum, add the rest to the weights.
        merge_s=2 * copy_s + serial_s,
        last_s=seconds.last_s,
        exchanged_s=_exchanged_seconds(graph, stage, seconds.exchanged),
        copied_s=seconds.copied_s,
        ops=seconds,
        issue=step_issue(graph, plan, stage.parameters, cost, 1 + len(buckets)) if seconds.issue else None,
    )


def _exchanged_seconds(graph: Graph, stage: StageSlice, exchanged: Floats) -> tuple[float, float, float]:
    forward_s, backward_s = exchanged.sum(axis=0).tolist()
    return forward_s, backward_s, float(exchanged[:, 1] @ weights_shares(graph)[np.array(stage.ops, np.int64)])


def _summed_with_replicas(stage: StageSlice, buckets: tuple[Bucket, ...], shards: StateShards) -> set[int]:
    """Return the parameters whose gradients are summed over replicas, in buckets or inside backwards."""
    if shards.is_cut:
        return set(stage.parameters)
    return {i for bucket in buckets for i in bucket.parameters}


def _passes_over_gradients(plan: Plan | Placement) -> float:
    """Return the traffic of clipping and unscaling, in copies of all gradients (a copy reads and writes once)."""
    if isinstance(plan, Placement):
        return 0.0
    # The norm reads, clipping reads and writes; unscaling reads and writes, and checks for infinite values meanwhile.
    return 1.5 * plan.exchange.clip_norm + 1.0 * plan.scales_loss


def weights_share(graph: Graph, op: Op) -> float:
    """Return the share (0..1) of an op's backward that computes only gradients of parameters, and so may be deferred.

    The backward of a matrix product runs one product for each gradient. Other ops compute all gradients at once: the
    share is then 1 if all their gradients are those of parameters, otherwise 0.
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
    """Return `weights_share` of every op, shape (ops,)."""
    return np.array([weights_share(graph, op) for op in graph.ops])


def steps_on_host(plan: Plan | Placement) -> bool:
    """Return whether the plan's optimizer steps on the host, with its states in host memory or on drives."""
    return isinstance(plan, Plan) and plan.offload.optimizer != "device"


def _first_uses(graph: Graph, stage: StageSlice, buckets: tuple[Bucket | HostPiece, ...]) -> dict[int, int]:
    """Return, by bucket or piece, the index of the stage's first op that uses one of its parameters; 0 without any.

    Among ops that are compiled together it is the first of these, with which their one backward ends.
    """
    bucket_of = {parameter: bucket.index for bucket in buckets for parameter in bucket.parameters}
    first = {bucket.index: 0 for bucket in buckets if not bucket.parameters}
    starts, own = unit_starts(graph), np.array(stage.ops)
    for place, op in enumerate(stage.ops):
        for tensor in graph.ops[op].inputs:
            if tensor in bucket_of:
                first.setdefault(bucket_of[tensor], min(place, int(np.searchsorted(own, starts[op]))))
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
