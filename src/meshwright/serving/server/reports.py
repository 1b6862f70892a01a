"""What processes of a server tell their supervisor: lines of JSON on standard output, and how they end with it."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from meshwright.spec import MeshwrightError

# What a process ends with that would not do better if it were started again.
FATAL = 3
# Objects that are made, and not given back, between two looks of the collector. Requests under way are so many at
# times, and none of them is to be looked at.
_OBJECTS = 20_000


def report(kind: str, **facts: Any) -> None:
    """Tell something; without a supervisor there is nobody left to work for."""
    try:
        sys.stdout.write(json.dumps({"kind": kind, **facts}) + "\n")
        sys.stdout.flush()
    except (BrokenPipeError, ValueError):
        raise SystemExit from None


def end_with_input() -> None:
    """Standard input can be read: raise SystemExit if that is its end."""
    if not os.read(sys.stdin.fileno(), 4096):
        raise SystemExit


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Tell of an error that a user can mend, and end for good."""
    try:
        yield
    except MeshwrightError as error:
        report("error", text=str(error))
        raise SystemExit(FATAL) from None


def keep_what_is_there() -> None:
    """From now on the collector looks at what comes, and seldom; what a process has loaded stays to its end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS)
