"""Tables for a terminal: rows in, rich renderables out. Nothing is printed here.

Neighbouring rows with equal text are merged; ``--json`` has all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.report.cells import collapse_rows, format_cell, format_heading
from meshwright.report.comparison import Comparison, comparison_rows
from meshwright.report.layers import graph_rows, graph_total
from meshwright.report.narrow import NarrowTable
from meshwright.report.rows import MEASURED_PARTS, cluster_rows, measurement_rows, plan_rows, program_rows
from meshwright.report.time_shares import timeline_rows
from meshwright.report.workload import describe_workload
from meshwright.spec import (
    Cluster,
    Graph,
    Measurements,
    Opcode,
    Plan,
    Program,
    Timeline,
    format_bytes,
    format_count,
    format_flops,
    format_money,
    format_percent,
    format_seconds,
)

Row = dict[str, Any]

# Idle machines with 2 cores had 22 to 25 % (docs/tutorial.md and docs/commands/measure.md); more is caused by another
# program.
MOST_SPREAD_SHARE = 0.3

_COMMUNICATION_NOTE = (
    "A measured transfer lasts from its issue until its rank saw it done, waiting for the other end included; "
    "a predicted one only while it moves bytes. Compare steps, computations and busy seconds. Memory measured on a CPU "
    "is what the process grew by, allocator and buffers of the network included."
)


def make_table(
    rows: Sequence[Row], *, title: str = "", total: Row | None = None, collapse: str = "", hide: Iterable[str] = ()
) -> NarrowTable:
    """A table of plain rows; keys become headings, and their endings set the format of numbers.

    Args:
        rows: The rows; a key that a row lacks is printed as a dash.
        title: The line above the table.
        total: A last row, separated from the others.
        collapse: The key that may differ between merged neighbours; empty to print every row.
        hide: Keys to leave out, beside those that no row has a value for.
    """
    every = [*rows, total] if total is not None else [*rows]
    known = dict.fromkeys(key for row in rows for key in row)
    keys = [key for key in known if key not in set(hide) and any(row.get(key) is not None for row in rows)]
    cells = [[format_cell(key, row.get(key)) for key in keys] for row in rows]
    if collapse in keys:
        cells = collapse_rows(cells, keys.index(collapse))
    return NarrowTable(
        [format_heading(key) for key in keys],
        cells,
        numeric=[all(isinstance(row.get(key), int | float | None) for row in every) for key in keys],
        num_labels=keys.index(collapse) + 1 if collapse in keys else 1,
        total=() if total is None else [format_cell(key, total.get(key)) for key in keys],
        title=title,
    )


def graph_table(graph: Graph, batch_size: int) -> RenderableType:
    """Parameters, FLOPs and bytes of layers for batches of ``batch_size``. Raises what `graph_rows` raises."""
    total = graph_total(graph, batch_size)
    flops = format_flops(total["forward_flops"] + total["backward_flops"])
    samples = "1 sample" if batch_size == 1 else f"{batch_size} samples"
    heading = (
        f"{graph.name}: {total['num_parameters']:,} parameters, {flops} per {graph.mode} pass over {samples}, "
        f"graph {graph.content_hash}"
    )
    rows = graph_rows(graph, batch_size)
    return Group(Text(heading), make_table(rows, total=total, collapse="layer"))


def plan_table(plan: Plan, graph: Graph | None = None) -> RenderableType:
    """Stages of a plan; layers have their names if the graph is given. Raises what `plan_rows` raises."""
    # One schedule drives all stages; `Plan.describe`, printed above, names it.
    return Group(Text(describe_workload(plan, graph)), make_table(plan_rows(plan, graph), hide=("schedule",)))


def exchanges_table(rows: Sequence[Row]) -> NarrowTable:
    """Ways of reducing gradients from the planner's rows, with the plan's own way first."""
    return make_table(rows, title="Other ways to exchange gradients:")


def front_table(rows: Sequence[Row]) -> NarrowTable:
    """Plans of a Pareto front from the planner's rows, fastest first; their price, or devices times seconds."""
    priced = any("price_per_step" in row for row in rows)
    price = f"{rows[0]['currency']} per million samples" if priced else "devices × step"
    cells = [
        (
            row["plan"],
            format_seconds(row["step_time_s"]),
            format_bytes(row["reserved_memory_bytes"]),
            format_money(row["price_per_million_samples"]) if priced else format_seconds(row["device_seconds"]),
        )
        for row in rows
    ]
    headings = ("Pareto front", "step", "memory", price)
    return NarrowTable(headings, cells, numeric=[False, True, True, True], close=True)


def timeline_table(timeline: Timeline) -> RenderableType:
    """Where each rank's time goes, per step."""
    rows = timeline_rows(timeline)
    steps = "1 step" if rows["num_steps"] == 1 else f"{rows['num_steps']} steps"
    heading = (
        f"{timeline.origin}: {format_seconds(rows['median_step_s'])} per step (median of {steps}, slowest "
        f"{format_seconds(rows['slowest_step_s'])}), bubble {format_cell('bubble_share', rows['bubble_share'])}"
    )
    return Group(Text(heading), make_table(rows["ranks"], collapse="rank", hide=("busy_share", "communication_share")))


def cluster_table(cluster: Cluster) -> RenderableType:
    """Nodes with their links, equal neighbours in one line, and the datasheet of each kind of device."""
    heading = (
        f"{cluster.name}: {format_count(cluster.num_ranks, 'device')} in {format_count(len(cluster.nodes), 'node')}"
    )
    datasheet = ("memory_bytes", "memory_bytes_per_s", "peak_flops_per_s")
    kinds = [
        {
            "kind": kind.name,
            "memory_bytes": kind.memory_bytes,
            "memory_bytes_per_s": kind.memory_bandwidth_bytes_per_s,
            **{f"{dtype}_flops_per_s": peak for dtype, peak in kind.peak_flops_per_s.items()},
        }
        for kind in cluster.device_kinds
    ]
    return Group(Text(heading), make_table(cluster_rows(cluster), collapse="node", hide=datasheet), make_table(kinds))


def program_table(program: Program) -> RenderableType:
    """How many instructions of each opcode every rank has; opcodes that do not occur are left out."""
    rows = program_rows(program)
    unused = [name for name in (opcode.name.lower() for opcode in Opcode) if not any(row[name] for row in rows)]
    heading = (
        f"{program.schedule} on {program.num_ranks} ranks, plan {program.plan_hash}: "
        f"{program.body.num_instructions:,} instructions per step"
    )
    return Group(Text(heading), make_table(rows, collapse="rank", hide=unused))


def measurement_table(measurements: Measurements) -> RenderableType:
    """Device, conditions and counts, the fitted links, and a remark if the machine was disturbed."""
    rows = measurement_rows(measurements)
    facts = {key: value for key, value in rows.items() if key not in MEASURED_PARTS and value not in (None, "")}
    listing = Table.grid(padding=(0, 2))
    for key, value in facts.items():
        listing.add_row(Text(format_heading(key), style="bold"), Text(format_cell(key, value)))
    remark = [] if (rows["op_spread_share"] or 0) <= MOST_SPREAD_SHARE else [Text(_spread_remark(rows))]
    parts = [make_table(rows[key], title=title) for key, title in MEASURED_PARTS.items() if rows[key]]
    return Group(listing, *parts, *remark)


def _spread_remark(rows: Row) -> str:
    return (
        f"The times of an op differ by {format_percent(rows['op_spread_share'])} from run to run, on a quiet machine "
        f"by less than {format_percent(MOST_SPREAD_SHARE, 0)}: something else keeps this one busy, and predictions "
        "will be as uncertain. Close other programs and measure again."
    )


def comparison_table(comparison: Comparison) -> RenderableType:
    """Prediction and measurement: the step, each kind of work, each rank, and whether the order was the same."""
    rows = comparison_rows(comparison)
    order = "the same on every stream" if comparison.same_order else "; ".join(rows["differences"])
    peaks, reserved = (
        [value for row in rows["ranks"] if (value := row[key]) is not None]
        for key in ("measured_peak_bytes", "measured_reserved_bytes")
    )
    of_allocator = f", for which the allocator reserved up to {format_bytes(max(reserved))}" if reserved else ""
    memory = f"Most memory measured on a rank: {format_bytes(max(peaks))}{of_allocator}." if peaks else ""
    return Group(
        make_table([rows["step"]], title="step"),
        make_table(rows["instructions"], title="median of each instruction"),
        make_table(rows["ranks"], title="ranks, busy seconds per step", collapse="rank"),
        Text(" ".join(filter(None, (f"Order of issued instructions: {order}.", memory)))),
        Text(_COMMUNICATION_NOTE),
    )
