"""The log of a controller's decisions, as columns. It can be replayed, or turned into a program without a controller.

Decision k was made at ``now_ps[k]`` for an event of the class ``EVENTS[event_kind[k]]``; ``event_number[k]`` is the
handle that ended, the number of the timer, the rank that died, or 0 for the start. The decision issued the instructions
in the rows ``issue_offsets[k]`` to ``issue_offsets[k + 1]`` of ``issued``. Row i belongs to the stream
``STREAM_NAMES[stream[i]]`` of ``rank[i]``. Likewise, the decision set the timers ``timer_offsets[k]`` to
``timer_offsets[k + 1]``.

``issued`` is a section with one stream, in the order of issue. Its waits are handles (`control`). ``watched`` and
``abandonable`` list handles, ascending. Decision ``abandon_decision[j]`` (ascending) abandoned the computation with
the handle ``abandoned[j]``. A run on real ranks also has ``end_ps``: when each issued instruction ended; those lost by
a death, and only those, have its moment.

`Replay` is a controller that repeats the decisions of a log and refuses any other event or time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from meshwright.spec.control import Controller, Decision, Died, Ended, Event, Issue, Rang, Started, State, Timer
from meshwright.spec.errors import DocumentError, ProgramError
from meshwright.spec.instructions import STREAM_NAMES, Opcode, instruction_row
from meshwright.spec.program import Section

EVENTS = (Started, Ended, Rang, Died)
_COLUMNS = ("opcode", "stage", "microbatch", "version", "peer", "num_bytes", "group")
# A field that an issued instruction does not have.
_ABSENT = ("mark_instruction", "mark_index", "late_instruction", "late_section", "late_awaited", "late_lag")
_MOST = np.iinfo(np.int64).max
_PLACES = {name: place for place, name in enumerate(STREAM_NAMES)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecisionLog:
    """All decisions of one run, in order. The module's docstring describes the columns.

    ``num_instructions`` is the number of instructions of the program's body; it is the first handle of issued ones.
    Raises DocumentError if the columns contradict each other.
    """

    num_ranks: int
    num_instructions: int
    groups: tuple[tuple[int, ...], ...]
    event_kind: NDArray[np.int8]
    event_number: NDArray[np.int64]
    now_ps: NDArray[np.int64]
    issue_offsets: NDArray[np.int64]
    rank: NDArray[np.int32]
    stream: NDArray[np.int8]
    issued: Section
    watched: NDArray[np.int64]
    timer_offsets: NDArray[np.int64]
    timer_ps: NDArray[np.int64]
    timer_number: NDArray[np.int64]
    abandonable: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    abandon_decision: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    abandoned: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    end_ps: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    SCHEMA_VERSION: ClassVar[int] = 1

    def __post_init__(self) -> None:
        count, num_issued = self.num_decisions, self.issued.num_instructions
        _require(
            self.num_ranks >= 1 and self.num_instructions >= 0, "num_ranks is below 1, or num_instructions is negative"
        )
        _require(self.num_instructions < 2**62, "num_instructions is 2^62 or more")
        _require(len(self.event_kind) == len(self.event_number) == count, "the columns of events differ in length")
        _require(len(self.rank) == len(self.stream) == num_issued, f"rank and stream do not have {num_issued} rows")
        _require(len(self.timer_ps) == len(self.timer_number), "the columns of timers differ in length")
        _require(len(self.end_ps) in (0, num_issued), f"end_ps does not have {num_issued} rows")
        _require(
            _partitions(self.issue_offsets, count, num_issued),
            "issue_offsets do not divide the issued instructions among decisions",
        )
        _require(
            _partitions(self.timer_offsets, count, len(self.timer_ps)),
            "timer_offsets do not divide the timers among decisions",
        )
        is_plain = self.issued.stream_offsets.tolist() == [0, num_issued]
        is_plain = is_plain and not any(len(getattr(self.issued, name)) for name in _ABSENT)
        _require(is_plain, "issued is not a single stream without marks and late waits")
        _require(
            _partitions(self.issued.wait_offsets, num_issued, len(self.issued.waits)),
            "wait_offsets do not divide the waits",
        )
        for name, values, low, high in (
            ("event_kind", self.event_kind, 0, len(EVENTS)),
            ("rank", self.rank, 0, self.num_ranks),
            ("stream", self.stream, 0, len(STREAM_NAMES)),
            ("opcode", self.issued.opcode, 0, len(Opcode)),
            ("group", self.issued.group, -1, len(self.groups)),
            ("watched", self.watched, 0, self.num_instructions + num_issued),
            ("abandonable", self.abandonable, self.num_instructions, self.num_instructions + num_issued),
            ("abandon_decision", self.abandon_decision, 0, count),
            ("waits", self.issued.waits, -_MOST, self.num_instructions + num_issued),
            ("join_instruction", self.issued.join_instruction, 0, num_issued),
            ("timer_number", self.timer_number, 0, _MOST),
            ("end_ps", self.end_ps, 0, _MOST),
        ):
            legal = not len(values) or (values.min() >= low and values.max() < high)
            _require(bool(legal), f"column {name} has values outside {low}..{high - 1}")
        members = [rank for group in self.groups for rank in group]
        is_legal = not members or (min(members) >= 0 and max(members) < self.num_ranks)
        _require(is_legal, f"column groups has values outside 0..{self.num_ranks - 1}")
        for name in _COLUMNS:
            _require(len(getattr(self.issued, name)) == num_issued, f"column {name} does not have {num_issued} rows")
        for name, steps, least in (
            ("now_ps", np.diff(self.now_ps, prepend=0), 0),
            ("watched", np.diff(self.watched), 1),
            ("abandonable", np.diff(self.abandonable), 1),
            ("abandon_decision", np.diff(self.abandon_decision), 0),
            ("join_instruction", np.diff(self.issued.join_instruction), 1),
        ):
            _require(bool((steps >= least).all()), f"column {name} does not ascend")
        kinds = np.flatnonzero(self.event_kind == EVENTS.index(Started))
        _require(kinds.tolist() == [0][:count], "its first event is not the start, or the start occurs twice")
        _check_joins(self.issued)
        _check_abandoned(self)
        _check_events(self)
        known = self.num_instructions + np.repeat(self.issue_offsets[1:], np.diff(self.issue_offsets))
        known = np.repeat(known, np.diff(self.issued.wait_offsets))
        _require(bool((self.issued.waits < known).all()), "column waits names an instruction of a later decision")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DecisionLog) and all(
            np.array_equal(getattr(self, name), getattr(other, name))
            if isinstance(getattr(self, name), np.ndarray)
            else getattr(self, name) == getattr(other, name)
            for name in self.__dataclass_fields__
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def deaths(self) -> dict[int, int]:
        """The moment in ps at which each rank that died was taken for dead, in order."""
        died = np.flatnonzero(self.event_kind == EVENTS.index(Died))
        return dict(zip(self.event_number[died].tolist(), self.now_ps[died].tolist(), strict=True))

    @property
    def num_decisions(self) -> int:
        """Number of decisions, including empty ones."""
        return len(self.now_ps)

    def decision(self, index: int) -> Decision:
        """Return decision number ``index`` as an object."""
        rows = range(int(self.issue_offsets[index]), int(self.issue_offsets[index + 1]))
        timers = slice(int(self.timer_offsets[index]), int(self.timer_offsets[index + 1]))
        pairs = zip(self.timer_ps[timers].tolist(), self.timer_number[timers].tolist(), strict=True)
        in_body = self.watched[: np.searchsorted(self.watched, self.num_instructions)].tolist()
        return Decision(
            issues=tuple(self._issue(row) for row in rows),
            timers=tuple(Timer(at_ps=at_ps, number=number) for at_ps, number in pairs),
            watch=() if index else tuple(in_body),
            abandon=tuple(self.abandoned[self.abandon_decision == index].tolist()),
        )

    def event(self, index: int) -> Event:
        """Return event number ``index`` as an object.

        Raises ProgramError for the end of an instruction of the program's body, which the log does not contain.
        """
        next_handle, number = self.num_instructions + int(self.issue_offsets[index]), int(self.event_number[index])
        kind = EVENTS[self.event_kind[index]]
        if kind is Started:
            return Started(next_handle=next_handle)
        if kind is Rang:
            return Rang(next_handle=next_handle, number=number)
        if kind is Died:
            return Died(next_handle=next_handle, rank=number)
        row = number - self.num_instructions
        if row < 0:
            raise ProgramError(
                f"Event {index} of the log is the end of instruction {number} of the program's body, which a log does "
                "not contain. Simulate the program with this log instead."
            )
        instruction = self.issued.instruction(row)
        return Ended(next_handle=next_handle, handle=number, rank=int(self.rank[row]), instruction=instruction)

    def decisions(self) -> Iterator[tuple[Event, int, Decision]]:
        """Yield (event, its moment in ps, decision), in order. Raises as `event`."""
        for index in range(self.num_decisions):
            yield self.event(index), int(self.now_ps[index]), self.decision(index)

    def _issue(self, row: int) -> Issue:
        group, handle = int(self.issued.group[row]), self.num_instructions + row
        place = np.searchsorted(self.issued.join_instruction, row)
        joins = self.issued.join_instruction[place : place + 1].tolist() == [row]
        watching = np.searchsorted(self.watched, handle)
        return Issue(
            rank=int(self.rank[row]),
            stream=STREAM_NAMES[self.stream[row]],
            instruction=self.issued.instruction(row),
            group=self.groups[group] if group >= 0 else (),
            waits=tuple(self.issued.waits_of(row).tolist()),
            need=int(self.issued.join_need[place]) if joins else None,
            watched=self.watched[watching : watching + 1].tolist() == [handle],
            abandonable=handle in self.abandonable,
        )


def make_log(
    num_ranks: int,
    num_instructions: int,
    decided: Iterable[tuple[Event, int, Decision]],
    end_ps: Sequence[int] = (),
) -> DecisionLog:
    """Return the log of the decisions made for a program whose body has ``num_instructions`` instructions.

    ``decided`` yields (event, time in ps, decision), in order. ``end_ps``: when each issued instruction ended on real
    ranks.
    """
    rows = list(decided)
    decisions = [decision for _, _, decision in rows]
    issues = [issue for decision in decisions for issue in decision.issues]
    timers = [timer for decision in decisions for timer in decision.timers]
    groups: dict[tuple[int, ...], int] = {}
    numbers = [groups.setdefault(issue.group, len(groups)) if issue.group else -1 for issue in issues]
    table = np.array([instruction_row(issue.instruction) for issue in issues], np.int64).reshape(-1, 6)
    facts: dict[str, Any] = dict(zip(_COLUMNS, [*table.T.astype(np.int32), np.array(numbers, np.int32)], strict=True))
    facts |= {"opcode": table[:, 0].astype(np.int8), "num_bytes": table[:, 5].copy()}
    joins = [row for row, issue in enumerate(issues) if issue.need is not None]
    watched = [handle for decision in decisions for handle in decision.watch]
    watched += [num_instructions + row for row, issue in enumerate(issues) if issue.watched]
    return DecisionLog(
        num_ranks=num_ranks,
        num_instructions=num_instructions,
        groups=tuple(groups),
        event_kind=np.array([EVENTS.index(type(event)) for event, _, _ in rows], np.int8),
        event_number=np.array([event_number(event) for event, _, _ in rows], np.int64),
        now_ps=np.array([now_ps for _, now_ps, _ in rows], np.int64),
        issue_offsets=_offsets(len(decision.issues) for decision in decisions),
        rank=np.array([issue.rank for issue in issues], np.int32),
        stream=np.array([_PLACES[issue.stream] for issue in issues], np.int8),
        issued=Section(
            stream_offsets=np.array([0, len(issues)], np.int64),
            **facts,
            wait_offsets=_offsets(len(issue.waits) for issue in issues),
            waits=np.array([handle for issue in issues for handle in issue.waits], np.int64),
            mark_instruction=np.zeros(0, np.int64),
            mark_index=np.zeros(0, np.int32),
            join_instruction=np.array(joins, np.int64),
            join_need=np.array([issues[row].need for row in joins], np.int32),
        ),
        watched=np.unique(np.array(watched, np.int64)),
        timer_offsets=_offsets(len(decision.timers) for decision in decisions),
        timer_ps=np.array([timer.at_ps for timer in timers], np.int64),
        timer_number=np.array([timer.number for timer in timers], np.int64),
        abandonable=num_instructions + np.flatnonzero([issue.abandonable for issue in issues]),
        abandon_decision=np.repeat(np.arange(len(rows)), [len(decision.abandon) for decision in decisions]),
        abandoned=np.array([handle for decision in decisions for handle in decision.abandon], np.int64),
        end_ps=np.array(end_ps, np.int64),
    )


def event_number(event: Event) -> int:
    """Return the ``event_number`` of an event (see the module)."""
    match event:
        case Ended(handle=number) | Rang(number=number) | Died(rank=number):
            return number
        case Started():
            return 0


def repeat_decisions(controller: Controller[State], log: DecisionLog) -> State:
    """Give a controller the events of a log; return its last state.

    Raises ProgramError if it decides otherwise than the log says, or as `DecisionLog.event`.
    """
    state = controller.initial
    for index, (event, now_ps, logged) in enumerate(log.decisions()):
        state, decision = controller.decide(state, event, now_ps)
        check_decision(index, event, decision, logged)
    return state


def check_decision(index: int, event: Event, decision: Decision, logged: Decision) -> None:
    """Raise ProgramError if a controller's decision number ``index`` is not the logged one."""
    if decision != logged:
        raise ProgramError(
            f"The controller's decision {index} differs from the log: after {event}, the log has {logged}, the "
            f"controller decided {decision}. Give the controller and the settings of the run."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A controller that repeats the decisions of a log; its state is the number of decisions made so far."""

    log: DecisionLog
    initial: int = 0

    def decide(self, state: int, event: Event, now_ps: int) -> tuple[int, Decision]:
        """Return the next decision of the log. Raises ProgramError if the event or its time differs from the log."""
        log = self.log
        given = (EVENTS.index(type(event)), event_number(event), now_ps)
        logged = (
            (int(log.event_kind[state]), int(log.event_number[state]), int(log.now_ps[state]))
            if state < log.num_decisions
            else None
        )
        if given != logged:
            expected = _describe(*logged) if logged else f"nothing after its {log.num_decisions} decisions"
            raise ProgramError(
                f"The log of decisions does not fit this run: its event {state} is {_describe(*given)}; the log has "
                f"{expected}. Replay a log with the program, costs and contention that it was made with."
            )
        return state + 1, log.decision(state)

    def check_end(self, num_decisions: int) -> None:
        """Raise ProgramError if a run ended after ``num_decisions`` decisions and the log has more."""
        if num_decisions < self.log.num_decisions:
            following = int(self.log.event_kind[num_decisions]), int(self.log.event_number[num_decisions])
            raise ProgramError(
                f"The log of decisions does not fit this run, which ended after {num_decisions} events; the log "
                f"continues with {_describe(*following, int(self.log.now_ps[num_decisions]))}. Replay a log with the "
                "program, costs and contention that it was made with."
            )


def _describe(kind: int, number: int, now_ps: int) -> str:
    what = ("the start", f"the end of instruction {number}", f"timer {number}", f"the death of rank {number}")[kind]
    return f"{what} at {now_ps} ps"


def _offsets(counts: Iterable[int]) -> NDArray[np.int64]:
    return np.cumsum([0, *counts]).astype(np.int64)


def _partitions(offsets: NDArray[np.int64], rows: int, total: int) -> bool:
    return len(offsets) == rows + 1 and offsets[0] == 0 and offsets[-1] == total and bool((np.diff(offsets) >= 0).all())


def _check_joins(issued: Section) -> None:
    joins, need = issued.join_instruction, issued.join_need
    _require(len(need) == len(joins), "the columns of joins differ in length")
    legal = (need >= 1) & (need <= np.diff(issued.wait_offsets)[joins])
    _require(bool(legal.all()), "column join_need is below 1 or above the number of waits of an instruction")


def _check_abandoned(log: DecisionLog) -> None:
    """Check that abandoned computations were issued before, as abandonable."""
    _require(len(log.abandoned) == len(log.abandon_decision), "columns abandoned and abandon_decision differ in length")
    known = log.num_instructions + log.issue_offsets[log.abandon_decision]
    legal = bool((log.abandoned < known).all()) and bool(np.isin(log.abandoned, log.abandonable).all())
    _require(legal, "column abandoned names an instruction that was not issued before, or is not abandonable")
    computes = log.stream[log.abandonable - log.num_instructions] == _PLACES["compute"]
    _require(bool(computes.all()), "column abandonable names instructions that do not compute")


def _check_events(log: DecisionLog) -> None:
    """Check that ends are of watched, issued instructions, ranks die once, and the start has the number 0."""
    ended = log.event_kind == EVENTS.index(Ended)
    handles, known = log.event_number[ended], log.num_instructions + log.issue_offsets[:-1][ended]
    legal = bool((handles < known).all()) and bool(np.isin(handles, log.watched).all())
    _require(legal, "column event_number names an instruction that was not issued before, or is not watched")
    died = log.event_number[log.event_kind == EVENTS.index(Died)]
    legal = len(np.unique(died)) == len(died) and bool((died < log.num_ranks).all())
    _require(legal, "column event_number has a death of an unknown rank, or two of one rank")
    _require(bool((log.event_number >= 0).all()), "column event_number has a negative entry")
    _require(not log.event_number[:1].any(), "column event_number does not begin with 0, for the start")


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise DocumentError(f"The log of decisions is damaged: {what}. Write the log again.")
