"""Mixed integer programs in arrays, solved by HiGHS on one thread."""

from __future__ import annotations

import importlib
import math
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from meshwright.spec import MeshwrightError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float64]
    Integers: TypeAlias = NDArray[np.int64]

# HiGHS' tolerances are absolute, so objectives are scaled to about this size.
_LARGE = 1e6


class SparseRows:
    """The constraints ``lower <= A x <= upper`` of a program under construction, with A as sparse entries.

    ``count`` is the number of rows. The other fields are lists of arrays, one array per call of `add` or `fill`.
    """

    def __init__(self) -> None:
        self.rows: list[Integers] = []
        self.columns: list[Integers] = []
        self.values: list[Floats] = []
        self.lower: list[Floats] = []
        self.upper: list[Floats] = []
        self.count = 0

    def add(self, lower: Floats, upper: Floats) -> int:
        """Add a row for each element of ``lower`` and ``upper``, its bounds; return the index of the first new row."""
        first = self.count
        self.lower.append(lower)
        self.upper.append(upper)
        self.count += len(lower)
        return first

    def fill(self, rows: Integers, columns: Integers, value: float | Floats) -> None:
        """Set the entries at ``rows[i]``, ``columns[i]`` to ``value`` (one number, or one per entry)."""
        self.rows.append(rows)
        self.columns.append(columns)
        self.values.append(np.broadcast_to(np.asarray(value, np.float64), rows.shape))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Optimum:
    """The result of `minimise`.

    ``values`` holds x, or None if no solution was found; ``objective`` is its cost. ``bound`` is a proven lower bound
    of the cost of every solution. ``status`` is HiGHS' own word; ``optimal``: the solution is proven optimal.
    """

    values: Floats | None
    objective: float
    bound: float
    status: str
    optimal: bool


def minimise(
    costs: Floats,
    upper: Floats,
    rows: SparseRows,
    whole: NDArray[np.bool_],
    *,
    purpose: str,
    deadline_s: float,
    gap: float = 0.0,
    scale: float = _LARGE,
    start: Floats | None = None,
) -> Optimum:
    """Minimise ``costs · x`` for ``0 <= x <= upper`` under the constraints ``rows``.

    x has whole numbers where the mask ``whole`` is True. ``deadline_s``: the time limit in seconds. ``gap``: the
    relative gap at which the solver stops. ``scale`` multiplies the costs, because HiGHS' tolerances are absolute.
    ``start``: a known feasible x. Raises MeshwrightError if highspy is not installed; ``purpose`` begins its message.
    """
    highspy = _import_highspy(purpose)
    solver = _make_solver(highspy)
    for option, value in (("threads", 1), ("mip_rel_gap", gap), ("random_seed", 0)):
        solver.setOptionValue(option, value)
    solver.setOptionValue("time_limit", float(deadline_s))
    solver.passModel(_model(highspy, costs * scale, upper, rows, whole))
    if start is not None:
        known = highspy.HighsSolution()
        known.col_value = [float(value) for value in start]
        solver.setSolution(known)
    solver.run()
    status = solver.getModelStatus()
    info = solver.getInfo()
    found = info.primal_solution_status == highspy.kSolutionStatusFeasible
    return Optimum(
        values=np.array(solver.getSolution().col_value) if found else None,
        objective=info.objective_function_value / scale,
        bound=info.mip_dual_bound / scale if math.isfinite(info.mip_dual_bound) else 0.0,
        status=solver.modelStatusToString(status),
        optimal=status == highspy.HighsModelStatus.kOptimal,
    )


def _model(highspy: Any, costs: Floats, upper: Floats, matrix: SparseRows, whole: NDArray[np.bool_]) -> Any:
    rows, columns = (np.concatenate(parts) for parts in (matrix.rows, matrix.columns))
    order = np.lexsort((columns, rows))
    starts = np.searchsorted(rows[order], np.arange(matrix.count + 1))
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(costs), matrix.count
    model.col_cost_, model.col_lower_, model.col_upper_ = costs, np.zeros(len(costs)), upper
    model.row_lower_, model.row_upper_ = np.concatenate(matrix.lower), np.concatenate(matrix.upper)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = starts.astype(np.int32)
    model.a_matrix_.index_ = columns[order].astype(np.int32)
    model.a_matrix_.value_ = np.concatenate(matrix.values)[order]
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    model.integrality_ = [kinds[int(item)] for item in whole]
    return model


def _import_highspy(purpose: str) -> Any:
    try:
        return importlib.import_module("highspy")
    except ModuleNotFoundError as error:
        raise MeshwrightError(
            f"{purpose} by HiGHS, but its package highspy is not installed. Run: pip install 'meshwright[search]'."
        ) from error


def _make_solver(highspy: Any) -> Any:
    """Return a solver that prints nothing."""
    with _no_output():
        solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    return solver


@contextmanager
def _no_output() -> Iterator[None]:
    """Discard what is written to standard output: HiGHS 1.16 prints its version before any option can be set."""
    if sys.stdout is not None:
        sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # standard output is closed
        yield
        return
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
