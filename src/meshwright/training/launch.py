"""Start a plan on this host (`run_plan`), one process per rank under torchrun's agent; or run as one rank (`run_rank`).

The agent waits until all ranks are done or one fails. When a rank fails, the agent ends the others at once, and the
launcher reports the rank that failed first, with its error. A rank that was killed by a signal leaves no error, so a
death by signal is reported before the connection errors that it causes on other ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from meshwright.emulation import Emulated, Lab, open_lab
from meshwright.measurement import is_out_of_memory
from meshwright.program import compute_orders, num_filling_steps
from meshwright.runtime import (
    check_folder,
    check_host,
    check_precision,
    check_repair,
    check_runnable,
    choose_device,
    choose_folder,
    with_clipping,
)
from meshwright.runtime.controlled import DECIDING_RANK_FAILED
from meshwright.simulator import check_policy
from meshwright.spec import (
    EventSink,
    Graph,
    MeshwrightError,
    NotFiniteError,
    NullSink,
    Placement,
    Plan,
    PlanError,
    RunError,
    format_count,
    load_cluster,
    read_document,
    write_document,
)
from meshwright.spec.files import make_folder, refuse_replacing
from meshwright.spec.model_files import check_model_is_here, read_model_file
from meshwright.spec.offload import ON_DEVICE
from meshwright.spec.used_devices import visible_devices
from meshwright.training.checkpoint import find_newest
from meshwright.training.job import (
    DECISIONS_FILE,
    RESULT_FILE,
    TIMELINE_FILE,
    Job,
    RunResult,
    StepFacts,
    Trained,
    capture_fake,
    error_file,
    job_repair,
    write_results,
)
from meshwright.training.peak_memory import predict_memory
from meshwright.training.policy_run import refuse_under
from meshwright.training.progress import Progress, scratch_folder
from meshwright.training.watch import HANG, is_connection_error
from meshwright.training.worker import take_cores, train_job

_MONITOR_INTERVAL_S = 0.2


def run_plan(
    job: Job, folder: Path | str, events: EventSink | None = None, emulated: Emulated | None = None
) -> RunResult:
    """Run a job on this host and wait for it; return what rank 0 wrote into ``folder``.

    With ``emulated``, the ranks run on that cluster's network and processor shares, built for the run
    (`meshwright.emulation`). If a rank dies or hangs, the ranks are started again from the newest checkpoint, up to
    ``job.restarts`` times. Raises RunError naming the rank that failed first, with its own error; all processes have
    ended by then.
    """
    folder = Path(folder).resolve()
    plan = read_runnable_plan(job)
    with (
        claimed(folder, job),
        scratch_folder() as scratch,
        contextlib.nullcontext() if emulated is None else open_lab(emulated, Path(scratch)) as lab,
    ):
        _check_room(plan, job)
        own = ("meshwright.training", str(Path(scratch) / "job.json"), scratch, str(os.getpid()))
        arguments = ("-m", *own) if lab is None else (*lab.arguments, *own)
        sink = events or NullSink()
        progress = Progress(job.num_steps, sink if lab is None else _ClockStarter(sink, lab))
        attempt = job
        for number in itertools.count():
            write_document(attempt, Path(scratch) / "job.json")
            try:
                with _hidden_devices(plan), _quiet_agent(), progress.followed(Path(scratch)):
                    elastic_launch(_configure(plan, Path(scratch), number), sys.executable)(*arguments)
                break
            except ChildFailedError as error:
                why = _explain(error.failures, Path(scratch), job)
                if number == job.restarts or not _may_restart(error.failures, Path(scratch)):
                    raise RunError(why) from None
                for path in Path(scratch).glob("error-*.json"):
                    path.unlink()
                attempt = _continued(job)
                cause = why.splitlines()[0].partition(";")[0].partition(" (")[0].rstrip(".")
                source = find_newest(Path(job.checkpoint)) if attempt.resume and job.checkpoint else "the start"
                sys.stderr.write(f"{cause}; starting again from {source}, {number + 1} of {job.restarts} restarts.\n")
                progress.failed(cause)
            except (KeyboardInterrupt, SignalException) as error:
                name = signal.Signals(error.sigval).name if isinstance(error, SignalException) else "SIGINT"
                raise RunError(
                    f"The run was stopped by {name}; all ranks were ended and no results were written. "
                    f"{_start_again(job)}"
                ) from None
        return _keep_results(Path(scratch), folder, progress)


def _configure(plan: Plan | Placement, scratch: Path, attempt: int) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes(plan),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=_MONITOR_INTERVAL_S,
        run_id=f"{scratch.name}-{attempt}",
        # The agent's files go with the run; by default they stay in the folder of temporary files.
        logs_specs=DefaultLogsSpecs(log_dir=str(scratch / f"agent-{attempt}")),
        # Without SIGINT: Ctrl-C stays a KeyboardInterrupt here, and the agent ends its ranks by SIGTERM. Passed on as
        # SIGINT, a rank that is still importing would answer with a traceback.
        signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
    )


def _may_restart(failures: Mapping[int, ProcessFailure], scratch: Path) -> bool:
    """Whether ranks died or hung, which a restart may mend; errors of the job would come again."""
    errors = [report for rank in failures if (report := _read_error(scratch, rank)) is not None]
    is_mended = [report["kind"] == HANG or _is_connection_error(report["message"]) for report in errors]
    return all(is_mended)


def _continued(job: Job) -> Job:
    """The job that continues from the newest checkpoint, or from the start."""
    has_checkpoint = job.checkpoint is not None and find_newest(Path(job.checkpoint)) is not None
    return replace(job, resume=has_checkpoint)


class _ClockStarter:
    """Passes events on, and starts the clock of an emulated cluster with the first step."""

    def __init__(self, events: EventSink, lab: Lab) -> None:
        self._events, self._lab = events, lab

    def progress(self, task: str, done: int, total: int) -> None:
        if task == "steps":
            self._lab.start_clock()
        self._events.progress(task, done, total)

    def metric(self, name: str, value: float, step: int) -> None:
        self._events.metric(name, value, step)


@contextlib.contextmanager
def _hidden_devices(plan: Plan | Placement) -> Iterator[None]:
    """Hide the devices of this host that a plan leaves out, unless the user chose the visible ones."""
    name = "CUDA_VISIBLE_DEVICES"
    if not isinstance(plan, Plan) or not plan.idle or name in os.environ:
        yield
        return
    shown = visible_devices(plan, load_cluster(plan.cluster))
    if len(shown) == 1:
        os.environ[name] = shown[0]
    try:
        yield
    finally:
        os.environ.pop(name, None)


def _check_room(plan: Plan | Placement, job: Job) -> None:
    """Raise RunError if this host lacks room for offloaded states of the plan."""
    if not isinstance(plan, Plan) or plan.offload == ON_DEVICE:
        return
    try:
        _, captured = capture_fake(plan)
    except (MeshwrightError, OSError):
        # A model that cannot be made without memory: its ranks check their hosts themselves.
        return
    check_host(plan, captured.graph, choose_folder(job.offload_folder), choose_device(plan, job.device))


def num_processes(plan: Plan | Placement) -> int:
    """Return the number of processes that run a plan: one for each device."""
    return plan.num_devices if isinstance(plan, Plan) else plan.num_ranks


def read_runnable_plan(job: Job) -> Plan | Placement:
    """Return the job's plan, after checking that it can run with the job's options.

    Raises PlanError if it cannot, RunError if the checkpoint folder holds checkpoints and the job does not resume, and
    the errors of `compute_orders`.
    """
    plan = job.read_plan()
    check_model_is_here(plan.model)
    if isinstance(read_model_file(plan.model), Graph):
        raise PlanError(
            f"The plan was made from the stored graph {plan.model!r}, which has no code and no weights to run. "
            "Plan again from the model's own reference (a zoo name or path/to/file.py:function)."
        )
    choose_device(plan, job.device)
    # Each rank reports itself what its own device lacks.
    check_precision(plan)
    check_repair(plan, job_repair(job))
    if isinstance(plan, Plan) and plan.exchange.policy:
        _check_policy_run(plan, job)
    plan = with_clipping(plan, job.clip_norm)
    if job.checkpoint is not None and not job.resume and (found := find_newest(Path(job.checkpoint))) is not None:
        raise RunError(
            f"{found}: this checkpoint exists already. Continue from it with --resume, or choose another folder."
        )
    if isinstance(plan, Plan):
        check_runnable(plan)
        if not plan.exchange.policy:
            compute_orders(plan)
            _check_steps(plan, job)
    if plan.workload.kind != "training":
        _refuse_training(job)
    on_drives = isinstance(plan, Plan) and plan.offload.optimizer == "nvme"
    if job.offload_folder is not None and not on_drives:
        raise PlanError(
            f"{job.plan} keeps no states on drives, but --offload-folder {job.offload_folder} was given. Leave "
            "--offload-folder out, or plan with --offload optimizer=nvme."
        )
    return plan


def _refuse_training(job: Job) -> None:
    """Raise PlanError for options that inference does not have."""
    given = {
        "--learning-rate": job.learning_rate,
        "--repair": job.repair,
        "--clip-norm": job.clip_norm,
        "--checkpoint": job.checkpoint,
        "--save-model": job.save_model,
    }
    if lost := [name for name, value in given.items() if value is not None]:
        raise PlanError(f"{job.plan} is for inference, which does not train. Leave out {' and '.join(lost)}.")


def _check_policy_run(plan: Plan, job: Job) -> None:
    """Raise PlanError for options that runs under an exchange policy do not have, and as `check_policy`."""
    lost = {
        "--repair": job.repair,
        "--clip-norm": job.clip_norm,
        "--checkpoint": job.checkpoint,
        "--restarts": job.restarts or None,
        "--hang-after": job.hang_after_s,
    }
    refuse_under(plan.exchange.policy, job.plan, lost, choose_device(plan, job.device))
    check_policy(plan, job.num_steps)


def _check_steps(plan: Plan, job: Job) -> None:
    filling, num_steps = num_filling_steps(plan), job.num_steps
    if filling and job.checkpoint_auto:
        raise PlanError(
            f"--checkpoint-every auto was given for the schedule {plan.schedule}, which takes {filling} steps to fill "
            f"and to empty its pipeline around each checkpoint. Give a number of steps, {filling} or more."
        )
    rest = num_steps % job.checkpoint_every if job.checkpoint_every else 0
    if filling and job.checkpoint_every and (job.checkpoint_every < filling or 0 < rest < filling):
        raise PlanError(
            f"Checkpoints every {job.checkpoint_every} of {num_steps} steps were given. Each empties the pipeline, "
            f"and {plan.schedule} takes {filling} steps to fill and to empty it; expected at least that number of "
            "steps before each checkpoint, and either no step or at least that number after the last one."
        )
    if job.first_recorded is not None and job.first_recorded < filling:
        raise PlanError(
            f"Step {job.first_recorded + 1} was given to record, but {plan.schedule} takes {filling} steps to fill its "
            f"pipeline, which cannot be recorded. Record step {filling + 1} or later steps."
        )
    if num_steps <= filling and filling:
        raise PlanError(
            f"{format_count(num_steps, 'step')} of the schedule {plan.schedule} were given, but it takes {filling} "
            f"steps to fill and to empty the pipeline; expected {filling + 1} or more. Give --steps {filling + 1}, or "
            "choose a synchronous schedule."
        )


@contextlib.contextmanager
def claimed(folder: Path, job: Job) -> Iterator[None]:
    """Check that results, checkpoints and states on drives can be written, and then run the block.

    Makes the folders, and removes those that are still empty at the end. Raises RunError for a folder that is not
    writable, DocumentError for a result path that is not a regular file.
    """
    wanted = [folder, *([Path(job.save_model).parent] if job.save_model is not None else [])]
    wanted += [Path(job.checkpoint)] if job.checkpoint is not None else []
    for_states = [Path(job.offload_folder)] if job.offload_folder is not None else []
    made = [path for path in (*wanted, *for_states) if not path.exists()]
    try:
        for path in wanted:
            _check_writable(path)
        for path in for_states:
            check_folder(path)
        results = (folder / name for name in (TIMELINE_FILE, RESULT_FILE, DECISIONS_FILE))
        for path in (*results, *map(Path, filter(None, [job.save_model]))):
            refuse_replacing(path)
        yield
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()  # only if it is still empty


def _check_writable(folder: Path) -> None:
    try:
        make_folder(folder)
    except OSError as error:
        raise RunError(
            f"{folder}: results cannot be written to this folder ({error.strerror}). Choose a writable folder."
        ) from None


def _keep_results(scratch: Path, folder: Path, progress: Progress) -> RunResult:
    result = progress.complete(read_document(RunResult, scratch / RESULT_FILE))
    timeline = (scratch / TIMELINE_FILE).read_text(encoding="utf-8")
    decisions = (scratch / DECISIONS_FILE).read_text(encoding="utf-8") if result.decisions else None
    return write_results(folder, Trained(result, timeline, decisions))


def _start_again(job: Job) -> str:
    newest = find_newest(Path(job.checkpoint)) if job.checkpoint is not None else None
    if newest is None:
        return "Start the run again with the same command."
    return f"The newest checkpoint is {newest}: continue from there with the same command and --resume."


def _explain(failures: dict[int, ProcessFailure], scratch: Path, job: Job) -> str:
    """One paragraph: the rank that failed first, how, and its own error."""
    killed = [rank for rank, item in failures.items() if item.exitcode < 0 and item.exitcode != -signal.SIGTERM]
    # The agent ends the others by SIGTERM when it has noticed failures, and lists the ranks in the order of both.
    ended = [rank for rank, item in failures.items() if item.exitcode == -signal.SIGTERM]
    reports = [report for rank in failures if (report := _read_error(scratch, rank)) is not None]
    if hang := next((report for report in reports if report["kind"] == HANG), None):
        message, _, stacks = hang["message"].partition("\n")
        return f"{message} The ranks were ended. {_start_again(job)}" + (f"\n{stacks}" if stacks else "")
    if ended and len(ended) + sum(_is_connection_error(report["message"]) for report in reports) == len(failures):
        hint = "another program ended it, such as a scheduler of jobs or the host's shutdown"
        return f"Rank {ended[0]} was killed by SIGTERM ({hint}); the other ranks were ended. {_start_again(job)}"
    if killed:
        rank = min(killed, key=lambda item: failures[item].timestamp)
        name = signal_name(-failures[rank].exitcode)
        advice, hint = _start_again(job), ""
        if name == "SIGKILL":
            hint, advice = " (often the host ran out of memory)", f"{predict_memory(job.plan, rank)} {advice}"
        return f"Rank {rank} was killed by {name}{hint}; the other ranks were ended. {advice}"
    if reports:
        first = min(reports, key=lambda item: (_is_connection_error(item["message"]), item["time"]))
        if first["out_of_memory"]:
            what = first["message"].splitlines()[0]
            advice = predict_memory(job.plan, first["rank"])
            return f"Rank {first['rank']} ran out of memory: {what}; the other ranks were ended. {advice}"
        if first["kind"] == NotFiniteError.__name__:
            return f"{first['message']} {_start_again(job)}" if job.checkpoint is not None else first["message"]
        if len(reports) == len(failures) > 1 and len({report["message"] for report in reports}) == 1:
            # All ranks raise what they agreed on, such as a folder that cannot be written to.
            return first["message"]
        detail = f"\n{first['traceback'].rstrip()}" if first["traceback"] else ""
        return f"Rank {first['rank']} failed: {first['message']}{detail}"
    rank = min(failures, key=lambda item: failures[item].timestamp)
    return f"Rank {rank} ended with exit code {failures[rank].exitcode}; its output is above."


def _read_error(scratch: Path, rank: int) -> dict[str, Any] | None:
    """The error that a rank wrote; None if it wrote none."""
    path = error_file(scratch, rank)
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return found


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL; its number if it has none."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _is_connection_error(message: str) -> bool:
    """Whether an error is probably a consequence of another rank's death or error."""
    return is_connection_error(message) or DECIDING_RANK_FAILED in message


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """Suppress the agent's own log, which repeats what the launcher reports."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def started_by_torchrun() -> bool:
    """Return whether torchrun started this process as a rank (torch.distributed.run sets both variables)."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


# For ``torchrun ... --module meshwright run PLAN.json``, on one node or several. The agent is torchrun's own, so each
# rank reports its error directly, and only rank 0 writes the results.
def run_rank(job: Job, folder: Path | str, events: EventSink | None = None) -> RunResult | None:
    """Run a job as one rank of torchrun; return the results on rank 0, None on other ranks. All ranks call it together.

    Raises PlanError if the plan does not match the model or the number of ranks, RunError if rank 0 cannot write the
    results or if this rank ran out of memory.
    """
    folder, sink = Path(folder).resolve(), events or NullSink()
    is_first = os.environ["RANK"] == "0"
    # torchrun handles Ctrl-C and ends its ranks; they end without a traceback of their own.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    read_runnable_plan(job)
    take_cores(job.pin_cores)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        job = _continued(job)

    def report(facts: StepFacts) -> None:
        for place, loss in enumerate(facts.losses, facts.last_loss - len(facts.losses) + 1):
            sink.metric("loss", loss, place)
        sink.metric("samples_per_s", facts.samples_per_s, facts.step)
        sink.progress("steps", facts.step, job.num_steps)

    with claimed(folder, job) if is_first else contextlib.nullcontext():
        try:
            trained = train_job(job, report, sink)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            process = int(os.environ["RANK"])
            what, advice = str(error).splitlines()[0], predict_memory(job.plan, process)
            raise RunError(f"Rank {process} ran out of memory: {what}. {advice}") from None
        dist.barrier()
        dist.destroy_process_group()
        return None if trained.timeline is None else write_results(folder, trained)


def leave(code: int) -> None:
    """End this process with the exit code ``code``, without shutting the interpreter down. Flushes stdout and stderr.

    A finished worker was once aborted while the interpreter shut torch down ("terminate called without an active
    exception"; cause not established).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
