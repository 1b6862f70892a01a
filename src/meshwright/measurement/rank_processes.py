"""Run one function in several processes that share a gloo process group; all processes end with the call.

Each process has one thread and one core (rank modulo cores). If a process fails or is killed, the whole run ends at
once with its error. The run also ends at the time limit. The ranks connect through a file, so no port is needed.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.host.reach import reaping
from meshwright.spec import EventSink, MeasurementError, NullSink

# Seconds that a process gets to end by itself when it is asked to.
_GRACE_S = 2.0
# A rank with a broken connection may report that before the system has reaped the killed one.
_KILLED_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """The first argument of a function that `run_ranks` calls: its rank, the number of ranks, and a sink of events.

    Events of rank 0 are passed to the caller of `run_ranks`; those of other ranks are dropped.
    """

    rank: int
    num_ranks: int
    events: EventSink


class _PipeSink:
    """Sends events through a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def progress(self, task: str, done: int, total: int) -> None:
        self._pipe.send(("progress", (task, done, total)))

    def metric(self, name: str, value: float, step: int) -> None:
        self._pipe.send(("metric", (name, value, step)))


def run_ranks(
    function: Callable[..., Any],
    *arguments: Any,
    num_ranks: int,
    timeout_s: float,
    events: EventSink | None = None,
    prepare: Callable[[int], None] | None = None,
) -> list[Any]:
    """Call ``function(context, *arguments)`` in ``num_ranks`` new processes and return a list of the results by rank.

    ``prepare``: called with the rank at the start of its process, which is then not pinned to a core. Functions,
    arguments and results must be picklable. Raises MeasurementError if a rank fails or dies, or if ``timeout_s`` has
    passed.
    """
    deadline = time.monotonic() + timeout_s
    sink = events or NullSink()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        meeting = str(Path(folder) / "meeting")
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        with reaping(processes, _GRACE_S):
            for rank in range(num_ranks):
                receiving, sending = spawn.Pipe(duplex=False)
                place = (function, arguments, rank, num_ranks, meeting, timeout_s, sending, prepare)
                process = spawn.Process(target=_run_rank, args=place, daemon=True)
                process.start()
                processes.append(process)
                pipes.append(receiving)
                sending.close()
            return _collect(processes, pipes, deadline, timeout_s, sink)


def _collect(
    processes: list[BaseProcess], pipes: list[Connection], deadline: float, timeout_s: float, sink: EventSink
) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(processes):
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(open_pipes, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = ", ".join(str(rank) for rank in range(len(processes)) if rank not in results)
            raise MeasurementError(
                f"The measurement did not end within {timeout_s:g} s (no result from rank {missing}). "
                "Allow more time, or measure fewer batch sizes or a smaller model."
            )
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            kind, content = _receive(pipes[rank], processes[rank], rank)
            match kind:
                case "result":
                    results[rank] = content
                case "error":
                    _refuse_killed(processes)
                    raise MeasurementError(f"Rank {rank} of the measurement failed: {content}")
                case "progress":
                    sink.progress(*content)
                case _:
                    sink.metric(*content)
    return [results[rank] for rank in range(len(processes))]


def _receive(pipe: Connection, process: BaseProcess, rank: int) -> tuple[str, Any]:
    try:
        return pipe.recv()
    except EOFError:
        process.join(_GRACE_S)
        raise _ended(rank, process.exitcode) from None


def _refuse_killed(processes: list[BaseProcess]) -> None:
    """Raise for a rank that was killed: the error that another one reports is only the end of its connection."""
    until = time.monotonic() + _KILLED_S
    while time.monotonic() < until:
        for rank, process in enumerate(processes):
            if (code := process.exitcode) is not None and code < 0:
                raise _ended(rank, code)
        time.sleep(0.05)


def _ended(rank: int, code: int | None) -> MeasurementError:
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
    return MeasurementError(
        f"Rank {rank} of the measurement {how} before it had a result. The system often kills processes by signal 9 "
        "when memory is full: measure a smaller batch or fewer ranks."
    )


def _run_rank(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    num_ranks: int,
    meeting: str,
    timeout_s: float,
    pipe: Connection,
    prepare: Callable[[int], None] | None,
) -> None:
    try:
        torch.set_num_threads(1)
        if prepare is None:
            _take_core(rank)
        else:
            prepare(rank)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        sink: EventSink = _PipeSink(pipe) if rank == 0 else NullSink()
        result = function(RankContext(rank=rank, num_ranks=num_ranks, events=sink), *arguments)
        dist.barrier()
        dist.destroy_process_group()
        pipe.send(("result", result))
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        pipe.send(("error", f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"))
    finally:
        pipe.close()


def _take_core(rank: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
