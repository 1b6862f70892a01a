"""The interface of a model whose batches can be run, whatever its implementation."""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray

from meshwright.spec import TensorSpec

Arrays = list[NDArray[Any]]
# Largest batch unless limited further; that of `Latency`.
LARGEST = 1024
# Exceptions that the code of a model may raise: none of them may end a worker.
RAISED = (Exception, SystemExit, KeyboardInterrupt)


class DeviceLost(Exception):  # noqa: N818 - not an error of the batch
    """The device can no longer be used in this process; another process may use it."""


class Runnable(Protocol):
    """A model: ``inputs`` and ``outputs`` of a sample, and the ``largest`` batch that it can run."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    largest: int
    platform: str

    def run(self, arrays: Arrays) -> Arrays:
        """Return the outputs of a batch, in the order of ``outputs``, for its inputs in the order of ``inputs``.

        All are of shape (batch, *that of a sample), in the types of `datatypes.NUMPY_TYPES`. The inputs may be
        overwritten. Exceptions of the model are raised; DeviceLost if the device can no longer be used.
        """
        ...

    def sample(self, count: int) -> Arrays:
        """Return inputs of a batch of ``count`` samples that the model can compute, for warming up."""
        ...
