"""Inputs of microbatches that are still being made: whoever needs one waits for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Prefetched(NamedTuple):
    """Tensors of a microbatch (graph inputs in order), and when they were made, by this process's clock."""

    tensors: tuple[torch.Tensor, ...]
    start_ns: int
    end_ns: int


class Loading:
    """A microbatch that is awaited as transfers are; ``span`` is when it was made, once it is there."""

    def __init__(self, wait: Callable[[], Prefetched]) -> None:
        self._wait = wait
        self.span: tuple[int, int] | None = None

    def wait(self) -> None:
        """Come back when it is there."""
        made = self._wait()
        self.span = made.start_ns, made.end_ns


@dataclass(frozen=True, slots=True)
class Coming(Sequence[Sequence[torch.Tensor]]):
    """What a stage reads of each microbatch of a batch: ``take(m)`` waits for one, ``choose`` finds the stage's own."""

    size: int
    take: Callable[[int], Prefetched]
    choose: Callable[[tuple[torch.Tensor, ...]], Sequence[torch.Tensor]]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, microbatch: int) -> Sequence[torch.Tensor]:  # type: ignore[override]  # never a slice
        return self.choose(self.take(microbatch).tensors)

    def loading(self, microbatch: int) -> Loading:
        """To wait for a microbatch ahead of its use."""
        return Loading(lambda: self.take(microbatch))
