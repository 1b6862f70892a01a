"""Which batch a worker has begun last, in shared memory: known even of one that was killed.

A batch that was sent to a worker and not begun has not harmed it.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

_NONE = -1
_PREFIX = "begun-"


class Begun:
    """A worker's side; the scheduler asks `take_begun`."""

    def __init__(self, folder: Path, pid: int) -> None:
        path = _path(folder, pid)
        path.write_bytes(np.int64(_NONE).tobytes())
        with path.open("r+b") as opened:
            self._number = np.frombuffer(mmap.mmap(opened.fileno(), 0), np.int64)

    def note(self, number: int = _NONE) -> None:
        """This batch begins; none has, where another scheduler counts anew."""
        self._number[0] = number


def take_begun(folder: Path, pid: int) -> int | None:
    """The batch that a worker that has gone began last, -1 if none, and forget it; None if that cannot be known."""
    path = _path(folder, pid)
    try:
        begun: int | None = int(np.frombuffer(path.read_bytes(), np.int64)[0])
    except (OSError, ValueError, IndexError):
        begun = None
    path.unlink(missing_ok=True)
    return begun


def clear_begun(folder: Path) -> None:
    """Forget what workers had begun that have ended while no scheduler was there."""
    for path in folder.glob(f"{_PREFIX}*"):
        try:
            os.kill(int(path.name.removeprefix(_PREFIX)), 0)
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        except (ValueError, PermissionError):
            continue


def _path(folder: Path, pid: int) -> Path:
    return folder / f"{_PREFIX}{pid}"
