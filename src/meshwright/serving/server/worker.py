"""A worker: it loads the models of a deployment on one device, and runs the batches that the scheduler sends.

Run as ``python -m meshwright.serving.server.worker FOLDER DEVICE``; ends when its standard input does. When the
scheduler has gone, it connects again to the one that comes.
"""

from __future__ import annotations

import contextlib
import select
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.serving.policies.pool import Ints
from meshwright.serving.server.channel import Channel, Closed, Kind, connect
from meshwright.serving.server.reports import end_with_input, report
from meshwright.serving.server.served import Served, served_models
from meshwright.serving.server.slabs import Slab, slab_path
from meshwright.spec import read_deployment

_SLOT = (1 << 32) - 1
_AGAIN_S = 0.02
_PING = -1


class Worker:
    """See the module's docstring. ``models``: what runs each served model (`models.Runnable`)."""

    def __init__(self, folder: Path, device: int, served: list[Served], models: list[Any]) -> None:
        self._folder, self._device, self._served, self._models = folder, device, served, models
        self._slabs: dict[tuple[int, int], Slab] = {}
        self._epoch = 0

    def run(self, points: list[Any]) -> None:
        """Serve; connect again where the scheduler has gone. Ends with SystemExit."""
        while True:
            channel = connect(self._folder / "scheduler.sock")
            if channel is None:
                _wait_for_end(_AGAIN_S)
                continue
            with contextlib.suppress(Closed):
                channel.send_text(
                    {
                        "worker": self._device,
                        "models": [
                            {
                                "inputs": [asdict(tensor) for tensor in model.inputs],
                                "outputs": [asdict(tensor) for tensor in model.outputs],
                                "platform": model.platform,
                                "points": found,
                            }
                            for model, found in zip(self._models, points, strict=True)
                        ],
                    }
                )
                self._obey(channel)
            channel.close()

    def _obey(self, channel: Channel) -> None:
        while True:
            ready, _, _ = select.select([channel, sys.stdin], [channel] if channel.is_waiting else [], [])
            if sys.stdin in ready:
                end_with_input()
            channel.flush()
            for kind, content in channel.receive():
                if kind == Kind.RUN:
                    channel.send(self._compute(content))
                elif kind == Kind.TEXT:
                    self._epoch = content["epoch"]
                    self._slabs.clear()

    def _compute(self, cells: Ints) -> Ints:
        """Run a batch; what is to be told of it."""
        number, model, expected, count = cells[:4].tolist()
        begin = time.monotonic_ns()
        if number == _PING:
            return np.array([Kind.RAN, _PING, begin, begin, 0, expected], np.int64)
        requests, deadlines = cells[4 : 4 + count], cells[4 + count :]
        late = np.flatnonzero(deadlines < begin + expected)
        places = np.arange(count) if len(late) == 0 else np.flatnonzero(deadlines >= begin + expected)
        failed = self._run(model, requests, places) if len(places) else places
        head = np.array([Kind.RAN, number, begin, time.monotonic_ns(), len(late)], np.int64)
        return np.concatenate([head, late, failed])

    def _run(self, model: int, requests: Ints, places: Ints) -> Ints:
        """Run the requests at these places; those that failed."""
        groups = []
        chosen = requests[places]
        numbers = chosen >> 32
        for number in np.unique(numbers).tolist():
            here = np.flatnonzero(numbers == number)
            groups.append((self._slab(number, model), here, chosen[here] & _SLOT))
        runnable = self._models[model]
        arrays = []
        for place in range(len(runnable.inputs)):
            if len(groups) == 1:
                arrays.append(groups[0][0].inputs[place][groups[0][2]])
            else:
                spec = groups[0][0].inputs[place]
                array = np.empty((len(places), *spec.shape[1:]), spec.dtype)
                for slab, here, slots in groups:
                    array[here] = slab.inputs[place][slots]
                arrays.append(array)
        outputs = runnable.run(arrays)
        for place, output in enumerate(outputs):
            for slab, here, slots in groups:
                slab.outputs[place][slots] = output[here]
        return places[:0]

    def _slab(self, channel: int, model: int) -> Slab:
        if (channel, model) not in self._slabs:
            path = slab_path(self._folder, self._epoch, channel, model)
            runnable = self._models[model]
            self._slabs[channel, model] = Slab(path, runnable.inputs, runnable.outputs, 0)
        return self._slabs[channel, model]


def _wait_for_end(seconds: float) -> None:
    """Wait, and end if the supervisor has gone."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    if ready:
        end_with_input()


class Emulated:
    """A stand-in."""

    platform = "emulated"

    def __init__(self, model: Any) -> None:
        from meshwright.spec import TensorSpec

        self.latency = model.line
        self.inputs = model.inputs or (TensorSpec(name="input", shape=(16,)),)
        self.outputs = model.outputs or (TensorSpec(name="output", shape=(10,)),)

    def run(self, arrays: Any) -> Any:
        time.sleep(self.latency.of(len(arrays[0])) - 60e-6)
        return [np.zeros((len(arrays[0]), *tensor.shape), np.float32) for tensor in self.outputs]


def main(arguments: list[str]) -> None:
    """Load, warm up, and serve until standard input ends."""
    folder, device = Path(arguments[0]), int(arguments[1])
    served = served_models(read_deployment(folder / "deployment.json"))
    models = [Emulated(one.model) for one in served]
    report("worker", device=device, ready=True)
    Worker(folder, device, served, models).run([[] for _ in served])


if __name__ == "__main__":
    main(sys.argv[1:])
