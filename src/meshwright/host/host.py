"""Sources of facts about a machine (`Host`): files, environment, programs, free space, name; and measured `Rates`.

`Host()` is this machine. Another machine can be imitated by a folder with its ``/proc`` and ``/sys`` and a function
that returns the output of programs. Facts that cannot be read are None or empty, never an error: on macOS, on Windows
and in containers many of them are missing.
"""

from __future__ import annotations

import os
import queue
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from meshwright.spec import Link


# The timing needs torch and is in `meshwright.measurement`; its results are passed to `describe_host`.
@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Measured figures of one device.

    ``peak_flops_per_s``: FLOP/s of matrix products by dtype. ``memory_bandwidth_bytes_per_s``: bytes that a copy reads
    and writes per second. ``link``: a send between two processes of this host (None: not measured). ``conditions``:
    text that says how and when the figures were measured.
    """

    peak_flops_per_s: dict[str, float]
    memory_bandwidth_bytes_per_s: float
    link: Link | None
    conditions: str


T = TypeVar("T")

# The exit code of a missing program, as shells report it.
NOT_FOUND = 127
# Larger outputs than this are not facts about a machine.
_MAX_READ_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The result of a program: exit code, stdout (``output``) and stderr (``error``).

    ``code`` is None if the program did not end in time, and NOT_FOUND if it could not be started.
    """

    code: int | None
    output: str = ""
    error: str = ""


def run_program(command: Sequence[str], timeout_s: float) -> Ran:
    """Run a program, and kill it if it runs longer than ``timeout_s`` seconds; output until then is kept."""
    try:
        done = subprocess.run(
            list(command), stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as late:
        return Ran(code=None, output=_text(late.stdout), error=_text(late.stderr))
    except OSError as error:
        return Ran(code=NOT_FOUND, error=error.strerror or str(error))
    return Ran(code=done.returncode, output=_text(done.stdout), error=_text(done.stderr))


def measure_space(path: Path) -> tuple[int, int]:
    """Return total and free bytes of the file system that holds ``path``."""
    usage = shutil.disk_usage(path)
    return usage.total, usage.free


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine to examine.

    ``root`` replaces ``/`` for files. ``run(command, timeout_s)`` runs a program and returns how it ended.
    ``space(path)`` returns total and free bytes of the file system that holds the path. ``name`` is the host name.
    """

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    run: Callable[[Sequence[str], float], Ran] = run_program
    space: Callable[[Path], tuple[int, int]] = measure_space
    name: str = field(default_factory=socket.gethostname)

    def read(self, path: str) -> str | None:
        """Return the text of a file without the white space around it; None if it cannot be read."""
        try:
            with (self.root / path.lstrip("/")).open("rb") as file:
                return file.read(_MAX_READ_BYTES).decode("utf-8", "replace").strip()
        except (OSError, ValueError):
            return None

    def read_number(self, path: str) -> int | None:
        """Return the integer that a file holds; None if the file is missing or holds anything else."""
        try:
            return int(self.read(path) or "")
        except ValueError:
            return None

    def names(self, folder: str) -> tuple[str, ...]:
        """Return the sorted names in a folder; empty if the folder cannot be read."""
        try:
            return tuple(sorted(item.name for item in (self.root / folder.lstrip("/")).iterdir()))
        except (OSError, ValueError):
            return ()

    def exists(self, path: str) -> bool:
        """Return whether a path exists; False for a path without permission."""
        try:
            return (self.root / path.lstrip("/")).exists()
        except (OSError, ValueError):
            return False


def answer_within(seconds: float, function: Callable[[], T]) -> T | None:
    """Return the result of ``function()``, or None if it takes longer than ``seconds``. Raises the function's errors.

    For system calls without a time limit, such as resolving a name. After a timeout the function continues in a daemon
    thread, which does not keep the process alive.
    """
    answers: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def call() -> None:
        try:
            answers.put((function(), None))
        except Exception as error:  # raised by the caller below
            answers.put((None, error))

    threading.Thread(target=call, daemon=True).start()
    try:
        value, error = answers.get(timeout=seconds)
    except queue.Empty:
        return None
    if error is not None:
        raise error
    return value


def _text(output: bytes | None) -> str:
    return (output or b"").decode("utf-8", "replace")
