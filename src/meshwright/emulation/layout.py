"""The namespaces, links and queues that emulate a cluster, as data (`plan_layout`), and refusals.

Each NIC of each node is a network namespace; the ranks that share a NIC share its namespace and talk to each other over
its loopback. NICs of one node are joined directly, without a limit. A further namespace holds the switch: a bridge,
or a bridge per rack with an uplink to a bridge between racks.

    rank 0, rank 1 │ namespace of a NIC: eth0 ═══ port 0 │ switch
    rank 2         │ namespace of a NIC: eth0 ═══ port 1 │

Both ends of a cable have a token bucket (tbf), so that a NIC sends and receives at its bandwidth. A path between two
nodes that is slower than their NICs is a class of a hierarchical token bucket (htb) at the sender. Sources: tc-tbf(8),
tc-htb(8), veth(4).
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec import Cluster, ClusterError, format_count, format_seconds

# A bandwidth of a cluster file counts the bytes of messages; the kernel's queues count whole Ethernet frames, 1514
# bytes for 1448 of a TCP stream (headers: Ethernet 14, IPv4 20, TCP 20 and its timestamps 12).
FRAME_BYTES, PAYLOAD_BYTES = 1514, 1448
# Ranks of one host have 0.2 ms anyway (`benchmarks/emulation.py --only limits`); latencies of this order are allowed.
MAX_LATENCY_S = 1e-3
# A link of this rate reaches 99.8 % of it (`benchmarks/emulation.py --only limits`); faster ones wait for the host.
MAX_BYTES_PER_S = 6.25e8
# The slowest queue; a link that is slower counts as down.
MIN_BITS_PER_S = 8_000
# A bucket lasts two milliseconds, and holds at least a segment of 64 KiB at rates where splitting it costs time.
_BURST_S = 2e-3
_MIN_BURST_BYTES = 16_384
# Bytes wait for this time at most in a queue; TCP slows down when it is full.
_QUEUE_MS = 100
MAX_NICS = 250


@dataclass(frozen=True, slots=True)
class LabNic:
    """A NIC of a node: its node, its number there, its rack, its address and its bandwidth in bytes per second."""

    node: int
    place: int
    rack: int
    address: str
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class LabLayout:
    """The namespaces of a cluster: one per NIC, and the switch.

    ``nic_of_rank``: per rank of the cluster, the index of its NIC in ``nics``. ``uplink_bytes_per_s``: the bandwidth of
    each rack's uplink, None without racks. ``paths``: bandwidth in bytes per second between two nodes, lower index
    first.
    """

    nics: tuple[LabNic, ...]
    nic_of_rank: tuple[int, ...]
    uplink_bytes_per_s: float | None
    paths: dict[tuple[int, int], float]

    @property
    def num_racks(self) -> int:
        """Racks with a bridge of their own; 0 without racks."""
        return 0 if self.uplink_bytes_per_s is None else 1 + max(nic.rack for nic in self.nics)

    def switch_links(self, files: list[str]) -> list[str]:
        """Return lines of ``ip -batch`` that build the switch; ``files`` are the namespaces' files, per NIC."""
        lines = ["link set lo up", "link add name core type bridge", "link set core up"]
        for rack in range(self.num_racks):
            lines += [
                f"link add name rack{rack} type bridge",
                f"link set rack{rack} up",
                f"link add name up{rack} type veth peer name down{rack}",
                f"link set up{rack} master rack{rack} up",
                f"link set down{rack} master core up",
            ]
        for place, (nic, file) in enumerate(zip(self.nics, files, strict=True)):
            bridge = f"rack{nic.rack}" if self.num_racks else "core"
            lines += [
                f"link add name port{place} type veth peer name eth0 netns {file}",
                f"link set port{place} master {bridge} up",
            ]
        return lines

    def nic_links(self, place: int, files: list[str]) -> list[str]:
        """Return lines of ``ip -batch`` for the namespace of a NIC: its address, and cables to NICs of its node."""
        nic = self.nics[place]
        lines = ["link set lo up", f"addr add {nic.address}/16 dev eth0", "link set eth0 up"]
        for other, peer in enumerate(self.nics):
            if peer.node != nic.node or other == place:
                continue
            if place < other:
                lines.append(f"link add name nic{other} type veth peer name nic{place} netns {files[other]}")
            lines += [f"link set nic{other} up", f"route add {peer.address}/32 dev nic{other} src {nic.address}"]
        return lines

    def switch_queues(self) -> list[str]:
        """Return lines of ``tc -batch`` for the switch: what NICs receive, and the uplinks in both directions."""
        lines = [_bucket(f"port{place}", nic.bytes_per_s) for place, nic in enumerate(self.nics)]
        if self.uplink_bytes_per_s is not None:
            ends = [f"{end}{rack}" for rack in range(self.num_racks) for end in ("up", "down")]
            lines += [_bucket(end, self.uplink_bytes_per_s) for end in ends]
        return lines

    def nic_queues(self, place: int) -> list[str]:
        """Return lines of ``tc -batch`` for the namespace of a NIC: what it sends, at most, and to which node."""
        nic = self.nics[place]
        slow = {
            other: rate
            for pair, rate in self.paths.items()
            for end, other in (pair, pair[::-1])
            if end == nic.node and rate < nic.bytes_per_s
        }
        if not slow:
            return [_bucket("eth0", nic.bytes_per_s)]
        guaranteed = nic.bytes_per_s / (len(slow) + 1)
        lines = [
            "qdisc replace dev eth0 root handle 1: htb default 2",
            _class("1:", "1:1", nic.bytes_per_s, nic.bytes_per_s),
            _class("1:1", "1:2", guaranteed, nic.bytes_per_s),
        ]
        for number, (node, rate) in enumerate(sorted(slow.items()), 3):
            lines.append(_class("1:1", f"1:{number}", min(guaranteed, rate), rate))
            lines += [
                f"filter replace dev eth0 parent 1: protocol ip prio {1 + place} handle 800::{1 + place} u32 "
                f"match ip dst {peer.address}/32 flowid 1:{number}"
                for place, peer in enumerate(self.nics)
                if peer.node == node
            ]
        return lines


def plan_layout(cluster: Cluster) -> LabLayout:
    """Return the namespaces that emulate a cluster.

    Raises ClusterError for what the kernel's queues cannot do: latencies, several uplinks of a rack, paths between
    nodes with several NICs, links faster than this machine moves bytes.
    """
    _refuse_latencies(cluster)
    if cluster.racks is not None and cluster.racks.num_uplinks > 1:
        raise ClusterError(
            f"Cluster {cluster.name!r} has racks with {cluster.racks.num_uplinks} uplinks; an emulated rack has one. "
            "Describe a single uplink with the bandwidth of all of them, or simulate this cluster instead."
        )
    columns = cluster.columns()
    places = list(zip(columns.node.tolist(), columns.nic.tolist(), strict=True))
    number = {place: index for index, place in enumerate(dict.fromkeys(places))}
    nics = tuple(
        LabNic(
            node, place, cluster.rack_of(node), f"10.77.0.{1 + index}", cluster.nodes[node].nic.bandwidth_bytes_per_s
        )
        for (node, place), index in number.items()
    )
    if len(nics) > MAX_NICS:
        raise ClusterError(f"Cluster {cluster.name!r} has {len(nics)} NICs in use; at most {MAX_NICS} are emulated.")
    with_path = {node for path in cluster.paths for node in path.nodes}
    if several := [cluster.nodes[node].name for node in sorted(with_path) if cluster.nodes[node].num_nics > 1]:
        raise ClusterError(
            f"Node {several[0]!r} of cluster {cluster.name!r} has several NICs and a slower path to another node. "
            "Emulated paths are those of nodes with one NIC; set num_nics = 1, or simulate this cluster instead."
        )
    if len(cluster.nodes) > 1:
        rates = [nic.bytes_per_s for nic in nics] + [path.link.bandwidth_bytes_per_s for path in cluster.paths]
        if max(rates) > MAX_BYTES_PER_S:
            raise ClusterError(
                f"Cluster {cluster.name!r} has links between nodes of {max(rates) * 8 / 1e9:.3g} Gbit/s; one machine "
                f"emulates at most {MAX_BYTES_PER_S * 8 / 1e9:g} Gbit/s. Describe slower links, or simulate this "
                "cluster instead."
            )
    return LabLayout(
        nics=nics,
        nic_of_rank=tuple(number[place] for place in places),
        uplink_bytes_per_s=None if cluster.racks is None else cluster.racks.uplink.bandwidth_bytes_per_s,
        paths={(min(path.nodes), max(path.nodes)): path.link.bandwidth_bytes_per_s for path in cluster.paths},
    )


def rank_shares(cluster: Cluster, num_cores: int) -> list[float]:
    """Return each rank's share of a core, so that all of them fit on 90 % of ``num_cores``.

    A device without a ``slowdown`` gets at most one core, the same whatever others use. Raises ClusterError if the
    shares are too small to compute anything.
    """
    whole = min(1.0, _USABLE * num_cores / cluster.num_ranks)
    shares = [whole / cluster.device_kind(rank).slowdown for rank in range(cluster.num_ranks)]
    if min(shares) < MIN_SHARE:
        raise ClusterError(
            f"Cluster {cluster.name!r} has {format_count(cluster.num_ranks, 'device')}; on the "
            f"{format_count(num_cores, 'core')} here the slowest would have {min(shares):.2%} of a core. Expected at "
            f"least {MIN_SHARE:.0%}: emulate fewer or more equal devices, or simulate this cluster instead."
        )
    return shares


# The rest is for the launcher, the kernel's queues and everything else on the machine.
_USABLE = 0.9
MIN_SHARE = 0.02


def _refuse_latencies(cluster: Cluster) -> None:
    links = {f"the NIC of node {node.name!r}": node.nic for node in cluster.nodes if len(cluster.nodes) > 1}
    links |= {f"the path between nodes {path.nodes[0]} and {path.nodes[1]}": path.link for path in cluster.paths}
    if cluster.racks is not None:
        links["the uplink of a rack"] = cluster.racks.uplink
    for name, link in links.items():
        if link.latency_s > MAX_LATENCY_S:
            raise ClusterError(
                f"Cluster {cluster.name!r}: {name} has a latency of {format_seconds(link.latency_s)}. Emulated links "
                f"have the bandwidth of the file, but no added latency or loss; expected at most "
                f"{format_seconds(MAX_LATENCY_S)}. Simulate this cluster instead, or set a lower latency_s."
            )


def _bucket(device: str, bytes_per_s: float) -> str:
    rate, burst = _rate(bytes_per_s), _burst(bytes_per_s)
    return f"qdisc replace dev {device} root tbf rate {rate} burst {burst} latency {_QUEUE_MS}ms"


def _class(parent: str, name: str, guaranteed: float, at_most: float) -> str:
    burst = _burst(at_most)
    return (
        f"class replace dev eth0 parent {parent} classid {name} htb rate {_rate(guaranteed)} ceil {_rate(at_most)} "
        f"burst {burst} cburst {burst}"
    )


def _rate(bytes_per_s: float) -> str:
    bits = bytes_per_s * 8 * FRAME_BYTES / PAYLOAD_BYTES
    return f"{max(MIN_BITS_PER_S, round(bits))}bit"


def _burst(bytes_per_s: float) -> int:
    return max(_MIN_BURST_BYTES, round(bytes_per_s * _BURST_S))
