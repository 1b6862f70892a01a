"""A clock without a device: it makes each call once and says what it was told to."""

import time
from contextlib import nullcontext

import torch

from meshwright.measurement import Sample


class FakeClock:
    """Every call takes ``seconds``, or what the function of that name says of its number; calls are really made."""

    def __init__(self, device="cpu", seconds=1e-5, cache_bytes=0):
        self.device, self.cache_bytes = torch.device(device), cache_bytes
        self._seconds, self.timed, self.finished, self.released = seconds, [], 0, 0

    def side(self):
        return nullcontext()

    def time(self, calls):
        for call in calls:
            call()
        self.timed.append(len(calls))
        return Sample(seconds=self._taken(), spread=0.02, num_samples=10 * len(calls))

    def step(self, call):
        call()
        self.timed.append(1)
        return Sample(seconds=self._taken(), spread=0.02, num_samples=10, issue_s=1e-4)

    def loop(self, call, count):
        call()
        return 6e-6

    def finish(self):
        self.finished += 1

    def release(self):
        self.released += 1

    def _taken(self):
        return self._seconds(len(self.timed)) if callable(self._seconds) else self._seconds


class HostClock(FakeClock):
    """Takes the processor for the device: each call is timed as it runs."""

    def time(self, calls):
        for call in calls:
            call()
        self.timed.append(len(calls))
        start = time.perf_counter()
        for call in calls:
            call()
        return Sample(seconds=(time.perf_counter() - start) / len(calls), spread=0.0, num_samples=len(calls))
