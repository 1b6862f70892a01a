"""``meshwright run``: execute a plan on this host; the checks of its options, and what it prints."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from meshwright.cli.json_output import print_json
from meshwright.cli.measure_more import calibration_tables
from meshwright.cli.model_arguments import CompiledOption, JsonOption, MeasurementsOption, graph_of_plan
from meshwright.cli.output import note, print_tables, terminal_sink
from meshwright.cli.planning import given_options, make_cost_model, recall_measurements, repeat_options
from meshwright.cli.simulate.simulate_request import PlanArgument
from meshwright.cli.trace_options import TraceOption, TraceRanksOption, traced_ranks
from meshwright.spec import (
    ClusterError,
    DocumentError,
    MeasurementError,
    Plan,
    Timeline,
    format_count,
    format_seconds,
    load_cluster,
    read_document,
)
from meshwright.spec.plan_files import read_plan
from meshwright.spec.scenario import load_scenarios
from meshwright.spec.units import Seconds

if TYPE_CHECKING:
    from meshwright.emulation import Emulated
    from meshwright.runtime import RepairKind
    from meshwright.training import Calibration, Job, Outcome, RunResult


def load_measurements_of(job: Job, table: Path, *, calibrate: bool, num_recorded: int) -> None:
    """Check the table of --measurements before a run. Prints a note if another version of torch measured it.

    Raises BadParameter if the run cannot correct the table (--calibrate), and what `make_cost_model` raises if the plan
    cannot use the table.
    """
    document = job.read_plan()
    if calibrate and isinstance(document, Plan) and document.exchange.policy:
        raise typer.BadParameter(
            f"--calibrate was given for a plan with the exchange policy {document.exchange.policy}, whose measured "
            "times contain those of dispatching. Run a plan without a policy to calibrate."
        )
    if calibrate and isinstance(document, Plan) and document.compiled:
        raise typer.BadParameter(
            "--calibrate corrects times of single ops, which compiled layers do not have. Run with --no-compile to "
            "calibrate."
        )
    if calibrate and (not isinstance(document, Plan) or num_recorded < 2):
        raise typer.BadParameter(
            "--calibrate needs a plan (no placement of ops) and at least two recorded steps: some fit the "
            "corrections, the others test them. Record more steps with --record, or leave --calibrate out."
        )
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
        raise typer.BadParameter(f"--dry trains nothing and measures no times: leave out {' and '.join(lost)}.")
    if "--process" in given and "--dry" not in given:
        raise typer.BadParameter("--process chooses the process that --dry runs; give --dry, too.")
    if "--calibrate" in given and "--measurements" not in given:
        raise typer.BadParameter("--calibrate corrects the table of --measurements by a run: give --measurements, too.")
    if "--scenario" in given and "--emulate" not in given:
        raise typer.BadParameter("--scenario changes an emulated cluster: give --emulate CLUSTER, too.")
    needing = [name for name in given if name == "--resume" or name.startswith("--checkpoint-")]
    if "--checkpoint" not in given and needing:
        raise typer.BadParameter(f"Checkpoints need a folder: give --checkpoint FOLDER beside {' and '.join(needing)}.")


def print_dry_run(job: Job, process: int, as_json: bool) -> None:
    """Run one step of one process without the others, and print its exchanges, compared with the prediction."""
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
    """Return the lines that tell the user how to start a plan on several nodes with the same ``options``.

    Empty for placements, for plans of one node, and if the cluster's description is not found on this host. Raises
    PlanError for a plan that can only be simulated.
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


def emulated_cluster(job: Job, reference: str, scenarios: Sequence[str] | None) -> Emulated:
    """Return the cluster of ``--emulate`` in the scenarios of the run. Raises typer.BadParameter for GPUs."""
    from meshwright.emulation import Emulated
    from meshwright.runtime import choose_device

    plan = job.read_plan()
    if choose_device(plan, job.device) != "cpu":
        raise typer.BadParameter(
            "--emulate gives every rank a share of this machine's processors. Give --device cpu, too."
        )
    devices = plan.devices if isinstance(plan, Plan) else tuple(range(plan.num_ranks))
    return Emulated(cluster=load_cluster(reference), devices=devices, scenario=load_scenarios(scenarios))


def recorded_steps(given: str | None, num_steps: int) -> tuple[int | None, int]:
    """Return the first step to record, counted from 0, and the number of steps, from the text of --record.

    Without a text, the first step is None: the last five steps are recorded. Raises BadParameter for an invalid text.
    """
    if given is None:
        return None, 5
    first, _, last = given.partition("-")
    last = last or first
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last) <= num_steps):
        raise typer.BadParameter(
            f"--record {given}: expected a step of 1 to {num_steps}, or two with a dash, such as 3-5."
        )
    return int(first) - 1, int(last) - int(first) + 1


def saving_options(every: str, mttf: str | None) -> tuple[int | None, float | None]:
    """Return the steps between checkpoints, None for auto, and the mean time between failures in seconds (None: usual).

    Raises BadParameter for invalid texts.
    """
    if every != "auto" and not every.isdecimal():
        raise typer.BadParameter(f"--checkpoint-every {every}: expected a number of steps, 0 or more, or auto.")
    if mttf is None:
        return (None if every == "auto" else int(every)), None
    if every != "auto":
        raise typer.BadParameter("--mttf sets how often --checkpoint-every auto saves: give both, or leave --mttf out.")
    try:
        found = float(Seconds.decode_scalar(mttf))
    except ValueError as error:
        raise typer.BadParameter(f"--mttf: {error}.") from None
    if not found:
        raise typer.BadParameter(f"--mttf {mttf}: expected a time above 0.")
    return None, found


def judge(job: Job, result: RunResult, measurements: Path | None, emulated: Emulated | None) -> Outcome | None:
    """Return the measured steps compared with their prediction, for an emulated run that of the emulated cluster.

    None for placements, and, with a note, if the steps cannot be predicted.
    """
    from meshwright.training import judge_run

    document = job.read_plan()
    if not isinstance(document, Plan):
        return None
    timeline = read_document(Timeline, result.timeline)
    measurements = recall_measurements(document, Path(job.plan), measurements)
    try:
        return judge_run(
            document,
            graph_of_plan(document, None),
            timeline,
            result.first_recorded,
            measurements,
            emulated,
            sum(result.step_seconds[: result.first_recorded - result.num_before]),
        )
    except (ClusterError, DocumentError, MeasurementError) as error:
        note(f"No prediction to compare with: {error}")
        return None


def correct(plan: Path, result: RunResult, measurements: Path) -> Calibration:
    """Correct a measurement table by some recorded steps; write the table if it predicts the other steps better."""
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
    """Print the result of a run, and write the trace of ``ranks`` (None: all).

    ``off`` is the largest relative difference of the losses from those of one process, None if not compared. ``table``
    is the path of the corrected table.
    """
    from meshwright.report import timeline_rows, timeline_table, write_trace

    timeline = read_document(Timeline, result.timeline)
    if trace is not None:
        write_trace([timeline], trace, ranks=ranks)
    if as_json:
        beside = outcome.row() if outcome is not None else {}
        beside |= {"calibration": corrected.row()} if corrected is not None else {}
        beside |= {"losses_off": off} if off is not None else {}
        beside |= {"gradients": result.gradients, "decisions": result.decisions} if result.decisions else {}
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
    for restart in result.restarts:
        lost = f", {format_seconds(restart.lost_s)} lost" if restart.lost_s else ""
        print_tables(f"restarted after step {restart.step}: {restart.why}{lost}")
    if result.saving:
        print_tables(result.saving)
    print_tables(*(outcome.explain() if outcome is not None else ()), f"timeline written to {result.timeline}")
    if result.decisions:
        counted = ", ".join(f"{count:,} {name}" for name, count in result.gradients.items())
        print_tables(*([f"gradients: {counted}"] if counted else ()), f"decisions written to {result.decisions}")
    if corrected is not None and table is not None:
        print_tables(*calibration_tables(corrected, result.plan, table))
    if off is not None:
        print_tables(f"losses are those of one process; the largest difference is {off:.1g} of a loss")


def run(
    call: typer.Context,
    plan: PlanArgument,
    steps: Annotated[int, typer.Option(help="Training steps.", min=1)] = 20,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the timeline and the results.")] = Path("run"),
    learning_rate: Annotated[
        float | None, typer.Option(help="Learning rate; by default the usual one of the optimizer.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, data and dropout.", min=0, max=2**63 - 1)] = 0,
    repair: Annotated[
        str | None,
        typer.Option(
            help="Repair of stale weights under an asynchronous schedule: predict (weights), discount (rates)."
        ),
    ] = None,
    repair_fade: Annotated[
        int,
        typer.Option(
            help="Number of updates after which the discount has faded to nothing; 0: it does not fade.", min=0
        ),
    ] = 0,
    clip_norm: Annotated[
        float | None, typer.Option(help="Clip the norm of all gradients together to at most this.", min=0.0)
    ] = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        typer.Option(help="The devices that ranks compute on; by default those of the plan's cluster."),
    ] = None,
    compiled: CompiledOption = None,
    save_model: Annotated[Path | None, typer.Option(help="Write the trained weights to this file (.pt).")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints: at the end, and every --checkpoint-every steps.")
    ] = None,
    checkpoint_every: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            help="Steps between checkpoints; 0: only at the end; auto: as often as pays, by measured costs and --mttf.",
        ),
    ] = "0",
    mttf: Annotated[
        str | None,
        typer.Option(
            help='Mean time between failures of the run, as "8 h", for --checkpoint-every auto; by default that of '
            "Llama 3's training, by the number of devices."
        ),
    ] = None,
    checkpoint_keep: Annotated[int, typer.Option(help="The number of newest checkpoints to keep.", min=1)] = 2,
    checkpoint_keep_every: Annotated[
        int, typer.Option(help="Also keep the checkpoints of a multiple of this number of steps; 0: no others.", min=0)
    ] = 0,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue from the newest checkpoint in --checkpoint, up to --steps in total."),
    ] = False,
    allow_nan: Annotated[
        bool,
        typer.Option(
            "--allow-nan", help="Train on if a loss is not finite (NaN, infinity); by default the run ends with exit 1."
        ),
    ] = False,
    restarts: Annotated[
        int,
        typer.Option(
            help="Start the ranks again from the newest checkpoint, up to N times, if one dies or hangs.", min=0
        ),
    ] = 0,
    hang_after: Annotated[
        float | None,
        typer.Option(
            help="Seconds without progress after which a rank hangs and the run ends; 0: no limit. By default 10 times "
            "the slowest step, at least 30 s.",
            min=0.0,
        ),
    ] = None,
    offload_folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the states that the plan offloads to NVMe; by default the folder of temporary files."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Also train in one process, and compare the losses of every step.")
    ] = False,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Write loss and samples/s as TensorBoard scalars to this folder.")
    ] = None,
    prometheus: Annotated[
        int | None,
        typer.Option(
            help="Serve loss and samples/s for Prometheus at this port of the loopback interface.", min=0, max=65535
        ),
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
    here: Annotated[
        bool, typer.Option("--here", help="Start all ranks on this host, even of a plan for several nodes.")
    ] = False,
    dry: Annotated[
        bool,
        typer.Option(
            "--dry",
            help="Run one step of one process without the others, and compare its exchanges with the prediction.",
        ),
    ] = False,
    process: Annotated[int | None, typer.Option(help="With --dry: the process to run; by default 0.", min=0)] = None,
    emulate: Annotated[
        str | None,
        typer.Option(
            metavar="CLUSTER",
            help="Run on the links and processors of this cluster (.toml), emulated on this host by network "
            "namespaces and quotas. Linux, as root.",
        ),
    ] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            help="With --emulate: slower devices or links, for good or at times of the run (.toml). May be given "
            "several times."
        ),
    ] = None,
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
    save_every, mttf_s = saving_options(checkpoint_every, mttf)
    check_options(given_options(call))
    if learning_rate is not None and not 0 < learning_rate < math.inf:
        raise typer.BadParameter(f"--learning-rate {learning_rate:g} is not a positive number; give one above 0.")
    chosen = traced_ranks(trace, trace_ranks)
    if chosen is not None:
        check_ranks(chosen, read_document(Plan, plan).num_tracks)
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
        checkpoint_every=save_every or 0,
        checkpoint_auto=save_every is None,
        mttf_s=mttf_s,
        checkpoint_keep=checkpoint_keep,
        checkpoint_keep_every=checkpoint_keep_every,
        offload_folder=str(offload_folder.resolve()) if offload_folder is not None else None,
        resume=resume,
        allow_nan=allow_nan,
        hang_after_s=hang_after,
        restarts=restarts,
        first_recorded=first_recorded,
        num_recorded_steps=num_recorded,
    )
    if measurements is not None:
        # Errors of the table are raised before anything is trained.
        load_measurements_of(job, measurements, calibrate=calibrate, num_recorded=num_recorded)
    if dry and (policy := getattr(getattr(job.read_plan(), "exchange", None), "policy", "")):
        raise typer.BadParameter(
            f"--dry runs the fixed program of a plan; the exchange policy {policy} decides in the run. Leave out --dry."
        )
    if dry:
        print_dry_run(job, process or 0, as_json)
        return
    if check:
        refuse_unchecked(job)
    is_rank = started_by_torchrun()
    emulated = None if emulate is None else emulated_cluster(job, emulate, scenario)
    if restarts and is_rank:
        raise typer.BadParameter("--restarts starts ranks on this host: give torchrun --max-restarts instead.")
    if emulated is not None and is_rank:
        raise typer.BadParameter("--emulate starts all ranks on this host: start it without torchrun.")
    if not is_rank and not here and emulated is None and (lines := lines_for_nodes(plan, repeat_options(call))):
        print_tables(*lines, "With --here all ranks of the plan start on this host.")
        raise typer.Exit(1)
    is_first = not is_rank or os.environ["RANK"] == "0"
    with (
        terminal_sink(as_json or not is_first) as terminal,
        watching(terminal, tensorboard if is_first else None, prometheus if is_first else None) as events,
    ):
        result = run_rank(job, out, events) if is_rank else run_plan(job, out, events, emulated)
        off = check_losses(job, result, events) if check and result is not None else None
    if result is not None:
        table = measurements if calibrate else None
        corrected = correct(plan, result, table) if table is not None else None
        print_result(result, judge(job, result, measurements, emulated), corrected, table, off, trace, chosen, as_json)
    if is_rank:
        leave(0)
