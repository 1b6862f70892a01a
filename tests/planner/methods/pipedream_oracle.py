"""PipeDream's states and objective by plain sets and by trying everything, for graphs of a few layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from meshwright.spec.units import PICOSECONDS_PER_SECOND

State = frozenset[int]


@dataclass(frozen=True)
class Layers:
    """Layers whose numbers follow those that they read; picoseconds and bytes are whole numbers."""

    reads: tuple[tuple[int, ...], ...]
    picoseconds: tuple[int, ...]
    activations: tuple[int, ...]
    parameters: tuple[int, ...]

    def text(self) -> str:
        """A file of PipeDream's profiler; its milliseconds have as many digits as it takes."""
        lines = [
            f"node{i} -- Layer({i}, 1) -- forward_compute_time={self.picoseconds[i] / 1e9!r}, "
            f"backward_compute_time=0.000, activation_size={self.activations[i]}.0, "
            f"parameter_size={self.parameters[i]}.000"
            for i in range(len(self.reads))
        ]
        return "\n".join(lines + [f"\tnode{w} -- node{r}" for r, writers in enumerate(self.reads) for w in writers])

    def seconds(self, layers: State) -> float:
        return sum(self.picoseconds[i] for i in layers) / PICOSECONDS_PER_SECOND

    def readers(self, layer: int) -> State:
        return frozenset(r for r, writers in enumerate(self.reads) if layer in writers)

    @cached_property
    def ancestors(self) -> list[State]:
        found: list[State] = []
        for writers in self.reads:
            found.append(frozenset(writers).union(*(found[w] for w in writers)))
        return found

    def closed(self, antichain: State) -> State:
        return antichain.union(*(self.ancestors[layer] for layer in antichain))

    def augmented(self, antichain: State) -> State:
        """`augment_antichain`: predecessors of a layer of the antichain that feed something else, too."""
        extra = {
            p
            for layer in antichain
            for p in self.ancestors[layer]
            for reader in self.readers(p)
            if reader not in self.ancestors[layer] and reader != layer
        }
        return antichain | extra

    def next_antichains(self, antichain: State) -> Iterator[State]:
        """`next_antichains`: a layer of the augmented antichain makes way for one that reads it."""
        augmented = self.augmented(antichain)
        for old in augmented:
            for new in self.readers(old) - antichain:
                if any(new in self.ancestors[layer] for layer in augmented):
                    continue
                grown = (augmented - {old}) | {new}
                yield frozenset(a for a in grown if not any(a in self.ancestors[b] for b in grown))

    @cached_property
    def frontiers(self) -> dict[State, State]:
        """Every state that `antichain_dag` reaches from the first source, with its augmented antichain."""
        first = frozenset([min(i for i, writers in enumerate(self.reads) if not writers)])
        todo, seen = [first], {first}
        for antichain in todo:
            for item in self.next_antichains(antichain):
                if item not in seen:
                    seen.add(item)
                    todo.append(item)
        return {self.closed(antichain): self.augmented(antichain) for antichain in todo}

    def down_sets(self) -> set[State]:
        """All sets of layers that contain what they read, and layer 0."""
        everything = range(len(self.reads))
        subsets = (frozenset(s) for n in range(1, len(self.reads) + 1) for s in combinations(everything, n))
        return {s for s in subsets if 0 in s and self.closed(s) == s}


@dataclass(frozen=True)
class Search:
    """What to minimise; ``levels`` are (machines, bytes per second), the lowest first."""

    layers: Layers
    levels: tuple[tuple[int, float], ...]
    ratio: float | None = None
    replicas: tuple[int, ...] | None = None
    fewer: bool = False
    memory: float = math.inf

    def best(self) -> float:
        return self.interval(len(self.levels) - 1, frozenset(), frozenset(range(len(self.layers.reads))))

    def fewest_stages(self, seconds: float) -> int:
        """The fewest stages of a pipeline on one level that takes no longer."""
        everything, machines = frozenset(range(len(self.layers.reads))), self.levels[0][0]
        inside = [state for state in self.layers.frontiers if state < everything]
        return min(
            len(replicas)
            for cuts in _chains(frozenset(), inside)
            for total in (range(1, machines + 1) if self.fewer else (machines,))
            for replicas in _shares(total, len(cuts) + 1)
            if self.pipeline(0, (frozenset(), *cuts, everything), replicas) <= seconds
        )

    def interval(self, level: int, start: State, stop: State) -> float:
        """The least bottleneck of the layers between two states, on all machines of a level."""
        if level < 0:
            return self.layers.seconds(stop - start)
        machines = self.levels[level][0]
        inside = [s for s in self.layers.frontiers if start < s < stop]
        uses = range(1, machines + 1) if self.fewer else (machines,)
        return min(
            self.pipeline(level, (start, *cuts, stop), replicas)
            for cuts in _chains(start, inside)
            for total in uses
            for replicas in _shares(total, len(cuts) + 1)
        )

    def pipeline(self, level: int, cuts: Sequence[State], replicas: Sequence[int]) -> float:
        machines, bandwidth = self.levels[level]
        below = self.levels[level - 1][0] if level else 1
        everything = frozenset(range(len(self.layers.reads)))
        slowest, used = 0.0, 0
        for index, r in enumerate(replicas):
            before, after = cuts[index], cuts[index + 1]
            used += r
            weights = sum(self.layers.parameters[i] for i in after - before)
            kept = weights + sum(self.layers.activations[i] for i in after - before)
            # As coded: machines that stay idle count as if they followed the first stage.
            idle = machines - sum(replicas) if index == 0 else 0
            if (self.replicas is not None and r not in self.replicas) or math.ceil(
                (machines - used) / r
            ) * kept > self.memory:
                return math.inf
            used += idle
            exchange = 4 * (r - 1) * weights / (bandwidth * r) / (below if index == 0 else 1)
            slowest = max(slowest, (self.interval(level - 1, before, after) + exchange) / r)
            if self.ratio is not None and index > 0:
                ends = [before] if after == everything else [before, after]
                for state in ends:
                    sent = sum(self.layers.activations[i] for i in self.layers.frontiers[state])
                    slowest = max(slowest, 2 * sent / (bandwidth * r) / self.ratio)
        return slowest


def _chains(start: State, inside: Sequence[State]) -> Iterator[tuple[State, ...]]:
    yield ()
    for state in inside:
        if start < state:
            yield from ((state, *rest) for rest in _chains(state, inside))


def _shares(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
    for first in range(1, total - parts + 2) if parts > 1 else ():
        yield from ((first, *rest) for rest in _shares(total - first, parts - 1))
