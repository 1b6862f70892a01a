"""The requests of a timeline: the records of their frontends, combined with those of scheduler and workers.

The phases of a request; one that is dropped or refused does not reach all of them:

    front      its bytes and tensors are read, until a message to the scheduler is sent
    message    until the scheduler receives the message
    queue      until the policy has decided that the request runs, or is dropped
    device     until the device starts the request's batch
    batch      until the batch has ended
    answer     until the answer has been passed to the system

If its samples run in several batches, the first start and the last end count.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from meshwright.serving.server.peers import SLOT_BITS, slots_of
from meshwright.serving.server.recording import Recorded
from meshwright.serving.server.timeline_facts import RecordedBatch, RecordedRun, Sample, SampleFacts, fate_name
from meshwright.serving.server.trace_context import SAMPLED, read_state
from meshwright.serving.server.trace_events import Event, TraceEvents

_PHASES = ("front", "message", "queue", "device", "batch", "answer")


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    """A request of a frontend; ``status`` is 0 without an answer."""

    begin: int
    end: int
    model: str
    samples: list[Sample]
    fate: str
    status: int = 0
    context: Event = field(default_factory=dict)


def request_events(trace: TraceEvents, facts: RecordedRun, known: SampleFacts) -> Iterator[Event]:
    """Yield the trace events of the requests of all frontends."""
    numbers = count(1)
    for name, front in facts.of("front").items():
        submitted = _submissions(front)
        requests = _answered(facts, front)
        # If records were cut, a missing answer does not mean that the request is under way.
        if not front.is_cut:
            requests += _under_way(facts, requests, submitted)
        pid, named = trace.process(name)
        yield from named
        free: list[tuple[int, int]] = []
        for request in sorted(requests, key=lambda request: request.begin):
            if free and free[0][0] <= request.begin:
                tid = heapq.heappop(free)[1]
            else:
                tid, named = trace.thread(pid, "requests")
                yield from named
            heapq.heappush(free, (request.end, tid))
            yield from _request_events(trace, (pid, tid), request, known, submitted, next(numbers))


def _submissions(front: Recorded) -> dict[Sample, int]:
    """Return when each sample was sent by the frontend."""
    flushes = front["flushes"]
    moments, channels = (np.repeat(flushes[:, column], flushes[:, 2]).tolist() for column in (0, 1))
    flushed = front["flushed"].copy()
    flushed[:, 1] = slots_of(flushed[:, 1])
    rows = zip(moments, channels, flushed.tolist(), strict=True)
    return {(model, channel << SLOT_BITS | slot, deadline): moment for moment, channel, (model, slot, deadline) in rows}


def _answered(facts: RecordedRun, front: Recorded) -> list[_Request]:
    slots, first, found = front["slots"].ravel().tolist(), 0, []
    for begun, answered, status, fate, model, channel, deadline, size, text in front["requests"].tolist():
        found.append(
            _Request(
                begin=begun,
                end=answered,
                model=facts.models[model],
                samples=[(model, channel << SLOT_BITS | slot, deadline) for slot in slots[first : first + size]],
                fate="refused" if fate < 0 else fate_name(fate),
                status=status,
                context={} if text < 0 else _context(front.texts[text]),
            )
        )
        first += size
    return found


def _under_way(facts: RecordedRun, answered: list[_Request], submitted: dict[Sample, int]) -> list[_Request]:
    """Return samples without an answer, each as a request of its own."""
    told = {sample for each in answered for sample in each.samples}
    return [
        _Request(
            begin=moment,
            end=max(facts.end_ns, moment),
            model=facts.models[sample[0]],
            samples=[sample],
            fate="under way",
        )
        for sample, moment in submitted.items()
        if sample not in told
    ]


def _context(text: bytes) -> Event:
    trace, parent, span, flags, state = text.decode("latin-1").split(" ", 4)
    told = {"trace": trace, "parent_span": parent, "span": span, "sampled": bool(int(flags) & SAMPLED)}
    return {**told, **({"tracestate": members} if (members := read_state(state)) else {})}


def _request_events(
    trace: TraceEvents,
    place: tuple[int, int],
    request: _Request,
    known: SampleFacts,
    submitted: dict[Sample, int],
    number: int,
) -> Iterator[Event]:
    batches = list({id(batch): batch for each in request.samples if (batch := known.batches.get(each))}.values())
    args: Event = {"fate": request.fate, "samples": max(len(request.samples), 1), **request.context}
    if request.status:
        args["status"] = request.status
    if request.samples:
        args["spare_us"] = (request.samples[0][2] - request.end) / 1e3
    if batches:
        args["batches"] = [batch.number for batch in batches]
        args["devices"] = sorted({int(batch.worker.rpartition("-")[2]) for batch in batches})
    name = request.model if request.status == 200 else f"{request.model}: {request.fate}"
    yield trace.span(place, name, f"request,{request.fate}", request.begin, request.end, args)
    begin = request.begin
    for phase, moment in zip(_PHASES, _moments(request, known, submitted, batches), strict=True):
        end = min(max(moment, begin), request.end)
        if end > begin:
            yield trace.span(place, phase, "phase", begin, end, {})
        begin = end
    for step, batch in enumerate(batches):
        # Perfetto drops arrows that point backwards.
        if request.begin <= batch.begin and batch.end <= request.end:
            arrow = number * 4096 + step
            yield trace.arrow("s", arrow, place, request.begin)
            yield trace.arrow("t", arrow, known.places[batch.worker], batch.begin)
            yield trace.arrow("f", arrow, place, batch.end)


def _moments(
    request: _Request, known: SampleFacts, submitted: dict[Sample, int], batches: list[RecordedBatch]
) -> tuple[int, int, int, int, int, int]:
    """Return the ends of the phases; unknown ones, and those the request did not reach, are its end."""
    end, samples = request.end, request.samples
    if not samples:
        return (end,) * 6
    left = [submitted[sample] for sample in samples if sample in submitted]
    seen = [known.arrived[sample] for sample in samples if sample in known.arrived]
    begun = min((batch.begin for batch in batches), default=end)
    done = max((batch.end for batch in batches), default=end)
    decided = [
        moment for sample in samples if (moment := _last_before(known.decided.get(sample[:2], []), begun)) is not None
    ]
    return (
        min(left, default=request.begin),
        min(seen, default=request.begin),
        min((moment for moment in decided if moment >= request.begin), default=begun),
        begun,
        done,
        end,
    )


def _last_before(moments: list[int], moment: int) -> int | None:
    place = bisect_right(moments, moment)
    return moments[place - 1] if place else None
