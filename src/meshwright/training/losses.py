"""The losses of steps (`Losses`), and the check that all ranks read the same batches (`digest_batch`).

The loss of a batch is the mean over its microbatches, which run on several ranks and, under asynchronous schedules, in
several calls. Ranks are then up to a step apart, and waiting for each other would empty the pipeline. So the all-reduce
that is started in one call is read in the next.

The same all-reduce compares the ranks' digests of the batch: n ranks have equal digests d if n times the sum of d**2 is
the square of the sum of d (Cauchy and Schwarz), which is exact in whole numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.distributed as dist

from meshwright.runtime import Output, Session
from meshwright.spec import RunError
from meshwright.training.feed import SAME_BATCHES

# Values of each tensor of a batch that its digest reads.
_SAMPLED = 1 << 14
# Sums of squares of digests have to be exact in float64.
_EXACT_BITS = 53
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_batch(tensors: Sequence[torch.Tensor], num_ranks: int) -> torch.Tensor:
    """Return a hash of a batch: a whole number on the device of its first tensor, which is not waited for.

    Of large tensors it reads `_SAMPLED` values at equal distances, at all places of a sample in turn. Squares of the
    number can be added for `num_ranks` ranks in float64, exactly.
    """
    total: torch.Tensor | None = None
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        step, length = max(1, flat.numel() // _SAMPLED), tensor[0].numel() if tensor.ndim and len(tensor) else 1
        while step > 1 and math.gcd(step, length) > 1:
            step += 1
        values = flat[::step].contiguous().view(_INTEGERS[flat.element_size()]).to(torch.int64)
        found = (values * _weights(len(values), values.device)).sum() + tensor.numel()
        total = found if total is None else total * _weights(1, found.device)[0] + found.to(total.device)
    if total is None:
        return torch.zeros((), dtype=torch.int64)
    bits = (_EXACT_BITS - math.ceil(math.log2(num_ranks))) // 2
    # The high bits depend on all of the low ones.
    return (total >> (63 - bits)) & ((1 << bits) - 1)


@lru_cache(maxsize=64)
def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers in a fixed random order."""
    drawn = torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(0))
    return (2 * drawn + 1).to(device)


class Losses:
    """The losses of batches (means over their microbatches), all-reduced over the ranks, which compare their batches.

    ``known``: the known losses by step; it grows by the same values in the same call on every rank.
    """

    def __init__(self, session: Session) -> None:
        self._window = session.steps.num_filling + 1
        self._output = session.graph.outputs[0]
        self._num_microbatches = session.plan.num_microbatches
        self._expected: dict[int, int] = {}
        # Each process of a team has the loss, or a part of it; and all of them count a microbatch.
        self._loss_share, self._share = session.model.loss_share, 1.0 / session.grid.width
        self._device = session.device
        # The step of the all-reduce in progress, its sums, this rank's part of them, and the work.
        self._under_way: tuple[int, torch.Tensor, torch.Tensor, dist.Work] | None = None
        # Sum of the losses, and number of microbatches, of batches that have run only in part.
        self._partial: dict[int, tuple[float, int]] = {}
        self.known: list[float] = []
        self._first_own_not_finite = math.inf

    def first_not_finite(self) -> tuple[int, tuple[int, ...]]:
        """Return the first step in which a rank's part of the loss was not finite, and these ranks.

        All ranks call it together, after such a loss is known.
        """
        every: list[float] = [0.0] * dist.get_world_size()
        dist.all_gather_object(every, self._first_own_not_finite)
        return int(min(every)), tuple(rank for rank, step in enumerate(every) if step == min(every))

    def add(
        self,
        step: int,
        outputs: dict[int, list[Output]],
        num_microbatches: int | None = None,
        digest: torch.Tensor | None = None,
    ) -> None:
        """Add the losses that this rank made in a step, also those of earlier batches. All ranks call it together.

        ``outputs``: as `Session.run_step` returns them. ``num_microbatches``: those of the step's batch, by default the
        plan's. ``digest``: that of the batch (`digest_batch`), None if the ranks read different parts of it. Raises
        RunError on all ranks if they read different batches, in this step or the one before.
        """
        self._expected[step] = num_microbatches or self._num_microbatches
        sums = torch.zeros(self._window + 1, 2, dtype=torch.float64, device=self._device)
        for made, loss in outputs.get(self._output, []):
            sums[made - step - 2, 0] += self._loss_share * loss
            sums[made - step - 2, 1] += self._share
        if digest is not None:
            sums[-1, 0] = digest
            sums[-1, 1] = digest * digest
        self._take()
        own = sums.clone()
        work = dist.all_reduce(sums, async_op=True)
        assert work is not None, "every rank takes part"
        self._under_way = step, sums, own, work
        if self._window == 1:
            self._take()

    def finish(self) -> None:
        """Wait for the all-reduce in progress, and add its losses to ``known``."""
        self._take()

    def _take(self) -> None:
        if self._under_way is None:
            return
        step, sums, own, work = self._under_way
        self._under_way = None
        work.wait()
        *losses, digests = sums.tolist()
        self._check_digests(step, int(digests[0]), int(digests[1]), own)
        for place, (total, count) in enumerate(losses):
            made = step - self._window + 1 + place
            if not math.isfinite(total) and not math.isfinite(own[place, 0]):
                self._first_own_not_finite = min(self._first_own_not_finite, made)
            before = self._partial.get(made, (0.0, 0))
            if count:
                self._partial[made] = before[0] + total, before[1] + round(count)
        for made in sorted(self._partial):
            total, number = self._partial[made]
            if number == self._expected[made]:
                self.known.append(total / number)
                del self._partial[made], self._expected[made]

    def _check_digests(self, step: int, total: int, squares: int, own: torch.Tensor) -> None:
        num_ranks = dist.get_world_size()
        if num_ranks * squares == total * total:
            return
        every: list[float] = [0.0] * num_ranks
        dist.all_gather_object(every, float(own[-1, 0]))
        other = [rank for rank, digest in enumerate(every) if digest != every[0]]
        named = f"Rank {other[0]}" if len(other) == 1 else f"Ranks {', '.join(map(str, other))}"
        raise RunError(f"{named} read another batch than rank 0 in step {step + 1}. {SAME_BATCHES}")
