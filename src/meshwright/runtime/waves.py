"""Virtual workers: the changes of a stage's replicas in a wave of minibatches are summed, and merged later.

Each replica updates weights of its own. At the end of a wave, d = w - w', with w' the weights at its start, is its
change; the sum over the replicas less its own d is the change of the others. A merge adds the latter to the weights
(`program.schedules.endless`; Park et al., HetPipe, ATC 2020).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from meshwright.program import Bucket


class _WaveBucket:
    """Parameters that are summed together; ``begun`` are their values at the start of the wave."""

    def __init__(self, bucket: Bucket, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.index = bucket.index
        self.parameters = list(parameters)
        self.sizes = [parameter.numel() for parameter in parameters]
        self.begun = self.flatten()
        # For the waves that are not merged yet: this replica's change, and the sum over all.
        self.waves: deque[tuple[torch.Tensor, torch.Tensor]] = deque()

    def flatten(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])

    def end_wave(self) -> torch.Tensor:
        now = self.flatten()
        own = now - self.begun
        self.begun = now
        self.waves.append((own, own.clone()))
        return self.waves[-1][1]

    def merge(self) -> None:
        own, total = self.waves.popleft()
        others = (total - own).split(self.sizes)
        for parameter, change in zip(self.parameters, others, strict=True):
            parameter.data.add_(change.view_as(parameter))
        self.begun = self.flatten()


class WaveExchange:
    """The buckets of a rank whose updates are summed by waves."""

    def __init__(self, buckets: Sequence[tuple[Bucket, Sequence[torch.nn.Parameter]]]) -> None:
        self._buckets = {bucket.index: _WaveBucket(bucket, parameters) for bucket, parameters in buckets}

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The weights at the start of the wave."""
        return [bucket.begun for bucket in self._buckets.values()]

    @property
    def stages(self) -> Mapping[int, Collection[int]]:
        """Empty: no gradients are summed."""
        return {}

    def begin(self, buckets: Collection[int], on_ready: Callable[[int], None]) -> None:
        """Do nothing: no gradients are summed."""

    def finish(self) -> None:
        """Do nothing: no gradients are summed."""

    def to_sum(self, part: int) -> torch.Tensor:
        """End the wave: the change of this replica, to be summed over all in place. Buckets are not cut."""
        return self._buckets[part].end_wave()

    def merge(self) -> None:
        """Add the changes of the others in the oldest wave that was summed."""
        for bucket in self._buckets.values():
            bucket.merge()

    def restart(self) -> None:
        """Drop the waves that were not merged."""
        for bucket in self._buckets.values():
            bucket.waves.clear()
            bucket.begun = bucket.flatten()

    def close(self) -> None:
        """Do nothing: parameters have no hooks."""
