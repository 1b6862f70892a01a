"""Costs of all ops of a graph on a device kind, from all available sources, for several batch sizes at once.

Each class of equal ops is estimated once: by measurement or roofline (`table`); on GPUs rooflines are replaced by the
predictor of products (`kernels`) and by the kernels that torch launches (`gpu`); casts and sums of gradients are added
(`conversion_costs`), and collectives inside ops (`teams`). Products of all sizes are predicted together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshwright.cost.autocast import Widths
from meshwright.cost.conversion_costs import (
    is_tf32_by_default,
    op_type,
    product_type,
    widened_gradients,
    with_conversions,
)
from meshwright.cost.costs import gather_costs
from meshwright.cost.fusion.unit_costs import ClassCosts, UnitEstimator
from meshwright.cost.gpu.gpu_products import is_modelled, shipped_gpu
from meshwright.cost.gpu.launches import estimate_launches
from meshwright.cost.gpu.padding import estimate_padded, without_odd_sizes
from meshwright.cost.host_issue import issue_seconds
from meshwright.cost.kernels import KernelQueries, estimate_kernels, shipped_model
from meshwright.cost.memory import backend_of
from meshwright.cost.op_estimates import estimate_op
from meshwright.cost.traits import family_of
from meshwright.cost.work import key_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.cost.costs import OpCost, OpCosts
    from meshwright.cost.kernels import KernelModel
    from meshwright.cost.op_classes import OpClasses
    from meshwright.cost.op_estimates import OpTable, TracedOps
    from meshwright.cost.roofline import RooflineSeconds
    from meshwright.cost.software import Software
    from meshwright.cost.team_costs import TeamCosts
    from meshwright.spec import DeviceKind, Graph, Op
    from meshwright.spec.precision import Numbers


# Ops of these families have additional kernels, which inductor fuses.
_WITH_OTHERS = ("product", "convolution")


class OpSources(NamedTuple):
    """Sources of costs: measurements and traces of this device kind, kernels, teams, software.

    ``host_factor``: how many times as long as the host of `host_issue` the host of the measurements takes to issue.
    """

    table: OpTable | None
    traced: TracedOps | None
    kernels: KernelModel | None
    teams: TeamCosts
    software: Software
    host_factor: float = 1.0


def estimate_sizes(
    graph: Graph, batch_sizes: Sequence[int], classes: OpClasses, kind: DeviceKind, numbers: Numbers, sources: OpSources
) -> list[OpCosts]:
    """Return the costs of all ops for each batch size. Raises GraphError for a size that the graph does not support."""
    slowdown, usual = kind.slowdown, kind.at_usual_speed()
    ops = [graph.ops[index] for index in classes.representatives]
    asked = []
    # If the largest size is valid, all are.
    for size in sorted(batch_sizes, reverse=True):
        graph.check_batch_size(size)
    types = [op_type(graph, op, numbers) for op in ops]
    products = [product_type(graph, op, numbers, usual) for op in ops]
    arithmetic = [product or numbers.compute for product in products]
    # Measured ops were multiplied in torch's default type.
    tables = [
        sources.table if not product or is_tf32_by_default(op) else None
        for op, product in zip(ops, products, strict=True)
    ]
    for size in batch_sizes:
        keys = [key_in(dtype, graph, op, size) for op, dtype in zip(ops, types, strict=True)]
        bounds = [
            estimate_op(graph, op, size, usual, dtype, table, sources.traced, key, product)
            for op, key, dtype, table, product in zip(ops, keys, types, tables, products, strict=True)
        ]
        asked.append(KernelQueries(costs=bounds, graph=graph, ops=ops, keys=keys, types=arithmetic, batch_size=size))
    costs: list[list[OpCost]] = [list(some.costs) for some in asked]
    dense = costs
    widths = Widths(graph=graph, values=None if numbers.autocast else numbers.value_bytes, single=classes.single)
    gpu = shipped_gpu() if is_modelled(usual) else None
    if gpu is not None:
        predicted = estimate_kernels(sources.kernels or shipped_model(), gpu.products, asked, usual)
        costs = [
            estimate_launches(gpu, some, each, types, widths, usual, sources.software)
            for some, each in zip(asked, predicted, strict=True)
        ]
        if graph.compiled:
            even = estimate_kernels(sources.kernels or shipped_model(), without_odd_sizes(gpu).products, asked, usual)
            dense = [
                [
                    estimate_padded(odd, aligned, key, dtype, gpu, usual)
                    if family_of(op) in _WITH_OTHERS and bound.basis == "roofline"
                    else estimated
                    for op, bound, odd, aligned, estimated, key, dtype in zip(
                        ops, some.costs, *parts, some.keys, arithmetic, strict=True
                    )
                ]
                for some, *parts in zip(asked, predicted, even, costs, strict=True)
            ]
    costs = [
        [
            with_conversions(cost, graph, op, size, usual, numbers, gpu, widths, added, sources.table)
            for cost, op, added in zip(each, ops, classes.added, strict=True)
        ]
        for size, each in zip(batch_sizes, costs, strict=True)
    ]
    issued = []
    if asked and backend_of(usual) == "cuda":
        issued = [
            _issued(graph, op, asked[0].batch_size, dtype, key, numbers, sources).times(sources.software.host_factor)
            for op, dtype, key in zip(ops, types, asked[0].keys, strict=True)
        ]
    gathered = []
    for size, each, kept, some in zip(batch_sizes, costs, dense, asked, strict=True):
        exchanges = sources.teams.op_exchanges(graph, size)
        if not graph.compiled:
            gathered.append(gather_costs(each, classes.class_of, graph, exchanges, slowdown, issued))
            continue
        measured = [bound.basis != "roofline" for bound in some.costs]
        widened = [widened_gradients(graph, op, usual, numbers, gpu) for op in ops]
        known = ClassCosts(
            alone=each, dense=kept if gpu is not None else each, widened=widened, issued=issued, measured=measured
        )
        found = UnitEstimator(
            graph, size, classes, known, types, usual, numbers, widths, gpu, sources.software.host_factor
        ).estimate_all()
        own = np.arange(len(graph.ops))
        gathered.append(gather_costs(found.costs, own, graph, exchanges, slowdown, found.issued, classes.class_of))
    return gathered


def _issued(
    graph: Graph, op: Op, size: int, dtype: str, key: str, numbers: Numbers, sources: OpSources
) -> RooflineSeconds:
    """Return the seconds to issue an op on the host of `host_issue`: measured if possible, else predicted."""
    predicted = issue_seconds(graph, op, size, dtype, key, numbers)
    measured = sources.table.issued(graph, op, key) if sources.table is not None else None
    if measured is None:
        return predicted
    return replace(measured.times(1 / sources.host_factor), accumulate_s=predicted.accumulate_s)
