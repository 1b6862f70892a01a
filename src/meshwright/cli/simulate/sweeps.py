"""``meshwright simulate --sweep``: every combination of some parameters, as a table, a CSV file and a plot."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from meshwright.cli.json_output import print_json
from meshwright.cli.output import print_tables
from meshwright.cli.simulate.scenarios import planner_for
from meshwright.spec.errors import DocumentError, suggest
from meshwright.spec.files import write_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshwright.cli.simulate.request import SimulateRequest
    from meshwright.cost import CostModel
    from meshwright.simulator.scenarios import Sweep
    from meshwright.spec.graph import Graph
    from meshwright.spec.placement import Placement
    from meshwright.spec.plan import Plan
    from meshwright.spec.scenario import Scenario

# Columns of the terminal's table: the first line of which some column has a figure; its first column is drawn.
_SHOWN = (
    ("run_s", "run_computing_share", "interval_s", "price_of_run"),
    ("jittered_mean_s", "jittered_p95_s", "jittered_slowest_s", "step_time_s"),
    ("step_time_s", "samples_per_s", "bubble_share", "peak_memory_bytes"),
)
_NO_COLUMN = ("error",)


def put_sweep(
    sweep: Sweep,
    title: str,
    out: Path | None,
    plot: Path | None,
    figure: str | None,
    *,
    as_json: bool,
    usual: Sequence[str] | None = None,
) -> None:
    """Write and print the results of a sweep; ``usual`` are the columns of a terminal's table, the first one drawn.

    Raises DocumentError for a figure that the sweep does not have. If no case could be simulated, the reasons are
    written and printed, nothing is drawn, and the exit code is 1.
    """
    from meshwright.report import draw_curves

    names, figures = [parameter.name for parameter in sweep.parameters], sweep.figures
    drawn = [name for name in figures if name not in _NO_COLUMN]
    failed = [row for row in sweep.rows if "error" in row]
    all_failed = len(failed) == len(sweep.rows)
    if all_failed:
        plot = figure = None
    if figure is not None and figure not in drawn:
        raise DocumentError(f"--figure {figure!r} is not a column of this sweep{suggest(figure, drawn)}.")
    usual = usual or next(([name for name in line if name in drawn] for line in _SHOWN if line[0] in drawn), [])
    chosen = figure or (usual[0] if usual else "")
    if plot is not None:
        write_text(draw_curves(sweep.rows, names, chosen, title=title), plot)
    if out is not None:
        write_text(write_csv(sweep), out)
    written = {"cases": out, "plot": plot}
    if as_json:
        files = {"out" if name == "cases" else name: str(path) for name, path in written.items() if path is not None}
        print_json("sweep", {"parameters": names, "cases": list(sweep.rows), **files})
    else:
        _print_cases(sweep, chosen, usual, failed, written)
    if all_failed:
        raise typer.Exit(1)


def _print_cases(
    sweep: Sweep,
    chosen: str,
    usual: Sequence[str],
    failed: Sequence[dict[str, Any]],
    written: Mapping[str, Path | None],
) -> None:
    from meshwright.report import make_table

    names = [parameter.name for parameter in sweep.parameters]
    shown = [*names, *dict.fromkeys([*([chosen] if chosen else []), *usual])]
    print_tables(make_table([{name: row.get(name) for name in shown} for row in sweep.rows]))
    if failed:
        print_tables(Text(f"{len(failed)} of {len(sweep.rows)} cases could not be simulated; {failed[0]['error']}"))
    print_tables(*(Text(f"{name} written to {path}") for name, path in written.items() if path is not None))


def write_csv(sweep: Sweep) -> str:
    """The cases as CSV: a line of names, then a line for each case; all digits, empty for missing values."""
    names = [*(parameter.name for parameter in sweep.parameters), *sweep.figures]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(row.get(name)) for name in names} for row in sweep.rows)
    return text.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, float) else str(value)


def run_sweep(
    request: SimulateRequest,
    plan: Plan | Placement,
    graph: Graph,
    usual: CostModel,
    scenario: Scenario,
    settings: dict[str, Any],
) -> None:
    """Simulate all cases, then write and print them."""
    from meshwright.simulator.scenarios import read_parameter, sweep_cases

    parameters = [read_parameter(text) for text in request.sweep or ()]
    replan = planner_for(plan, graph)
    sweep = sweep_cases(
        parameters, plan, graph, usual, scenario, contention=request.contention, replan=replan, **settings
    )
    title = f"{plan.model} on {usual.cluster.name}"
    put_sweep(sweep, title, request.out, request.plot, request.figure, as_json=request.as_json)
