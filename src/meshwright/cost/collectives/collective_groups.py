"""Where a collective runs: the number of ranks, of nodes, and of groups that use the same links at once.

A group of n ranks is on N nodes with n/N ranks each. Groups that run the same collective at the same time (the columns
of a mesh) share the NIC of every node that they use, or what the devices of one node share (the memory of a host):
``num_sharing`` counts them. Inside one node it matters which devices take part if the links between them differ:
``stride`` is the distance between neighbouring ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from meshwright.spec import Cluster, ClusterError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveGroup:
    """The place of a collective; groups in equal places take the same time. Raises ClusterError if it is impossible."""

    num_ranks: int
    num_nodes: int = 1
    num_sharing: int = 1
    stride: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_nodes <= self.num_ranks or self.num_sharing < 1 or self.stride < 1:
            raise ClusterError(
                f"A group of {self.num_ranks} ranks on {self.num_nodes} nodes, {self.num_sharing} sharing, stride "
                f"{self.stride}: expected at least one of each, and a rank for every node."
            )

    @property
    def ranks_per_node(self) -> float:
        """Ranks of the group in each of its nodes."""
        return self.num_ranks / self.num_nodes


def group_in_mesh(
    num_ranks: int, stride: int, devices_per_node: int, num_groups: int, num_nodes: int
) -> CollectiveGroup:
    """Return one of the groups {i, i + stride, ...} of a mesh of equal nodes, all of which run at once."""
    if (num_ranks - 1) * stride < devices_per_node:
        return CollectiveGroup(
            num_ranks=num_ranks, stride=stride if num_ranks > 1 else 1, num_sharing=max(-(-num_groups // num_nodes), 1)
        )
    per_node = max(devices_per_node // stride, 1)
    return CollectiveGroup(
        num_ranks=num_ranks,
        num_nodes=-(-num_ranks // per_node),
        num_sharing=devices_per_node // min(per_node, num_ranks),
    )


def place_group(cluster: Cluster, ranks: Sequence[int], concurrent: Sequence[Sequence[int]] = ()) -> CollectiveGroup:
    """Return the place of a group of ranks while other groups run the same collective.

    A ``concurrent`` group shares if it uses the same kind of link of a node that this one uses: out of it if this group
    crosses nodes, inside if it does not. Raises ClusterError for unknown ranks, and for groups that are empty or name a
    rank twice.
    """
    for group in (ranks, *concurrent):
        if not group or len(set(group)) < len(group) or not all(0 <= rank < cluster.num_ranks for rank in group):
            last = cluster.num_ranks - 1
            raise ClusterError(
                f"A group of ranks {list(group)[:8]}: expected at least one, each once, from 0 to {last}."
            )
    nodes = {cluster.node_index(rank) for rank in ranks}
    others = [{cluster.node_index(rank) for rank in group} for group in concurrent if set(group) != set(ranks)]
    alike = [touched for touched in others if (len(touched) > 1) == (len(nodes) > 1)]
    sharing = 1 + max(sum(node in touched for touched in alike) for node in nodes)
    gaps = {after - before for before, after in pairwise(sorted(ranks))} if len(nodes) == 1 else set()
    return CollectiveGroup(
        num_ranks=len(ranks), num_nodes=len(nodes), num_sharing=sharing, stride=gaps.pop() if len(gaps) == 1 else 1
    )
