"""Forecast a run of many steps in a scenario: its total time, the parts of that time, and how often to save.

The step time is simulated for every stretch of the run (between the times at which effects begin or end, `machines`);
then the run is followed for several seeds (`long_run`). If the scenario gives no interval between saves, the best
interval is used: by a closed form if failures are memoryless (see below), otherwise the interval of a grid whose runs
are shortest, under the same failures.

Formulas for the best interval, if failures come at random with a mean of M seconds between them and saving takes C
seconds:

    young     √(2 C M)                                          Young, CACM 17 (9), 1974
    daly      √(2 C M) (1 + √(C / 2M) / 3 + C / 18 M) - C,      Daly, FGCS 22 (3), 2006
              for C < 2 M, otherwise M
    best      the τ with the shortest expected time: M (1 + W(-e^(-1 - C/M))), where W is Lambert's function;
              the derivative of e^((τ + C)/M) / τ - 1 / τ is zero there

The expected time of T seconds of work, saved every τ, with R seconds to restart after a failure, including failures
during saves and restarts (Daly):   M e^(R/M) (e^((τ + C)/M) - 1) T / τ. Repairs are part of R (`failures`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.cost import CostModel
from meshwright.cost.optimizers import state_bytes
from meshwright.simulator.scenarios.long_run import (
    Change,
    RunTimes,
    Saving,
    StepStretch,
    are_at_random,
    effective_repair,
    failures_of,
    follow_run,
    mean_time_to_failure,
)
from meshwright.spec import Graph, Placement, Plan, ScenarioError
from meshwright.spec.scenario import Checkpoints, Failures, LostDevice, Scenario, is_active

# Length of a run if no number of steps is given: 30 days.
USUAL_RUN_S = 30 * 86400.0
# Grid points from an eighth of Young's interval to eight times it: neighbours differ by 4 %.
_GRID = 107

# Step time, from seconds since the start of the run and lost ranks, of a new plan without them; None if none fits.
ReplanAt = Callable[[float, tuple[int, ...]], float | None]
# Step time in seconds, from seconds since the start of the run.
StepAt = Callable[[float], float]


def is_about_runs(scenario: Scenario) -> bool:
    """Return whether a scenario has effects on long runs: failures, lost devices, checkpoints, timed slow parts."""
    return bool(scenario.effects_of(Failures, LostDevice, Checkpoints)) or scenario.moments() != [0.0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The forecast of a run of ``num_steps`` steps.

    ``step_time_s``: seconds of a step at the start of the run. ``runs``: the run's times for each seed. ``saving``: how
    often it is saved and what that costs. ``mttf_s``: the mean time between failures of all devices in use, None if the
    scenario does not give it. ``expected_s``: the expected time by Daly's closed form, None if that does not apply.
    """

    num_steps: float
    step_time_s: float
    runs: tuple[RunTimes, ...]
    saving: Saving
    mttf_s: float | None
    expected_s: float | None

    @property
    def wall_s(self) -> float:
        """The mean time of a run over all seeds, in seconds."""
        return float(np.mean([run.wall_s for run in self.runs]))

    def row(self) -> dict[str, Any]:
        """Return the figures by name, as means over seeds, and Young's and Daly's intervals if there are failures."""
        walls = [run.wall_s for run in self.runs]
        parts = {
            f"run_{name}_share": float(sum(getattr(run, f"{name}_s") for run in self.runs) / sum(walls))
            for name in ("computing", "lost", "saving", "restarting", "waiting")
        }
        row: dict[str, Any] = {
            "run_steps": self.num_steps,
            "run_s": self.wall_s,
            "run_seed_spread_s": float(np.std(walls, ddof=1)) if len(walls) > 1 else 0.0,
            **parts,
            "run_failures": float(np.mean([run.num_failures for run in self.runs])),
            "run_saves": float(np.mean([run.num_saves for run in self.runs])),
        }
        if math.isfinite(self.saving.interval_s):
            row |= {"interval_s": self.saving.interval_s, "save_s": self.saving.save_s}
        if self.mttf_s is not None:
            row["mttf_of_all_s"] = self.mttf_s
            if self.saving.save_s:
                row["young_interval_s"] = young_interval(self.saving.save_s, self.mttf_s)
                row["daly_interval_s"] = daly_interval(self.saving.save_s, self.mttf_s)
        if self.expected_s is not None:
            row["expected_run_s"] = self.expected_s
        return row


def forecast_run(
    plan: Plan | Placement,
    graph: Graph,
    usual: CostModel,
    scenario: Scenario,
    step_at: StepAt,
    *,
    num_steps: float | None = None,
    num_seeds: int,
    replan_at: ReplanAt | None = None,
) -> Forecast:
    """Forecast runs of a plan whose step takes ``step_at(seconds since the start)`` seconds, for ``num_seeds`` seeds.

    ``num_steps``: by default as many as fill 30 days as fast as the first step. ``replan_at`` returns the step time of
    a new plan without lost devices. Raises ScenarioError for a run that never ends, for devices that the cluster does
    not have, and if a lost device requires a new plan but ``replan_at`` is not given.
    """
    nodes = {usual.cluster.node_index(device) for device in _devices_of(plan)}
    counts = plan.num_devices, len(nodes)
    stretches = _stretches(plan, usual, scenario, step_at, replan_at)
    finite = [stretch.step_s for stretch in stretches if math.isfinite(stretch.step_s)]
    step_s = finite[0] if finite else step_at(0.0)
    steps = USUAL_RUN_S / step_s if num_steps is None else num_steps
    mttf_s = mean_time_to_failure(scenario, *counts)
    seeds = [(scenario.seed or 0) + place for place in range(num_seeds)]

    def follow(saving: Saving) -> tuple[RunTimes, ...]:
        return tuple(follow_run(steps, stretches, failures_of(scenario, *counts, seed), saving) for seed in seeds)

    saving, at_random = _saving(plan, graph, scenario), are_at_random(scenario) and len(stretches) == 1
    if saving is None:
        saving = Saving()
    elif math.isnan(saving.interval_s):
        saving = _best(saving, mttf_s, follow, at_random=at_random)
    expected_s = math.inf
    if at_random and mttf_s is not None:
        restart_s = saving.detection_s + saving.restart_s + effective_repair(scenario, *counts)
        expected_s = expected_seconds(steps * step_s, saving.interval_s, saving.save_s, restart_s, mttf_s)
    return Forecast(
        num_steps=steps,
        step_time_s=step_s,
        runs=follow(saving),
        saving=saving,
        mttf_s=mttf_s,
        expected_s=expected_s if math.isfinite(expected_s) else None,
    )


def saved_bytes(plan: Plan | Placement, graph: Graph) -> int:
    """Return the bytes of a checkpoint: parameters and optimizer states of the whole model, each counted once."""
    work = plan.workload
    each = work.numbers.value_bytes + state_bytes(work.optimizer, work.precision)
    storages = {tensor.storage: tensor for tensor in graph.tensors if tensor.role == "parameter"}
    return sum(tensor.num_elements(0) for tensor in storages.values()) * each


def _saving(plan: Plan | Placement, graph: Graph, scenario: Scenario) -> Saving | None:
    """Return the checkpoints of the scenario's last such effect, with NaN for an interval to be found; None if none."""
    effects = scenario.effects_of(Checkpoints)
    if not effects:
        return None
    effect = effects[-1]
    cost_s = float(effect.cost) if effect.cost is not None else saved_bytes(plan, graph) / float(effect.bandwidth or 1)
    return Saving(
        interval_s=math.nan if effect.interval is None else float(effect.interval),
        save_s=cost_s,
        detection_s=float(effect.detection),
        restart_s=float(effect.restart),
    )


def _best(
    saving: Saving, mttf_s: float | None, follow: Callable[[Saving], Sequence[RunTimes]], *, at_random: bool
) -> Saving:
    def at(interval_s: float) -> Saving:
        return replace(saving, interval_s=interval_s)

    if not saving.save_s:
        raise ScenarioError(
            "checkpoints: saving takes no time, so there is no best interval; give `interval`, or a `cost` above 0."
        )
    if at_random and mttf_s is not None:
        return at(best_interval(saving.save_s, mttf_s))
    without = follow(at(math.inf)) if mttf_s is None else None
    if without is not None:
        num_failures = max(1.0, float(np.mean([run.num_failures for run in without])))
        mttf_s = float(np.mean([run.wall_s for run in without])) / num_failures
    middle = young_interval(saving.save_s, mttf_s or USUAL_RUN_S)
    walls: dict[float, float] = {}
    for factor in np.geomspace(1 / 8, 8, _GRID).tolist():
        walls[middle * factor] = float(np.mean([run.wall_s for run in follow(at(middle * factor))]))
    return at(min(walls, key=lambda interval: walls[interval]))


def _stretches(
    plan: Plan | Placement, usual: CostModel, scenario: Scenario, step_at: StepAt, replan_at: ReplanAt | None
) -> list[StepStretch]:
    """Split the run into stretches of constant step time."""
    losses = list[tuple[LostDevice, set[int]]]()
    for place, effect in enumerate(scenario.effects):
        if isinstance(effect, LostDevice):
            with scenario.naming(place, "devices"):
                losses.append((effect, set(effect.devices.select(usual.cluster, (scenario.seed or 0, place)))))
    stretches: list[StepStretch] = []
    before: frozenset[int] = frozenset()
    used = frozenset(_devices_of(plan))
    for moment in scenario.moments():
        away = [(effect, ranks) for effect, ranks in losses if is_active(effect, moment)]
        lost = frozenset(rank for _, ranks in away for rank in ranks if rank in used)
        every = tuple(sorted({rank for _, ranks in away for rank in ranks}))
        step_s = step_at(moment)
        if lost:
            step_s = math.inf
            if all(effect.then == "replan" for effect, ranks in away if ranks & lost):
                if replan_at is None:
                    raise ScenarioError(
                        "lost-device: then = 'replan' needs a planner, but none is available here; give then = 'wait'."
                    )
                step_s = replan_at(moment, every) or math.inf
        change: Change = "" if lost == before or not moment else "lost" if lost - before else "back"
        stretches.append(StepStretch(begin_s=moment, step_s=step_s, change=change))
        before = lost
    return stretches


def _devices_of(plan: Plan | Placement) -> Sequence[int]:
    """Return the devices of the cluster that a plan uses."""
    return plan.devices if isinstance(plan, Plan) else range(plan.num_devices)


# Above this ratio of save time to mean time between failures, the best interval is that mean time, to 1e-13 of it.
_LONG_SAVE = 30.0


def young_interval(save_s: float, mttf_s: float) -> float:
    """Return Young's first-order interval between saves, in seconds of work."""
    return math.sqrt(2 * save_s * mttf_s)


def daly_interval(save_s: float, mttf_s: float) -> float:
    """Return Daly's higher-order interval between saves, in seconds of work."""
    if save_s >= 2 * mttf_s:
        return mttf_s
    ratio = save_s / (2 * mttf_s)
    return young_interval(save_s, mttf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def best_interval(save_s: float, mttf_s: float) -> float:
    """Return the interval between saves with the least expected time, in seconds of work.

    Newton's method solves (1 - x) e^(x + C/M) = 1 for x = τ / M (see the module's docstring).
    """
    ratio = save_s / mttf_s
    if ratio > _LONG_SAVE:
        return mttf_s
    x = min(math.sqrt(2 * ratio), 0.999999)
    for _ in range(100):
        # log(1 - x) + x + C/M falls from C/M at 0 to -∞ at 1.
        step = (math.log1p(-x) + x + ratio) / (x / (1 - x))
        x = min(max(x + step, x / 2), (1 + x) / 2)
        if abs(step) < 1e-14 * x:
            break
    return x * mttf_s


def expected_seconds(work_s: float, interval_s: float, save_s: float, restart_s: float, mttf_s: float) -> float:
    """Return the expected seconds of a run of ``work_s`` seconds of work, by Daly's formula (module's docstring).

    The result is infinite if the run is never saved, or if the formula overflows.
    """
    if math.isinf(interval_s):
        return math.inf
    try:
        growth = math.exp(restart_s / mttf_s) * math.expm1((interval_s + save_s) / mttf_s)
    except OverflowError:
        return math.inf
    return mttf_s * growth * work_s / interval_s
