"""Suspects: requests that were being computed when a worker ended, and so may be the cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from meshwright.serving.policies.pool import Ints
from meshwright.serving.server.begun import take_begun
from meshwright.serving.server.peers import WorkerPeer, front_of


class Suspects:
    """Requests that a worker was computing when it ended.

    If another worker ends while it computes such a request, the request is taken to be the cause. ``folder``: where
    workers record which batches they start (`begun`).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._requests: set[int] = set()

    def parts_of(self, requests: Ints) -> list[Ints]:
        """Divide a batch into parts: first the requests that are not suspects together, then each suspect alone."""
        if not self._requests:
            return [requests]
        alone = self._among(requests)
        parts = [requests[~alone]] if not alone.all() else []
        return parts + [requests[place : place + 1] for place in np.flatnonzero(alone)]

    def judge(self, worker: WorkerPeer, is_awaited: Callable[[int], bool]) -> Iterator[tuple[int, Ints, Ints]]:
        """Handle the end of a worker: yield for each of its batches model, requests at fault, requests to resubmit.

        Of the batch that it was computing, the requests that were suspects already are at fault. The others become
        suspects if their clients still wait (``is_awaited``), and are resubmitted, as are all requests of its other
        batches.
        """
        begun = take_begun(self._folder, worker.pid)
        for place, batch in enumerate(worker.batches):
            # The started batch need not be the first: reports of earlier ends may have been lost.
            if begun == batch.number or (begun is None and place == 0):
                guilty = self._among(batch.requests)
                again = batch.requests[~guilty]
                self._requests.update(filter(is_awaited, again.tolist()))
                yield batch.model, batch.requests[guilty], again
            else:
                yield batch.model, batch.requests[:0], batch.requests

    def clear(self, requests: Ints) -> None:
        """Remove answered requests from the suspects."""
        if self._requests:
            self._requests.difference_update(requests.tolist())

    def forget(self, front: int) -> None:
        """Forget the requests of a frontend that has disconnected, given by the number of its connection."""
        self._requests = {request for request in self._requests if front_of(request) != front}

    def _among(self, requests: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return np.array([request in self._requests for request in requests.tolist()], bool)
