"""What `meshwright run` checks of its options, and what it prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from meshwright.cli.json_output import print_json
from meshwright.cli.measure_calibrate import calibration_tables
from meshwright.cli.models import graph_of_plan
from meshwright.cli.output import note, print_tables
from meshwright.cli.planning import make_cost_model
from meshwright.cli.recalling import recall_measurements
from meshwright.spec.cluster import load_cluster
from meshwright.spec.codec import read_document
from meshwright.spec.errors import ClusterError, DocumentError, MeasurementError
from meshwright.spec.plan import Plan
from meshwright.spec.plan_files import read_plan
from meshwright.spec.timeline import Timeline
from meshwright.spec.units import format_count

if TYPE_CHECKING:
    from meshwright.training import Calibration, Job, Outcome, RunResult


def load_measurements_of(job: Job, table: Path, *, calibrate: bool, num_recorded: int) -> None:
    """Raise for a table that the plan cannot use or its run cannot correct; note if another torch made it."""
    document = job.read_plan()
    if calibrate and isinstance(document, Plan) and document.compiled:
        raise typer.BadParameter(
            "--calibrate corrects times of single ops, which compiled layers do not have. Run with --no-compile to "
            "calibrate."
        )
    if calibrate and (not isinstance(document, Plan) or num_recorded < 2):
        raise typer.BadParameter("--calibrate fits one recorded step and judges by another, of a plan by layers.")
    make_cost_model(load_cluster(document.cluster), table, document.workload.precision)


# The options that have an effect in a dry run.
_OF_DRY_RUNS = frozenset(
    {
        "--dry",
        "--process",
        "--learning-rate",
        "--seed",
        "--repair",
        "--repair-fade",
        "--clip-norm",
        "--compile",
        "--json",
    }
)


def check_options(given: Sequence[str]) -> None:
    """Raise BadParameter for options that contradict each other."""
    if "--dry" in given and (lost := [name for name in given if name not in _OF_DRY_RUNS]):
        raise typer.BadParameter(f"--dry trains nothing and takes no times: leave out {' and '.join(lost)}.")
    if "--process" in given and "--dry" not in given:
        raise typer.BadParameter("--process chooses the process that --dry runs; give --dry, too.")
    if "--calibrate" in given and "--measurements" not in given:
        raise typer.BadParameter("--calibrate corrects the table of --measurements by a run: give it, too.")
    if "--checkpoint" not in given and ("--resume" in given or "--checkpoint-every" in given):
        raise typer.BadParameter("--resume and --checkpoint-every need a folder: give --checkpoint FOLDER, too.")


def print_dry_run(job: Job, process: int, as_json: bool) -> None:
    """Print what one process exchanged in a step, compared with the prediction."""
    from meshwright.report import make_table
    from meshwright.training import dry_run

    found = dry_run(job, process)
    if as_json:
        facts = {"process": found.process, "processes": found.num_processes, "stages": found.stages}
        counts = {"instructions": found.instructions, "numbers": found.numbers, "ring_messages": found.ring_messages}
        print_json("dry-run", {**facts, "steps": found.num_steps, **counts, "exchanges": found.rows()})
        return
    instructions = format_count(sum(found.instructions.values()), "instruction")
    stages = ", ".join(map(str, found.stages))
    apart = {"number": found.numbers, "message of rings": found.ring_messages}
    several = {"number": "numbers", "message of rings": "messages of rings"}
    others = ", ".join(format_count(count, what, several[what]) for what, count in apart.items() if count)
    print_tables(
        f"process {found.process} of {found.num_processes}, stage {stages}: {instructions} in "
        f"{format_count(found.num_steps, 'step')}, nothing computed",
        make_table(found.rows()),
        f"{format_count(len(found.issued) + len(found.inside), 'exchange')} as predicted, in order and bytes"
        + (f"; not compared: {others}" if others else ""),
    )


def lines_for_nodes(plan: Path, options: str) -> list[str]:
    """How to start a plan for several nodes with the same options.

    Empty for plans of one node, and for clusters not known here. Raises PlanError for a plan that can only be
    simulated.
    """
    from meshwright.report.settings import launch_lines
    from meshwright.runtime import check_runnable

    document = read_plan(plan)
    if not isinstance(document, Plan):
        return []
    check_runnable(document)
    try:
        return launch_lines(document, load_cluster(document.cluster), plan, options)
    except (ClusterError, DocumentError):
        return []


def recorded_steps(given: str | None, num_steps: int) -> tuple[int | None, int]:
    """The first step to record, from 0, and the number of steps; by default the last five."""
    if given is None:
        return None, 5
    first, _, last = given.partition("-")
    last = last or first
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last) <= num_steps):
        raise typer.BadParameter(f"--record {given}: expected a step of 1 to {num_steps}, or two with a dash: 3-5.")
    return int(first) - 1, int(last) - int(first) + 1


def judge(job: Job, result: RunResult, measurements: Path | None) -> Outcome | None:
    """The measured steps beside their prediction; None for placements."""
    from meshwright.training import judge_run

    document = job.read_plan()
    if not isinstance(document, Plan):
        return None
    timeline = read_document(Timeline, result.timeline)
    measurements = recall_measurements(document, Path(job.plan), measurements)
    try:
        return judge_run(document, graph_of_plan(document, None), timeline, result.first_recorded, measurements)
    except (ClusterError, DocumentError, MeasurementError) as error:
        note(f"No prediction to compare with: {error}")
        return None


def correct(plan: Path, result: RunResult, measurements: Path) -> Calibration:
    """Correct a table by the recorded steps, and write it if other steps show it to be better."""
    from meshwright.records import load_measurements, save_measurements
    from meshwright.training import correct_table

    document, timeline = read_document(Plan, plan), read_document(Timeline, result.timeline)
    cluster = load_cluster(document.cluster)
    known, graph = load_measurements(measurements, cluster), graph_of_plan(document, None)
    found = correct_table(known, document, graph, cluster, timeline, document.model)
    if not found.why_kept:
        save_measurements(found.table, measurements)
    return found


def _shown(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"


def print_result(
    result: RunResult,
    outcome: Outcome | None,
    corrected: Calibration | None,
    table: Path | None,
    off: float | None,
    trace: Path | None,
    ranks: tuple[int, ...] | None,
    as_json: bool,
) -> None:
    """Print the result of a run and write the trace; ``off`` is the largest relative difference of the losses."""
    from meshwright.report import timeline_rows, timeline_table, write_trace

    timeline = read_document(Timeline, result.timeline)
    if trace is not None:
        write_trace([timeline], trace, ranks=ranks)
    if as_json:
        beside = outcome.row() if outcome is not None else {}
        beside |= {"calibration": corrected.row()} if corrected is not None else {}
        beside |= {"losses_off": off} if off is not None else {}
        beside |= {"compiled": asdict(result.compiled)} if result.compiled is not None else {}
        print_json("run", {"losses": result.losses, **timeline_rows(timeline), **beside, "timeline": result.timeline})
        return
    in_all = f", {result.num_before + len(result.losses)} in all" if result.num_before else ""
    count = format_count(len(result.losses or result.step_seconds), "step")
    first, last = (_shown(result.losses[at]) if result.losses else "" for at in (0, -1))
    print_tables(
        timeline_table(timeline), f"loss {first} → {last} in {count}{in_all}" if first else f"{count} of inference"
    )
    if None in result.losses:
        since = result.num_before + result.losses.index(None) + 1
        print_tables(f"The loss is not finite since step {since}: lower the learning rate, or clip with --clip-norm.")
    if result.compiled is not None:
        print_tables(*result.compiled.explain())
    print_tables(*(outcome.explain() if outcome is not None else ()), f"timeline written to {result.timeline}")
    if corrected is not None and table is not None:
        print_tables(*calibration_tables(corrected, result.plan, table))
    if off is not None:
        print_tables(f"losses are those of one process; the largest difference is {off:.1g} of a loss")
