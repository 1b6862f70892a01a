"""The scheduler: it knows of requests where they are and when they are due, and decides by its policy what runs where.

Fronts submit requests, workers run batches (`channel.Kind`); tensors never come here. What a worker that has gone had
to do comes again, with the deadlines that it had; a request that has lost two workers is taken to be at fault. Only the
scheduler says what became of a request, and it does so once.

Run as ``python -m meshwright.serving.server.scheduler FOLDER``, where ``FOLDER`` has the deployment; ends when its
standard input does.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.serving.policies.pool import (
    DEADLINE,
    DELAY,
    DROP,
    GUARD,
    HEAD,
    LATE,
    MASK,
    MODEL,
    NEVER,
    NUM_IDLE,
    NUM_QUEUED,
    NUM_QUEUES,
    NUM_UP,
    REQUEST,
    RUN,
    SLACK,
    START,
    TAIL,
    Ints,
)
from meshwright.serving.server.channel import MOST_CELLS, Channel, Closed, Kind, listen
from meshwright.serving.server.gate import Fate
from meshwright.serving.server.lateness import Lateness
from meshwright.serving.server.live import ADJUST, ARRIVE, CANCEL, DOWN, EVENT_WIDTH, FREE, UP, WAKE, Live
from meshwright.serving.server.reports import end_with_input, report, reporting_errors
from meshwright.serving.server.served import Served, served_models
from meshwright.serving.server.slabs import slab_path
from meshwright.spec import Deployment, ServingError, read_deployment

# A request is a front's connection, in the upper half, and its slot.
_SLOT_BITS = 32
_SLOT = (1 << _SLOT_BITS) - 1
# Messages without a batch, that tell how long the way to a worker takes.
_PING, _PINGS = -1, 64
_EVERY_NS = 1_000_000_000
# Requests that a queue holds, and slots of a model in a front.
_CAPACITY = 65_536


@dataclass(slots=True, eq=False)
class _Front:
    channel: Channel
    number: int
    # By model, the deadline of what is in each slot.
    deadlines: dict[int, Ints] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Batch:
    number: int
    model: int
    requests: Ints
    sent_ns: int


@dataclass(slots=True, eq=False)
class _Worker:
    channel: Channel
    device: int
    pings: int = _PINGS
    batches: deque[_Batch] = field(default_factory=deque)


class Scheduler:
    """See the module's docstring; `turn` does what there is to do."""

    def __init__(self, folder: Path, deployment: Deployment, log: Path | None = None) -> None:
        self._folder, self._deployment = folder, deployment
        self._log = None if log is None else log.open("wb")
        self._epoch = time.monotonic_ns()
        self._selector = selectors.SelectSelector()
        self._listener = listen(folder / "scheduler.sock")
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._models: list[Served] = served_models(deployment)
        self._live: Live | None = None
        self._lateness = Lateness(NEVER)
        self._fronts: dict[int, _Front] = {}
        self._workers: dict[int, _Worker] = {}
        self._connections = 0
        self._batches = 0
        self._events: list[Ints] = []
        self._once_lost: set[int] = set()
        self._counts: Counter[tuple[int, int]] = Counter()
        self._batch_counts: Counter[int] = Counter()
        self._next_report = 0

    def turn(self) -> None:
        """Wait for the next message or moment, and do what follows from it."""
        moment = self._live.next_moment if self._live is not None else NEVER
        wait_ns = min(moment, self._next_report) - time.monotonic_ns()
        ready = self._selector.select(max(wait_ns, 0) / 1e9)
        now = time.monotonic_ns()
        if self._live is not None and moment <= now:
            self._lateness.timers.add(now - moment)
            self._event(WAKE, now)
        for key, mask in ready:
            key.data(now, mask)
        if now >= self._next_report:
            self._next_report = now + _EVERY_NS
            self._adjust(now)
            self._report()
        while self._events and self._live is not None:
            events, self._events = np.concatenate(self._events), []
            for decisions, chosen in self._live.take(events):
                self._carry_out(decisions, chosen, now)

    def watch_input(self) -> None:
        """From now on, `turn` ends with SystemExit when standard input does."""
        self._selector.register(sys.stdin, selectors.EVENT_READ, lambda _now, _mask: end_with_input())

    def close(self) -> None:
        """Close what is open; the log is complete then."""
        self._listener.close()
        sides: list[_Front | _Worker] = [*self._fronts.values(), *self._workers.values()]
        for side in sides:
            side.channel.close()
        if self._log is not None:
            self._log.close()

    # --- events, decisions ---------------------------------------------------------------------

    def _event(self, kind: int, now: int, *values: int) -> None:
        self._events.append(np.array([[kind, now, *values, *[0] * (EVENT_WIDTH - 2 - len(values))]], np.int64))

    def _carry_out(self, decisions: Ints, chosen: Ints, now: int) -> None:
        for kind, target, queue, first, count, _ in decisions.tolist():
            model, requests = self._model_of(queue), chosen[first : first + count]
            if kind == RUN:
                self._run(self._workers[target], model, requests, now)
            elif kind == DROP:
                self._answer(model, requests, target)
            else:
                raise ServingError(
                    f"Policy {self._deployment.policy!r} gives a batch up while it runs, which no worker can do. "
                    "Serve by another one; the simulator knows this one."
                )

    def _model_of(self, queue: int) -> int:
        pool = self._live.pool if self._live is not None else np.zeros(0, np.int64)
        return int(pool[pool[MODEL] + queue])

    def _run(self, worker: _Worker, model: int, requests: Ints, now: int) -> None:
        batch = _Batch(self._batches, model, requests, now)
        self._batches += 1
        worker.batches.append(batch)
        expected = self._models[model].table[len(requests)]
        head = np.array([Kind.RUN, batch.number, model, expected, len(requests)], np.int64)
        with contextlib.suppress(Closed):  # seen when it is read
            worker.channel.send(np.concatenate([head, requests, self._deadlines(model, requests)]))
            self._listen_for_room(worker.channel)

    def _deadlines(self, model: int, requests: Ints) -> Ints:
        found = np.zeros(len(requests), np.int64)
        for number, places in _by_front(requests):
            front = self._fronts.get(number)
            if front is not None:
                found[places] = front.deadlines[model][requests[places] & _SLOT]
        return found

    def _answer(self, model: int, requests: Ints, fate: int) -> None:
        """Tell fronts what became of requests."""
        if not len(requests):
            return
        self._counts[model, fate] += len(requests)
        if self._once_lost:
            self._once_lost.difference_update(requests.tolist())
        for number, places in _by_front(requests):
            front = self._fronts.get(number)
            if front is None:
                continue
            slots = requests[places] & _SLOT
            with contextlib.suppress(Closed):
                for place in range(0, len(slots), MOST_CELLS - 3):
                    part = slots[place : place + MOST_CELLS - 3]
                    front.channel.send(np.concatenate([np.array([Kind.ANSWER, model, fate], np.int64), part]))
                self._listen_for_room(front.channel)

    # --- connections ---------------------------------------------------------------------------

    def _accept(self, _now: int, _mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            connection: socket.socket = self._listener.accept()[0]
            channel = Channel(connection)
            self._selector.register(channel, selectors.EVENT_READ, partial(self._greet, channel))

    def _greet(self, channel: Channel, now: int, _mask: int) -> None:
        """Whoever has connected says who it is."""
        try:
            for kind, content in channel.receive():
                if kind != Kind.TEXT:
                    continue
                if "front" in content:
                    self._connections += 1
                    front = _Front(channel, self._connections)
                    self._fronts[front.number] = front
                    self._selector.modify(channel, selectors.EVENT_READ, partial(self._hear_front, front))
                    self._tell(front)
                else:
                    self._welcome(channel, content, now)
        except Closed:
            self._forget(channel)

    def _welcome(self, channel: Channel, content: dict[str, Any], now: int) -> None:
        """A worker has come, and has all models."""
        worker = _Worker(channel, content["worker"])
        for served, found in zip(self._models, content["models"], strict=True):
            served.learn(found)
        if self._live is None:
            self._open()
        before = self._workers.get(worker.device)
        if before is not None:
            self._lose_worker(before, now)
        self._workers[worker.device] = worker
        self._selector.modify(channel, selectors.EVENT_READ, partial(self._hear_worker, worker))
        channel.send_text({"epoch": self._epoch})
        self._ping(worker)
        self._event(UP, now, worker.device, 0)
        for front in self._fronts.values():
            self._tell(front)

    def _open(self) -> None:
        """All is known that the pool needs."""
        most = max(len(served.table) for served in self._models)
        facts = {
            "latency": [served.table + [NEVER] * (most - len(served.table)) for served in self._models],
            "slo": [served.slo_ns for served in self._models],
            "num_devices": self._deployment.devices,
            "capacity": _CAPACITY,
            "delay_ns": round(self._deployment.delay * 1e9),
            "slack_ns": round(self._deployment.slack * 1e9),
            "guard_ns": round(self._deployment.guard * 1e9),
        }
        self._live = Live(self._deployment.policy, facts, self._log)
        self._lateness = Lateness(min((served.slo_ns - served.table[1]) // 4 for served in self._models))

    def _tell(self, front: _Front) -> None:
        """What models there are."""
        is_open = self._live is not None
        with contextlib.suppress(Closed):
            front.channel.send_text(
                {
                    "epoch": self._epoch,
                    "channel": front.number,
                    "ready": is_open and bool(self._workers),
                    "models": [served.document() for served in self._models] if is_open else [],
                }
            )

    def _hear_front(self, front: _Front, now: int, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush(front.channel)
            for kind, content in front.channel.receive():
                if kind in (Kind.SUBMIT, Kind.CANCEL):
                    rows = content.reshape(-1, 3)
                    events = np.empty((len(rows), EVENT_WIDTH), np.int64)
                    events[:, 0], events[:, 1] = ARRIVE if kind == Kind.SUBMIT else CANCEL, now
                    events[:, 2:] = rows
                    events[:, 3] |= front.number << _SLOT_BITS
                    if kind == Kind.SUBMIT:
                        self._keep_deadlines(front, rows)
                    self._events.append(events)
        except Closed:
            self._lose_front(front, now)

    def _keep_deadlines(self, front: _Front, rows: Ints) -> None:
        first = int(rows[0, 0])
        models = [first] if (rows[:, 0] == first).all() else np.unique(rows[:, 0]).tolist()
        for model in models:
            if model not in front.deadlines:
                front.deadlines[model] = np.zeros(_CAPACITY, np.int64)
            mine = rows if len(models) == 1 else rows[rows[:, 0] == model]
            front.deadlines[model][mine[:, 1]] = mine[:, 2]

    def _lose_front(self, front: _Front, now: int) -> None:
        """A front has gone: what it had in queues is cancelled, what runs is not answered."""
        self._forget(front.channel)
        del self._fronts[front.number]
        for served in self._models:
            slab_path(self._folder, self._epoch, front.number, served.number).unlink(missing_ok=True)
        if self._live is None:
            return
        pool = self._live.pool
        for queue in range(int(pool[NUM_QUEUES])):
            head, tail = int(pool[pool[HEAD] + queue]), int(pool[pool[TAIL] + queue])
            at = pool[pool[START] + queue] + (np.arange(head, tail) & pool[pool[MASK] + queue])
            requests, deadlines = pool[pool[REQUEST] + at], pool[pool[DEADLINE] + at]
            mine = requests >> _SLOT_BITS == front.number
            for request, deadline in zip(requests[mine].tolist(), deadlines[mine].tolist(), strict=True):
                self._event(CANCEL, now, self._model_of(queue), request, deadline)

    def _hear_worker(self, worker: _Worker, now: int, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush(worker.channel)
            for kind, content in worker.channel.receive():
                if kind == Kind.RAN:
                    self._finish(worker, content, now)
        except Closed:
            self._lose_worker(worker, now)

    def _finish(self, worker: _Worker, cells: Ints, now: int) -> None:
        """A worker has done a batch, or answers a ping."""
        number, begin, end, num_late = cells[:4].tolist()
        self._lateness.ends.add(now - end)
        if number == _PING:
            self._lateness.begins.add(begin - int(cells[4]))
            self._ping(worker)
            return
        batch = worker.batches.popleft()
        if batch.number != number:
            raise ServingError(f"Worker {worker.device} has done batch {number}; expected {batch.number}.")
        late, failed = cells[4 : 4 + num_late], cells[4 + num_late :]
        if len(late) or len(failed):
            is_done = np.ones(len(batch.requests), bool)
            is_done[late] = is_done[failed] = False
            self._answer(batch.model, batch.requests[late], LATE)
            self._answer(batch.model, batch.requests[failed], Fate.FAILED)
            self._answer(batch.model, batch.requests[is_done], Fate.DONE)
        else:
            self._answer(batch.model, batch.requests, Fate.DONE)
        self._batch_counts[batch.model] += 1
        if worker.batches:
            following = worker.batches[0]
            self._event(FREE, now, worker.device, following.model, len(following.requests))
        else:
            self._event(FREE, now, worker.device, 0, 0)

    def _lose_worker(self, worker: _Worker, now: int) -> None:
        """A worker has gone: what it had comes again, but for requests that were on one that has gone before."""
        self._forget(worker.channel)
        if self._workers.get(worker.device) is not worker:
            return
        del self._workers[worker.device]
        self._event(DOWN, now, worker.device)
        for batch in worker.batches:
            deadlines = self._deadlines(batch.model, batch.requests)
            for request, deadline in zip(batch.requests.tolist(), deadlines.tolist(), strict=True):
                if request in self._once_lost:
                    self._answer(batch.model, np.array([request], np.int64), Fate.FAILED)
                elif request >> _SLOT_BITS in self._fronts:
                    self._once_lost.add(request)
                    self._event(ARRIVE, now, batch.model, request, deadline)
        if not self._workers:
            for front in self._fronts.values():
                self._tell(front)

    def _ping(self, worker: _Worker) -> None:
        if worker.pings:
            worker.pings -= 1
            with contextlib.suppress(Closed):
                worker.channel.send(np.array([Kind.RUN, _PING, 0, time.monotonic_ns(), 0], np.int64))

    def _listen_for_room(self, channel: Channel) -> None:
        if channel.is_waiting:
            key = self._selector.get_key(channel)
            self._selector.modify(channel, selectors.EVENT_READ | selectors.EVENT_WRITE, key.data)

    def _flush(self, channel: Channel) -> None:
        channel.flush()
        if not channel.is_waiting:
            self._selector.modify(channel, selectors.EVENT_READ, self._selector.get_key(channel).data)

    def _forget(self, channel: Channel) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel)
        channel.close()

    # --- what is measured ----------------------------------------------------------------------

    def _adjust(self, now: int) -> None:
        """What is late in this server is known better than a second ago."""
        if self._live is None or not self._lateness.is_known:
            return
        known, late = self._deployment, self._lateness
        for given, number, measured in (
            (known.delay, DELAY, late.delay_ns()),
            (known.slack, SLACK, late.slack_ns()),
            (known.guard, GUARD, late.guard_ns()),
        ):
            if not given and measured != self._live.pool[number]:
                self._event(ADJUST, now, number, measured)

    def _report(self) -> None:
        pool = None if self._live is None else self._live.pool
        report(
            "scheduler",
            ready=bool(pool is not None and self._workers),
            workers=sorted(self._workers),
            fronts=len(self._fronts),
            queued=0 if pool is None else int(pool[NUM_QUEUED]),
            up=0 if pool is None else int(pool[NUM_UP]),
            idle=0 if pool is None else int(pool[NUM_IDLE]),
            delay_ns=0 if pool is None else int(pool[DELAY]),
            slack_ns=0 if pool is None else int(pool[SLACK]),
            guard_ns=0 if pool is None else int(pool[GUARD]),
            fates=[[model, fate, count] for (model, fate), count in self._counts.items()],
            batches=sorted(self._batch_counts.items()),
        )


def _by_front(requests: Ints) -> list[tuple[int, Any]]:
    """Numbers of fronts' connections, and where their requests are among these."""
    numbers = requests >> _SLOT_BITS
    if len(numbers) == 0:
        return []
    first = int(numbers[0])
    if (numbers == first).all():
        return [(first, slice(None))]
    return [(number, numbers == number) for number in np.unique(numbers).tolist()]


def main(arguments: list[str]) -> None:
    """Schedule until standard input ends."""
    folder, log = Path(arguments[0]), Path(arguments[1]) if arguments[1:] else None
    with reporting_errors():
        scheduler = Scheduler(folder, read_deployment(folder / "deployment.json"), log)
        try:
            scheduler.watch_input()
            while True:
                scheduler.turn()
        finally:
            scheduler.close()


if __name__ == "__main__":
    main(sys.argv[1:])
