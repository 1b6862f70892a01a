"""Loops in several processes: requests are assigned in turn, and their records are merged.

The clocks of all processes agree (`time.perf_counter_ns` counts from the start of the machine). No process outlives the
call.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from meshwright.host.processes import reaping
from meshwright.serving.load.job import LoadJob, RequestRecords
from meshwright.serving.load.loop import Loop
from meshwright.spec import ServingError

# Seconds until processes have started (they import modules) and connected, and until they end after a stop.
_START_S, _END_S = 60.0, 2.0
# Time between the moment at which all are ready and the first request.
_LEAD_NS = 20_000_000

Tell = Callable[[int, int], None]


def run_here(job: LoadJob, tell: Tell | None) -> RequestRecords:
    """Run a job in this process."""
    loop = Loop(job)
    try:
        loop.connect()
        return loop.run(time.perf_counter_ns() + _LEAD_NS, tell)
    finally:
        loop.close()


def run_in_processes(job: LoadJob, count: int, tell: Tell | None) -> RequestRecords:
    """Run a job in ``count`` new processes. Raises ServingError if one of them fails.

    Ctrl-C ends them early.
    """
    spawn = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    seconds = float(job.moments[-1]) / 1e9 if len(job.moments) else 0.0
    with reaping(processes, _END_S):
        for part in _deal(job, count):
            here, there = spawn.Pipe()
            process = spawn.Process(target=_serve_job, args=(part, there), daemon=True)
            process.start()
            there.close()
            processes.append(process)
            pipes.append(here)
        until = time.monotonic() + _START_S
        for pipe, started in zip(pipes, processes, strict=True):
            _receive(pipe, started, until)
        begin_ns = time.perf_counter_ns() + _LEAD_NS
        for pipe in pipes:
            pipe.send(begin_ns)
        records = _collect(pipes, processes, time.monotonic() + seconds + job.grace_s + _START_S, tell)
    return _join(job, records)


def _deal(job: LoadJob, count: int) -> list[LoadJob]:
    """Give every ``count``-th request to each process."""
    return [
        replace(
            job,
            moments=job.moments[place::count].copy(),
            whose=job.whose[place::count].copy(),
            first=place,
            step=count,
            connections=max(job.connections // count, 1),
            at_first=-(-job.at_first // count),
        )
        for place in range(count)
    ]


def _join(job: LoadJob, records: Sequence[RequestRecords]) -> RequestRecords:
    """Merge records in the order of all requests; processes that were stopped have reached different ones."""
    count = len(records)
    # The first request that each process has not reached.
    ends = [place + count * len(part.status) for place, part in enumerate(records)]
    most = min([len(job.moments), *(end for end in ends if end < len(job.moments))])
    columns: dict[str, Any] = {}
    for name in ("status", "lateness", "latency", "waited"):
        parts = [getattr(part, name) for part in records]
        column = np.zeros(most, parts[0].dtype)
        for place, part in enumerate(parts):
            target = column[place::count]
            target[:] = part[: len(target)]
        columns[name] = column
    return RequestRecords(
        **columns,
        bodies={status: body for part in reversed(records) for status, body in part.bodies.items()},
        cpu_s=sum(part.cpu_s for part in records),
        end_ns=max(part.end_ns for part in records),
        num_connections=sum(part.num_connections for part in records),
    )


def _collect(
    pipes: Sequence[Connection], processes: Sequence[BaseProcess], until: float, tell: Tell | None
) -> list[RequestRecords]:
    results: dict[int, RequestRecords] = {}
    told = [(0, 0)] * len(pipes)
    stopped = False
    while len(results) < len(pipes):
        try:
            left = [pipe for place, pipe in enumerate(pipes) if place not in results]
            ready = wait(left, timeout=max(until - time.monotonic(), 0.0))
            if not ready:
                raise ServingError("Processes that send requests did not end in time. Ask for fewer requests in each.")
            for place, pipe in enumerate(pipes):
                if pipe not in ready:
                    continue
                kind, content = _receive(pipe, processes[place], until)
                if kind == "result":
                    results[place] = content
                    continue
                told[place] = content
                if tell is not None:
                    tell(sum(sent for sent, _ in told), sum(done for _, done in told))
        except KeyboardInterrupt:
            if stopped:
                raise
            stopped = True
            until = min(until, time.monotonic() + _START_S)
            for pipe in pipes:
                with contextlib.suppress(OSError):
                    pipe.send("stop")
    return [results[place] for place in range(len(pipes))]


def _receive(pipe: Connection, process: BaseProcess, until: float) -> tuple[str, Any]:
    try:
        if not pipe.poll(max(until - time.monotonic(), 0.0)):
            raise ServingError("A process that sends requests did not start in time. Is the machine overloaded?")
        kind, content = pipe.recv()
    except (EOFError, ConnectionResetError):
        process.join(_END_S)
        raise ServingError(
            f"A process that sends requests ended with exit code {process.exitcode} before it was done. Code -9 often "
            "means that the system ran out of memory: ask for fewer requests."
        ) from None
    if kind == "error":
        raise ServingError(content)
    return kind, content


def _serve_job(job: LoadJob, pipe: Connection) -> None:
    # Ctrl-C reaches all processes of a terminal; only the parent handles it, and notifies the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    loop = Loop(job, pipe)
    try:
        loop.connect()
        pipe.send(("ready", None))
        begin_ns = pipe.recv()
        if begin_ns == "stop":
            return
        records = loop.run(begin_ns, lambda sent, done: pipe.send(("progress", (sent, done))))
        pipe.send(("result", records))
    except ServingError as error:
        pipe.send(("error", str(error)))
    except (EOFError, BrokenPipeError):
        pass  # the parent has gone
    finally:
        loop.close()
