"""Models come and go while a server serves: a change is made as a whole, or not at all.

One worker first loads what comes, beside the batches that it computes: should the process end by that, the others go
on. Then all others do, and when all have, the scheduler takes the models into its policy's pool and tells fronts. What
goes gets no more requests from then on, and is forgotten when all that it had are answered. So a model that is loaded
again serves by its former version up to the moment at which the new one can take over, and if that cannot be loaded,
nothing has changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from meshwright.serving.server.catalog import Catalog
from meshwright.serving.server.channel import Closed
from meshwright.serving.server.peers import WorkerPeer
from meshwright.serving.server.reports import report
from meshwright.serving.server.served import Served, read_identity
from meshwright.spec import ServingError


class Changes:
    """What workers are asked to load and to forget; of changes, there is one at a time."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._coming: dict[int, Served] = {}
        self._leaving: list[int] = []
        self._asked: int | None = None
        self._error: str | None = None
        self._first: WorkerPeer | None = None
        self._is_tried = False

    def order(self, document: dict[str, Any], workers: Iterable[WorkerPeer]) -> None:
        """Begin the change that a supervisor orders: models to ``load``, and numbers of those that ``leave``.

        Or end it, with a sentence why: ``give_up``.
        """
        if "give_up" in document:
            self._give_up(document, workers)
            return
        self._asked, self._error = document["change"], None
        self._coming = {one.number: one for one in map(read_identity, document["load"])}
        self._leaving = document["leave"]
        self._first, self._is_tried = None, False
        for worker in workers:
            self.equip(worker)

    def equip(self, worker: WorkerPeer) -> None:
        """Ask a worker for what it lacks, and to forget what nobody needs."""
        self._first = self._first or worker
        coming = self._coming if self._is_tried or worker is self._first else {}
        needed = {one.number: one for one in self._catalog} | coming
        missing = [one.identity() for number, one in needed.items() if number not in worker.held | worker.loading]
        extra = sorted(worker.held - needed.keys())
        worker.held -= set(extra)
        worker.loading |= {item["number"] for item in missing}
        if missing or extra:
            _ask(worker, missing, extra)

    def learn(self, worker: WorkerPeer, document: dict[str, Any]) -> None:
        """A worker has loaded a model, or could not."""
        number = document["number"]
        worker.loading.discard(number)
        text = document.get("error")
        if text is None:
            text = self._note(number, document)
            if text is None:
                worker.held.add(number)
            else:
                # It runs, but cannot be served.
                _ask(worker, [], [number])
        if text is not None and number in self._coming:
            self._error = text
        elif text is not None and number in self._catalog.numbers:
            # It is there for others: this worker is of no use without it.
            worker.held.discard(number)
            report("broken", worker=worker.device, pid=worker.pid, text=text)
        elif number not in self._coming and number not in self._catalog.numbers:
            self.equip(worker)  # given up meanwhile

    def lose(self, worker: WorkerPeer) -> None:
        """A worker has gone; perhaps what it was the first to load is why."""
        if worker is self._first and not self._is_tried and self._coming:
            names = ", ".join(served.name for served in self._coming.values())
            self._error = f"The first worker that loaded {names} ended. Ask again, if that has another reason."

    def _give_up(self, document: dict[str, Any], workers: Iterable[WorkerPeer]) -> None:
        if document["change"] != self._asked:
            report("refused", change=document["change"], text=document["give_up"])
            return
        self._error = document["give_up"]
        for worker in workers:
            if worker.loading & self._coming.keys():
                # Whoever loads has one thread for it, which is lost.
                report("broken", worker=worker.device, pid=worker.pid, text=document["give_up"])

    def step(self, workers: Iterable[WorkerPeer], rebuild: Callable[[], None]) -> None:
        """Make the change if all workers have what comes; give it up if one cannot."""
        if self._asked is None:
            return
        workers = list(workers)
        if not self._is_tried and self._first is not None and self._coming.keys() <= self._first.held:
            self._is_tried = True
            for worker in workers:
                self.equip(worker)
        if self._error is not None:
            self._coming = {}
            for worker in workers:
                self.equip(worker)
            report("refused", change=self._asked, text=self._error)
        elif workers and all(self._coming.keys() <= worker.held for worker in workers):
            self._catalog.change(self._coming.values(), self._leaving)
            rebuild()
            report("changed", change=self._asked)
            self._coming = {}
        else:
            return
        self._asked = None

    def clear_out(
        self, known: int, is_needed: Callable[[int], bool], workers: Iterable[WorkerPeer], rebuild: Callable[[], None]
    ) -> list[int]:
        """Forget models that leave, which no front asks any more and of which nothing is to be answered; which."""
        gone = [number for number in self._catalog.leavers(known) if not is_needed(number)]
        if gone:
            self._catalog.forget(gone)
            rebuild()
            for worker in workers:
                self.equip(worker)
        return gone

    def _note(self, number: int, document: dict[str, Any]) -> str | None:
        """Remember what a worker has found out about a model; what is wrong with it."""
        served = self._coming.get(number)
        if served is None and number in self._catalog.numbers:
            served = self._catalog[number]
        if served is None:
            return None
        try:
            served.learn(document)
        except ServingError as error:
            return str(error)
        return None


def _ask(worker: WorkerPeer, load: list[dict[str, Any]], forget: list[int]) -> None:
    with contextlib.suppress(Closed):  # seen when it is read
        worker.channel.send_text({"load": load, "forget": forget})
