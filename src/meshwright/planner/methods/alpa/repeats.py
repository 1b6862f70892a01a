"""Repeated blocks: which ops of a graph stand for others, so that a stack of equal layers is placed as one.

A **run** is a number of copies of the same layers, one after the other, in which one can stand for another:

- ops at one position of all copies have one cost class: equal kinds, attributes, shapes and roles;
- every copy reads, position for position, either its own tensors, those of the copy before (**carried**; the first copy
  reads something from outside instead), parameters of its own, or tensors from outside that all copies share;
- what comes after the run reads only its last copy.

The first and the last copy choose for themselves, as their neighbours differ. The copies between get the same layout:
one is kept, each of its ops weighted by the number of copies r, and each `Reading` between two copies (r - 1) times,
and at the ends once. So the border is periodic: the outputs of a block are converted to the layout that the next one,
laid out the same, reads. The only assumption is that layouts do not alternate from block to block: such an optimum
would be missed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from meshwright.cost.classes import classify_ops
from meshwright.spec import Graph

# (op, position among its inputs)
Slot = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedRun:
    """``count`` copies of ``length`` ops, starting with op ``start``."""

    start: int
    length: int
    count: int

    def copy_of(self, op: int) -> int:
        """Return the copy that contains an op; out of range if no copy does."""
        return (op - self.start) // self.length

    def __contains__(self, op: object) -> bool:
        return isinstance(op, int) and self.start <= op < self.start + self.length * self.count


class Reading(NamedTuple):
    """Readers of ``weight`` instances of a tensor; each instance is converted once per layout that readers need."""

    tensor: int
    weight: int
    readers: tuple[Slot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """``ops`` that stand for a graph's ops, the ops that each stands for, and the readers of their tensors.

    ``copy_of`` has the run and the copy of the ops in runs, whether these are folded or not.
    """

    ops: tuple[int, ...]
    stands_for: Mapping[int, tuple[int, ...]] = field(repr=False)
    readings: tuple[Reading, ...]
    copy_of: Mapping[int, tuple[int, int]] = field(repr=False)


def fold(graph: Graph, *, tiled: bool = True) -> Folded:
    """Return the ops to place; without ``tiled`` all of them."""
    producer = {tensor: i for i, op in enumerate(graph.ops) for tensor in op.outputs}
    runs = list(_find_runs(graph, producer))
    inside = {op: run for run in runs for op in range(run.start, run.start + run.length * run.count)}
    folding = [_without_ends(run) for run in runs if tiled]
    run_of = {op: run for run in folding for op in range(run.start, run.start + run.length * run.count)}
    ops = tuple(i for i in range(len(graph.ops)) if i not in run_of or run_of[i].copy_of(i) == 0)
    same = {i: tuple(range(i, i + run_of[i].length * run_of[i].count, run_of[i].length)) for i in ops if i in run_of}
    return Folded(
        ops=ops,
        stands_for={i: same.get(i, (i,)) for i in ops},
        readings=tuple(_readings(graph, ops, run_of, producer)),
        copy_of={i: (run.start, run.copy_of(i)) for i, run in inside.items()},
    )


def _without_ends(run: RepeatedRun) -> RepeatedRun:
    """Return the copies between the first and the last one, whose neighbours differ."""
    return RepeatedRun(start=run.start + run.length, length=run.length, count=max(run.count - 2, 0))


def _find_runs(graph: Graph, producer: Mapping[int, int]) -> Iterator[RepeatedRun]:
    """Yield runs in order; each is the one that folds the most ops among those that start at its layer."""
    blocks = [layer.block or f"layer {i}" for i, layer in enumerate(graph.layers)]
    at = 0
    while at < len(blocks):
        periods = range(1, (len(blocks) - at) // 2 + 1)
        repeated = ((period, _repeats(blocks, at, period)) for period in periods)
        runs = [(_run(graph, at, period, count), period * count) for period, count in repeated if count > 1]
        runs.sort(key=lambda found: -found[0].length * (found[0].count - 1))
        run, step = next((found for found in runs if _can_fold(graph, found[0], producer)), (None, 1))
        if run is not None:
            yield run
        at += step


def _repeats(blocks: list[str], at: int, period: int) -> int:
    count = 1
    while blocks[at : at + period] == blocks[at + count * period : at + (count + 1) * period]:
        count += 1
    return count


def _run(graph: Graph, at: int, period: int, count: int) -> RepeatedRun:
    start, stop = graph.layers[at].start, graph.layers[at + period - 1].stop
    return RepeatedRun(start=start, length=stop - start, count=count)


def _can_fold(graph: Graph, run: RepeatedRun, producer: Mapping[int, int]) -> bool:
    """Return whether one copy can stand for all of the run."""
    stop = run.start + run.length * run.count
    classes = classify_ops(graph).class_of[run.start : stop].reshape(run.count, run.length)
    if (classes != classes[0]).any():
        return False
    wirings = [list(_wiring(graph, run, copy, producer)) for copy in range(run.count)]
    if any(a != b for a, b in pairwise(wirings[1:])) or not _begins(wirings[0], wirings[1]):
        return False
    inside = range(run.start, stop - run.length)
    behind = (tensor for op in graph.ops[stop:] for tensor in op.inputs)
    return not any(producer.get(tensor) in inside for tensor in behind) and not _shares_parameters(graph, run)


# The source of an op's input: ("own", output and op in its copy), ("carried", the same in the copy before),
# ("parameter", which of its copy), ("outside", tensor); ("no", copy) cannot be folded.
_Source = tuple[object, ...]


def _wiring(graph: Graph, run: RepeatedRun, copy: int, producer: Mapping[int, int]) -> Iterator[_Source]:
    base = run.start + copy * run.length
    parameters: dict[int, int] = {}
    for op in graph.ops[base : base + run.length]:
        for tensor in op.inputs:
            made = producer.get(tensor)
            if made is not None and made in run:
                source = graph.ops[made].outputs.index(tensor), (made - run.start) % run.length
                behind = copy - run.copy_of(made)
                yield ("own", *source) if behind == 0 else ("carried", *source) if behind == 1 else ("no", copy)
            elif graph.tensors[tensor].role == "parameter":
                yield "parameter", parameters.setdefault(tensor, len(parameters))
            else:
                yield "outside", tensor


def _shares_parameters(graph: Graph, run: RepeatedRun) -> bool:
    """Return whether a copy shares a parameter with other readers: its gradient is summed once for all of them."""
    reader: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        copy = run.copy_of(index) if index in run else -1
        for tensor in op.inputs:
            shared = reader.setdefault(tensor, copy) != copy
            if shared and graph.tensors[tensor].role == "parameter":
                return True
    return False


def _begins(first: list[_Source], second: list[_Source]) -> bool:
    """Return whether the first copy reads like the second, with outside tensors instead of carried ones."""
    return len(first) == len(second) and all(
        a == b or (b[0] == "carried" and a[0] == "outside") for a, b in zip(first, second, strict=True)
    )


def _readings(
    graph: Graph, ops: tuple[int, ...], run_of: Mapping[int, RepeatedRun], producer: Mapping[int, int]
) -> Iterator[Reading]:
    own: dict[int, list[Slot]] = {}
    carried: dict[int, list[Slot]] = {}
    outside: dict[int, list[Slot]] = {}
    for index in ops:
        run = run_of.get(index)
        for position, tensor in enumerate(graph.ops[index].inputs):
            made = producer.get(tensor, -1)
            slot = (index, position)
            if run is not None and (made in run or graph.tensors[tensor].role == "parameter"):
                own.setdefault(tensor, []).append(slot)
                continue
            outside.setdefault(_stand_in(graph, run_of, made, tensor), []).append(slot)
            if run is not None:
                after = graph.ops[index + run.length].inputs[position]
                if after != tensor:
                    carried.setdefault(_stand_in(graph, run_of, producer[after], after), []).append(slot)
    for tensor in dict.fromkeys((*own, *carried, *outside)):
        inner, next_, last = (tuple(found.get(tensor, ())) for found in (own, carried, outside))
        at = producer.get(tensor, inner[0][0] if inner else -1)
        count = run_of[at].count if at in run_of else 1
        if count == 1 or not (next_ or last):
            yield Reading(tensor, count, (*inner, *last))
        else:
            yield from (Reading(tensor, n, r) for n, r in ((count - 1, inner + next_), (1, inner + last)) if r)


def _stand_in(graph: Graph, run_of: Mapping[int, RepeatedRun], made: int, tensor: int) -> int:
    """Return the tensor of the first copy that stands for one of a later copy."""
    run = run_of.get(made)
    if run is None:
        return tensor
    return graph.ops[made - run.copy_of(made) * run.length].outputs[graph.ops[made].outputs.index(tensor)]
