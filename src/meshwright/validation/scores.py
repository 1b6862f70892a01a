"""Scores of predictions: relative errors of rows left out, and coverage of the intervals.

error = |predicted - measured| / measured        coverage = share of rows inside the 80 % interval
MAPE = mean error · 100                          width = median of (high - low) / predicted

How well predictions order layouts is asked among runs that a planner would choose between. Runs of one job (the same
model, devices and batch) are compared with each other only; jobs with one run say nothing.

    tau       (concordant - discordant) / pairs over the pairs of all jobs (Kendall, 1938); pairs that were measured
              within `_TIE` of each other are left out, pairs that are predicted alike count for neither
    regret    measured time of the run predicted fastest / that of the fastest - 1, mean over the jobs
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meshwright.spec import MeasurementError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from meshwright.cost.prediction import Floats, Predictions


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Errors of one arm on one part of a data set, all in per cent but ``num_rows``.

    ``arm``: ours or the baseline's name. ``target``: the figure that ``judged`` ("mape", "median" or "worst") is to
    reach; None for baselines and for parts that are only reported. ``note``: what a reader of the figure has to know of
    the rows (how many are not in it, whether the form was chosen with them in view); shown below the table. ``tau``
    (from -1 to 1) and ``regret``: how well the order of runs of one job is predicted (below).
    """

    dataset: str
    part: str
    arm: str
    num_rows: int
    mape: float
    median: float
    p90: float
    worst: float
    coverage: float | None = None
    width: float | None = None
    judged: str = "mape"
    target: float | None = None
    note: str = ""
    tau: float | None = None
    regret: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without a target."""
        return None if self.target is None else bool(getattr(self, self.judged) <= self.target)


def score_rows(
    dataset: str,
    part: str,
    arm: str,
    measured: Floats,
    predicted: Predictions | Floats,
    *,
    judged: str = "mape",
    target: float | None = None,
    note: str = "",
    jobs: Sequence[Hashable] = (),
) -> Score:
    """Score predictions of n rows (shape (n,), all positive) that the arm was not fitted on.

    ``jobs``: of each row, what it is a run of, where the order within jobs is to be scored, too.

    Raises MeasurementError for no rows, and for figures that are not positive and finite.
    """
    seconds = predicted if isinstance(predicted, np.ndarray) else predicted.seconds
    if not len(measured) or not (_sound(measured) and _sound(seconds)):
        raise MeasurementError(
            f"{dataset}, {part}, {arm}: {len(measured)} rows; expected at least one, and positive finite figures on "
            "both sides. Leave rows out that say nothing."
        )
    errors = 100.0 * np.abs(seconds - measured) / measured
    ranking = rank_runs(jobs, measured, seconds) if jobs else None
    coverage = width = None
    if not isinstance(predicted, np.ndarray):
        inside = (predicted.low_s <= measured) & (measured <= predicted.high_s)
        coverage = 100.0 * float(inside.mean())
        width = 100.0 * float(np.median((predicted.high_s - predicted.low_s) / seconds))
    return Score(
        dataset=dataset,
        part=part,
        arm=arm,
        num_rows=len(measured),
        mape=float(errors.mean()),
        median=float(np.median(errors)),
        p90=float(np.percentile(errors, 90)),
        worst=float(errors.max()),
        coverage=coverage,
        width=width,
        judged=judged,
        target=target,
        note=note,
        tau=ranking.tau if ranking else None,
        regret=ranking.regret if ranking else None,
    )


def _sound(figures: Floats) -> bool:
    return bool((np.isfinite(figures) & (figures > 0)).all())


# Repeated steps differ by about as much.
_TIE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """How well an order is predicted: ``tau`` from -1 to 1, ``regret`` in per cent; None if unknown."""

    num_jobs: int
    tau: float | None
    regret: float | None


def rank_runs(jobs: Sequence[Hashable], measured: Floats, predicted: Floats) -> Ranking:
    """The order of the runs (all of shape (runs,), seconds) within each job."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, job in enumerate(jobs):
        groups[job].append(index)
    several = [np.array(group) for group in groups.values() if len(group) > 1]
    agreeing = pairs = 0
    regrets = []
    for group in several:
        mine, ours = measured[group], predicted[group]
        first, second = np.triu_indices(len(group), 1)
        differ = np.abs(np.log(mine[first] / mine[second])) > _TIE
        signs = np.sign(mine[first] - mine[second]) * np.sign(ours[first] - ours[second])
        agreeing += int(signs[differ].sum())
        pairs += int(differ.sum())
        regrets.append(float(mine[np.argmin(ours)] / mine.min() - 1.0))
    return Ranking(
        num_jobs=len(several),
        tau=agreeing / pairs if pairs else None,
        regret=100.0 * float(np.mean(regrets)) if regrets else None,
    )
