"""The number of the batch that each worker started last, in a file in shared memory, which outlives the worker.

After a worker has ended, the scheduler reads the number: a batch that the worker had received but not started cannot
be the cause.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

_NONE = -1
_PREFIX = "begun-"


class Begun:
    """Records which batch a worker started last; the scheduler reads it by `take_begun`."""

    def __init__(self, folder: Path, pid: int) -> None:
        path = _path(folder, pid)
        path.write_bytes(np.int64(_NONE).tobytes())
        with path.open("r+b") as opened:
            self._number = np.frombuffer(mmap.mmap(opened.fileno(), 0), np.int64)

    def note(self, number: int = _NONE) -> None:
        """Record the number of the batch that starts now.

        -1 means no batch. It is recorded for each new scheduler, which numbers batches from 0 again.
        """
        self._number[0] = number


def take_begun(folder: Path, pid: int) -> int | None:
    """Return the number of the batch that an ended worker started last, and remove its file.

    -1: the worker has started no batch; None: the file is missing or damaged.
    """
    path = _path(folder, pid)
    try:
        begun: int | None = int(np.frombuffer(path.read_bytes(), np.int64)[0])
    except (OSError, ValueError, IndexError):
        begun = None
    path.unlink(missing_ok=True)
    return begun


def clear_begun(folder: Path) -> None:
    """Remove the files of workers that ended while no scheduler was running."""
    for path in folder.glob(f"{_PREFIX}*"):
        try:
            os.kill(int(path.name.removeprefix(_PREFIX)), 0)
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        except (ValueError, PermissionError):
            continue


def _path(folder: Path, pid: int) -> Path:
    return folder / f"{_PREFIX}{pid}"
