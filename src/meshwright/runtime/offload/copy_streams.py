"""The host's work in parallel with a rank's computations: one thread for each host stream of the program.

A thread executes the instructions of its stream in order. An instruction waits for its dependencies: instructions of
other host streams, computations and marks that the executor reports by `HostStreams.happened`, and asynchronous works
that it reports by `HostStreams.issued`. The thread that issues computations is blocked only when it needs a result. On
a GPU each thread has its own CUDA stream for copies; an instruction is done when its copies are.

In a dry run, fake tensors belong to one thread: there an instruction runs when another waits for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from queue import SimpleQueue

import torch
from torch._guards import detect_fake_mode

from meshwright.runtime.rank_program import HostItem, MarkKey
from meshwright.runtime.transport import WaitedOnce, Work
from meshwright.spec import Instruction, RunError

# A function that executes an instruction and returns the bytes that it moved.
Act = Callable[[], int]


class _Signal:
    """An event of the executor that threads may wait for: set once, with works and an event of a GPU's stream."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._works: Sequence[Work] = ()
        self._moment: torch.cuda.Event | None = None

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def set(self, works: Sequence[Work] = (), moment: torch.cuda.Event | None = None) -> None:
        if not self._event.is_set():
            self._works, self._moment = works, moment
            self._event.set()

    def wait(self) -> None:
        self._event.wait()
        for work in self._works:
            work.wait()
        if self._moment is not None:
            self._moment.wait()


class HostWork:
    """An instruction of a host stream in progress.

    ``span`` is its start and end in ns of `time.perf_counter_ns`, None until it is done.
    """

    def __init__(self, item: HostItem, act: Act, streams: HostStreams) -> None:
        self.item, self._act, self._streams = item, act, streams
        self.awaits: list[_Signal | HostWork] = []
        self.span: tuple[int, int] | None = None
        self._done = threading.Event()
        self._error: BaseException | None = None

    @property
    def is_set(self) -> bool:
        """Whether the instruction is done."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait until the instruction is done. Raises its error, or the error of a dependency."""
        self._streams.run_until(self)
        self._done.wait()
        if self._error is not None:
            raise self._error

    def run(self, stream: torch.cuda.Stream | None) -> None:
        """Execute the instruction after its dependencies, on ``stream`` (None on CPUs); keep its error for `wait`."""
        try:
            with torch.no_grad(), torch.cuda.stream(stream) if stream is not None else nullcontext():
                for awaited in self.awaits:
                    awaited.wait()
                if self._streams.is_closed:
                    raise RunError(
                        "The session was closed while copies to or from the host were in progress. Do not use it after "
                        "`close`."
                    )
                start = time.perf_counter_ns()
                moved = self._act()
                if stream is not None:
                    stream.synchronize()
                self.span = start, time.perf_counter_ns()
                self._streams.moved.append((self.item.instruction, moved))
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()


class HostStreams:
    """The host streams of a rank, one thread each.

    ``moved``: the instructions of the last section in the order in which they ended, and the bytes that each moved.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.moved: list[tuple[Instruction, int]] = []
        self.is_closed = False
        self._is_inline = detect_fake_mode() is not None
        self._queues: dict[int, SimpleQueue[HostWork | None]] = {}
        self._inline: dict[int, deque[HostWork]] = {}
        self._signals: dict[int | MarkKey, _Signal] = {}

    def begin(self, items: Iterable[tuple[HostItem, Act]], more: Mapping[int, Collection[int]]) -> dict[int, HostWork]:
        """Start the instructions of a section; return the work of each, by its id.

        ``more``: additional dependencies by instruction id, as keys that `happened` is called with.
        """
        if self.is_closed:
            raise RunError(
                "The session was closed, and its offload threads have ended. Open another session to continue training."
            )
        self.moved = []
        self._signals = {}
        works = {item.index: HostWork(item, act, self) for item, act in items}
        for index, work in works.items():
            awaited: tuple[int | MarkKey, ...] = (*work.item.awaits, *work.item.marks, *more.get(index, ()))
            for key in awaited:
                found = works.get(key) if isinstance(key, int) else None
                work.awaits.append(found or self._signals.setdefault(key, _Signal()))
        for work in works.values():
            self._take(work)
        return works

    def happened(self, key: int | MarkKey) -> None:
        """Report that a computation (by its id) was issued completely, or that a mark was raised."""
        if (signal := self._signals.get(key)) is not None:
            signal.set(moment=self._moment())

    def issued(self, index: int, works: Sequence[Work]) -> Sequence[Work]:
        """Report the asynchronous works of an instruction; return the works that the caller has to wait for instead."""
        if (signal := self._signals.get(index)) is None:
            return works
        if self._device.type != "cuda":
            works = [WaitedOnce(work) for work in works]
        signal.set(works)
        return works

    def run_until(self, work: HostWork) -> None:
        """Execute instructions until ``work`` is done (in dry runs only; otherwise threads do)."""
        while self._is_inline and not work.is_set:
            ready = [
                queue.popleft()
                for queue in self._inline.values()
                if queue and all(awaited.is_set for awaited in queue[0].awaits)
            ]
            if not ready:
                raise RunError(
                    f"{work.item.instruction} can never start: its dependencies wait for each other. Please report it "
                    "with the plan."
                )
            for each in ready:
                each.run(None)

    def close(self) -> None:
        """Stop the threads; instructions that still wait are dropped."""
        self.is_closed = True
        for signal in self._signals.values():
            signal.set()
        for queue in self._queues.values():
            queue.put(None)

    def _take(self, work: HostWork) -> None:
        stream = work.item.stream
        if self._is_inline:
            self._inline.setdefault(stream, deque()).append(work)
            return
        if stream not in self._queues:
            self._queues[stream] = SimpleQueue()
            threading.Thread(
                target=_serve, args=(self._queues[stream], self._device), name=work.item.name, daemon=True
            ).start()
        self._queues[stream].put(work)

    def _moment(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda" or self._is_inline:
            return None
        moment = torch.cuda.Event()
        moment.record()
        return moment


def _serve(queue: SimpleQueue[HostWork | None], device: torch.device) -> None:
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    while (work := queue.get()) is not None:
        work.run(stream)
