"""The timeline of a server as a trace for https://ui.perfetto.dev, from the records of its processes (`recording`).

process    the scheduler, each device, each frontend
thread     of a device: batches, each with the execution of the model; of a frontend: requests. Since Perfetto requires
           the spans of a thread to nest, requests that were under way at once are in different threads of one name
X          a span: a batch, a request, and the phases of a request (`timeline_requests`)
s, t, f    an arrow from a request to its batch, and on to its answer
i          an instant: decisions of the scheduler, and other events at the scheduler
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import msgspec

from meshwright.serving.policies.pool import RESIZE, RUN
from meshwright.serving.server.live import CANCEL, DOWN, UP, WAKE
from meshwright.serving.server.timeline_facts import (
    RecordedBatch,
    RecordedRun,
    SampleFacts,
    fate_name,
    learn,
    read_batches,
)
from meshwright.serving.server.timeline_requests import request_events
from meshwright.serving.server.trace_events import Event, TraceEvents

_SEEN = {CANCEL: "request cancelled", UP: "device has come up", DOWN: "device has gone", WAKE: "timer"}


def timeline_pieces(facts: RecordedRun) -> Iterator[bytes]:
    """Yield the trace as pieces of JSON text. Its entry ``otherData`` has counts, and lists missing processes."""
    fronts, known = facts.of("front"), SampleFacts()
    batches = [batch for name, worker in facts.of("worker").items() for batch in read_batches(name, worker, known)]
    if scheduler := facts.processes.get("scheduler"):
        learn(known, scheduler)
    told = {
        "seconds": (facts.end_ns - facts.begin_ns) / 1e9,
        "requests": sum(len(each["requests"]) for each in fronts.values()),
        "batches": len(batches),
        "cut": sorted(name for name, each in facts.processes.items() if each.is_cut),
        "missing": sorted(facts.missing),
    }
    begins = [int(each["requests"][:, 0].min()) for each in fronts.values() if len(each["requests"])]
    trace = TraceEvents(min([facts.begin_ns, *begins, *(batch.begin for batch in batches)]))
    yield b'{"displayTimeUnit":"ms","otherData":%b,"traceEvents":[\n' % msgspec.json.encode(told)
    yield from trace.text(_scheduler_events(trace, facts, told))
    yield from trace.text(_device_events(trace, facts, batches, known))
    yield from trace.text(request_events(trace, facts, known))
    yield b"\n]}\n"


def _scheduler_events(trace: TraceEvents, facts: RecordedRun, told: Event) -> Iterator[Event]:
    pid, named = trace.process("scheduler")
    yield from named
    tid, named = trace.thread(pid, "recording")
    yield from named
    yield trace.span((pid, tid), "recording", "recording", facts.begin_ns, facts.end_ns, told)
    scheduler = facts.processes.get("scheduler")
    if scheduler is None:
        return
    tid, named = trace.thread(pid, "decisions")
    yield from named
    for moment, kind, target, model, count in scheduler["decisions"].tolist():
        if kind == RESIZE:
            yield trace.instant((pid, tid), f"{target} devices wanted", "decision", moment, {"devices": target})
            continue
        what = f"run on device {target}" if kind == RUN else f"drop, {fate_name(target)}"
        args = {"model": facts.models[model], "samples": count}
        yield trace.instant((pid, tid), f"{what}: {facts.models[model]} × {count}", "decision", moment, args)
    tid, named = trace.thread(pid, "timers, devices, cancelled")
    yield from named
    for kind, moment, first, second, _, _ in scheduler["events"].tolist():
        if kind in _SEEN:
            args = {CANCEL: {"slot": second & 0xFFFFFFFF}, UP: {"device": first}, DOWN: {"device": first}, WAKE: {}}[
                kind
            ]
            yield trace.instant((pid, tid), _SEEN[kind], "event", moment, args)


def _device_events(
    trace: TraceEvents, facts: RecordedRun, batches: list[RecordedBatch], known: SampleFacts
) -> Iterator[Event]:
    of_worker: dict[str, list[RecordedBatch]] = defaultdict(list)
    for batch in batches:
        of_worker[batch.worker].append(batch)
    for name, worker in facts.of("worker").items():
        pid, named = trace.process(name.replace("worker-", "device "))
        yield from named
        tid, named = trace.thread(pid, "batches")
        yield from named
        known.places[name] = pid, tid
        for batch in of_worker[name]:
            yield _batch_span(trace, (pid, tid), facts.models[batch.model], batch)
        for begin, end in worker["runs"].tolist():
            yield trace.span((pid, tid), "model", "model", begin, end, {})


def _batch_span(trace: TraceEvents, place: tuple[int, int], model: str, batch: RecordedBatch) -> Event:
    taken = batch.end - batch.begin
    counts = {"late": batch.late, "passed_over": batch.passed_over, "failed": batch.failed}
    words = "".join(f", {count} {what.replace('_', ' ')}" for what, count in counts.items() if count)
    args = {
        "batch": batch.number,
        "model": model,
        "samples": batch.size,
        "expected_us": batch.expected / 1e3,
        "taken_us": taken / 1e3,
        "over_expected_us": (taken - batch.expected) / 1e3,
        **counts,
    }
    kind = "batch,late" if batch.late or batch.passed_over else "batch"
    return trace.span(place, f"{model} × {batch.size}{words}", kind, batch.begin, batch.end, args)
