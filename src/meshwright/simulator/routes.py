"""Which links does a transfer hold? The table of routes of a cluster.

- Two ranks of one node: a link of their own per direction, as behind a full switch (NVLink) or in the memory of one
  host.
- Ranks of different nodes: the NIC of the sender outwards and the NIC of the receiver inwards. A node of d devices
  with k NICs gives device i the NIC floor(i k / d), so that devices share NICs when there are fewer of them.
- A collective: the links of a ring over its ranks in ascending order, node by node.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from meshwright.spec import Cluster

# ("pair", source rank, target rank), or ("out" or "in", node, NIC of the node).
_Link = tuple[str, int, int]


class Routes:
    """Numbers links and routes as they are asked for; ask for all of them, then take the `table`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._first_rank = [0, *accumulate(node.num_devices for node in cluster.nodes)]
        self._links: dict[_Link, int] = {}
        self._routes: dict[tuple[int, ...], int] = {}

    def send(self, source: int, target: int) -> int:
        """The route of a message between two ranks; -1 from a rank to itself."""
        return self._number(self._pair(source, target))

    def ring(self, ranks: Sequence[int]) -> int:
        """The route of a collective over ``ranks``."""
        members = sorted(ranks)
        hops = zip(members, [*members[1:], members[0]], strict=True)
        return self._number([link for hop in hops for link in self._pair(*hop)])

    def table(self) -> tuple[NDArray[np.int64], NDArray[np.int32], int]:
        """Offsets and links of all routes in CSR form, and the number of links."""
        offsets = np.cumsum([0, *(len(links) for links in self._routes)], dtype=np.int64)
        links = np.array([link for links in self._routes for link in links], np.int32)
        return offsets, links, len(self._links)

    def names(self) -> tuple[str, ...]:
        """What people call each link, in order of their numbers."""
        return tuple(self._name(*link) for link in self._links)

    def _name(self, kind: str, first: int, second: int) -> str:
        if kind == "pair":
            return f"link {first}→{second}"
        return f"NIC {second} of {self._cluster.nodes[first].name}, {kind}"

    def _pair(self, source: int, target: int) -> list[_Link]:
        if source == target:
            return []
        if self._cluster.node_index(source) == self._cluster.node_index(target):
            return [("pair", source, target)]
        return [("out", *self._nic(source)), ("in", *self._nic(target))]

    def _nic(self, rank: int) -> tuple[int, int]:
        index = self._cluster.node_index(rank)
        node = self._cluster.nodes[index]
        return index, (rank - self._first_rank[index]) * node.num_nics // node.num_devices

    def _number(self, links: Sequence[_Link]) -> int:
        if not links:
            return -1
        numbers = tuple(dict.fromkeys(self._links.setdefault(link, len(self._links)) for link in links))
        return self._routes.setdefault(numbers, len(self._routes))
