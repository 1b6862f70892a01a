"""Bytes and elements of the tensors of a graph, for walks through its ops."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshwright.cost.memory.backward import unrecorded_bytes
from meshwright.cost.optimizers import optimizer_bytes
from meshwright.spec import GraphError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from meshwright.cost.memory.backward import Backend
    from meshwright.spec import Graph, Workload


class OtherSizes:
    """Bytes by tensor, with other values for some tensors."""

    def __init__(self, usual: Sequence[int], others: Mapping[int, int]) -> None:
        self._usual, self._others = usual, others

    def __getitem__(self, tensor: int) -> int:
        return self._others.get(tensor, self._usual[tensor])


@lru_cache(maxsize=64)
def measure_tensors(
    graph: Graph, batch_size: int, float_bytes: int | None, device: Backend
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return bytes and elements of all tensors.

    Raises GraphError for an invalid batch size and for a graph with its own backward.
    """
    graph.check_batch_size(batch_size)
    if has_own_backward(graph):
        raise GraphError(
            f"Graph {graph.name!r} holds its own backward; expected a forward, whose backward autograd makes. Capture "
            "the model alone."
        )
    sizes = [max(tensor.num_bytes(batch_size, float_bytes), 0) for tensor in graph.tensors]
    for op in graph.ops:
        for i, num_bytes in unrecorded_bytes(graph, op, batch_size, device).items():
            sizes[i] = num_bytes
    return tuple(sizes), tuple(tensor.num_elements(batch_size) for tensor in graph.tensors)


class TensorBytes(NamedTuple):
    """Bytes by tensor, shape (tensors,) each; gradients and optimizer states are those of trained parameters."""

    values: NDArray[np.int64]
    gradients: NDArray[np.int64]
    states: NDArray[np.int64]


def weigh_tensors(graph: Graph, batch_size: int, workload: Workload) -> TensorBytes:
    """Return the bytes of a graph's tensors at a batch size; the bytes of stages and layers are their sums."""
    values = [tensor.num_bytes(batch_size, workload.float_bytes) for tensor in graph.tensors]
    gradients, states = np.zeros(len(values), np.int64), np.zeros(len(values), np.int64)
    for i in graph.parameters if workload.kind == "training" else ():
        if graph.tensors[i].requires_grad:
            gradients[i] = workload.gradient_bytes(graph.tensors[i])
            states[i] = optimizer_bytes(graph.tensors[i], workload)
    return TensorBytes(np.array(values, np.int64), gradients, states)


@lru_cache(maxsize=64)
def has_own_backward(graph: Graph) -> bool:
    """Return whether the graph contains ops of a backward (capture of a joint graph)."""
    return any(op.phase == "backward" for op in graph.ops)
