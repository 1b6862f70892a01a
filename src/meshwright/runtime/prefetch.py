"""Prefetched inputs of microbatches: a stage that needs one waits until it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Prefetched(NamedTuple):
    """Tensors of a microbatch (graph inputs in order), and the span of their loading, by this process's clock."""

    tensors: tuple[torch.Tensor, ...]
    start_ns: int
    end_ns: int


class Loading:
    """A microbatch that can be awaited like a transfer; ``span`` is when it was loaded, once it is."""

    def __init__(self, wait: Callable[[], Prefetched]) -> None:
        self._wait = wait
        self.span: tuple[int, int] | None = None

    def wait(self) -> None:
        """Return when it is loaded."""
        made = self._wait()
        self.span = made.start_ns, made.end_ns


@dataclass(frozen=True, slots=True)
class Coming(Sequence[Sequence[torch.Tensor]]):
    """The inputs of a stage for each microbatch: ``take(m)`` waits for one, ``choose`` selects the stage's own."""

    size: int
    take: Callable[[int], Prefetched]
    choose: Callable[[tuple[torch.Tensor, ...]], Sequence[torch.Tensor]]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, microbatch: int) -> Sequence[torch.Tensor]:  # type: ignore[override]  # never a slice
        return self.choose(self.take(microbatch).tensors)

    def loading(self, microbatch: int) -> Loading:
        """Return a handle to wait for a microbatch before its use."""
        return Loading(lambda: self.take(microbatch))
