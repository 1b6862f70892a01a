"""End processes together with the block that started them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess


@contextlib.contextmanager
def reaping(processes: Sequence[BaseProcess], grace_s: float) -> Iterator[None]:
    """End all processes at the end of the block, gently first: after ``grace_s`` the remaining ones are killed."""
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
