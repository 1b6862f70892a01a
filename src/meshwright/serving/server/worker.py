"""A worker: it loads the models of a server on one device, and runs the batches that the scheduler sends.

Models that are added later are loaded in a separate thread (`loading`); batches are slower meanwhile.

Run as ``python -m meshwright.serving.server.worker FOLDER DEVICE``; ``FOLDER`` contains deployment.json, and ``DEVICE``
is a number. Ends when its standard input ends. If the scheduler ends, the worker connects to the next one.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.serving.policies.pool import Ints
from meshwright.serving.server.begun import Begun
from meshwright.serving.server.channel import Closed, Kind, MessageChannel, connect
from meshwright.serving.server.loading import HeldModel, ModelLoader
from meshwright.serving.server.models import run_batch
from meshwright.serving.server.models.runnable import Arrays, Runnable
from meshwright.serving.server.peers import SLOT_BITS, slots_of
from meshwright.serving.server.promptness import ask_for_short_turns
from meshwright.serving.server.recording import Recording, RecordingControl
from meshwright.serving.server.reports import (
    Orders,
    end_after_input,
    keep_what_is_there,
    report,
    reporting_errors,
)
from meshwright.serving.server.served import read_identity, read_models
from meshwright.serving.server.slabs import Slab, slab_path
from meshwright.spec import ServingError, read_deployment

_AGAIN_S = 0.02
_PING = -1


class _Timed:
    """A model whose executions are recorded."""

    def __init__(self, model: Runnable, recording: Recording) -> None:
        self.inputs, self.outputs = model.inputs, model.outputs
        self.largest, self.platform = model.largest, model.platform
        self._model, self._recording = model, recording

    def run(self, arrays: Arrays) -> Arrays:
        """Run the model and record the time."""
        begin = time.monotonic_ns()
        try:
            return self._model.run(arrays)
        finally:
            self._recording.row_of_run(begin, time.monotonic_ns())

    def sample(self, count: int) -> Arrays:
        """See `Runnable.sample`."""
        return self._model.sample(count)


class Worker:
    """Runs the scheduler's batches on one device. ``held`` are the models that are loaded already."""

    def __init__(self, folder: Path, device: int, held: list[HeldModel], loader: ModelLoader) -> None:
        self._folder, self._device, self._loader = folder, device, loader
        self._held = {one.served.number: one for one in held}
        self._slabs: dict[tuple[int, int], Slab] = {}
        self._epoch, self._begun = 0, Begun(folder, os.getpid())
        self._silent_until = 0.0
        self._orders, self._recorder = Orders(), RecordingControl(lambda: [self])
        self.recording: Recording | None = None

    def run(self) -> None:
        """Run batches until standard input ends, then raise SystemExit; reconnect whenever the scheduler has ended."""
        while True:
            channel = connect(self._folder / "scheduler.sock")
            if channel is None:
                self._wait(_AGAIN_S)
                continue
            with contextlib.suppress(Closed):
                models = [held.document() for held in self._held.values()]
                channel.send_text({"worker": self._device, "pid": os.getpid(), "models": models})
                self._obey(channel)
            channel.close()

    def _obey(self, channel: MessageChannel) -> None:
        # Not select(2): a model may have more files open than it supports.
        watched = select.poll()
        for source in (sys.stdin, self._loader):
            watched.register(source, select.POLLIN)
        orders, loads = sys.stdin.fileno(), self._loader.fileno()
        while True:
            watched.register(channel, select.POLLIN | (select.POLLOUT if channel.is_waiting else 0))
            ready = {number for number, _ in watched.poll()}
            if orders in ready:
                self._recorder.obey(self._orders.read())
            if loads in ready:
                for loaded in self._loader.take():
                    if isinstance(loaded, HeldModel):
                        self._held[loaded.served.number] = loaded
                    channel.send_text(loaded.document())
            channel.flush()
            for kind, content in channel.receive():
                if kind == Kind.RUN:
                    channel.send(self._compute(content))
                elif kind == Kind.TEXT:
                    self._hear(content)

    def _hear(self, document: dict[str, Any]) -> None:
        """Handle another scheduler, or changed models."""
        if "epoch" in document:
            self._epoch = document["epoch"]
            self._begun.note()
            self._slabs.clear()
        for item in document.get("load", []):
            self._loader.load(read_identity(item))
        for number in document.get("forget", []):
            # One that is still being loaded is reported to the scheduler when it is done.
            self._held.pop(number, None)
            self._slabs = {key: slab for key, slab in self._slabs.items() if key[1] != number}

    def _wait(self, seconds: float) -> None:
        """Wait, and end if the supervisor has gone."""
        watched = select.poll()
        watched.register(sys.stdin, select.POLLIN)
        if watched.poll(seconds * 1e3):
            self._recorder.obey(self._orders.read())

    def _compute(self, cells: Ints) -> Ints:
        """Run a batch; return the message about it."""
        number, model, expected, count = cells[:4].tolist()
        begin = time.monotonic_ns()
        if number == _PING:
            return np.array([Kind.RAN, _PING, begin, begin, 0, expected], np.int64)
        self._begun.note(number)
        requests, deadlines = cells[4 : 4 + count], cells[4 + count :]
        late = np.flatnonzero(deadlines < begin + expected)
        places = np.arange(count) if len(late) == 0 else np.flatnonzero(deadlines >= begin + expected)
        failed = self._run(model, requests, places) if len(places) else places
        end = time.monotonic_ns()
        if self.recording is not None:
            self.recording.rows_of_batch((number, model, expected, begin, end), cells[4:], late, failed)
        head = np.array([Kind.RAN, number, begin, end, len(late)], np.int64)
        return np.concatenate([head, late, failed])

    def _run(self, model: int, requests: Ints, places: Ints) -> Ints:
        """Run the requests at these places; return the places of those that failed."""
        slots, numbers = slots_of(requests[places]), requests[places] >> SLOT_BITS
        groups, order, lost = [], [], []
        for number in sorted(set(numbers.tolist())):
            here = np.flatnonzero(numbers == number)
            slab = self._slab(number, model)
            if slab is None:
                lost.append(places[here])
            else:
                groups.append((slab, slots[here]))
                order.append(places[here])
        if not groups:
            return places
        runnable = self._held[model].runnable
        if self.recording is not None:
            runnable = _Timed(runnable, self.recording)
        failures = run_batch(runnable, groups)
        if failures.error:
            self._tell_of(model, failures.error)
            lost.append(np.concatenate(order)[list(failures.places)])
        return np.concatenate(lost) if lost else places[:0]

    def _tell_of(self, model: int, error: str) -> None:
        """Report a failure, at most once a second: clients may repeat bad requests often."""
        if time.monotonic() > self._silent_until:
            self._silent_until = time.monotonic() + 1.0
            report("failure", model=self._held[model].served.name, text=error)

    def _slab(self, channel: int, model: int) -> Slab | None:
        """Return the slab of a frontend's connection; None if that has gone, and its memory with it."""
        if (channel, model) not in self._slabs:
            runnable = self._held[model].runnable
            path = slab_path(self._folder, self._epoch, channel, model)
            try:
                opened = Slab(path, runnable.inputs, runnable.outputs, 0)
            except ServingError:
                return None
            self._slabs = {key: slab for key, slab in self._slabs.items() if slab.path.exists()}
            self._slabs[channel, model] = opened
        return self._slabs[channel, model]


def main(arguments: list[str]) -> None:
    """Load and warm up all models, then run batches until standard input ends; ``arguments``: FOLDER DEVICE."""
    folder, number = Path(arguments[0]), int(arguments[1])
    deployment = read_deployment(folder / "deployment.json")
    end_after_input()
    ask_for_short_turns()
    device = deployment.server.device if deployment.server.device == "cpu" else f"cuda:{number}"
    with reporting_errors():
        served = read_models(folder)
        loader = ModelLoader(device, int(os.environ.get("OMP_NUM_THREADS", "1")))
        opened = []
        for place, one in enumerate(served):
            report("loading", device=number, model=one.name, place=place, of=len(served))
            opened.append(loader.make(one))
        report("warming", device=number)
        held = [loader.time(one, runnable) for one, runnable in zip(served, opened, strict=True)]
        keep_what_is_there()
        Worker(folder, number, held, loader).run()


if __name__ == "__main__":
    main(sys.argv[1:])
