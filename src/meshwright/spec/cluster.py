"""Cluster: its nodes, devices and links as frozen dataclasses; `load_cluster` also reads short forms (``2x8xH100``).

Each rank is one device: rank 0 is the first device of the first node, and so on, node by node. Two devices of a node
communicate over the node's ``device_link``; devices of different nodes over a NIC of each node. Shipped device kinds
and nodes are TOML files in ``spec/hardware/``, each figure with its source.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.spec.codec import decode_document
from meshwright.spec.errors import ClusterError, suggest
from meshwright.spec.offload import Nvme
from meshwright.spec.parsing import read_data

_SHORT_FORM = re.compile(r"(?:(\d+)x)?(?:(\d+)x)?([A-Za-z][\w.-]*)")
MAX_RANKS = 1_000_000
# A larger time to issue one op is a slip: such a host is busy with something else.
MAX_HOST_CALL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection. In each direction, a message takes ``latency_s + bytes / bandwidth_bytes_per_s`` seconds."""

    latency_s: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and self.bandwidth_bytes_per_s > 0):
            raise ClusterError(
                f"A link with latency {self.latency_s} s and bandwidth {self.bandwidth_bytes_per_s} B/s is impossible; "
                "latency must not be negative and bandwidth must be positive."
            )

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds that one message of ``num_bytes`` takes."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """A kind of device, such as A100: the figures of its datasheet.

    ``peak_flops_per_s`` maps a dtype name to dense (not sparse) operations per second. For a GPU, multiprocessors, L2
    cache, boost clock and CUDA compute capability are used to predict kernels in tiles and waves; 0 means unknown.
    A kind with a ``slowdown`` is a slower version of the kind named ``usual``: every computation takes ``slowdown``
    times as long. All other figures, and measurements, are those of the kind ``usual``.
    """

    name: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    peak_flops_per_s: dict[str, float]
    source: str
    num_multiprocessors: int = 0
    cache_bytes: int = 0
    clock_hz: float = 0.0
    compute_capability: float = 0.0
    slowdown: float = 1.0
    usual: str = ""

    def __post_init__(self) -> None:
        numbers = (self.memory_bytes, self.memory_bandwidth_bytes_per_s, *self.peak_flops_per_s.values())
        if not self.peak_flops_per_s or not all(number > 0 for number in numbers):
            raise ClusterError(
                f"Device kind {self.name!r}: memory_bytes, memory_bandwidth_bytes_per_s and all rates in "
                "peak_flops_per_s (at least one) must be positive."
            )
        if not min(self.num_multiprocessors, self.cache_bytes, self.clock_hz, self.compute_capability) >= 0:
            raise ClusterError(
                f"Device kind {self.name!r}: multiprocessors, cache, clock and compute capability must not be "
                "negative; leave out what is not known."
            )
        if not 0 < self.slowdown < math.inf or (self.slowdown != 1 and not self.usual):
            raise ClusterError(
                f"Device kind {self.name!r} has slowdown {self.slowdown} and usual {self.usual!r}; expected a positive "
                "slowdown and, unless it is 1, the name of the device kind without the slowdown as usual."
            )

    @property
    def usual_name(self) -> str:
        """Name of the device kind without the slowdown: ``usual``, or ``name`` if there is no slowdown."""
        return self.usual or self.name

    def at_usual_speed(self) -> DeviceKind:
        """Return the device kind without the slowdown; costs of this kind are estimated from that one."""
        return self if not self.usual else replace(self, name=self.usual, slowdown=1.0, usual="")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """``count`` devices of one kind in a node."""

    kind: str
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ClusterError(
                f"A node has a group of {self.count} devices of kind {self.kind!r}; expected at least one device."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A host: its devices, memory and cores, and its links.

    ``device_link`` connects two devices of the node, ``pcie`` a device with the host, and ``nic`` the node with other
    nodes (one of ``num_nics`` equal NICs). The host memory bandwidth is the sum of all channels, reads and writes
    together; ``host_call_s`` are the seconds that the host takes to issue the addition of two small tensors to a
    device. For both, 0 means unknown.
    """

    name: str
    devices: tuple[DeviceGroup, ...]
    host_memory_bytes: int
    num_cores: int
    device_link: Link
    pcie: Link
    nic: Link
    num_nics: int = 1
    host_memory_bandwidth_bytes_per_s: float = 0.0
    host_call_s: float = 0.0
    nvme: Nvme | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.num_nics <= MAX_RANKS:
            raise ClusterError(f"Node {self.name!r} has {self.num_nics} NICs; expected 1 to {MAX_RANKS}.")
        if not self.host_memory_bandwidth_bytes_per_s >= 0:
            raise ClusterError(
                f"Node {self.name!r} has host_memory_bandwidth_bytes_per_s = "
                f"{self.host_memory_bandwidth_bytes_per_s}; expected a positive number. Leave it out if it is unknown."
            )
        if not 0 <= self.host_call_s <= MAX_HOST_CALL_S:
            raise ClusterError(
                f"Node {self.name!r} has host_call_s = {self.host_call_s}, the seconds in which the host issues one "
                f"op; expected more than 0 and at most {MAX_HOST_CALL_S}, as 6.5e-6. Leave it out if it is unknown."
            )

    @property
    def num_devices(self) -> int:
        """Number of devices in this node."""
        return sum(group.count for group in self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Racks:
    """Racks of ``nodes_per_rack`` consecutive nodes each; every rack has ``num_uplinks`` links to the other racks.

    A message between racks occupies one uplink of the sending rack and one of the receiving rack. The NICs of a rack
    share its uplinks: of n NICs, NIC i uses uplink floor(i u / n), where u is ``num_uplinks``.
    """

    nodes_per_rack: int
    num_uplinks: int
    uplink: Link

    def __post_init__(self) -> None:
        if not (1 <= self.nodes_per_rack <= MAX_RANKS and 1 <= self.num_uplinks <= MAX_RANKS):
            raise ClusterError(
                f"The cluster's racks have {self.nodes_per_rack} nodes and {self.num_uplinks} uplinks; expected 1 to "
                f"{MAX_RANKS} of each (nodes_per_rack, num_uplinks)."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePath:
    """A link between two nodes (their indices), through which their messages pass in addition to both NICs.

    A message gets the largest latency and the smallest bandwidth of the two NICs and this link.
    """

    nodes: tuple[int, int]
    link: Link


class DeviceColumns(NamedTuple):
    """Arrays about all devices of a cluster, each of shape (num_ranks,).

    ``node`` is the index of the device's node, ``nic`` the index of its NIC in that node: in a node of d devices with k
    NICs, device i uses NIC floor(i k / d). ``node_kind`` is equal for nodes that differ only in name and source.
    ``kind`` is an index into the cluster's ``device_kinds``.
    """

    node: NDArray[np.int64]
    node_kind: NDArray[np.int64]
    kind: NDArray[np.int64]
    nic: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes, and the device kinds that they name.

    A message between two nodes passes through their NICs and, if the cluster has ``racks`` or ``paths``, through these.
    Raises ClusterError if a device kind is missing or the cluster has no device.
    """

    name: str
    device_kinds: tuple[DeviceKind, ...]
    nodes: tuple[Node, ...]
    racks: Racks | None = None
    paths: tuple[NodePath, ...] = ()

    _places: tuple[tuple[int, DeviceKind], ...] = field(init=False, repr=False, compare=False)
    _columns: list[DeviceColumns] = field(init=False, repr=False, compare=False, default_factory=list)

    SCHEMA_VERSION: ClassVar[int] = 1

    def __post_init__(self) -> None:
        known = {kind.name: kind for kind in self.device_kinds}
        for node in self.nodes:
            for group in node.devices:
                if group.kind not in known:
                    raise ClusterError(
                        f"Node {node.name!r} has devices of kind {group.kind!r}, which the cluster does not describe"
                        f"{suggest(group.kind, known)}."
                    )
        num_ranks = sum(node.num_devices for node in self.nodes)
        if not 1 <= num_ranks <= MAX_RANKS:
            raise ClusterError(f"Cluster {self.name!r} has {num_ranks} devices; expected 1 to {MAX_RANKS}.")
        for path in self.paths:
            if path.nodes[0] == path.nodes[1] or not all(0 <= index < len(self.nodes) for index in path.nodes):
                raise ClusterError(
                    f"The cluster has a path between nodes {path.nodes[0]} and {path.nodes[1]}; expected two different "
                    f"nodes, numbered 0 to {len(self.nodes) - 1}."
                )
        places = (
            (index, known[group.kind])
            for index, node in enumerate(self.nodes)
            for group in node.devices
            for _ in range(group.count)
        )
        object.__setattr__(self, "_places", tuple(places))

    @property
    def num_ranks(self) -> int:
        """Number of devices in the whole cluster; each device is one rank."""
        return len(self._places)

    def node_index(self, rank: int) -> int:
        """Return the index of the node that holds the device of ``rank``."""
        return self._places[rank][0]

    def device_kind(self, rank: int) -> DeviceKind:
        """Return the kind of the device of ``rank``."""
        return self._places[rank][1]

    def columns(self) -> DeviceColumns:
        """Return arrays about all devices; they are computed by the first call."""
        if not self._columns:
            self._columns.append(_device_columns(self))
        return self._columns[0]

    def without(self, devices: Collection[int]) -> Cluster:
        """Return the cluster without ``devices`` (ranks); the remaining devices are numbered from 0.

        Nodes keep their indices, even if they lose all devices. Raises ClusterError if no device is left.
        """
        nodes, rank, gone = list[Node](), 0, frozenset(devices)
        for node in self.nodes:
            kept = [self.device_kind(each).name for each in range(rank, rank + node.num_devices) if each not in gone]
            groups = tuple(DeviceGroup(kind=name, count=len(list(same))) for name, same in groupby(kept))
            nodes.append(replace(node, devices=groups))
            rank += node.num_devices
        used = {group.kind for node in nodes for group in node.devices}
        kinds = tuple(kind for kind in self.device_kinds if kind.name in used)
        return replace(self, nodes=tuple(nodes), device_kinds=kinds)

    def link_between(self, first: int, second: int) -> Link:
        """Return the link for messages between two ranks.

        Within a node it is the ``device_link``. Between nodes it combines NICs, paths and uplinks: the smallest
        bandwidth of all, and the largest latency of NICs and paths plus that of the uplinks.
        """
        nodes = self.node_index(first), self.node_index(second)
        if nodes[0] == nodes[1]:
            return self.nodes[nodes[0]].device_link
        nics = [self.nodes[index].nic for index in nodes]
        between = [path.link for path in self.paths_among(nodes)]
        uplinks = [self.racks.uplink] if self.racks is not None and len({*map(self.rack_of, nodes)}) > 1 else []
        return Link(
            latency_s=max(link.latency_s for link in (*nics, *between)) + sum(link.latency_s for link in uplinks),
            bandwidth_bytes_per_s=min(link.bandwidth_bytes_per_s for link in (*nics, *between, *uplinks)),
        )

    def rack_of(self, node: int) -> int:
        """Return the index of a node's rack; 0 in a cluster without racks."""
        return 0 if self.racks is None else node // self.racks.nodes_per_rack

    def paths_among(self, nodes: Collection[int]) -> tuple[NodePath, ...]:
        """Return the paths whose two ends are both among ``nodes`` (indices)."""
        return tuple(path for path in self.paths if path.nodes[0] in nodes and path.nodes[1] in nodes)


def _device_columns(cluster: Cluster) -> DeviceColumns:
    counts = np.array([node.num_devices for node in cluster.nodes])
    node = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(node)) - np.repeat(np.cumsum(counts) - counts, counts)
    num_nics = np.array([item.num_nics for item in cluster.nodes])
    kinds: dict[Node, int] = {}
    node_kind = np.array([kinds.setdefault(replace(item, name="", source=""), len(kinds)) for item in cluster.nodes])
    known = {kind.name: index for index, kind in enumerate(cluster.device_kinds)}
    kind = [known[group.kind] for item in cluster.nodes for group in item.devices for _ in range(group.count)]
    nic = place * num_nics[node] // counts[node]
    return DeviceColumns(node=node, node_kind=node_kind[node], kind=np.array(kind, np.int64), nic=nic)


def load_cluster(reference: str | Path) -> Cluster:
    """Read a cluster: a TOML or JSON file, or a short form of shipped nodes.

    ``H100`` is one device, ``4xA100`` a node of four, ``2x8xH100`` two nodes of eight. Raises ClusterError for an
    unknown form or kind, DocumentError for a file that cannot be read.
    """
    path = Path(reference)
    if path.suffix in (".toml", ".json"):
        return decode_document(Cluster, read_data(path), str(path))
    match = _SHORT_FORM.fullmatch(str(reference))
    if match is None:
        joined = re.fullmatch(r"((?:\d+x)?\d+)([A-Za-z][\w.-]*)", str(reference))
        if joined is not None and joined[2].lower() in map(str.lower, shipped_kinds()):
            raise ClusterError(f"{str(reference)!r} is not a cluster (did you mean '{joined[1]}x{joined[2]}'?).")
        raise ClusterError(
            f"{str(reference)!r} is not a cluster. Give a .toml file or a short form: H100, 4xA100, 2x8xH100 "
            f"(nodes x devices x kind); shipped kinds are {', '.join(shipped_kinds())}."
        )
    first, second, kind = match.groups()
    counts = [int(count) for count in (first, second) if count is not None]
    num_devices = counts[-1] if counts else 1
    num_nodes = counts[0] if len(counts) == 2 else 1
    if not (num_nodes >= 1 and 1 <= num_devices <= MAX_RANKS and num_nodes * num_devices <= MAX_RANKS):
        raise ClusterError(
            f"Cluster {str(reference)!r} has {num_nodes * num_devices} devices; expected 1 to {MAX_RANKS}."
        )
    shipped = _shipped_node(kind)
    node = replace(shipped.nodes[0], devices=(DeviceGroup(kind=shipped.device_kinds[0].name, count=num_devices),))
    return Cluster(
        name=str(reference),
        device_kinds=shipped.device_kinds,
        nodes=tuple(replace(node, name=f"node{i}") for i in range(num_nodes)),
    )


@cache
def shipped_kinds() -> tuple[str, ...]:
    """Return the names of the device kinds that ship with Meshwright, sorted."""
    folder = resources.files("meshwright.spec") / "hardware"
    return tuple(sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml")))


def _shipped_node(kind: str) -> Cluster:
    names = {name.lower(): name for name in shipped_kinds()}
    written = kind.lower().replace("-", "")  # RTX-4090 is RTX4090
    if written not in names:
        raise ClusterError(
            f"No device kind {kind!r} is shipped{suggest(kind, names.values())}. "
            "Describe other hardware in a .toml file."
        )
    return _read_shipped(f"{names[written]}.toml")


@cache  # `validate --steps` calls it 7,000 times
def _read_shipped(file: str) -> Cluster:
    source = resources.files("meshwright.spec") / "hardware" / file
    with resources.as_file(source) as path:
        return decode_document(Cluster, read_data(path), path.name)
