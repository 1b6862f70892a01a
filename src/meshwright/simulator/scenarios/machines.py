"""Apply the effects of a scenario that change machines to a cluster, in their order.

    slow-device         changes the speed of devices (`DeviceKind.slowdown`)
    other-device        replaces the kind of devices
    device-memory       changes the memory of devices
    slow-link           changes links of nodes, paths between two nodes, or uplinks of racks
    network-cards       changes the number of NICs per node
    oversubscription    adds racks with uplinks

Measurements hold for the usual links and speeds. So in addition to the changed cluster there is the **usual** cluster,
with the same devices at their usual speed on the usual links. The cost model estimates for the usual cluster and scales
the estimates (`CostModel.usual_links`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from meshwright.cost import CostModel
from meshwright.spec import (
    Cluster,
    DeviceGroup,
    DeviceKind,
    Link,
    Node,
    ScenarioError,
    format_bytes,
    load_cluster,
    shipped_kinds,
    suggest,
)
from meshwright.spec.cluster import NodePath, Racks
from meshwright.spec.scenario import (
    DeviceMemory,
    Effect,
    NetworkCards,
    OtherDevice,
    Oversubscription,
    Scenario,
    SlowDevice,
    SlowLink,
    is_active,
)
from meshwright.spec.selectors import Devices, Way


def apply_scenario(cost: CostModel, scenario: Scenario, at_s: float = 0.0) -> CostModel:
    """Return the cost model of the cluster with the scenario's effects, ``at_s`` seconds after the start of a run.

    Returns ``cost`` itself if nothing changes. Raises ScenarioError if an effect names devices or links that the
    cluster lacks.
    """
    changed, usual = change_machines(cost.cluster, scenario, at_s)
    if changed == cost.cluster:
        return cost
    return cost.on_machines(changed, usual)


def change_machines(cluster: Cluster, scenario: Scenario, at_s: float = 0.0) -> tuple[Cluster, Cluster]:
    """Return the cluster with the scenario's effects, and the same devices at their usual speed on the usual links.

    ``at_s``: seconds since the start of a run, for effects that begin or end. Raises as `apply_scenario`.
    """
    machines = _Machines(cluster=cluster, scenario=scenario)
    for place, effect in enumerate(scenario.effects):
        machines.apply(effect, place, at_s)
    return machines.changed(), machines.usual()


@dataclass(slots=True, kw_only=True)
class _Machines:
    """A cluster while effects are applied, with the kind, slowdown and memory of each rank's device."""

    cluster: Cluster
    scenario: Scenario
    kinds: list[DeviceKind] = field(init=False)
    slowdowns: list[float] = field(init=False)
    memory_bytes: list[int] = field(init=False)
    now: Cluster = field(init=False)

    def __post_init__(self) -> None:
        kinds = [self.cluster.device_kind(rank) for rank in range(self.cluster.num_ranks)]
        self.kinds = [kind.at_usual_speed() for kind in kinds]
        self.slowdowns = [kind.slowdown for kind in kinds]
        self.memory_bytes = [kind.memory_bytes for kind in kinds]
        self.now = self.cluster

    def changed(self) -> Cluster:
        """Return the cluster with all effects applied."""
        rows = zip(self.kinds, self.slowdowns, self.memory_bytes, strict=True)
        return _with_kinds(self.now, [_changed_kind(*row) for row in rows])

    def usual(self) -> Cluster:
        """Return the devices at their usual speed on the usual links."""
        return _with_kinds(self.cluster, self.kinds)

    def apply(self, effect: Effect, place: int, at_s: float) -> None:
        """Apply the scenario's effect number ``place``; effects that do not change machines are ignored."""
        match effect:
            case SlowDevice():
                for rank in self._select(effect.devices, place):
                    self.slowdowns[rank] *= effect.factor if is_active(effect, at_s) else 1.0
            case OtherDevice():
                with self.scenario.naming(place, "device"):
                    other = _shipped_kind(effect.device)
                for rank in self._select(effect.devices, place):
                    self.kinds[rank], self.memory_bytes[rank] = other, other.memory_bytes
            case DeviceMemory():
                for rank in self._select(effect.devices, place):
                    self.memory_bytes[rank] = int(effect.memory)
            case SlowLink():
                with self.scenario.naming(place, "links"):
                    changed = _with_links(self.now, effect)
                self.now = changed if is_active(effect, at_s) else self.now
            case NetworkCards():
                nodes = tuple(replace(node, num_nics=effect.num_nics) for node in self.now.nodes)
                self.now = replace(self.now, nodes=nodes)
            case Oversubscription():
                with self.scenario.naming(place, "nodes_per_rack"):
                    self.now = replace(self.now, racks=_racks(self.now, effect))
            case _:
                return

    def _select(self, devices: Devices, place: int) -> tuple[int, ...]:
        with self.scenario.naming(place, "devices"):
            return devices.select(self.usual(), (self.scenario.seed or 0, place))


def _changed_kind(kind: DeviceKind, slowdown: float, memory_bytes: int) -> DeviceKind:
    """Return the kind with another speed or memory and a name that says so; the kind itself if nothing differs."""
    words = ""
    if slowdown != 1:
        words += f" {slowdown:.12g}x slower" if slowdown > 1 else f" {1 / slowdown:.12g}x faster"
    if memory_bytes != kind.memory_bytes:
        words += f" with {format_bytes(memory_bytes)}"
    if not words:
        return kind
    return replace(kind, name=kind.name + words, slowdown=slowdown, usual=kind.name, memory_bytes=memory_bytes)


def _shipped_kind(name: str) -> DeviceKind:
    if name not in shipped_kinds():
        raise ScenarioError(
            f"no device kind {name!r} is shipped{suggest(name, shipped_kinds())}. Choose a shipped device kind, or "
            "describe the cluster in a .toml file."
        )
    return load_cluster(name).device_kinds[0]


def _slow(link: Link, effect: SlowLink) -> Link:
    bandwidth = effect.bandwidth or link.bandwidth_bytes_per_s
    latency = link.latency_s if effect.latency is None else effect.latency
    factor = 1.0 if effect.factor is None else effect.factor
    return Link(latency_s=float(latency * factor), bandwidth_bytes_per_s=float(bandwidth / factor))


def _with_links(cluster: Cluster, effect: SlowLink) -> Cluster:
    way, chosen = effect.links.select(cluster)
    if way == "racks":
        assert cluster.racks is not None
        return replace(cluster, racks=replace(cluster.racks, uplink=_slow(cluster.racks.uplink, effect)))
    if way == "path":
        first, second = chosen
        pair = min(chosen), max(chosen)
        ranks = [
            next(r for r in range(cluster.num_ranks) if cluster.node_index(r) == index) for index in (first, second)
        ]
        link = _slow(cluster.link_between(*ranks), effect)
        others = tuple(path for path in cluster.paths if path.nodes != pair)
        return replace(cluster, paths=(*others, NodePath(nodes=pair, link=link)))
    nodes = [_slow_node(node, way, effect) if index in chosen else node for index, node in enumerate(cluster.nodes)]
    return replace(cluster, nodes=tuple(nodes))


def _slow_node(node: Node, way: Way, effect: SlowLink) -> Node:
    if way == "inside":
        return replace(node, device_link=_slow(node.device_link, effect))
    if way == "between":
        return replace(node, nic=_slow(node.nic, effect))
    return replace(node, pcie=_slow(node.pcie, effect))


def _racks(cluster: Cluster, effect: Oversubscription) -> Racks:
    """Return racks whose number of uplinks is that of their NICs divided by the ratio, rounded down.

    Together the uplinks have the bandwidth of the NICs divided by the ratio exactly.
    """
    if effect.nodes_per_rack >= len(cluster.nodes):
        raise ScenarioError(
            f"racks of {effect.nodes_per_rack} nodes were given, but cluster {cluster.name!r} has only "
            f"{len(cluster.nodes)} nodes, so there is only one rack. Give smaller racks or a larger cluster."
        )
    nodes = cluster.nodes[: effect.nodes_per_rack]
    num_nics = sum(node.num_nics for node in nodes)
    bandwidth = sum(node.num_nics * node.nic.bandwidth_bytes_per_s for node in nodes) / effect.ratio
    num_uplinks = max(1, int(num_nics / effect.ratio))
    uplink = Link(latency_s=float(effect.latency), bandwidth_bytes_per_s=bandwidth / num_uplinks)
    return Racks(nodes_per_rack=effect.nodes_per_rack, num_uplinks=num_uplinks, uplink=uplink)


def _with_kinds(cluster: Cluster, kinds: Sequence[DeviceKind]) -> Cluster:
    """Return the cluster with a kind for each rank; the cluster itself if none differs."""
    if all(kind == cluster.device_kind(rank) for rank, kind in enumerate(kinds)):
        return cluster
    nodes, rank = list[Node](), 0
    for node in cluster.nodes:
        names = [kind.name for kind in kinds[rank : rank + node.num_devices]]
        groups = tuple(DeviceGroup(kind=name, count=len(list(same))) for name, same in groupby(names))
        nodes.append(replace(node, devices=groups))
        rank += node.num_devices
    return replace(cluster, nodes=tuple(nodes), device_kinds=tuple({kind.name: kind for kind in kinds}.values()))
