"""Split a table of steps into rows that can be predicted and rows that are left out, with the reason for each."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.spec import MeasurementError, MeshwrightError, suggest
from meshwright.validation.datasets import load_steps
from meshwright.validation.step_cells import CellError, Row, show
from meshwright.validation.step_rows import NEEDED, StepCase, read_step

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


# A row takes about a tenth of a second to predict, a pipeline of a thousand stages ten times that.
MAX_ROWS = 100_000
# Lines and reasons that a message names; JSON has them all.
_MAX_PLACES, _MAX_REASONS = 4, 12
# What a message says of a column in addition to its name.
_UNITS = {"iter_time_s": " (seconds of a step)", "gbs_seq": " (sequences of a step)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Rows that were left out for one reason.

    ``lines``: their line numbers in the file. ``found``: the text of the wrong cell of each row, () if the reason is
    not a single cell.
    """

    reason: str
    lines: tuple[int, ...]
    found: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.found:
            places = [f"{show(text)} (line {line})" for text, line in zip(self.found, self.lines, strict=True)]
        else:
            places = [f"line {line}" for line in self.lines]
        named = ", ".join(places[:_MAX_PLACES]) + (", ..." if len(places) > _MAX_PLACES else "")
        return f"{len(self.lines)} left out: {self.reason}; {'found ' if self.found else ''}{named}"


def check_steps(rows: Sequence[Row]) -> None:
    """Raise MeasurementError if there is no row, if there are too many, or if a column is missing or unknown."""
    if not rows:
        raise MeasurementError("The table of steps has no rows; expected at least one below the line of column names.")
    wrong = [*_name_missing(rows[0]), *_name_unknown(rows[0])]
    if wrong:
        raise MeasurementError(
            f"The table of steps {' and '.join(wrong)}; expected columns of training_steps.csv. Rename or add them "
            "(empty cells are allowed where a row does not say); remarks belong into notes."
        )
    if len(rows) > MAX_ROWS:
        raise MeasurementError(f"{len(rows)} rows of steps; expected at most {MAX_ROWS}. Split the table.")


def _name_missing(row: Row) -> list[str]:
    missing = [name + _UNITS.get(name, "") for name in NEEDED if name not in row]
    return [f"lacks the columns {', '.join(missing)}"] if missing else []


def _name_unknown(row: Row) -> list[str]:
    """Columns that would be ignored, each with the one that is not there and that it may have been meant to be."""
    known = load_steps()[0]
    free = [name for name in known if name not in row]
    unknown = [name for name in row if name not in known]
    hinted: dict[str, list[str]] = defaultdict(list)
    for name in unknown[:_MAX_PLACES]:
        hinted[suggest(name.lower(), free)].append(show(name))
    named = [", ".join(names) + hint for hint, names in hinted.items()]
    more = [f"{len(unknown) - _MAX_PLACES} more"] if len(unknown) > _MAX_PLACES else []
    return [f"has columns that are not known: {', '.join(named + more)}"] if unknown else []


def read_steps(rows: Sequence[Row], lines: Sequence[int] = ()) -> tuple[list[StepCase], list[LeftOut]]:
    """Return the rows that can be predicted, in their order, and the rows that are left out, by reason.

    ``rows`` must pass `check_steps`. ``lines``: line numbers of the rows in their file, shape (rows,); by default 2, 3
    and so on.
    """
    cases: list[StepCase] = []
    cells: dict[str, list[tuple[int, str]]] = defaultdict(list)
    wholes: dict[str, list[int]] = defaultdict(list)
    for line, row in zip(lines or range(2, len(rows) + 2), rows, strict=True):
        try:
            cases.append(read_step(row))
        except CellError as error:
            cells[f"{error.column}: expected {error.expected}"].append((line, error.found))
        except MeshwrightError as error:
            wholes[str(error)].append(line)
    of_cells = [
        LeftOut(reason=reason, lines=tuple(line for line, _ in places), found=tuple(found for _, found in places))
        for reason, places in cells.items()
    ]
    return cases, [*of_cells, *(LeftOut(reason=reason, lines=tuple(where)) for reason, where in wholes.items())]


def list_reasons(left_out: Iterable[LeftOut]) -> list[str]:
    """Return a line of text for each reason, the most frequent first; after a dozen, one line counts the others."""
    ordered = sorted(left_out, key=lambda reason: -len(reason.lines))
    more = sum(len(reason.lines) for reason in ordered[_MAX_REASONS:])
    return [*map(str, ordered[:_MAX_REASONS]), *([f"{more} left out for other reasons"] if more else [])]
