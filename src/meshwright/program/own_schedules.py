"""A user's own schedules: load the function ``path/to/file.py:function`` or the file ``path/to/orders.csv``.

A plan keeps this reference and the hash of the file's content; if the file changed since the plan was made, it is
refused. Files that the user's file imports are not hashed. Relative paths are relative to the working directory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from meshwright.program.order_files import OrderFile, parse_order_file, read_order_file
from meshwright.program.schedules import SCHEDULES
from meshwright.spec import Plan, ScheduleReferenceError
from meshwright.spec.instructions import Computation
from meshwright.spec.own_code import load_function, order_file, read_source, source_hash, split_reference
from meshwright.spec.plan import unknown_schedule
from meshwright.spec.schedules import SCHEDULE_NAMES

# A user's function: (plan, rank) → the rank's computations, one by one.
OwnSchedule = Callable[[Plan, int], Iterable[Computation]]

EXPECTED = "yields the forwards and backwards of one rank: function(plan, rank)"


def find_schedule(plan: Plan) -> OwnSchedule | OrderFile | None:
    """Return the user's own schedule of a plan, a function or a file of orders; None for a named schedule.

    Raises ScheduleReferenceError if the schedule's file is missing, has changed, or lacks the function.
    """
    if not plan.has_own_schedule:
        return None
    orders = order_file(plan.schedule)
    path, name = (orders, "") if orders else _split(plan.schedule)
    content = read_order_file(path) if orders else read_source(path, EXPECTED, ScheduleReferenceError)
    found = source_hash(content)
    if found != plan.schedule_hash:
        raise ScheduleReferenceError(
            f"{path} changed since the plan was made: its hash was {plan.schedule_hash} and is now {found}. Plan again "
            f"with --schedule {plan.schedule}, or restore the file."
        )
    return parse_order_file(path, content) if orders else _load(path.resolve(), path, name, content)


def with_schedule(plan: Plan, schedule: str | OwnSchedule) -> Plan:
    """Return the same plan under another schedule.

    ``schedule`` is the name of a schedule, a function, the reference ``path/to/file.py:function`` of a function, or the
    path of a file of orders, ``path/to/orders.csv``.

    Raises PlanError for an unknown name, ScheduleReferenceError if the function does not exist or other processes could
    not import it.
    """
    name, content_hash = name_schedule(schedule)
    exchange = plan.exchange.suited_to(name)
    return replace(plan, schedule=name, schedule_hash=content_hash, exchange=exchange)


def name_schedule(schedule: str | OwnSchedule) -> tuple[str, str]:
    """Return what a plan records of a schedule: its name or reference, and the hash of its file ("" for a name).

    Runs a Python file once to check it. Raises the same errors as `with_schedule`.
    """
    reference = schedule if isinstance(schedule, str) else _reference_of(schedule)
    if reference in SCHEDULE_NAMES:
        return reference, ""
    if reference.endswith(".py"):
        raise ScheduleReferenceError(
            f"{reference!r} names a file but no function in it. Give {reference}:function, where the function "
            f"{EXPECTED}."
        )
    orders = order_file(reference)
    if orders is not None:
        content = read_order_file(orders)
        parse_order_file(orders, content)
        return reference, source_hash(content)
    path, name = _split(reference)
    content = read_source(path, EXPECTED, ScheduleReferenceError)
    _load(path.resolve(), path, name, content)
    return reference, source_hash(content)


def _split(reference: str) -> tuple[Path, str]:
    parts = split_reference(reference)
    if parts is None:
        raise unknown_schedule(reference)
    return parts


@lru_cache(maxsize=32)
def _load(resolved: Path, path: Path, name: str, content: bytes) -> OwnSchedule:  # noqa: ARG001 - part of the key
    """Run the file and return the function. Cached by content, so that one search runs a file once."""
    function = load_function(path, name, expected=EXPECTED, error=ScheduleReferenceError, content=content)
    _check_signature(function, path, name)
    return function


def _check_signature(function: Callable[..., Any], path: Path, name: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return
    try:
        signature.bind(None, 0)
    except TypeError as error:
        code = getattr(function, "__code__", None)
        where = f"{path}:{code.co_firstlineno}" if code is not None else str(path)
        raise ScheduleReferenceError(
            f"{where}: {name}{signature} cannot be called with two arguments ({error}). Write it as "
            f"def {name}(plan, rank)."
        ) from None


def _reference_of(function: Callable[..., Any]) -> str:
    """Return the reference of a Python function for the plan's document, by which other processes find it."""
    for known, named in SCHEDULES.items():
        if function is named:
            return known
    qualified = getattr(function, "__qualname__", "") or type(function).__qualname__
    module = getattr(function, "__module__", None)
    file = inspect.getsourcefile(inspect.unwrap(function)) if inspect.isfunction(function) else None
    if "." in qualified or not qualified.isidentifier() or module in (None, "__main__") or file is None:
        where = f"in {module}" if module else "of no module"
        raise ScheduleReferenceError(
            f"The schedule {qualified} ({where}) cannot be imported by other processes, but every rank imports the "
            "schedule from its file. Expected a function at the top level of another file, not a lambda, a method, an "
            "inner function or a function of the running script. Move it into a file and import it from there."
        )
    path = Path(file).resolve()
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown.as_posix()}:{qualified}"
