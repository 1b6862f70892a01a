"""Collectives that begin when others are done, without holding up the thread that asks for them.

On a GPU a CUDA stream of its own waits, in which the later one is issued; on processors a thread does, in the order in
which it was asked. Such collectives have process groups of their own, so that no two threads issue in one of them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch
import torch.distributed as dist

from meshwright.runtime.pending import Work


class Behind:
    """Begins works behind others, one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._queue: SimpleQueue[_Following | None] | None = None

    def begin(self, before: Sequence[Work], issue: Callable[[], Work]) -> Work:
        """What ``issue()`` makes, behind what is ``before`` it."""
        if dist.get_backend() == "fake":
            return issue()
        if self._device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(self._device)
            # Whoever waited for one of them already did so in the current stream.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                for work in before:
                    work.wait()
                return issue()
        if self._queue is None:
            self._queue = SimpleQueue()
            threading.Thread(target=_serve, args=(self._queue,), name="behind", daemon=True).start()
            weakref.finalize(self, self._queue.put, None)
        following = _Following(before, issue)
        self._queue.put(following)
        return following


class _Following:
    """Work of a thread: waits for others, then issues its own and waits for that."""

    def __init__(self, before: Sequence[Work], issue: Callable[[], Work]) -> None:
        self._before, self._issue = before, issue
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do it."""
        try:
            for work in self._before:
                work.wait()
            self._issue().wait()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def wait(self) -> None:
        """Come back when it is done. Raises what went wrong with it, or with what it follows."""
        self._done.wait()
        if self._error is not None:
            raise self._error


def _serve(queue: SimpleQueue[_Following | None]) -> None:
    while (following := queue.get()) is not None:
        following.run()
        # While the thread waits for the next one it holds nothing.
        del following
