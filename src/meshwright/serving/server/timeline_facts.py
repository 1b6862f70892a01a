"""Combine the records of a server's processes: batches, and the history of each sample at scheduler and workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from meshwright.serving.server.gate import Fate
from meshwright.serving.server.live import AGAIN, ARRIVE
from meshwright.serving.server.recording import Recorded

# Model, request (connection and slot), deadline: the same in all processes.
Sample = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The records of a server's processes, by process name, from ``begin_ns`` to ``end_ns``.

    ``models`` has the model names by number. The records of ``missing`` processes could not be read.
    """

    begin_ns: int
    end_ns: int
    models: Sequence[str]
    processes: Mapping[str, Recorded]
    missing: Sequence[str] = ()

    def of(self, kind: str) -> dict[str, Recorded]:
        """Return the records of all processes of a kind (``front``, ``worker``), in the order of their numbers."""
        names = [name for name in self.processes if name.startswith(f"{kind}-")]
        return {name: self.processes[name] for name in sorted(names, key=lambda name: int(name.rpartition("-")[2]))}


@dataclass(slots=True, kw_only=True, eq=False)
class RecordedBatch:
    """A recorded batch of ``size`` samples; ``expected`` time, ``begin`` and ``end`` are in ns.

    ``passed_over`` samples were skipped, ``failed`` ones failed, and ``late`` ones were done after their deadline.
    """

    worker: str
    number: int
    model: int
    expected: int
    begin: int
    end: int
    size: int
    passed_over: int
    failed: int
    late: int


@dataclass(slots=True, kw_only=True, eq=False)
class SampleFacts:
    """The history of samples at the scheduler and the workers; times are in ns.

    ``arrived``: when the scheduler received each sample. ``decided``: when it decided, for each (model, request): a
    list, as slots are reused. ``batches``: the batch of each sample.
    """

    arrived: dict[Sample, int] = field(default_factory=dict)
    decided: dict[tuple[int, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    batches: dict[Sample, RecordedBatch] = field(default_factory=dict)
    # Process and thread of a worker's batches in the trace.
    places: dict[str, tuple[int, int]] = field(default_factory=dict)


def fate_name(fate: int) -> str:
    """Return the name of an outcome (`Fate`), in lower case."""
    return Fate(fate).name.lower()


def read_batches(name: str, worker: Recorded, known: SampleFacts) -> Iterator[RecordedBatch]:
    """Yield the batches of a worker, in order, and record in ``known`` which samples ran in each."""
    first = 0
    for number, model, expected, begin, end, size in worker["batches"].tolist():
        samples = worker["samples"][first : first + size]
        first += size
        deadlines, outcomes = samples[:, 1], samples[:, 2]
        batch = RecordedBatch(
            worker=name,
            number=number,
            model=model,
            expected=expected,
            begin=begin,
            end=end,
            size=size,
            passed_over=int((outcomes == 1).sum()),
            failed=int((outcomes == 2).sum()),
            late=int(((outcomes == 0) & (deadlines < end)).sum()),
        )
        known.batches |= {(model, request, deadline): batch for request, deadline, _ in samples.tolist()}
        yield batch


def learn(known: SampleFacts, scheduler: Recorded) -> None:
    """Record in ``known`` when samples reached the scheduler, and when it decided about them."""
    events = scheduler["events"]
    for _, moment, model, request, deadline, _ in events[np.isin(events[:, 0], (ARRIVE, AGAIN))].tolist():
        known.arrived.setdefault((model, request, deadline), moment)
    chosen, first = scheduler["chosen"].ravel().tolist(), 0
    for moment, _, _, model, count in scheduler["decisions"].tolist():
        for request in chosen[first : first + count]:
            known.decided[model, request].append(moment)
        first += count
