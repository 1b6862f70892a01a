"""Tables for a terminal, as rich renderables, and the rows of plans, clusters, programs and measurements.

No function here prints. Tables merge neighbouring rows with equal text; ``--json`` has every row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.report.cells import collapse_rows, format_cell, format_heading
from meshwright.report.comparison import Comparison, comparison_rows, timeline_rows
from meshwright.report.narrow import NarrowTable
from meshwright.report.plan_tables import graph_rows, graph_total, latency_rows
from meshwright.report.workload_text import describe_workload
from meshwright.spec import (
    Cluster,
    Graph,
    Measurements,
    Opcode,
    Placement,
    Plan,
    PlanError,
    Program,
    Section,
    Timeline,
    TransferMeasurement,
    format_bytes,
    format_count,
    format_flops,
    format_money,
    format_percent,
    format_seconds,
)
from meshwright.spec.instructions import SENDS, SUMS

Row = dict[str, Any]

# The keys of `measurement_rows` that are printed as separate tables, and their titles.
MEASURED_PARTS = {
    "transfers": "transfers: t = latency + bytes / bandwidth",
    "batches": "batches of whole models: l(b) = alpha · b + beta",
}


# Rows are dicts that are JSON as they are. A key ends with its unit (``_s``, ``_bytes``, ``_flops``, ``_bytes_per_s``,
# ``_share``), from which tables choose the format.
def plan_rows(plan: Plan, graph: Graph | None = None) -> list[Row]:
    """Return one row per stage; with the graph, layers have their names, else their numbers.

    Keys: ``stage``, ``first_layer``, ``last_layer``, ``num_layers``, ``ranks``, ``replicas``, ``shares`` (microbatches
    of each replica, if the plan sets them), ``num_microbatches`` (per step, of all replicas), ``microbatch_size``,
    ``schedule``. Raises PlanError if the plan has layers that the graph lacks.
    """
    if graph is not None and plan.stages[-1].stop > len(graph.layers):
        raise PlanError(
            f"The plan has {plan.stages[-1].stop} layers, but graph {graph.name!r} has {len(graph.layers)}; "
            "give the graph that the plan was made for."
        )

    def name(layer: int) -> str:
        return str(layer) if graph is None else graph.layers[layer].name

    return [
        {
            "stage": index,
            "first_layer": name(stage.start),
            "last_layer": name(stage.stop - 1),
            "num_layers": stage.stop - stage.start,
            "ranks": list(stage.ranks),
            "replicas": len(stage.ranks),
            **({"shares": list(stage.counts(plan.num_microbatches))} if plan.has_shares else {}),
            "num_microbatches": plan.num_microbatches,
            "microbatch_size": plan.microbatch_size,
            "schedule": plan.schedule,
        }
        for index, stage in enumerate(plan.stages)
    ]


def cluster_rows(cluster: Cluster) -> list[Row]:
    """Return one row per group of equal devices of a node.

    Keys: ``node``, ``num_devices``, ``kind``, ``memory_bytes`` (per device), ``memory_bytes_per_s``,
    ``peak_flops_per_s`` (dtype → FLOP/s), ``device_link_latency_s``, ``device_link_bytes_per_s``, ``nic_latency_s``,
    ``nic_bytes_per_s``, ``num_nics``.
    """
    kinds = {kind.name: kind for kind in cluster.device_kinds}
    return [
        {
            "node": node.name,
            "num_devices": group.count,
            "kind": group.kind,
            "memory_bytes": kinds[group.kind].memory_bytes,
            "memory_bytes_per_s": kinds[group.kind].memory_bandwidth_bytes_per_s,
            "peak_flops_per_s": dict(kinds[group.kind].peak_flops_per_s),
            "device_link_latency_s": node.device_link.latency_s,
            "device_link_bytes_per_s": node.device_link.bandwidth_bytes_per_s,
            "nic_latency_s": node.nic.latency_s,
            "nic_bytes_per_s": node.nic.bandwidth_bytes_per_s,
            "num_nics": node.num_nics,
        }
        for node in cluster.nodes
        for group in node.devices
    ]


def placement_rows(placement: Placement) -> list[Row]:
    """Return one row per rank of a placement: ``rank``, ``num_stages``, ``num_ops``."""
    of_ranks = [placement.stages_of(rank) for rank in range(placement.num_ranks)]
    return [
        {"rank": rank, "num_stages": len(mine), "num_ops": sum(len(placement.stages[index].ops) for index in mine)}
        for rank, mine in enumerate(of_ranks)
    ]


def program_rows(program: Program) -> list[Row]:
    """Return one row per section and rank that has instructions: the number of each opcode, and the bytes moved.

    Keys: ``section``, ``rank``, each opcode's name in lower case, ``sent_bytes``, ``reduced_bytes``.
    """
    return [
        row
        for name, section in program.sections()
        for rank in range(program.num_ranks)
        if (row := _rank_counts(program, name, section, rank)) is not None
    ]


def measurement_rows(measurements: Measurements) -> Row:
    """Return a summary of a measurement table: device, conditions, counts, and lines fitted to transfers and batches.

    Keys: ``device``, ``software``, ``date``, ``conditions``, ``num_ops``, ``op_spread_share`` (median over the ops,
    None without any), ``num_optimizers``, ``overhead_s``, ``transfers``: ``kind``, ``num_ranks``, ``num_sizes``,
    ``smallest_bytes``, ``largest_bytes``, ``latency_s``, ``bandwidth_bytes_per_s`` (None if time does not grow with
    size); ``batches``: `latency_rows`.
    """
    spreads = [row.spread for row in measurements.ops]
    groups: dict[tuple[str, int], list[TransferMeasurement]] = {}
    for row in measurements.transfers:
        groups.setdefault((row.kind, row.num_ranks), []).append(row)
    return {
        "device": measurements.device,
        "software": measurements.software,
        "date": measurements.date,
        "conditions": measurements.conditions,
        "num_ops": len(measurements.ops),
        "op_spread_share": float(np.median(spreads)) if spreads else None,
        "num_optimizers": len(measurements.optimizers),
        "overhead_s": measurements.overhead_s,
        "transfers": [_transfer_row(*key, rows) for key, rows in sorted(groups.items())],
        "batches": latency_rows(measurements.batches),
    }


def fit_transfers(rows: Sequence[TransferMeasurement]) -> tuple[float, float | None]:
    """Return latency α (s) and bandwidth β (bytes/s) of t = α + n/β; β is None if time does not grow with size.

    The line has the least sum of squared *relative* errors, so that small messages count as much as large ones. If the
    best line would have a negative α, α is 0.
    """
    sizes = np.array([row.num_bytes for row in rows], np.float64)
    seconds = np.array([row.seconds for row in rows])
    if len(set(sizes.tolist())) > 1:
        columns = np.stack([1 / seconds, sizes / seconds], axis=1)
        # Bytes are scaled to at most 1; otherwise the two columns differ by many orders of magnitude.
        scale = sizes.max()
        columns[:, 1] /= scale
        latency, slope = np.linalg.lstsq(columns, np.ones(len(rows)), rcond=None)[0].tolist()
        if latency >= 0 and slope > 0:
            return latency, scale / slope
        if latency < 0:
            ratios = columns[:, 1]
            return 0.0, float(scale * (ratios @ ratios) / ratios.sum())
    weights = 1 / seconds
    return float(weights.sum() / (weights @ weights)), None


def _rank_counts(program: Program, name: str, section: Section, rank: int) -> Row | None:
    ids = np.concatenate([[], *(np.array(section.stream_range(stream)) for stream in program.streams_of(rank))])
    mine = ids.astype(np.int64)
    if not len(mine):
        return None
    opcodes, num_bytes = section.opcode[mine], section.num_bytes[mine]
    counts = Counter(opcodes.tolist())
    sends = np.isin(opcodes, SENDS)
    return {
        "section": name,
        "rank": rank,
        **{opcode.name.lower(): counts[opcode] for opcode in Opcode},
        "sent_bytes": int(num_bytes[sends].sum()),
        "reduced_bytes": int(num_bytes[np.isin(opcodes, SUMS)].sum()),
    }


def _transfer_row(kind: str, num_ranks: int, rows: Sequence[TransferMeasurement]) -> Row:
    latency, bandwidth = fit_transfers(rows)
    return {
        "kind": kind,
        "num_ranks": num_ranks,
        "num_sizes": len({row.num_bytes for row in rows}),
        "smallest_bytes": min(row.num_bytes for row in rows),
        "largest_bytes": max(row.num_bytes for row in rows),
        "latency_s": latency,
        "bandwidth_bytes_per_s": bandwidth,
    }


# Idle machines with 2 cores had 22 to 25 % (docs/tutorial.md and docs/commands/measure.md); more is caused by another
# program.
MOST_SPREAD_SHARE = 0.3

_COMMUNICATION_NOTE = (
    "A measured transfer lasts from its issue until its rank sees that it has ended, with the time of waiting for the "
    "other rank; a predicted transfer lasts only while bytes move. So compare steps, computations and busy seconds. "
    "Memory measured on a CPU is the growth of the process, with allocator and network buffers."
)


def make_table(
    rows: Sequence[Row], *, title: str = "", total: Row | None = None, collapse: str = "", hide: Iterable[str] = ()
) -> NarrowTable:
    """Return a table of plain rows; keys become headings, and their endings set the format of numbers.

    Args:
        rows: The rows; a key that a row lacks is printed as a dash.
        title: The line above the table.
        total: A last row, separated from the others.
        collapse: The key that may differ between merged neighbours; empty to print every row.
        hide: Keys to leave out. Keys without a value in any row are always left out.
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
    """Return the table of layers (parameters, FLOPs, bytes) for batches of ``batch_size``. Raises as `graph_rows`."""
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
    """Return the table of a plan's stages; layers have names if the graph is given. Raises what `plan_rows` raises."""
    # One schedule drives all stages; `Plan.describe`, printed above, names it.
    return Group(Text(describe_workload(plan, graph)), make_table(plan_rows(plan, graph), hide=("schedule",)))


def exchanges_table(rows: Sequence[Row]) -> NarrowTable:
    """Return the table of methods of gradient reduction from the planner's rows, the plan's own method first."""
    return make_table(rows, title="Other ways to exchange gradients:")


def front_table(rows: Sequence[Row]) -> NarrowTable:
    """Return the table of a Pareto front from the planner's rows, fastest plan first, with price or device-seconds."""
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
    """Return the table of each rank's busy, communication and idle time, per step."""
    rows = timeline_rows(timeline)
    steps = "1 step" if rows["num_steps"] == 1 else f"{rows['num_steps']} steps"
    heading = (
        f"{timeline.origin}: {format_seconds(rows['median_step_s'])} per step (median of {steps}, slowest "
        f"{format_seconds(rows['slowest_step_s'])}), bubble {format_cell('bubble_share', rows['bubble_share'])}"
    )
    return Group(Text(heading), make_table(rows["ranks"], collapse="rank", hide=("busy_share", "communication_share")))


def cluster_table(cluster: Cluster) -> RenderableType:
    """Return the tables of nodes with their links (equal neighbours in one row), and of the kinds of devices."""
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
    """Return the table of the number of instructions by rank and opcode; opcodes that do not occur are left out."""
    rows = program_rows(program)
    unused = [name for name in (opcode.name.lower() for opcode in Opcode) if not any(row[name] for row in rows)]
    heading = (
        f"{program.schedule} on {program.num_ranks} ranks, plan {program.plan_hash}: "
        f"{program.body.num_instructions:,} instructions per step"
    )
    return Group(Text(heading), make_table(rows, collapse="rank", hide=unused))


def measurement_table(measurements: Measurements) -> RenderableType:
    """Return the tables of `measurement_rows`, and a remark if times varied more than `MOST_SPREAD_SHARE`."""
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
    """Return the tables of a comparison: step, kinds of instructions and ranks; whether the order was the same."""
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
