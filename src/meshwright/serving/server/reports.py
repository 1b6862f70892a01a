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
    """What was loaded stays to the end of a process; to look through it now and then takes 0.1 s where torch is."""
    gc.collect()
    gc.freeze()
