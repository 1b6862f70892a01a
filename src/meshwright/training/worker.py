"""One rank of a run (`main`, `train_job`); metrics for other tools (`watching`); a run against its prediction.

torchrun's agent starts ``python -m meshwright.training JOB.json FOLDER LAUNCHER`` once per rank. Rank 0 writes progress
as JSON lines. A rank that fails writes its error, so that the launcher can report which rank failed, and why.
`judge_run` compares a run with its prediction.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from meshwright.cost import load_cost_model
from meshwright.emulation import Emulated
from meshwright.measurement import is_out_of_memory
from meshwright.planner import predict_step_interval
from meshwright.report import SlowRank, explain_difference, explain_stragglers, find_stragglers
from meshwright.runtime import Phase, choose_device, join_group
from meshwright.simulator import form_teams, simulate_plan
from meshwright.simulator.scenarios import apply_scenario
from meshwright.spec import (
    EventSink,
    Graph,
    MeshwrightError,
    Plan,
    RunError,
    Timeline,
    encode_document,
    format_seconds,
    load_cluster,
    read_document,
    write_text,
)
from meshwright.spec.codec import dump_json
from meshwright.training.job import (
    PROGRESS_FILE,
    CompiledLayers,
    Job,
    RunResult,
    StepFacts,
    Trained,
    error_file,
    job_repair,
    load_source,
    make_batches,
    make_optimizer,
    not_finite,
    write_results,
)
from meshwright.training.policy_run import train_by_policy
from meshwright.training.saving import SaveTimes
from meshwright.training.trainer import Trainer, prepare
from meshwright.training.watch import HANG, end_process


class Watched(EventSink, Protocol):
    """A sink of progress and metrics that is closed at the end of the run."""

    def close(self) -> None:
        """Write buffered values, and release ports."""


class TensorBoardSink:
    """Writes the TensorBoard scalars ``training/loss`` and ``training/samples_per_s`` by step.

    Raises RunError if TensorBoard is not installed, or if the folder cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra
        except ModuleNotFoundError:
            raise _missing("TensorBoard scalars", "tensorboard") from None
        try:
            self._writer: Any = SummaryWriter(str(folder))
        except OSError as error:
            raise RunError(
                f"{folder}: scalars cannot be written to this folder ({error.strerror}). Choose a writable folder."
            ) from None

    def progress(self, task: str, done: int, total: int) -> None:
        """Do nothing: progress is not a scalar."""

    def metric(self, name: str, value: float, step: int) -> None:
        """Write the scalar ``training/name`` at a step."""
        self._writer.add_scalar(f"training/{name}", value, step)

    def close(self) -> None:
        """Write buffered values, and close the file."""
        self._writer.close()


class PrometheusSink:
    """Serves the Prometheus gauges ``meshwright_loss``, ``_samples_per_s``, ``_step`` and ``_steps``.

    The address is ``http://127.0.0.1:port/metrics``; port 0 takes a free port. Raises RunError if the client library is
    not installed, or if the port is taken.
    """

    def __init__(self, port: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, Gauge, start_http_server  # noqa: PLC0415 - an extra
        except ModuleNotFoundError:
            raise _missing("A page for Prometheus", "metrics") from None
        self._make_gauge, self._registry = Gauge, CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=self._registry)
        except OSError as error:
            raise RunError(
                f"Port {port} was given for metrics, but cannot be used ({error.strerror}). Give another port, or 0 "
                "for a free port."
            ) from None
        self.port: int = self._server.server_port

    def progress(self, task: str, done: int, total: int) -> None:
        """Set the gauges of completed steps and of all steps of the run."""
        if task == "steps":
            self._set("step", done, "Completed steps.")
            self._set("steps", total, "All steps of the run.")

    def metric(self, name: str, value: float, step: int) -> None:  # noqa: ARG002 - Prometheus has times of its own
        """Set the gauge of a metric to its newest value."""
        self._set(name, value, f"{name}, newest known value.")

    def close(self) -> None:
        """Release the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _set(self, name: str, value: float, words: str) -> None:
        if name not in self._gauges:
            self._gauges[name] = self._make_gauge(f"meshwright_{name}", words, registry=self._registry)
        self._gauges[name].set(value)


class _Several:
    def __init__(self, sinks: Sequence[EventSink]) -> None:
        self._sinks = sinks

    def progress(self, task: str, done: int, total: int) -> None:
        for sink in self._sinks:
            sink.progress(task, done, total)

    def metric(self, name: str, value: float, step: int) -> None:
        for sink in self._sinks:
            sink.metric(name, value, step)


# TensorBoard scalars go into a folder, a page for Prometheus is served on the loopback interface. Both need extras,
# imported on use. The loss of a step may be known some steps later (asynchronous schedules); it is written at its own
# step.
@contextmanager
def watching(events: EventSink | None, tensorboard: Path | None, prometheus: int | None) -> Iterator[EventSink]:
    """Yield a sink that passes values on to ``events`` and to the chosen tools, which are closed after the block.

    ``tensorboard``: the folder for scalars; ``prometheus``: the port; None for neither.
    """
    with ExitStack() as stack:
        sinks: list[EventSink] = [events] if events is not None else []
        for make, argument in ((TensorBoardSink, tensorboard), (PrometheusSink, prometheus)):
            if argument is not None:
                sink: Watched = make(argument)  # type: ignore[arg-type]  # each has its own
                stack.callback(sink.close)
                sinks.append(sink)
        yield _Several(sinks)


def _missing(what: str, extra: str) -> RunError:
    return RunError(f"{what} needs a library that is not installed. Run pip install 'meshwright[{extra}]'.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run compared with its prediction.

    ``predicted_s`` and ``measured_s``: median seconds per step. ``low_s`` and ``high_s``: the ends of the predicted
    80 % interval. ``is_measured``: the prediction uses measured times, not only datasheets. ``difference``: the largest
    difference of the two timelines, as text. ``stragglers``: ranks that were slower than others. ``first_step``: the
    number (from 0) of the first step in the timeline.
    """

    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float
    is_measured: bool
    difference: str
    stragglers: tuple[SlowRank, ...]
    first_step: int

    @property
    def is_inside(self) -> bool:
        """Whether the measured step time is in the predicted interval."""
        return self.low_s <= self.measured_s <= self.high_s

    def row(self) -> dict[str, Any]:
        """Return the comparison as a dict for JSON."""
        return {
            "predicted_step_s": self.predicted_s,
            "predicted_interval_s": [self.low_s, self.high_s],
            "predicted_by_measurements": self.is_measured,
            "inside": self.is_inside,
            "difference": self.difference,
            "stragglers": [
                {"rank": item.rank, "opcode": item.opcode.name.lower(), "ratio": item.ratio, "since_step": step}
                for item in self.stragglers
                for step in (self.first_step + item.since + 1,)
            ],
        }

    def explain(self) -> list[str]:
        """Return the comparison as lines of text for the user."""
        ends = f"{format_seconds(self.low_s)} to {format_seconds(self.high_s)}"
        basis = "" if self.is_measured else ", from datasheets; use --measurements TABLE to predict from measured times"
        known = f"predicted: {format_seconds(self.predicted_s)} per step, 80 % interval {ends}{basis}"
        where = f"The measured step is {'in' if self.is_inside else 'outside of'} that interval."
        told = [known, where if self.is_inside else f"{where} {self.difference}".rstrip()]
        return told + explain_stragglers(list(self.stragglers), self.first_step)


def judge_run(
    plan: Plan,
    graph: Graph,
    measured: Timeline,
    first_step: int,
    measurements: Path | None,
    emulated: Emulated | None = None,
    at_s: float = 0.0,
) -> Outcome:
    """Compare a measured timeline with the prediction for its plan.

    ``first_step``: the number (from 0) of the timeline's first step in the run. ``measurements``: the table for the
    prediction, None for datasheets. The prediction is for the plan's cluster, or for the emulated one ``at_s`` seconds
    after the first step of the run. Raises DocumentError or MeasurementError for a table that cannot be read or is of
    other devices, ClusterError if the plan's cluster is not found.
    """
    cluster = load_cluster(plan.cluster) if emulated is None else emulated.cluster
    usual = load_cost_model(cluster, measurements, plan.workload.precision)
    if emulated is not None:
        usual = apply_scenario(usual, emulated.scenario, at_s)
        cluster = usual.cluster
    plan, graph, cluster, cost = form_teams(plan, graph, cluster, usual)
    simulation = simulate_plan(plan, graph, cluster, cost=cost, num_steps=2)
    predicted = simulation.timeline
    interval = predict_step_interval(plan, graph, cluster, cost)
    return Outcome(
        # The first steps under an exchange policy are not those of a steady run.
        predicted_s=simulation.step_time_s if plan.exchange.policy else float(np.median(predicted.step_seconds())),
        low_s=interval.low_s,
        high_s=interval.high_s,
        measured_s=float(np.median(measured.step_seconds())),
        is_measured=interval.measured,
        difference=explain_difference(predicted, measured),
        # Datasheets do not show how much longer one stage takes than another.
        stragglers=tuple(find_stragglers(measured, predicted if interval.measured else None)),
        first_step=first_step,
    )


_PR_SET_PDEATHSIG = 1


class _Written:
    """Progress before the first step, as lines for the launcher."""

    def __init__(self, write: Callable[[dict[str, Any]], None]) -> None:
        self._write = write

    def progress(self, task: str, done: int, total: int) -> None:
        """Write a line."""
        self._write({"task": task, "done": done, "total": total})

    def metric(self, name: str, value: float, step: int) -> None:
        """Do nothing: nothing is measured before the first step."""


def main(job_path: str, folder: str, launcher: int) -> int:
    """Run the job of the file ``job_path`` as one rank; return the exit code of this rank.

    ``folder`` receives progress, results and errors; ``launcher`` is the process id of the launcher.
    """
    rank = int(os.environ.get("RANK", "0"))
    end_with_parent(launcher)
    # The launcher handles Ctrl-C and ends its ranks; they end without a traceback of their own.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        job = read_document(Job, job_path)
        take_cores(job.pin_cores)
        _run(job, Path(folder), rank)
    except Exception as error:
        known = isinstance(error, MeshwrightError)
        message = str(error) if known else f"{type(error).__name__}: {error}"
        written = "" if known else traceback.format_exc()
        _write_error(Path(folder), rank, type(error).__name__, message, written, is_out_of_memory(error))
        return 1
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _write_error(
    folder: Path, rank: int, kind: str, message: str, stack: str = "", out_of_memory: bool = False
) -> None:
    report = {"rank": rank, "time": time.time(), "kind": kind, "message": message, "traceback": stack}
    write_text(json.dumps({**report, "out_of_memory": out_of_memory}), error_file(folder, rank))


def end_with_parent(launcher: int) -> None:
    """Have the kernel kill this rank when its parent dies (Linux: prctl(2), PR_SET_PDEATHSIG).

    Exits at once if the launcher has died already. ``launcher``: the process id of the launcher.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # Orphans become children of process 1 or of a subreaper, such as that of a login session.
        if not _is_running(launcher):
            os._exit(1)


def _is_running(process: int) -> bool:
    """Return whether a process runs; one that has ended, and whose parent has not waited for it yet, does not."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def take_cores(pin: bool) -> None:
    """Set this rank's number of threads to its share of the host's cores; with ``pin``, bind it to these cores."""
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    share = max(1, len(cores) // local_size)
    torch.set_num_threads(share)
    if pin and hasattr(os, "sched_setaffinity") and len(cores) >= local_size:
        os.sched_setaffinity(0, cores[local_rank * share : (local_rank + 1) * share])


def _run(job: Job, folder: Path, rank: int) -> None:
    """Train, with progress and results as files for the launcher."""

    def end(message: str) -> None:
        try:
            _write_error(folder, rank, HANG, message)
        finally:
            os._exit(1)

    with (folder / PROGRESS_FILE).open("a") as progress:

        def report(facts: StepFacts) -> None:
            write(asdict(facts))

        def write(row: dict[str, Any]) -> None:
            progress.write(json.dumps(row) + "\n")
            progress.flush()

        trained = train_job(job, report, _Written(write), end)
    if trained.timeline is not None:
        write_results(folder, trained)


def train_job(
    job: Job,
    report: Callable[[StepFacts], None],
    events: EventSink,
    end: Callable[[str], None] = end_process,
) -> Trained:
    """Train (or infer) on this rank; return its results.

    ``report`` is called on rank 0 after every step; ``events`` receives the progress of compiling on rank 0. ``end``
    receives the error if a rank hangs, and ends the process.
    """
    plan = job.read_plan()
    if isinstance(plan, Plan) and plan.exchange.policy:
        return train_by_policy(job, plan, report, events)
    join_group(choose_device(plan, job.device))
    source = load_source(plan, job.seed)
    trainer = prepare(
        source.model,
        source.loss,
        lambda parameters: make_optimizer(parameters, plan.workload.optimizer, job.learning_rate),
        (source.inputs, source.targets),
        plan=plan,
        run_seed=job.seed,
        repair=job_repair(job),
        clip_norm=job.clip_norm,
        device=job.device,
        events=events if dist.get_rank() == 0 else None,
        offload_folder=job.offload_folder,
        hang_after_s=math.inf if job.hang_after_s == 0 else job.hang_after_s,
    )
    if trainer.watch is not None:
        trainer.watch.report = end
    compiled = gather_compiled(trainer)
    seconds: list[float] = []
    trains, known = plan.workload.kind == "training", 0
    done = _resume(trainer, job)
    saving = SaveTimes(job, dist.get_world_size(), done)
    last_ones = job.num_steps - job.num_recorded_steps
    first_recorded = max(last_ones if job.first_recorded is None else job.first_recorded, done)
    batches = make_batches(source, plan.workload.global_batch, job.seed)
    if trainer.rank == 0:
        events.progress("steps", done, job.num_steps)
    for step, (inputs, targets) in enumerate(_reading(trainer, islice(batches, done, job.num_steps)), done):
        if step == first_recorded:
            trainer.record()
        if step == first_recorded + job.num_recorded_steps:
            trainer.stop_recording()
        start = time.perf_counter()
        if trains:
            trainer.step(inputs, targets)
        else:
            trainer.infer(inputs)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        new = _new_losses(trainer, job, known)
        known += len(new)
        if trainer.rank == 0:
            per_s = plan.workload.global_batch / seconds[-1]
            report(StepFacts(step + 1, new, done + known, per_s, seconds[-1]))
        if job.checkpoint is not None and saving.is_due(step + 1):
            start = time.perf_counter()
            keep, every = job.checkpoint_keep, job.checkpoint_keep_every
            trainer.save_checkpoint(job.checkpoint, keep, keep_every=every, in_background=True)
            saving.saved(step + 1, time.perf_counter() - start, trainer.last_write_s, seconds)
    trainer.wait_for_checkpoint()
    trainer.finish()
    _new_losses(trainer, job, known)
    timeline = trainer.timeline()
    if job.save_model is not None:
        trainer.save(job.save_model)
    text = None if timeline is None else dump_json(encode_document(timeline))
    result = RunResult(
        plan=job.plan,
        losses=tuple(loss if math.isfinite(loss) else None for loss in trainer.losses),
        step_seconds=tuple(seconds),
        timeline="",
        num_before=done,
        first_recorded=first_recorded,
        compiled=compiled,
        saving=saving.explain(float(np.median(seconds))) if seconds else "",
    )
    return Trained(result, text)


def _reading(trainer: Trainer, batches: Iterator[Any]) -> Iterator[Any]:
    """The batches; reading one is a phase of the rank."""
    for step in itertools.count(trainer.num_steps):
        trainer.position.enter(Phase.READING, step)
        for batch in batches:
            yield batch
            break
        else:
            return


def _new_losses(trainer: Trainer, job: Job, num_known: int) -> tuple[float, ...]:
    """The losses that have become known. Raises NotFiniteError if one is not finite, on all ranks, unless allowed."""
    new = trainer.losses_since(num_known)
    if not (job.allow_nan or all(map(math.isfinite, new))):
        trainer.wait_for_checkpoint()
        raise not_finite(*trainer.first_not_finite())
    return new


def gather_compiled(trainer: Trainer) -> CompiledLayers | None:
    """Return the compiled layers of all ranks; None for a plan without compiled layers. All ranks call it together."""
    if not isinstance(trainer.plan, Plan) or not trainer.plan.compiled:
        return None
    own = trainer.compilation
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (own.num_units, own.num_codes, own.seconds, dict(own.left_out), own.refused))
    units, codes, seconds, eager, refused = zip(*every, strict=True)
    return CompiledLayers(
        num_units=sum(units),
        num_codes=max(codes),
        seconds=max(seconds),
        eager=dict(sum(map(Counter, eager), Counter())),
        refused=max(refused),
    )


def _resume(trainer: Trainer, job: Job) -> int:
    """The number of earlier steps. Raises RunError if the checkpoint is missing, or no step is left."""
    if not job.resume or job.checkpoint is None:
        return 0
    done = trainer.resume(job.checkpoint)
    if done >= job.num_steps:
        raise RunError(
            f"The checkpoint has {done} steps already, but --steps {job.num_steps} was given, which includes them. "
            "Give more --steps."
        )
    left, filling = job.num_steps - done, trainer.num_filling_steps
    if left < filling:
        raise RunError(
            f"{left} steps are left after the checkpoint of {done} steps, but the schedule takes {filling} steps to "
            f"fill and to empty the pipeline. Give --steps {done + filling} or more."
        )
    if job.first_recorded is not None and job.first_recorded < done:
        raise RunError(
            f"Step {job.first_recorded + 1} was given to record, but the checkpoint has {done} steps already. Record a "
            "later step."
        )
    if job.learning_rate is not None:
        trainer.set_learning_rate(job.learning_rate)
    return done
