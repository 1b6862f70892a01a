"""Files of orders: read their actions (`parse_lines`), assign lines to ranks (`place_orders`), write orders.

Such a file has one of two forms. In the first, line i belongs to rank i, and microbatches are numbered as in the plan;
for a plan without replicas this is exactly the format of torch's pipelining. In torch, data parallelism is separate
from the pipeline, so in the second form, for R identical pipelines, the file holds one pipeline: line i belongs to the
i-th rank of each pipeline, and microbatch k of the file is microbatch k·R + r of pipeline r. Both forms are read; a
written file holds one pipeline if possible.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.program.order_bounds import Order
from meshwright.program.rank_rules import RankRules
from meshwright.program.schedules import local_microbatches
from meshwright.program.schedules.seats import OrderColumns, gather_columns, make_columns
from meshwright.spec import Opcode, Plan, PlanError, ScheduleError, ScheduleReferenceError, read_regular, suggest
from meshwright.spec.own_code import MAX_SOURCE_BYTES

_LETTERS = {Opcode.FORWARD: "F", Opcode.BACKWARD: "B", Opcode.BACKWARD_INPUT: "I", Opcode.BACKWARD_WEIGHT: "W"}
_OPCODES = {letter: opcode for opcode, letter in _LETTERS.items()}
_MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
_PARAMETERS = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
# Limits numbers to more digits than any plan has stages or microbatches.
_ACTION = re.compile(rf"([0-9]{{1,7}})({'|'.join((*_OPCODES, *_MESSAGES, *_PARAMETERS))})([0-9]{{0,7}})")
_PAIR = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B")
_FORMS = "expected one such as 0F3, 0B3, 0I3, 0W3, 0SEND_F3, 0UNSHARD or (0F3;1B2)OVERLAP_F_B"


class CsvLine(NamedTuple):
    """The computations of one line of the file.

    ``number`` is the line number, from 1; ``places`` is the number of each computation's action in the line, from 1.
    """

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


# The format of torch.distributed.pipelining: one line per rank, its actions in order, separated by commas.
#
#     0F3                                     stage 0, forward, microbatch 3; B: a whole backward,
#                                             I: its part for inputs, W: that for weights
#     (0F3;1B2)OVERLAP_F_B                    a forward and a backward that run together
#     0SEND_F3, 1RECV_F3, 1SEND_B3, 0RECV_B3  messages between ranks                          "compute_comms" only
#     0UNSHARD, 0RESHARD, 0REDUCE_GRAD        gathers and sums of parameters, without number  the same
#
# An empty action is a step in which the rank is idle. Messages are checked and then omitted, because a program makes
# its own (`stage_transfers`); the last three do nothing for stages whose parameters are not sharded, as in a plan.
#
# Source: torch 2.13, torch/distributed/pipelining/schedules.py, `_Action` and `_PipelineScheduleRuntime._load_csv`.
def parse_lines(content: bytes, path: Path) -> tuple[CsvLine, ...]:
    """Return the lines of a file; sends and receives are checked and left out.

    Raises ScheduleReferenceError, which names the line and the action, for an invalid action.
    """
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
                            raise ValueError(f"is also in line {messages[key].number}; expected it once")
                        messages[key] = _Message(number, place, len(rows))
            except ValueError as error:
                raise ScheduleReferenceError(describe_action(path, number, place, cell, str(error))) from None
        found.append(CsvLine(number, gather_columns(rows), np.array(places, np.int32)))
    _check_messages(found, messages, path)
    return tuple(found)


def describe_action(path: Path, number: int, place: int, cell: str, what: str) -> str:
    """Return a message about one action: path, line ``number``, number ``place`` of the action, its text, the fault."""
    return f"{path}:{number}: action {place}, {cell[:60]!r}, {what}. Correct the file."


def write_lines(orders: Iterable[OrderColumns]) -> str:
    """Return the text of a file of orders, byte for byte as torch's `_dump_csv` writes it ("compute_only")."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows(_cells(columns) for columns in orders)
    return text.getvalue()


def name_action(opcode: int, stage: int, microbatch: int) -> str:
    """Return the text of an action in a file of orders: ``0F3`` for the forward of microbatch 3 on stage 0."""
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
        raise ValueError(
            "joins other actions than one forward and one backward; expected a form such as (0F3;1B2)OVERLAP_F_B"
        )
    return [(*first, True), (*second, False)]


def _read_action(text: str) -> tuple[str, int, int]:
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ValueError(f"is not an action; {_FORMS}")
    stage, kind, microbatch = match.groups()
    if (kind in _PARAMETERS) == bool(microbatch):
        given, wanted = ("a number", "no number") if microbatch else ("no number", "that of a microbatch")
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
            what = "belongs to a stage or microbatch that its line does not compute"
        elif (own < message.after) != sends:
            what = "comes before the computation whose value it sends" if sends else "comes after what needs its value"
        if what:
            cell = f"{stage}{kind}{microbatch}"
            raise ScheduleReferenceError(describe_action(path, message.number, message.place, cell, what))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OrderFile:
    """A parsed file of orders; ``lines`` are in the order of the file."""

    path: Path
    lines: tuple[CsvLine, ...]

    def lines_of_stages(self) -> tuple[tuple[int, ...], ...]:
        """Return, by stage, the indices (from 0) of the lines that compute it, in the order of their first microbatch.

        This is the order of the stage's replicas in a plan. Raises ScheduleReferenceError if stage numbers have gaps.
        """
        firsts: dict[int, list[tuple[int, int]]] = {}
        for index, line in enumerate(self.lines):
            for stage in np.unique(line.columns.stage).tolist():
                first = int(line.columns.microbatch[line.columns.stage == stage].min())
                firsts.setdefault(stage, []).append((first, index))
        if sorted(firsts) != list(range(len(firsts))) or not firsts:
            shown = ", ".join(map(str, sorted(firsts)[:8])) or "none"
            raise ScheduleReferenceError(
                f"{self.path} has the stages {shown}; expected all from 0 on, without a gap. Correct the file."
            )
        return tuple(tuple(index for _, index in sorted(firsts[stage])) for stage in sorted(firsts))


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenOrders:
    """A plan's orders as the text of a file.

    The text holds one pipeline that stands for ``num_pipelines`` identical ones, or all ranks if that is 1.
    ``shared_stage``: a stage that occurs on several lines, None if there is no such stage.
    """

    text: str
    num_lines: int
    num_pipelines: int
    shared_stage: int | None


def read_order_file(path: Path) -> bytes:
    """Return the content of a file of orders. Raises ScheduleReferenceError if it is missing or too large."""
    if not path.is_file():
        nearby = sorted(item.name for item in path.parent.glob("*.csv")) if path.parent.is_dir() else []
        raise ScheduleReferenceError(
            f"There is no file {str(path)!r}{suggest(path.name, nearby)}. Give the path of a file with one line of "
            "actions per rank, as `meshwright show PLAN --as torch-csv` prints it."
        )
    content = read_regular(path, MAX_SOURCE_BYTES + 1, ScheduleReferenceError)
    if len(content) > MAX_SOURCE_BYTES:
        raise ScheduleReferenceError(
            f"{path}: more than {MAX_SOURCE_BYTES} bytes, too large for an order that can be simulated. Check the file."
        )
    return content


@lru_cache(maxsize=8)
def parse_order_file(path: Path, content: bytes) -> OrderFile:
    """Parse a file of orders; results are cached by content.

    Raises ScheduleReferenceError, which names the line and the action, for invalid content.
    """
    file = OrderFile(path=path, lines=parse_lines(content, path))
    file.lines_of_stages()
    return file


@lru_cache(maxsize=2)
def place_orders(plan: Plan, file: OrderFile) -> tuple[Order, ...]:
    """Return the checked order of every rank of a plan, by rank.

    Raises ScheduleError if the number of lines does not match the plan's ranks, or, with line and action, if an action
    breaks a rule (`rank_rules`).
    """
    alike = find_pipelines(plan)
    # For each line its ranks, each with its pipeline.
    placed: list[tuple[tuple[tuple[int, int], ...], CsvLine]]
    if len(file.lines) == plan.num_ranks:
        placed = [(((rank, 0),), line) for rank, line in enumerate(file.lines)]
        step = 1
    elif alike is not None and len(file.lines) == len(alike[0]):
        placed = [
            (tuple((ranks[index], replica) for replica, ranks in enumerate(alike)), line)
            for index, line in enumerate(file.lines)
        ]
        step = len(alike)
    else:
        each = f", or {len(alike[0])} lines for one of {len(alike)} pipelines" if alike and len(alike) > 1 else ""
        raise ScheduleError(
            f"{file.path} has {len(file.lines)} lines; the plan has {plan.num_ranks} ranks. Expected one line for each "
            f"rank{each}. Give a file with that number of lines, or plan for the number of ranks that the file has."
        )
    orders: list[Order] = []
    for ranks, line in placed:
        first = ranks[0][0]
        local: dict[int, Sequence[int]] = {
            stage: local_microbatches(plan, stage, first) for stage in plan.stages_of(first)
        }
        if step > 1:
            local = {stage: range(len(own)) for stage, own in local.items()}
        _check_line(file, line, first, local)
        orders += (_order(line, rank, step, replica) for rank, replica in ranks)
    return tuple(sorted(orders, key=lambda order: order.rank))


def write_orders(plan: Plan, orders: tuple[Order, ...]) -> WrittenOrders:
    """Return the orders of a plan's ranks as the text of a file; if all pipelines are identical, of one pipeline.

    Raises PlanError for an asynchronous schedule, because such files have neither versions of weights nor updates.
    """
    if plan.is_asynchronous:
        raise PlanError(
            f"The schedule {plan.schedule} is asynchronous: weights change between its actions, but a file of orders "
            "has no updates. Write the orders of a synchronous schedule, such as 1f1b."
        )
    alike = find_pipelines(plan) or ()
    local = [[_localize(orders[rank].columns, len(alike)) for rank in ranks] for ranks in alike]
    if local and all(own == local[0] for own in local[1:]):
        return WrittenOrders(
            text=write_lines(local[0]), num_lines=len(local[0]), num_pipelines=len(alike), shared_stage=None
        )
    columns = [order.columns for order in orders]
    shared = next((index for index, stage in enumerate(plan.stages) if len(stage.ranks) > 1), None)
    return WrittenOrders(text=write_lines(columns), num_lines=len(columns), num_pipelines=1, shared_stage=shared)


def find_pipelines(plan: Plan) -> tuple[tuple[int, ...], ...] | None:
    """Return the ranks of each identical pipeline of a plan, None if the plan does not consist of such pipelines.

    Pipelines are identical if every stage has the same number of replicas, each rank is in one pipeline, the i-th ranks
    of all pipelines have the same stages, and all pipelines have the same number of microbatches.
    """
    counts = {len(stage.ranks) for stage in plan.stages}
    if plan.has_shares or len(counts) > 1 or plan.num_microbatches % (number := counts.pop()):
        return None
    found = [sorted({stage.ranks[replica] for stage in plan.stages}) for replica in range(number)]
    if sum(map(len, found)) > plan.num_ranks:
        return None
    stages = [[plan.stages_of(rank) for rank in ranks] for ranks in found]
    return tuple(map(tuple, found)) if all(own == stages[0] for own in stages) else None


def _check_line(file: OrderFile, line: CsvLine, rank: int, microbatches: Mapping[int, Sequence[int]]) -> None:
    rules = RankRules(microbatches)
    for row, place in zip(line.columns.table().tolist(), line.places.tolist(), strict=True):
        opcode, stage, microbatch = row
        if not rules.knows(stage, microbatch):
            what = f"is not for rank {rank}; expected {rules.expected()}"
        elif fault := rules.take(Opcode(opcode), stage, microbatch):
            what = f"comes {fault}"
        else:
            continue
        raise ScheduleError(describe_action(file.path, line.number, place, name_action(*row), what))
    if missing := rules.missing():
        raise ScheduleError(f"{file.path}:{line.number}: the line of rank {rank} ends without {missing}")


def _order(line: CsvLine, rank: int, step: int, replica: int) -> Order:
    columns = line.columns
    if step > 1:
        columns = make_columns(columns.opcode, columns.stage, columns.microbatch * step + replica, columns.joint)
    return Order(rank=rank, columns=columns, lines=(line.number,) * len(columns), places=tuple(line.places.tolist()))


def _localize(columns: OrderColumns, num_pipelines: int) -> OrderColumns:
    """Return the columns with the microbatches of their pipeline numbered from 0."""
    return make_columns(columns.opcode, columns.stage, columns.microbatch // num_pipelines, columns.joint)
