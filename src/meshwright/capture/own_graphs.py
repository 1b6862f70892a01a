"""Ops with a graph inside, as those under `torch.no_grad` in a model: runnable beside ops that a graph alone tells.

A graph keeps only a hash of what stands in such an op (a table of rotary positions, say), so its module is a part of
the captured model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from meshwright.capture.devices import CPU
from meshwright.capture.parts import part

if TYPE_CHECKING:
    from meshwright.capture.captured import Captured
    from meshwright.spec import Graph, Op


def has_own_graph(graph: Graph, op: Op) -> bool:
    """Whether an op has a graph inside, and the same results for every batch."""
    shapes = (graph.tensors[i].shape for i in (*op.inputs, *op.outputs))
    return "." not in op.kind and not any(extent.per_sample for shape in shapes for extent in shape)


def own_graph(captured: Captured, op: Op, *, batch_size: int, device: torch.device = CPU) -> nn.Module:
    """What computes such an op of the captured graph, or of a local graph of it, from its inputs.

    Raises GraphError for a batch size that does not fit the graph.
    """
    graph = captured.graph
    index = next(i for i, other in enumerate(graph.ops) if other.name == op.name)
    feeds = tuple(dict.fromkeys(i for i in op.inputs if graph.tensors[i].role in ("activation", "input")))
    made = part(captured, feeds, op.outputs, batch_size=batch_size, ops=[index], device=device)
    return _Fed(made, tuple(op.inputs.index(i) for i in feeds), is_single=len(op.outputs) == 1)


class _Fed(nn.Module):
    """A part of a model, called with some of an op's inputs."""

    def __init__(self, made: nn.Module, places: tuple[int, ...], *, is_single: bool) -> None:
        super().__init__()
        self._made, self._places, self._is_single = made, places, is_single

    def forward(self, *given: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = self._made(*(given[place] for place in self._places))
        return found[0] if self._is_single else found
