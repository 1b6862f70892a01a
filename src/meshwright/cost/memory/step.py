"""Every allocation of a training step of a whole graph on one device, op by op, as eager torch makes them.

    forward     an op takes its outputs and what it keeps for its backward; a value goes after its last use unless some
                op saved it
    backward    ops in reverse: each takes the gradients of its inputs (`backward`), then what it saved and the
                gradients of its outputs go; a gradient that meets another is added in place where nothing else holds it
    step        states are made at the first step. AdamW on a CPU goes over the parameters one by one and takes two more
                tensors of a parameter's size (torch/optim/adam.py, _single_tensor_adam: the root, its quotient), on a
                GPU over all at once, with one more for each (_multi_tensor_adam: the roots); SGD takes none
    recompute   ops of a range keep only what the range reads; before its backward it is computed again, up to the last
                value that was saved (torch/utils/checkpoint.py, non-reentrant)

Gradients of parameters are freed after the optimizer's step (set_to_none) and gather over microbatches. Sizes are exact
for the dtypes of the workload; what libraries take for themselves is not seen. Checked against torch's own account of
its allocations in `meshwright.validation.memory`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.cost.memory.backward import Backend, backward_workspace_bytes, forward_workspace_bytes, passes_on
from meshwright.cost.memory.ledger import Ledger, MemoryEvents, Peak, find_peak
from meshwright.cost.memory.lifetimes import find_lifetimes
from meshwright.cost.optimizers import MASTER_BYTES
from meshwright.spec import GraphError
from meshwright.spec.memory import (
    BUFFERS,
    GRADIENTS,
    INPUTS,
    OPTIMIZER,
    PARAMETERS,
    SAVED,
    WORKSPACE,
)

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from meshwright.spec import Graph, Op, Workload

# The first step makes the optimizer's states, the second is like all later ones.
_NUM_STEPS = 2
# AdamW counts its steps in one float32 per parameter tensor.
_COUNTER_BYTES = 4


def predict_step_memory(
    graph: Graph,
    workload: Workload,
    *,
    num_microbatches: int = 1,
    recompute: Sequence[tuple[int, int]] = (),
    device: Backend = "cpu",
) -> Peak:
    """Peak of a steady training step on one device, all of the model and the batch on it; see `trace_step`."""
    return find_peak(trace_step(graph, workload, num_microbatches=num_microbatches, recompute=recompute, device=device))


def trace_step(
    graph: Graph,
    workload: Workload,
    *,
    num_microbatches: int = 1,
    recompute: Sequence[tuple[int, int]] = (),
    device: Backend = "cpu",
) -> MemoryEvents:
    """Events from building the model to the end of its second step.

    Args:
        graph: A graph for training, with its loss.
        workload: Optimizer, precision and the samples of a step, which the microbatches share.
        num_microbatches: How many the step is made of; gradients gather.
        recompute: Ranges of ops ``start:stop`` that are computed again in the backward; see `recompute_layers`.
        device: Whose libraries compute, and so what they take meanwhile and how the optimizer goes over the tensors.

    Raises GraphError for a graph without loss or with a backward of its own, for a batch that it does not describe, for
    microbatches of unequal size, and for ranges that overlap or leave the graph.
    """
    if workload.global_batch % num_microbatches:
        raise GraphError(
            f"A step of {workload.global_batch} samples was to be made of {num_microbatches} microbatches; expected a "
            "number that divides it. Choose one."
        )
    step = _Step(graph, workload, workload.global_batch // num_microbatches, tuple(recompute), device)
    step.build()
    for index in range(_NUM_STEPS):
        for _ in range(num_microbatches):
            step.forward()
            step.backward()
        step.optimize(first=index == 0)
    return step.ledger.events()


@dataclass(slots=True)
class _Gradient:
    """A gradient's storage and how many values share it."""

    block: int
    holders: int = 1


class _Step:
    """Walks through the ops and writes what they take and free."""

    def __init__(
        self, graph: Graph, workload: Workload, batch_size: int, ranges: tuple[tuple[int, int], ...], device: Backend
    ) -> None:
        graph.check_batch_size(batch_size)
        if not graph.has_loss or graph.mode != "training" or any(op.phase == "backward" for op in graph.ops):
            raise GraphError(
                f"Graph {graph.name!r} has no loss, is for inference, or holds its own backward; expected a forward "
                "that ends in a loss. Capture the model with its loss, for training."
            )
        self.ledger = Ledger()
        self._graph, self._workload, self._device = graph, workload, device
        self._sizes = [tensor.num_bytes(batch_size, workload.float_bytes) for tensor in graph.tensors]
        self._elements = [tensor.num_elements(batch_size) for tensor in graph.tensors]
        self._lives = find_lifetimes(graph, ranges)
        # Blocks of values by storage, of gradients by tensor.
        self._values: dict[int, int] = {}
        self._again: dict[int, int] = {}
        self._gradients: dict[int, _Gradient] = {}
        self._parameter_gradients: dict[int, int] = {}

    def build(self) -> None:
        """The model's state and the batch: there all the time."""
        parts = {"parameter": PARAMETERS, "buffer": BUFFERS, "constant": BUFFERS, "input": INPUTS}
        for i, tensor in enumerate(self._graph.tensors):
            if tensor.role in parts and tensor.storage == i:
                self.ledger.take(self._sizes[i], parts[tensor.role])

    def forward(self) -> None:
        """All ops; what no backward needs goes after its last use."""
        for index, op in enumerate(self._graph.ops):
            self.ledger.begin(f"forward of {op.name}")
            keeps = index not in self._lives.recomputed
            self._compute(index, op, self._values, self._lives.kept, keeps_internals=keeps)

    def backward(self) -> None:
        """All ops in reverse, after the loss's own gradient."""
        loss = self._graph.outputs[0]
        self.ledger.begin("gradient of the loss")
        self._gradients[loss] = _Gradient(self.ledger.take(self._sizes[loss], WORKSPACE))
        for index in reversed(range(len(self._graph.ops))):
            if index + 1 in self._lives.starts:
                self._recompute(self._lives.starts[index + 1], index + 1)
            op = self._graph.ops[index]
            self.ledger.begin(f"backward of {op.name}")
            self._differentiate(op)
            self._release(self._values, self._lives.released.get(index, ()))
            self._release(self._again, self._lives.released_again.get(index, ()))
        for block in (*self._values.values(), *self._again.values()):
            self.ledger.free(block)
        self._values.clear()
        self._again.clear()

    def optimize(self, *, first: bool) -> None:
        """One step of the optimizer over all parameters that have a gradient, then the gradients go."""
        kind, num_states = self._workload.optimizer.kind, self._workload.optimizer.num_states
        mixed = self._workload.precision == "bfloat16"
        width = MASTER_BYTES if mixed else self._workload.float_bytes
        sizes = {i: self._elements[i] * width for i in self._parameter_gradients}
        for parameter, size in sizes.items():
            self.ledger.begin(f"optimizer step of {self._graph.tensors[parameter].name}")
            if first:
                for _ in range(num_states + int(mixed)):
                    self.ledger.take(size, OPTIMIZER)
                if kind == "adamw":
                    self.ledger.take(_COUNTER_BYTES, OPTIMIZER)
            if kind == "adamw" and self._device == "cpu":
                for copy in [self.ledger.take(size, WORKSPACE) for _ in range(2)]:
                    self.ledger.free(copy)
        if kind == "adamw" and self._device == "cuda":
            self.ledger.begin("optimizer step of all parameters")
            for copy in [self.ledger.take(size, WORKSPACE) for size in sizes.values()]:
                self.ledger.free(copy)
        self.ledger.begin("gradients set to none")
        for block in self._parameter_gradients.values():
            self.ledger.free(block)
        self._parameter_gradients.clear()

    def _compute(self, index: int, op: Op, blocks: dict[int, int], kept: Set[int], *, keeps_internals: bool) -> None:
        """Take the outputs of an op; free what had its last use, unless it is kept."""
        tensors = self._graph.tensors
        own = [i for i in op.outputs if tensors[i].storage == i]
        for i in own:
            blocks[i] = self.ledger.take(self._sizes[i], SAVED if i in kept else WORKSPACE)
        internal = [i for i in op.saved if tensors[i].role == "saved" and tensors[i].storage == i]
        for i in internal:
            blocks[i] = self.ledger.take(self._sizes[i], SAVED if keeps_internals else WORKSPACE)
        self._borrow(forward_workspace_bytes(self._graph, op, self._sizes, self._device))
        if not keeps_internals:
            for i in internal:
                self.ledger.free(blocks.pop(i))
        for storage in self._lives.last_used.get(index, ()):
            if storage in blocks and storage not in kept:
                self.ledger.free(blocks.pop(storage))

    def _recompute(self, start: int, stop: int) -> None:
        """Compute a range again, up to the last value that its backward reads."""
        tensors = self._graph.tensors
        needed = {tensors[i].storage for op in self._graph.ops[start:stop] for i in op.saved}
        savers = [index for index in range(start, stop) if self._graph.ops[index].saved]
        for index in range(start, savers[-1] + 1 if savers else start):
            op = self._graph.ops[index]
            made = {tensors[i].storage for i in (*op.outputs, *op.saved) if tensors[i].role in ("activation", "saved")}
            made &= {*op.outputs, *(i for i in op.saved if tensors[i].role == "saved")}
            if index == savers[-1] and not made & {tensors[i].storage for i in op.saved}:
                break
            self.ledger.begin(f"forward of {op.name} again")
            self._compute(index, op, self._again, needed, keeps_internals=True)
        for storage in [storage for storage in self._again if storage not in needed]:
            self.ledger.free(self._again.pop(storage))

    def _differentiate(self, op: Op) -> None:
        """The backward of one op: gradients of its inputs are made or passed on, those of its outputs go."""
        tensors, sizes = self._graph.tensors, self._sizes
        arrived = {i: self._gradients.pop(i) for i in op.outputs if i in self._gradients}
        if not arrived:
            return
        inputs = [i for i in dict.fromkeys(op.inputs) if tensors[i].requires_grad]
        first = next(iter(arrived))
        made: list[tuple[int, _Gradient]] = []
        for i in inputs:
            if len(arrived) == 1 and passes_on(op.kind, self._elements[i], self._elements[first]):
                arrived[first].holders += 1
                made.append((i, arrived[first]))
            else:
                becomes = tensors[i].role == "parameter" and i not in self._parameter_gradients
                made.append((i, _Gradient(self.ledger.take(sizes[i], GRADIENTS if becomes else WORKSPACE))))
        self._borrow(backward_workspace_bytes(self._graph, op, sizes, self._device))
        for gradient in arrived.values():
            self._drop(gradient)
        for i, gradient in made:
            self._deliver(i, gradient)

    def _deliver(self, tensor: int, gradient: _Gradient) -> None:
        """Hand a gradient on to the op that made the tensor, or to the parameter."""
        if self._graph.tensors[tensor].role == "parameter":
            if tensor in self._parameter_gradients:
                self._drop(gradient)
            elif gradient.holders == 1:
                self._parameter_gradients[tensor] = gradient.block
            else:
                self._parameter_gradients[tensor] = self.ledger.take(self._sizes[tensor], GRADIENTS)
                self._drop(gradient)
            return
        there = self._gradients.get(tensor)
        if there is None:
            self._gradients[tensor] = gradient
        elif there.holders == 1:
            self._drop(gradient)
        else:
            self._gradients[tensor] = _Gradient(self.ledger.take(self._sizes[tensor], WORKSPACE))
            self._drop(there)
            self._drop(gradient)

    def _release(self, blocks: dict[int, int], storages: Sequence[int]) -> None:
        for storage in storages:
            if storage in blocks:
                self.ledger.free(blocks.pop(storage))

    def _borrow(self, num_bytes: int) -> None:
        if num_bytes:
            self.ledger.free(self.ledger.take(num_bytes, WORKSPACE))

    def _drop(self, gradient: _Gradient) -> None:
        gradient.holders -= 1
        if not gradient.holders:
            self.ledger.free(gradient.block)
