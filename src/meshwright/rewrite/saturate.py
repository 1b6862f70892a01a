"""Saturation: rules applied round by round until nothing is new, or a limit is met."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal

from meshwright.rewrite.matching import apply, matches

if TYPE_CHECKING:
    from meshwright.rewrite.egraph import EGraph
    from meshwright.rewrite.matching import Directed


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to stop: rounds, nodes, seconds, and matches of one rule in one round."""

    rounds: int = 8
    nodes: int = 20_000
    seconds: float = 5.0
    matches: int = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation:
    """What came of it; ``ended``: why it stopped. ``applied``: by rule, how often it added something."""

    rounds: int
    ended: Literal["saturated", "rounds", "nodes", "seconds"]
    applied: dict[str, int]
    cut: tuple[str, ...]


def saturate(graph: EGraph, rules: Sequence[Directed], limits: Limits) -> Saturation:
    """Apply rules until nothing is new or a limit is met; what was found by then stays."""
    start = time.perf_counter()
    applied: dict[str, int] = {}
    cut: dict[str, None] = {}
    for number in range(limits.rounds):
        before = len(graph), graph.num_unions
        found = []
        for rule in rules:
            places = list(islice(matches(graph, rule), limits.matches + 1))
            if len(places) > limits.matches:
                cut[rule.rule.name] = None
            found.append((rule, places[: limits.matches]))
            if time.perf_counter() - start > limits.seconds:
                break
        for rule, places in found:
            for match in places:
                if apply(graph, rule, match):
                    applied[rule.rule.name] = applied.get(rule.rule.name, 0) + 1
                if len(graph) > limits.nodes:
                    graph.rebuild()
                    return Saturation(rounds=number + 1, ended="nodes", applied=applied, cut=tuple(cut))
            if time.perf_counter() - start > limits.seconds:
                graph.rebuild()
                return Saturation(rounds=number + 1, ended="seconds", applied=applied, cut=tuple(cut))
        graph.rebuild()
        if (len(graph), graph.num_unions) == before:
            return Saturation(rounds=number + 1, ended="saturated", applied=applied, cut=tuple(cut))
    return Saturation(rounds=limits.rounds, ended="rounds", applied=applied, cut=tuple(cut))
