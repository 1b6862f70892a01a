"""Output about schedules: the drawing of a plan's schedule, and a comparison of schedules for the same stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from meshwright.cli.json_output import print_json
from meshwright.cli.model_arguments import graph_to_show
from meshwright.cli.output import grid_width, print_tables
from meshwright.spec import (
    Cluster,
    DocumentError,
    Graph,
    Placement,
    Plan,
    Program,
    ScheduleReferenceError,
    encode_document,
    format_count,
    write_text,
)
from meshwright.spec.files import refuse_replacing
from meshwright.spec.own_code import split_reference
from meshwright.spec.schedules import BASIC_SCHEDULES

if TYPE_CHECKING:
    from meshwright.cost import CostModel
    from meshwright.planner import RankedPlan
    from meshwright.simulator import Contention


def show_schedule(value: Any, document: str, as_json: bool, out: Path | None = None) -> None:
    """Draw the schedule of a plan in slots (forward 1, backward 2), also into a file (.svg); no model is needed.

    Raises DocumentError if ``value`` is not a plan.
    """
    from meshwright.program import max_in_flight, picture_schedule
    from meshwright.report import draw_schedule, draw_slots, explain_slots

    if not isinstance(value, Plan):
        raise DocumentError(f"{document}: --schedule needs a plan, found a {type(value).__name__.lower()}.")
    timeline = picture_schedule(value)
    training = value.workload.kind == "training"
    in_flight = [max_in_flight(value, stage) if training else 1 for stage in range(len(value.stages))]
    slots = int(timeline.end_ps.max(initial=0))
    if out is not None:
        scale = format_count(slots, "slot")
        write_text(draw_schedule(timeline, title=value.describe(), note=explain_slots(in_flight), scale=scale), out)
    if as_json:
        print_json(
            "schedule",
            {
                "plan": document,
                "schedule": value.schedule,
                "num_slots": slots,
                "in_flight": in_flight,
                "timeline": encode_document(timeline),
                **({"drawing": str(out)} if out is not None else {}),
            },
        )
        return
    print_tables(value.describe(), draw_slots(timeline, in_flight, max_width=grid_width(value.num_ranks)))
    if out is not None:
        print_tables(Text(f"drawing written to {out}"))


def program_to_show(plan: Plan | Placement, document: str, graph_file: Path | None) -> Program:
    """Return the program of a plan; its graph is read or captured, but nothing is executed that only the plan names."""
    from meshwright.program import build_placed_program, build_program

    if isinstance(plan, Placement):
        return build_placed_program(plan, graph_to_show(plan, document, graph_file, "--program"))
    if split_reference(plan.schedule) is not None:
        raise ScheduleReferenceError(
            f"{document} follows {plan.schedule!r}, and `show --program` executes no file that only a plan names. "
            f"`meshwright show {quote(document)} --schedule` executes that one and draws its order; "
            f"`meshwright simulate {quote(document)}` lists what each rank does."
        )
    return build_program(plan, graph_to_show(plan, document, graph_file, "--program"))


FindOrdersOption = Annotated[
    Path | None,
    typer.Option(
        help="Search the fastest order of computations for these stages, write it to this file (.csv) and follow it.",
        metavar="FILE.csv",
    ),
]
VirtualStagesOption = Annotated[
    int, typer.Option(help="Stages on every rank under interleaved and looped-bfs.", min=1, max=64)
]
WholeOption = Annotated[
    bool,
    typer.Option("--whole-backwards", help="Do not split backwards into those of inputs and of weights."),
]


def check_orders(find_orders: Path | None) -> None:
    """Raise DocumentError, before anything is computed, if the file of --find-orders cannot be written as .csv."""
    if find_orders is not None:
        if find_orders.suffix != ".csv":
            raise DocumentError(f"--find-orders {find_orders} does not end in .csv. Give a name that does.")
        refuse_replacing(find_orders)


def compared_schedules(plan: Plan, against: Sequence[str] | None) -> Sequence[str]:
    """Return the schedules that a plan is compared with: the requested ones; for a user's schedule, gpipe and 1f1b."""
    return against or (BASIC_SCHEDULES if plan.has_own_schedule else ())


def compare(
    plan: Plan, graph: Graph, machine: Cluster, cost: CostModel, against: Sequence[str], contention: Contention
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Simulate a plan's stages under the schedules in ``against``, as for the option ``--against``.

    Return rows for ``--json``, and renderables for the terminal. Both are empty if ``against`` is empty.
    """
    from meshwright.planner import compare_schedules, schedule_rows
    from meshwright.report import fit_table, schedules_table

    if not against:
        return [], []
    items = compare_schedules(plan, graph, machine, against, cost=cost, contention=contention)
    rows = schedule_rows(items, graph, cost)
    shown: list[Any] = ["", schedules_table(rows)]
    if plan.has_own_schedule:
        shown += [_gain(items), fit_table(items[0].memory_rows())]
    return rows, shown


def _gain(items: Sequence[RankedPlan]) -> str:
    """One line: the gain or loss of the first schedule against the fastest of the others."""
    from meshwright.planner import explain_difference
    from meshwright.report import name_schedule_briefly

    own, others = items[0], items[1:]
    best = min(others, key=lambda item: (item.step_time_s, max(item.peak_memory_bytes)), default=own)
    memory = own.peak_memory_bytes[own.fullest_rank] / max(best.peak_memory_bytes[best.fullest_rank], 1)
    names = [name_schedule_briefly(item.plan.schedule) for item in (own, best)]
    difference = explain_difference(own, best)
    return f"{names[0]} against {names[1]}: {difference} Its peak memory is {memory:.2f} times as large."
