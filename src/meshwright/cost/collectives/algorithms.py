"""Collectives: traffic and steps of algorithms, best rings and trees on a graph of links, and topologies of nodes.

`port_share` gives the bytes through the busiest port for each byte of the full tensor. `count_steps` gives the number
of steps of a ring. The full tensor is the input of an all-reduce, the output of an all-gather, the input of a
reduce-scatter, and the tensors of all ranks of an all-to-all together. In the table, n ranks run on N nodes with
r = n/N ranks each, G groups share each NIC, and L rings or trees run at once over the links of a node (L = 1 if each
device has one port to a switch):

                    inside a node                        through a NIC                    steps
    all-reduce      ring  2(n-1)/(n·L)                   ring  G·2(n-1)/n                 2(n-1)
                    tree  1 for n = 2, else 2; or 1/L    tree  G·1 for N = 2, else G·2    2(r-1) + 2·log₂ N
    all-gather      (n-1)/(n·L)                          G·(n-1)/n                        n-1
    reduce-scatter  (n-1)/(n·L)                          G·(n-1)/n                        n-1
    all-to-all      (n-1)/n²                             G·r(n-r)/n²                      n-1
    broadcast       1/L                                  G                                n-1
    send            1                                    G                                1

The tree inside a node is a chain. A device between two others sends the sums up and the result down, both through its
one port to a switch. With links between pairs of devices, sums and results use opposite directions of different links:
1/L. A ring enters and leaves each node once, for every r. On two nodes, each of NCCL's two trees carries half of the
tensor. On three or more nodes, some node sends to two children and to its parent. `parameter_server_seconds` is the
closed form of BytePS for n machines with k spare ones; its limits are the ring (k = 0) and M/B (k = n), for M bytes
and the bandwidth B.

Sources: Patarasu and Yuan, JPDC 69 (2009); Sanders, Speck, Träff, Parallel Computing 35 (2009), two trees; NCCL
src/graph/tuning.cc and trees.cc; Jiang et al., OSDI 2020 (BytePS), 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from itertools import product
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import numpy as np

from meshwright.cost.collectives.collective_groups import CollectiveGroup
from meshwright.spec import Cluster, ClusterError, MeasurementError, decode_document, suggest
from meshwright.spec.parsing import read_data

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray

    from meshwright.cost.costs import Floats


MAX_EXACT = 12


def link_matrix(cluster: Cluster, ranks: Sequence[int]) -> Floats:
    """Return the bandwidth (bytes/s) between all pairs of ranks, shape (ranks, ranks), with 0 on the diagonal."""
    places = np.array([cluster.node_index(rank) for rank in ranks])
    inside = np.array([node.device_link.bandwidth_bytes_per_s for node in cluster.nodes])[places]
    out = np.array([node.nic.bandwidth_bytes_per_s for node in cluster.nodes])[places]
    links: Floats = np.where(
        places[:, None] == places[None, :], inside[:, None], np.minimum(out[:, None], out[None, :])
    )
    if cluster.racks is not None or cluster.paths:
        for (i, here), (j, there) in product(enumerate(ranks), repeat=2):
            links[i, j] = cluster.link_between(here, there).bandwidth_bytes_per_s
    np.fill_diagonal(links, 0.0)
    return links


# A ring is a Hamiltonian cycle. The best one is exact up to `MAX_EXACT` ranks: by bisection over the smallest
# bandwidth, where Held and Karp's sets decide whether a cycle exists. With more ranks, or among equally fast rings, the
# clusters of the maximum spanning tree are joined, which visits each host once.
def best_ring(links: Floats) -> tuple[int, ...]:
    """Return the order of the ranks, starting with rank 0, whose ring has the fastest slowest link.

    ``links``: bandwidths between all pairs, shape (n, n), 0 without a link. Raises ClusterError for a matrix that is
    not square, not symmetric, or has negative bandwidths.
    """
    _check(links)
    count = len(links)
    if count <= 3:
        return tuple(range(count))
    joined = _ring_by_clusters(links)
    if count > MAX_EXACT:
        return joined
    speeds = np.unique(links[np.triu_indices(count, 1)])
    low, high = 0, len(speeds) - 1
    found = joined
    while low <= high:
        middle = (low + high) // 2
        cycle = _find_cycle(links >= speeds[middle])
        if cycle is None:
            high = middle - 1
        else:
            found, low = cycle, middle + 1
    # If both are equally fast, the ring of clusters passes slow links less often.
    return joined if ring_bottleneck(links, joined) == ring_bottleneck(links, found) else found


def ring_bottleneck(links: Floats, order: tuple[int, ...]) -> float:
    """Return the bandwidth (bytes/s) of the slowest link of the ring that visits the ranks in this order."""
    return float(min(links[here, there] for here, there in zip(order, (*order[1:], order[0]), strict=True)))


def best_tree(links: Floats) -> tuple[int, ...]:
    """Return the parent of every rank in a spanning tree with the fastest slowest link; rank 0, the root, has parent 0.

    The tree is a maximum spanning tree (Prim's algorithm). Raises ClusterError as `best_ring`.
    """
    _check(links)
    count = len(links)
    parents, reach = np.zeros(count, int), links[0].copy()
    outside = np.arange(count) > 0
    for _ in range(count - 1):
        nearest = int(np.argmax(np.where(outside, reach, -1.0)))
        outside[nearest] = False
        closer = outside & (links[nearest] > reach)
        parents[closer], reach[closer] = nearest, links[nearest][closer]
    return tuple(parents.tolist())


def count_rings(links: NDArray[np.int64]) -> int:
    """Return the largest number of directed rings that can run at once, each over links of its own; 0 without a ring.

    ``links[i, j]``, shape (n, n), is the number of equal links between ranks i and j. Two ranks have one ring per link
    between them. The result is exact: every cycle is tried. Raises ClusterError for more than eight ranks.
    """
    _check(links)
    count = len(links)
    if count == 2:
        return int(links[0, 1])
    if count > 8:
        raise ClusterError(f"Cannot count the rings among {count} devices of a node; expected at most 8 devices.")
    bound = int(links.sum(axis=1).min()) // 2
    cycles = list(_all_cycles(links > 0))
    return 2 * _most_disjoint(links.copy(), cycles, 0, bound)


def count_trees(links: NDArray[np.int64]) -> int:
    """Return the largest number of edge-disjoint spanning trees.

    ``links[i, j]``, shape (n, n), is the number of equal links between ranks i and j. The result is 0 if the ranks are
    not connected. It is exact: the minimum over all partitions P of the ranks of ⌊links between parts / (|P| - 1)⌋
    (Nash-Williams and Tutte, 1961). Raises ClusterError for more than eight ranks.
    """
    _check(links)
    count = len(links)
    if count > 8:
        raise ClusterError(f"Cannot count the trees among {count} devices of a node; expected at most 8 devices.")
    fewest = int(links.sum())
    for parts in _partitions(count):
        label = np.array(parts)
        if num_parts := int(label.max()):
            between = int(links[label[:, None] != label[None, :]].sum()) // 2
            fewest = min(fewest, between // num_parts)
    return fewest


def _partitions(count: int) -> Iterator[tuple[int, ...]]:
    """Yield every partition of ``count`` ranks once, as the number of each rank's part.

    Parts are numbered in order of appearance.
    """
    if count == 0:
        yield ()
        return
    for parts in _partitions(count - 1):
        for part in range(max(parts, default=-1) + 2):
            yield (*parts, part)


def _check(links: NDArray[np.generic]) -> None:
    square = links.ndim == 2 and links.shape[0] == links.shape[1] and len(links) >= 2
    if not square or not np.array_equal(links, links.T) or (links[np.triu_indices(len(links), 1)] < 0).any():  # type: ignore[operator]
        raise ClusterError(
            f"The matrix of links between ranks has shape {links.shape}; expected a symmetric matrix for two or more "
            "ranks, without negative entries."
        )


def _find_cycle(allowed: NDArray[np.bool_]) -> tuple[int, ...] | None:
    """Return a Hamiltonian cycle over the allowed links, or None."""
    count = len(allowed)
    towards = [
        sum(1 << int(other) for other in np.flatnonzero(row) if other != rank) for rank, row in enumerate(allowed)
    ]
    # ends[s]: the ranks at which a path from 0 through exactly the ranks of s can end, as bits.
    ends = [0] * (1 << count)
    ends[1] = 1
    for chosen in range(3, 1 << count, 2):
        ends[chosen] = sum(
            1 << rank for rank in range(1, count) if chosen >> rank & 1 and ends[chosen & ~(1 << rank)] & towards[rank]
        )
    everybody = (1 << count) - 1
    closing = ends[everybody] & towards[0]
    path: list[int] = []
    while closing:
        rank = closing.bit_length() - 1
        path.append(rank)
        everybody &= ~(1 << rank)
        closing = ends[everybody] & towards[rank]
        if everybody == 1:
            break
    return (0, *reversed(path)) if path else None


def _ring_by_clusters(links: Floats) -> tuple[int, ...]:
    """Join the clusters with the fastest link between them, end to end, until one path is left."""
    count = len(links)
    path_of = {rank: [rank] for rank in range(count)}
    rows, columns = np.triu_indices(count, 1)
    for link in np.argsort(-links[rows, columns], kind="stable"):
        here, there = path_of[int(rows[link])], path_of[int(columns[link])]
        ends = rows[link] in (here[0], here[-1]) and columns[link] in (there[0], there[-1])
        if here is there or not ends:
            continue
        if here[-1] != rows[link]:
            here.reverse()
        if there[0] != columns[link]:
            there.reverse()
        here.extend(there)
        path_of.update(dict.fromkeys(there, here))
    path = path_of[0]
    start = path.index(0)
    return (*path[start:], *path[:start])


def _all_cycles(allowed: NDArray[np.bool_]) -> Iterator[tuple[int, ...]]:
    """Yield every Hamiltonian cycle once, from 0, in one of its two directions."""
    count = len(allowed)

    def extend(path: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(path) == count:
            if allowed[path[-1], 0] and path[1] < path[-1]:
                yield path
            return
        for rank in range(1, count):
            if rank not in path and allowed[path[-1], rank]:
                yield from extend((*path, rank))

    yield from extend((0,))


def _most_disjoint(free: NDArray[np.int64], cycles: list[tuple[int, ...]], start: int, bound: int) -> int:
    """Return the largest number of cycles, from ``start`` on (with repetition), that the free links hold together."""
    best = 0
    for index in range(start, len(cycles)):
        if best == bound:
            break
        cycle = cycles[index]
        steps = list(zip(cycle, (*cycle[1:], cycle[0]), strict=True))
        if all(free[here, there] > 0 for here, there in steps):
            for here, there in steps:
                free[[here, there], [there, here]] -= 1
            best = max(best, 1 + _most_disjoint(free, cycles, index, bound - 1))
            for here, there in steps:
                free[[here, there], [there, here]] += 1
    return best


# A node with all devices on one switch has no topology: every group has the same links. If links are counted per pair,
# a group has the number of rings that its own links can close. If they close none, it has the number of trees that they
# hold. If they do not connect the group, its messages cross the host, at ``host_share`` of the bandwidth of one link.
@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The links between the devices of one node: ``links[i][j]`` is the number of parallel links of devices i and j.

    ``host_share``: bandwidth across the host, as a share of one link's, between devices without a link. ``source``:
    where the figures come from. Raises ClusterError if ``links`` is not a symmetric matrix of counts.
    """

    name: str
    source: str
    links: tuple[tuple[int, ...], ...]
    host_share: float

    SCHEMA_VERSION: ClassVar[int] = 1

    def __post_init__(self) -> None:
        count = len(self.links)
        square = all(len(row) == count and min(row) >= 0 for row in self.links)
        if not square or self.links != tuple(zip(*self.links, strict=True)):
            raise ClusterError(
                f"Topology {self.name!r}: 'links' must be a symmetric matrix of counts, zero or more; correct its "
                f"{count} rows."
            )
        if not self.host_share > 0:
            raise ClusterError(f"Topology {self.name!r}: 'host_share' is {self.host_share}, but must be positive.")

    def lanes_among(self, devices: tuple[int, ...]) -> tuple[Algorithm, float]:
        """Return the algorithm ("ring" or "tree") of a group of the node's devices, and how many of them run at once.

        Each ring or tree has the bandwidth of one link. If no links connect the group, the result is ("ring",
        ``host_share``). Raises ClusterError for devices that the node lacks.
        """
        if not set(devices) <= set(range(len(self.links))):
            raise ClusterError(
                f"The group has devices {devices}, but topology {self.name!r} has devices 0 to {len(self.links) - 1}."
            )
        return _lanes(self.links, devices) or ("ring", self.host_share)


@lru_cache(maxsize=256)
def _lanes(links: tuple[tuple[int, ...], ...], devices: tuple[int, ...]) -> tuple[Algorithm, float] | None:
    among = np.array(links, np.int64)[np.ix_(devices, devices)]
    if rings := count_rings(among):
        return "ring", float(rings)
    if trees := count_trees(among):
        return "tree", float(trees)
    return None


def load_topology(name: str) -> Topology:
    """Return a shipped topology by name, such as ``dgx1-v100``. Raises ClusterError for unknown names."""
    folder = resources.files("meshwright.cost.collectives") / "links"
    known = sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))
    if name not in known:
        raise ClusterError(f"No topology {name!r} is shipped{suggest(name, known)}; known: {', '.join(known)}.")
    with resources.as_file(folder / f"{name}.toml") as path:
        return decode_document(Topology, read_data(path), path.name)


CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
COLLECTIVE_OPS: tuple[CollectiveOp, ...] = get_args(CollectiveOp)
Algorithm = Literal["ring", "tree"]


def check_messages(op: str, num_bytes: ArrayLike) -> None:
    """Raise MeasurementError for an unknown collective, and for sizes (bytes) that are negative or not finite."""
    if op not in COLLECTIVE_OPS:
        raise MeasurementError(
            f"{op!r} is not a collective{suggest(op, COLLECTIVE_OPS)}; expected one of {', '.join(COLLECTIVE_OPS)}."
        )
    sizes = np.atleast_1d(np.asarray(num_bytes, np.float64))
    odd = sizes[~(np.isfinite(sizes) & (sizes >= 0))]
    if len(odd):
        raise MeasurementError(
            f"{len(odd)} of {len(sizes)} messages have sizes such as {odd[0]} bytes; expected zero or more. Give the "
            "bytes of the full tensor."
        )


def count_steps(op: CollectiveOp, group: CollectiveGroup) -> float:
    """Return the number of messages that each rank of a ring sends one after another; 1 for a send."""
    if op == "send":
        return 1.0
    return (2.0 if op == "all_reduce" else 1.0) * (group.num_ranks - 1)


def port_share(
    op: CollectiveOp, group: CollectiveGroup, *, num_lanes: float | None = None, algorithm: Algorithm = "ring"
) -> float:
    """Return the bytes through the busiest port, in one direction, per byte of the full tensor; 0 for one rank.

    The formulas are in the module's table. ``num_lanes``: the number L of rings or trees that run at once over links
    between pairs of devices; None if each device has one port to a switch.
    """
    num_ranks, per_node = group.num_ranks, group.ranks_per_node
    if num_ranks == 1:
        return 0.0
    around = (num_ranks - 1) / num_ranks
    if group.num_nodes == 1:
        chain = float(min(num_ranks - 1, 2)) if num_lanes is None else 1.0
        summing = chain if algorithm == "tree" else 2 * around
        lanes = num_lanes or 1.0
        shares = {"all_reduce": summing / lanes, "all_to_all": around / num_ranks}
        shares |= {"broadcast": 1.0 / lanes, "send": 1.0}
        return shares.get(op, around / lanes)
    if op == "all_reduce" and algorithm == "tree":
        return group.num_sharing * (1.0 if group.num_nodes == 2 else 2.0)
    shares = {
        "all_reduce": 2 * around,
        "all_to_all": per_node * (num_ranks - per_node) / num_ranks**2,
        "broadcast": 1.0,
        "send": 1.0,
    }
    return group.num_sharing * shares.get(op, around)


def ring_seconds(num_ranks: int, num_bytes: float, latency_s: float, bandwidth_bytes_per_s: float) -> float:
    """Return the seconds of a ring all-reduce of ``num_bytes`` over equal links inside a node; 0 for a single rank."""
    group = CollectiveGroup(num_ranks=num_ranks)
    share = port_share("all_reduce", group)
    return count_steps("all_reduce", group) * latency_s + share * num_bytes / bandwidth_bytes_per_s


def parameter_server_seconds(
    num_machines: int, num_spare: int, num_bytes: float, bandwidth_bytes_per_s: float
) -> float:
    """Return the seconds in which n machines sum M = ``num_bytes`` with the help of k spare machines, as in BytePS.

    The formula is 2n(n-1)M / ((n² + kn - 2k)·B), with the bandwidth B. Raises MeasurementError for fewer than two
    machines, for more spare machines than machines (more do not help), for negative bytes and for a bandwidth that is
    not positive.
    """
    check_messages("all_reduce", num_bytes)
    if not bandwidth_bytes_per_s > 0:
        raise MeasurementError(f"The bandwidth is {bandwidth_bytes_per_s} bytes/s; expected a positive number.")
    if num_machines < 2 or not 0 <= num_spare <= num_machines:
        raise MeasurementError(
            f"{num_machines} machines and {num_spare} spare machines; expected at least 2 machines, and 0 to "
            f"{num_machines} spare machines."
        )
    shared = num_machines**2 + num_spare * num_machines - 2 * num_spare
    return 2 * num_machines * (num_machines - 1) * num_bytes / (shared * bandwidth_bytes_per_s)
