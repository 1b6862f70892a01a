"""Byte-level text for training that every machine has: the source files of the Python standard library.

One sample is a window of ``length + 1`` bytes: inputs are the first ``length``, targets the last ``length``. Windows
are drawn by a seeded generator, so every rank draws the same batches.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

from meshwright.spec import MeshwrightError


def read_text(max_bytes: int = 4 * 2**20) -> torch.Tensor:
    """Return the first bytes of the standard library's modules, in alphabetical order: uint8, shape (n,).

    n is at most ``max_bytes``. Raises MeshwrightError if this Python has no source files.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    chunks: list[bytes] = []
    total = 0
    for path in sorted(folder.glob("*.py")):
        if total >= max_bytes:
            break
        chunks.append(path.read_bytes())
        total += len(chunks[-1])
    if not total:
        raise MeshwrightError(
            f"The Python standard library at {folder} has no source files to train on. Use a Python with its sources."
        )
    return torch.frombuffer(bytearray(b"".join(chunks)[:max_bytes]), dtype=torch.uint8)


def text_batches(batch_size: int, length: int, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield endless batches (inputs, targets), int64 of shape (batch_size, length); equal for equal seeds."""
    text = read_text()
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(length + 1)
    while True:
        starts = torch.randint(0, len(text) - length - 1, (batch_size, 1), generator=generator)
        window = text[starts + offsets].long()
        yield window[:, :-1], window[:, 1:]
