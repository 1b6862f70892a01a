"""The costs of some of a cluster's devices: those that a plan leaves out, or that were lost, are not there."""

from __future__ import annotations

from collections.abc import Collection

from meshwright.cost.model import CostModel


def without_devices(cost: CostModel, ranks: Collection[int]) -> CostModel:
    """The cost model of the other devices of its cluster, which count from 0 on again; nodes stay, even empty ones."""
    left_out = tuple(sorted(ranks))
    return cost._keep(("without", left_out), lambda: _without(cost, left_out)) if left_out else cost


def _without(cost: CostModel, ranks: tuple[int, ...]) -> CostModel:
    usual = None if cost.usual_links is None else cost.usual_links.without(ranks)
    return cost.on_machines(cost.cluster.without(ranks), usual)
