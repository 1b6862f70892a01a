"""Prefetched inputs of microbatches: a stage waits for a microbatch only when it reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Prefetched(NamedTuple):
    """The graph inputs of a microbatch in order, and start and end of their loading (ns of `time.perf_counter_ns`)."""

    tensors: tuple[torch.Tensor, ...]
    start_ns: int
    end_ns: int


class Loading:
    """A microbatch being loaded, to wait for like a transfer.

    ``span``: start and end of its loading in ns, None until `wait` returned.
    """

    def __init__(self, wait: Callable[[], Prefetched]) -> None:
        self._wait = wait
        self.span: tuple[int, int] | None = None

    def wait(self) -> None:
        """Wait until the microbatch is loaded."""
        made = self._wait()
        self.span = made.start_ns, made.end_ns


@dataclass(frozen=True, slots=True)
class Coming(Sequence[Sequence[torch.Tensor]]):
    """The inputs of a stage for ``size`` microbatches, loaded in the background.

    ``take(m)`` waits for microbatch m; ``choose(tensors)`` selects the graph inputs that the stage reads.
    """

    size: int
    take: Callable[[int], Prefetched]
    choose: Callable[[tuple[torch.Tensor, ...]], Sequence[torch.Tensor]]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, microbatch: int) -> Sequence[torch.Tensor]:  # type: ignore[override]  # never a slice
        return self.choose(self.take(microbatch).tensors)

    def loading(self, microbatch: int) -> Loading:
        """Return a handle with which to wait for a microbatch."""
        return Loading(lambda: self.take(microbatch))
