"""The machines of a state: as they are described, and as the scenario makes them.

    base       nodes x devices of one kind, or a cluster from a file as it is
    scenario   the same with  slow device k     its peak rates and memory bandwidth divided by s
                              slow links        bandwidth divided and latency multiplied by s, inside or between nodes
                              NICs              so many per node, shared by its devices: transfers wait for each other
                              memory            so many GiB on every device

A plan is made for the base (that is where balanced cuts come from) and simulated on the scenario.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate, groupby

from meshwright.playground.state import State
from meshwright.spec import Cluster, DeviceGroup, DeviceKind, Link, Node, PlaygroundError, load_cluster, shipped_kinds
from meshwright.spec.errors import suggest

# So many devices are drawn and answered at once; beyond, pictures and response suffer.
MAX_DEVICES = 1024


def base_cluster(state: State, files: Mapping[str, Cluster]) -> Cluster:
    """The cluster that a state describes; ``files`` are clusters from files, by the name that stands for a kind.

    Raises PlaygroundError for an unknown kind, too many devices, or another size than a file's cluster has.
    """
    if state.kind in files:
        cluster = files[state.kind]
        shape = len(cluster.nodes), max(node.num_devices for node in cluster.nodes)
        if (state.num_nodes, state.devices_per_node) != shape:
            raise PlaygroundError(
                f"{state.kind} describes {shape[0]} nodes of at most {shape[1]} devices, but {state.num_nodes} nodes "
                f"of {state.devices_per_node} were asked for. Choose a shipped kind of device to change the numbers."
            )
        return cluster
    if state.kind not in shipped_kinds():
        known = (*shipped_kinds(), *files)
        raise PlaygroundError(f"There is no kind of device {state.kind[:40]!r}{suggest(state.kind[:40], known)}.")
    if state.num_nodes * state.devices_per_node > MAX_DEVICES:
        raise PlaygroundError(
            f"{state.num_nodes} nodes of {state.devices_per_node} devices were asked for; the playground answers up to "
            f"{MAX_DEVICES} devices. Use `meshwright plan` and `simulate` for larger clusters."
        )
    return load_cluster(f"{state.num_nodes}x{state.devices_per_node}x{state.kind}")


def scenario_cluster(state: State, base: Cluster) -> Cluster:
    """The base cluster with what the scenario changes; raises PlaygroundError if the slow device is not there."""
    if state.slowdown != 1 and state.slow_rank >= base.num_ranks:
        raise PlaygroundError(
            f"Device {state.slow_rank} is to be slower, but the cluster has devices 0 to {base.num_ranks - 1}. "
            "Choose one of them."
        )
    kinds = {kind.name: _with_memory(kind, state.memory_gib) for kind in base.device_kinds}
    nodes = [_with_links(node, state) for node in base.nodes]
    if state.slowdown != 1:
        slow = _slow_kind(kinds[base.device_kind(state.slow_rank).name], state.slowdown)
        kinds[slow.name] = slow
        index = base.node_index(state.slow_rank)
        before = list(accumulate((node.num_devices for node in base.nodes), initial=0))[index]
        nodes[index] = _with_slow_device(nodes[index], state.slow_rank - before, slow.name)
    return Cluster(name=base.name, device_kinds=tuple(kinds.values()), nodes=tuple(nodes))


def state_of_cluster(reference: str) -> tuple[State, dict[str, Cluster]]:
    """The state on a cluster as a plan names it, and the clusters to offer beside the shipped kinds for that.

    Raises ClusterError for a reference that cannot be read.
    """
    cluster = load_cluster(reference)
    num_nodes, num_devices = len(cluster.nodes), max(node.num_devices for node in cluster.nodes)
    kind, offered = cluster.device_kinds[0].name, {}
    if kind not in shipped_kinds() or load_cluster(f"{num_nodes}x{num_devices}x{kind}").nodes != cluster.nodes:
        kind = reference
        offered[reference] = replace(cluster, name=reference)
    return State(kind=kind, num_nodes=num_nodes, devices_per_node=num_devices), offered


def describe_scenario(state: State) -> str:
    """What the scenario changes, in words; empty if nothing."""
    parts = []
    if state.slowdown != 1:
        parts.append(f"device {state.slow_rank} {_times(state.slowdown)}")
    if state.link_slowdown != 1:
        parts.append(f"links inside nodes {_times(state.link_slowdown)}")
    if state.nic_slowdown != 1:
        parts.append(f"links between nodes {_times(state.nic_slowdown)}")
    if state.num_nics:
        parts.append(f"{state.num_nics} NIC{'s' if state.num_nics > 1 else ''} per node")
    if state.memory_gib:
        parts.append(f"{state.memory_gib:g} GiB per device")
    return ", ".join(parts)


def _times(slowdown: float) -> str:
    return f"{slowdown:g}× slower" if slowdown > 1 else f"{1 / slowdown:.3g}× faster"


def _with_memory(kind: DeviceKind, memory_gib: float) -> DeviceKind:
    return replace(kind, memory_bytes=max(1, int(memory_gib * 2**30))) if memory_gib else kind


def _slow_kind(kind: DeviceKind, slowdown: float) -> DeviceKind:
    return replace(
        kind,
        name=f"{kind.name} {_times(slowdown)}",
        memory_bandwidth_bytes_per_s=kind.memory_bandwidth_bytes_per_s / slowdown,
        peak_flops_per_s={name: peak / slowdown for name, peak in kind.peak_flops_per_s.items()},
        source=f"{kind.source}; all rates divided by {slowdown:g} in the playground",
    )


def _slow_link(link: Link, slowdown: float) -> Link:
    return Link(latency_s=link.latency_s * slowdown, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / slowdown)


def _with_links(node: Node, state: State) -> Node:
    return replace(
        node,
        device_link=_slow_link(node.device_link, state.link_slowdown),
        nic=_slow_link(node.nic, state.nic_slowdown),
        num_nics=state.num_nics or node.num_nics,
    )


def _with_slow_device(node: Node, place: int, name: str) -> Node:
    """The node with the device at ``place`` of another kind; places of all others stay."""
    kinds = [group.kind for group in node.devices for _ in range(group.count)]
    kinds[place] = name
    groups = (DeviceGroup(kind=kind, count=len(list(members))) for kind, members in groupby(kinds))
    return replace(node, devices=tuple(groups))
