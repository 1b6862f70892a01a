"""Strongly connected components."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set


def strong_components(nodes: Sequence[int], successors: Mapping[int, Set[int]]) -> list[list[int]]:
    """Return the strongly connected components of a directed graph, single nodes included (Kosaraju 1978)."""
    predecessors: dict[int, set[int]] = defaultdict(set)
    for node, others in successors.items():
        for other in others:
            predecessors[other].add(node)
    finished: list[int] = []
    seen: set[int] = set()
    for node in nodes:
        finished += _reach(node, successors, seen)
    seen = set()
    return [found for node in reversed(finished) if (found := _reach(node, predecessors, seen))]


def _reach(start: int, successors: Mapping[int, Set[int]], seen: set[int]) -> list[int]:
    """Return the unseen nodes that are reachable, each after those that are reached through it."""
    if start in seen:
        return []
    seen.add(start)
    order: list[int] = []
    path = [(start, iter(sorted(successors.get(start, ()))))]
    while path:
        node, others = path[-1]
        following = next((other for other in others if other not in seen), None)
        if following is None:
            order.append(node)
            path.pop()
        else:
            seen.add(following)
            path.append((following, iter(sorted(successors.get(following, ())))))
    return order
