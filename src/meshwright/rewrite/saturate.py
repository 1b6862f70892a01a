"""Saturation: apply rules round by round until nothing is new, or a limit is reached."""

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
class SaturationLimits:
    """When to stop: rounds, nodes, seconds, and matches of one rule in one round."""

    rounds: int = 8
    nodes: int = 20_000
    seconds: float = 5.0
    matches: int = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation:
    """The result; ``ended``: why it stopped. ``applied``: by rule, how often it added something.

    ``until``: the state of the e-graph (`EGraph.now`) that the rules last saw.
    """

    rounds: int
    ended: Literal["saturated", "rounds", "nodes", "seconds"]
    applied: dict[str, int]
    cut: tuple[str, ...]
    until: int


def saturate(graph: EGraph, rules: Sequence[Directed], limits: SaturationLimits, since: int = 0) -> Saturation:
    """Apply rules until nothing is new or a limit is reached; results so far stay.

    ``since``: the state that the same rules saw before; they look only at later changes.
    """
    start = time.perf_counter()
    applied: dict[str, int] = {}
    cut: dict[str, None] = {}

    def end(rounds: int, ended: Literal["saturated", "rounds", "nodes", "seconds"]) -> Saturation:
        return Saturation(rounds=rounds, ended=ended, applied=applied, cut=tuple(cut), until=since)

    for number in range(1, limits.rounds + 1):
        before = len(graph), graph.num_unions
        changed = graph.changed(since, max((rule.depth for rule in rules), default=0)) if since else None
        since = graph.now
        found = []
        for rule in rules:
            # A rule of several outputs may combine changed and unchanged classes.
            among = None if changed is None or len(rule.sources) > 1 else changed[rule.depth]
            places = list(islice(matches(graph, rule, among, start + limits.seconds), limits.matches + 1))
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
                    return end(number, "nodes")
            if time.perf_counter() - start > limits.seconds:
                graph.rebuild()
                return end(number, "seconds")
        graph.rebuild()
        if (len(graph), graph.num_unions) == before:
            return end(number, "saturated")
    return end(limits.rounds, "rounds")
