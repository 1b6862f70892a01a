"""Collectives measured on a cluster whose nodes are not all equally connected: racks, slower paths, unequal NICs.

The slowness of groups is the ratio of their datasheet seconds per byte on the cluster and on one in which all links
between nodes are those of the first node (`even_links`). A row of the table names the size and the stride of its
groups, not their nodes, and its time is the mean over groups. So rows of about equal slowness, rounded to a power of
two, are fitted together, as if all links were those of the first node with its bandwidth divided by the slowness. A
prediction is scaled from there to the links of its group. Both factors are ratios of datasheet costs, near 1 where the
group was measured:

    fitted = measured · mean over the measured groups (even, slow) / mean over the measured groups (cluster)
    predicted = fit · group (cluster) / group (even, slow)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import log2
from typing import TYPE_CHECKING, cast

import numpy as np

from meshwright.cost.collectives.algorithms import COLLECTIVE_OPS, CollectiveOp
from meshwright.cost.collectives.collective_groups import place_group
from meshwright.cost.collectives.datasheet import Tariff, quote_collective
from meshwright.cost.collectives.fitted import CollectiveModel
from meshwright.cost.collectives.fitting import fit_latest

if TYPE_CHECKING:
    from meshwright.records import Records
    from meshwright.spec import Cluster

# Fitted models by the slowness of the links; {1.0: model} for equal links.
LinkModels = Mapping[float, CollectiveModel]
# A message whose time is bandwidth only.
_LARGE_BYTES = 1e12


def even_links(cluster: Cluster, slowness: float = 1.0) -> Cluster:
    """Return a cluster with the NIC of its first node in all nodes, without racks and paths.

    The bandwidth of the NIC is divided by ``slowness``. The result is the cluster itself if it is such.
    """
    nic = cluster.nodes[0].nic
    nic = nic if slowness == 1 else replace(nic, bandwidth_bytes_per_s=nic.bandwidth_bytes_per_s / slowness)
    if cluster.racks is None and not cluster.paths and all(node.nic == nic for node in cluster.nodes):
        return cluster
    return replace(cluster, nodes=tuple(replace(node, nic=nic) for node in cluster.nodes), racks=None, paths=())


def find_slowness(usual: Sequence[Tariff], actual: Sequence[Tariff]) -> float:
    """Return the slowness of links from datasheet costs on `even_links` and on the cluster, as a power of two."""
    large = np.array([_LARGE_BYTES])
    usual_s, actual_s = (sum(float(tariff.estimate(large)[0]) for tariff in tariffs) for tariffs in (usual, actual))
    return 2.0 ** round(log2(actual_s / usual_s)) if usual_s > 0 else 1.0


def fit_links(rows: Records, cluster: Cluster) -> tuple[LinkModels, CollectiveModel | None]:
    """Return models fitted to rows of one device, measured on a cluster, by slowness of links, and one of CPU seconds.

    The first is empty if no usable collective was measured; the second is None without CPU seconds.
    """
    models = {slowness: fit_latest(part) for slowness, part in as_on_even_links(rows, cluster).items()}
    return {slowness: model for slowness, model in models.items() if model is not None}, fit_latest(rows, "host")


def as_on_even_links(rows: Records, cluster: Cluster) -> dict[float, Records]:
    """Return the collectives measured on a cluster by slowness, with the seconds as on `even_links` of that slowness.

    Rows of other numbers of nodes or devices, and within nodes, have slowness 1 and their own seconds. Other rows are
    left out.
    """
    rows = rows.select(np.isin(rows.op, COLLECTIVE_OPS) & (rows.phase == ""))
    even, per_node = even_links(cluster), cluster.num_ranks // len(cluster.nodes)
    if even is cluster:
        return {1.0: rows}

    @cache
    def compare(op: CollectiveOp, *place: int) -> tuple[float, list[Tariff], list[Tariff]]:
        """Return the slowness of groups, and their datasheet costs on even links so slow and on the cluster."""
        actual = _quote(cluster, op, *place)
        slowness = find_slowness(_quote(even, op, *place), actual)
        return slowness, _quote(even_links(cluster, slowness), op, *place), actual

    found = defaultdict[float, list[int]](list)
    seconds = rows.seconds.copy()
    columns = (rows.size(name).tolist() for name in ("nodes", "devices_per_node", "ranks", "groups", "stride", "bytes"))
    for row, (nodes, devices, ranks, groups, stride, num_bytes) in enumerate(zip(*columns, strict=True)):
        last, slowness = (ranks - 1) * stride + groups if stride > 1 else ranks * groups, 1.0
        if (nodes, devices) == (len(cluster.nodes), per_node) and last <= cluster.num_ranks:
            op = cast("CollectiveOp", rows.op[row])
            slowness, usual, actual = compare(op, ranks, groups, stride)
            size = np.array([float(num_bytes)])
            usual_s, actual_s = (sum(tariff.estimate(size)[0] for tariff in each) for each in (usual, actual))
            seconds[row] *= usual_s / actual_s if actual_s > 0 else 1.0
        found[slowness].append(row)
    scaled = replace(rows, seconds=seconds)
    return {slowness: scaled.select(np.array(places)) for slowness, places in found.items()}


def _quote(cluster: Cluster, op: CollectiveOp, num_ranks: int, num_groups: int, stride: int) -> list[Tariff]:
    """Return datasheet costs of the groups that were measured at once: neighbours, or ranks ``stride`` apart."""
    starts = range(num_groups) if stride > 1 else range(0, num_groups * num_ranks, num_ranks)
    groups = [tuple(range(start, start + num_ranks * stride, stride)) for start in starts]
    return [
        quote_collective(cluster, op, group, place_group(cluster, group, groups), concurrent=groups) for group in groups
    ]
