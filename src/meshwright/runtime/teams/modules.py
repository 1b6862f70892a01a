"""Ops as modules that compute nothing of their own: torch's operator, or empty results."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.capture import rebuild
from meshwright.spec.graph import Graph


class Plain(torch.nn.Module):
    """An op as torch has it, called with its inputs."""

    def __init__(self, graph: Graph, index: int, batch_size: int, device: torch.device) -> None:
        super().__init__()
        op = graph.ops[index]
        feeds = tuple(dict.fromkeys(op.inputs))
        self._places = tuple(op.inputs.index(i) for i in feeds)
        self._call = rebuild(graph, feeds, op.outputs[:1], [index], batch_size=batch_size, converters={}, device=device)

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        """What torch's operator makes."""
        found: tuple[torch.Tensor] = self._call(*(given[place] for place in self._places))
        return found[0]


class Empty(torch.nn.Module):
    """Results of known shapes and types, without values."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        super().__init__()
        self._looks, self._device = tuple(zip(shapes, dtypes, strict=True)), device

    def forward(self, *given: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:  # noqa: ARG002 - only shapes count
        """One tensor, or a tuple of several."""
        made = tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._looks)
        return made[0] if len(made) == 1 else made
