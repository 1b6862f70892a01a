"""Tables of ranked plans (`plans_table`); rows of batches of whole models (`batch_rows`) and of layers (`graph_rows`).

The table of plans shows how the plans differ, their step time with its interval, memory, bubble and price. Headings
are those of the field: data-parallel replicas (dp), pipeline stages (pp), axes of sharding (tp, cp, ep), ZeRO stage,
samples of a microbatch (mbs). Properties that all rows share are stated once, above the table.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.report.cells import NOTHING, format_cell, name_schedule_briefly
from meshwright.report.narrow import NarrowTable
from meshwright.spec import (
    BatchMeasurement,
    Graph,
    Layer,
    fit_latency,
    format_money,
    format_percent,
    format_seconds,
)

Row = dict[str, Any]


# samples/s = b / median        l(b) = αb + β (`meshwright.spec.fit_latency`)        error = l(b) / median - 1
def batch_rows(batches: Sequence[BatchMeasurement]) -> list[Row]:
    """Return one row per model and measured batch size, models in the order of the table, sizes ascending.

    Keys: ``model``, ``batch_size``, ``median_s``, ``p90_s``, ``p99_s``, ``samples_per_s``, ``num_measured``.
    """
    return [
        {
            "model": row.model,
            "batch_size": row.batch_size,
            "median_s": row.seconds,
            "p90_s": row.p90_s,
            "p99_s": row.p99_s,
            "samples_per_s": row.batch_size / row.seconds,
            "num_measured": row.num_samples,
        }
        for rows in _by_model(batches).values()
        for row in rows
    ]


def latency_rows(batches: Sequence[BatchMeasurement]) -> list[Row]:
    """Return one row per model: the line l(b) = alpha · b + beta through its median latencies at batch sizes b.

    Keys: ``model``, ``num_sizes``, ``smallest_batch``, ``largest_batch``, ``alpha_s``, ``beta_s``, ``largest_error``
    (of the line relative to the median, with its sign) and ``largest_error_at`` (its batch size). The last four are
    None if only one size was measured.
    """
    return [_latency_row(model, rows) for model, rows in _by_model(batches).items()]


def describe_latency(row: Row) -> str:
    """Return a row of `latency_rows` in words; "" if no line was fitted."""
    if row["alpha_s"] is None:
        return ""
    return (
        f"l(b) = {format_seconds(row['alpha_s'])} · b + {format_seconds(row['beta_s'])}; largest relative error "
        f"{format_cell('largest_error', row['largest_error'])}, at a batch size of {row['largest_error_at']}"
    )


def _by_model(batches: Sequence[BatchMeasurement]) -> dict[str, list[BatchMeasurement]]:
    models: dict[str, list[BatchMeasurement]] = {}
    for row in batches:
        models.setdefault(row.model, []).append(row)
    return {model: sorted(rows, key=lambda row: row.batch_size) for model, rows in models.items()}


def _latency_row(model: str, rows: list[BatchMeasurement]) -> Row:
    sizes = [row.batch_size for row in rows]
    known = {"model": model, "num_sizes": len(rows), "smallest_batch": sizes[0], "largest_batch": sizes[-1]}
    if len(set(sizes)) < 2:
        return {**known, "alpha_s": None, "beta_s": None, "largest_error": None, "largest_error_at": None}
    alpha_s, beta_s = fit_latency(sizes, [row.seconds for row in rows])
    errors = {row.batch_size: (alpha_s * row.batch_size + beta_s) / row.seconds - 1 for row in rows}
    worst = max(errors, key=lambda size: abs(errors[size]))
    return {
        **known,
        "alpha_s": alpha_s,
        "beta_s": beta_s,
        "largest_error": errors[worst],
        "largest_error_at": worst,
    }


# Everything is counted once, where it occurs first, so that columns add up to the model: a tied parameter belongs to
# the first layer that reads it, a storage kept for the backward to the first layer that saves it. The bytes that cross
# the end of a layer are those that a cut there would send per microbatch of that size, except the state of random
# generators.
def graph_rows(graph: Graph, batch_size: int, float_bytes: int | None = None) -> list[Row]:
    """Return one row per layer for batches of ``batch_size`` samples.

    Keys: ``layer``, ``num_ops``, ``num_parameters``, ``forward_flops``, ``backward_flops``, ``saved_bytes`` (kept for
    the backward), ``crossing_bytes`` (activations that cross the end of the layer). ``float_bytes``: bytes of a
    floating-point element, by default those of its type. Raises GraphError if the graph is not valid for this batch
    size.
    """
    graph.check_batch_size(batch_size)
    crossing = crossing_bytes(graph, batch_size)
    counted: set[int] = set()
    saved: set[int] = set()
    return [
        _layer_row(graph, layer, batch_size, float_bytes, counted, saved) | {"crossing_bytes": num_bytes}
        for layer, num_bytes in zip(graph.layers, crossing, strict=True)
    ]


def graph_total(graph: Graph, batch_size: int, float_bytes: int | None = None) -> Row:
    """Return the row of the whole graph, with the keys of `graph_rows`; parameters that no op reads count, too."""
    graph.check_batch_size(batch_size)
    return {
        "layer": "total",
        "num_ops": len(graph.ops),
        "num_parameters": graph.num_parameters(),
        "forward_flops": sum(op.flops.at(batch_size) for op in graph.ops),
        "backward_flops": sum(op.backward_flops.at(batch_size) for op in graph.ops),
        "saved_bytes": graph.saved_bytes(graph.ops, batch_size, float_bytes=float_bytes),
        "crossing_bytes": None,
    }


def crossing_bytes(graph: Graph, batch_size: int) -> list[int]:
    """Return bytes of activations that cross the end of each layer, shape (num_layers,); the last is 0.

    Values that later stages recompute (`Op.replicable`) do not cross.
    """
    layer_of = [layer for layer, item in enumerate(graph.layers) for _ in range(item.start, item.stop)]
    made: dict[int, int] = {}
    last_use: dict[int, int] = {}
    for op, layer in zip(graph.ops, layer_of, strict=True):
        if op.replicable:
            continue
        last_use.update((tensor, layer) for tensor in op.inputs if tensor in made)
        made.update((tensor, layer) for tensor in op.outputs)
    last_use.update((tensor, len(graph.layers) - 1) for tensor in graph.outputs if tensor in made)
    steps = [0] * (len(graph.layers) + 1)
    for tensor, layer in last_use.items():
        num_bytes = graph.tensors[tensor].num_bytes(batch_size)
        steps[made[tensor]] += num_bytes
        steps[layer] -= num_bytes
    return list(itertools.accumulate(steps[:-1]))


def _layer_row(
    graph: Graph, layer: Layer, batch_size: int, float_bytes: int | None, counted: set[int], saved: set[int]
) -> Row:
    """The part of one layer; adds what it counts to ``counted`` (parameters) and ``saved`` (storages)."""
    ops = graph.ops[layer.start : layer.stop]
    parameters = {i for op in ops for i in op.inputs if graph.tensors[i].role == "parameter"} - counted
    counted |= parameters
    storages = {graph.tensors[i].storage for op in ops for i in op.saved}
    known = frozenset(storages & saved)
    saved |= storages
    return {
        "layer": layer.name,
        "num_ops": len(ops),
        "num_parameters": sum(graph.tensors[i].num_elements(0) for i in parameters),
        "forward_flops": sum(op.flops.at(batch_size) for op in ops),
        "backward_flops": sum(op.backward_flops.at(batch_size) for op in ops),
        "saved_bytes": graph.saved_bytes(ops, batch_size, exclude=known, float_bytes=float_bytes),
    }


Cell = Callable[[Row], str]


def plans_table(rows: Sequence[Row]) -> RenderableType:
    """Return the table of the planner's rows (`Plans.rows`), best first.

    At 80 columns, columns that do not fit move to a table below.
    """
    columns: list[tuple[str, Cell]] = [("#", lambda row: str(row["place"]))]
    alike = []
    for heading, usual, cell in _LAYOUT:
        values = {cell(row) for row in rows}
        if len(values) > 1 or heading in _ALWAYS:
            columns.append((heading, cell))
        elif (value := values.pop()) != usual and heading != "devices":
            alike.append(f"{heading.replace('sched.', 'schedule')} {value}")
    columns += [(heading, cell) for heading, cell in _figures(rows)]
    headings = [heading for heading, _ in columns]
    cells = [[cell(row) for _, cell in columns] for row in rows]
    numeric = [heading not in _WORDS for heading in headings]
    table = NarrowTable(headings, cells, numeric=numeric, close=True)
    return Group(Text(f"All plans: {', '.join(alike)}."), table) if alike else table


def _figures(rows: Sequence[Row]) -> list[tuple[str, Cell]]:
    """Speed, memory and price of plans; a column without any value is left out."""
    columns: list[tuple[str, Cell]] = [("step", lambda row: format_seconds(row["step_time_s"]))]
    if any(row["step_interval_s"] for row in rows):
        columns.append(("80 %", _interval))
    if any("makespan_s" in row for row in rows):
        columns.append(("batch alone", lambda row: format_cell("makespan_s", row.get("makespan_s"))))
    if any(row["tokens_per_s"] is not None for row in rows):
        columns.append(("tokens/s", lambda row: f"{row['tokens_per_s']:,.0f}"))
    else:
        columns.append(("samples/s", lambda row: format_cell("samples_per_s", row["samples_per_s"])))
    if any(row["mfu_share"] is not None for row in rows):
        columns.append(("MFU", lambda row: _percent(row["mfu_share"])))
    columns += [
        ("memory", lambda row: format_cell("reserved_memory_bytes", row["reserved_memory_bytes"])),
        ("bubble", lambda row: _percent(row["bubble_share"])),
    ]
    priced = next((row for row in rows if "currency" in row), None)
    if priced is not None:
        key, what = ("price_per_million_samples", "samples")
        if "price_per_million_tokens" in priced:
            key, what = ("price_per_million_tokens", "tokens")
        columns.append((f"{priced['currency']}/M {what}", lambda row: format_money(row[key])))
    return columns


def _replicas(row: Row) -> str:
    """The number of replicas if all stages have the same, else the numbers, equal neighbours merged: ``1, 3 ×5``."""
    runs = [(count, len(list(same))) for count, same in groupby(row["replicas"])]
    if len(runs) == 1:
        return str(runs[0][0])
    return ", ".join(f"{count} ×{length}" if length > 1 else str(count) for count, length in runs)


def _tensor(row: Row) -> str:
    return f"{row['tensor']}{'+sp' * row['sequence_parallel']}{' own' * row['has_own_placements']}"


def _interval(row: Row) -> str:
    if row["step_interval_s"] is None:
        return NOTHING
    (low, low_unit), (high, high_unit) = (format_seconds(value).split(" ") for value in row["step_interval_s"])
    unit = format_seconds(row["step_time_s"]).split(" ")[1]
    if low_unit == high_unit:
        return f"{low}–{high}" if high_unit == unit else f"{low}–{high} {high_unit}"
    return f"{low} {low_unit}–{high} {high_unit}"


def _percent(share: float | None) -> str:
    return NOTHING if share is None else format_percent(share, 0)


# Heading, the default that is not shown, and the cell.
def _schedule(row: Row) -> str:
    name, each = name_schedule_briefly(row["schedule"]), row["num_stages"] // row["num_positions"]
    return f"{name} ×{each}" if each > 1 else name


_LAYOUT: tuple[tuple[str, str, Cell], ...] = (
    ("devices", "", lambda row: str(row["num_devices"])),
    ("dp", "", _replicas),
    ("pp", "", lambda row: str(row["num_positions"])),
    ("tp", "1", _tensor),
    ("cp", "1", lambda row: str(row["context"])),
    ("ep", "1", lambda row: str(row["expert"])),
    ("zero", "0", lambda row: str(row["zero"])),
    ("shard", "0", lambda row: str(row["shard_size"])),
    ("mbs", "", lambda row: str(row["microbatch_size"])),
    ("sched.", "", _schedule),
    ("recompute", "none", lambda row: row["recompute"]),
    ("offload", "none", lambda row: row["offload"].replace("optimizer states", "states").replace(" on the host", "")),
)
_ALWAYS = ("dp", "pp", "mbs")
_WORDS = ("sched.", "recompute", "offload", "tp")
