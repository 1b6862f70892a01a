"""Score the public data sets one after the other (`score_datasets`), or a user's own table of steps.

The function of each data set fits on rows that are not scored, refuses to score rows that were fitted on, and returns
the scores of our predictor and of baselines on the same rows.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.spec import EventSink, MeasurementError, MeshwrightError
from meshwright.validation.datasets import StepRow, load_all_steps, read_lines
from meshwright.validation.scores import Score, score_rows
from meshwright.validation.step_plans import evaluate_steps, predictions_of
from meshwright.validation.step_sets import calibration_rows, run_of
from meshwright.validation.step_table import LeftOut, check_steps, list_reasons, read_steps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from meshwright.validation.sets import DataSet


_TWICE = "the id of an earlier row; expected every id once, or an empty cell"
_FITTED, _UNTIMED = "rows that a host's speed was fitted on", "no measured seconds (iter_time_s)"


def score_datasets(
    datasets: Sequence[DataSet], events: EventSink, *, quick: bool = False
) -> Iterator[tuple[DataSet, tuple[Score, ...]]]:
    """Yield each data set with its scores; ``quick``: only parts of the data sets that take long."""
    for done, dataset in enumerate(datasets):
        events.progress(f"score {dataset.name}", done, len(datasets))
        yield dataset, dataset.quick() if quick else dataset.score()
    events.progress("score", len(datasets), len(datasets))


def score_step_file(path: Path) -> tuple[tuple[Score, ...], list[LeftOut]]:
    """Score the steps of a CSV file as `score_step_table` does; messages name the file.

    Raises DocumentError for any other file, and the errors of `score_step_table`.
    """
    numbered = read_lines(path)
    try:
        return score_step_table([row for _, row in numbered], [line for line, _ in numbered])
    except MeasurementError as error:
        raise MeasurementError(f"{path}: {error}") from None


def score_step_table(rows: Sequence[StepRow], lines: Sequence[int] = ()) -> tuple[tuple[Score, ...], list[LeftOut]]:
    """Score step predictions on rows with the columns of ``training_steps.csv``.

    Returns a score per ``source``, and the rows that are left out, by reason. ``lines``: the line numbers of the rows
    in their file, shape (rows,). Raises MeasurementError if no row can be scored.
    """
    check_steps(rows)
    fitted = {run_of(row) for row in calibration_rows(load_all_steps())}
    apart: dict[str, list[int]] = {_TWICE: [], _FITTED: [], _UNTIMED: []}
    asked: dict[int, StepRow] = {}
    known: set[str] = set()
    for line, row in zip(lines or range(2, len(rows) + 2), rows, strict=True):
        if row["id"] in known:
            apart[_TWICE].append(line)
        elif run_of(row) in fitted:
            apart[_FITTED].append(line)
        elif not row.get("iter_time_s"):
            apart[_UNTIMED].append(line)
        else:
            asked[line] = row
        known |= {row["id"]} - {""}
    read, odd = read_steps([*asked.values()], [*asked])
    unread = {line for reason in odd for line in reason.lines}
    pairs = []
    for line, case, item in zip([i for i in asked if i not in unread], read, evaluate_steps(read), strict=True):
        if isinstance(item, MeshwrightError):
            apart.setdefault(f"no plan can express the run: {item}", []).append(line)
        else:
            pairs.append((case, item))
    left_out = [*(LeftOut(reason=reason, lines=tuple(where)) for reason, where in apart.items() if where), *odd]
    if not pairs:
        raise MeasurementError(f"No row of the table can be scored: {'; '.join(list_reasons(left_out))}.")
    scores = []
    for source, group in groupby(sorted(pairs, key=lambda pair: pair[0].source), key=lambda pair: pair[0].source):
        mine, ours = zip(*group, strict=True)
        measured, jobs = np.array([case.measured_s for case in mine], np.float64), [case.job for case in mine]
        scores.append(score_rows("steps", source, "plan", measured, predictions_of(ours), jobs=jobs))
    return tuple(scores), left_out


def tabulate_scores(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """Return one row of values by name per part and arm, in order: number of rows, errors in per cent, targets.

    ``targets`` has the target of each judged figure, ``met`` whether each is reached.
    """
    merged: dict[tuple[str, str], list[Score]] = {}
    for part, score in zip(name_parts(scores), scores, strict=True):
        merged.setdefault((part, score.arm), []).append(score)
    rows = []
    for (part, arm), alike in merged.items():
        first, aimed = alike[0], [score for score in alike if score.target is not None]
        rows.append(
            {
                "part": part,
                "arm": arm,
                "rows": first.num_rows,
                "mape": first.mape,
                "median": first.median,
                "p90": first.p90,
                "worst": first.worst,
                "coverage": first.coverage,
                "width": first.width,
                "tau": first.tau,
                "regret": first.regret,
                "targets": {score.judged: score.target for score in aimed},
                "met": [bool(score.met) for score in aimed],
                "note": first.note,
            }
        )
    return rows


def name_parts(scores: Sequence[Score]) -> list[str]:
    """Return the part of each score; if there are several data sets, as ``dataset: part``."""
    several = len({score.dataset for score in scores}) > 1
    return [f"{score.dataset}: {score.part}" if several else score.part for score in scores]
