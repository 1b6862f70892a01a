"""Seconds and memory of each layer of a graph on a device kind, as rows for `cost_table` and ``--json``.

Seconds are for one microbatch, with the layer's ops one after the other. The interval is that of forward and backward
together. The interval of the whole model is narrower than the sum of the layers' intervals if the errors of the layers
are independent (`costs.add_intervals`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.cost.costs import BASES, OpCosts
from meshwright.cost.memory import backend_of
from meshwright.cost.optimizers import default_loop
from meshwright.report import graph_rows, graph_total, make_table
from meshwright.spec import DeviceKind, Graph, Optimizer, format_percent, format_seconds

if TYPE_CHECKING:
    from meshwright.cost.cost_model import CostModel
    from meshwright.report.narrow import NarrowTable

Row = dict[str, Any]
_MEMORY = ("num_parameters", "saved_bytes")


def cost_rows(cost: CostModel, graph: Graph, batch_size: int, kind: DeviceKind) -> tuple[list[Row], Row]:
    """Return one row per layer for a microbatch on a device kind, and a row for the whole graph.

    Keys of a row: ``layer``, ``forward_s``, ``backward_s`` (0 in a graph for inference), ``low_s`` and ``high_s`` (80 %
    interval of forward plus backward), ``basis`` (each basis with its share of the seconds, the most certain first),
    ``num_parameters``, and ``saved_bytes`` (activations saved for the backward).
    Raises GraphError if the graph is not valid for this batch size.
    """
    costs = cost.estimate_ops(graph, batch_size, kind)
    width = cost.numbers.value_bytes
    spans = [np.arange(layer.start, layer.stop) for layer in graph.layers]
    rows = [
        {"layer": row["layer"], **_times(costs, span), **{key: row[key] for key in _MEMORY}}
        for row, span in zip(graph_rows(graph, batch_size, width), spans, strict=True)
    ]
    whole = graph_total(graph, batch_size, width)
    total = {"layer": "total", **_times(costs, np.arange(len(graph.ops))), **{key: whole[key] for key in _MEMORY}}
    return rows, total


def cost_table(cost: CostModel, graph: Graph, batch_size: int, kind: DeviceKind) -> NarrowTable:
    """Return the rows of `cost_rows` as a table for a terminal, with equal neighbours in one line."""
    rows, total = cost_rows(cost, graph, batch_size, kind)
    samples = "1 sample" if batch_size == 1 else f"{batch_size} samples"
    title = f"{graph.name} on {kind.name}, {cost.precision}, {samples}; low to high: 80 % interval of both passes"
    return make_table(rows, total=total, title=title, collapse="layer")


def optimizer_row(cost: CostModel, graph: Graph, kind: DeviceKind) -> Row | None:
    """Return a row with the cost of an AdamW step over all parameters; None for inference graphs.

    Keys: ``optimizer``, ``loop`` (how the optimizer iterates over the parameters), ``seconds``, ``low_s``, ``high_s``,
    ``basis``.
    """
    if graph.mode != "training":
        return None
    optimizer = Optimizer()
    step = cost.estimate_optimizer(graph, graph.parameters, optimizer, kind)
    loop = default_loop(optimizer, on_gpu=backend_of(kind) == "cuda")
    return {"optimizer": optimizer.name, "loop": loop, **asdict(step)}


def explain_optimizer(row: Row, kind: DeviceKind) -> str:
    """Return the row of `optimizer_row` as a sentence for the user."""
    seconds, low, high = (format_seconds(row[key]) for key in ("seconds", "low_s", "high_s"))
    ways = {"tensors": "tensor by tensor", "foreach": "all tensors at once", "fused": "in one kernel"}
    return (
        f"Optimizer step on {kind.name} ({row['optimizer']}, {ways[row['loop']]}): {seconds}, 80 % interval {low} to "
        f"{high}, {row['basis']}."
    )


def _times(costs: OpCosts, span: np.ndarray[Any, np.dtype[np.int64]]) -> Row:
    both = costs.total(span)
    return {
        "forward_s": float(costs.forward_s[span].sum()),
        "backward_s": float(costs.backward_s[span].sum()),
        "low_s": both.low_s,
        "high_s": both.high_s,
        "basis": _name_basis(costs, span),
    }


def _name_basis(costs: OpCosts, span: np.ndarray[Any, np.dtype[np.int64]]) -> str:
    """Return the basis of the seconds: a name if there is a single one, else each with its share."""
    seconds: dict[str, float] = defaultdict(float)
    for index in span:
        seconds[costs.basis[index]] += float(costs.forward_s[index] + costs.backward_s[index])
    whole = sum(seconds.values())
    named = [(basis, seconds[basis]) for basis in BASES if seconds.get(basis, 0.0) > 0.0]
    if len(named) < 2:
        return named[0][0] if named else ""
    return ", ".join(f"{basis} {format_percent(share / whole, 0)}" for basis, share in named)
