"""The process group of a collective: its numbers of ranks and nodes, and how many groups share the same links.

A group of n ranks is on N nodes with n/N ranks each. Several groups may run the same collective at the same time (the
columns of a mesh). ``num_sharing`` is the number of groups that share a node's NIC or, inside one node, what its
devices share, such as host memory. ``stride`` is the distance between neighbouring ranks; it matters inside a node
whose devices are connected by unequal links.
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
    """The size and position of the process group of a collective; equal groups take the same time.

    Fields: see the module. Raises ClusterError if a number is below 1, or if there are more nodes than ranks.
    """

    num_ranks: int
    num_nodes: int = 1
    num_sharing: int = 1
    stride: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_nodes <= self.num_ranks or self.num_sharing < 1 or self.stride < 1:
            raise ClusterError(
                f"The group of a collective has num_ranks {self.num_ranks}, num_nodes {self.num_nodes}, num_sharing "
                f"{self.num_sharing} and stride {self.stride}; expected at least 1 for each, and num_nodes at most "
                "num_ranks."
            )

    @property
    def ranks_per_node(self) -> float:
        """Average number of the group's ranks on each of its nodes."""
        return self.num_ranks / self.num_nodes


def group_in_mesh(
    num_ranks: int, stride: int, devices_per_node: int, num_groups: int, num_nodes: int
) -> CollectiveGroup:
    """Return the group of ranks {i, i + stride, ...} of a mesh on ``num_nodes`` equal nodes.

    ``num_groups`` such groups run at once.
    """
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
    """Return the `CollectiveGroup` of some ranks while ``concurrent`` groups run the same collective.

    If ``ranks`` are on several nodes, the concurrent groups that also cross nodes share the NICs of the nodes. If
    ``ranks`` are on one node, the concurrent groups inside this node share its links. Raises ClusterError for unknown
    ranks, and for groups that are empty or contain a rank twice.
    """
    for group in (ranks, *concurrent):
        if not group or len(set(group)) < len(group) or not all(0 <= rank < cluster.num_ranks for rank in group):
            last = cluster.num_ranks - 1
            raise ClusterError(
                f"The ranks {list(group)[:8]} cannot form a group; expected at least one rank, each once, from 0 to "
                f"{last}."
            )
    nodes = {cluster.node_index(rank) for rank in ranks}
    others = [{cluster.node_index(rank) for rank in group} for group in concurrent if set(group) != set(ranks)]
    alike = [touched for touched in others if (len(touched) > 1) == (len(nodes) > 1)]
    sharing = 1 + max(sum(node in touched for touched in alike) for node in nodes)
    gaps = {after - before for before, after in pairwise(sorted(ranks))} if len(nodes) == 1 else set()
    return CollectiveGroup(
        num_ranks=len(ranks), num_nodes=len(nodes), num_sharing=sharing, stride=gaps.pop() if len(gaps) == 1 else 1
    )
