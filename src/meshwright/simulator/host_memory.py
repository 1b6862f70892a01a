"""Memory that the ranks of a plan use on their hosts and drives, and whether it fits each node.

`program.count_host_needs` counts the bytes of each rank, here as for a real run. All devices of a node share its host
and drives. Where ranks are tensor-parallel groups, the bytes are those of one device of each group, and the node's
limits are the share of these devices (`spec.teams`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.cost.memory import backend_of
from meshwright.program import count_host_needs
from meshwright.spec import Cluster, Graph, Placement, Plan, format_bytes, format_count
from meshwright.spec.offload import ON_DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """Bytes used on one node's host and drives, with their limits; ``ranks`` are the plan's ranks on that node."""

    name: str
    ranks: tuple[int, ...]
    host_bytes: int
    host_limit_bytes: int
    nvme_bytes: int
    nvme_limit_bytes: int

    @property
    def fits(self) -> bool:
        """Whether host and drives have enough room."""
        return self.host_bytes <= self.host_limit_bytes and self.nvme_bytes <= self.nvme_limit_bytes

    @property
    def share(self) -> float:
        """The used fraction of the host or of the drives, whichever is fuller."""
        nvme = self.nvme_bytes / self.nvme_limit_bytes if self.nvme_bytes else 0.0
        return max(self.host_bytes / self.host_limit_bytes, nvme)

    def describe(self) -> str:
        """Return text such as ``the host of node0 keeps 37 GiB of 1.86 TiB, its drives 31.7 GiB of 13.6 TiB``."""
        host = f"the host of {self.name} keeps {format_bytes(self.host_bytes)} of {format_bytes(self.host_limit_bytes)}"
        if not self.nvme_bytes:
            return host
        return f"{host}, its drives {format_bytes(self.nvme_bytes)} of {format_bytes(self.nvme_limit_bytes)}"


def explain_nodes(nodes: Sequence[NodeMemory]) -> list[str]:
    """Return a sentence on the fullest node; an empty list for no nodes."""
    if not nodes:
        return []
    fullest, over = max(nodes, key=lambda node: node.share), sum(not node.fits for node in nodes)
    sentence = f"{fullest.describe()}."
    if over:
        return [f"{over} of {format_count(len(nodes), 'node')} have no room: {sentence}"]
    return [sentence[0].upper() + sentence[1:]]


def node_memory(plan: Plan | Placement, graph: Graph, cluster: Cluster) -> tuple[NodeMemory, ...]:
    """Return the host memory of each node that a plan uses; empty if the plan keeps everything on devices."""
    if isinstance(plan, Placement) or plan.offload == ON_DEVICE:
        return ()
    ranks: dict[int, list[int]] = defaultdict(list)
    for rank in range(plan.num_ranks):
        ranks[cluster.node_index(rank)].append(rank)
    found = []
    for index, members in ranks.items():
        node = cluster.nodes[index]
        kept = [count_host_needs(plan, graph, rank, backend_of(cluster.device_kind(rank))) for rank in members]
        found.append(
            NodeMemory(
                name=node.name,
                ranks=tuple(members),
                host_bytes=sum(needs.host_bytes for needs in kept),
                host_limit_bytes=node.host_memory_bytes,
                nvme_bytes=sum(needs.drive_bytes for needs in kept),
                nvme_limit_bytes=node.nvme.capacity_bytes if node.nvme else 0,
            )
        )
    return tuple(found)
