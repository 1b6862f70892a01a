"""Lifetimes of the values of a forward: until their last use, or until the backward that reads them.

A recomputed range of ops keeps what it reads from outside, and the results of ops that are kept.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.cost.autocast import kept_copies
from meshwright.cost.traits import family_of
from meshwright.spec import read_from_outside

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshwright.spec import Graph, Op, StageSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """Lifetimes of the storages of a graph.

    ``kept`` outlive the forward; ``sent`` are those of them that are kept only because they are sent or yielded.
    ``last_used[op]`` are those whose last reader (their maker, if they have no reader) is the op, ``released[op]``
    those that no backward after that of the op reads; ``released_again[op]`` likewise, for recomputed values.
    ``starts[stop]`` is the start of the range of ops that ends before ``stop``, ``recomputed`` are all ops of such
    ranges, ``results`` kept storages among them by the op that makes them.
    """

    kept: frozenset[int]
    sent: frozenset[int]
    last_used: Mapping[int, Sequence[int]]
    released: Mapping[int, Sequence[int]]
    released_again: Mapping[int, Sequence[int]]
    starts: Mapping[int, int]
    recomputed: frozenset[int]
    results: Mapping[int, frozenset[int]]


def find_lifetimes(graph: Graph, stage: StageSlice, *, trains: bool = True) -> Lifetimes:
    """Return lifetimes in a stage: sent values are kept, received ones stay until its backward is done.

    Nothing is saved unless it ``trains``.
    """
    mine = set(stage.ops)
    ranges = [item for item in graph.recompute if item[0] in mine]
    tensors = graph.tensors
    range_of = {op: start for start, stop in ranges for op in range(start, stop)}
    makers = _makers(graph) if ranges else {}
    last_use: dict[int, int] = {}
    needed: dict[int, int] = {}
    needed_again: dict[int, int] = {}
    received = {tensors[i].storage for channel in stage.incoming for i in channel.tensors}
    kept = {tensors[i].storage for channel in stage.outgoing for i in channel.tensors}
    kept |= {tensors[i].storage for i in stage.outputs} | received
    sent = kept - received
    for index in stage.ops:
        op = graph.ops[index]
        last_use.update((tensors[i].storage, index) for i in (*op.outputs, *op.inputs))
        for storage in {tensors[i].storage for i in op.saved} if trains else ():
            is_again = index in range_of and range_of.get(makers.get(storage, -1)) == range_of[index]
            (needed_again if is_again else needed).setdefault(storage, index)
            if index not in range_of:
                kept.add(storage)
    for start, stop in ranges:
        for storage in read_from_outside(graph, start, stop):
            needed[storage] = min(needed.get(storage, start), start)
            kept.add(storage)
    results = {op: kept_results(graph, op) for op in graph.keeps if op in range_of}
    for index, storages in results.items():
        for storage in storages:
            # A recomputation takes them; all are gone when the backward of the range's first op ends.
            needed[storage] = min(needed.get(storage, range_of[index]), range_of[index])
            kept.add(storage)
    return Lifetimes(
        kept=frozenset(kept),
        sent=frozenset(sent.difference(needed)),
        last_used=_by_op(last_use),
        released=_by_op({storage: op for storage, op in needed.items() if storage not in received}),
        released_again=_by_op(needed_again),
        starts={stop: start for start, stop in ranges},
        recomputed=frozenset(range_of),
        results=results,
    )


def kept_results(graph: Graph, op: int) -> frozenset[int]:
    """Return the storages that are kept with an op's result: its outputs, and what its kernel makes for its backward.

    Copies of inputs, cast or in another layout, are made again.
    """
    item = graph.ops[op]
    made = [i for i in item.saved if graph.tensors[i].role == "saved"] if _makes_statistics(item) else []
    copies = kept_copies(graph, item)
    found = [*item.outputs, *(i for i in made if i not in copies)]
    return frozenset(i for i in found if graph.tensors[i].storage == i)


def _makes_statistics(op: Op) -> bool:
    """Return whether an op makes values for its backward; products and convolutions only copy inputs."""
    return family_of(op) not in ("product", "convolution")


def _makers(graph: Graph) -> dict[int, int]:
    """Return the op that first writes each storage."""
    makers: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        for i in (*op.outputs, *op.saved):
            if graph.tensors[i].role in ("activation", "saved"):
                makers.setdefault(graph.tensors[i].storage, index)
    return makers


def _by_op(ops: dict[int, int]) -> dict[int, list[int]]:
    storages: dict[int, list[int]] = defaultdict(list)
    for storage, op in ops.items():
        storages[op].append(storage)
    return dict(storages)
