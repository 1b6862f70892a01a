"""Load a worker's models: open, warm up and time them, at its start or in a thread while it computes batches."""

from __future__ import annotations

import os
import queue
import threading
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.serving.server.models import Runnable, open_model, warm_up
from meshwright.serving.server.served import Served
from meshwright.spec import MeshwrightError

# Time limit for warming up a model whose latencies the deployment gives.
_BRIEFLY_S = 1.0
_SHOWN = 500


@dataclass(frozen=True, slots=True, eq=False)
class HeldModel:
    """A model that a worker can run; ``points`` are measured (batch size, seconds), if it was timed."""

    served: Served
    runnable: Runnable
    points: list[tuple[int, float]]

    def document(self) -> dict[str, Any]:
        """Return the message to the scheduler that the model is loaded."""
        return {
            "number": self.served.number,
            "inputs": [asdict(tensor) for tensor in self.runnable.inputs],
            "outputs": [asdict(tensor) for tensor in self.runnable.outputs],
            "platform": self.runnable.platform,
            "largest": self.runnable.largest,
            "points": self.points,
        }


@dataclass(frozen=True, slots=True)
class Failed:
    """A model that could not be loaded, and why."""

    served: Served
    error: str

    def document(self) -> dict[str, Any]:
        """Return the message to the scheduler that loading has failed."""
        return {"number": self.served.number, "error": self.error}


class ModelLoader:
    """Loads models onto a device (``cpu``, ``cuda:0``), directly or in a thread.

    Operators use ``num_threads`` threads. A selector can wait for results of the thread (`fileno`, `take`).
    """

    def __init__(self, device: str, num_threads: int) -> None:
        self._device, self._num_threads = device, num_threads
        self._asked: queue.SimpleQueue[Served] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[HeldModel | Failed] = queue.SimpleQueue()
        self._wakes, self._waker = os.pipe()
        self._thread: threading.Thread | None = None

    def fileno(self) -> int:
        """Return a descriptor that is readable when `take` has results."""
        return self._wakes

    def make(self, served: Served) -> Runnable:
        """Load and return a model."""
        return open_model(served.model, self._device, self._num_threads)

    @staticmethod
    def time(served: Served, runnable: Runnable) -> HeldModel:
        """Warm a model up, and time its batches if the deployment gives no latency; emulated models are not run."""
        model = served.model
        if model.model is None:
            return HeldModel(served, runnable, [])
        if model.latency is not None:
            rows = warm_up(runnable, name=served.name, longest_s=model.slo, budget_s=_BRIEFLY_S, repeats=1)
        else:
            rows = warm_up(runnable, name=served.name, longest_s=model.slo)
        return HeldModel(served, runnable, [(row.batch_size, row.seconds) for row in rows])

    def load(self, served: Served) -> None:
        """Queue a model to be opened and timed in the thread."""
        self._asked.put(served)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()

    def take(self) -> list[HeldModel | Failed]:
        """Return the queued models that have been loaded, or could not be; blocks if there are no results."""
        os.read(self._wakes, 4096)
        done = []
        while not self._done.empty():
            done.append(self._done.get())
        return done

    def _work(self) -> None:
        while True:
            served = self._asked.get()
            done: HeldModel | Failed
            try:
                done = self.time(served, self.make(served))
            except MeshwrightError as error:
                done = Failed(served, str(error))
            except BaseException as error:
                # Foreign code: whatever it raises, batches of other models must continue.
                text = " ".join(f"{type(error).__name__}: {error}".split())[:_SHOWN]
                done = Failed(served, f"Model {served.name!r} could not be loaded: {text}")
            self._done.put(done)
            os.write(self._waker, b"1")
