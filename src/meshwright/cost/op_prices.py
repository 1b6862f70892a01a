"""Prices of all ops of a graph on a kind of device, from all that is known of it, for several batch sizes at once.

Each class of equal ops is priced once: by measurement or roofline (`table`), what rests on a roofline by the predictor
of GPU kernels where it knows them (`kernels`), and what the ranks of mesh axes exchange inside of ops comes on top
(`teams`). Kernels of all sizes are predicted together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from meshwright.cost.conversions import op_type, with_conversions
from meshwright.cost.kernels import Asked, is_tiled, price_kernels, shipped_model
from meshwright.cost.prices import gather_prices
from meshwright.cost.table import price_op, roofline_interval
from meshwright.cost.work import key_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.cost.classes import OpClasses
    from meshwright.cost.kernels import KernelModel
    from meshwright.cost.prices import OpPrice, OpPrices
    from meshwright.cost.table import OpTable
    from meshwright.cost.teams import TeamPrices
    from meshwright.cost.traced import TracedOps
    from meshwright.spec import DeviceKind, Graph
    from meshwright.spec.precision import Numbers


class OpSources(NamedTuple):
    """Where prices come from: measurements and traces of this kind of device, a predictor of kernels, teams."""

    table: OpTable | None
    traced: TracedOps | None
    kernels: KernelModel | None
    teams: TeamPrices


def price_sizes(
    graph: Graph, batch_sizes: Sequence[int], classes: OpClasses, kind: DeviceKind, numbers: Numbers, sources: OpSources
) -> list[OpPrices]:
    """Prices of all ops, for each batch size. Raises GraphError for a size that the graph was not captured for."""
    slowdown, usual = kind.slowdown, kind.at_usual_speed()
    ops = [graph.ops[index] for index in classes.representatives]
    asked = []
    # What is small enough for the largest is for all.
    for size in sorted(batch_sizes, reverse=True):
        graph.check_batch_size(size)
    types = [op_type(graph, op, numbers) for op in ops]
    for size in batch_sizes:
        keys = [key_in(dtype, graph, op, size) for op, dtype in zip(ops, types, strict=True)]
        bounds = [
            price_op(graph, op, size, usual, dtype, sources.table, sources.traced, key)
            for op, key, dtype in zip(ops, keys, types, strict=True)
        ]
        asked.append(Asked(prices=bounds, graph=graph, ops=ops, keys=keys, batch_size=size))
    prices: list[list[OpPrice]] = [list(some.prices) for some in asked]
    if is_tiled(usual):
        kernels = sources.kernels or shipped_model()
        prices = price_kernels(kernels, asked, usual, numbers.compute, roofline_interval(usual))
    unsure = roofline_interval(usual)
    prices = [
        [with_conversions(price, graph, op, size, usual, numbers, unsure) for price, op in zip(each, ops, strict=True)]
        for size, each in zip(batch_sizes, prices, strict=True)
    ]
    return [
        gather_prices(each, classes.class_of, graph, sources.teams.op_exchanges(graph, size), slowdown)
        for size, each in zip(batch_sizes, prices, strict=True)
    ]
