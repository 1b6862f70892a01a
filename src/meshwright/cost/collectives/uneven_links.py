"""Collectives measured on a cluster whose nodes are not all equally connected: racks, slower paths, unequal NICs.

A row of the table names the size and the stride of its groups, not their nodes, and its time is the mean over groups on
links of different speed. So rows are fitted as if all links were those of the first node (`even_links`), and a
prediction is scaled back to the links of its group, both by the ratio of datasheet costs:

    fitted = measured · mean over the measured groups (even) / mean over the measured groups (cluster)
    predicted = fit · group (cluster) / group (even)
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from meshwright.cost.collectives.algorithms import COLLECTIVE_OPS, CollectiveOp
from meshwright.cost.collectives.collective_groups import place_group
from meshwright.cost.collectives.datasheet import quote_collective

if TYPE_CHECKING:
    from meshwright.records import Records
    from meshwright.spec import Cluster


def even_links(cluster: Cluster) -> Cluster:
    """Return a cluster with the NIC of its first node in all nodes, without racks and paths; itself if it is such."""
    nic = cluster.nodes[0].nic
    if cluster.racks is None and not cluster.paths and all(node.nic == nic for node in cluster.nodes):
        return cluster
    return replace(cluster, nodes=tuple(replace(node, nic=nic) for node in cluster.nodes), racks=None, paths=())


def as_on_even_links(rows: Records, cluster: Cluster) -> Records:
    """Return rows measured on a cluster with the seconds of its collectives as on `even_links`; see the module.

    Rows of other numbers of nodes or devices, within nodes, and of CPU seconds stay as they are.
    """
    even, per_node = even_links(cluster), cluster.num_ranks // len(cluster.nodes)
    if even is cluster:
        return rows
    seconds, collectives = rows.seconds.copy(), np.flatnonzero(np.isin(rows.op, COLLECTIVE_OPS) & (rows.phase == ""))
    sizes = rows.select(collectives)
    columns = (
        sizes.size(name).tolist() for name in ("nodes", "devices_per_node", "ranks", "groups", "stride", "bytes")
    )
    for row, nodes, devices, ranks, groups, stride, num_bytes in zip(collectives.tolist(), *columns, strict=True):
        last = (ranks - 1) * stride + groups if stride > 1 else ranks * groups
        if (nodes, devices) != (len(cluster.nodes), per_node) or last > cluster.num_ranks:
            continue
        op = cast("CollectiveOp", rows.op[row])
        usual, actual = (_quote(each, op, ranks, groups, stride, num_bytes) for each in (even, cluster))
        if actual > 0:
            seconds[row] *= usual / actual
    return replace(rows, seconds=seconds)


def _quote(cluster: Cluster, op: CollectiveOp, num_ranks: int, num_groups: int, stride: int, num_bytes: int) -> float:
    """Return the datasheet's seconds, averaged over groups that run at once: neighbours, or ranks ``stride`` apart."""
    starts = range(num_groups) if stride > 1 else range(0, num_groups * num_ranks, num_ranks)
    groups = [tuple(range(start, start + num_ranks * stride, stride)) for start in starts]
    sizes = np.array([float(num_bytes)])
    found = [quote_collective(cluster, op, group, place_group(cluster, group, groups)) for group in groups]
    return float(np.mean([tariff.estimate(sizes)[0] for tariff in found]))
