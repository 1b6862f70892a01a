"""Turn a finished run under a controller into an ordinary program (`decided_program`); check decisions (`read_answer`).

The instructions that the controller issued follow the program's own in each stream. In the run, no instruction began
before its decision; in the program, a wait ensures this. A decision is made when a watched instruction h ends, so the
first instruction of the decision in each stream also waits for h. A join that needs k of n waits must not count h among
the k: it gets n - k + 1 waits for h and needs n + 1 waits, which have happened when h and k others have happened.
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
    """Split the result of `Controller.decide` into state and decision.

    Raises ProgramError if it is not a pair of a state and a `Decision`, or if a field of the decision has a wrong type
    or range.
    """
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Decision)):
        raise ProgramError(
            f"The controller's `decide` returned {_show(answer)}; expected its state and a `Decision`. End `decide` "
            "with `return state, decision`, or `return state, NOTHING`."
        )
    state, decision = answer
    for name, kind in (("issues", Issue), ("timers", Timer), ("watch", int), ("abandon", int)):
        items = getattr(decision, name)
        if not _is_tuple_of(items, kind):
            raise ProgramError(
                f"A controller's decision has {name}={_show(items)}; expected a tuple of `{kind.__name__}`."
            )
    for timer in decision.timers:
        if not all(isinstance(value, int) and value <= _MOST_WIDE for value in (timer.at_ps, timer.number)):
            raise ProgramError(
                f"A controller set {timer}; expected whole numbers of at most 2^63 - 2 as its `at_ps` and `number`."
            )
    for issue in decision.issues:
        _check_issue(issue)
    return state, decision


def _check_issue(issue: Any) -> None:
    instruction = issue.instruction
    kind = type(instruction)
    if kind not in _STREAMS:
        raise ProgramError(
            f"A controller issued {_show(instruction)}; expected an instruction class of `meshwright.spec`."
        )
    for name in _NUMBERS[kind]:
        most, range_ = (_MOST_WIDE, "2^63 - 2") if name == "num_bytes" else (_MOST, "2^31 - 1")
        if not _is_number(getattr(instruction, name), most):
            raise ProgramError(
                f"A controller issued {instruction}; expected a whole number from 0 to {range_} as its `{name}`."
            )
    if getattr(instruction, "payload", "activation") not in ("activation", "gradient"):
        raise ProgramError(f"A controller issued {instruction}; expected 'activation' or 'gradient' as its `payload`.")
    if not (isinstance(issue.rank, int) and (issue.need is None or isinstance(issue.need, int))):
        raise ProgramError(f"{issue} has a wrong type; expected an int as `rank`, and an int or None as `need`.")
    if not (isinstance(issue.watched, bool) and isinstance(issue.abandonable, bool)):
        raise ProgramError(f"{issue} has a wrong type; expected True or False as `watched` and `abandonable`.")
    if not (_is_tuple_of(issue.waits, int) and _is_tuple_of(issue.group, int)):
        raise ProgramError(
            f"{issue} has a wrong type; expected tuples of int as `waits` (handles) and as `group` (ranks)."
        )
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
    """Return ``program`` with all instructions that a controller issued; it takes the same time as the controlled run.

    Raises ProgramError if the log belongs to another program, if a rank died, or if instructions were issued when a
    timer rang: a program cannot wait for a time, only for instructions.
    """
    if log.deaths:
        raise ProgramError(
            f"Rank {next(iter(log.deaths))} died in this run; the instructions that were lost with it are not those of "
            "a program. Replay the log instead."
        )
    timed = (log.event_kind == EVENTS.index(Rang)) & (np.diff(log.issue_offsets) > 0)
    if timed.any():
        raise ProgramError(
            f"Decision {int(np.argmax(timed))} issued instructions when a timer rang; a program cannot wait for a "
            "time, only for instructions. Replay the log instead, or let a watched instruction take that time."
        )
    return write_decided(program, log, _released_by(log))


def write_decided(program: Program, log: DecisionLog, released_by: Ids) -> Program:
    """Return the program with the log's issued instructions appended.

    Issued instruction i also waits for the handle ``released_by[i]``; -1 adds no wait. Raises ProgramError if the log
    does not fit the program.
    """
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
    """Return the controlled run's handle of each instruction of `decided_program`, in the order of its rows."""
    rank, place = ranks_and_places(program, log)
    order: Ids = np.argsort(rank * len(STREAM_NAMES) + place, kind="stable")
    return order


def ranks_and_places(program: Program, log: DecisionLog) -> tuple[Ids, Ids]:
    """Return the rank of each handle, and the index of its stream in `STREAM_NAMES`; both of shape (handles,).

    The program's own instructions come first, then the issued ones.
    """
    lengths = np.diff(program.body.stream_offsets)
    ranks = np.array([stream.rank for stream in program.streams], np.int64)
    places = np.array([STREAM_NAMES.index(stream.name) for stream in program.streams], np.int64)
    return (
        np.concatenate([np.repeat(ranks, lengths), log.rank]),
        np.concatenate([np.repeat(places, lengths), log.stream]),
    )


def check_fit(program: Program, log: DecisionLog) -> None:
    """Raise ProgramError if a log belongs to another program: different numbers of ranks, instructions or marks."""
    ours = program.num_ranks, program.body.num_instructions
    theirs = log.num_ranks, log.num_instructions
    if ours != theirs:
        raise ProgramError(
            f"The log of decisions belongs to a program of {theirs[0]} ranks with {theirs[1]} instructions; the given "
            f"program has {ours[0]} ranks and {ours[1]} instructions. Give the program that the controller extended."
        )
    num_marks = len(program.body.mark_instruction)
    if (log.issued.waits < -num_marks).any():
        raise ProgramError(
            f"The log of decisions is damaged, or belongs to another program: its column `waits` names mark "
            f"{-1 - int(log.issued.waits.min())}, but the program has {num_marks} marks. Give the program that the "
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
