"""The order of every rank's computations under a plan's schedule, and how many microbatches it keeps.

A user's own schedule is not trusted. What it yields is checked one by one: of each of the rank's stages, each of its
microbatches runs once forward and once backward (whole, or in two parts), the backward after its forward; so a rank's
order ends after three instructions per microbatch and stage at the latest. The function runs in a thread that is given
up, with the line where it stands, when its time is over.
"""

from __future__ import annotations

import ctypes
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType, GeneratorType
from typing import Any, TypeVar, cast

import numpy as np

from meshwright.program.own_schedules import EXPECTED, OwnSchedule, find_schedule
from meshwright.program.schedules import SCHEDULES, OrderColumns, local_microbatches, num_active
from meshwright.program.schedules.columns import gather_columns
from meshwright.program.schedules.endless import endless_order
from meshwright.spec.errors import ScheduleError, ScheduleReferenceError
from meshwright.spec.instructions import Backward, BackwardInput, BackwardWeight, Computation, Forward, Opcode
from meshwright.spec.own_code import importable, reported, source_line, split_reference
from meshwright.spec.plan import Plan, SynchronousName

T = TypeVar("T")

# Some ten thousand instructions per second are yielded and checked even on a busy core (own measurement, a Xeon shared
# by others); one that needs longer, after a start that is generous for such a machine, is taken to never end.
TIME_LIMIT_S = 10.0
TIME_LIMIT_PER_INSTRUCTION_S = 1e-4

_KINDS: dict[int, type[Computation]] = {
    Opcode.FORWARD: Forward,
    Opcode.BACKWARD: Backward,
    Opcode.BACKWARD_INPUT: BackwardInput,
    Opcode.BACKWARD_WEIGHT: BackwardWeight,
}
_OPCODES = {kind: Opcode(opcode) for opcode, kind in _KINDS.items()}
_Row = tuple[Opcode, int, int]
# A backward is one instruction, or two that follow each other.
_PARTS = frozenset({Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT})
# What gives back what a forward kept.
_RELEASING = (Opcode.BACKWARD, Opcode.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What one rank computes, in order; ``lines`` say where in the user's file each was yielded (none elsewhere)."""

    rank: int
    columns: OrderColumns
    lines: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.columns)

    def item(self, place: int) -> Computation:
        """The typed view of one computation."""
        columns = self.columns
        kind = _KINDS[int(columns.opcode[place])]
        return kind(stage=int(columns.stage[place]), microbatch=int(columns.microbatch[place]))

    @property
    def items(self) -> tuple[Computation, ...]:
        """All of them, typed."""
        return tuple(self.item(place) for place in range(len(self)))

    def where(self, plan: Plan, place: int) -> str:
        """The place in the user's file that yielded an item, for messages."""
        parts = split_reference(plan.schedule)
        return f" ({parts[0]}:{self.lines[place]})" if parts and self.lines and self.lines[place] else ""


def compute_orders(plan: Plan) -> tuple[Order, ...]:
    """The order of every rank, by rank; of a schedule that never flushes, from its first microbatch to its last.

    Raises PlanError for a layout that the schedule does not take, ScheduleError if an own schedule breaks a rule on
    this plan, ScheduleReferenceError if it is none or its file changed.
    """
    schedule = find_schedule(plan)
    if schedule is not None:
        return _read_orders(plan, schedule)
    if plan.is_asynchronous:
        endless = (endless_order(plan, rank) for rank in range(plan.num_ranks))
        return tuple(Order(rank=rank, columns=order.computations()) for rank, order in enumerate(endless))
    write = SCHEDULES[cast("SynchronousName", plan.schedule)]
    return tuple(Order(rank=rank, columns=write(plan, rank)) for rank in range(plan.num_ranks))


# Asked stage by stage and then by the program: kept for the plan at hand, not for more, since orders are large.
@lru_cache(maxsize=2)
def _read_orders(plan: Plan, schedule: OwnSchedule) -> tuple[Order, ...]:
    if isinstance(threading.current_thread(), _ScheduleThread):
        raise ScheduleError(
            f"{plan.schedule} asked for the order of an own schedule while it makes one, which would never end. "
            "Ask num_active(plan, stage) for the number of microbatches that 1F1B keeps."
        )
    limit_s = TIME_LIMIT_S + TIME_LIMIT_PER_INSTRUCTION_S * 2 * plan.num_microbatches * len(plan.stages)
    reader = _Reader(plan, schedule)

    def read_all() -> tuple[Order, ...]:
        return tuple(reader.read(rank) for rank in range(plan.num_ranks))

    found = reader.in_time(read_all, limit_s)
    # Every rank and every prediction asks for itself, so an order that is drawn anew would differ between them.
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
        f"at place {place} {given[0]} and then {given[1]}{where}. "
        "Expected the same order every time, since every rank asks for its own; "
        "seed what is random with something of the plan, as random.Random(plan.graph_hash) does."
    )


def max_in_flight(plan: Plan, stage: int) -> int:
    """Microbatches that a replica of ``stage`` holds at most at the same time: closed forms, or counted."""
    local = len(local_microbatches(plan, stage, plan.stages[stage].ranks[0]))
    if plan.schedule == "gpipe":
        return local
    if plan.schedule == "1f1b":
        return min(num_active(plan, stage), local)
    orders = compute_orders(plan)
    return max(count_in_flight(orders[rank].columns, stage) for rank in plan.stages[stage].ranks)


def count_in_flight(columns: OrderColumns, stage: int) -> int:
    """The most forwards of a stage that are ahead of what releases them at any moment."""
    kinds = columns.opcode[columns.stage == stage]
    ahead = np.cumsum((kinds == Opcode.FORWARD).astype(np.int64) - np.isin(kinds, _RELEASING))
    return int(ahead.max(initial=0))


class _TimeIsOver(BaseException):
    """Raised inside of the user's code."""


class _ScheduleThread(threading.Thread):
    """Where own schedules run."""


class _Reader:
    """Calls an own schedule and checks what it yields."""

    def __init__(self, plan: Plan, schedule: OwnSchedule) -> None:
        parts = split_reference(plan.schedule)
        assert parts is not None, "own schedules are references"
        self._plan, self._schedule = plan, schedule
        self._path, self._name = parts
        self._file = str(self._path.resolve())

    def read(self, rank: int) -> Order:
        """The checked order of one rank."""
        with self._reported(rank):
            result = self._schedule(self._plan, rank)
        try:
            iterator = iter(result)
        except TypeError:
            raise ScheduleReferenceError(
                f"{self._path}:{self._name} returned {_describe(result)}; expected a generator: it {EXPECTED}. "
                "Let it yield Forward(stage=..., microbatch=...) and Backward(...)."
            ) from None
        mine = self._expected(rank)
        rows: list[_Row] = []
        lines: list[int] = []
        run: set[_Row] = set()
        # Around the checks too: numbers that are none may raise whatever they like when they are looked at.
        with self._reported(rank):
            for item in iterator:
                line = self._line(iterator)
                checked = self._check(item, rank, mine, run, line)
                run.add(checked)
                rows.append(checked)
                lines.append(line)
        self._check_all(run, rank, mine)
        return Order(rank=rank, columns=gather_columns(rows), lines=tuple(lines))

    def _expected(self, rank: int) -> dict[int, range]:
        """The microbatches of each stage of a rank."""
        plan = self._plan
        return {stage: local_microbatches(plan, stage, rank) for stage in plan.stages_of(rank)}

    def in_time(self, call: Callable[[], T], limit_s: float) -> T:
        """Run ``call`` in a thread of its own; ScheduleReferenceError, with the line where it stands, if it stays."""
        results: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.append(call())
            except BaseException as error:  # handed on below, in the thread that asked
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
                    f"{self._path}:{self._name} gave no complete order within {limit_s:.0f} s; it stood at {where}. "
                    "Expected two instructions per microbatch and then an end; look for a loop that never ends."
                )
        if errors:
            raise errors[0]
        return results[0]

    @contextmanager
    def _reported(self, rank: int) -> Iterator[None]:
        """Whatever the schedule raises becomes a ScheduleError with its line."""
        what = f"{self._path}:{self._name}(plan, rank={rank}) raised"
        try:
            with reported(self._path, what, ScheduleError):
                yield
        except (KeyboardInterrupt, GeneratorExit) as error:
            # Ctrl-C reaches the main thread alone: here the schedule itself raised it.
            raise ScheduleError(f"{what} {type(error).__name__}. Let it yield instructions and return.") from error

    def _check(self, item: Any, rank: int, mine: dict[int, range], run: set[_Row], line: int) -> _Row:
        """The item as plain numbers; ScheduleError if it may not come now."""
        if type(item) not in _OPCODES:
            what = f"{_describe(item)} was yielded; expected Forward, Backward, or BackwardInput and BackwardWeight"
            raise self._wrong(line, f"{what}, of meshwright.program", rank)
        opcode = _OPCODES[type(item)]
        try:
            stage, microbatch = operator.index(item.stage), operator.index(item.microbatch)
        except TypeError:
            stage = microbatch = -1
        if microbatch not in mine.get(stage, range(0)) or item.version != 0:
            expected = "; or ".join(
                f"stage {index} and a microbatch of {_words(local)}" for index, local in mine.items()
            )
            raise self._wrong(line, f"{_name(item)} was yielded; expected {expected}", rank)
        done = {kind for kind in _OPCODES.values() if (kind, stage, microbatch) in run}
        if (
            opcode in done
            or (opcode is Opcode.BACKWARD and done & _PARTS)
            or (opcode in _PARTS and Opcode.BACKWARD in done)
        ):
            raise self._wrong(line, f"{_name(item)} was yielded twice; each microbatch runs once each way", rank)
        if opcode is not Opcode.FORWARD and Opcode.FORWARD not in done:
            raise self._wrong(line, f"{_name(item)} was yielded before its forward, whose values it needs", rank)
        if opcode is Opcode.BACKWARD_WEIGHT and Opcode.BACKWARD_INPUT not in done:
            raise self._wrong(line, f"{_name(item)} was yielded before its BackwardInput, which comes first", rank)
        return opcode, stage, microbatch

    def _check_all(self, run: set[_Row], rank: int, mine: dict[int, range]) -> None:
        pairs = [(stage, microbatch) for stage, local in mine.items() for microbatch in local]
        missing = [("Forward", *pair) for pair in pairs if (Opcode.FORWARD, *pair) not in run]
        missing += [("Backward", *pair) for pair in pairs if not any((kind, *pair) in run for kind in _RELEASING)]
        if missing:
            kind, stage, microbatch = missing[0]
            raise ScheduleError(
                f"{self._path}:{self._name} ended on rank {rank} without "
                f"{kind}(stage={stage}, microbatch={microbatch}) ({len(missing)} of {2 * len(pairs)} "
                f"instructions are missing). Yield one forward and one backward for each microbatch of "
                f"{_words(mine[stage])}."
            )

    def _wrong(self, line: int, what: str, rank: int) -> ScheduleError:
        where = source_line(self._path, line) if line else f"{self._path}:{self._name}"
        return ScheduleError(f"{where} — on rank {rank}, {what}. Correct the schedule.")

    def _line(self, iterator: Iterator[Any]) -> int:
        """The line of the user's file whose yield was the last; 0 if not known."""
        line = 0
        inner: Iterator[Any] | None = iterator
        while isinstance(inner, GeneratorType):
            if inner.gi_frame is not None and inner.gi_frame.f_code.co_filename == self._file:
                line = inner.gi_frame.f_lineno
            inner = inner.gi_yieldfrom
        return line

    def _standing(self, frame: FrameType | None) -> str:
        """The innermost line of the user's file on a stack."""
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


def _words(microbatches: range) -> str:
    if len(microbatches) <= 4:
        return ", ".join(map(str, microbatches))
    step = f" in steps of {microbatches.step}" if microbatches.step > 1 else ""
    return f"{microbatches[0]} to {microbatches[-1]}{step}"
