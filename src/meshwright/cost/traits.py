"""The work of an op of a graph: the work of its key (`cost.work`), corrected with facts that only the graph contains.

    FLOPs       as counted by capture
    views       an op is a view if its output does not own its memory; a reshape may be a view or a copy
    backward    counted in training, if an output needs a gradient
    accumulate  3 × bytes of the parameters: read the old and the new gradient, write the sum

For an operator that ``operators.toml`` lacks, the forward reads the distinct inputs and writes the outputs. The
backward reads the saved values and the gradients of the outputs, and writes the gradients of the inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from meshwright.cost.work import Amount, key_in, name_in, operators, read_work
from meshwright.spec import DTYPE_BYTES, Graph, Op

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The work (FLOPs, bytes and kernels) of one op in its forward, its backward, and gradient accumulation."""

    forward: Amount
    backward: Amount
    accumulate: Amount


def operator_name(op: Op) -> str:
    """Return the name of an op's operator: ``relu_`` for ``aten.relu_.default``."""
    return name_in(op.kind)


def family_of(op: Op) -> str:
    """Return the family of an op in the table of operators (`Family`); "" for an unknown operator."""
    known = operators().get(operator_name(op))
    return known.family if known is not None else ""


def is_view(graph: Graph, op: Op) -> bool:
    """Return whether all outputs of the op are views of other tensors' memory (or the op has no output)."""
    if op.is_in_place or op.flops.fixed or op.flops.per_sample:
        return False
    return all(graph.tensors[i].storage != i for i in op.outputs)


def passes_of(graph: Graph, op: Op, batch_size: int, dtype: str, key: str = "") -> Passes:
    """Return the work of an op at a batch size, with floating-point values of ``dtype``.

    ``key``: the op's `key_in`, if already computed.
    """
    known = read_work(key or key_in(dtype, graph, op, batch_size))
    count = _Count(graph, op, batch_size, dtype)
    if known is None:
        forward, backward = count.forward(), count.backward()
    else:
        forward, backward = known.forward, known.backward
        if (known.family == "view") != is_view(graph, op):
            forward = count.forward()
    trained = graph.mode == "training" and any(graph.tensors[i].requires_grad for i in op.outputs)
    backward = replace(backward, flops=op.backward_flops.at(batch_size)) if trained else Amount()
    return Passes(
        forward=replace(forward, flops=op.flops.at(batch_size)),
        backward=backward,
        accumulate=count.accumulation() if trained else Amount(),
    )


@dataclass(frozen=True, slots=True)
class _Count:
    """Bytes of an op's tensors in a graph."""

    graph: Graph
    op: Op
    batch_size: int
    dtype: str

    def forward(self) -> Amount:
        if is_view(self.graph, self.op):
            return Amount(num_views=1)
        tensors = self.graph.tensors
        written = self._size(i for i in self.op.outputs if self.op.is_in_place or tensors[i].storage == i)
        return Amount(num_bytes=self._size(self.op.inputs) + written, num_kernels=1)

    def backward(self) -> Amount:
        if is_view(self.graph, self.op):
            return Amount(num_views=1)
        wanted, yielded = self._wanted(self.op.inputs), self._wanted(self.op.outputs)
        return Amount(
            num_bytes=self._size(self.op.saved) + self._size(yielded) + self._size(wanted), num_kernels=len(wanted)
        )

    def accumulation(self) -> Amount:
        parameters = [i for i in self._wanted(self.op.inputs) if self.graph.tensors[i].role == "parameter"]
        return Amount(num_bytes=3 * self._size(parameters), num_kernels=len(parameters))

    def _wanted(self, tensors: Iterable[int]) -> list[int]:
        return [i for i in dict.fromkeys(tensors) if self.graph.tensors[i].requires_grad]

    def _size(self, tensors: Iterable[int]) -> int:
        width = DTYPE_BYTES[self.dtype]
        return sum(self.graph.tensors[i].num_bytes(self.batch_size, width) for i in dict.fromkeys(tensors))
