"""The devices of a cluster that a plan uses, and their nodes. Devices in `Plan.idle` are left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meshwright.spec.errors import PlanError

if TYPE_CHECKING:
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.plan import Plan


def used_of(plan: Plan, cluster: Cluster) -> Cluster:
    """Return the cluster without the plan's idle devices. Raises PlanError if the cluster is too small."""
    left = cluster.num_ranks - len(plan.idle)
    if plan.num_devices > left or (plan.idle and plan.idle[-1] >= cluster.num_ranks):
        without = f" and leaves out {list(plan.idle)}" if plan.idle else ""
        raise PlanError(
            f"The plan uses {plan.num_devices} devices{without}, but cluster {cluster.name!r} has {cluster.num_ranks} "
            "devices. Give a larger cluster or plan again for this one."
        )
    return cluster.without(plan.idle) if plan.idle else cluster


def devices_per_node(plan: Plan, cluster: Cluster) -> dict[int, tuple[int, ...]]:
    """Return the devices that a plan uses on each of its nodes, by the index of the node.

    Devices are numbered within their node, from 0. Raises PlanError if the cluster is too small.
    """
    used_of(plan, cluster)
    nodes = cluster.columns().node
    found: dict[int, tuple[int, ...]] = {}
    for device in plan.devices:
        node = int(nodes[device])
        found[node] = (*found.get(node, ()), device - int(np.searchsorted(nodes, node)))
    return found


def visible_devices(plan: Plan, cluster: Cluster) -> list[str]:
    """Return the value of CUDA_VISIBLE_DEVICES for each node that a plan uses.

    The list is empty if ranks use the first devices of every node. Raises PlanError if the cluster is too small.
    """
    found = list(devices_per_node(plan, cluster).values())
    if all(devices == tuple(range(len(devices))) for devices in found):
        return []
    return [",".join(map(str, devices)) for devices in found]
