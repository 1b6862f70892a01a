"""One rank of a run: ``python -m meshwright.training JOB.json FOLDER``, started per rank by torchrun's agent.

Rank 0 writes progress as JSON lines; a rank that fails writes its own error, so that the launcher can report which one
failed, and why.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.measurement import is_out_of_memory
from meshwright.runtime import choose_device, join_group
from meshwright.spec.codec import dump_json, encode_document, read_document
from meshwright.spec.errors import MeshwrightError, RunError
from meshwright.spec.events import EventSink
from meshwright.spec.files import write_text
from meshwright.spec.plan import Plan
from meshwright.training.job import (
    PROGRESS_FILE,
    CompiledLayers,
    Job,
    RunResult,
    error_file,
    job_repair,
    load_source,
    make_batches,
    make_optimizer,
    write_results,
)
from meshwright.training.trainer import Trainer, prepare

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


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The facts known after a step (the first is 1).

    ``losses`` are those that became known with it, the last of them that of step ``last_loss``: under an asynchronous
    schedule none at first, then those of earlier steps.
    """

    step: int
    losses: tuple[float, ...]
    last_loss: int
    samples_per_s: float


def main(job_path: str, folder: str, launcher: int) -> int:
    """Run the job, started by the process ``launcher``; return the exit code of this rank."""
    rank = int(os.environ.get("RANK", "0"))
    end_with_parent(launcher)
    # The launcher handles Ctrl-C and ends its ranks; they end without a traceback of their own.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        job = read_document(Job, job_path)
        take_cores(job.pin_cores)
        _run(job, Path(folder))
    except Exception as error:
        known = isinstance(error, MeshwrightError)
        report = {
            "rank": rank,
            "time": time.time(),
            "kind": type(error).__name__,
            "message": str(error) if known else f"{type(error).__name__}: {error}",
            "traceback": "" if known else traceback.format_exc(),
            "out_of_memory": is_out_of_memory(error),
        }
        write_text(json.dumps(report), error_file(Path(folder), rank))
        return 1
    dist.barrier()
    dist.destroy_process_group()
    return 0


def end_with_parent(launcher: int) -> None:
    """Let the kernel end this rank when the launcher dies, however it dies (Linux: prctl(2), PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # Orphans become children of process 1, which in a container may be the launcher itself.
        if os.getppid() == 1 != launcher:
            os._exit(1)


def take_cores(pin: bool) -> None:
    """Give this rank its share of the host's cores: this number of threads, pinned to them if chosen and possible."""
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    share = max(1, len(cores) // local_size)
    torch.set_num_threads(share)
    if pin and hasattr(os, "sched_setaffinity") and len(cores) >= local_size:
        os.sched_setaffinity(0, cores[local_rank * share : (local_rank + 1) * share])


def _run(job: Job, folder: Path) -> None:
    """Train, with progress and results as files for the launcher."""
    with (folder / PROGRESS_FILE).open("a") as progress:

        def report(facts: StepFacts) -> None:
            write(asdict(facts))

        def write(row: dict[str, Any]) -> None:
            progress.write(json.dumps(row) + "\n")
            progress.flush()

        timeline, result = train_job(job, report, _Written(write))
    if timeline is not None:
        write_results(folder, timeline, result)


def train_job(job: Job, report: Callable[[StepFacts], None], events: EventSink) -> tuple[str | None, RunResult]:
    """Train on this rank, or infer; return the measured timeline as text (rank 0 only), losses and seconds of steps.

    ``report`` is called on rank 0 after every step; ``events`` receives the progress of compiling there.
    """
    plan = job.read_plan()
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
    )
    compiled = gather_compiled(trainer)
    seconds: list[float] = []
    trains, known = plan.workload.kind == "training", 0
    done = _resume(trainer, job)
    last_ones = job.num_steps - job.num_recorded_steps
    first_recorded = max(last_ones if job.first_recorded is None else job.first_recorded, done)
    batches = make_batches(source, plan.workload.global_batch, job.seed)
    for step, (inputs, targets) in enumerate(islice(batches, done, job.num_steps), done):
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
        if trainer.rank == 0:
            per_s = plan.workload.global_batch / seconds[-1]
            new = trainer.losses_since(known)
            known += len(new)
            report(StepFacts(step + 1, new, done + known, per_s))
        if job.checkpoint is not None and _is_due(step + 1, job):
            trainer.save_checkpoint(job.checkpoint)
    trainer.finish()
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
    )
    return text, result


def gather_compiled(trainer: Trainer) -> CompiledLayers | None:
    """The compiled layers of all ranks; None for a plan without compiled layers. All ranks call it together."""
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
            f"The checkpoint has {done} steps, but {job.num_steps} were given, which include those. Give more --steps."
        )
    left, filling = job.num_steps - done, trainer.num_filling_steps
    if left < filling:
        raise RunError(
            f"{left} steps are left after the checkpoint of {done}, and the schedule takes {filling} to fill and to "
            f"empty the pipeline. Give --steps {done + filling} or more."
        )
    if job.first_recorded is not None and job.first_recorded < done:
        raise RunError(
            f"Step {job.first_recorded + 1} is to be recorded, but the checkpoint has {done} steps. Record later ones."
        )
    if job.learning_rate is not None:
        trainer.set_learning_rate(job.learning_rate)
    return done


def _is_due(num_steps: int, job: Job) -> bool:
    """Whether a checkpoint is due after ``num_steps`` steps."""
    return num_steps == job.num_steps or (job.checkpoint_every > 0 and num_steps % job.checkpoint_every == 0)
