"""Write scores as cells of a table and as a page in Markdown, with date, versions and the command that made it."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from typing import TYPE_CHECKING, Any

from meshwright.validation.sets import DATASETS, DataSet
from meshwright.validation.validate import name_parts, tabulate_scores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.validation.scores import Score

SCORE_HEADINGS = ("part · arm", "n", "MAPE", "median", "p90", "worst", "inside", "width", "tau", "regret", "target")
PART_HEADINGS = ("part", *SCORE_HEADINGS[1:], "best baseline")
TARGET_HEADINGS = ("set", "part", "arm", "figure", "reached", "target", "")
_NAMES = {"mape": "MAPE"}
_NOTHING = "–"
_MAX_PART = 100

_HEAD = """# Accuracy

**How far are predictions from measurements?** Every set below was measured by others or beforehand, and nothing that is
fitted saw a row that it is scored on: [how](commands/validate.md). Where a model's form was chosen after looking at
scored rows, a number in brackets leads to a note that says so. Errors are in per cent of the measured value; "inside"
is the share of rows inside the 80 % interval, "width" the median width of the interval; "tau" (Kendall's, from -1 to 1)
and "regret" (the loss from taking the run predicted best) say how well runs of one job are ranked. A missed target
stays in the table; the pages under Concepts say why. Next to ours stands the best of the baselines on the same rows, by
the figure of the target (else MAPE); `meshwright validate SET` prints them all.

Made on {date} by `{command}` with Python {python}, {packages}.
"""


def part_cells(scores: Sequence[Score]) -> list[list[str]]:
    """Return the cells of a table with `PART_HEADINGS`: one row per arm of ours, with the best baseline of its part.

    Arms of ours are those that have an interval or a target. The best baseline has the smallest value of the figure
    with the target, or of MAPE without a target.
    """
    rows, notes = tabulate_scores(scores), list_notes(scores)
    cells = []
    for part, group in groupby(rows, key=lambda row: row["part"]):
        arms = list(group)
        ours = [row for row in arms if row["targets"] or row["coverage"] is not None] or arms[:1]
        others = [row for row in arms if row not in ours]
        for row in ours:
            judged = next(iter(row["targets"]), "mape")
            best = min(others, key=lambda other: other[judged], default=None)
            beside = f"{best['arm']} {_number(best[judged])}" if best else _NOTHING
            name = _brief(part) if len(ours) == 1 else f"{_brief(part)}; {row['arm']}"
            cells.append([name + _mark(row["note"], notes), *_figures(row), beside])
    return cells


def score_cells(scores: Sequence[Score]) -> list[list[str]]:
    """Return the cells of a table with `SCORE_HEADINGS`: for each part, a row with its name and a row for each arm."""
    cells: list[list[str]] = []
    before, notes = None, list_notes(scores)
    for row in tabulate_scores(scores):
        if row["part"] != before:
            cells.append([_brief(row["part"]), *[""] * (len(SCORE_HEADINGS) - 1)])
            before = row["part"]
        cells.append([f"· {row['arm']}{_mark(row['note'], notes)}", *_figures(row)])
    return cells


def list_notes(scores: Sequence[Score]) -> list[str]:
    """Return the notes of the scores, each once; tables refer to a note by its number in this list, from 1."""
    return list(dict.fromkeys(score.note for score in scores if score.note))


def number_notes(scores: Sequence[Score]) -> list[str]:
    """Return the numbered notes, as lines below a table of `score_cells` or `part_cells`."""
    notes = list_notes(scores)
    return [f"{_mark(note, notes).strip()} {note}." for note in notes]


def _mark(note: str, notes: Sequence[str]) -> str:
    return f" [{notes.index(note) + 1}]" if note else ""


def _figures(row: dict[str, Any]) -> list[str]:
    """Rows, errors, coverage and width, and the targets."""
    targets = [
        f"{_NAMES.get(judged, judged)} ≤ {target:.3g} {'met' if met else 'missed'}"
        for (judged, target), met in zip(row["targets"].items(), row["met"], strict=True)
    ]
    errors = [_number(row[name]) for name in ("mape", "median", "p90", "worst", "coverage", "width")]
    order = [_NOTHING if row["tau"] is None else f"{row['tau']:.2f}", _number(row["regret"])]
    return [f"{row['rows']:,}", *errors, *order, ", ".join(targets)]


def target_cells(scored: Sequence[tuple[DataSet, tuple[Score, ...]]]) -> list[list[str]]:
    """Return the cells of a table with `TARGET_HEADINGS`: one row per target, with what was reached."""
    return [
        [
            dataset.name,
            part,
            score.arm,
            _NAMES.get(score.judged, score.judged),
            _number(getattr(score, score.judged)),
            f"≤ {score.target:.3g}",
            ("met" if score.met else "missed") + (", see the note below" if "in view" in score.note else ""),
        ]
        for dataset, scores in scored
        for part, score in zip(name_parts(scores), scores, strict=True)
        if score.target is not None
    ]


def scores_page(scored: Sequence[tuple[DataSet, tuple[Score, ...]]]) -> str:
    """Return the page of all scores in Markdown (docs/accuracy.md)."""
    names = [dataset.name for dataset, _ in scored]
    named = [] if names == [dataset.name for dataset in DATASETS] else names
    head = _HEAD.format(
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        command=" ".join(["meshwright", "validate", *named, "--out", "docs/accuracy.md"]),
        python=platform.python_version(),
        packages=", ".join(_versions("numpy", "scikit-learn", "numba")),
    )
    targets = target_cells(scored)
    met = sum(row[-1].startswith("met") for row in targets)
    parts = [head, f"\n## Targets\n\n{met} of {len(targets)} are met.\n\n", _markdown(TARGET_HEADINGS, targets)]
    for dataset, scores in scored:
        about = dataset.about[0].upper() + dataset.about[1:]
        parts.append(f"\n## {dataset.name}\n\n{about}.\n\n" + _markdown(PART_HEADINGS, part_cells(scores)))
        parts += [f"\n{line}\n" for line in number_notes(scores)]
    return "".join(parts)


def _markdown(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    rows = [headings, ["---"] * len(headings), *cells]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows)


def _brief(part: str) -> str:
    """A part may be the name that a stranger's table gives its source."""
    return part if len(part) <= _MAX_PART else f"{part[:_MAX_PART]}…"


def _number(value: float | None) -> str:
    """Three significant digits, no more than one behind the point from ten on."""
    if value is None:
        return _NOTHING
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _versions(*packages: str) -> list[str]:
    found = []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return found
