"""Seconds of a collective from datasheet figures, by the fastest algorithm and protocol for each size; and intervals.

`quote_collective` lists the algorithms and protocols of a collective. `datasheet_scale` and `bound_cost` give the
interval of the result. In the formulas, n ranks run on N nodes with r ranks each. The links inside a node have latency
α_d and bandwidth B_d. The NICs have latency α_n. B_n is the bandwidth out of a node (bytes/s): that of all NICs which
the group can use, shared with concurrent groups; or, between racks, that of the uplinks if it is lower. S is the bytes
of the full tensor. `port_share` gives the share of S that passes each port.

    flat ring     steps·(N·α_n + (n-N)·α_d)/n + S·max(share inside / B_d, share across / B_n)       (N = 0 for one node)
    tree          2(r-1)·α_d + 2·⌈log₂ N⌉·α_n + S·max((1 or 2) / B_d, (1 or 2) / B_n)       all-reduce, broadcast (half)
    hierarchical  reduce-scatter inside, the op across on the parts, all-gather inside; one after the other

Devices without NCCL (CPUs, which have no compute capability) use gloo's ring. For every order of the ranks, a ring is
arranged so that it crosses each node once (`best_ring`). It enters a node through at most one NIC per rank on the node.
Either the links inside a node or those between nodes may be faster.

Sources: Patarasu and Yuan, JPDC 69 (2009); NCCL src/graph/tuning.cc; Thakur, Rabenseifner, Gropp, IJHPCA 19 (2005).

NCCL's protocols trade latency for bandwidth; they are in a data file, with version and source:

    seconds on a link = base + steps·(share of the link's latency) + bytes / (share of its bandwidth)

Between devices without NCCL (CPUs), the latency and bandwidth of a link hold unchanged: `PLAIN`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import resources
from math import ceil, log2
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from meshwright.cost.collectives.algorithms import Algorithm, CollectiveOp, count_steps, port_share
from meshwright.cost.collectives.collective_groups import CollectiveGroup
from meshwright.cost.collectives.fitted import ErrorScale
from meshwright.cost.collectives.fitting import UNKNOWN
from meshwright.cost.costs import Floats, Interval
from meshwright.spec import Cluster, ClusterError, Node, decode_document
from meshwright.spec.parsing import read_data

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet


# The interval of a datasheet cost t is, with factors by op that contain 80 % of measurements on public clusters,
#
#     t₀·[low, high] of latency + (t - t₀)·[low, high] of bandwidth,     t₀ the cost of the smallest message
#
# The document ``cost/models/collectives.json`` holds the factors fitted by `validation.collectives`: ``inside`` one
# node on NVIDIA devices of several kinds with equal weights; ``across`` nodes on the only public cluster, V100s with a
# NIC of 25 Gbit/s per node, where small messages take ten times the datasheet's time. An op without measurements has
# the widest factors of the others. Devices without NCCL have factors of a half to two, the range within which rules of
# thumb agree; they were not measured.
@dataclass(frozen=True, slots=True, kw_only=True)
class DatasheetErrors:
    """Factors measured / datasheet cost by collective, from which the intervals of datasheet costs are computed.

    ``inside``: groups inside one node, measured on the device kinds ``devices``; ``across``: groups across nodes.
    ``rows_sha256``: the hash of the hashes of the measurement rows on which the factors were fitted.
    """

    source: str
    devices: tuple[str, ...]
    rows_sha256: str
    inside: dict[str, ErrorScale]
    across: dict[str, ErrorScale]

    SCHEMA_VERSION: ClassVar[int] = 2

    def scale_of(self, op: CollectiveOp, *, across: bool) -> ErrorScale:
        """Return the factors of an op inside a node or across nodes, or the widest of all if it was not measured."""
        scales = self.across if across else self.inside
        known = scales.get(op)
        if known is not None:
            return known
        return ErrorScale(
            latency=_widest([scale.latency for scale in scales.values()]),
            bandwidth=_widest([scale.bandwidth for scale in scales.values()]),
        )


def bound_cost(seconds: Floats, latency_s: float | Floats, scale: ErrorScale) -> tuple[Floats, Floats]:
    """Return the lower and upper ends (seconds) of the intervals of datasheet costs, in the shape of ``seconds``.

    ``latency_s``, the cost of the smallest message, is multiplied by the factors of ``scale.latency``, and the rest of
    the cost by those of ``scale.bandwidth``.
    """
    wire = seconds - latency_s
    return (
        latency_s * scale.latency.low + wire * scale.bandwidth.low,
        latency_s * scale.latency.high + wire * scale.bandwidth.high,
    )


def _widest(intervals: list[Interval]) -> Interval:
    return Interval(low=min(one.low for one in intervals), high=max(one.high for one in intervals))


@cache
def load_datasheet_errors() -> DatasheetErrors:
    """Load the shipped factors between measurements and datasheet costs."""
    with resources.as_file(resources.files("meshwright.cost") / "models" / "collectives.json") as path:
        return decode_document(DatasheetErrors, read_data(path), path.name)


def datasheet_scale(op: CollectiveOp, *, by_nccl: bool, across: bool) -> ErrorScale:
    """Return the factors for the interval of an op's datasheet cost.

    ``across``: whether the group crosses nodes; ``by_nccl``: whether its devices use NCCL. Without NCCL the factors are
    0.5 to 2.
    """
    if by_nccl:
        return load_datasheet_errors().scale_of(op, across=across)
    return ErrorScale(latency=UNKNOWN, bandwidth=UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """The slowest links that a group uses: latency (s) and bandwidth (bytes/s) inside a node, and between nodes."""

    inside_s: float
    inside_bytes_per_s: float
    across_s: float
    across_bytes_per_s: float

    def through(self, protocol: Protocol) -> Ways:
        """Return the links with the latency and bandwidth that they have under a protocol of NCCL."""
        return Ways(
            inside_s=self.inside_s * protocol.inside_latency_share,
            inside_bytes_per_s=self.inside_bytes_per_s * protocol.bandwidth_share,
            across_s=self.across_s * protocol.across_latency_share,
            across_bytes_per_s=self.across_bytes_per_s * protocol.bandwidth_share,
        )


# Collectives inside a node before and after the one across nodes, which moves the parts of the node's devices.
_PARTS_INSIDE: dict[CollectiveOp, tuple[CollectiveOp, ...]] = {
    "all_reduce": ("reduce_scatter", "all_gather"),
    "all_gather": ("all_gather",),
    "reduce_scatter": ("reduce_scatter",),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tariff:
    """The costs of a collective by each algorithm and protocol that it can use.

    ``latency_s`` (s) and ``s_per_byte`` (s per byte of the full tensor) have one entry per option (algorithm and
    protocol). ``by_nccl``: whether the devices use NCCL.
    """

    latency_s: Floats
    s_per_byte: Floats
    by_nccl: bool

    def estimate(self, num_bytes: Floats) -> Floats:
        """Return the seconds of the fastest option for each size, shape (n,)."""
        fastest = np.full(len(num_bytes), np.inf)
        for latency_s, s_per_byte in zip(self.latency_s, self.s_per_byte, strict=True):
            np.minimum(fastest, latency_s + num_bytes * s_per_byte, out=fastest)
        return fastest


def quote_collective(
    cluster: Cluster,
    op: CollectiveOp,
    ranks: Sequence[int],
    group: CollectiveGroup,
    algorithm: Algorithm | None = None,
    concurrent: Sequence[Sequence[int]] = (),
) -> Tariff:
    """Return the costs of a collective among ``ranks``, whose `CollectiveGroup` is ``group``.

    ``algorithm`` restricts the options; None allows all algorithms of the devices. ``concurrent``: groups that run the
    same collective at the same time, and share the uplinks of racks and the paths between nodes; ``group`` counts those
    that share NICs. A single rank takes no time.
    """
    by_nccl = all(cluster.device_kind(rank).compute_capability for rank in ranks)
    if group.num_ranks == 1:
        return Tariff(latency_s=np.zeros(1), s_per_byte=np.zeros(1), by_nccl=by_nccl)
    by_node = Counter(cluster.node_index(rank) for rank in ranks)
    ways = find_ways([(cluster.nodes[index], count) for index, count in by_node.items()], group.num_sharing)
    if cluster.racks is not None or cluster.paths:
        others = [{cluster.node_index(rank) for rank in other} for other in concurrent if set(other) != set(ranks)]
        ways = _bound_between(cluster, op, by_node, others, ways)
    counts = tuple(by_node.values())
    if by_nccl:
        found = [
            (protocol.base_s + latency_s, s_per_byte)
            for protocol in load_nccl().protocols
            for latency_s, s_per_byte in _list_ways(op, group, counts, ways.through(protocol), algorithm)
        ]
    else:
        found = _list_ways(op, group, counts, ways.through(PLAIN), algorithm or "ring")
    latencies, rates = np.array(found, np.float64).T
    return Tariff(latency_s=latencies, s_per_byte=rates, by_nccl=by_nccl)


def find_ways(nodes: Sequence[tuple[Node, int]], num_sharing: int) -> Ways:
    """Return the slowest links that a group uses, while ``num_sharing`` groups share each NIC.

    ``nodes``: pairs of a node and the number of the group's ranks on it. Unused links have latency 0 and infinite
    bandwidth: those between nodes if there is one node, those inside if each node has one rank.
    """
    inner = [node.device_link for node, count in nodes if count > 1]
    outer = []
    if len(nodes) > 1:
        for node, count in nodes:
            rails = min(node.num_nics, count)
            crowd = max(1.0, num_sharing * rails / node.num_nics)
            outer.append((node.nic.latency_s, node.nic.bandwidth_bytes_per_s * rails / crowd))
    return Ways(
        inside_s=max((link.latency_s for link in inner), default=0.0),
        inside_bytes_per_s=min((link.bandwidth_bytes_per_s for link in inner), default=np.inf),
        across_s=max((latency for latency, _ in outer), default=0.0),
        across_bytes_per_s=min((bandwidth for _, bandwidth in outer), default=np.inf),
    )


def _bound_between(
    cluster: Cluster, op: CollectiveOp, by_node: Mapping[int, int], others: Sequence[AbstractSet[int]], ways: Ways
) -> Ways:
    """Return the links of a group, limited by slower parts between the NICs of its nodes.

    ``others``: the nodes of each concurrent group. Groups with both nodes of a path share it; groups in several racks
    share the uplinks of a rack. In a ring or a tree, the traffic leaving a rack equals that leaving a node. In an
    all-to-all each device of a rack sends to all others, so that the rack's uplinks carry more than a NIC does.
    """
    latency_s, bandwidth = ways.across_s, ways.across_bytes_per_s
    for path in cluster.paths_among(by_node):
        sharing = 1 + sum(set(path.nodes) <= nodes for nodes in others)
        latency_s = max(latency_s, path.link.latency_s)
        bandwidth = min(bandwidth, path.link.bandwidth_bytes_per_s / sharing)
    by_rack = Counter(cluster.rack_of(index) for index in by_node for _ in range(by_node[index]))
    if cluster.racks is not None and len(by_rack) > 1:
        rails = min(min(cluster.nodes[index].num_nics, count) for index, count in by_node.items())
        num_ranks, load = by_rack.total(), 1.0
        if op == "all_to_all":
            rails *= min(Counter(map(cluster.rack_of, by_node)).values())
            load = _most_leaving(by_rack, num_ranks) / _most_leaving(by_node, num_ranks)
        racks = [{cluster.rack_of(node) for node in nodes} for nodes in others]
        sharing = 1 + max(sum(len(touched) > 1 and rack in touched for touched in racks) for rack in by_rack)
        uplinks = min(cluster.racks.num_uplinks / sharing, rails)
        latency_s += cluster.racks.uplink.latency_s
        bandwidth = min(bandwidth, cluster.racks.uplink.bandwidth_bytes_per_s * uplinks / load)
    return replace(ways, across_s=latency_s, across_bytes_per_s=bandwidth)


def _most_leaving(counts: Mapping[int, int], num_ranks: int) -> float:
    """Return the traffic leaving the fullest place when all ranks send to all, as a share of the tensor."""
    return max(count * (num_ranks - count) for count in counts.values()) / num_ranks**2


def quote_ring(op: CollectiveOp, group: CollectiveGroup, counts: Sequence[int], ways: Ways) -> tuple[float, float]:
    """Return (latency in s, seconds per byte of the full tensor) of the flat ring.

    For an all-to-all, all pairs of ranks send at once instead. ``counts``: the group's ranks on each node. ``ways``:
    the links of the group, whose bandwidth between nodes already excludes what other groups use of the NICs.
    """
    # In one round a message leaves each node once.
    crossing = len(counts) / group.num_ranks if len(counts) > 1 else 0.0
    latency_s = count_steps(op, group) * (crossing * ways.across_s + (1.0 - crossing) * ways.inside_s)
    outward = port_share(op, CollectiveGroup(num_ranks=group.num_ranks, num_nodes=group.num_nodes))
    if op == "all_to_all":
        # Nodes with unequal numbers of ranks send unequal shares.
        outward = _most_leaving(dict(enumerate(counts)), group.num_ranks)
    within = port_share(op, CollectiveGroup(num_ranks=group.num_ranks))
    return latency_s, _busiest(ways, within, outward)


def _list_ways(
    op: CollectiveOp, group: CollectiveGroup, counts: Sequence[int], ways: Ways, algorithm: Algorithm | None
) -> list[tuple[float, float]]:
    """Return (latency, seconds per byte) of every algorithm that the op and the place allow, or of one of them."""
    inside = CollectiveGroup(num_ranks=max(counts))
    across = CollectiveGroup(num_ranks=group.num_nodes, num_nodes=group.num_nodes)
    found = [quote_ring(op, group, counts, ways)]
    if algorithm == "ring":
        return found
    if op in ("all_reduce", "broadcast"):
        times = 2 if op == "all_reduce" else 1
        hops = (inside.num_ranks - 1) * ways.inside_s + ceil(log2(group.num_nodes)) * ways.across_s
        outward = port_share(op, across, algorithm="tree")
        tree = times * hops, _busiest(ways, port_share(op, inside, algorithm="tree"), outward)
        if algorithm == "tree":
            return [tree]
        found.append(tree)
    even = min(counts) == inside.num_ranks
    if even and min(inside.num_ranks, group.num_nodes) > 1 and op in _PARTS_INSIDE:
        latency = sum(count_steps(part, inside) for part in _PARTS_INSIDE[op]) * ways.inside_s
        moved = sum(port_share(part, inside) for part in _PARTS_INSIDE[op]) / ways.inside_bytes_per_s
        latency += count_steps(op, across) * ways.across_s
        found.append((latency, moved + port_share(op, across) / ways.across_bytes_per_s))
    return found


def _busiest(ways: Ways, within: float, outward: float) -> float:
    """Return seconds per byte of the full tensor in the slower of the ports inside a node and out of it."""
    return max(within / ways.inside_bytes_per_s, outward / ways.across_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """A protocol of NCCL, such as LL or Simple.

    ``base_s``: seconds to start a collective. The other fields are factors: latency inside a node, latency between
    nodes, and bandwidth under the protocol, each divided by the link's figure.
    """

    name: str
    base_s: float
    inside_latency_share: float
    across_latency_share: float
    bandwidth_share: float

    def __post_init__(self) -> None:
        for name in ("base_s", "inside_latency_share", "across_latency_share", "bandwidth_share"):
            value, least = getattr(self, name), "0 or more" if name == "base_s" else "a positive number"
            if value < 0 or (value == 0 and name != "base_s"):
                raise ClusterError(f"Protocol {self.name!r}: {name!r} is {value}; expected {least}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocols:
    """The protocols of one version of NCCL."""

    version: str
    protocols: tuple[Protocol, ...]
    source: str

    SCHEMA_VERSION: ClassVar[int] = 1


PLAIN = Protocol(name="plain", base_s=0.0, inside_latency_share=1.0, across_latency_share=1.0, bandwidth_share=1.0)


@lru_cache(maxsize=1)
def load_nccl() -> Protocols:
    """Load NCCL's shipped protocols."""
    with resources.as_file(resources.files("meshwright.cost.collectives") / "nccl.toml") as path:
        return decode_document(Protocols, read_data(path), path.name)
