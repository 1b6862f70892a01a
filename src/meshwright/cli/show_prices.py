"""``meshwright show MODEL --cluster CLUSTER``: seconds and memory of every layer on the cluster's devices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.cli.output import print_json, print_tables
from meshwright.cli.plan import default_precision
from meshwright.spec.cluster import load_cluster
from meshwright.spec.errors import DocumentError
from meshwright.spec.graph import Graph
from meshwright.spec.workload import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """What the options say of prices; all None if none was given."""

    cluster: str | None = None
    measurements: Path | None = None
    precision: Precision | None = None


def show_prices(value: Any, document: str, pricing: Pricing, batch_size: int, as_json: bool) -> None:
    """Print one table per kind of device. Raises DocumentError if the document is not a graph."""
    from meshwright.cost import load_cost_model
    from meshwright.cost.layers import priced_rows, priced_table

    if not isinstance(value, Graph):
        raise DocumentError(
            f"{document}: --cluster prices the layers of a model, found a {type(value).__name__.lower()}. Give a zoo "
            "name or a captured graph; `meshwright simulate` prices a plan."
        )
    machine = load_cluster(pricing.cluster or "")
    precision = pricing.precision or default_precision(machine.device_kind(0).peak_flops_per_s)
    cost = load_cost_model(machine, pricing.measurements, precision)
    if as_json:
        devices = []
        for kind in machine.device_kinds:
            layers, total = priced_rows(cost, value, batch_size, kind)
            devices.append({"kind": kind.name, "layers": layers, "total": total})
        print_json({"model": value.name, "batch_size": batch_size, "precision": precision, "devices": devices})
        return
    tables = [priced_table(cost, value, batch_size, kind) for kind in machine.device_kinds]
    print_tables(*tables, cost.explain_basis(value, batch_size))
