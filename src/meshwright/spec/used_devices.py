"""The devices of a cluster that a plan uses, and their nodes: all but those in `Plan.idle`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meshwright.spec.errors import PlanError

if TYPE_CHECKING:
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.plan import Plan


def used_of(plan: Plan, cluster: Cluster) -> Cluster:
    """Return the cluster without the devices that a plan leaves out. Raises PlanError if the cluster is too small."""
    left = cluster.num_ranks - len(plan.idle)
    if plan.num_devices > left or (plan.idle and plan.idle[-1] >= cluster.num_ranks):
        without = f" and leaves out {list(plan.idle)}" if plan.idle else ""
        raise PlanError(
            f"The plan uses {plan.num_devices} devices{without}, but cluster {cluster.name!r} has {cluster.num_ranks} "
            "devices. Give a larger cluster or plan again for this one."
        )
    return cluster.without(plan.idle) if plan.idle else cluster


def devices_per_node(plan: Plan, cluster: Cluster) -> dict[int, tuple[int, ...]]:
    """Return the devices of each node that a plan uses, by the node's index.

    Devices are numbered as the node counts them, in the order of ranks.

    Raises PlanError if the cluster is too small.
    """
    used_of(plan, cluster)
    nodes = cluster.columns().node
    found: dict[int, tuple[int, ...]] = {}
    for device in plan.devices:
        node = int(nodes[device])
        found[node] = (*found.get(node, ()), device - int(np.searchsorted(nodes, node)))
    return found


def visible_devices(plan: Plan, cluster: Cluster) -> list[str]:
    """CUDA_VISIBLE_DEVICES on each node that a plan uses; empty if ranks have the first devices of their nodes.

    Raises PlanError if the cluster is too small.
    """
    found = list(devices_per_node(plan, cluster).values())
    if all(devices == tuple(range(len(devices))) for devices in found):
        return []
    return [",".join(map(str, devices)) for devices in found]
