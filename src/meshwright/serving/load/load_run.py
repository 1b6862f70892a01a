"""Run a load against a server (`run_load`), in one process or several, and compute the outcome."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from meshwright.host.reach import reaping
from meshwright.serving.load.bodies import build_requests
from meshwright.serving.load.loop import Loop
from meshwright.serving.load.result import Check, LoadJob, LoadResult, RequestRecords, sum_up
from meshwright.serving.load.target import (
    ModelSignature,
    RequestStream,
    Target,
    draw_moments,
    find_address,
    most_at_once,
    read_model,
    read_target,
)
from meshwright.spec import EventSink, ServingError
from meshwright.spec.bounds import check_bounds

# Seconds until processes have started (they import modules) and connected, and until they end after a stop.
_START_S, _END_S = 60.0, 2.0
# Time between the moment at which all are ready and the first request.
_LEAD_NS = 20_000_000

Tell = Callable[[int, int], None]


def run_here(job: LoadJob, tell: Tell | None) -> RequestRecords:
    """Run a job in this process; ``tell(sent, done)`` is called with the progress."""
    loop = Loop(job)
    try:
        loop.connect()
        return loop.run(time.perf_counter_ns() + _LEAD_NS, tell)
    finally:
        loop.close()


# Requests are assigned in turn, and their records are merged. The clocks of all processes agree (`time.perf_counter_ns`
# counts from the start of the machine). No process outlives the call.
def run_in_processes(job: LoadJob, count: int, tell: Tell | None) -> RequestRecords:
    """Run a job in ``count`` new processes; ``tell(sent, done)`` is called with the progress.

    Ctrl-C ends the run early. Raises ServingError if one of the processes fails.
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


# At first, connections are opened for the requests of this time: that is enough if answers take no longer.
_USUAL_S = 0.05
MOST_PROCESSES, MOST_CONNECTIONS, MOST_ROWS = 64, 50_000, 65_536

_check = partial(check_bounds, ServingError)


def run_load(
    url: str,
    streams: Sequence[RequestStream],
    seconds: float,
    *,
    seed: int = 0,
    scale: float = 1.0,
    ramp_s: float = 0.0,
    rows: int = 1,
    binary: bool = False,
    connections: int = 2048,
    processes: int = 1,
    grace_s: float = 5.0,
    token: str | None = None,
    check: Check | None = None,
    events: EventSink | None = None,
) -> LoadResult:
    """Send requests at their moments, whether or not earlier ones are answered; wait for answers and return figures.

    Args:
        url: The server's address, ``http://host:port``.
        streams: Which models get requests, when, and with which deadlines.
        seconds: Duration; a ramp of ``ramp_s``, in which rates grow from 0, precedes it and is not counted.
        seed: Other seeds draw other moments and values.
        scale: All rates are multiplied by this.
        ramp_s: See ``seconds``.
        rows: Samples in a request.
        binary: Send values in Triton's binary format instead of JSON.
        connections: Largest number of open connections; a request that finds no idle connection waits for one.
        processes: Number of processes that send. With 1 and without ``events``, the calling process sends.
        grace_s: Seconds to wait for answers after the last request, in addition to twice the longest deadline.
        token: Sent as a bearer token.
        check: Returns whether an answer is right, given the model, the number of the body (`draw_inputs`) and the
            answer; nothing is sent while it runs. Must be picklable with several processes.
        events: Receives the progress: how many requests are done.

    Raises ServingError if the server cannot be reached or lacks one of the models, and if an argument is out of range.
    """
    _check("A load", seconds=(1e-3, seconds, 1e6), ramp_s=(0.0, ramp_s, 1e6), grace_s=(0.0, grace_s, 1e4))
    _check("A load", rows=(1, rows, MOST_ROWS), processes=(1, processes, MOST_PROCESSES))
    _check("A load", connections=(1, connections, MOST_CONNECTIONS))
    target = read_target(url, token)
    names = [name for stream in streams for name in stream.names]
    again = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if not names or again:
        raise ServingError(f"{f'{again[0]!r} was given twice' if again else 'No model was given'}; expected each once.")
    family, address = find_address(target)
    moments, whose = draw_moments(streams, seconds, seed=seed, scale=scale, ramp_s=ramp_s)
    facts = _read_facts(target, streams)
    said = [stream.parameters for stream in streams for _ in stream.names]
    longest_s = max((stream.deadline_s for stream in streams if stream.deadline_s is not None), default=0.0)
    job = LoadJob(
        family=family,
        address=address,
        moments=moments,
        whose=whose,
        names=names,
        requests=build_requests(target, facts, said, rows=rows, binary=binary, seed=seed),
        first=0,
        step=1,
        connections=connections,
        at_first=min(max(most_at_once(moments, longest_s or _USUAL_S), 1), connections),
        grace_s=grace_s + 2 * longest_s,
        check=check,
    )
    began = time.time()
    records = _run(job, processes, events)
    return sum_up(streams, moments, whose, records, ramp_s=ramp_s, seconds=seconds, began=began)


def _run(job: LoadJob, processes: int, events: EventSink | None) -> RequestRecords:
    if processes == 1 and events is None:
        return run_here(job, None)
    total = len(job.moments)
    tell: Tell | None = None
    if events is not None:
        sink = events

        def tell(sent: int, done: int) -> None:
            sink.metric("under_way", sent - done, sent)
            sink.progress("load", done, total)

    # A progress bar would compete with the loop, and make it late: separate processes send.
    return run_in_processes(job, processes, tell)


def _read_facts(target: Target, streams: Sequence[RequestStream]) -> list[ModelSignature]:
    """Return the signature of each model; copies share one, so that the server is asked once for all of them."""
    facts = []
    for stream in streams:
        first = read_model(target, stream.names[0])
        facts += [replace(first, name=name) for name in stream.names]
    return facts
