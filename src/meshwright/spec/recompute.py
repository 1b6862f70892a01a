"""Recompute (activation checkpointing): ranges of ops ``start:stop``, and ops in them whose results are kept.

A range keeps the values that it reads from outside, and the results of those of its ops that are in `Graph.keeps`. When
the backward reaches the end of the range, its other ops run again, up to the last value that their backward reads
(torch.utils.checkpoint stops early, too; results are kept as by its create_selective_checkpoint_contexts).
`recompute_words` defines the words by which users choose.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

from meshwright.spec.errors import GraphError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshwright.spec.graph import Graph

Ranges = tuple[tuple[int, int], ...]

ATTENTION = ("aten.scaled_dot_product_attention", "aten._scaled_dot_product")
# In the name of a block, separates its own name from its recomputed ranges.
_AGAIN = "+again "


class Recompute(NamedTuple):
    """Ranges of ops that are recomputed, and ops in them whose results are kept, both ascending."""

    ranges: Ranges = ()
    keeps: tuple[int, ...] = ()


def recompute_layers(graph: Graph, layers: Iterable[int]) -> Ranges:
    """The ranges of ops for recomputing these layers, each layer on its own."""
    return tuple((graph.layers[i].start, graph.layers[i].stop) for i in layers)


def recompute_runs(graph: Graph, kinds: tuple[str, ...]) -> Ranges:
    """The longest runs of ops whose kinds start with one of ``kinds``, each within a layer."""
    home = [index for index, layer in enumerate(graph.layers) for _ in range(layer.start, layer.stop)]
    runs = groupby(range(len(graph.ops)), key=lambda op: (home[op], graph.ops[op].kind.startswith(kinds)))
    chosen = (list(ops) for (_, is_chosen), ops in runs if is_chosen)
    return tuple((ops[0], ops[-1] + 1) for ops in chosen)


def with_recompute(graph: Graph, ranges: Iterable[tuple[int, int]], keeps: Iterable[int] = ()) -> Graph:
    """The graph with these ranges recomputed, except ops whose results are kept.

    Blocks of layers that recompute or keep different parts get different names.
    """
    chosen = tuple(sorted((start, stop) for start, stop in ranges)), tuple(sorted(keeps))
    return graph if chosen == (graph.recompute, graph.keeps) else _with_sorted(graph, *chosen)


@lru_cache(maxsize=32)
def _with_sorted(graph: Graph, ranges: Ranges, keeps: tuple[int, ...]) -> Graph:
    layers = []
    for layer in graph.layers:
        block = layer.block.partition(_AGAIN)[0]
        mine = [f"{a - layer.start}:{b - layer.start}" for a, b in ranges if a < layer.stop and layer.start < b]
        mine += [f"keeps {op - layer.start}" for op in keeps if layer.start <= op < layer.stop]
        layers.append(replace(layer, block=block + _AGAIN + ",".join(mine) if block and mine else block))
    return replace(graph, layers=tuple(layers), recompute=ranges, keeps=keeps)


def check_recompute(graph: Graph) -> None:
    """Raise GraphError unless the graph is for training, its ranges ascend without overlap, and its keeps are legal."""
    if not graph.recompute and not graph.keeps:
        return
    inside = all(0 <= start < stop <= len(graph.ops) for start, stop in graph.recompute)
    if not inside or any(before[1] > after[0] for before, after in pairwise(graph.recompute)):
        raise GraphError(
            f"The ranges of ops to recompute are {list(graph.recompute)[:8]}; expected ascending ranges "
            f"within 0:{len(graph.ops)} that do not overlap. Take them from `recompute_layers`."
        )
    if graph.mode != "training" or any(op.phase == "backward" for op in graph.ops):
        raise GraphError(
            f"Graph {graph.name!r} is for inference or holds its own backward, so nothing can be recomputed in it. "
            "Capture the model alone, for training."
        )
    _check_keeps(graph)


def _check_keeps(graph: Graph) -> None:
    covered = {op for start, stop in graph.recompute for op in range(start, stop)} if graph.keeps else set()
    outside = [op for op in graph.keeps if op not in covered]
    if outside or any(before >= after for before, after in pairwise(graph.keeps)):
        raise GraphError(
            f"The ops whose results are kept are {list(graph.keeps)[:8]}; expected ascending ones within the "
            f"recomputed ranges, {list(graph.recompute)[:8]}. Take both from `read_recompute`."
        )
    written = written_storages(graph) if graph.keeps else frozenset()
    for op in graph.keeps:
        if reason := why_not_kept(graph, op, written):
            raise GraphError(
                f"The result of {graph.ops[op].name!r} cannot be kept while the ops around it are recomputed: "
                f"{reason}. Leave it out of `keeps`."
            )


def written_storages(graph: Graph) -> frozenset[int]:
    """Storages of values that some op writes to in place."""
    written = (graph.tensors[op.inputs[0]].storage for op in graph.ops if op.inputs and op.is_in_place)
    return frozenset(written)


def why_not_kept(graph: Graph, op: int, written: frozenset[int]) -> str:
    """Why the result of an op cannot be kept inside a recomputed range; empty if it can.

    ``written`` are the graph's `written_storages`.
    """
    item = graph.ops[op]
    if item.random:
        return "it draws random numbers, and the ops that run again after it would draw others than before"
    if item.is_in_place or any(graph.tensors[i].storage in written for i in item.outputs):
        return "it is written in place later, or writes in place itself"
    if not any(graph.tensors[i].storage == i for i in item.outputs):
        return "it is a view of another op's result"
    if item.kind.startswith(ATTENTION) and not set(item.outputs) & set(item.saved):
        return "its attention is computed op by op, not by one kernel"
    return ""


def passed_again(graph: Graph, start: int, stop: int) -> range:
    """The ops of a range up to the last one that makes or keeps a value for their backward."""
    ops, tensors = graph.ops, graph.tensors
    savers = [index for index in range(start, stop) if ops[index].saved]
    if not savers:
        return range(start, start)
    last = ops[savers[-1]]
    made = {tensors[i].storage for i in last.outputs if tensors[i].role in ("activation", "saved")}
    made &= set(last.outputs)
    made |= {i for i in last.saved if tensors[i].role == "saved" and tensors[i].storage == i}
    keeps_own = bool(made & {tensors[i].storage for i in last.saved})
    return range(start, savers[-1] + keeps_own)


def computed_again(graph: Graph, start: int, stop: int) -> tuple[int, ...]:
    """The ops of a range that run again: those of `passed_again` whose results are not kept."""
    passed = passed_again(graph, start, stop)
    kept = kept_within(graph, start, stop)
    return tuple(passed) if not kept else tuple(op for op in passed if op not in kept)


def kept_within(graph: Graph, start: int, stop: int) -> frozenset[int]:
    """The ops of a range whose results are kept."""
    return frozenset(graph.keeps[bisect_left(graph.keeps, start) : bisect_left(graph.keeps, stop)])


def read_from_outside(graph: Graph, start: int, stop: int) -> set[int]:
    """Storages of values that a range reads but does not make; they are kept until it runs again."""
    ops = graph.ops[start:stop]
    made = {i for op in ops for i in op.outputs}
    read = {i for op in ops for i in op.inputs} - made
    return {graph.tensors[i].storage for i in read if graph.tensors[i].role == "activation"}
