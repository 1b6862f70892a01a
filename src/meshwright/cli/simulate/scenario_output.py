"""Output of ``meshwright simulate`` with ``--scenario`` (beside the plan without it) and with ``--sweep``."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from meshwright.cli.json_output import print_json
from meshwright.cli.output import print_tables
from meshwright.spec import (
    DocumentError,
    Graph,
    Placement,
    Plan,
    format_count,
    format_percent,
    format_seconds,
    suggest,
    write_text,
)
from meshwright.spec.scenario import Scenario

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshwright.cli.simulate.simulate_request import SimulateRequest
    from meshwright.cost import CostModel
    from meshwright.simulator import Contention, Simulation
    from meshwright.simulator.scenarios import Replan, Sweep


def planner_for(plan: Plan | Placement, graph: Graph) -> Replan | None:
    """Return the function that replans if a scenario loses devices; None for a placement of every op."""
    from meshwright.planner import replan_seconds
    from meshwright.spec import Placement

    return None if isinstance(plan, Placement) else partial(replan_seconds, plan, graph)


def follow_scenario(
    scenario: Scenario,
    result: Simulation,
    plan: Plan | Placement,
    graph: Graph,
    usual: CostModel,
    contention: Contention,
    num_steps: int,
    settings: dict[str, Any],
) -> tuple[Simulation, dict[str, Any], tuple[Any, ...]]:
    """Predict a plan under a scenario, and a run of many steps; ``result`` is its simulation on the changed machines.

    Return the simulation to show, facts for ``--json``, and sentences and tables for the terminal. Under jitter the
    simulation's timeline is drawn with the scenario's own seed. Without effects and without ``run_steps``, ``result``
    is returned unchanged. ``usual``: the costs without the scenario; ``settings``: ``num_seeds`` and ``run_steps`` of
    `simulate_scenario`.
    """
    from meshwright.report import (
        describe_missing_rates,
        describe_price,
        describe_run,
        describe_scenario,
        make_table,
    )
    from meshwright.simulator import simulate_plan
    from meshwright.simulator.scenarios import apply_scenario, simulate_scenario, steps_under_jitter
    from meshwright.spec import Plan
    from meshwright.spec.used_devices import used_of

    if not scenario.effects and settings["run_steps"] is None:
        return result, {}, ()
    replan = planner_for(plan, graph)
    outcome = simulate_scenario(
        plan, graph, usual, scenario, result=result, contention=contention, replan=replan, **settings
    )
    facts, printed = dict[str, Any](), list[Any]()
    if scenario.effects:
        words = describe_scenario(scenario)
        before_s = simulate_plan(plan, graph, usual.cluster, cost=usual, contention=contention).step_time_s
        facts = {"name": scenario.name, "effects": words, "step_time_without_s": before_s}
        printed.append(Text(_compare(scenario.name, words, result.step_time_s, before_s)))
        machine = apply_scenario(usual, scenario).cluster
        machine = used_of(plan, machine) if isinstance(plan, Plan) else machine
        if remark := describe_missing_rates(machine, plan.num_devices, plan.workload.precision):
            facts["remark"] = remark
            printed.append(Text(remark))
    if outcome.steps is not None:
        if result.simulated_ops is not None:
            raise DocumentError(
                "`--detail ops` shows ops at their typical times; leave --detail out in a scenario with jitter."
            )
        cost = apply_scenario(usual, scenario)
        noisy = steps_under_jitter(plan, graph, cost, scenario, contention=contention).timeline(num_steps)
        result = replace(result, simulated=noisy, fold=None)
        facts["steps"] = rows = outcome.steps.rows()
        seeds, steps = outcome.steps.seconds.shape
        printed.append(Text(f"Under jitter, {steps} steps for each of {format_count(seeds, 'seed')}:"))
        printed.append(make_table([{key: value for key, value in rows.items() if not key.startswith("num")}]))
    if outcome.run is not None:
        facts["run"] = outcome.run.row()
        printed.append(Text(describe_run(facts["run"], len(outcome.run.runs))))
    if outcome.price:
        facts["price"] = outcome.price
        printed.append(Text(describe_price(outcome.price)))
    return result, facts, tuple(printed)


def _compare(name: str, words: str, step_s: float, before_s: float) -> str:
    change = "the same" if step_s == before_s else _signed(step_s / before_s - 1)
    return (
        f"Scenario{f' {name}' if name else ''}: {words}. A steady step takes {format_seconds(step_s)}, without the "
        f"scenario {format_seconds(before_s)}: {change}."
    )


def _signed(share: float) -> str:
    return f"{'+' if share > 0 else '−'} {format_percent(abs(share))}"


# Columns of the terminal's table: the first line of which some column has a figure; its first column is drawn.
_SHOWN = (
    ("run_s", "run_computing_share", "interval_s", "price_of_run"),
    ("jittered_mean_s", "jittered_p95_s", "jittered_slowest_s", "step_time_s"),
    ("step_time_s", "samples_per_s", "bubble_share", "peak_memory_bytes"),
)
_NO_COLUMN = ("error",)


# ``--sweep`` simulates every combination of some parameters, as a table, a CSV file and a plot.
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
    """Return the cases as CSV: a line of names, and a line for each case. Missing values are empty."""
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
    """Simulate all combinations of the values of --sweep, then write and print them."""
    from meshwright.simulator.scenarios import read_parameter, sweep_cases

    parameters = [read_parameter(text) for text in request.sweep or ()]
    replan = planner_for(plan, graph)
    sweep = sweep_cases(
        parameters, plan, graph, usual, scenario, contention=request.contention, replan=replan, **settings
    )
    title = f"{plan.model} on {usual.cluster.name}"
    put_sweep(sweep, title, request.out, request.plot, request.figure, as_json=request.as_json)
