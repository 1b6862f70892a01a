"""Scaled losses for float16 gradients: the scale, and whether all ranks may update.

Losses are multiplied by the scale, so that small gradients do not vanish in float16. Before the first update of a step
a rank divides its gradients by the scale and notes whether one is not finite; the program's all-reduce over all ranks
(`program.exchange`) sums these flags. If any is set, all ranks skip the step and halve the scale; after 2,000 steps in
a row it is doubled (defaults of torch.amp.GradScaler).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.runtime.agreed import AgreedNumber
from meshwright.runtime.fully_sharded import own_part
from meshwright.runtime.teams import TeamPosition
from meshwright.runtime.transport import Transport

_START, _GROWTH, _BACKOFF, _GROWTH_STEPS = 2.0**16, 2.0, 0.5, 2000


class LossScale(AgreedNumber):
    """The scale of a run, and per step the number of ranks with a gradient that is not finite.

    Arguments as in `AgreedNumber`. ``unscales``: gradients are divided by the scale here; otherwise the updater
    multiplies them by the ``inverse``.
    """

    def __init__(
        self,
        index: int,
        parameters: Mapping[int, torch.nn.Parameter],
        complete: Callable[[], None],
        grid: TeamPosition,
        transport: Transport,
        device: torch.device,
        *,
        unscales: bool = True,
    ) -> None:
        super().__init__(index, complete, grid, transport, torch.float32, device)
        self.value, self._unscales = _START, unscales
        # The factor that the step's gradients still need, if they are not divided here.
        self.inverse = 1.0
        self._num_good = 0
        self._parameters = [item for item in parameters.values() if item.requires_grad]
        # Whether a number was agreed on that has not yet changed the scale.
        self._is_open = self._skips = False

    def _add_own(self) -> None:
        """Divide this process's gradients by the scale, and note whether one is not finite."""
        # Gradients that are copied meanwhile do not change: a product with 1 writes the same bits.
        self.inverse = 1.0 if self._unscales else 1.0 / self.value
        factor = 1.0 / self.value if self._unscales else 1.0
        own = [own_part(item.grad) for item in self._parameters if item.grad is not None]
        # Gradients may be on the host.
        for device in dict.fromkeys(item.device for item in own):
            found, inverse = torch.zeros(1, device=device), torch.full((1,), factor, device=device)
            gradients = [item for item in own if item.device == device]
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
            self._total += found.to(self._total.device)
        self._is_open = True

    def skips(self) -> bool:
        """Whether the step is skipped; available after `begin` and its works. A step's first call updates the scale."""
        if self._is_open:
            self._is_open = False
            # Fake tensors, of a dry run, have no values.
            self._skips = not isinstance(self._total, FakeTensor) and bool(self._total.item())
            self._num_good = 0 if self._skips else self._num_good + 1
            if self._skips:
                self.value *= _BACKOFF
            elif self._num_good == _GROWTH_STEPS:
                self.value, self._num_good = self.value * _GROWTH, 0
        return self._skips

    def state(self) -> dict[str, float]:
        """The scale, and the number of steps since it changed."""
        return {"value": self.value, "num_good": self._num_good}

    def take_state(self, state: Mapping[str, float]) -> None:
        """Continue from a `state`."""
        self.value, self._num_good = float(state["value"]), int(state["num_good"])
