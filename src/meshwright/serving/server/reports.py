"""Communication between the processes of a server and their supervisor.

A process sends reports, lines of JSON, through the pipe that the environment variable `PIPE` names, or to standard
output without it. Orders of the supervisor arrive as lines of JSON on standard input. When standard input ends because
the supervisor has ended, the process ends, too.
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

# Exit code of a process that would fail again if restarted.
FATAL = 3
# Environment variable with the descriptor for reports.
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
    """Send a report of a ``kind``, with any further entries; end the process if the supervisor has ended."""
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
    """Return the descriptor for reports, hidden from child processes."""
    named = os.environ.pop(PIPE, None)
    if named is None:
        return None
    os.set_inheritable(int(named), False)
    # Show a model's output at once.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    return int(named)


def pool_figures(pool: Ints | None) -> dict[str, int]:
    """Return the figures of a policy's pool that the scheduler reports; zeros if there is no pool yet.

    Queued samples, workers that are up and idle, and delay, slack and guard (ns).
    """
    return {name: 0 if pool is None else int(pool[number]) for name, number in _FIGURES.items()}


class Orders:
    """Reads the supervisor's orders from standard input."""

    def __init__(self) -> None:
        self._begun = b""

    def read(self) -> list[dict[str, Any]]:
        """Read the orders that have arrived; standard input must be readable. Raises SystemExit if it has ended."""
        data = os.read(sys.stdin.fileno(), _AT_ONCE)
        if not data:
            raise SystemExit
        *lines, self._begun = (self._begun + data).split(b"\n")
        return [json.loads(line) for line in lines]


def end_after_input() -> None:
    """Start a thread that ends the process soon after standard input has ended, whatever it is computing."""
    threading.Thread(target=_end_after_input, daemon=True).start()


def _end_after_input() -> None:
    # Only polled: a process that can read it ends in order.
    looked_at = select.poll()
    looked_at.register(sys.stdin, select.POLLHUP)
    looked_at.poll()
    time.sleep(_GRACE_S)
    os._exit(0)


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Context in which a MeshwrightError, which a user can fix, is reported; the process then exits with `FATAL`."""
    try:
        yield
    except MeshwrightError as error:
        report("error", text=str(error))
        raise SystemExit(FATAL) from None


def keep_what_is_there() -> None:
    """Exclude all present objects from garbage collection, as they stay until the end.

    With torch loaded, a collection would take 0.1 s.
    """
    gc.collect()
    gc.freeze()
