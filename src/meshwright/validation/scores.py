"""Scores of predictions (`score_rows`): relative errors of rows left out, coverage of intervals; folds (`read_folds`).

error = |predicted - measured| / measured        coverage = share of rows inside the 80 % interval
MAPE = mean error · 100                          width = median of (high - low) / predicted

The order of predicted runs is scored, too, within jobs: runs of the same model, devices and batch, between which a
planner would choose. Runs are compared only with other runs of their job; jobs with one run are ignored.

    tau       (concordant - discordant) / pairs over the pairs of all jobs (Kendall, 1938); pairs whose measured times
              differ by less than 1 % are left out, pairs with equal predictions count as neither
    regret    measured time of the run that is predicted fastest / time of the fastest run - 1, mean over the jobs
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from meshwright.spec import DocumentError, MeasurementError, decode_document
from meshwright.spec.parsing import read_data

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

    from meshwright.cost.costs import Floats, Predictions


# Folds of rows that are left out are in files committed before the first fit, grouped by configuration. A file
# ``splits/NAME.json`` holds the seed, the number of folds and one digit per distinct key in sorted order, as
# `draw_split` draws them. It is never drawn again for other figures: `read_folds` refuses rows whose keys are not those
# of the file, and folds that are not those of its seed. Rows of one key (repetitions, the same sizes in another dtype
# where that would give the answer away) share a fold.
@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The folds of a data set's distinct keys in sorted order: ``folds[i]`` is the fold, one digit, of key i.

    ``keys_sha256`` is the hash of these keys.
    """

    dataset: str
    seed: int
    num_folds: int
    keys_sha256: str
    folds: str

    SCHEMA_VERSION: ClassVar[int] = 1


def draw_split(dataset: str, keys: Sequence[str], *, num_folds: int = 5, seed: int) -> Split:
    """Assign the distinct keys to ``num_folds`` (at most 10) folds of equal size, in a random order by ``seed``."""
    distinct = sorted(set(keys))
    folds = np.arange(len(distinct)) % num_folds
    np.random.default_rng(seed).shuffle(folds)
    return Split(
        dataset=dataset,
        seed=seed,
        num_folds=num_folds,
        keys_sha256=_digest(distinct),
        folds="".join(map(str, folds)),
    )


def read_folds(dataset: str, keys: Sequence[str]) -> NDArray[np.int64]:
    """Return the fold of each row, shape (rows,), from the committed file of the data set.

    Raises DocumentError if the file is missing, or if it was made for other keys.
    """
    source = resources.files("meshwright.validation") / "splits" / f"{dataset}.json"
    with resources.as_file(source) as path:
        split = decode_document(Split, read_data(path), path.name)
    distinct = sorted(set(keys))
    if split.keys_sha256 != _digest(distinct) or len(split.folds) != len(distinct):
        raise DocumentError(
            f"The folds of {dataset!r} were drawn for other rows ({len(split.folds)} keys; given {len(distinct)}). "
            "Folds are fixed before the first fit: restore the rows, or name the new data set and draw its own folds."
        )
    if draw_split(dataset, distinct, num_folds=split.num_folds, seed=split.seed).folds != split.folds:
        raise DocumentError(
            f"The folds of {dataset!r} are not those that seed {split.seed} draws. Restore the committed file."
        )
    places = dict(zip(distinct, split.folds, strict=True))
    return np.array([int(places[key]) for key in keys], np.int64)


def refuse_seen(dataset: str, fitted: NDArray[np.uint64], scored: NDArray[np.uint64]) -> None:
    """Raise MeasurementError if a predictor was fitted on rows on which it would be scored.

    ``fitted`` and ``scored`` are hashes of rows (`Records.row_hashes`).
    """
    seen = int(np.isin(scored, fitted).sum())
    if seen:
        raise MeasurementError(
            f"{dataset}: {seen} of {len(scored)} rows are among those that the predictor was fitted on; such a score "
            "says nothing. Score rows that were left out."
        )


def _digest(keys: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The errors of one arm (our predictor or a baseline) on one part of a data set.

    All figures are in per cent, except ``num_rows`` and ``tau`` (-1 to 1). ``coverage`` and ``width`` are those of the
    80 % intervals. ``target``: the value that the figure named by ``judged`` ("mape", "median" or "worst") should
    reach at most; None for baselines and for parts that are only reported. ``note``: what a reader has to know about
    the rows (how many are not scored, whether the form was chosen with them in view); shown below the table. ``tau``
    and ``regret``: how well the order of runs within a job is predicted (see the module's docstring).
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
    """Score predictions of n rows on which the arm was not fitted; ``measured`` has shape (n,).

    ``predicted`` may have intervals. ``judged`` names the figure to compare with ``target``. ``jobs``: the job of each
    row; if given, the order within jobs is scored, too. Raises MeasurementError for no rows, and for values that are
    not positive and finite.
    """
    seconds = predicted if isinstance(predicted, np.ndarray) else predicted.seconds
    if not len(measured) or not (_sound(measured) and _sound(seconds)):
        raise MeasurementError(
            f"{dataset}, {part}, {arm}: {len(measured)} rows; expected at least one row, and positive, finite measured "
            "and predicted values in all rows. Leave out other rows."
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
    """How well the order of runs is predicted, over ``num_jobs`` jobs with several runs.

    ``tau`` is from -1 to 1, ``regret`` in per cent; None if there is nothing to compare.
    """

    num_jobs: int
    tau: float | None
    regret: float | None


def rank_runs(jobs: Sequence[Hashable], measured: Floats, predicted: Floats) -> Ranking:
    """Score the predicted order of the runs within each job; all arguments have shape (runs,), times are in seconds."""
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
