"""The network that every server of real models runs: one exported program, on one core, for samples that are bytes.

Run as ``python network.py FACTS``, it prints what batches of 1, 2, 4, ... take there, as JSON.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch


def read_facts() -> dict[str, Any]:
    """What a server gets: ``port``, ``path``, ``core``, ``dtype``, ``shape``, ``batch``, ``wait_s``, ``slo_s``."""
    return dict(json.loads(sys.argv[1]))


def to_json(row: np.ndarray) -> str:
    """A sample of the output as JSON can have it."""
    return base64.b64encode(row.tobytes()).decode()


class Network:
    """The program of a ``.pt2`` file; the process that loads it has one core from then on, and operators one thread."""

    def __init__(self, facts: dict[str, Any]) -> None:
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), {facts["core"]})
        torch.set_num_threads(1)
        self._call: Any = torch.export.load(facts["path"]).module()
        self._dtype, self._shape = np.dtype(facts["dtype"]), tuple(facts["shape"])
        for size in (1, 2, 3):
            self([bytes(self._dtype.itemsize * int(np.prod(self._shape)))] * size)

    def __call__(self, samples: Sequence[bytes]) -> np.ndarray:
        """A row of outputs for each sample, which is the memory of its tensor."""
        batch = np.stack([np.frombuffer(sample, self._dtype).reshape(self._shape) for sample in samples])
        with torch.inference_mode():
            return self._call(torch.from_numpy(batch)).numpy()


def time_batches(facts: dict[str, Any]) -> Iterator[tuple[int, float]]:
    """Sizes, and the medians of what their batches take."""
    network = Network(facts)
    sample = np.random.default_rng(0).integers(0, 2, facts["shape"]).astype(facts["dtype"]).tobytes()
    for size in (1, 2, 4, 8):
        seconds = []
        for _ in range(12):
            begin = time.perf_counter()
            network([sample] * size)
            seconds.append(time.perf_counter() - begin)
        yield size, median(seconds[2:])


if __name__ == "__main__":
    print(json.dumps(list(time_batches(read_facts()))))
