"""Add, reload and remove models while a server runs. A change takes effect as a whole, or not at all.

1. One worker loads the new models while it continues to compute batches. If loading ends its process, the other
   workers are not affected.
2. Then the other workers load them. When all have, the scheduler adds the models to its policy's pool and notifies
   the frontends.
3. From then on, models to remove get no new requests. They are forgotten when all their requests are answered.

A model that is reloaded is therefore served in its former version until all workers have the new one. If the new
version cannot be loaded, nothing changes.
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
    """Carries out one change of models at a time: orders workers to load and forget models, and handles replies."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._coming: dict[int, Served] = {}
        self._leaving: list[int] = []
        self._asked: int | None = None
        self._error: str | None = None
        self._first: WorkerPeer | None = None
        self._is_tried = False

    def order(self, document: dict[str, Any], workers: Iterable[WorkerPeer]) -> None:
        """Start or abort a change, as the supervisor's ``document`` orders.

        To start: its number ``change``, the models to ``load``, and the numbers of models that ``leave``. To abort: its
        number ``change``, and the reason ``give_up``.
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
        """Order a worker to load the models that it lacks, and to forget those that are no longer needed."""
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
        """Handle a worker's report that it has loaded a model, or that loading has failed."""
        number = document["number"]
        worker.loading.discard(number)
        text = document.get("error")
        if text is None:
            text = self._note(number, document)
            if text is None:
                worker.held.add(number)
            else:
                # The worker runs the model, but it cannot be served.
                _ask(worker, [], [number])
        if text is not None and number in self._coming:
            self._error = text
        elif text is not None and number in self._catalog.numbers:
            # The other workers have it: this one is of no use without it.
            worker.held.discard(number)
            report("broken", worker=worker.device, pid=worker.pid, text=text)
        elif number not in self._coming and number not in self._catalog.numbers:
            self.equip(worker)  # the change was given up meanwhile

    def lose(self, worker: WorkerPeer) -> None:
        """Handle the end of a worker: the change fails if this worker was the first to load the new models."""
        if worker is self._first and not self._is_tried and self._coming:
            names = ", ".join(served.name for served in self._coming.values())
            self._error = (
                f"The worker that was the first to load {names} has ended, so nothing was changed. Try again if the "
                "worker ended for another reason."
            )

    def _give_up(self, document: dict[str, Any], workers: Iterable[WorkerPeer]) -> None:
        if document["change"] != self._asked:
            report("refused", change=document["change"], text=document["give_up"])
            return
        self._error = document["give_up"]
        for worker in workers:
            if worker.loading & self._coming.keys():
                # A worker loads in its only thread for this, which is blocked.
                report("broken", worker=worker.device, pid=worker.pid, text=document["give_up"])

    def step(self, workers: Iterable[WorkerPeer], rebuild: Callable[[], None]) -> None:
        """Complete the change if all workers have the new models; give it up if one of them could not load them.

        ``rebuild`` restarts the policy with the changed models.
        """
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
        """Forget leaving models that no frontend uses any more and that have no unanswered requests.

        ``known`` is the lowest generation that any frontend has confirmed; ``is_needed`` returns whether a model has
        unanswered requests. Returns the numbers of the forgotten models.
        """
        gone = [number for number in self._catalog.leavers(known) if not is_needed(number)]
        if gone:
            self._catalog.forget(gone)
            rebuild()
            for worker in workers:
                self.equip(worker)
        return gone

    def _note(self, number: int, document: dict[str, Any]) -> str | None:
        """Record what a worker has found out about a model; return what is wrong with it, or None."""
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
