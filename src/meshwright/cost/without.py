"""The cost model of a cluster without some of its devices, such as unused or lost devices."""

from __future__ import annotations

from collections.abc import Collection

from meshwright.cost.cost_model import CostModel


def without_devices(cost: CostModel, ranks: Collection[int]) -> CostModel:
    """Return the cost model of a cluster without the devices ``ranks``; the other devices are renumbered from 0.

    Nodes without devices stay in the cluster.
    """
    left_out = tuple(sorted(ranks))
    return cost._keep(("without", left_out), lambda: _without(cost, left_out)) if left_out else cost


def _without(cost: CostModel, ranks: tuple[int, ...]) -> CostModel:
    usual = None if cost.usual_links is None else cost.usual_links.without(ranks)
    return cost.on_machines(cost.cluster.without(ranks), usual)
