"""The losses of global batches, from the ranks that compute them to all.

A batch's loss is the mean over its microbatches, which run on several ranks and, under schedules that never flush, in
several calls. Ranks then run apart by up to a step, and waiting for each other would empty the pipeline: a sum that was
begun in one call is looked at in the next.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright.runtime import Output, Session


class Losses:
    """Sums of losses over all ranks; every rank knows the same ones at the same call."""

    def __init__(self, session: Session) -> None:
        self._window = session.steps.num_filling + 1
        self._output = session.graph.outputs[0]
        self._num_microbatches = session.plan.num_microbatches
        self._expected: dict[int, int] = {}
        # Of a team each process has the loss, or a part of it; and all of them count a microbatch.
        self._loss_share, self._share = session.model.loss_share, 1.0 / session.grid.width
        self._device = session.device
        self._under_way: tuple[int, torch.Tensor, dist.Work] | None = None
        # Sum of the losses, and number of microbatches, of batches that have run in part.
        self._partial: dict[int, tuple[float, int]] = {}
        self.known: list[float] = []

    def add(self, step: int, outputs: dict[int, list[Output]], num_microbatches: int | None = None) -> None:
        """What this rank made up to the batch of a step, which may have fewer microbatches than the plan's.

        All ranks call it together.
        """
        self._expected[step] = num_microbatches or self._num_microbatches
        sums = torch.zeros(self._window, 2, dtype=torch.float64, device=self._device)
        for made, loss in outputs.get(self._output, []):
            sums[made - step - 1, 0] += self._loss_share * loss
            sums[made - step - 1, 1] += self._share
        self._take()
        work = dist.all_reduce(sums, async_op=True)
        assert work is not None, "every rank takes part"
        self._under_way = step, sums, work
        if self._window == 1:
            self._take()

    def finish(self) -> None:
        """Wait for what is under way."""
        self._take()

    def _take(self) -> None:
        if self._under_way is None:
            return
        step, sums, work = self._under_way
        self._under_way = None
        work.wait()
        for place, (total, count) in enumerate(sums.tolist()):
            made = step - self._window + 1 + place
            before = self._partial.get(made, (0.0, 0))
            if count:
                self._partial[made] = before[0] + total, before[1] + round(count)
        for made in sorted(self._partial):
            total, number = self._partial[made]
            if number == self._expected[made]:
                self.known.append(total / number)
                del self._partial[made], self._expected[made]
