"""Scores as cells of a table and as a page in Markdown, with date, versions and the command that made it."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from meshwright.validation.validate import tabulate_scores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.validation.scores import Score
    from meshwright.validation.validate import DataSet

SCORE_HEADINGS = ("part · arm", "n", "MAPE", "median", "p90", "worst", "inside", "width", "target")
_NAMES = {"mape": "MAPE"}
_NOTHING = "–"

_HEAD = """# Accuracy

**How far are predictions from measurements?** Every set below was measured by others or beforehand, and no row that is
scored was seen when the predictor was made: [how](commands/validate.md). Errors are in per cent of the measured value;
"inside" is the share of rows inside the 80 % interval, "width" the median width of the interval. A missed target stays
in the table; the pages under Concepts say why.

Made on {date} by `{command}` with Python {python}, {packages}.
"""


def score_cells(scores: Sequence[Score]) -> list[list[str]]:
    """Texts for `SCORE_HEADINGS`: a line that names the part, then one for each arm."""
    cells: list[list[str]] = []
    before = None
    for row in tabulate_scores(scores):
        if row["part"] != before:
            cells.append([row["part"], *[""] * (len(SCORE_HEADINGS) - 1)])
            before = row["part"]
        targets = [
            f"{_NAMES.get(judged, judged)} ≤ {target:.3g} {'met' if met else 'missed'}"
            for (judged, target), met in zip(row["targets"].items(), row["met"], strict=True)
        ]
        errors = [_number(row[name]) for name in ("mape", "median", "p90", "worst", "coverage", "width")]
        cells.append([f"· {row['arm']}", f"{row['rows']:,}", *errors, ", ".join(targets)])
    return cells


def scores_page(scored: Sequence[tuple[DataSet, tuple[Score, ...]]]) -> str:
    """The page of all scores."""
    names = [dataset.name for dataset, _ in scored]
    head = _HEAD.format(
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        command=" ".join(["meshwright", "validate", *names, "--out", "docs/accuracy.md"]),
        python=platform.python_version(),
        packages=", ".join(_versions("numpy", "scikit-learn", "numba")),
    )
    parts = [head]
    for dataset, scores in scored:
        rows = [SCORE_HEADINGS, ["---"] * len(SCORE_HEADINGS), *score_cells(scores)]
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        parts.append(
            f"\n## {dataset.name}\n\n{dataset.about[0].upper()}{dataset.about[1:]}.\n\n" + "\n".join(lines) + "\n"
        )
    return "".join(parts)


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
