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
    """A model: ``inputs`` and ``outputs`` of one sample, and the ``largest`` batch size that it can run.

    ``platform`` is its kind as the Open Inference Protocol reports it, such as ``torch``.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    largest: int
    platform: str

    def run(self, arrays: Arrays) -> Arrays:
        """Return the outputs of a batch, in the order of ``outputs``, for its inputs in the order of ``inputs``.

        All arrays have the shape (batch, *shape of a sample's tensor) and the types of `datatypes.NUMPY_TYPES`. The
        inputs may be overwritten. Exceptions of the model are passed on; DeviceLost is raised if the device can no
        longer be used.
        """
        ...

    def sample(self, count: int) -> Arrays:
        """Return inputs of a batch of ``count`` samples that the model can compute, for warming up."""
        ...
