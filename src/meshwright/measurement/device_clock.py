"""Times on a device that computes what the host issues: the device's time, and separately the host's time.

    time     calls are captured in a CUDA graph, so that the host does not count, and the graph is replayed between
             two events: seconds of a call; calls that cannot be captured (they read a value of the device, or make
             outputs of a size that their values determine) run between two events after a kernel that only waits, so
             that they are issued by the time the device reaches them
    step     the same with events alone, and the seconds in which the host issues the call

Everything runs on one stream other than the default one, preparation too: autograd runs a backward where its forward
ran, and a graph captures one stream.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

Call = Callable[[], object]

# Calls in one graph: many short ones, so that the start of the graph does not count.
_SHORT_S, _SHORT_CALLS, _LONG_CALLS = 2e-3, 20, 3
# No kernel takes less; a graph without a kernel takes a part of the time of two events.
_NO_KERNEL_S = 5e-7
# The longest duration of a kernel that only waits.
_MOST_DELAY_S = 0.5
_EMPTY = "CUDA Graph is empty"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Median seconds of a call on the device, (p90 - p10) / median, and the number of timed calls.

    ``issue_s``: the host's time to issue one, 0 if not measured.
    """

    seconds: float
    spread: float
    num_samples: int
    issue_s: float = 0.0


class DeviceClock(Protocol):
    """Times calls on one device. ``cache_bytes`` is the size of its last-level cache."""

    device: torch.device
    cache_bytes: int

    def side(self) -> AbstractContextManager[Any]:
        """In the block, calls are issued to the stream that is timed."""

    def time(self, calls: Sequence[Call]) -> Sample:
        """Seconds of a call, from several calls of the same work on memory of their own, in turns."""

    def step(self, call: Call) -> Sample:
        """Seconds of a long call, and those of issuing it."""

    def loop(self, call: Call, count: int) -> float:
        """Seconds of the host per call, over ``count`` calls, without a wait between them."""

    def finish(self) -> None:
        """Wait until the device is done."""

    def release(self) -> None:
        """Release unused memory."""


class CudaClock:
    """The clock of a CUDA device."""

    def __init__(self, device: torch.device, repeats: int = 10) -> None:
        self.device = device
        self.cache_bytes = int(torch.cuda.get_device_properties(device).L2_cache_size)
        self._repeats = repeats
        self._stream: Any = torch.cuda.Stream(device)

    def side(self) -> AbstractContextManager[Any]:
        """In the block, calls are issued to the stream that is timed."""
        self._stream.wait_stream(torch.cuda.default_stream(self.device))
        stream: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return stream

    def time(self, calls: Sequence[Call]) -> Sample:
        """Seconds of a call by replays of a graph, by events if it cannot be captured."""
        with self.side():
            for call in calls:
                call()
            self.finish()
            start = time.perf_counter()
            calls[0]()
            self.finish()
            count = _SHORT_CALLS if time.perf_counter() - start < _SHORT_S else _LONG_CALLS
            count = max(count // len(calls), 1) * len(calls)

            def many() -> None:
                for place in range(count):
                    calls[place % len(calls)]()

            graph = self._captured(many)
            if graph == _EMPTY:
                return Sample(seconds=0.0, spread=0.0, num_samples=count)
            samples = self._replayed(graph) if graph is not None else self._behind(many)[0]
            return _summarise(samples, count)

    def step(self, call: Call) -> Sample:
        """Seconds of a long call by events, and those of issuing it."""
        with self.side():
            call()
            samples, issued = self._behind(call)
            taken = _summarise(samples, 1)
            return Sample(
                seconds=taken.seconds,
                spread=taken.spread,
                num_samples=taken.num_samples,
                issue_s=float(np.median(issued)),
            )

    def loop(self, call: Call, count: int) -> float:
        """Seconds of the host per call, over ``count`` calls, without a wait between them."""
        begun = time.perf_counter()
        for _ in range(count):
            call()
        seconds = (time.perf_counter() - begun) / count
        self.finish()
        return seconds

    def finish(self) -> None:
        """Wait until the device is done."""
        torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Release unused memory."""
        torch.cuda.empty_cache()

    def _captured(self, call: Call) -> Any:
        """A graph of a call; `_EMPTY` if it starts no kernel, None if it cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                with torch.cuda.graph(graph, stream=self._stream):
                    call()
        except RuntimeError:
            self.finish()
            return None
        return _EMPTY if any(_EMPTY in str(item.message) for item in told) else graph

    def _replayed(self, graph: Any) -> list[float]:
        graph.replay()
        self.finish()
        samples = []
        for _ in range(self._repeats):
            start, end = self._events()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) / 1e3)
        return samples

    def _behind(self, call: Call) -> tuple[list[float], list[float]]:
        """Seconds of the device and of the host for each of some calls after a kernel that waits."""
        samples: list[float] = []
        issued: list[float] = []
        for _ in range(self._repeats):
            self.finish()
            start, end = self._events()
            # A GPU runs at most some 2e9 cycles per second.
            delay_s = min(2 * max(issued, default=_MOST_DELAY_S / 4), _MOST_DELAY_S)
            torch.cuda._sleep(int(2e9 * delay_s))
            start.record()
            begun = time.perf_counter()
            call()
            issued.append(time.perf_counter() - begun)
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) / 1e3)
        return samples, issued

    def _events(self) -> tuple[Any, Any]:
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _summarise(samples: Sequence[float], count: int) -> Sample:
    low, middle, high = (float(figure) for figure in np.percentile(samples, (10, 50, 90)) / count)
    if middle < _NO_KERNEL_S:
        return Sample(seconds=0.0, spread=0.0, num_samples=len(samples) * count)
    return Sample(seconds=middle, spread=(high - low) / middle, num_samples=len(samples) * count)
