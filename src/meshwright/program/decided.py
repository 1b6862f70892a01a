"""A finished controlled run as an ordinary program (`decided_program`); a controller's checked answer (`read_answer`).

Issued instructions are in the program's streams, after its own. That nothing begins before its decision becomes a wait.
A decision is made when a watched instruction h ends, so the first instruction of the decision in each stream also waits
for h. A join that needs k of n waits must not count h among the k: it gets h n - k + 1 times and needs n + 1, which it
has when h and k of the others have happened.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.program.builder import ProgramBuilder
from meshwright.spec import Program, ProgramError
from meshwright.spec.control import Decision, Ended, Issue, Rang, Timer
from meshwright.spec.decision_log import EVENTS, DecisionLog
from meshwright.spec.instructions import INSTRUCTIONS, STREAM_NAMES, StreamName

# The stream of each class of instructions, and its numeric fields.
_STREAMS: dict[type, StreamName] = {row.view: row.stream for row in INSTRUCTIONS.values()}
_NUMBERS = {kind: tuple(field.name for field in fields(kind) if field.name != "payload") for kind in _STREAMS}
# Columns are 32 bits wide, those of bytes and times 64.
_MOST, _MOST_WIDE = 2**31 - 1, 2**63 - 2


# Checked are its types, numbers that its log can hold, and streams of its issues. `issuing` checks the issues against
# each other and the program.
def read_answer(answer: Any) -> tuple[Any, Decision]:
    """Split the result of `Controller.decide` into state and decision. Raises ProgramError if it is something else."""
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Decision)):
        raise ProgramError(
            f"The controller's `decide` returned {_show(answer)}; expected its state and a `Decision`. End it with "
            "`return state, decision`, or `return state, NOTHING`."
        )
    state, decision = answer
    for name, kind in (("issues", Issue), ("timers", Timer), ("watch", int), ("abandon", int)):
        items = getattr(decision, name)
        if not _is_tuple_of(items, kind):
            raise ProgramError(f"The {name} of a decision are {_show(items)}; expected a tuple of `{kind.__name__}`.")
    for timer in decision.timers:
        if not all(isinstance(value, int) and value <= _MOST_WIDE for value in (timer.at_ps, timer.number)):
            raise ProgramError(f"{timer} was set; its time (ps) and number must be whole numbers of at most 2^63 - 2.")
    for issue in decision.issues:
        _check_issue(issue)
    return state, decision


def _check_issue(issue: Any) -> None:
    instruction = issue.instruction
    kind = type(instruction)
    if kind not in _STREAMS:
        raise ProgramError(f"{_show(instruction)} was issued; expected an instruction of `meshwright.spec`.")
    for name in _NUMBERS[kind]:
        most, range_ = (_MOST_WIDE, "2^63 - 2") if name == "num_bytes" else (_MOST, "2^31 - 1")
        if not _is_number(getattr(instruction, name), most):
            raise ProgramError(f"{instruction} was issued; expected a whole number from 0 to {range_} as its `{name}`.")
    if getattr(instruction, "payload", "activation") not in ("activation", "gradient"):
        raise ProgramError(f"{instruction} was issued; expected 'activation' or 'gradient' as its `payload`.")
    if not (isinstance(issue.rank, int) and (issue.need is None or isinstance(issue.need, int))):
        raise ProgramError(f"{issue} has a rank or a need that is not a whole number; expected an int.")
    if not (isinstance(issue.watched, bool) and isinstance(issue.abandonable, bool)):
        raise ProgramError(f"{issue} has a `watched` or `abandonable` that is not a bool; expected True or False.")
    if not (_is_tuple_of(issue.waits, int) and _is_tuple_of(issue.group, int)):
        raise ProgramError(f"{issue} has waits or a group that are not a tuple of int; expected handles, and ranks.")
    if issue.stream in STREAM_NAMES and issue.stream != _STREAMS[kind]:
        raise ProgramError(
            f"{instruction} was issued to stream {issue.stream!r} of rank {issue.rank}; expected {_STREAMS[kind]!r}, "
            f"the stream of every {kind.__name__}."
        )


def _is_tuple_of(items: Any, kind: type) -> bool:
    return isinstance(items, tuple) and all(isinstance(item, kind) for item in items)


def _is_number(value: Any, most: int) -> bool:
    return isinstance(value, int) and 0 <= value <= most


def _show(value: Any) -> str:
    """Return the value as text of at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


Ids = NDArray[np.int64]


def decided_program(program: Program, log: DecisionLog) -> Program:
    """Return the program that a controller made of ``program``; it takes the time of the controlled run.

    Raises ProgramError if the log is of another program, or if instructions were issued when a timer rang, because a
    program has no clock to wait for.
    """
    timed = (log.event_kind == EVENTS.index(Rang)) & (np.diff(log.issue_offsets) > 0)
    if timed.any():
        raise ProgramError(
            f"Decision {int(np.argmax(timed))} issued instructions when a timer rang; a program has no clock to wait "
            "for. Replay the log instead, or let a watched instruction take that time."
        )
    return write_decided(program, log, _released_by(log))


def write_decided(program: Program, log: DecisionLog, released_by: Ids) -> Program:
    """Return the program with issued instructions appended; row i also waits for ``released_by[i]`` (-1: nothing)."""
    body, issued = program.body, log.issued
    check_fit(program, log)
    builder = ProgramBuilder(program.num_ranks)
    rank, place = ranks_and_places(program, log)
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(body, name), getattr(issued, name)])
        for name in ("opcode", "stage", "microbatch", "version", "peer", "num_bytes")
    }
    numbers = [[builder.group(group) for group in groups] for groups in (program.groups, log.groups)]
    columns["group"] = np.concatenate(
        [np.array([*known, -1])[section.group] for known, section in zip(numbers, (body, issued), strict=True)]
    )
    handles = np.empty(len(rank), np.int64)
    for number, name in enumerate(STREAM_NAMES):
        chosen = np.flatnonzero(place == number)
        chosen = chosen[np.argsort(rank[chosen], kind="stable")]
        offsets = np.searchsorted(rank[chosen], np.arange(program.num_ranks + 1))
        handles[chosen] = builder.extend(offsets, name, **{key: values[chosen] for key, values in columns.items()})
    marks = builder.mark_each(handles[body.mark_instruction], body.mark_index.astype(np.int64))
    waiting = np.repeat(np.arange(len(body.opcode)), np.diff(body.wait_offsets))
    in_body = np.where(body.waits < len(body.opcode), body.waits, body.waits + len(issued.opcode))
    _wait(builder, handles, marks, waiting, in_body)
    released_by, need, rows = _with_release(log, released_by)
    waits = np.concatenate([issued.waits, released_by])
    waiting = np.concatenate([np.repeat(np.arange(len(issued.opcode)), np.diff(issued.wait_offsets)), rows])
    awaited = np.where(waits >= 0, waits, len(handles) - 1 - waits)
    _wait(builder, handles, marks, len(body.opcode) + waiting, awaited)
    builder.join_each(handles[body.join_instruction], body.join_need)
    builder.join_each(handles[len(body.opcode) + issued.join_instruction], need)
    return builder.build(schedule=program.schedule, plan_hash=program.plan_hash)


def static_order(program: Program, log: DecisionLog) -> Ids:
    """Return the handle of each instruction of the decided program, in its order."""
    rank, place = ranks_and_places(program, log)
    order: Ids = np.argsort(rank * len(STREAM_NAMES) + place, kind="stable")
    return order


def ranks_and_places(program: Program, log: DecisionLog) -> tuple[Ids, Ids]:
    """Return the rank, and the index of the stream in `STREAM_NAMES`, of each handle."""
    lengths = np.diff(program.body.stream_offsets)
    ranks = np.array([stream.rank for stream in program.streams], np.int64)
    places = np.array([STREAM_NAMES.index(stream.name) for stream in program.streams], np.int64)
    return (
        np.concatenate([np.repeat(ranks, lengths), log.rank]),
        np.concatenate([np.repeat(places, lengths), log.stream]),
    )


def check_fit(program: Program, log: DecisionLog) -> None:
    """Raise ProgramError unless a log can belong to a program."""
    ours = program.num_ranks, program.body.num_instructions
    theirs = log.num_ranks, log.num_instructions
    if ours != theirs:
        raise ProgramError(
            f"The log of decisions is of a program of {theirs[0]} ranks with {theirs[1]} instructions; the program has "
            f"{ours[0]} and {ours[1]}. Give the program that the controller extended."
        )
    num_marks = len(program.body.mark_instruction)
    if (log.issued.waits < -num_marks).any():
        raise ProgramError(
            f"The log of decisions is damaged, or of another program: its column waits names mark "
            f"{-1 - int(log.issued.waits.min())}; the program has {num_marks} marks. Give the program that the "
            "controller extended."
        )


def _released_by(log: DecisionLog) -> Ids:
    """Return, for each issued row that is the first of its decision in its stream, the handle it waits for, else -1."""
    decision = np.repeat(np.arange(log.num_decisions), np.diff(log.issue_offsets))
    stream = log.rank.astype(np.int64) * len(STREAM_NAMES) + log.stream
    _, first = np.unique(np.stack([decision, stream]), axis=1, return_index=True)
    ended = first[log.event_kind[decision[first]] == EVENTS.index(Ended)]
    released_by = np.full(len(stream), -1, np.int64)
    released_by[ended] = log.event_number[decision[ended]]
    return released_by


def _with_release(log: DecisionLog, released_by: Ids) -> tuple[Ids, NDArray[np.int32], Ids]:
    """Return additional waits on released instructions, the needs of joins with them, and the rows that wait."""
    times = (released_by >= 0).astype(np.int64)
    joins, need = log.issued.join_instruction, log.issued.join_need.copy()
    num_waits = np.diff(log.issued.wait_offsets)[joins]
    released = times[joins] > 0
    times[joins[released]] = (num_waits - need + 1)[released]
    need[released] = num_waits[released] + 1
    rows = np.repeat(np.arange(len(released_by)), times)
    return released_by[rows], need, rows


def _wait(builder: ProgramBuilder, handles: Ids, marks: Ids, waiting: Ids, awaited: Ids) -> None:
    """Add waits for ``awaited``: rows, or ``len(handles) + m`` for mark m."""
    known = np.concatenate([handles, marks])
    builder.wait_each(handles[waiting], known[awaited])
