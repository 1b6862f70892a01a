"""Slabs: shared memory for the tensors of requests, so that only slot numbers are sent between processes.

A frontend has a slab for each model, divided into slots of one size. A slot holds the inputs and outputs of one sample.
The frontend writes inputs and reads outputs; a worker gathers the inputs of a batch from its slots, and scatters the
outputs to them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.serving.datatypes import NUMPY_TYPES
from meshwright.spec import ServingError, TensorSpec

_ALIGNED = 64


class Slab:
    """Shared memory for the requests of one frontend to one model, in slots of one sample each.

    ``inputs`` and ``outputs`` have for each tensor an array (slots, *shape of a sample's tensor), a view of the memory.
    """

    def __init__(self, path: Path, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], slots: int) -> None:
        """Open the slab of this file; it is created if ``slots`` is not 0. Raises ServingError if that fails."""
        layout = slot_layout(inputs, outputs)
        try:
            with path.open("x+b") if slots else path.open("r+b") as opened:
                if slots:
                    opened.truncate(slots * layout.itemsize)
                self._memory = mmap.mmap(opened.fileno(), 0)
        except (OSError, ValueError) as error:
            raise ServingError(f"The shared memory {path} cannot be used: {error}.") from None
        self.path = path
        self.slots = np.frombuffer(self._memory, layout)
        self.inputs: list[NDArray[Any]] = [self.slots[f"i{place}"] for place in range(len(inputs))]
        self.outputs: list[NDArray[Any]] = [self.slots[f"o{place}"] for place in range(len(outputs))]

    def __len__(self) -> int:
        """Return the number of slots."""
        return len(self.slots)

    def allocate(self, first: int, count: int) -> bool:
        """Allocate memory for ``count`` slots, from ``first`` on; return False if the system has not enough.

        Access to slots without memory may kill the process.
        """
        if not hasattr(os, "posix_fallocate"):
            return True
        try:
            # Opened only for this call: there is one slab per model.
            with self.path.open("r+b") as opened:
                os.posix_fallocate(opened.fileno(), first * self.slots.itemsize, count * self.slots.itemsize)
        except OSError:
            return False
        return True

    def remove(self) -> None:
        """Remove the file; processes that have opened it can still use it."""
        self.path.unlink(missing_ok=True)


def slot_layout(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> np.dtype:
    """Return the dtype of a slot: a field for each tensor, aligned to 64 bytes."""
    names, formats, offsets, at = [], [], [], 0
    for letter, tensors in (("i", inputs), ("o", outputs)):
        for place, tensor in enumerate(tensors):
            names.append(f"{letter}{place}")
            formats.append((NUMPY_TYPES[tensor.datatype], tensor.shape))
            offsets.append(at)
            at += -(-tensor.num_bytes // _ALIGNED) * _ALIGNED
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": max(at, _ALIGNED)})


def slab_path(folder: Path, epoch: int, channel: int, model: int) -> Path:
    """Return the path of a slab; ``channel`` and ``model`` are numbers, and ``epoch`` is the scheduler's start time."""
    return folder / f"slab-{epoch}-{channel}-{model}"
