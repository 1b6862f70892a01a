"""Check that a controller's answer is a decision: its types, numbers that its log can hold, and streams of its issues.

`issuing` checks the issues against each other and the program.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from meshwright.spec.control import Decision, Issue, Timer
from meshwright.spec.errors import ProgramError
from meshwright.spec.instructions import INSTRUCTIONS, STREAM_NAMES, StreamName

# The stream of each class of instructions, and its numeric fields.
_STREAMS: dict[type, StreamName] = {row.view: row.stream for row in INSTRUCTIONS.values()}
_NUMBERS = {kind: tuple(field.name for field in fields(kind) if field.name != "payload") for kind in _STREAMS}
# Columns are 32 bits wide, those of bytes and times 64.
_MOST, _MOST_WIDE = 2**31 - 1, 2**63 - 2


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
            raise ProgramError(f"{timer} was set; expected whole numbers up to 2^63 - 2, and times in ps.")
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
