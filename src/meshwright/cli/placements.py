"""Output of `plan` and `simulate` for a placement of single ops: a table of its ranks, and the time of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from meshwright.cli.json_output import print_json
from meshwright.cli.output import grid_width, print_tables
from meshwright.spec import Cluster, Graph, Placement, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from meshwright.simulator import Contention, Simulation


def print_placement(
    placement: Placement,
    graph: Graph,
    machine: Cluster,
    result: Simulation,
    contention: Contention,
    scenario: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    """Print a simulated placement: its ranks, its timeline and a picture. ``scenario``: its facts for ``--json``."""
    from meshwright.report import describe_workload, draw_grid, timeline_rows, timeline_table, workload_row
    from meshwright.simulator import explain_overflows, find_overflows

    rows = rank_rows(placement, graph, result, machine)
    overflows = find_overflows(result, machine)
    if as_json:
        over = {"overflows": [item.row() for item in overflows]} if overflows else {}
        beside = {"scenario": scenario} if scenario else {}
        facts = {"workload": workload_row(placement, graph), "ranks": rows}
        print_json(
            "op-placement-simulation",
            {**facts, "contention": contention, **timeline_rows(result.timeline), **over, **beside},
        )
        return
    print_tables(
        Text(describe_workload(placement, graph)),
        *placement_tables(placement, rows, result),
        *explain_overflows(overflows),
        timeline_table(result.timeline),
        draw_grid(result.timeline, width=grid_width(result.timeline.num_ranks)),
    )


def rank_rows(placement: Placement, graph: Graph, result: Simulation, machine: Cluster) -> list[dict[str, Any]]:
    """Return one row per rank of a simulated placement.

    Keys: ``rank``, ``device``, ``num_stages``, ``num_ops``, ``busy_s`` (over all simulated steps), ``sent_bytes``
    (values of one microbatch that other ranks read), ``peak_memory_bytes``.
    """
    from meshwright.spec import slice_placement

    busy, stages = result.timeline.busy_seconds(), slice_placement(graph, placement)
    width = placement.workload.float_bytes
    rows = []
    for rank in range(placement.num_ranks):
        mine = placement.stages_of(rank)
        leaving = [
            channel
            for index in mine
            for channel in stages[index].outgoing
            if placement.stages[channel.target].rank != rank
        ]
        rows.append(
            {
                "rank": rank,
                "device": machine.device_kind(rank).name,
                "num_stages": len(mine),
                "num_ops": sum(len(placement.stages[index].ops) for index in mine),
                "busy_s": float(busy[rank]),
                "sent_bytes": sum(item.forward_bytes(graph, placement.microbatch_size, width) for item in leaving),
                "peak_memory_bytes": result.peak_memory_bytes[rank],
            }
        )
    return rows


def placement_tables(placement: Placement, rows: list[dict[str, Any]], result: Simulation) -> list[Any]:
    """Return what the terminal shows: the placement in a line, the table of its ranks, and the simulated time."""
    from meshwright.report.narrow import NarrowTable

    headings = ("rank", "device", "stages", "ops", "busy", "sent", "memory")
    cells = [
        (
            str(row["rank"]),
            row["device"],
            str(row["num_stages"]),
            str(row["num_ops"]),
            format_seconds(row["busy_s"]),
            format_bytes(row["sent_bytes"]) if row["sent_bytes"] else "",
            format_bytes(row["peak_memory_bytes"]),
        )
        for row in rows
    ]
    numeric = (True, False, True, True, True, True, True)
    steps = int(result.timeline.step.max(initial=0)) + 1
    took = f"{format_count(steps, 'step')} from a cold start: {format_seconds(result.timeline.duration_s)}."
    return [Text(placement.describe()), NarrowTable(headings, cells, numeric=numeric), took]
