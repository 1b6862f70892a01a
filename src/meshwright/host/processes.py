"""Processes that were started by us, and end with what they were started for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess


@contextlib.contextmanager
def reaping(processes: Sequence[BaseProcess], grace_s: float) -> Iterator[None]:
    """End all processes when the block is left, gently first: those that then live for so long are killed."""
    try:
        yield
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
        for process in processes:
            process.join(grace_s)
            if process.is_alive():
                process.kill()
                process.join()
