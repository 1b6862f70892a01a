"""One rank of a run that torchrun started: ``torchrun ... --module meshwright run PLAN.json``, on one node or several.

Here the agent is torchrun's own, so each rank reports its own error directly, and only rank 0 writes the results.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist

from meshwright.measurement import is_out_of_memory
from meshwright.spec.errors import RunError
from meshwright.spec.events import EventSink, NullSink
from meshwright.training.job import Job, RunResult, write_results
from meshwright.training.launch import claimed, read_runnable_plan
from meshwright.training.out_of_memory import predict_memory
from meshwright.training.worker import StepFacts, take_cores, train_job


def started_by_torchrun() -> bool:
    """Whether torchrun started this process as a rank (torch.distributed.run sets both variables for every rank)."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def run_rank(job: Job, folder: Path | str, events: EventSink | None = None) -> RunResult | None:
    """Run a job on this rank, together with the others; return the result on rank 0, None on others.

    Raises PlanError if the plan does not fit the model or the number of ranks, RunError if rank 0 cannot write.
    """
    folder, sink = Path(folder).resolve(), events or NullSink()
    is_first = os.environ["RANK"] == "0"
    # torchrun handles Ctrl-C and ends its ranks; they end without a traceback of their own.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    read_runnable_plan(job)
    take_cores(job.pin_cores)

    def report(facts: StepFacts) -> None:
        for place, loss in enumerate(facts.losses, facts.last_loss - len(facts.losses) + 1):
            sink.metric("loss", loss, place)
        sink.metric("samples_per_s", facts.samples_per_s, facts.step)
        sink.progress("steps", facts.step, job.num_steps)

    with claimed(folder, job) if is_first else contextlib.nullcontext():
        try:
            timeline, result = train_job(job, report, sink)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            process = int(os.environ["RANK"])
            what, advice = str(error).splitlines()[0], predict_memory(job.plan, process)
            raise RunError(f"Rank {process} ran out of memory: {what}. {advice}") from None
        dist.barrier()
        dist.destroy_process_group()
        if timeline is None:
            return None
        return write_results(folder, timeline, result)


def leave(code: int) -> None:
    """End this rank's process at once, after everything was written, without shutting the interpreter down.

    A finished worker was once aborted while the interpreter shut torch down ("terminate called without an active
    exception"; cause not established).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
