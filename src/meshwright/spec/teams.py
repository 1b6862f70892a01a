"""Teams: groups of neighbouring devices that compute one replica of a stage together; each team is one rank of a plan.

If ops are split over w devices (tensor · context · expert), these devices form a team: each computes a part of every
op, and they wait for each other at every collective. A plan, its program and its timeline number teams: rank r is the
devices r·w ... r·w + w - 1. In the cluster of teams (`team_cluster`), each rank has the properties of one of its
devices:

    device       the slowest of the team, with the least memory
    device link  that of the node: each of the w messages between two teams of a node has a link of its own
    NICs         the w messages of a team share the team's NICs, so each gets a part of their bandwidth;
                 uplinks of racks and paths between nodes likewise
    host         host memory, its bandwidth and the drives, divided by the w devices

A team lies within one node, or covers whole nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import groupby

from meshwright.spec.cluster import Cluster, DeviceGroup, DeviceKind, Link, Node, NodePath, Racks
from meshwright.spec.errors import ClusterError
from meshwright.spec.offload import Nvme
from meshwright.spec.units import format_bytes


def team_cluster(cluster: Cluster, width: int) -> Cluster:
    """Return the cluster whose ranks are teams of ``width`` devices of ``cluster``.

    Raises ClusterError if teams neither divide nodes nor cover whole nodes (or racks).
    """
    if width == 1:
        return cluster
    known = {kind.name: kind for kind in cluster.device_kinds}
    found: dict[str, DeviceKind] = {}
    nodes, gathered, made = [], list[Node](), dict[tuple[object, ...], Node]()
    for node in cluster.nodes:
        if not node.num_devices and not gathered:
            # A node that has lost all of its devices keeps its index, which racks and paths use.
            nodes.append(node)
            continue
        gathered.append(node)
        count = sum(item.num_devices for item in gathered)
        if count < width:
            continue
        if count % width or (count > width and len(gathered) > 1):
            break
        alike = tuple(_all_but_name(item) for item in gathered)
        if alike not in made:
            made[alike] = _team_node(gathered, width, known, found)
        last = gathered[-1].name
        nodes.append(replace(made[alike], name=node.name if len(gathered) == 1 else f"{gathered[0].name} to {last}"))
        gathered = []
    if gathered:
        sizes = sorted({node.num_devices for node in cluster.nodes})
        raise ClusterError(
            f"Teams of {width} devices (tensor times context times expert) were requested on nodes of "
            f"{', '.join(map(str, sizes))}; expected teams that divide a node, or cover whole nodes. Choose other "
            "sizes of the axes."
        )
    return replace(
        cluster,
        device_kinds=tuple(found.values()),
        nodes=tuple(nodes),
        racks=_team_racks(cluster, width),
        paths=tuple(_team_path(cluster, path, width) for path in cluster.paths),
    )


def _all_but_name(node: Node) -> tuple[object, ...]:
    return tuple(getattr(node, field.name) for field in fields(node) if field.name != "name")


def _nodes_of_team(cluster: Cluster, width: int) -> int:
    return max(width // cluster.nodes[0].num_devices, 1)


def _team_racks(cluster: Cluster, width: int) -> Racks | None:
    if cluster.racks is None:
        return None
    racks, covered = cluster.racks, _nodes_of_team(cluster, width)
    if racks.nodes_per_rack % covered:
        raise ClusterError(
            f"Teams of {width} devices cover {covered} nodes, but racks have {racks.nodes_per_rack} nodes; expected "
            "teams within a rack. Choose smaller axes, or other racks."
        )
    num_devices = racks.nodes_per_rack * cluster.nodes[0].num_devices
    ways = max(racks.num_uplinks * width / num_devices, 1.0)
    return Racks(
        nodes_per_rack=racks.nodes_per_rack // covered,
        num_uplinks=max(min(racks.num_uplinks, num_devices // width), 1),
        uplink=_slower([racks.uplink], share=min(ways / width, 1.0)),
    )


def _team_path(cluster: Cluster, path: NodePath, width: int) -> NodePath:
    """The path for the w messages of a team, which share it; teams that cover nodes use the path of any of them."""
    covered = _nodes_of_team(cluster, width)
    ends = path.nodes[0] // covered, path.nodes[1] // covered
    if ends[0] == ends[1]:
        raise ClusterError(
            f"Teams of {width} devices cover nodes {path.nodes[0]} and {path.nodes[1]}, but the cluster has a separate "
            "path between these nodes; expected teams that do not contain a path. Choose smaller axes."
        )
    return NodePath(nodes=ends, link=_slower([path.link], share=1.0 / width))


def _team_node(nodes: Sequence[Node], width: int, known: dict[str, DeviceKind], found: dict[str, DeviceKind]) -> Node:
    """One node of teams, or the node of the one team that covers some nodes; ``found`` gathers the kinds of teams."""
    devices = [known[group.kind] for node in nodes for group in node.devices for _ in range(group.count)]
    kinds = [_slowest(devices[start : start + width]) for start in range(0, len(devices), width)]
    found.update((kind.name, kind) for kind in kinds)
    num_devices = max(node.num_devices for node in nodes)
    messages = min(width, num_devices)
    num_nics = min(node.num_nics for node in nodes)
    ways = max(num_nics * messages / num_devices, 1.0)
    return replace(
        nodes[0],
        devices=tuple(DeviceGroup(kind=name, count=len(list(group))) for name, group in groupby(k.name for k in kinds)),
        host_memory_bytes=min(node.host_memory_bytes for node in nodes) // messages,
        host_memory_bandwidth_bytes_per_s=min(node.host_memory_bandwidth_bytes_per_s for node in nodes) / messages,
        # A team continues when the last of its hosts has issued an op.
        host_call_s=max(node.host_call_s for node in nodes),
        nvme=_slowest_drives(nodes, messages),
        num_cores=sum(node.num_cores for node in nodes),
        device_link=_slower(node.device_link for node in nodes),
        pcie=_slower(node.pcie for node in nodes),
        nic=_slower((node.nic for node in nodes), share=min(ways / messages, 1.0)),
        num_nics=max(min(num_nics, num_devices // messages), 1),
    )


def _slowest_drives(nodes: Sequence[Node], parts: int) -> Nvme | None:
    """An equal part of the slowest drives among the nodes; None if a node has no drives."""
    drives = [node.nvme for node in nodes]
    found = [item for item in drives if item is not None]
    if len(found) < len(drives):
        return None
    return Nvme(
        capacity_bytes=max(min(item.capacity_bytes for item in found) // parts, 1),
        read_bytes_per_s=min(item.read_bytes_per_s for item in found) / parts,
        write_bytes_per_s=min(item.write_bytes_per_s for item in found) / parts,
    )


def _slowest(team: Sequence[DeviceKind]) -> DeviceKind:
    """A team of devices as one device: as slow as its slowest, with the least memory."""
    slowest = min(team, key=_speed)
    memory_bytes = min(kind.memory_bytes for kind in team)
    if memory_bytes == slowest.memory_bytes:
        return slowest
    return replace(slowest, name=f"{slowest.name} with {format_bytes(memory_bytes)}", memory_bytes=memory_bytes)


def _speed(kind: DeviceKind) -> tuple[float, float]:
    return max(kind.peak_flops_per_s.values()) / kind.slowdown, kind.memory_bandwidth_bytes_per_s / kind.slowdown


def _slower(links: Iterable[Link], share: float = 1.0) -> Link:
    """The slowest of some links, with a share of its bandwidth."""
    given = list(links)
    return Link(
        latency_s=max(link.latency_s for link in given),
        bandwidth_bytes_per_s=min(link.bandwidth_bytes_per_s for link in given) * share,
    )
