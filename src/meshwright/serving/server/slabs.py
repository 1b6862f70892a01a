"""Slabs: shared memory in which tensors of requests lie, so that only numbers of slots travel between processes.

A front has a slab for each model: slots of one size, a sample's inputs and outputs in each. The front writes inputs and
reads outputs; a worker gathers the inputs of a batch and scatters its outputs, as arrays of whole columns.
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
    """``inputs`` and ``outputs``: for each tensor an array of (slots, *its shape), views of the shared memory."""

    def __init__(self, path: Path, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], slots: int) -> None:
        """Open the slab of this file, which is made if ``slots`` is not 0. Raises ServingError if that fails."""
        layout = slot_layout(inputs, outputs)
        try:
            with path.open("x+b") if slots else path.open("r+b") as opened:
                if slots:
                    opened.truncate(slots * layout.itemsize)
                self._memory = mmap.mmap(opened.fileno(), 0)
        except (OSError, ValueError) as error:
            raise ServingError(f"{path}: shared memory cannot be used: {error}.") from None
        self.path = path
        self.slots = np.frombuffer(self._memory, layout)
        self.inputs: list[NDArray[Any]] = [self.slots[f"i{place}"] for place in range(len(inputs))]
        self.outputs: list[NDArray[Any]] = [self.slots[f"o{place}"] for place in range(len(outputs))]

    def __len__(self) -> int:
        """How many slots there are."""
        return len(self.slots)

    def allocate(self, first: int, count: int) -> bool:
        """Have the system give memory for these slots, or say that it has none: without, whoever touches them dies."""
        if not hasattr(os, "posix_fallocate"):
            return True
        try:
            # No file stays open for this, as there are as many slabs as models.
            with self.path.open("r+b") as opened:
                os.posix_fallocate(opened.fileno(), first * self.slots.itemsize, count * self.slots.itemsize)
        except OSError:
            return False
        return True

    def remove(self) -> None:
        """Take the file away; whoever has opened it can still use it."""
        self.path.unlink(missing_ok=True)


def slot_layout(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> np.dtype:
    """What lies in a slot: each tensor begins at a multiple of 64 bytes."""
    names, formats, offsets, at = [], [], [], 0
    for letter, tensors in (("i", inputs), ("o", outputs)):
        for place, tensor in enumerate(tensors):
            names.append(f"{letter}{place}")
            formats.append((NUMPY_TYPES[tensor.datatype], tensor.shape))
            offsets.append(at)
            at += -(-tensor.num_bytes // _ALIGNED) * _ALIGNED
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": max(at, _ALIGNED)})


def slab_path(folder: Path, epoch: int, channel: int, model: int) -> Path:
    """Where the slab of a front's connection and a model lies; ``epoch`` is the scheduler's."""
    return folder / f"slab-{epoch}-{channel}-{model}"
