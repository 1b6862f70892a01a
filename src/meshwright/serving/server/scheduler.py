"""The scheduler: it knows of requests where they are and when they are due, and decides by its policy what runs where.

Fronts submit requests, workers run batches (`channel.Kind`); tensors never come here. What a worker that has gone had
to do comes again, with the deadlines that it had. What was computed when it went is computed one by one then, and a
request that has lost two workers is taken to be at fault. Only the scheduler says what became of a request, and it does
so once.

Run as ``python -m meshwright.serving.server.scheduler FOLDER``, where ``FOLDER`` has the deployment; ends when its
standard input does.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.serving.policies.pool import DROP, LATE, NEVER, RUN, Ints
from meshwright.serving.server import reports
from meshwright.serving.server.channel import MOST_CELLS, Channel, Closed, Kind, listen
from meshwright.serving.server.gate import Fate
from meshwright.serving.server.lateness import Lateness
from meshwright.serving.server.live import ADJUST, ARRIVE, CANCEL, DOWN, EVENT_WIDTH, FREE, UP, WAKE, Live
from meshwright.serving.server.peers import CAPACITY, SLOT_BITS, Batch, Front, Worker, by_front, deadlines_of, slots_of
from meshwright.serving.server.recording import Recorder
from meshwright.serving.server.served import Served, served_models
from meshwright.serving.server.slabs import slab_path
from meshwright.spec import Deployment, ServingError, read_deployment

_PING = -1
_EVERY_NS = 1_000_000_000


class Scheduler:
    """See the module's docstring; `turn` does what there is to do."""

    def __init__(self, folder: Path, deployment: Deployment, log: Path | None = None) -> None:
        self._folder, self._deployment = folder, deployment
        self._log = None if log is None else log.open("wb")
        self._epoch = time.monotonic_ns()
        self._selector = selectors.SelectSelector()
        for left in folder.glob("slab-*"):  # of fronts that ended with the scheduler before
            left.unlink(missing_ok=True)
        self._listener = listen(folder / "scheduler.sock")
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._models: list[Served] = served_models(deployment)
        self._live: Live | None = None
        self._lateness = Lateness(NEVER)
        self._fronts: dict[int, Front] = {}
        self._workers: dict[int, Worker] = {}
        self._connections = 0
        self._batches = 0
        self._events: list[Ints] = []
        self._once_lost: set[int] = set()
        self._counts: Counter[tuple[int, int]] = Counter()
        self._batch_counts: Counter[int] = Counter()
        self._next_report = 0

    @property
    def is_open(self) -> bool:
        """Has a worker been there?"""
        return self._live is not None

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
            self._look_for_stuck(now)
        while self._events and self._live is not None:
            events = self._events[0] if len(self._events) == 1 else np.concatenate(self._events)
            self._events = []
            for decisions, chosen in self._live.take(events):
                self._carry_out(self._live, decisions, chosen, now)

    def watch_input(self) -> None:
        """From now on, `turn` ends with SystemExit when standard input does."""
        orders, recorder = reports.Orders(), Recorder(lambda: [self._live])
        self._selector.register(sys.stdin, selectors.EVENT_READ, lambda _now, _mask: recorder.obey(orders.read()))

    def close(self) -> None:
        """Close what is open; the log is complete then."""
        self._listener.close()
        sides: list[Front | Worker] = [*self._fronts.values(), *self._workers.values()]
        for side in sides:
            side.channel.close()
        if self._log is not None:
            self._log.close()

    # --- events, decisions ---------------------------------------------------------------------

    def _event(self, kind: int, now: int, *values: int) -> None:
        self._events.append(np.array([[kind, now, *values, *[0] * (EVENT_WIDTH - 2 - len(values))]], np.int64))

    def _carry_out(self, live: Live, decisions: Ints, chosen: Ints, now: int) -> None:
        for kind, target, queue, first, count, _ in decisions.tolist():
            model, requests = live.model_of(queue), chosen[first : first + count]
            if kind == RUN and target in self._workers:
                self._run(self._workers[target], model, requests, now)
            elif kind == RUN:
                # It was decided before the policy was told, in the same turn, that the worker has gone.
                self._come_again(model, requests, now)
            elif kind == DROP:
                self._answer(model, requests, target)
            else:
                raise ServingError(
                    f"Policy {self._deployment.policy!r} gives a batch up while it runs, which no worker can do. "
                    "Serve by another one; the simulator knows this one."
                )

    def _run(self, worker: Worker, model: int, requests: Ints, now: int) -> None:
        parts = Batch.parts_of(requests, self._once_lost)
        for place, part in enumerate(parts):
            expected = self._models[model].table[len(part)]
            is_last = place == len(parts) - 1
            worker.give(Batch(self._batches, model, part, len(requests), expected, is_last), now)
            head = np.array([Kind.RUN, self._batches, model, expected, len(part)], np.int64)
            self._batches += 1
            with contextlib.suppress(Closed):  # seen when it is read
                worker.channel.send(np.concatenate([head, part, deadlines_of(model, part, self._fronts)]))
                self._listen_for_room(worker.channel)

    def _answer(self, model: int, requests: Ints, fate: int) -> None:
        """Tell fronts what became of requests."""
        if not len(requests):
            return
        self._counts[model, fate] += len(requests)
        if self._once_lost:
            self._once_lost.difference_update(requests.tolist())
        for number, places in by_front(requests):
            front = self._fronts.get(number)
            if front is None:
                continue
            slots = slots_of(requests[places])
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
        """Whoever has connected says who it is; what it says after that is for another function."""
        try:
            for kind, content in channel.receive():
                if kind != Kind.TEXT:
                    self._forget(channel)
                elif "front" in content:
                    self._connections += 1
                    front = Front(channel, self._connections)
                    self._fronts[front.number] = front
                    self._selector.modify(channel, selectors.EVENT_READ, partial(self._hear_front, front))
                    self._tell(front)
                else:
                    self._welcome(channel, content, now)
                return
        except Closed:
            self._forget(channel)

    def _welcome(self, channel: Channel, content: dict[str, Any], now: int) -> None:
        """A worker has come, and has all models."""
        worker = Worker(channel, content["worker"], content["pid"])
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
            "capacity": CAPACITY,
            "delay_ns": round(self._deployment.delay * 1e9),
            "slack_ns": round(self._deployment.slack * 1e9),
            "guard_ns": round(self._deployment.guard * 1e9),
        }
        reports.report("preparing", policy=self._deployment.policy)
        self._live = Live(self._deployment.policy, facts, self._log)
        self._lateness = Lateness(min((served.slo_ns - served.table[1]) // 4 for served in self._models))

    def _tell(self, front: Front) -> None:
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

    def _hear_front(self, front: Front, now: int, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush(front.channel)
            for kind, content in front.channel.receive():
                if kind in (Kind.SUBMIT, Kind.CANCEL):
                    rows = content.reshape(-1, 3)
                    events = np.zeros((len(rows), EVENT_WIDTH), np.int64)
                    events[:, 0], events[:, 1] = ARRIVE if kind == Kind.SUBMIT else CANCEL, now
                    events[:, 2:5] = rows
                    events[:, 3] |= front.number << SLOT_BITS
                    if kind == Kind.SUBMIT:
                        front.keep_deadlines(rows)
                    self._events.append(events)
        except Closed:
            self._lose_front(front, now)

    def _lose_front(self, front: Front, now: int) -> None:
        """A front has gone: what it had in queues is cancelled, what runs is not answered."""
        self._forget(front.channel)
        del self._fronts[front.number]
        self._once_lost = {request for request in self._once_lost if request >> SLOT_BITS != front.number}
        for served in self._models:
            slab_path(self._folder, self._epoch, front.number, served.number).unlink(missing_ok=True)
        if self._live is None:
            return
        for model, request, deadline in self._live.waiting():
            if request >> SLOT_BITS == front.number:
                self._event(CANCEL, now, model, request, deadline)

    def _hear_worker(self, worker: Worker, now: int, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush(worker.channel)
            for kind, content in worker.channel.receive():
                if kind == Kind.RAN:
                    self._finish(worker, content, now)
        except Closed:
            self._lose_worker(worker, now)

    def _finish(self, worker: Worker, cells: Ints, now: int) -> None:
        """A worker has done a batch, or answers a ping."""
        number, begin, end, num_late = cells[:4].tolist()
        taken = end - begin
        self._lateness.ends.add(now - end)
        if number == _PING:
            self._lateness.begins.add(begin - int(cells[4]))
            self._ping(worker)
            if not worker.pings:
                self._adjust(now)
            return
        batch = worker.take(now)
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
        if not batch.is_last:
            return
        if batch.is_part:
            # A device is not slow for what it was not asked to do at once.
            taken = self._models[batch.model].table[batch.decided]
        if worker.batches:
            following = worker.batches[0]
            self._event(FREE, now, worker.device, following.model, following.decided, taken)
        else:
            self._event(FREE, now, worker.device, 0, 0, taken)

    def _lose_worker(self, worker: Worker, now: int) -> None:
        """A worker has gone: what it had comes again, but for what it was at and another one before it, too."""
        self._forget(worker.channel)
        if self._workers.get(worker.device) is not worker:
            return
        del self._workers[worker.device]
        self._event(DOWN, now, worker.device)
        for place, batch in enumerate(worker.batches):
            requests = batch.requests
            if place == 0:
                again = np.array([request not in self._once_lost for request in requests.tolist()], bool)
                self._answer(batch.model, requests[~again], Fate.FAILED)
                requests = requests[again]
                self._once_lost.update(requests.tolist())
            self._come_again(batch.model, requests, now)
        if not self._workers:
            for front in self._fronts.values():
                self._tell(front)

    def _come_again(self, model: int, requests: Ints, now: int) -> None:
        """Requests that nobody computes any more are put to the policy again, by their deadlines."""
        deadlines = deadlines_of(model, requests, self._fronts)
        for request, deadline in zip(requests.tolist(), deadlines.tolist(), strict=True):
            if request >> SLOT_BITS in self._fronts:
                self._event(ARRIVE, now, model, request, deadline)

    def _look_for_stuck(self, now: int) -> None:
        """A worker whose model does not return cannot be told anything: the supervisor kills it."""
        limit_ns = round(self._deployment.server.stuck * 1e9)
        for worker in self._workers.values():
            if taken := worker.stuck_ns(now, limit_ns):
                reports.report("stuck", worker=worker.device, pid=worker.pid, seconds=taken / 1e9)

    def _ping(self, worker: Worker) -> None:
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
        if self._live is not None and self._lateness.is_known:
            for number, measured in self._lateness.known_better(self._deployment, self._live.pool):
                self._event(ADJUST, now, number, measured)

    def _report(self) -> None:
        pool = None if self._live is None else self._live.pool
        reports.report(
            "scheduler",
            ready=bool(pool is not None and self._workers),
            workers=sorted(self._workers),
            fronts=len(self._fronts),
            **reports.pool_figures(pool),
            fates=[[model, fate, count] for (model, fate), count in self._counts.items()],
            batches=sorted(self._batch_counts.items()),
        )


def main(arguments: list[str]) -> None:
    """Schedule until standard input ends."""
    folder, log = Path(arguments[0]), Path(arguments[1]) if arguments[1:] else None
    with reports.reporting_errors():
        scheduler = Scheduler(folder, read_deployment(folder / "deployment.json"), log)
        try:
            scheduler.watch_input()
            while not scheduler.is_open:
                scheduler.turn()
            reports.keep_what_is_there()
            while True:
                scheduler.turn()
        finally:
            scheduler.close()


if __name__ == "__main__":
    main(sys.argv[1:])
