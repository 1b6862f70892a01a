"""How many bytes a stage keeps, by what they are for.

    static         parameters + buffers + gradients + optimizer states (+ master weights in mixed precision)
    per microbatch saved + received + inputs + sent
    peak           static + microbatches in flight · per microbatch + workspace

``saved`` is what autograd keeps for the backward of the stage's ops, each storage once; what the stage received, the
inputs it reads itself and its own state are not in it. ``sent`` are outgoing values that nothing saved: they live until
their gradient returns. ``workspace`` is the largest output of one op, twice in training: a value and its gradient.
Floating tensors are as wide as the workload's precision says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.cost.optimizers import STEP_COUNTER_BYTES, state_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshwright.spec import Graph, StageSlice, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes of one stage on one rank; the last five are per microbatch in flight, but for ``workspace_bytes``."""

    parameter_bytes: int
    buffer_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    received_bytes: int
    input_bytes: int
    sent_bytes: int
    workspace_bytes: int

    @property
    def static_bytes(self) -> int:
        """What is there whether or not a microbatch is."""
        return self.parameter_bytes + self.buffer_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def microbatch_bytes(self) -> int:
        """What each microbatch in flight adds, from its forward to its backward."""
        return self.saved_bytes + self.received_bytes + self.input_bytes + self.sent_bytes

    def peak_bytes(self, num_in_flight: int) -> int:
        """Peak with a number of microbatches in flight."""
        return self.static_bytes + num_in_flight * self.microbatch_bytes + self.workspace_bytes


def weigh_stage(graph: Graph, stage_slice: StageSlice, batch_size: int, workload: Workload) -> StageMemory:
    """Memory of one stage for microbatches of ``batch_size`` samples.

    Raises GraphError for a batch size that the graph does not describe.
    """
    graph.check_batch_size(batch_size)
    training = workload.kind == "training"
    width = workload.float_bytes

    def size(tensors: Iterable[int]) -> int:
        return sum(graph.tensors[i].num_bytes(batch_size, width) for i in tensors)

    def storages(tensors: Iterable[int]) -> set[int]:
        return {graph.tensors[i].storage for i in tensors}

    ops = [graph.ops[i] for i in stage_slice.ops]
    received = {i for channel in stage_slice.incoming for i in channel.tensors}
    trainable = [i for i in stage_slice.parameters if graph.tensors[i].requires_grad] if training else []
    elements = sum(graph.tensors[i].num_elements(0) for i in trainable)
    elsewhere = storages(received) | storages(stage_slice.inputs)
    state_roles = ("parameter", "buffer", "constant")
    saved = storages(i for op in ops for i in op.saved) if training else set()
    saved = {i for i in saved if graph.tensors[i].role not in state_roles} - elsewhere
    outgoing = [i for channel in stage_slice.outgoing for i in channel.tensors]
    sent = storages([*outgoing, *stage_slice.outputs]) - saved - elsewhere
    largest = max((size(i for i in op.outputs if graph.tensors[i].storage == i) for op in ops), default=0)
    counters = STEP_COUNTER_BYTES * len(trainable) if workload.optimizer.kind == "adamw" else 0
    return StageMemory(
        parameter_bytes=size(stage_slice.parameters),
        buffer_bytes=size(stage_slice.buffers),
        gradient_bytes=size(trainable),
        optimizer_bytes=elements * state_bytes(workload.optimizer, workload.precision) + counters,
        saved_bytes=size(saved),
        received_bytes=size(received),
        input_bytes=size(stage_slice.inputs),
        sent_bytes=size(i for i in sent if graph.tensors[i].role not in state_roles),
        workspace_bytes=largest * (2 if training else 1),
    )
