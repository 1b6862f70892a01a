"""Anonymous network namespaces: they exist while a process is inside of them or holds their file open.

A namespace that has no name vanishes, with its links and queues, when its last process and its last open file are gone,
however these end. Source: network_namespaces(7).
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable
from typing import TypeVar

from meshwright.spec import RunError

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
_TIMEOUT_S = 60


def new_namespace() -> int:
    """Make a network namespace; return the open file that keeps it. Raises RunError without the right to."""

    def make() -> int:
        _call("unshare", _CLONE_NEWNET)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    return _in_thread(make)


def enter_namespace(file: int) -> None:
    """Move the calling thread, and processes and threads that it starts, into a namespace."""
    _call("setns", file, _CLONE_NEWNET)


def run_inside(file: int, program: str, lines: list[str]) -> None:
    """Run ``ip`` or ``tc`` in a namespace on the given lines. Raises RunError with the line that failed."""

    def run() -> subprocess.CompletedProcess[str]:
        enter_namespace(file)
        return subprocess.run(
            [program, "-batch", "-"],
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )

    done = _in_thread(run)
    if done.returncode != 0:
        raise RunError(f"The emulated network could not be built; {program} printed: {done.stderr.strip()}")


def _in_thread(action: Callable[[], T]) -> T:
    """Run in a thread of its own, so that the caller stays in its namespace."""
    results: list[T] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _call(name: str, *arguments: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise RunError(
            f"A network namespace cannot be used here ({name}: {reason}). Run as root, outside of a sandbox."
        )
