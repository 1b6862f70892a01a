"""A long run: a number of steps, saved at intervals, with failures, and with times in which steps are slower or stop.

The run is followed from event to event: a save that is due, a failure, a change of the machines. Between failures all
whole intervals are advanced at once, so the cost for a run of months depends only on its failures. Work since the last
complete save is lost at a failure, and when devices are lost; then follow detection, repair and restart, and a
failure meanwhile restarts these. A run that waits for devices restarts when they are back and everything that failed
meanwhile is repaired. Their return is planned: unsaved work is saved first, and there is no detection. The last
interval is not saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.simulator.scenarios.failures import Failure
from meshwright.spec import ScenarioError

# A run with more failures than this is taken never to end.
MAX_FAILURES = 100_000
_NEVER = Failure(math.inf, 0.0)


Change = Literal["", "lost", "back"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStretch:
    """From ``begin_s`` on a step takes ``step_s``, infinite while the run is stopped.

    ``change`` is what happens at its start: devices are ``lost``, with everything in their memory; or are ``back``, for
    which a run that continued without them saves; or ``""``, if only speeds change.
    """

    begin_s: float
    step_s: float
    change: Change = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """The interval between saves in seconds of work (infinite: never), and seconds to save, detect and restart."""

    interval_s: float = math.inf
    save_s: float = 0.0
    detection_s: float = 0.0
    restart_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class RunTimes:
    """Where the seconds of a run go: all times add up to ``wall_s``."""

    computing_s: float = 0.0
    lost_s: float = 0.0
    saving_s: float = 0.0
    restarting_s: float = 0.0
    waiting_s: float = 0.0
    num_failures: int = 0
    num_saves: int = 0

    @property
    def wall_s(self) -> float:
        """The total time of the run."""
        return self.computing_s + self.lost_s + self.saving_s + self.restarting_s + self.waiting_s


def follow_run(
    num_steps: float, stretches: Sequence[StepStretch], failures: Iterator[Failure], saving: Saving
) -> RunTimes:
    """Follow a run to its end; stretches are in order, the first from 0 on. Raises ScenarioError if it never ends."""
    run = _Run(num_steps=num_steps, stretches=stretches, failures=failures, saving=saving)
    while run.left > 1e-12 * num_steps:
        run.go_on()
    return run.times


class _Run:
    """The state of a run: the time, the steps saved and unsaved, and the seconds of the unsaved ones."""

    def __init__(
        self, *, num_steps: float, stretches: Sequence[StepStretch], failures: Iterator[Failure], saving: Saving
    ) -> None:
        self.times = RunTimes()
        self._num_steps, self._stretches, self._failures, self._saving = num_steps, stretches, failures, saving
        self._now, self._place, self._saved, self._fresh, self._fresh_s = 0.0, 0, 0.0, 0.0, 0.0
        # When everything that failed while the run was stopped is repaired.
        self._repaired_s = 0.0
        self._failure = next(failures, _NEVER)

    @property
    def left(self) -> float:
        """Steps still to do."""
        return self._num_steps - self._saved - self._fresh

    def go_on(self) -> None:
        """Advance to the next event."""
        following = self._stretches[self._place + 1 : self._place + 2]
        change_s = following[0].begin_s if following else math.inf
        if self._failure.at_s <= self._now:
            self._interrupt()
        elif change_s <= self._now:
            self._change(following[0])
            self._place += 1
        else:
            self._work(min(change_s, self._failure.at_s) - self._now)

    def _work(self, room_s: float) -> None:
        step_s = self._stretches[self._place].step_s
        if math.isinf(step_s):
            if math.isinf(room_s):
                raise ScenarioError(
                    "The run waits for devices that do not come back, so it has no end. Give `until` to the lost "
                    "devices, or let the run continue without them (then = 'replan')."
                )
            self._wait(room_s)
            return
        left_s, interval_s, save_s = self.left * step_s, self._saving.interval_s, self._saving.save_s
        if not self._fresh and interval_s < left_s:
            # An infinite time has no whole number of intervals.
            most = math.inf if math.isinf(room_s) else room_s // (interval_s + save_s)
            whole = min(most, math.ceil(left_s / interval_s) - 1)
            if whole > 0:
                self._now += whole * (interval_s + save_s)
                self._saved += whole * interval_s / step_s
                self._count(computing_s=whole * interval_s, saving_s=whole * save_s, num_saves=int(whole))
                return
        due_s = interval_s - self._fresh_s
        passed_s = min(due_s, left_s, room_s)
        self._now += passed_s
        self._fresh += passed_s / step_s if passed_s < left_s else self.left
        self._fresh_s += passed_s
        self._count(computing_s=passed_s)
        if passed_s == due_s < left_s:
            self._save()

    def _save(self) -> None:
        end_s = self._now + self._saving.save_s
        if end_s > self._failure.at_s:
            # The failure interrupts the save.
            self._count(lost_s=self._failure.at_s - self._now)
            self._now = self._failure.at_s
            return
        self._count(saving_s=self._saving.save_s, num_saves=1)
        self._now = end_s
        self._saved, self._fresh, self._fresh_s = self._saved + self._fresh, 0.0, 0.0

    def _change(self, stretch: StepStretch) -> None:
        stood = [math.isinf(before.step_s) for before in self._stretches[: self._place + 1]]
        if stretch.change == "lost":
            self._drop()
        elif stretch.change == "back" and self._fresh:
            self._save()
            if self._failure.at_s <= self._now:
                return
        if not stretch.change or math.isinf(stretch.step_s):
            return
        if stood[-1]:
            self._wait_for_repairs()
        if not all(stood):
            is_sudden = stretch.change == "lost" and not stood[-1]
            self._restart(self._saving.detection_s if is_sudden else 0.0)

    def _interrupt(self) -> None:
        failure = self._failure
        self._drop()
        self._next_failure()
        if math.isinf(self._stretches[self._place].step_s):
            self._repaired_s = max(self._repaired_s, failure.at_s + failure.repair_s)
        else:
            self._restart(self._saving.detection_s + failure.repair_s)

    def _wait(self, seconds: float) -> None:
        self.times.waiting_s += seconds
        self._now += seconds

    def _wait_for_repairs(self) -> None:
        while self._failure.at_s < self._repaired_s:
            self._repaired_s = max(self._repaired_s, self._failure.at_s + self._failure.repair_s)
            self._next_failure()
        self._wait(max(0.0, self._repaired_s - self._now))

    def _drop(self) -> None:
        self._count(computing_s=-self._fresh_s, lost_s=self._fresh_s)
        self._fresh, self._fresh_s = 0.0, 0.0

    def _restart(self, before_s: float) -> None:
        """Restart ``before_s`` seconds from now; failures meanwhile are detected and repaired first."""
        begin_s, end_s = self._now, self._now + before_s + self._saving.restart_s
        while self._failure.at_s < end_s:
            delay_s = self._saving.detection_s + self._failure.repair_s + self._saving.restart_s
            end_s = self._failure.at_s + delay_s
            self._next_failure()
        self._count(restarting_s=end_s - begin_s)
        self._now = end_s

    def _next_failure(self) -> None:
        self.times.num_failures += 1
        self._failure = next(self._failures, _NEVER)
        if self.times.num_failures > MAX_FAILURES:
            raise ScenarioError(
                f"The run fails {MAX_FAILURES} times before its end: the time between failures is too short to compute "
                "and save. Save more often, or give a longer mttf or fewer devices."
            )

    def _count(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            setattr(self.times, name, getattr(self.times, name) + amount)
