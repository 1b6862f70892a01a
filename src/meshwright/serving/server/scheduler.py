"""The scheduler: it tracks requests and their deadlines, and its policy decides which device runs which batch.

Frontends submit requests, workers run batches (`channel.Kind`); tensors never pass through the scheduler. If a worker
ends, its requests are resubmitted to the policy, with their deadlines. The requests that the worker was computing are
then computed one by one; a request that was being computed when two workers ended is taken to be the cause, and fails.
Only the scheduler reports the outcome of a request, and it does so once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.serving.policies.pool import DROP, NEVER, RESIZE, RUN, Ints
from meshwright.serving.server import reports
from meshwright.serving.server.begun import clear_begun
from meshwright.serving.server.catalog import Catalog
from meshwright.serving.server.changes import Changes
from meshwright.serving.server.channel import Kind, MessageChannel
from meshwright.serving.server.decision_log import LogFile
from meshwright.serving.server.fleet import DeviceFleet
from meshwright.serving.server.fronts import Fronts
from meshwright.serving.server.gate import Fate
from meshwright.serving.server.lateness import Lateness
from meshwright.serving.server.live import ADJUST, AGAIN, ARRIVE, CANCEL, DOWN, EVENT_WIDTH, FREE, SCALE, UP, WAKE, Live
from meshwright.serving.server.peers import SLOT_BITS, FrontendPeer, WorkerPeer, front_of
from meshwright.serving.server.recording import RecordingControl
from meshwright.serving.server.served import read_models
from meshwright.serving.server.slabs import slab_path
from meshwright.serving.server.suspects import Suspects
from meshwright.serving.server.switchboard import Switchboard
from meshwright.serving.server.workers import PING, Workers
from meshwright.spec import Deployment, ServingError

_EVERY_NS = 1_000_000_000


class Scheduler:
    """Tracks requests and their deadlines, and lets the policy decide which device runs which batch.

    Call `turn` repeatedly. ``folder`` has the server's sockets and slabs; decisions are written to ``log``, if given.
    ``opened`` is called once, before frontends may submit requests.
    """

    def __init__(
        self, folder: Path, deployment: Deployment, log: Path | None = None, opened: Callable[[], None] = lambda: None
    ) -> None:
        self._folder, self._deployment, self._opened = folder, deployment, opened
        self._log = None if log is None else LogFile(log)
        self._epoch = time.monotonic_ns()
        for left in folder.glob("slab-*"):  # of an earlier scheduler's frontends
            left.unlink(missing_ok=True)
        clear_begun(folder)
        self._board = Switchboard(folder / "scheduler.sock", self._greet)
        self._catalog = Catalog(read_models(folder))
        self._changes = Changes(self._catalog)
        self._live: Live | None = None
        self._recorder = RecordingControl(lambda: [self._live])
        self._lateness = Lateness(NEVER)
        self._fronts = Fronts(self._board)
        self._workers = Workers(self._board)
        self._fleet = DeviceFleet(deployment)
        self._next_scale = NEVER
        self._connections = 0
        self._events: list[Ints] = []
        self._suspects = Suspects(folder)
        self._counts: Counter[tuple[str, int]] = Counter()
        self._batch_counts: Counter[str] = Counter()
        self._next_report = 0

    def turn(self) -> None:
        """Wait for the next messages, or until the policy or a report is due, and handle them."""
        moment = self._live.next_moment if self._live is not None else NEVER
        ready = self._board.wait(min(moment, self._next_report, self._next_scale) - time.monotonic_ns())
        now = time.monotonic_ns()
        if self._live is not None and moment <= now:
            self._lateness.timers.add(now - moment)
            self._event(WAKE, now)
        self._board.hear(ready, now)
        if now >= self._next_report:
            self._next_report = now + _EVERY_NS
            self._adjust(now)
            self._report()
            self._workers.look_for_stuck(now, self._deployment.server.stuck)
            self._decide(now)
            self._clear_out(now)
        if now >= self._next_scale:
            self._next_scale = now + self._fleet.every_ns
            self._event(SCALE, now, len(self._fleet.hired))
            self._decide(now)
            self._resize(now)
        self._decide(now)

    def watch_input(self) -> None:
        """Obey orders from now on; `turn` then raises SystemExit when standard input ends."""
        self._board.watch_input(self.obey)

    def close(self) -> None:
        """Close connections and complete the log."""
        self._board.close()
        if self._log is not None:
            self._log.close()

    # --- events, decisions ---------------------------------------------------------------------

    def _event(self, kind: int, now: int, *values: int) -> None:
        self._events.append(np.array([[kind, now, *values, *[0] * (EVENT_WIDTH - 2 - len(values))]], np.int64))

    def _place_of(self, model: int) -> int:
        """Return a model's place in the policy's pool."""
        assert self._live is not None
        return self._live.place_of(model)

    def _decide(self, now: int) -> None:
        """Pass pending events to the policy, and carry out its decisions."""
        while self._events and self._live is not None:
            events = self._events[0] if len(self._events) == 1 else np.concatenate(self._events)
            self._events = []
            for decisions, chosen in self._live.take(events):
                self._carry_out(self._live, decisions, chosen, now)

    def _carry_out(self, live: Live, decisions: Ints, chosen: Ints, now: int) -> None:
        for kind, target, queue, first, count, _ in decisions.tolist():
            model, requests = live.number_of(queue), chosen[first : first + count]
            if kind == RUN and target in self._workers.usable:
                parts = self._suspects.parts_of(requests)
                self._workers.run(self._workers.usable[target], self._catalog[model], parts, self._fronts, now)
            elif kind == RUN:
                # Decided in the same turn, before the policy was notified that the worker has gone.
                self._come_again(model, requests, now)
            elif kind == DROP:
                self._answer(model, requests, target)
            elif kind == RESIZE:
                self._fleet.wanted = target
            else:
                raise ServingError(
                    f"Policy {self._deployment.policy!r} aborts a running batch, which no worker can do. "
                    "Serve under another policy; the simulator supports this one."
                )

    def _answer(self, model: int, requests: Ints, fate: int, end: int = 0) -> None:
        """Report the outcome of requests to their frontends, with the end of their batch (ns; 0 without one)."""
        if not len(requests):
            return
        self._counts[self._catalog[model].name, fate] += len(requests)
        self._suspects.clear(requests)
        self._fronts.answer(model, requests, fate, end)

    # --- models ----------------------------------------------------------------------------------

    def obey(self, order: dict[str, Any], now: int) -> None:
        """Carry out an order of the supervisor: record, or change the models."""
        self._recorder.obey([order])
        if "change" in order:
            self._changes.order(order, self._staff)
            self._change(now)

    @property
    def _staff(self) -> list[WorkerPeer]:
        """Workers that are connected and not being released."""
        return [worker for device, worker in self._workers.present.items() if device in self._fleet.hired]

    def _change(self, now: int) -> None:
        """Continue a pending change of models."""
        if self._live is not None:
            self._changes.step(self._staff, partial(self._rebuild, now))

    def _clear_out(self, now: int) -> None:
        """Forget models that have left."""
        known = self._fronts.known(self._catalog.generation)
        self._fronts.forget(self._changes.clear_out(known, self._is_needed, self._staff, partial(self._rebuild, now)))

    def _is_needed(self, number: int) -> bool:
        """Return whether requests of this model are waiting or being computed."""
        assert self._live is not None
        return any(model == number for model, _, _ in self._live.waiting()) or self._workers.computes(number)

    def _rebuild(self, now: int) -> None:
        """Restart the policy with changed models; keep its measurements, and resubmit all waiting requests."""
        live = self._live
        assert live is not None
        # Pending events use places of the old pool.
        self._decide(now)
        waiting = list(live.waiting())
        self._live = self._open(live)
        for worker in self._workers.usable.values():
            self._event(UP, now, worker.device, *worker.outlook(now))
        for model, request, deadline in waiting:
            self._event(AGAIN, now, self._place_of(model), request, deadline)
        self._tell()

    def _open(self, before: Live | None = None) -> Live:
        """Make the policy's pool; everything that it needs is known now."""
        if before is None:
            reports.report("preparing", policy=self._deployment.policy)
        self._lateness.most_ns = self._catalog.most_late_ns
        self._board.pause_ns = self._catalog.pause_ns
        if self._fleet.is_scaled and before is None:
            self._next_scale = time.monotonic_ns() + self._fleet.every_ns
        return Live(
            self._deployment.policy,
            self._catalog.facts(self._deployment, self._lateness.guard_ns()),
            self._log,
            numbers=self._catalog.numbers,
            scaling=self._fleet.facts(),
            before=before,
        )

    # --- connections ---------------------------------------------------------------------------

    def _greet(self, channel: MessageChannel, content: dict[str, Any], now: int) -> None:
        """Handle the first message of a new connection, which identifies it as a frontend or a worker."""
        if "front" in content:
            self._connections += 1
            front = FrontendPeer(channel, self._connections)
            self._fronts.add(front)
            self._board.connect(channel, partial(self._hear_front, front), partial(self._lose_front, front))
            self._tell(front)
        else:
            self._welcome(channel, content, now)

    def _welcome(self, channel: MessageChannel, content: dict[str, Any], now: int) -> None:
        """Add a worker."""
        worker = WorkerPeer(channel, content["worker"], content["pid"])
        before = self._workers.present.get(worker.device)
        if before is not None:
            self._board.forget(before.channel)
            self._lose_worker(before, now)
        self._workers.present[worker.device] = worker
        self._board.connect(channel, partial(self._hear_worker, worker), partial(self._lose_worker, worker))
        channel.send_text({"epoch": self._epoch})
        worker.held.update(document["number"] for document in content["models"])
        for document in content["models"]:
            self._changes.learn(worker, document)
        self._fleet.meet(worker.device)
        if worker.device in self._fleet.hired:
            self._changes.equip(worker)
        self._employ(worker, now)

    def _employ(self, worker: WorkerPeer, now: int) -> None:
        """Start using a worker that is wanted and has all models."""
        if worker.device in self._workers.usable or worker.device not in self._fleet.hired:
            return
        if not worker.held.issuperset(self._catalog.numbers):
            return
        if self._live is None:
            self._live = self._open()
            self._opened()
        self._workers.usable[worker.device] = worker
        self._workers.ping(worker)
        self._event(UP, now, worker.device, *worker.outlook(now))
        self._tell()

    def _resize(self, now: int) -> None:
        """Start or release workers until their number is the wanted one."""
        assert self._live is not None
        while (device := self._fleet.step(self._workers.usable, self._live.pool)) is not None:
            worker = self._workers.usable.pop(device)
            self._event(DOWN, now, device)
            self._decide(now)
            if not worker.batches:
                self._fleet.drained(device)
        for worker in self._workers.present.values():
            self._employ(worker, now)

    def _tell(self, only: FrontendPeer | None = None) -> None:
        """Send the list of models to all frontends, or to one."""
        is_open = self._live is not None
        document = {
            "epoch": self._epoch,
            "generation": self._catalog.generation,
            "ready": is_open and bool(self._workers.usable),
            "models": self._catalog.documents() if is_open else [],
        }
        self._fronts.tell(document, only)

    def _hear_front(self, front: FrontendPeer, now: int) -> None:
        live = self._live
        for kind, messages in groupby(front.channel.receive(), itemgetter(0)):
            contents: list[Any] = [content for _, content in messages]
            if kind == Kind.TEXT:
                front.known = contents[-1]["known"]
            elif kind == Kind.LATE:
                self._lateness.answers.add(np.concatenate(contents))
            elif kind in (Kind.SUBMIT, Kind.CANCEL) and live is not None:
                rows = np.concatenate(contents).reshape(-1, 3)
                events = np.zeros((len(rows), EVENT_WIDTH), np.int64)
                events[:, 0], events[:, 1] = ARRIVE if kind == Kind.SUBMIT else CANCEL, now
                events[:, 2] = live.places_of(rows[:, 0])
                events[:, 3:5] = rows[:, 1:]
                events[:, 3] |= front.number << SLOT_BITS
                if kind == Kind.SUBMIT:
                    front.keep(rows)
                self._events.append(events)

    def _lose_front(self, front: FrontendPeer, now: int) -> None:
        """Remove a frontend: cancel its waiting requests; its running ones are not answered."""
        self._fronts.remove(front)
        self._suspects.forget(front.number)
        for served in self._catalog:
            slab_path(self._folder, self._epoch, front.number, served.number).unlink(missing_ok=True)
        if self._live is None:
            return
        for model, request, deadline in self._live.waiting():
            if front_of(request) == front.number:
                self._event(CANCEL, now, self._place_of(model), request, deadline)

    def _hear_worker(self, worker: WorkerPeer, now: int) -> None:
        for kind, content in worker.channel.receive():
            if kind == Kind.RAN:
                self._finish(worker, content, now)
            elif kind == Kind.TEXT:
                self._changes.learn(worker, content)
                self._employ(worker, now)
                self._change(now)

    def _finish(self, worker: WorkerPeer, cells: Ints, now: int) -> None:
        """Handle a worker's message that a batch is done, or its reply to a ping."""
        number, begin, end, num_late = cells[:4].tolist()
        if number == PING:
            self._lateness.note(int(cells[4]), begin, end, now)
            self._workers.ping(worker)
            if not worker.pings:
                self._adjust(now)
            return
        since, batch = worker.since_ns, worker.take(now)
        if batch.number != number:
            raise ServingError(
                f"Worker {worker.device} reported the end of batch {number}; expected batch {batch.number}."
            )
        late, failed = cells[4 : 4 + num_late], cells[4 + num_late :]
        for requests, fate in batch.fates(late, failed):
            self._answer(batch.model, requests, fate, end)
        self._lateness.note(since, begin, end, now, batch.expected_ns)
        self._batch_counts[self._catalog[batch.model].name] += 1
        if worker.device in self._fleet.draining:
            if not worker.batches:
                self._fleet.drained(worker.device)
            return
        if not batch.is_last:
            return
        # The time of a batch that was sent in parts says nothing about the device: use the expected one.
        taken = self._catalog[batch.model].table[batch.decided] if batch.is_part else end - begin
        if worker.batches:
            following = worker.batches[0]
            self._event(FREE, now, worker.device, self._place_of(following.model), following.decided, taken)
        else:
            self._event(FREE, now, worker.device, 0, 0, taken)

    def _lose_worker(self, worker: WorkerPeer, now: int) -> None:
        """Remove a worker: resubmit its requests, except those that have now lost their second worker."""
        if self._workers.present.get(worker.device) is not worker:
            return
        del self._workers.present[worker.device]
        self._changes.lose(worker)
        if self._workers.usable.pop(worker.device, None) is not None:
            self._event(DOWN, now, worker.device)
        elif worker.device in self._fleet.draining:
            self._fleet.drained(worker.device)
        for model, guilty, again in self._suspects.judge(worker, self._fronts.has_asked):
            self._answer(model, guilty, Fate.FAILED)
            self._come_again(model, again, now)
        if not self._workers.usable:
            self._tell()
        self._change(now)

    def _come_again(self, model: int, requests: Ints, now: int) -> None:
        """Resubmit requests whose worker has gone to the policy, with their deadlines."""
        for request, deadline in self._fronts.submitted(model, requests).tolist():
            if self._fronts.has_asked(request):
                self._event(AGAIN, now, self._place_of(model), request, deadline)

    # --- what is measured ----------------------------------------------------------------------

    def _adjust(self, now: int) -> None:
        """Update the policy's measured numbers."""
        if self._live is not None and self._lateness.is_known:
            for number, measured in self._lateness.known_better(self._deployment, self._live.pool):
                self._event(ADJUST, now, number, measured)

    def _report(self) -> None:
        pool = None if self._live is None else self._live.pool
        reports.report(
            "scheduler",
            ready=bool(pool is not None and self._workers.usable),
            workers=sorted(self._workers.usable),
            wanted=self._fleet.wanted,
            fronts=len(self._fronts),
            **self._lateness.facts(),
            **reports.pool_figures(pool),
            fates=[[model, fate, count] for (model, fate), count in self._counts.items()],
            batches=sorted(self._batch_counts.items()),
        )
