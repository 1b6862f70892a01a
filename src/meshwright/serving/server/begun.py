"""The last batch that a worker has started, in shared memory: known even of a worker that was killed.

A batch that was sent to a worker but not started cannot be the cause of its end.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

_NONE = -1
_PREFIX = "begun-"


class Begun:
    """The worker's side; the scheduler calls `take_begun`."""

    def __init__(self, folder: Path, pid: int) -> None:
        path = _path(folder, pid)
        path.write_bytes(np.int64(_NONE).tobytes())
        with path.open("r+b") as opened:
            self._number = np.frombuffer(mmap.mmap(opened.fileno(), 0), np.int64)

    def note(self, number: int = _NONE) -> None:
        """Record the number of the batch that starts; -1: no batch, because another scheduler starts again from 0."""
        self._number[0] = number


def take_begun(folder: Path, pid: int) -> int | None:
    """Return and forget the batch that an ended worker started last; -1 if none, None if that is unknown."""
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
