"""Layouts (`Layout`): which ranks a stage gets, and their links, kinds and memory; the even cut (`slice_evenly`).

A layout gives the ranks of a stage with ``take`` replicas, if the stages before it have ``before`` ranks in total:

- **stage-major**: consecutive ranks. The replicas of a stage share a node as far as they fit, so gradients are reduced
  over fast links; neighbouring stages meet at node boundaries.

- **replica-major** (equal replicas only): stage s has ranks s, s + S, s + 2S, ... One pipeline's S stages share a node
  as far as they fit, so activations stay on fast links and gradients are reduced between nodes.

- **reversed**: stage-major with the ranks counted from the last. It matters if devices differ: the first stage of 1F1B
  holds the most activations, so it may need the largest devices, wherever they are.

A group of ranks is estimated by its slowest kind, its smallest memory, and the slowest link into the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.cost import CostModel
from meshwright.cost.memory import MemoryLimit
from meshwright.spec import Cluster, StagePlan


# Greedy slices of at most θ are the fewest possible. If they are few enough, their largest sum is also a valid θ; if
# not, θ must reach at least the smallest sum that was refused. So the range of θ is bisected with ends that are sums
# that occur. It closes after a few steps, exact to the last bit of a sum.
def slice_evenly(seconds: Sequence[float], num_slices: int) -> tuple[tuple[int, int], ...]:
    """Cut a list of seconds into non-empty slices such that the largest sum is as small as possible.

    Return (first, end) of each slice. ``num_slices`` must be at most len(``seconds``).
    """
    edges = np.empty(num_slices + 1, np.int64)
    even_edges(np.array(seconds, np.float64), num_slices, edges)
    return tuple(pairwise(edges.tolist()))


@compiled
def even_edges(seconds: NDArray[np.float64], num_slices: int, edges: NDArray[np.int64]) -> None:
    """Compute `slice_evenly` in compiled code: write the edges of the slices into ``edges``, shape (slices + 1,).

    Slice s is ``edges[s]:edges[s + 1]``.
    """
    low, high = seconds.max(), seconds.sum()
    while low < high:
        middle = low + (high - low) / 2
        # Between neighbouring floats the middle may be rounded up to the high end.
        count, largest, refused = _try(seconds, middle if middle < high else low)
        if count > num_slices:
            low = refused
        else:
            high = largest
    _fill(seconds, high, num_slices, edges)


@compiled
def _try(seconds: NDArray[np.float64], most: float) -> tuple[int, float, float]:
    """Cut greedily into slices of at most ``most``: their number, the largest sum, and the smallest refused sum."""
    count, total, largest, refused = 1, 0.0, 0.0, np.inf
    for index in range(len(seconds)):
        if index and total + seconds[index] > most:
            refused = min(refused, total + seconds[index])
            count += 1
            total = 0.0
        total += seconds[index]
        largest = max(largest, total)
    return count, largest, refused


@compiled
def _fill(seconds: NDArray[np.float64], most: float, num_slices: int, edges: NDArray[np.int64]) -> None:
    """Fill greedily; slices left over then split the first slices that have several members."""
    edges[0] = 0
    made, total = 0, 0.0
    for index in range(len(seconds)):
        if index and total + seconds[index] > most:
            made += 1
            edges[made] = index
            total = 0.0
        total += seconds[index]
    made += 1
    edges[made] = len(seconds)
    place = 0
    while made < num_slices:
        if edges[place + 1] - edges[place] > 1:
            for other in range(made, place, -1):
                edges[other + 1] = edges[other]
            edges[place + 1] = edges[place] + 1
            made += 1
        place += 1


LayoutName = Literal["stage-major", "replica-major", "reversed"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A rule that assigns ``num_ranks`` ranks to stages; only replica-major needs ``num_stages``."""

    name: LayoutName
    num_ranks: int
    num_stages: int = 0

    def ranks(self, before: int, take: int) -> tuple[int, ...]:
        """Return the ranks of the stage with ``before`` ranks before it and ``take`` replicas."""
        match self.name:
            case "stage-major":
                return tuple(range(before, before + take))
            case "replica-major":
                return tuple(range(before // take, self.num_ranks, self.num_stages))
            case "reversed":
                return tuple(range(self.num_ranks - 1 - before, self.num_ranks - 1 - before - take, -1))

    def stages(self, bounds: Sequence[tuple[int, int]], replicas: Sequence[int]) -> tuple[StagePlan, ...]:
        """Return the stages on their ranks, given the (first, end) layers and the number of replicas of each."""
        places = accumulate((0, *replicas[:-1]))
        return tuple(
            StagePlan(start=start, stop=stop, ranks=self.ranks(before, take))
            for (start, stop), take, before in zip(bounds, replicas, places, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Places:
    """Properties of the groups of ranks that stages can get; arrays have shape (D, D + 1), entry [before, take].

    ``kind_of``: index in ``kind_sets`` (sets of device-kind names). ``link_of``: index in ``links`` of the link into
    the group; ``links`` has a pair of ranks for each link, entry 0 means no link. ``memory_limit``: bytes.
    ``latency_s`` and ``bucket_s``: seconds to all-reduce one byte and one bucket; ``shared_s``: one bucket among the
    replicas that shard states.
    """

    kind_sets: tuple[tuple[str, ...], ...]
    links: tuple[tuple[int, int], ...]
    kind_of: Integers
    link_of: Integers
    memory_limit: Floats
    latency_s: Floats
    bucket_s: Floats
    shared_s: Floats


def find_places(
    layout: Layout,
    cluster: Cluster,
    cost: CostModel,
    *,
    replicas: tuple[int, ...],
    bucket_bytes: int,
    memory: MemoryLimit,
    shard_size: int = 0,
) -> Places:
    """Return the properties of every group of ranks that a stage with one of these numbers of replicas can get.

    ``shard_size`` replicas shard states among each other (0: all replicas of a stage).
    """
    size = layout.num_ranks
    kind_of, link_of = np.zeros((size, size + 1), np.int64), np.zeros((size, size + 1), np.int64)
    memory_limit = np.zeros((size, size + 1))
    latency_s, bucket_s, shared_s = (np.zeros((size, size + 1)) for _ in range(3))
    groups = _Groups(cluster, cost, bucket_bytes, memory)
    for take in replicas:
        # If all stages have the same number of replicas, they start at its multiples.
        for before in range(0, size - take + 1, take if len(replicas) == 1 else 1):
            ranks = layout.ranks(before, take)
            entry = before, take
            kind_of[entry], memory_limit[entry] = groups.kind(ranks)
            if before:
                previous = (
                    layout.ranks(before - take, take) if layout.name == "replica-major" else layout.ranks(before - 1, 1)
                )
                link_of[entry] = groups.link(previous, ranks)
            latency_s[entry], bucket_s[entry] = groups.exchange(ranks)
            shared_s[entry] = groups.exchange(ranks[:shard_size])[1] if shard_size else bucket_s[entry]
    return Places(
        kind_sets=tuple(groups.kind_sets),
        links=tuple(groups.links),
        kind_of=kind_of,
        link_of=link_of,
        memory_limit=memory_limit,
        latency_s=latency_s,
        bucket_s=bucket_s,
        shared_s=shared_s,
    )


def memory_limit(cluster: Cluster, rank: int, memory: MemoryLimit) -> int:
    """Return the bytes that the allocator of a rank may reserve."""
    return memory.usable_bytes(cluster.device_kind(rank))


class _Groups:
    """Properties of groups of ranks, computed once per distinct kind of group."""

    def __init__(self, cluster: Cluster, cost: CostModel, bucket_bytes: int, memory: MemoryLimit) -> None:
        self._cluster = cluster
        self._cost = cost
        self._bucket_bytes = bucket_bytes
        self._kinds = [cluster.device_kind(rank) for rank in range(cluster.num_ranks)]
        self._nodes = [cluster.node_index(rank) for rank in range(cluster.num_ranks)]
        self._limits = [memory_limit(cluster, rank, memory) for rank in range(cluster.num_ranks)]
        # Nodes that differ only in their names are one kind of node.
        described = [(node.devices, node.device_link, node.nic, node.num_nics) for node in cluster.nodes]
        between = cluster.racks is not None or bool(cluster.paths)
        self._uniform = len(set(described)) == 1 and len(cluster.nodes[0].devices) == 1 and not between
        self.kind_sets: list[tuple[str, ...]] = []
        self.links: list[tuple[int, int]] = [(0, 0)]
        self._exchange: dict[object, tuple[float, float]] = {}
        self._link: dict[object, int] = {}

    def kind(self, ranks: tuple[int, ...]) -> tuple[int, float]:
        """Return the index of the group's set of device kinds, and its smallest memory limit in bytes."""
        some = ranks[:1] if self._uniform else ranks
        names = tuple(sorted({self._kinds[rank].name for rank in some}))
        if names not in self.kind_sets:
            self.kind_sets.append(names)
        return self.kind_sets.index(names), float(min(self._limits[rank] for rank in some))

    def link(self, previous: tuple[int, ...], ranks: tuple[int, ...]) -> int:
        """Return the index of the slowest link from the ranks of the stage before into the group."""
        if len(previous) == 1:
            # The farthest rank of consecutive ones is the last.
            pairs = [(previous[0], ranks[0]), (previous[0], ranks[-1])]
        else:
            pairs = list(zip(previous, ranks, strict=True))
        slowest = max(pairs, key=lambda pair: self._cluster.link_between(*pair).seconds(self._bucket_bytes))
        key = self._cluster.link_between(*slowest), self._nodes[slowest[0]] == self._nodes[slowest[1]]
        if key not in self._link:
            self._link[key] = len(self.links)
            self.links.append(slowest)
        return self._link[key]

    def exchange(self, ranks: tuple[int, ...]) -> tuple[float, float]:
        """Return the seconds in which the group all-reduces one byte, and one bucket."""
        if len(ranks) == 1:
            return 0.0, 0.0
        # On equal nodes and devices, only the number of ranks matters, and whether they span nodes.
        key = (len(ranks), len({self._nodes[rank] for rank in ranks}) > 1) if self._uniform else ranks
        if key not in self._exchange:
            ring = tuple(sorted(ranks))
            self._exchange[key] = (
                self._cost.collective_seconds("all_reduce", ring, 1),
                self._cost.collective_seconds("all_reduce", ring, self._bucket_bytes),
            )
        return self._exchange[key]
