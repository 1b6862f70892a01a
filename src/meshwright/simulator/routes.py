"""The links that a transfer holds (`hop_links`), and the table of routes of a cluster (`Routes`).

- Two ranks of one node: a separate link for each pair and direction, as with a full switch (NVLink) or in the memory of
  one host.
- Ranks of different nodes: the NIC of the sender outwards and the NIC of the receiver inwards. A node of d devices
  with k NICs gives device i the NIC floor(i k / d), so that devices share NICs when there are fewer of them.
- Ranks of different racks: also an uplink of each rack; the NICs of a rack are divided evenly among its uplinks
  (`spec.cluster.Racks`).
- A collective: the links of a ring over its ranks in ascending order, node by node, or those of a tree in both
  directions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.collectives.algorithms import best_tree, link_matrix
from meshwright.spec import Cluster
from meshwright.spec.cluster import Racks

Ids = NDArray[np.int64]


def hop_links(cluster: Cluster, sources: Ids, targets: Ids) -> Ids:
    """Return the numbers of the links that messages from ``sources`` to ``targets`` hold; -1 for no link.

    The shape is (2, *shape of sources), or (4, ...) in a cluster with racks. In a cluster of n ranks and N nodes, the
    link from rank a to rank b of one node is a n + b. NIC k of node i is n² + 2 (i K + k) outwards, and the next number
    inwards, where K is the largest number of NICs in use on a node. Uplink k of rack i, with U uplinks per rack, is
    n² + 2 N K + 2 (i U + k) outwards, and the next number inwards.
    """
    columns, num_ranks = cluster.columns(), cluster.num_ranks
    nics = num_ranks**2 + 2 * (columns.node * _most_nics(cluster) + columns.nic)
    inside = columns.node[sources] == columns.node[targets]
    first = np.where(inside, sources * num_ranks + targets, nics[sources])
    second = np.where(inside, -1, nics[targets] + 1)
    hops = np.stack([np.where(sources == targets, -1, first), second])
    if cluster.racks is None:
        return hops
    uplinks = _first_uplink(cluster) + 2 * _uplinks(cluster, cluster.racks)
    racks = columns.node // cluster.racks.nodes_per_rack
    apart = racks[sources] != racks[targets]
    above = np.stack([np.where(apart, uplinks[sources], -1), np.where(apart, uplinks[targets] + 1, -1)])
    return np.concatenate([hops, above])


def _uplinks(cluster: Cluster, racks: Racks) -> Ids:
    """Return the uplink of each rank: those of rack i are numbers i U to (i + 1) U - 1."""
    columns, counts = cluster.columns(), np.array([node.num_nics for node in cluster.nodes])
    rack = np.arange(len(counts)) // racks.nodes_per_rack
    before = np.cumsum(counts) - counts
    in_rack = np.bincount(rack, counts).astype(np.int64)
    place = before - before[rack * racks.nodes_per_rack]
    nic = place[columns.node] + columns.nic
    mine = rack[columns.node]
    uplinks: Ids = mine * racks.num_uplinks + nic * racks.num_uplinks // in_rack[mine]
    return uplinks


def _first_uplink(cluster: Cluster) -> int:
    return cluster.num_ranks**2 + 2 * len(cluster.nodes) * _most_nics(cluster)


def _most_nics(cluster: Cluster) -> int:
    return int(cluster.columns().nic.max()) + 1


class Routes:
    """Numbers the links and routes of a cluster in the order of first use; `table` lists all routes used so far."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._links: dict[int, int] = {}
        self._routes: dict[tuple[int, ...], int] = {}
        self._rings: dict[tuple[int, ...], int] = {}

    def send(self, source: int, target: int) -> int:
        """Return the number of the route of a message between two ranks; -1 from a rank to itself."""
        return self._number(hop_links(self._cluster, np.array([source]), np.array([target])))

    def ring(self, ranks: Sequence[int]) -> int:
        """Return the number of the route of a collective in a ring over ``ranks``; -1 for one rank."""
        key = tuple(ranks)
        if key not in self._rings:
            members = np.sort(np.array(key, np.int64))
            self._rings[key] = self._number(hop_links(self._cluster, members, np.roll(members, -1)))
        return self._rings[key]

    def tree(self, ranks: Sequence[int]) -> int:
        """Return the number of the route of a collective up and down a tree over ``ranks``."""
        members = np.sort(np.array(ranks, np.int64))
        parents = np.array(best_tree(link_matrix(self._cluster, members.tolist())))
        above = members[parents[1:]]
        hops = [hop_links(self._cluster, *ends) for ends in ((members[1:], above), (above, members[1:]))]
        return self._number(np.concatenate(hops, axis=1))

    def table(self) -> tuple[NDArray[np.int64], NDArray[np.int32], int]:
        """Return the offsets and the links of all routes in CSR form, and the number of links."""
        offsets = np.cumsum([0, *(len(links) for links in self._routes)], dtype=np.int64)
        links = np.array([link for links in self._routes for link in links], np.int32)
        return offsets, links, len(self._links)

    def names(self) -> tuple[str, ...]:
        """Return a name for each link, in the order of link numbers: ``link 0→1``, ``NIC 0 of node1, out``."""
        num_ranks, most = self._cluster.num_ranks, _most_nics(self._cluster)
        return tuple(self._name(link, num_ranks, most) for link in self._links)

    def _name(self, link: int, num_ranks: int, most_nics: int) -> str:
        if link < num_ranks**2:
            return f"link {link // num_ranks}→{link % num_ranks}"
        if link >= (first := _first_uplink(self._cluster)) and self._cluster.racks is not None:
            place, is_in = divmod(link - first, 2)
            rack, uplink = divmod(place, self._cluster.racks.num_uplinks)
            return f"uplink {uplink} of rack {rack}, {'in' if is_in else 'out'}"
        place, is_in = divmod(link - num_ranks**2, 2)
        index, nic = divmod(place, most_nics)
        return f"NIC {nic} of {self._cluster.nodes[index].name}, {'in' if is_in else 'out'}"

    def _number(self, hops: Ids) -> int:
        links = [link for link in hops.T.ravel().tolist() if link >= 0]
        if not links:
            return -1
        numbers = tuple(dict.fromkeys(self._links.setdefault(link, len(self._links)) for link in links))
        return self._routes.setdefault(numbers, len(self._routes))
