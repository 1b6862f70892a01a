"""Requests that a worker was lost with: who is at fault when another one goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from meshwright.serving.policies.pool import Ints
from meshwright.serving.server.begun import take_begun
from meshwright.serving.server.peers import WorkerPeer, front_of


class Suspects:
    """Those that a worker had begun when it went; who loses a second one so is taken to be at fault.

    ``folder``: where workers note what they begin (`begun`).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._requests: set[int] = set()

    def parts_of(self, requests: Ints) -> list[Ints]:
        """A batch as it is to be computed: a suspect goes alone, so that others are not harmed, and after them."""
        if not self._requests:
            return [requests]
        alone = self._among(requests)
        parts = [requests[~alone]] if not alone.all() else []
        return parts + [requests[place : place + 1] for place in np.flatnonzero(alone)]

    def judge(self, worker: WorkerPeer, is_awaited: Callable[[int], bool]) -> Iterator[tuple[int, Ints, Ints]]:
        """What a worker that has gone had to do: model, requests at fault, and those that are to come again.

        Only what it had begun can have harmed it, and is suspected from now on, if anybody still waits for it.
        """
        begun = take_begun(self._folder, worker.pid)
        for place, batch in enumerate(worker.batches):
            # One may be begun although ends of those before it have not been heard of.
            if begun == batch.number or (begun is None and place == 0):
                guilty = self._among(batch.requests)
                again = batch.requests[~guilty]
                self._requests.update(filter(is_awaited, again.tolist()))
                yield batch.model, batch.requests[guilty], again
            else:
                yield batch.model, batch.requests[:0], batch.requests

    def clear(self, requests: Ints) -> None:
        """These are answered."""
        if self._requests:
            self._requests.difference_update(requests.tolist())

    def forget(self, front: int) -> None:
        """This front's connection has gone, and nobody waits for its requests."""
        self._requests = {request for request in self._requests if front_of(request) != front}

    def _among(self, requests: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return np.array([request in self._requests for request in requests.tolist()], bool)
