"""A model without computation: its batches take the time that the deployment gives, and its answers can be checked.

Requests and answers are transferred as with any model, so that a server and its policies can be tested at the speed of
devices that are not available. A batch of b samples ends l(b) seconds after its start; l is the deployment's latency.
The system wakes a sleeping process about 60 µs late, or 100 µs if the processor was idle. Each sleep measures this
delay, the next sleep is shortened by it, and the rest is a busy wait.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.serving.datatypes import NUMPY_TYPES
from meshwright.serving.server.models.runnable import Arrays
from meshwright.spec import ServedModel, ServingError, TensorSpec

# Used if a deployment names no tensors.
INPUTS = (TensorSpec(name="input", shape=(4,)),)
OUTPUTS = (TensorSpec(name="output", shape=(4,)),)
# Initial and maximum delay of a wake-up: several emulations may share a core, and none of them should occupy it for
# longer while it waits.
_LATE_S, _LATEST_S = 60e-6, 150e-6
# Weight of the last sleep in the mean.
_LEARNT = 0.1


class EmulatedModel:
    """A model whose batches take the times that the deployment gives.

    Output number k of a sample is the `echo` of its input number k, cyclically.
    """

    platform = "emulated"

    def __init__(self, model: ServedModel) -> None:
        """Raises ServingError if the model has no latency."""
        latency = model.latency
        if latency is None:
            raise ServingError(
                f"Model {model.name!r} has no latency, and no `model` whose latency could be measured. Give `model`, "
                "the reference of a model to run, or the `latency` to emulate."
            )
        self.inputs, self.outputs = model.inputs or INPUTS, model.outputs or OUTPUTS
        self.largest = latency.largest
        self._seconds = [latency.of(batch) for batch in range(latency.largest + 1)]
        self._late_s = _LATE_S

    def run(self, arrays: Arrays) -> Arrays:
        """Return the echoes of the inputs, once the time of the batch has passed."""
        end = time.perf_counter() + self._seconds[len(arrays[0])]
        answers = [echo(arrays[place % len(arrays)], output) for place, output in enumerate(self.outputs)]
        self._wait_until(end)
        return answers

    def sample(self, count: int) -> Arrays:
        """Return inputs of ``count`` samples, all zeros."""
        return [np.zeros((count, *item.shape), NUMPY_TYPES[item.datatype]) for item in self.inputs]

    def _wait_until(self, end: float) -> None:
        begin = time.perf_counter()
        asleep = end - begin - self._late_s
        if asleep > 0:
            time.sleep(asleep)
            late = min(time.perf_counter() - begin - asleep, _LATEST_S)
            self._late_s += _LEARNT * (late - self._late_s)
        while time.perf_counter() < end:
            pass


def echo(array: NDArray[Any], output: TensorSpec) -> NDArray[Any]:
    """Return an output (b, ...): row i has the values of row i of the input ``array`` (b, ...), cut or repeated."""
    rows = array.reshape(len(array), -1)
    taken = rows[:, np.arange(math.prod(output.shape)) % rows.shape[1]]
    with np.errstate(invalid="ignore", over="ignore"):  # not every number has a counterpart in every type
        return taken.astype(NUMPY_TYPES[output.datatype]).reshape(len(array), *output.shape)
