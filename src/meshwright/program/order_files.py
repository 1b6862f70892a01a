"""Files of orders: assign their lines to ranks, check their rules, and write a plan's orders as such a file.

Line i is rank i, with microbatches numbered as in the plan; for a plan without replicas this is exactly the format of
torch's pipelining (`torch_csv`). There, data parallelism is separate from the pipeline: for R identical pipelines, a
file holds one. Line i is then the i-th rank of each of them, and microbatch k of the file is microbatch k·R + r of
pipeline r. Both forms are read; a written file holds one pipeline if possible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from meshwright.program.order import Order
from meshwright.program.rank_rules import RankRules
from meshwright.program.schedules import OrderColumns, local_microbatches
from meshwright.program.schedules.columns import make_columns
from meshwright.program.torch_csv import CsvLine, describe_action, name_action, parse_lines, write_lines
from meshwright.spec.errors import PlanError, ScheduleError, ScheduleReferenceError, suggest
from meshwright.spec.files import read_regular
from meshwright.spec.instructions import Opcode
from meshwright.spec.own_code import MAX_SOURCE_BYTES
from meshwright.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OrderFile:
    """The parsed lines of a file of orders."""

    path: Path
    lines: tuple[CsvLine, ...]

    def lines_of_stages(self) -> tuple[tuple[int, ...], ...]:
        """Return the lines (from 0) of each stage; the line with the first microbatch comes first, as in replicas.

        Raises ScheduleReferenceError if stage numbers have gaps.
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
    """A plan's orders as text, once for ``num_pipelines`` identical ones. ``shared_stage``: one on several lines."""

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
    """Parse a file of orders, cached by content. Raises ScheduleReferenceError with line and action."""
    file = OrderFile(path=path, lines=parse_lines(content, path))
    file.lines_of_stages()
    return file


@lru_cache(maxsize=2)
def place_orders(plan: Plan, file: OrderFile) -> tuple[Order, ...]:
    """Return the order of every rank of a plan, checked.

    Raises ScheduleError for a file of another layout, and with line and action for an action that breaks a rule.
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
        each = f", or {len(alike[0])} for each of {len(alike)} pipelines" if alike and len(alike) > 1 else ""
        raise ScheduleError(
            f"{file.path} has {len(file.lines)} lines; the plan has {plan.num_ranks} ranks. Expected one line for each "
            f"of them{each}. Give the file of this layout, or plan for that number of ranks."
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
    """Return the orders of a plan's ranks as the text of a file, of one pipeline if all are identical.

    Raises PlanError for an asynchronous schedule, because such files have neither versions of weights nor updates.
    """
    if plan.is_asynchronous:
        raise PlanError(
            f"The schedule {plan.schedule} is asynchronous: weights change between its actions, which a file of orders "
            "cannot say. Write the orders of a synchronous schedule, such as 1f1b."
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

    Identical: every stage has the same number of replicas, each rank is in one pipeline, the pipelines have the same
    stages at the same places, and the same number of microbatches.
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
            what = f"stands {fault}"
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
