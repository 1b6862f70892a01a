"""Run a load against a server, and compute the outcome."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from meshwright.serving.load.bodies import build_requests
from meshwright.serving.load.job import Check, LoadJob, RequestRecords
from meshwright.serving.load.processes import Tell, run_here, run_in_processes
from meshwright.serving.load.result import LoadResult, sum_up
from meshwright.serving.load.streams import RequestStream, draw_moments, most_at_once
from meshwright.serving.load.target import ModelSignature, Target, find_address, read_model, read_target
from meshwright.spec import EventSink, ServingError
from meshwright.spec.bounds import check_bounds

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
        streams: Which requests, and when.
        seconds: Duration; a ramp of ``ramp_s``, in which rates grow from 0, precedes it and is not counted.
        seed: Other seeds draw other moments and values.
        scale: All rates are multiplied by this.
        ramp_s: See ``seconds``.
        rows: Samples in a request.
        binary: Send values in Triton's binary format instead of JSON.
        connections: The most that are open at a time; a request that finds none idle waits for one.
        processes: Sending processes; with more than one, or with ``events``, separate processes send.
        grace_s: How long answers are waited for after the last request, besides twice the longest deadline.
        token: Sent as a bearer token.
        check: Returns whether an answer is right, given the model, the number of the body (`draw_inputs`) and the
            answer; its time is lost for sending. Must be picklable with several processes.
        events: Receives the progress: how many requests are done.

    Raises ServingError if the server cannot be reached, lacks one of the models, or an argument is out of range.
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
