"""Unequal devices as classes of equal ones, and the groups of them that a stage may get.

A **class** is the devices of one kind in one node: they can be exchanged for each other. A **group** takes so many of
each class. Those that a stage may get are

- any number of devices of one class;
- of several classes that belong together (those of one node, those of one kind, and all), a whole fraction 1/f of each;
- two classes that are next to each other in speed, whole.

Nodes that differ in nothing but their names may be **merged**: their devices of one kind are then one class, which has
fewer states to go through; a group that fills more than one such node is estimated with the link between nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, prod

from meshwright.spec import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClass:
    """Devices that can be exchanged for each other: their kind by name, their ranks, and how many share a node."""

    kind: str
    ranks: tuple[int, ...]
    per_node: int

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.ranks)


def find_classes(cluster: Cluster, *, merged: bool = False) -> tuple[DeviceClass, ...]:
    """The classes of a cluster's devices, in the order of their first ranks."""
    columns = cluster.columns()
    nodes = columns.node_kind if merged else columns.node
    members: dict[tuple[int, int], list[int]] = {}
    for rank, key in enumerate(zip(nodes.tolist(), columns.kind.tolist(), strict=True)):
        members.setdefault(key, []).append(rank)
    return tuple(
        DeviceClass(
            kind=cluster.device_kind(ranks[0]).name,
            ranks=tuple(ranks),
            per_node=sum(columns.node[rank] == columns.node[ranks[0]] for rank in ranks),
        )
        for ranks in members.values()
    )


def count_states(classes: Sequence[DeviceClass]) -> int:
    """In how many ways devices can be left of the classes."""
    return prod(item.size + 1 for item in classes)


def find_groups(cluster: Cluster, classes: Sequence[DeviceClass], most: int) -> tuple[tuple[int, ...], ...]:
    """The groups of at most ``most`` devices that a stage may get, each as counts by class."""
    found: dict[tuple[int, ...], None] = {}
    for index, item in enumerate(classes):
        for count in range(1, item.size + 1):
            found[tuple(count * (k == index) for k in range(len(classes)))] = None
    for together in _belonging(cluster, classes):
        whole = gcd(*(classes[k].size for k in together))
        for parts in (f for f in range(1, whole + 1) if whole % f == 0):
            found[tuple(item.size // parts if k in together else 0 for k, item in enumerate(classes))] = None
    for pair in pairwise(sorted(range(len(classes)), key=lambda k: (_speed(cluster, classes[k]), k))):
        found[tuple(item.size if k in pair else 0 for k, item in enumerate(classes))] = None
    return tuple(group for group in found if sum(group) <= most)


def _speed(cluster: Cluster, item: DeviceClass) -> float:
    """By the datasheet, which is good enough to put classes in an order."""
    kind = cluster.device_kind(item.ranks[0])
    return max(kind.peak_flops_per_s.values()) / kind.slowdown


def _belonging(cluster: Cluster, classes: Sequence[DeviceClass]) -> Iterator[tuple[int, ...]]:
    """The classes of each node, of each kind, and all."""
    of_nodes = [cluster.node_index(item.ranks[0]) for item in classes]
    of_kinds = [item.kind for item in classes]
    for keys in (of_nodes, of_kinds):
        yield from _alike(keys)
    yield tuple(range(len(classes)))


def _alike(keys: Sequence[int] | Sequence[str]) -> Iterable[tuple[int, ...]]:
    return (tuple(k for k, item in enumerate(keys) if item == key) for key in dict.fromkeys(keys))
