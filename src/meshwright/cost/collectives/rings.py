"""Rings and trees on the graph of links: the best order of the ranks, whatever their numbers.

    best_ring   the Hamiltonian cycle whose slowest link is fastest: exact up to `MAX_EXACT` ranks (bisection over the
                smallest bandwidth; whether a cycle exists, by Held and Karp's sets); with more ranks, or if equally
                fast, by joining the clusters of the maximum spanning tree, which visits each host once
    best_tree   the spanning tree whose slowest link is fastest: a maximum spanning tree (Prim)
    count_rings how many directed rings links of equal speed hold at once: each cycle is used in both directions
    count_trees how many spanning trees they hold at once: min over partitions P of the ranks of ⌊links between parts /
                (|P| - 1)⌋ (Nash-Williams and Tutte, 1961)

Links are a symmetric matrix, 0 without a link: bandwidths in bytes/s, or numbers of parallel links.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from meshwright.spec import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from meshwright.cost.prediction import Floats
    from meshwright.spec import Cluster

MAX_EXACT = 12


def link_matrix(cluster: Cluster, ranks: Sequence[int]) -> Floats:
    """Return the bandwidth in bytes/s between all pairs of ranks, shape (ranks, ranks), by `Cluster.link_between`."""
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


def best_ring(links: Floats) -> tuple[int, ...]:
    """Return an order of the ranks, from 0, whose ring has the fastest slowest link; ``links`` of shape (n, n).

    Raises ClusterError for a matrix that is not square, not symmetric, or has negative bandwidths.
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
    """Return the bandwidth of the slowest link of the ring."""
    return float(min(links[here, there] for here, there in zip(order, (*order[1:], order[0]), strict=True)))


def best_tree(links: Floats) -> tuple[int, ...]:
    """Return the parent of every rank (the root 0 is its own) in a spanning tree with the fastest slowest link."""
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
    """Return the number of directed rings that fit at once over parallel equal links, shape (n, n); 0 if none closes.

    Two ranks have one for each link between them. Exact, for up to eight ranks: every cycle is tried.
    """
    _check(links)
    count = len(links)
    if count == 2:
        return int(links[0, 1])
    if count > 8:
        raise ClusterError(f"Rings are counted exactly for up to 8 devices of a node, not {count}.")
    bound = int(links.sum(axis=1).min()) // 2
    cycles = list(_all_cycles(links > 0))
    return 2 * _most_disjoint(links.copy(), cycles, 0, bound)


def count_trees(links: NDArray[np.int64]) -> int:
    """Return the number of spanning trees that fit at once over parallel equal links, shape (n, n).

    It is 0 if the ranks are not connected. Exact, for up to eight ranks: every partition is tried.
    """
    _check(links)
    count = len(links)
    if count > 8:
        raise ClusterError(f"Trees are counted exactly for up to 8 devices of a node, not {count}.")
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
            f"Links of shape {links.shape}: expected a symmetric matrix over two ranks or more, with no negative entry."
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
