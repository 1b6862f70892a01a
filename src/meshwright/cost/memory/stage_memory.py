"""Bytes of a stage by part, its peak for microbatches in flight (`weigh_stage`), and every allocation (`trace_step`).

    static         parameters + buffers + optimizer states (+ master weights in mixed precision)
    inputs         inputs of every microbatch of a step, during the whole step
    per microbatch saved + received + sent, from its forward to its backward (0 without a backward)
    gradients      from a step's first backward to the optimizer's step
    peak           static + n · inputs + the largest memory within a step of n microbatches (`fullest`)

"saved" are the values that autograd saves for the backward of the stage's ops, each storage once, without received
values, the stage's inputs, and its parameters and buffers. "sent" are values sent to later stages that no op saved;
they live until their gradient returns. Floating-point tensors have the width of the workload's precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.memory.kept import Backend, as_kept, has_own_backward
from meshwright.cost.memory.ledger import (
    BACKWARD_FIRST,
    BACKWARD_LATER,
    FORWARD,
    NUM_MOMENTS,
    STEP,
    MemoryEvents,
    fullest,
)
from meshwright.cost.memory.phases import Phase, StagePhases, count_phases, trace_phases
from meshwright.cost.memory.walk import StageWalk
from meshwright.cost.optimizers import OptimizerLoop, default_loop, optimizer_bytes
from meshwright.spec import DeviceKind, Graph, GraphError, StageSlice, Workload, slice_graph
from meshwright.spec.memory import GRADIENTS, RECEIVED, SAVED, SENT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence, Set

    from numpy.typing import NDArray

    from meshwright.cost.memory.shared_units import SharedUnits


# The first step makes the optimizer's states, the second is like all later ones.
_NUM_STEPS = 2


# The allocations are those of eager torch, op by op:
#
#     forward     an op allocates its outputs and what it keeps for its backward; a value is freed after its last use
#                 unless an op saved it
#     backward    ops in reverse: each allocates the gradients of its inputs (`backward`), then what it saved and the
#                 gradients of its outputs are freed; a further gradient is added in place if nothing else holds the
#                 existing one
#     step        states are made at the first step. AdamW that loops over the parameters one by one needs two more
#                 tensors of a parameter's size (torch/optim/adam.py, _single_tensor_adam: the root, its quotient), over
#                 all at once one more for each (_multi_tensor_adam: the roots); a fused one, and SGD, need none
#     recompute   ops of a range keep only what the range reads, and results of those that `Graph.keeps` names; before
#                 its backward the others are recomputed, up to the last value that was saved
#                 (torch/utils/checkpoint.py, non-reentrant; create_selective_checkpoint_contexts)
#
# Gradients of parameters are freed after the optimizer's step (set_to_none) and accumulate over microbatches. Sizes are
# exact for the dtypes of the workload; memory that libraries allocate internally is not included. Checked against
# torch's own account of its allocations in `meshwright.validation.memory_sets`.
def trace_step(
    graph: Graph,
    workload: Workload,
    *,
    num_microbatches: int = 1,
    device: Backend = "cpu",
    loop: OptimizerLoop | None = None,
) -> MemoryEvents:
    """Return the memory events of a whole model on one device, from its construction to the end of its second step.

    Args:
        graph: A graph for training, with its loss.
        workload: Optimizer, precision and the samples of a step, divided into microbatches.
        num_microbatches: Number of microbatches of a step, over which gradients accumulate.
        device: "cpu" or "cuda", which determines the workspaces of libraries.
        loop: The optimizer's loop over the parameters; by default that of our runtime (`cost.optimizers`).

    Raises GraphError for a graph without loss or with its own backward, for a batch size that the graph does not
    support, and for microbatches of unequal size.
    """
    if workload.global_batch % num_microbatches:
        raise GraphError(
            f"A step of {workload.global_batch} samples cannot be divided into {num_microbatches} equal microbatches; "
            "expected a divisor of the number of samples."
        )
    order = [(is_backward, index) for index in range(num_microbatches) for is_backward in (False, True)]
    stage = slice_graph(graph, [(0, len(graph.layers))])[0]
    size = workload.global_batch // num_microbatches
    return trace_stage(graph, stage, workload, size, order, device=device, loop=loop)


def trace_stage(
    graph: Graph,
    stage: StageSlice,
    workload: Workload,
    batch_size: int,
    order: Sequence[tuple[bool, int]],
    *,
    device: Backend = "cpu",
    loop: OptimizerLoop | None = None,
    bucket_bytes: int = 0,
    bucketed: Set[int] = frozenset(),
    num_inputs: int | None = None,
    activations_away: bool = False,
    shared: SharedUnits | None = None,
    state_parts: int = 1,
) -> MemoryEvents:
    """Return the memory events of one rank's stage over two steps, for microbatches of ``batch_size`` samples.

    Args:
        graph: A graph for training, with its loss.
        stage: The part of the graph that the rank computes.
        workload: Optimizer and precision.
        batch_size: Samples of a microbatch.
        order: The computations of a step, as pairs (whether it is a backward, the number of the microbatch).
        device: As for `trace_step`.
        loop: As for `trace_step`.
        bucket_bytes: Bytes of all buckets, in which gradients are reduced.
        bucketed: Ids of the parameters whose gradients are in buckets.
        num_inputs: Number of microbatches whose inputs exist during the whole step (default: those of ``order``).
        activations_away: Whether activations are offloaded to host memory until the backward (`away`).
        shared: FSDP units; static memory is counted as if parameters were not sharded.
        state_parts: Number of replicas over which the optimizer step and its states are sharded.

    Raises GraphError as `trace_step` does.
    """
    if not graph.has_loss or graph.mode != "training" or has_own_backward(graph):
        raise GraphError(
            f"Graph {graph.name!r} has no loss, is for inference, or contains its own backward; expected a forward "
            "that ends in a loss. Capture the model with its loss, for training."
        )
    loop = loop or default_loop(workload.optimizer, on_gpu=device == "cuda")
    walk = StageWalk(graph, stage, workload, batch_size, device, loop, bucketed, shared, activations_away, state_parts)
    walk.build(bucket_bytes, num_inputs or len({microbatch for _, microbatch in order}))
    for index in range(_NUM_STEPS):
        walk.compute(order)
        walk.optimize(first=index == 0)
    return walk.ledger.events()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Memory of one stage on one rank, in bytes.

    ``saved_bytes``, ``received_bytes``, ``input_bytes`` and ``sent_bytes`` are per microbatch (see the module).
    ``phases``: memory that each computation adds.
    """

    parameter_bytes: int
    buffer_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    received_bytes: int
    input_bytes: int
    sent_bytes: int
    phases: StagePhases

    @property
    def static_bytes(self) -> int:
        """Bytes of parameters, buffers and optimizer states, which exist during the whole step."""
        return self.parameter_bytes + self.buffer_bytes + self.optimizer_bytes

    @property
    def microbatch_bytes(self) -> int:
        """Bytes that each microbatch in flight adds, from its forward to its backward."""
        return self.received_bytes + self.phases.forward.after_bytes

    def peak_bytes(self, num_in_flight: int, num_microbatches: int | None = None) -> int:
        """Return the peak bytes of a step with at most ``num_in_flight`` microbatches in flight at once.

        ``num_microbatches``: microbatches of a step; by default ``num_in_flight``. Transfers in flight are not
        included.
        """
        count = num_microbatches or num_in_flight
        each, gathered = self.microbatch_bytes, -self.phases.optimizer.after_bytes
        moment = fullest(self.most_bytes(), float(each), float(gathered), num_in_flight, count)
        return self.static_bytes + count * self.input_bytes + round(moment)

    def activation_bytes(self, num_in_flight: int, num_microbatches: int) -> int:
        """Return the peak bytes of inputs, activations and workspaces, without gradients of parameters.

        The arguments are those of `peak_bytes`.
        """
        most = self.most_bytes() - self.most_bytes(GRADIENTS)
        moment = fullest(most, float(self.microbatch_bytes), 0.0, num_in_flight, num_microbatches)
        return num_microbatches * self.input_bytes + round(moment)

    def most_bytes(self, part: int | None = None) -> NDArray[np.float64]:
        """Return the bytes that each computation adds at its peak, in the order of `fullest`, shape (4,).

        ``part``: an index in `MEMORY_PARTS` to count only this part; None for all parts.
        """

        def most(phase: Phase) -> int:
            return phase.most_bytes if part is None else phase.most[part]

        row = np.empty(NUM_MOMENTS)
        row[FORWARD] = most(self.phases.forward) + (self.received_bytes if part in (None, RECEIVED) else 0)
        row[BACKWARD_FIRST], row[BACKWARD_LATER] = most(self.phases.first), most(self.phases.later)
        row[STEP] = most(self.phases.optimizer)
        return row


def backend_of(kind: DeviceKind) -> Backend:
    """Return the device type of a device kind: "cuda" if its datasheet has a rate for float16, else "cpu"."""
    return "cuda" if "float16" in kind.peak_flops_per_s else "cpu"


def weigh_stage(
    graph: Graph,
    stage_slice: StageSlice,
    batch_size: int,
    workload: Workload,
    *,
    device: Backend = "cpu",
    bucketed: Set[int] = frozenset(),
    shared: SharedUnits | None = None,
    activations_away: bool = False,
) -> StageMemory:
    """Return the memory of one stage for microbatches of ``batch_size`` samples.

    ``device``: "cpu" or "cuda". ``bucketed``: ids of the parameters whose gradients are reduced in buckets. ``shared``:
    FSDP units; static memory is counted as if parameters were not sharded. ``activations_away``: whether activations
    are offloaded to host memory between forward and backward (`away`). Offload and recomputation affect ``phases``, but
    not ``saved_bytes``. Raises GraphError for a batch size that the graph does not support.
    """
    graph.check_batch_size(batch_size)
    graph = as_kept(graph, workload.numbers, device)
    training = workload.kind == "training"
    width = workload.float_bytes

    def size(tensors: Iterable[int]) -> int:
        return sum(graph.tensors[i].num_bytes(batch_size, width) for i in tensors)

    def storages(tensors: Iterable[int]) -> set[int]:
        return {graph.tensors[i].storage for i in tensors}

    ops = [graph.ops[i] for i in stage_slice.ops]
    received = {i for channel in stage_slice.incoming for i in channel.tensors}
    trainable = [i for i in stage_slice.parameters if graph.tensors[i].requires_grad] if training else []
    elsewhere = storages(received) | storages(stage_slice.inputs)
    state_roles = ("parameter", "buffer", "constant")
    saved = storages(i for op in ops for i in op.saved) if training else set()
    saved = {i for i in saved if graph.tensors[i].role not in state_roles} - elsewhere
    outgoing = [i for channel in stage_slice.outgoing for i in channel.tensors]
    sent = storages([*outgoing, *stage_slice.outputs]) - saved - elsewhere
    saved_bytes, gradient_bytes = size(saved), sum(workload.gradient_bytes(graph.tensors[i]) for i in trainable)
    sent_bytes = size(i for i in sent if graph.tensors[i].role not in state_roles)
    if has_own_backward(graph):
        largest = max((size(i for i in op.outputs if graph.tensors[i].storage == i) for op in ops), default=0)
        returned = sum(channel.backward_bytes(graph, batch_size, width) for channel in stage_slice.incoming)
        kept = {SAVED: saved_bytes, SENT: sent_bytes}
        cut = () if shared is None else (shared.root, *shared.units)
        own_bytes = gradient_bytes + sum(unit.own_bytes - unit.scattered_bytes for unit in cut)
        phases = count_phases(kept, own_bytes, returned, largest * (2 if training else 1))
    else:
        phases = trace_phases(
            graph,
            stage_slice,
            workload,
            batch_size,
            device=device,
            loop=default_loop(workload.optimizer, on_gpu=device == "cuda"),
            bucketed=bucketed,
            shared=shared,
            activations_away=activations_away,
        )
    return StageMemory(
        parameter_bytes=size(stage_slice.parameters),
        buffer_bytes=size(stage_slice.buffers),
        gradient_bytes=gradient_bytes,
        optimizer_bytes=sum(optimizer_bytes(graph.tensors[i], workload) for i in trainable),
        saved_bytes=saved_bytes,
        received_bytes=size(received),
        input_bytes=size(stage_slice.inputs),
        sent_bytes=sent_bytes,
        phases=phases,
    )
