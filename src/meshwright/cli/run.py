"""``meshwright run``: execute a plan for real on this host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from meshwright.cli.models import JsonOption, MeasurementsOption, graph_of_plan
from meshwright.cli.output import print_json, print_tables, terminal_sink
from meshwright.cli.simulate import PlanArgument
from meshwright.cli.traces import TraceOption, TraceRanksOption, traced_ranks
from meshwright.spec.codec import read_document
from meshwright.spec.plan import Plan
from meshwright.spec.plan_files import read_plan
from meshwright.spec.timeline import Timeline
from meshwright.spec.units import format_count

if TYPE_CHECKING:
    from meshwright.runtime import RepairKind
    from meshwright.training import Job, Outcome, RunResult


def run(
    plan: PlanArgument,
    steps: Annotated[int, typer.Option(help="Training steps.", min=1)] = 20,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the timeline and the results.")] = Path("run"),
    learning_rate: Annotated[
        float | None, typer.Option(help="Learning rate; by default the optimizer's usual.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, data and dropout.")] = 0,
    repair: Annotated[
        str | None,
        typer.Option(help="Under a schedule that never flushes: predict weights, or discount learning rates."),
    ] = None,
    repair_fade: Annotated[int, typer.Option(help="Updates in which a discount fades; 0: it stays.", min=0)] = 0,
    clip_norm: Annotated[
        float | None, typer.Option(help="The norm that all gradients together have at most.", min=0.0)
    ] = None,
    autocast: Annotated[
        bool, typer.Option("--autocast", help="Compute forwards in bfloat16 where torch's autocast does; weights stay.")
    ] = False,
    save_model: Annotated[Path | None, typer.Option(help="Write the trained weights to this file (.pt).")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints: at the end, and --checkpoint-every so many steps.")
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0: at the end alone.", min=0)] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in --checkpoint, up to --steps in all.")
    ] = False,
    record: Annotated[
        str | None, typer.Option(help="Steps in the timeline, as 7 or 3-5; by default the last five.")
    ] = None,
    measurements: MeasurementsOption = None,
    dry: Annotated[
        bool, typer.Option("--dry", help="One step of one process without the others: is it what was predicted?")
    ] = False,
    process: Annotated[int | None, typer.Option(help="With --dry: which process; by default 0.", min=0)] = None,
    trace: TraceOption = None,
    trace_ranks: TraceRanksOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train the plan's model: one process per rank, the same program that was simulated.

    Starts all ranks on this host. Under torchrun (`launch.sh` of `meshwright plan`) it is one rank of them.
    """
    from meshwright.report import check_ranks
    from meshwright.training import Job, leave, run_plan, run_rank, started_by_torchrun

    if process is not None and not dry:
        raise typer.BadParameter("--process says which one --dry runs; give --dry, too.")
    if dry and (trace is not None or save_model is not None or checkpoint is not None):
        raise typer.BadParameter(
            "--dry trains nothing and takes no times: leave out --trace, --save-model and --checkpoint."
        )
    if checkpoint is None and (resume or checkpoint_every):
        raise typer.BadParameter("--resume and --checkpoint-every need the folder: give --checkpoint FOLDER, too.")

    chosen = traced_ranks(trace, trace_ranks)
    if chosen is not None:
        check_ranks(chosen, read_document(Plan, plan).num_ranks)
    first_recorded, num_recorded = recorded_steps(record, steps)
    job = Job(
        plan=str(plan.resolve()),
        num_steps=steps,
        learning_rate=learning_rate,
        seed=seed,
        repair=cast("RepairKind | None", repair),
        repair_fade=repair_fade,
        clip_norm=clip_norm,
        autocast="bfloat16" if autocast else None,
        save_model=str(save_model.resolve()) if save_model is not None else None,
        checkpoint=str(checkpoint.resolve()) if checkpoint is not None else None,
        checkpoint_every=checkpoint_every,
        resume=resume,
        first_recorded=first_recorded,
        num_recorded_steps=num_recorded,
    )
    if dry:
        print_dry_run(job, process or 0, as_json)
        return
    is_rank = started_by_torchrun()
    with terminal_sink(as_json or (is_rank and os.environ["RANK"] != "0")) as events:
        result = run_rank(job, out, events) if is_rank else run_plan(job, out, events)
    if result is not None:
        outcome = judge(plan, result, measurements)
        print_result(result, outcome, trace, chosen, as_json)
    if is_rank:
        leave(0)


def print_dry_run(job: Job, process: int, as_json: bool) -> None:
    """What one process exchanges in a step, which is what was predicted."""
    from meshwright.report import make_table
    from meshwright.training import dry_run

    found = dry_run(job, process)
    if as_json:
        facts = {"process": found.process, "processes": found.num_processes, "stages": found.stages}
        counts = {"instructions": found.instructions, "numbers": found.numbers, "ring_messages": found.ring_messages}
        print_json({**facts, "steps": found.num_steps, **counts, "exchanges": found.rows()})
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


def recorded_steps(given: str | None, num_steps: int) -> tuple[int | None, int]:
    """The first step to record, from 0, and how many; none given: the last five."""
    if given is None:
        return None, 5
    first, _, last = given.partition("-")
    last = last or first
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last) <= num_steps):
        raise typer.BadParameter(f"--record {given}: expected a step of 1 to {num_steps}, or two with a dash: 3-5.")
    return int(first) - 1, int(last) - int(first) + 1


def judge(plan: Path, result: RunResult, measurements: Path | None) -> Outcome | None:
    """The measured steps beside their prediction; None for placements."""
    from meshwright.training import judge_run

    document = read_plan(plan)
    if not isinstance(document, Plan):
        return None
    timeline = read_document(Timeline, result.timeline)
    return judge_run(document, graph_of_plan(document, None), timeline, result.first_recorded, measurements)


def print_result(
    result: RunResult, outcome: Outcome | None, trace: Path | None, ranks: tuple[int, ...] | None, as_json: bool
) -> None:
    """What a run prints, and the trace."""
    from meshwright.report import timeline_rows, timeline_table, write_trace

    timeline = read_document(Timeline, result.timeline)
    if trace is not None:
        write_trace([timeline], trace, ranks=ranks)
    if as_json:
        beside = outcome.row() if outcome is not None else {}
        print_json({"losses": result.losses, **timeline_rows(timeline), **beside, "timeline": result.timeline})
        return
    first, last = result.losses[0], result.losses[-1]
    in_all = f", {result.num_before + len(result.losses)} in all" if result.num_before else ""
    print_tables(timeline_table(timeline), f"loss {first:.4f} → {last:.4f} in {len(result.losses)} steps{in_all}")
    print_tables(*(outcome.explain() if outcome is not None else ()), f"timeline written to {result.timeline}")
