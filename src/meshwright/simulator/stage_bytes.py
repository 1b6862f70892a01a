"""Memory of one stage's instructions on one kind of device (`stage_bytes`), by part; memory of a rank's messages.

The bytes come from a walk through the stage's ops (`cost.memory.phases`). A computation allocates its peak at its
start, and frees at its end everything that later computations do not need. Gradients that are sent are freed when their
send ends. Inputs of all microbatches are resident, buckets have buffers of their own, and the other memory of messages
is counted per rank. Between the two parts of a backward, memory holds what the second part reads: the saved values of
ops with parameters, and the gradients of their outputs. A value that a stage passes to another stage of its rank is
kept by its producer, and its gradient stays until the producer's backward.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import CostModel
from meshwright.cost.memory import Phase, SharedUnit, SharedUnits, backend_of
from meshwright.program import Bucket, num_bucket_copies, stays_on_rank
from meshwright.program.sharding import GatherUnit, find_units
from meshwright.program.stage_transfers import RECEIVE_LOOKAHEAD
from meshwright.simulator.stage_costs import steps_on_host, weights_shares
from meshwright.simulator.state_shards import ALONE, StateShards
from meshwright.spec import DeviceKind, Graph, Opcode, Placement, Plan, Program, StageSlice
from meshwright.spec.instructions import COMPUTATIONS
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

if TYPE_CHECKING:
    Ints = NDArray[np.int64]


# As in runtime/executor.py; with a user's own schedule or a placement, sends are waited for only at the end of a step.
MAX_GRADIENT_SENDS = 4


def _choose(*opcodes: Opcode) -> NDArray[np.bool_]:
    """Return a mask over opcodes that is true for the given ones, shape (opcodes,)."""
    chosen = np.zeros(len(Opcode), np.bool_)
    chosen[list(opcodes)] = True
    return chosen


_COMPUTES, _FORWARD = _choose(*COMPUTATIONS), _choose(Opcode.FORWARD)
# Which half of a backward in two parts is the last to read received values, and which one needs a received gradient.
_RELEASING = _choose(Opcode.BACKWARD, Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT)
_RECEIVING_GRADIENTS = _choose(Opcode.BACKWARD, Opcode.BACKWARD_INPUT)
_ENDING = _choose(Opcode.BACKWARD, Opcode.BACKWARD_WEIGHT)


def compute_orders(program: Program) -> list[Ints]:
    """Return the computations of each rank, in order, as rows of (opcode, stage, microbatch), shape (n, 3)."""
    parts: list[list[Ints]] = [[np.zeros((0, 3), np.int64)] for _ in range(program.num_ranks)]
    for _, section in program.sections():
        table = np.stack([section.opcode, section.stage, section.microbatch], axis=1, dtype=np.int64)
        for index, stream in enumerate(program.streams):
            if stream.name == "compute":
                own = table[section.stream_offsets[index] : section.stream_offsets[index + 1]]
                parts[stream.rank].append(own[_COMPUTES[own[:, 0]]])
    return [np.concatenate(rows) for rows in parts]


def served_bytes(program: Program) -> list[int]:
    """Return the bytes that each rank keeps as a parameter server: one sum for every part that it serves."""
    sums = np.flatnonzero(program.body.opcode == Opcode.SUM)
    streams = np.searchsorted(program.body.stream_offsets, sums, side="right") - 1
    ranks = np.array([stream.rank for stream in program.streams], np.int64)[streams]
    held = np.zeros(program.num_ranks, np.int64)
    np.add.at(held, ranks, program.body.num_bytes[sums])
    return [int(num_bytes) for num_bytes in held]


# The runtime holds receive buffers, and gradients being sent, longer than their transfers take, in the order of its
# computations:
#
#     receives   are issued `RECEIVE_LOOKAHEAD` computations before their consumer and held until the microbatch's
#                backward is done; buffers go back to a pool by size and are never freed (runtime/transport.py), so the
#                largest number of each size stays allocated
#     sends      of gradients hold them until the oldest of `MAX_GRADIENT_SENDS` is waited for (runtime/executor.py)
def receive_buffer_bytes(graph: Graph, plan: Plan | Placement, stage: StageSlice, order: Ints) -> int:
    """Return the bytes of the pool of receive buffers that a rank needs for one of its stages.

    ``order``: the rank's computations (`compute_orders`).
    """
    arriving = [channel for channel in stage.incoming if not stays_on_rank(plan, channel.source, channel.target)]
    returning = [channel for channel in stage.outgoing if not stays_on_rank(plan, channel.source, channel.target)]
    here = order[:, 1] == stage.index
    begins = _places(order, here, _FORWARD)
    ends = np.maximum(begins, _places(order, here, _RELEASING))
    values = _held(len(order), begins[begins >= 0], ends[begins >= 0])
    needed = _places(order, here, _RECEIVING_GRADIENTS)
    gradients = _held(len(order), needed[needed >= 0], needed[needed >= 0])
    held: dict[int, Ints] = defaultdict(lambda: np.zeros(len(order), np.int64))
    for channel in arriving:
        for tensor in channel.tensors:
            held[_size(graph, plan, tensor)] += values
    for channel in returning:
        for tensor in channel.gradients:
            held[_size(graph, plan, tensor)] += gradients
    return sum(size * int(count.max(initial=0)) for size, count in held.items())


def sent_gradient_bytes(
    graph: Graph, plan: Plan | Placement, stage: StageSlice, order: Ints, microbatch_bytes: int
) -> int:
    """Return the bytes that gradients being sent add to the peak of a rank, for one of its stages.

    ``order``: the rank's computations (`compute_orders`). Each microbatch in flight holds ``microbatch_bytes``.
    """
    returning = [
        channel
        for channel in stage.incoming
        if channel.gradients and not stays_on_rank(plan, channel.source, channel.target)
    ]
    size = sum(channel.backward_bytes(graph, plan.microbatch_size, plan.workload.float_bytes) for channel in returning)
    if not size:
        return 0
    here = order[:, 1] == stage.index
    is_sent = here & _RECEIVING_GRADIENTS[order[:, 0]]
    is_released = here & _ENDING[order[:, 0]]
    done = np.cumsum(is_sent) - is_sent
    in_flight = np.cumsum(here & (order[:, 0] == Opcode.FORWARD)) - (np.cumsum(is_released) - is_released)
    waits = isinstance(plan, Plan) and not plan.has_own_schedule
    kept = done if not waits else np.minimum(done, MAX_GRADIENT_SENDS // len(returning))
    in_use = in_flight * microbatch_bytes
    return int((in_use + kept * size).max() - in_use.max())


def _places(order: Ints, here: NDArray[np.bool_], chosen: NDArray[np.bool_]) -> Ints:
    """Return the position of each microbatch's last computation of the chosen kinds; -1 for none."""
    places = np.flatnonzero(here & chosen[order[:, 0]])
    found = np.full(order[:, 2].max(initial=-1) + 1, -1, np.int64)
    found[order[places, 2]] = places
    return found


def _held(count: int, first: Ints, last: Ints) -> Ints:
    """Count buffers held at each position, each from `RECEIVE_LOOKAHEAD` positions before its first to its last."""
    changes = np.zeros(count + 1, np.int64)
    np.add.at(changes, np.maximum(first - RECEIVE_LOOKAHEAD, 0), 1)
    np.subtract.at(changes, last + 1, 1)
    return np.cumsum(changes)[:-1]


def _size(graph: Graph, plan: Plan | Placement, tensor: int) -> int:
    return graph.tensors[tensor].num_bytes(plan.microbatch_size, plan.workload.float_bytes)


Bytes = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageBytes:
    """Bytes of a stage by part of memory, shape (parts,) each.

    ``resident``: in use all the time. A pair is (allocated at the start, freed at the end) of a computation; if a part
    grows during the computation, its freed bytes are negative. ``backwards`` and ``weights`` (a backward's part for
    weights) have two pairs: for a later microbatch of a step, and for the first. ``inputs``: a backward's part for
    inputs. ``stash``: a copy of the trained weights. ``microbatch_bytes``: what a forward keeps until the backward.
    """

    resident: Bytes
    microbatch_bytes: int
    forward: tuple[Bytes, Bytes]
    backwards: tuple[tuple[Bytes, Bytes], tuple[Bytes, Bytes]]
    inputs: tuple[Bytes, Bytes]
    weights: tuple[tuple[Bytes, Bytes], tuple[Bytes, Bytes]]
    optimizer: tuple[Bytes, Bytes]
    stash: Bytes


def stage_bytes(
    graph: Graph,
    plan: Plan | Placement,
    stage: StageSlice,
    buckets: tuple[Bucket, ...],
    kind: DeviceKind,
    cost: CostModel,
    shards: StateShards = ALONE,
) -> StageBytes:
    """Return the bytes of a stage for the plan's microbatches on one kind of device; arguments as in `stage_costs`."""
    bucketed = frozenset(stage.parameters).intersection(i for bucket in buckets for i in bucket.parameters)
    wide_bytes, shared = _wide_bytes(plan), shared_units(graph, plan, stage, bucketed, shards)
    memory = cost.stage_memory(
        graph,
        stage,
        plan.microbatch_size,
        plan.workload,
        device=backend_of(kind),
        bucketed=bucketed,
        shared=shared,
        activations_away=isinstance(plan, Plan) and plan.offload.activations == "host",
    )
    size, width, numbers = plan.microbatch_size, plan.workload.float_bytes, plan.workload.numbers
    made, used = (
        sum(
            channel.backward_bytes(graph, size, width)
            for channel in channels
            if stays_on_rank(plan, channel.source, channel.target)
        )
        for channels in (stage.incoming, stage.outgoing)
    )
    num_inputs = _most_microbatches(plan, stage.index, kind, cost)
    phases, parameter_bytes, optimizer_bytes = memory.phases, memory.parameter_bytes, memory.optimizer_bytes
    if shared is not None:
        held = numbers.value_bytes
        kept_bytes = sum(graph.tensors[i].num_bytes(0, held) for i in bucketed)
        cut_bytes = memory.parameter_bytes - kept_bytes
        own_bytes = 0 if shards.on_host else -(-cut_bytes // len(shards.ranks))
        if wide_bytes:
            # The rank's shard of the weights is its shard of the master weights.
            trained = [i for i in stage.parameters if graph.tensors[i].requires_grad and i not in bucketed]
            optimizer_bytes -= wide_bytes * sum(graph.tensors[i].num_elements(0) for i in trained)
            own_bytes = -(-cut_bytes // held * wide_bytes // len(shards.ranks))
        parameter_bytes = kept_bytes + own_bytes + (cut_bytes if shared.stay_gathered else shared.root.gathered_bytes)
    # A gradient for another stage of the same rank changes its owner and stays in memory.
    gone = by_part({SENT: made, RECEIVED: used - made})
    waiting = _kept_for_weights(graph, plan, stage)
    states_bytes, step = -(-optimizer_bytes // shards.states), _shared_workspace(phases.optimizer, shards.states)
    if steps_on_host(plan):
        states_bytes, step = 0, _without(phases.optimizer, WORKSPACE)
    return StageBytes(
        resident=by_part(
            {
                PARAMETERS: parameter_bytes,
                BUFFERS: memory.buffer_bytes,
                OPTIMIZER: states_bytes,
                BUCKETS: num_bucket_copies(plan) * sum(bucket.num_bytes for bucket in buckets),
                INPUTS: num_inputs * memory.input_bytes,
            }
        ),
        microbatch_bytes=memory.phases.forward.after_bytes,
        forward=_takes_and_frees(phases.forward),
        backwards=(_takes_and_frees(phases.later, gone), _takes_and_frees(phases.first, gone)),
        inputs=_takes_and_frees(_without(phases.later, GRADIENTS), gone - waiting),
        weights=(_weights_part(phases.later, waiting), _weights_part(phases.first, waiting)),
        optimizer=_takes_and_frees(step),
        stash=by_part({STASHED: _trained_bytes(graph, stage, numbers.value_bytes)}),
    )


def _most_microbatches(plan: Plan | Placement, stage: int, kind: DeviceKind, cost: CostModel) -> int:
    """Return the most microbatches of a replica; with shares, among the replicas on this kind of device."""
    if isinstance(plan, Placement):
        return plan.num_microbatches
    own = plan.stages[stage]
    counts = own.counts(plan.num_microbatches)
    if not own.shares:
        return max(counts)
    kinds = (cost.cluster.device_kind(rank).name for rank in own.ranks)
    return max((count for count, name in zip(counts, kinds, strict=True) if name == kind.name), default=max(counts))


def _trained_bytes(graph: Graph, stage: StageSlice, width: int) -> int:
    """Return the bytes of the trained weights of a stage."""
    return sum(graph.tensors[i].num_bytes(0, width) for i in stage.parameters if graph.tensors[i].requires_grad)


def _takes_and_frees(phase: Phase, gone: Bytes | int = 0) -> tuple[Bytes, Bytes]:
    """Return bytes allocated and freed by a phase; ``gone`` are further bytes by part freed at its end."""
    most = np.array(phase.most, np.int64)
    return most, most - np.array(phase.after, np.int64) + gone


def _weights_part(phase: Phase, waiting: Bytes) -> tuple[Bytes, Bytes]:
    return _takes_and_frees(_only(phase, GRADIENTS, WORKSPACE), waiting)


def _only(phase: Phase, *parts: int) -> Phase:
    """Return a phase restricted to some parts of memory."""
    most, after = (tuple(n if part in parts else 0 for part, n in enumerate(row)) for row in (phase.most, phase.after))
    return Phase(most=most, after=after)


def _shared_workspace(phase: Phase, shards: int) -> Phase:
    """Return the optimizer's step over one of ``shards`` equal parts of the parameters."""
    most = tuple(-(-n // shards) if part == WORKSPACE else n for part, n in enumerate(phase.most))
    return Phase(most=most, after=phase.after)


def _wide_bytes(plan: Plan | Placement) -> int:
    """Bytes of a master weight that a rank steps itself; 0 if the host steps, in the optimizer's own copy."""
    return 0 if steps_on_host(plan) else plan.workload.numbers.master_bytes


def shared_units(
    graph: Graph, plan: Plan | Placement, stage: StageSlice, kept: frozenset[int], shards: StateShards
) -> SharedUnits | None:
    """Return the units in which a stage's sharded parameters are gathered; None if they are not sharded.

    ``kept``: parameters that are not sharded.
    """
    if not shards.is_cut:
        return None
    numbers, parts, wide_bytes = plan.workload.numbers, 0 if shards.on_host else len(shards.ranks), _wide_bytes(plan)

    def shared(unit: GatherUnit) -> SharedUnit:
        trained = [i for i in unit.parameters if graph.tensors[i].requires_grad]
        elements = sum(graph.tensors[i].num_elements(0) for i in trained)
        own_bytes = elements * max(wide_bytes, numbers.gradient_bytes)
        return SharedUnit(
            first=stage.ops[unit.first],
            last=stage.ops[unit.last],
            parameters=unit.parameters,
            gathered_bytes=sum(graph.tensors[i].num_bytes(0, numbers.value_bytes) for i in unit.parameters),
            scattered_bytes=elements * numbers.gradient_bytes,
            own_bytes=-(-own_bytes // parts) if parts else 0,
        )

    root, units = find_units(graph, stage, kept)
    return SharedUnits(
        root=shared(root),
        units=tuple(shared(unit) for unit in units if unit.parameters),
        stay_gathered=shards.zero == 2,
    )


def _without(phase: Phase, *parts: int) -> Phase:
    return _only(phase, *(part for part in range(len(MEMORY_PARTS)) if part not in parts))


def _kept_for_weights(graph: Graph, plan: Plan | Placement, stage: StageSlice) -> Bytes:
    """Return the bytes by part kept after a backward's part for inputs, until that for weights is done."""
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
    """Return the bytes by part that a transfer instruction allocates and frees itself.

    Buffers of messages are counted by `receive_buffer_bytes` and `stage_bytes`.
    """
    return by_part({}), by_part({SENT: num_bytes} if opcode == Opcode.SEND_GRADIENT else {})


def by_part(parts: dict[int, int]) -> Bytes:
    """Return bytes, given by index of a part of memory (`MEMORY_PARTS`), as an array of shape (parts,)."""
    entry = np.zeros(len(MEMORY_PARTS), np.int64)
    for part, num_bytes in parts.items():
        entry[part] += num_bytes
    return entry
