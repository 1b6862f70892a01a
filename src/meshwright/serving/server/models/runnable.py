"""What can be run: a model of which batches are computed, whatever it is made of."""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray

from meshwright.spec import TensorSpec

Arrays = list[NDArray[Any]]
# What a batch can be at most where nothing says less; that of `Latency`.
LARGEST = 1024
# What the code of a model may raise: it must not end a worker, whatever it means by it.
RAISED = (Exception, SystemExit, KeyboardInterrupt)


class DeviceLost(Exception):  # noqa: N818 - it is no error of the batch
    """The device computes nothing any more in this process; another one may use it."""


class Runnable(Protocol):
    """A model: ``inputs`` and ``outputs`` of a sample, and the ``largest`` batch that it can run."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    largest: int
    platform: str

    def run(self, arrays: Arrays) -> Arrays:
        """Outputs of a batch, in the order of ``outputs``, for its inputs in that of ``inputs``.

        All are of shape (batch, *that of a sample), in the types of `datatypes.NUMPY_TYPES`. The inputs can be written
        to and are not used again. Whatever the model raises, it raises; DeviceLost if it can raise nothing else any
        more.
        """
        ...

    def sample(self, count: int) -> Arrays:
        """Inputs of a batch of so many samples that the model can compute, to warm it up with."""
        ...
