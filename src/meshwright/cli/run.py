"""``meshwright run``: execute a plan for real on this host."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from meshwright.cli.models import CompiledOption, JsonOption, MeasurementsOption
from meshwright.cli.output import print_tables, terminal_sink
from meshwright.cli.planning import given_options, repeat_options
from meshwright.cli.run_output import (
    check_options,
    correct,
    judge,
    lines_for_nodes,
    load_measurements_of,
    print_dry_run,
    print_result,
    recorded_steps,
)
from meshwright.cli.simulate.request import PlanArgument
from meshwright.cli.traces import TraceOption, TraceRanksOption, traced_ranks
from meshwright.spec.codec import read_document
from meshwright.spec.plan import Plan

if TYPE_CHECKING:
    from meshwright.runtime import RepairKind


def run(
    call: typer.Context,
    plan: PlanArgument,
    steps: Annotated[int, typer.Option(help="Training steps.", min=1)] = 20,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the timeline and the results.")] = Path("run"),
    learning_rate: Annotated[
        float | None, typer.Option(help="Learning rate; by default the optimizer's usual.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, data and dropout.", min=0, max=2**63 - 1)] = 0,
    repair: Annotated[
        str | None,
        typer.Option(help="Under an asynchronous schedule: predict weights, or discount learning rates."),
    ] = None,
    repair_fade: Annotated[int, typer.Option(help="Updates over which a discount fades; 0: it stays.", min=0)] = 0,
    clip_norm: Annotated[
        float | None, typer.Option(help="The largest norm of all gradients together.", min=0.0)
    ] = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        typer.Option(help="What the ranks compute on; by default what the plan's cluster has."),
    ] = None,
    compiled: CompiledOption = None,
    save_model: Annotated[Path | None, typer.Option(help="Write the trained weights to this file (.pt).")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints: at the end, and every --checkpoint-every steps.")
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0: only at the end.", min=0)] = 0,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue from the newest checkpoint in --checkpoint, up to --steps in total."),
    ] = False,
    offload_folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the states that the plan keeps on NVMe; by default the folder of temporary files."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Also train in one process, and compare the losses of every step.")
    ] = False,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Write loss and samples/s as TensorBoard scalars to this folder.")
    ] = None,
    prometheus: Annotated[
        int | None, typer.Option(help="Serve them for Prometheus on this port of the loopback.", min=0, max=65535)
    ] = None,
    record: Annotated[
        str | None, typer.Option(help="Steps in the timeline, as 7 or 3-5; by default the last five.")
    ] = None,
    measurements: MeasurementsOption = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Correct the table of --measurements by the recorded steps, if that improves it."
        ),
    ] = False,
    here: Annotated[bool, typer.Option("--here", help="Start a plan for several nodes on this host alone.")] = False,
    dry: Annotated[
        bool,
        typer.Option(
            "--dry",
            help="Run one step of one process without the others, and compare its exchanges with the prediction.",
        ),
    ] = False,
    process: Annotated[int | None, typer.Option(help="With --dry: which process; by default 0.", min=0)] = None,
    trace: TraceOption = None,
    trace_ranks: TraceRanksOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train the plan's model: one process per rank, the same program that was simulated.

    Starts all ranks on this host. Under torchrun (`launch.sh` of `meshwright plan`) this process is one of the ranks.
    """
    from meshwright.report import check_ranks
    from meshwright.training import (
        Job,
        check_losses,
        leave,
        refuse_unchecked,
        run_plan,
        run_rank,
        started_by_torchrun,
        watching,
    )

    first_recorded, num_recorded = recorded_steps(record, steps)
    check_options(given_options(call))
    if learning_rate is not None and not 0 < learning_rate < math.inf:
        raise typer.BadParameter(f"--learning-rate {learning_rate:g} is not a positive number; give one above 0.")
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
        device=device,
        compiled=compiled,
        save_model=str(save_model.resolve()) if save_model is not None else None,
        checkpoint=str(checkpoint.resolve()) if checkpoint is not None else None,
        checkpoint_every=checkpoint_every,
        offload_folder=str(offload_folder.resolve()) if offload_folder is not None else None,
        resume=resume,
        first_recorded=first_recorded,
        num_recorded_steps=num_recorded,
    )
    if measurements is not None:
        # Errors of the table are raised before anything is trained.
        load_measurements_of(job, measurements, calibrate=calibrate, num_recorded=num_recorded)
    if dry:
        print_dry_run(job, process or 0, as_json)
        return
    if check:
        refuse_unchecked(job)
    is_rank = started_by_torchrun()
    if not is_rank and not here and (lines := lines_for_nodes(plan, repeat_options(call))):
        print_tables(*lines, "With --here all of its ranks start on this host.")
        raise typer.Exit(1)
    is_first = not is_rank or os.environ["RANK"] == "0"
    with (
        terminal_sink(as_json or not is_first) as terminal,
        watching(terminal, tensorboard if is_first else None, prometheus if is_first else None) as events,
    ):
        result = run_rank(job, out, events) if is_rank else run_plan(job, out, events)
        off = check_losses(job, result, events) if check and result is not None else None
    if result is not None:
        table = measurements if calibrate else None
        corrected = correct(plan, result, table) if table is not None else None
        print_result(result, judge(job, result, measurements), corrected, table, off, trace, chosen, as_json)
    if is_rank:
        leave(0)
