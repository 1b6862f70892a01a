"""The workers that are connected to a scheduler, and those of them that have all models and get batches."""

from __future__ import annotations

import contextlib
import time

import numpy as np

from meshwright.serving.policies.pool import Ints
from meshwright.serving.server import reports
from meshwright.serving.server.channel import Closed, Kind
from meshwright.serving.server.fronts import Fronts
from meshwright.serving.server.peers import WorkerBatch, WorkerPeer
from meshwright.serving.server.served import Served
from meshwright.serving.server.switchboard import Switchboard

# The number of a message without a batch, which measures the delay to a worker.
PING = -1


class Workers:
    """Workers by device: ``present`` are all connected workers, ``usable`` those that get batches."""

    def __init__(self, board: Switchboard) -> None:
        self.present: dict[int, WorkerPeer] = {}
        self.usable: dict[int, WorkerPeer] = {}
        self._board = board
        self._batches = 0

    def run(self, worker: WorkerPeer, served: Served, parts: list[Ints], fronts: Fronts, now: int) -> None:
        """Send a batch to a worker, in parts that the worker computes one after the other."""
        decided = sum(len(part) for part in parts)
        for place, part in enumerate(parts):
            expected = served.table[len(part)]
            is_last = place == len(parts) - 1
            worker.give(WorkerBatch(self._batches, served.number, part, decided, expected, is_last), now)
            head = np.array([Kind.RUN, self._batches, served.number, expected, len(part)], np.int64)
            self._batches += 1
            with contextlib.suppress(Closed):  # noticed by the reader
                worker.channel.send(np.concatenate([head, part, fronts.deadlines_of(served.number, part)]))
                self._board.listen_for_room(worker.channel)

    def ping(self, worker: WorkerPeer) -> None:
        """Send a message without a batch that measures the delay to a worker, unless enough have been sent."""
        if worker.pings:
            worker.pings -= 1
            with contextlib.suppress(Closed):
                worker.channel.send(np.array([Kind.RUN, PING, 0, time.monotonic_ns(), 0], np.int64))

    def computes(self, model: int) -> bool:
        """Return whether any worker has a batch of a model, given by number."""
        return any(batch.model == model for worker in self.present.values() for batch in worker.batches)

    def look_for_stuck(self, now: int, limit_s: float) -> None:
        """Report workers that have computed a batch for too long, at least ``limit_s``; the supervisor kills them."""
        for worker in self.present.values():
            if taken := worker.stuck_ns(now, round(limit_s * 1e9)):
                reports.report("stuck", worker=worker.device, pid=worker.pid, seconds=taken / 1e9)
