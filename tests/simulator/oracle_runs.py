"""A long run second by second: what `simulator.scenarios.long_run` says in whole intervals, told without any."""

import math


class RunBySeconds:
    """A run whose steps take one second or two, or that stands still; all times are whole seconds.

    ``failures`` are the seconds of repair by the second of the failure. At each second the first of these happens that
    can, until none can: the end of the run, of saving or of restarting, a failure, a change of the machines.
    """

    def __init__(self, num_steps, stretches, failures, saving):
        self.counted = dict.fromkeys(("computing", "lost", "saving", "restarting", "waiting"), 0)
        self.num_failures = self.num_saves = 0
        self.half_steps, self.stretches, self.failing, self.saving = 2 * num_steps, stretches, dict(failures), saving
        self.second, self.place, self.worked, self.repaired = 0, 0, False, 0
        self.saved, self.fresh, self.busy = 0, 0, 0
        self.state, self.left, self.after = "computing", 0, "computing"
        while not self.is_done():
            if not (self.end_what_is_over() or self.fail() or self.change()):
                self.pass_second()
        self.counted["computing"] += self.busy

    @property
    def speed(self):
        """Half steps per second."""
        return 2 / self.stretches[self.place].step_s

    def begin(self, state, seconds, after="computing"):
        self.state, self.left, self.after = state, seconds, after

    def lose(self):
        self.counted["lost"] += self.busy
        self.fresh, self.busy = 0, 0

    def is_done(self):
        return self.state == "computing" and self.saved + self.fresh >= self.half_steps

    def end_what_is_over(self):
        if self.state == "computing" and self.busy == self.saving.interval_s:
            self.begin("saving", self.saving.save_s)
        if self.state == "saving" and self.left == 0:
            self.counted["computing"] += self.busy
            self.counted["saving"] += self.saving.save_s
            self.saved, self.fresh, self.busy, self.num_saves = self.saved + self.fresh, 0, 0, self.num_saves + 1
            self.begin(self.after, self.saving.restart_s)
        elif self.state == "repairing" and self.second >= self.repaired:
            self.begin("restarting" if self.worked else "computing", self.saving.restart_s)
        elif self.state == "restarting" and self.left == 0:
            self.begin("computing", 0)
        else:
            return False
        return True

    def fail(self):
        if self.second not in self.failing:
            return False
        repair = self.failing.pop(self.second)
        self.num_failures += 1
        if self.state == "repairing" or (self.state == "computing" and not self.speed):
            self.repaired = max(self.repaired, self.second + repair)
            return True
        if self.state == "saving":
            self.counted["lost"] += self.saving.save_s - self.left
        self.lose()
        self.begin("restarting", self.saving.detection_s + repair + self.saving.restart_s)
        return True

    def change(self):
        following = self.stretches[self.place + 1 : self.place + 2]
        if self.state != "computing" or not following or following[0].begin_s > self.second:
            return False
        stood, change, stands = not self.speed, following[0].change, math.isinf(following[0].step_s)
        self.worked |= not stood
        self.place += 1
        if change == "lost":
            self.lose()
        if change and not stands and stood:
            self.begin("repairing", 0)
        elif change == "lost" and not stands:
            self.begin("restarting", self.saving.detection_s + self.saving.restart_s)
        elif change == "back" and self.fresh:
            self.begin("saving", self.saving.save_s, "computing" if stands else "restarting")
        elif change == "back" and not stands:
            self.begin("restarting", self.saving.restart_s)
        return True

    def pass_second(self):
        if self.state == "computing" and self.speed:
            part = min(1, (self.half_steps - self.saved - self.fresh) / self.speed)
            self.fresh += part * self.speed
            self.busy += part
        elif self.state in ("saving", "restarting"):
            self.counted["restarting"] += self.state == "restarting"
            self.left -= 1
        else:
            self.counted["waiting"] += 1
        self.second += 1
