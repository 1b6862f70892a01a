"""What processes of a server and their supervisor tell each other, and how they end with it.

Processes report lines of JSON through a pipe that the supervisor names in their environment (`PIPE`), and without one
on standard output; orders come as such lines on standard input, whose end is theirs.
"""

from __future__ import annotations

import gc
import io
import json
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from meshwright.serving.policies.pool import DELAY, GUARD, NUM_IDLE, NUM_QUEUED, NUM_UP, SLACK, Ints
from meshwright.spec import MeshwrightError

# What a process ends with that would not do better if it were started again.
FATAL = 3
# Its environment tells a process where to report.
PIPE = "MESHWRIGHT_REPORTS"
_FIGURES = {
    "queued": NUM_QUEUED,
    "up": NUM_UP,
    "idle": NUM_IDLE,
    "delay_ns": DELAY,
    "slack_ns": SLACK,
    "guard_ns": GUARD,
}
_GRACE_S = 1.0
_AT_ONCE = 2**16


def report(kind: str, **facts: Any) -> None:
    """Tell something; without a supervisor there is nobody left to work for."""
    line = json.dumps({"kind": kind, "time_ns": time.monotonic_ns(), **facts}) + "\n"
    try:
        pipe = _pipe()
        if pipe is None:
            sys.stdout.write(line)
            sys.stdout.flush()
            return
        left = memoryview(line.encode())
        while left:
            left = left[os.write(pipe, left) :]
    except (OSError, ValueError):
        raise SystemExit from None


@cache
def _pipe() -> int | None:
    """Where to report, which is for this process alone: what it starts must not find it."""
    named = os.environ.pop(PIPE, None)
    if named is None:
        return None
    os.set_inheritable(int(named), False)
    # What a model prints is seen when it is printed.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    return int(named)


def pool_figures(pool: Ints | None) -> dict[str, int]:
    """What a scheduler tells of its policy's pool; zeros before there is one."""
    return {name: 0 if pool is None else int(pool[number]) for name, number in _FIGURES.items()}


class Orders:
    """What a supervisor sends on standard input."""

    def __init__(self) -> None:
        self._begun = b""

    def read(self) -> list[dict[str, Any]]:
        """Standard input can be read: the orders that have come. Raises SystemExit if it has ended."""
        data = os.read(sys.stdin.fileno(), _AT_ONCE)
        if not data:
            raise SystemExit
        *lines, self._begun = (self._begun + data).split(b"\n")
        return [json.loads(line) for line in lines]


def end_after_input() -> None:
    """From now on, end soon after standard input has ended, whatever is computed meanwhile."""
    threading.Thread(target=_end_after_input, daemon=True).start()


def _end_after_input() -> None:
    # Only looked at: whoever can read it ends in order.
    looked_at = select.poll()
    looked_at.register(sys.stdin, select.POLLHUP)
    looked_at.poll()
    time.sleep(_GRACE_S)
    os._exit(0)


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Tell of an error that a user can mend, and end for good."""
    try:
        yield
    except MeshwrightError as error:
        report("error", text=str(error))
        raise SystemExit(FATAL) from None


def keep_what_is_there() -> None:
    """What was loaded stays to the end of a process; to look through it now and then takes 0.1 s where torch is."""
    gc.collect()
    gc.freeze()
