"""The order of every rank's computations under a plan's schedule, and how many microbatches are in flight.

A user's own schedule is not trusted. Each computation that the user's function yields is checked against the rules of
`rank_rules`, so a rank's order ends after at most three instructions per microbatch and stage. The function runs in a
thread with a time limit; if the function exceeds it, an error names the current line. `order_files` reads files of
orders.
"""

from __future__ import annotations

import ctypes
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType, GeneratorType
from typing import Any, TypeVar

import numpy as np

from meshwright.program.order_bounds import KINDS, Order
from meshwright.program.order_files import OrderFile, place_orders
from meshwright.program.own_schedules import EXPECTED, OwnSchedule, find_schedule
from meshwright.program.rank_rules import RELEASING, RankRules
from meshwright.program.schedules import SCHEDULES, OrderColumns, RankOrders, local_microbatches, num_active
from meshwright.program.schedules.asynchronous import endless_order
from meshwright.program.schedules.seats import gather_columns
from meshwright.spec import Opcode, Plan, ScheduleError, ScheduleReferenceError
from meshwright.spec.instructions import Computation
from meshwright.spec.own_code import importable, reported, source_line, split_reference

T = TypeVar("T")

# About ten thousand instructions per second are yielded and checked even on a busy core (own measurement, a shared
# Xeon); a schedule that needs longer, after a generous start, is taken never to end.
TIME_LIMIT_S = 10.0
TIME_LIMIT_PER_INSTRUCTION_S = 1e-4

_OPCODES = {kind: Opcode(opcode) for opcode, kind in KINDS.items()}
_Row = tuple[Opcode, int, int]


def compute_orders(plan: Plan) -> tuple[Order, ...]:
    """Return the order of every rank, by rank; for an asynchronous schedule, one run with the body once.

    Raises PlanError if the schedule does not support the plan's assignment of stages to ranks, ScheduleError if a
    user's schedule breaks a rule on this plan, and ScheduleReferenceError if the user's function does not yield
    computations or its file changed.
    """
    schedule = find_schedule(plan)
    if isinstance(schedule, OrderFile):
        return place_orders(plan, schedule)
    if schedule is not None:
        return _read_orders(plan, schedule)
    if plan.is_asynchronous:
        endless = (endless_order(plan, rank) for rank in range(plan.num_ranks))
        return tuple(Order(rank=rank, columns=order.computations()) for rank, order in enumerate(endless))
    return tuple(Order(rank=rank, columns=own) for rank, own in enumerate(named_orders(plan).split()))


def named_orders(plan: Plan) -> RankOrders:
    """Return the orders of all ranks for a named synchronous schedule, as one `RankOrders`."""
    return SCHEDULES[plan.schedule](plan)


# Requested stage by stage and then by the program: cached for the current plan only, because orders are large.
@lru_cache(maxsize=2)
def _read_orders(plan: Plan, schedule: OwnSchedule) -> tuple[Order, ...]:
    if isinstance(threading.current_thread(), _ScheduleThread):
        raise ScheduleError(
            f"{plan.schedule} calls a function that computes the plan's orders, such as compute_orders; this would "
            "call the schedule again, without end. Call num_active(plan, stage) for the number of microbatches that "
            "1F1B keeps in flight."
        )
    limit_s = TIME_LIMIT_S + TIME_LIMIT_PER_INSTRUCTION_S * 2 * plan.num_microbatches * len(plan.stages)
    reader = _Reader(plan, schedule)

    def read_all() -> tuple[Order, ...]:
        return tuple(reader.read(rank) for rank in range(plan.num_ranks))

    found = reader.in_time(read_all, limit_s)
    # Every rank and every prediction calls the schedule itself, so a random order would differ between them.
    again = reader.in_time(read_all, limit_s)
    differing = next((pair for pair in zip(found, again, strict=True) if pair[0].columns != pair[1].columns), None)
    if differing is not None:
        raise ScheduleReferenceError(_two_orders(plan, *differing))
    return found


def _two_orders(plan: Plan, first: Order, second: Order) -> str:
    pairs = zip(first.items, second.items, strict=False)
    place = next((place for place, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(first), len(second)))
    given = [_name(order.item(place)) if place < len(order) else "the end" for order in (first, second)]
    where = second.where(plan, place) if place < len(second) else ""
    return (
        f"{plan.schedule} gave two orders for rank {first.rank} when it was called twice: "
        f"at position {place} {given[0]} and then {given[1]}{where}. "
        "Expected the same order every time, because every rank calls the schedule itself; "
        "seed random choices with a value of the plan, as random.Random(plan.graph_hash) does."
    )


def max_in_flight(plan: Plan, stage: int) -> int:
    """Return the largest number of microbatches that a replica of ``stage`` has in flight at one time.

    gpipe and 1f1b have closed formulas; for other schedules the orders are computed and counted.
    """
    local = max(plan.stages[stage].counts(plan.num_microbatches))
    if plan.schedule == "gpipe":
        return local
    if plan.schedule == "1f1b" and not plan.has_shares:
        return min(num_active(plan, stage), local)
    orders = compute_orders(plan)
    return max(count_in_flight(orders[rank].columns, stage) for rank in plan.stages[stage].ranks)


def count_in_flight(columns: OrderColumns, stage: int) -> int:
    """Return the largest number of forwards of ``stage`` whose saved activations are held at one time in an order."""
    kinds = columns.opcode[columns.stage == stage]
    ahead = np.cumsum((kinds == Opcode.FORWARD).astype(np.int64) - np.isin(kinds, RELEASING))
    return int(ahead.max(initial=0))


class _TimeIsOver(BaseException):
    """Raised asynchronously inside the user's code to end it."""


class _ScheduleThread(threading.Thread):
    """The type of thread in which own schedules run, to detect nested calls."""


class _Reader:
    """Calls a user's schedule and checks what it yields."""

    def __init__(self, plan: Plan, schedule: OwnSchedule) -> None:
        parts = split_reference(plan.schedule)
        assert parts is not None, "own schedules are references"
        self._plan, self._schedule = plan, schedule
        self._path, self._name = parts
        self._file = str(self._path.resolve())

    def read(self, rank: int) -> Order:
        """Return the checked order of one rank."""
        with self._reported(rank):
            result = self._schedule(self._plan, rank)
        try:
            iterator = iter(result)
        except TypeError:
            raise ScheduleReferenceError(
                f"{self._path}:{self._name} returned {_describe(result)}; expected a generator: it {EXPECTED}. "
                "Let it yield Forward(stage=..., microbatch=...) and Backward(...)."
            ) from None
        rules = RankRules({stage: local_microbatches(self._plan, stage, rank) for stage in self._plan.stages_of(rank)})
        rows: list[_Row] = []
        lines: list[int] = []
        # The checks are inside, too, because values that are not numbers may raise anything when they are inspected.
        with self._reported(rank):
            for item in iterator:
                line = self._line(iterator)
                rows.append(self._check(item, rank, rules, line))
                lines.append(line)
        if missing := rules.missing():
            raise ScheduleError(f"{self._path}:{self._name} ended on rank {rank} without {missing}")
        return Order(rank=rank, columns=gather_columns(rows), lines=tuple(lines))

    def in_time(self, call: Callable[[], T], limit_s: float) -> T:
        """Run ``call`` in a thread. Raises ScheduleReferenceError, with the current line, after ``limit_s`` seconds."""
        results: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.append(call())
            except BaseException as error:  # raised again below, in the calling thread
                errors.append(error)

        thread = _ScheduleThread(target=work, name="schedule", daemon=True)
        with importable(self._path.parent):
            thread.start()
            thread.join(limit_s)
            if thread.is_alive():
                where = self._standing(sys._current_frames().get(thread.ident or 0))
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_TimeIsOver)
                )
                thread.join(1.0)
                raise ScheduleReferenceError(
                    f"{self._path}:{self._name} gave no complete order within {limit_s:.0f} s; it was at {where}. "
                    "Expected two or three instructions per microbatch and stage, and then an end; look for a loop "
                    "that never ends."
                )
        if errors:
            raise errors[0]
        return results[0]

    @contextmanager
    def _reported(self, rank: int) -> Iterator[None]:
        """Turn any exception of the schedule into a ScheduleError with its line."""
        what = f"{self._path}:{self._name}(plan, rank={rank}) raised"
        try:
            with reported(self._path, what, ScheduleError):
                yield
        except (KeyboardInterrupt, GeneratorExit) as error:
            # Ctrl-C reaches the main thread only, so the schedule itself raised this.
            raise ScheduleError(f"{what} {type(error).__name__}. Let it yield instructions and return.") from error

    def _check(self, item: Any, rank: int, rules: RankRules, line: int) -> _Row:
        """Return the item as plain numbers. Raises ScheduleError if it may not come now."""
        if type(item) not in _OPCODES:
            what = f"{_describe(item)} was yielded; expected Forward, Backward, or BackwardInput and BackwardWeight"
            raise self._wrong(line, f"{what}, of meshwright.program", rank)
        opcode = _OPCODES[type(item)]
        try:
            stage, microbatch = operator.index(item.stage), operator.index(item.microbatch)
        except TypeError:
            stage = microbatch = -1
        if not rules.knows(stage, microbatch) or item.version != 0:
            raise self._wrong(line, f"{_name(item)} was yielded; expected {rules.expected()}", rank)
        if fault := rules.take(opcode, stage, microbatch):
            raise self._wrong(line, f"{_name(item)} was yielded {fault}", rank)
        return opcode, stage, microbatch

    def _wrong(self, line: int, what: str, rank: int) -> ScheduleError:
        where = source_line(self._path, line) if line else f"{self._path}:{self._name}"
        return ScheduleError(f"{where} — on rank {rank}, {what}. Correct the schedule.")

    def _line(self, iterator: Iterator[Any]) -> int:
        """Return the line of the user's file that yielded last; 0 if not known."""
        line = 0
        inner: Iterator[Any] | None = iterator
        while isinstance(inner, GeneratorType):
            if inner.gi_frame is not None and inner.gi_frame.f_code.co_filename == self._file:
                line = inner.gi_frame.f_lineno
            inner = inner.gi_yieldfrom
        return line

    def _standing(self, frame: FrameType | None) -> str:
        """Return the innermost line of the user's file on a stack."""
        while frame is not None:
            if frame.f_code.co_filename == self._file:
                return source_line(self._path, frame.f_lineno)
            frame = frame.f_back
        return str(self._path)


def _describe(value: Any) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _name(item: Computation) -> str:
    return f"{type(item).__name__}(stage={item.stage!r}, microbatch={item.microbatch!r})"[:100]
