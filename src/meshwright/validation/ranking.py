"""Do predictions put layouts in the order in which they were measured? Among runs that a planner would choose between.

Runs of one job (the same model, devices and batch) are compared with each other only; jobs with one run say nothing.

    tau       (concordant - discordant) / pairs over the pairs of all jobs (Kendall, 1938); pairs that were measured
              within `_TIE` of each other are left out, pairs that are predicted alike count for neither
    regret    measured time of the run predicted fastest / that of the fastest - 1, mean over the jobs
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from meshwright.cost.prediction import Floats

# Repeated steps differ by about as much.
_TIE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """How well an order is predicted. ``tau`` from -1 to 1, ``regret`` in per cent; None where nothing says so."""

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
