"""Allocations and frees of one op, wherever in a step it is computed: found once for each op of a walk."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from meshwright.cost.autocast import cast_inputs, compute_type, kept_copies
from meshwright.cost.memory.backward import backward_workspace_bytes, forward_workspace_bytes, passes_on
from meshwright.cost.memory.kept import casts_within
from meshwright.cost.memory.sizes import OtherSizes, measure_tensors
from meshwright.spec.units import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshwright.cost.memory.backward import Backend
    from meshwright.spec import Graph, Op
    from meshwright.spec.precision import Numbers


class OpMemory(NamedTuple):
    """Tensors and bytes of an op.

    ``made`` are outputs with storages of their own, ``kept`` such values that only the backward reads, and ``copies``
    those of them that autocast makes of inputs. ``cast``: bytes of inputs in the type to which autocast casts them.
    ``narrows``: the op casts inside, instead of its inputs. ``passing``: pairs of an input and an output whose
    gradients share memory. ``differentiated``: inputs that require a gradient, each once.
    """

    made: tuple[int, ...]
    kept: tuple[int, ...]
    copies: tuple[int, ...]
    cast: Mapping[int, int]
    cast_bytes: int
    narrows: bool
    forward_workspace: int
    backward_workspace: int
    differentiated: tuple[int, ...]
    passing: frozenset[tuple[int, int]]


class OpMemories:
    """The memory of the ops of a graph for one batch size, each computed at first use."""

    def __init__(
        self, graph: Graph, batch_size: int, numbers: Numbers, float_bytes: int | None, device: Backend
    ) -> None:
        self._graph, self._numbers, self._device = graph, numbers, device
        self.sizes, self.elements = measure_tensors(graph, batch_size, float_bytes, device)
        self._found: dict[int, OpMemory] = {}

    def __getitem__(self, index: int) -> OpMemory:
        found = self._found.get(index)
        if found is None:
            op = self._graph.ops[index]
            found = _measure_op(self._graph, op, self.sizes, self.elements, self._numbers, self._device)
            self._found[index] = found
        return found


@lru_cache(maxsize=16)
def op_memories(
    graph: Graph, batch_size: int, numbers: Numbers, float_bytes: int | None, device: Backend
) -> OpMemories:
    """Return the memory of the ops of a graph `as_kept`. Raises as `measure_tensors`."""
    return OpMemories(graph, batch_size, numbers, float_bytes, device)


def _measure_op(
    graph: Graph, op: Op, sizes: Sequence[int], elements: Sequence[int], numbers: Numbers, device: Backend
) -> OpMemory:
    tensors, lower = graph.tensors, numbers.autocast
    cast = {}
    if lower:
        width = DTYPE_BYTES[compute_type(graph, op, lower)]
        cast = {i: elements[i] * width for i in cast_inputs(graph, op, lower)}
    copies = tuple(kept_copies(graph, op))
    there = OtherSizes(sizes, cast) if cast else sizes
    differentiated = tuple(i for i in dict.fromkeys(op.inputs) if tensors[i].requires_grad)
    return OpMemory(
        made=tuple(i for i in op.outputs if tensors[i].storage == i),
        kept=tuple(i for i in op.saved if tensors[i].role == "saved" and tensors[i].storage == i),
        copies=copies,
        cast=cast,
        cast_bytes=sum(cast.values()),
        narrows=device == "cuda" and casts_within(op) and bool(copies),
        forward_workspace=forward_workspace_bytes(graph, op, there, device),
        backward_workspace=backward_workspace_bytes(graph, op, there, device),
        differentiated=differentiated,
        passing=frozenset(
            (i, output)
            for i in differentiated
            for output in op.outputs
            if passes_on(graph, op, i, elements[i], elements[output])
        ),
    )
