"""A listing of a cluster's collectives: times at a few sizes, the best orders of the ranks, and all-reduce limits.

bus bandwidth   bytes per second through one rank's port in a ring over all ranks (`port_share`; nccl-tests' busbw);
                comparable with the bandwidth of a link
orders          the ring in the given order, the best ring and the best tree (`algorithms`), each with the bandwidth of
                its slowest link and the number of links with this bandwidth
limits          BytePS's closed form for the all-reduce between n nodes, with 0, n/2 and n spare machines
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.cost.collectives.algorithms import (
    COLLECTIVE_OPS,
    best_ring,
    best_tree,
    link_matrix,
    parameter_server_seconds,
    port_share,
)
from meshwright.cost.collectives.collective_groups import CollectiveGroup
from meshwright.report import make_table
from meshwright.spec import Cluster, ClusterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.cost.cost_model import CostModel
    from meshwright.report.narrow import NarrowTable

Row = dict[str, Any]

LISTED_BYTES = (2**12, 2**20, 2**26, 2**30)
# The search for an order considers every pair of ranks: with more ranks it takes longer than a second.
MAX_RANKS = 512
_SHOWN_RANKS = 32


def list_collectives(cost: CostModel, ranks: Sequence[int]) -> dict[str, Any]:
    """Return a dict with the ``ranks`` and three lists of table rows: ``collectives``, ``orders`` and ``limits``.

    The module describes the rows. ``limits`` is empty for ranks on one node.

    Raises ClusterError for fewer than two or too many ranks, and for repeated or unknown ranks.
    """
    last = cost.cluster.num_ranks - 1
    sound = len(set(ranks)) == len(ranks) and all(0 <= rank <= last for rank in ranks)
    if not sound or not 2 <= len(ranks) <= MAX_RANKS:
        raise ClusterError(
            f"{len(ranks)} ranks were given ({_name_ranks(ranks)}); expected 2 to {MAX_RANKS} ranks, each once, from "
            f"0 to {last}. Write for example --ranks 0,1,2,3."
        )
    return {
        "ranks": list(ranks),
        "collectives": [row for op in COLLECTIVE_OPS for row in _estimate(cost, op, ranks)],
        "orders": _order(cost.cluster, ranks),
        "limits": _limit(cost.cluster, ranks),
    }


def tables_of_listing(listing: dict[str, Any], name: str) -> list[NarrowTable]:
    """Return the result of `list_collectives` as tables for a terminal; ``name`` is the cluster's name in the title."""
    title = f"{name}, {len(listing['ranks'])} ranks; low to high: 80 % interval; bytes of the full tensor"
    orders = [{**row, "ranks": _name_ranks(row["ranks"])} for row in listing["orders"]]
    tables = [
        make_table(listing["collectives"], title=title, collapse="collective"),
        make_table(orders, title="orders of the ranks (for a tree: the parent of each rank)"),
    ]
    if listing["limits"]:
        title = "all-reduce across nodes, with spare machines as parameter servers"
        tables.append(make_table(listing["limits"], title=title))
    return tables


def _estimate(cost: CostModel, op: Any, ranks: Sequence[int]) -> list[Row]:
    """Return rows of one op, one per size; a send is between the first two ranks."""
    members = ranks[:2] if op == "send" else ranks
    found = cost.predict_collective(op, members, np.array(LISTED_BYTES, np.float64))
    share = port_share(op, CollectiveGroup(num_ranks=len(members)))
    columns = (column.tolist() for column in (found.seconds, found.low_s, found.high_s))
    return [
        {
            "collective": op,
            "num_bytes": num_bytes,
            "time_s": seconds,
            "low_s": low_s,
            "high_s": high_s,
            "bus_bandwidth_bytes_per_s": share * num_bytes / seconds,
            "basis": basis,
        }
        for num_bytes, seconds, low_s, high_s, basis in zip(LISTED_BYTES, *columns, found.basis, strict=True)
    ]


def _order(cluster: Cluster, ranks: Sequence[int]) -> list[Row]:
    """Return the ring as given, the best ring, and the best tree, with the first rank as its root."""
    links = link_matrix(cluster, ranks)
    count, best, parents = len(ranks), best_ring(links), best_tree(links)
    found = {
        "ring as given": (range(count), [(place, (place + 1) % count) for place in range(count)]),
        "best ring": (best, list(zip(best, (*best[1:], best[0]), strict=True))),
        "best tree": (parents, [(child, parent) for child, parent in enumerate(parents) if child]),
    }
    rows = []
    for name, (places, used) in found.items():
        speeds = np.array([links[pair] for pair in used])
        rows.append(
            {
                "order": name,
                "ranks": [ranks[place] for place in places],
                "slowest_bytes_per_s": float(speeds.min()),
                "slowest_links": int((speeds == speeds.min()).sum()),
            }
        )
    return rows


def _limit(cluster: Cluster, ranks: Sequence[int]) -> list[Row]:
    """Return all-reduces of the largest size between the nodes, with spare machines; empty for one node."""
    nodes = [cluster.nodes[index] for index in sorted({cluster.node_index(rank) for rank in ranks})]
    if len(nodes) < 2:
        return []
    bandwidth, num_bytes = min(node.nic.bandwidth_bytes_per_s * node.num_nics for node in nodes), LISTED_BYTES[-1]
    return [
        {
            "machines": len(nodes),
            "spare": spare,
            "num_bytes": num_bytes,
            "time_s": parameter_server_seconds(len(nodes), spare, num_bytes, bandwidth),
        }
        for spare in sorted({0, len(nodes) // 2, len(nodes)})
    ]


def _name_ranks(ranks: Sequence[int]) -> str:
    shown = " ".join(map(str, ranks[:_SHOWN_RANKS]))
    return shown if len(ranks) <= _SHOWN_RANKS else f"{shown} and {len(ranks) - _SHOWN_RANKS} more"
