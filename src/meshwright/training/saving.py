"""When a run writes checkpoints (`SaveTimes`): every N steps, or as often as pays, by measured costs and failures.

With ``--checkpoint-every auto`` the interval is Daly's (`simulator.scenarios.forecast`), from the time of a step, the
time for which a checkpoint held up the run, and the mean time between failures. The first checkpoint comes after a few
steps, to measure it; each one corrects the interval. No checkpoint begins before the one before it is written.

Without ``--mttf`` failures come as in Meta's training of Llama 3: 419 unplanned interruptions in 54 days on 16,384 GPUs
(Dubey et al., "The Llama 3 Herd of Models", 2407.21783, section 3.3.4), one in 50,700 hours of a device.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence

from meshwright.simulator.scenarios.forecast import daly_interval
from meshwright.spec import format_count, format_seconds
from meshwright.training.checkpoint import agree
from meshwright.training.job import Job

DEVICE_MTTF_S = 54 * 86_400 * 16_384 / 419
# Steps before the first checkpoint of an interval that is measured.
_FIRST = 5


class SaveTimes:
    """Says after which steps checkpoints are due; all ranks say the same.

    ``num_devices``: those of the run. ``done``: the steps before it.
    """

    def __init__(self, job: Job, num_devices: int, done: int) -> None:
        self._job, self._last = job, done
        self.every = _FIRST if job.checkpoint_auto else job.checkpoint_every
        self.mttf_s = job.mttf_s or DEVICE_MTTF_S / num_devices
        self._costs: list[float] = []

    def is_due(self, num_steps: int) -> bool:
        """Return whether a checkpoint is due after that number of steps."""
        if self._job.checkpoint is None:
            return False
        if self._job.checkpoint_auto:
            is_time = num_steps - self._last >= self.every
        else:
            is_time = self.every > 0 and num_steps % self.every == 0
        return is_time or num_steps == self._job.num_steps

    def saved(self, num_steps: int, cost_s: float, write_s: float, step_seconds: Sequence[float]) -> None:
        """Note a checkpoint. All ranks call it together.

        ``cost_s``: the seconds for which it held up the run; ``write_s``: those for which the one before was written.
        ``step_seconds``: the times of all steps.
        """
        self._last = num_steps
        if not self._job.checkpoint_auto:
            return
        self._costs.append(cost_s)
        step_s = statistics.median(step_seconds)
        interval_s = daly_interval(statistics.median(self._costs), self.mttf_s)
        own = max(1, round(interval_s / step_s), math.ceil(write_s / step_s))
        self.every = json.loads(agree(json.dumps(own)))

    def explain(self, step_s: float) -> str:
        """Return the measured interval as a line of text; "" if it was given. ``step_s``: seconds of a step."""
        if not self._costs:
            return ""
        cost, mttf = format_seconds(statistics.median(self._costs)), format_seconds(self.mttf_s)
        interval = f"{format_count(self.every, 'step')} ({format_seconds(self.every * step_s)})"
        return f"checkpoints every {interval}: one costs {cost}, a failure is expected every {mttf}"
