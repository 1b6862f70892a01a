"""``meshwright run``: execute a plan for real on this host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from meshwright.cli.models import JsonOption
from meshwright.cli.output import print_json, print_tables, terminal_sink
from meshwright.cli.simulate import PlanArgument
from meshwright.cli.traces import TraceOption, TraceRanksOption, traced_ranks
from meshwright.spec.codec import read_document
from meshwright.spec.plan import Plan
from meshwright.spec.timeline import Timeline

if TYPE_CHECKING:
    from meshwright.runtime import RepairKind
    from meshwright.training import RunResult


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
    trace: TraceOption = None,
    trace_ranks: TraceRanksOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train the plan's model: one process per rank, the same program that was simulated.

    Starts all ranks on this host. Under torchrun (`launch.sh` of `meshwright plan`) it is one rank of them.
    """
    from meshwright.report import check_ranks
    from meshwright.training import Job, leave, run_plan, run_rank, started_by_torchrun

    chosen = traced_ranks(trace, trace_ranks)
    if chosen is not None:
        check_ranks(chosen, read_document(Plan, plan).num_ranks)
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
    )
    is_rank = started_by_torchrun()
    with terminal_sink(as_json or (is_rank and os.environ["RANK"] != "0")) as events:
        result = run_rank(job, out, events) if is_rank else run_plan(job, out, events)
    if result is not None:
        print_result(result, trace, chosen, as_json)
    if is_rank:
        leave(0)


def print_result(result: RunResult, trace: Path | None, ranks: tuple[int, ...] | None, as_json: bool) -> None:
    """What a run prints, and the trace."""
    from meshwright.report import timeline_rows, timeline_table, write_trace

    timeline = read_document(Timeline, result.timeline)
    if trace is not None:
        write_trace([timeline], trace, ranks=ranks)
    if as_json:
        print_json({"losses": result.losses, **timeline_rows(timeline), "timeline": result.timeline})
        return
    first, last = result.losses[0], result.losses[-1]
    print_tables(timeline_table(timeline), f"loss {first:.4f} → {last:.4f} in {len(result.losses)} steps")
    print_tables(f"timeline written to {result.timeline}")
