"""Orders in the format of torch.distributed.pipelining: one line per rank, its actions in order, separated by commas.

    0F3                                     stage 0, forward, microbatch 3; B: a whole backward, I: its part for inputs,
                                            W: that for weights
    (0F3;1B2)OVERLAP_F_B                    a forward and a backward that run together
    0SEND_F3, 1RECV_F3, 1SEND_B3, 0RECV_B3  messages between ranks                          "compute_comms" only
    0UNSHARD, 0RESHARD, 0REDUCE_GRAD        gathers and sums of parameters, without number  the same

An empty action is a step in which the rank is idle. Messages are checked and then omitted, because a program makes its
own (`transfers`); the last three do nothing for stages whose parameters are not sharded, as in a plan.

Source: torch 2.13, torch/distributed/pipelining/schedules.py, `_Action` and `_PipelineScheduleRuntime._load_csv`.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.program.schedules.columns import OrderColumns, gather_columns
from meshwright.spec.errors import ScheduleReferenceError
from meshwright.spec.instructions import Opcode

_LETTERS = {Opcode.FORWARD: "F", Opcode.BACKWARD: "B", Opcode.BACKWARD_INPUT: "I", Opcode.BACKWARD_WEIGHT: "W"}
_OPCODES = {letter: opcode for opcode, letter in _LETTERS.items()}
_MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
_PARAMETERS = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
# Limits numbers to more digits than any plan has stages or microbatches.
_ACTION = re.compile(rf"([0-9]{{1,7}})({'|'.join((*_OPCODES, *_MESSAGES, *_PARAMETERS))})([0-9]{{0,7}})")
_PAIR = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B")
_FORMS = "expected one such as 0F3, 0B3, 0I3, 0W3, 0SEND_F3, 0UNSHARD or (0F3;1B2)OVERLAP_F_B"


class CsvLine(NamedTuple):
    """The computations of one line; ``number`` is the line's, ``places`` the number of each one's action, from 1."""

    number: int
    columns: OrderColumns
    places: NDArray[np.int32]


class _Message(NamedTuple):
    """A send or receive: its line, its action, and the number of computations before it in its line."""

    number: int
    place: int
    after: int


# The kind of an action, its stage and its microbatch.
_Key = tuple[str, int, int]


def parse_lines(content: bytes, path: Path) -> tuple[CsvLine, ...]:
    """Return the lines of a file, without messages. Raises ScheduleReferenceError with the line and the action."""
    found: list[CsvLine] = []
    messages: dict[_Key, _Message] = {}
    for number, cells in _rows(content, path):
        rows: list[tuple[int, int, int, bool]] = []
        places: list[int] = []
        for place, cell in enumerate(map(str.strip, cells), start=1):
            if not cell:
                continue
            try:
                for kind, *numbers, joint in _read_cell(cell):
                    if kind in _OPCODES:
                        rows.append((_OPCODES[kind], numbers[0], numbers[1], joint))
                        places.append(place)
                    elif kind in _MESSAGES:
                        key = kind, numbers[0], numbers[1]
                        if key in messages:
                            raise ValueError(f"stands in line {messages[key].number}, too; expected it once")
                        messages[key] = _Message(number, place, len(rows))
            except ValueError as error:
                raise ScheduleReferenceError(describe_action(path, number, place, cell, str(error))) from None
        found.append(CsvLine(number, gather_columns(rows), np.array(places, np.int32)))
    _check_messages(found, messages, path)
    return tuple(found)


def describe_action(path: Path, number: int, place: int, cell: str, what: str) -> str:
    """Return what is wrong with one action, with its place in the file."""
    return f"{path}:{number}: action {place}, {cell[:60]!r}, {what}. Correct the file."


def write_lines(orders: Iterable[OrderColumns]) -> str:
    """Return the text of a file, byte for byte as torch's `_dump_csv` writes it ("compute_only")."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows(_cells(columns) for columns in orders)
    return text.getvalue()


def name_action(opcode: int, stage: int, microbatch: int) -> str:
    """Return an action's name, such as ``0F3``."""
    return f"{stage}{_LETTERS[Opcode(opcode)]}{microbatch}"


def _cells(columns: OrderColumns) -> Iterator[str]:
    before = ""
    for row, joint in zip(columns.table().tolist(), columns.joint.tolist(), strict=True):
        action = name_action(*row)
        if joint:
            before = action
            continue
        yield f"({before};{action})OVERLAP_F_B" if before else action
        before = ""


def _rows(content: bytes, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield number and cells of each line, without empty lines at the end."""
    try:
        text = content.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ScheduleReferenceError(f"{path}:{line}: not text in UTF-8. Give a file of orders (.csv).") from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for cells in reader:
            yield reader.line_num, cells
    except csv.Error as error:
        raise ScheduleReferenceError(f"{path}:{reader.line_num}: {error}. Give one line of actions per rank.") from None


def _read_cell(cell: str) -> list[tuple[str, int, int, bool]]:
    """Return (kind, stage, microbatch, runs together with the next) of a cell's actions; ValueError if invalid."""
    pair = _PAIR.fullmatch(cell)
    if pair is None:
        return [(*_read_action(cell), False)]
    first, second = (_read_action(part.strip()) for part in pair.groups())
    kinds = {first[0], second[0]}
    if "F" not in kinds or not kinds & {"B", "I"}:
        raise ValueError("joins other actions than one forward and one backward; expected (0F3;1B2)OVERLAP_F_B")
    return [(*first, True), (*second, False)]


def _read_action(text: str) -> tuple[str, int, int]:
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ValueError(f"is not an action; {_FORMS}")
    stage, kind, microbatch = match.groups()
    if (kind in _PARAMETERS) == bool(microbatch):
        given, wanted = ("a number", "none") if microbatch else ("no number", "that of a microbatch")
        raise ValueError(f"has {given} after {kind}; expected {wanted}")
    return kind, int(stage), int(microbatch or -1)


def _check_messages(lines: list[CsvLine], messages: dict[_Key, _Message], path: Path) -> None:
    """Check that every send has its receive, after its value is made, and that receives come before their readers."""
    if not messages:
        return
    places: dict[int, dict[tuple[bool, int, int], int]] = {}
    for line in lines:
        rows = enumerate(line.columns.table().tolist())
        places[line.number] = {
            (opcode == Opcode.FORWARD, stage, microbatch): place
            for place, (opcode, stage, microbatch) in rows
            if opcode != Opcode.BACKWARD_WEIGHT
        }
    for (kind, stage, microbatch), message in messages.items():
        forward, sends = kind.endswith("F"), kind.startswith("SEND")
        step = 1 if forward == sends else -1
        partner = f"{'RECV' if sends else 'SEND'}_{kind[-1]}", stage + step, microbatch
        own = places[message.number].get((forward, stage, microbatch))
        what = ""
        if partner not in messages:
            what = f"has no partner; expected {partner[1]}{partner[0]}{microbatch} on another line"
        elif own is None:
            what = "is of a stage or microbatch that its line does not compute"
        elif (own < message.after) != sends:
            what = "stands before what it sends" if sends else "stands after what needs it"
        if what:
            cell = f"{stage}{kind}{microbatch}"
            raise ScheduleReferenceError(describe_action(path, message.number, message.place, cell, what))
