"""Messages of a controlled run: queues of a TCPStore, and the clock that reports timers and sends beats (`Clock`)."""

from __future__ import annotations

import contextlib
import heapq
import json
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

REPORTS = "reports"
# Queues of a rank beside those of its streams: of data that others send to it; of abandoned handles, deaths, beats and
# the end.
ARRIVALS, CONTROL = "arrivals", "control"
ALIVE, FAILED, ENDED, TAKEN_FOR_DEAD = "alive", "failed", "ended", "taken for dead"
# Beats that a rank may miss before it is taken for dead.
MISSED_BEATS = 4
FOREVER = timedelta(days=365)
_PS_PER_NS = 1000
# The store takes no shorter time limit.
LEAST_S = 0.001


def queue_of(rank: int, stream: str, number: int = 0) -> str:
    """Return the name of the queue of a rank's stream, which has a number if it is not the first one."""
    return f"{rank}/{stream}/{number}" if number else f"{rank}/{stream}"


def connect(store: TCPStore) -> TCPStore:
    """Return a client of the same store with a connection of its own: a client that waits blocks its other users."""
    return store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it


def pop(store: TCPStore, name: str) -> Any:
    """Wait for the next message of a queue, and return it. Raises DistError if the store's time limit has passed."""
    while True:
        try:
            return json.loads(store.queue_pop(name))
        except dist.QueueEmptyError:  # torch 2.13: a wait may end although nothing is there
            time.sleep(LEAST_S)


class Clock:
    """The clock of a run: a thread reports timers, and sends beats to all ranks; it reports those that are expected.

    A rank that is silent for ``silence_s`` has missed `MISSED_BEATS` beats.
    """

    def __init__(self, store: TCPStore, num_ranks: int, silence_s: float) -> None:
        self._store, self._living, self._beat_s = store, set(range(num_ranks)), silence_s / MISSED_BEATS
        self._is_expected = True
        self._timers: list[tuple[int, int, int]] = []
        self._num_set, self._is_over = 0, False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._start_ns = time.perf_counter_ns()

    def now_ps(self) -> int:
        """Return the time since the clock was made, in ps."""
        return (time.perf_counter_ns() - self._start_ns) * _PS_PER_NS

    def start(self) -> None:
        """Begin to report."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def set(self, at_ps: int, number: int) -> None:
        """Report the timer ``number`` at the time ``at_ps`` (ps)."""
        with self._changed:
            heapq.heappush(self._timers, (at_ps, self._num_set, number))
            self._num_set += 1
            self._changed.notify_all()

    def forget(self, rank: int) -> None:
        """Send no more beats to a rank."""
        with self._changed:
            self._living.discard(rank)

    def expect_beat(self) -> None:
        """Report the next beat, too: the one before has been counted."""
        with self._changed:
            self._is_expected = True

    def _follow(self) -> None:
        with contextlib.suppress(dist.DistError), self._changed:
            beat = time.monotonic()
            while not self._is_over:
                if time.monotonic() >= beat:
                    beat = time.monotonic() + self._beat_s
                    if self._is_expected:
                        self._is_expected = False
                        self._store.queue_push(REPORTS, json.dumps({"beat": None}))
                    for rank in self._living:
                        self._store.queue_push(queue_of(rank, CONTROL), json.dumps(ALIVE))
                while self._timers and self._timers[0][0] <= self.now_ps():
                    self._store.queue_push(REPORTS, json.dumps({"timer": heapq.heappop(self._timers)[2]}))
                due_s = (self._timers[0][0] - self.now_ps()) / 1e12 if self._timers else self._beat_s
                self._changed.wait(max(0.0, min(due_s, beat - time.monotonic())))
