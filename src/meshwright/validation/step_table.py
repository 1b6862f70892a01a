"""Which rows of a table of steps can be predicted, and which ones are left out: line, cell, and what was expected."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.spec import MeasurementError, MeshwrightError
from meshwright.validation.step_cells import CellError, show
from meshwright.validation.step_rows import NEEDED, read_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from meshwright.validation.step_cells import Row
    from meshwright.validation.step_rows import StepCase

# A row takes about a millisecond to predict, a pipeline of a thousand stages a hundred times that.
MAX_ROWS = 100_000
# Lines and reasons that a message names; JSON has them all.
_MAX_PLACES, _MAX_REASONS = 4, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Rows that were left out for one reason: their lines in the file, and the cell of each where one is at fault."""

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
    """Raise MeasurementError if there is no row, a column is missing altogether, or there are too many rows."""
    if not rows:
        raise MeasurementError("The table of steps has no rows; expected at least one below the line of column names.")
    missing = [name for name in NEEDED if name not in rows[0]]
    if missing:
        raise MeasurementError(
            f"The table of steps lacks the columns {', '.join(missing)}; expected those of training_steps.csv. Add "
            "them (empty cells are allowed where a row does not say)."
        )
    if len(rows) > MAX_ROWS:
        raise MeasurementError(f"{len(rows)} rows of steps; expected at most {MAX_ROWS}. Split the table.")


def read_steps(
    rows: Sequence[Row], lines: Sequence[int] = (), predict: Callable[[StepCase], object] | None = None
) -> tuple[list[StepCase], list[LeftOut]]:
    """The rows that can be predicted, in their order, and those that were left out, by reason.

    ``lines``: where the rows stand in their file, shape (rows,); without them, one below the other from line 2 on.
    ``predict``: called once for each of the former, and what it cannot predict is left out, too. The table is one that
    `check_steps` accepts.
    """
    cases: list[StepCase] = []
    cells: dict[str, list[tuple[int, str]]] = defaultdict(list)
    wholes: dict[str, list[int]] = defaultdict(list)
    for line, row in zip(lines or range(2, len(rows) + 2), rows, strict=True):
        try:
            case = read_step(row)
            if predict is not None:
                predict(case)
            cases.append(case)
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
    """A line for each reason, the most frequent first; those beyond a dozen are counted."""
    ordered = sorted(left_out, key=lambda reason: -len(reason.lines))
    more = sum(len(reason.lines) for reason in ordered[_MAX_REASONS:])
    return [*map(str, ordered[:_MAX_REASONS]), *([f"{more} left out for other reasons"] if more else [])]
