"""What of a graph is computed again in the backward instead of kept, as ranges of ops ``start:stop``.

A range keeps what it reads from outside; when the backward comes to its end, its ops run again, up to the last value
that their backward reads (torch.utils.checkpoint stops early, too). Two ways to choose ranges have names:

    full         every repeated block on its own
    selective    attention's scores: their softmax and its dropout (Korthikanti et al., MLSys 2023, section 5)
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Literal, get_args

from meshwright.spec.errors import GraphError, PlanError, suggest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshwright.spec.graph import Graph

Ranges = tuple[tuple[int, int], ...]
RecomputeName = Literal["none", "selective", "full"]
RECOMPUTE_NAMES: tuple[RecomputeName, ...] = get_args(RecomputeName)

# From the scores of attention on. Fused attention keeps none, and a dropout alone keeps less in its mask than its input
# has.
_SCORES = ("aten.softmax", "aten._softmax")
_AFTER_SCORES = ("aten.dropout",)
_VIEWS = ("aten.view", "aten.reshape", "aten.expand", "aten._unsafe_view", "aten.clone", "aten._to_copy", "aten.to.")
_PRODUCTS = ("aten.bmm", "aten.baddbmm", "aten.matmul")
# Stands in the name of a block between its own and what of it is computed again.
_AGAIN = "+again "


def recompute_layers(graph: Graph, layers: Iterable[int]) -> Ranges:
    """The ranges of ops that computing these layers again means, each layer on its own."""
    return tuple((graph.layers[i].start, graph.layers[i].stop) for i in layers)


def recompute_runs(graph: Graph, kinds: tuple[str, ...]) -> Ranges:
    """The longest runs of ops whose kinds begin so, each within a layer."""
    home = [index for index, layer in enumerate(graph.layers) for _ in range(layer.start, layer.stop)]
    runs = groupby(range(len(graph.ops)), key=lambda op: (home[op], graph.ops[op].kind.startswith(kinds)))
    chosen = (list(ops) for (_, is_chosen), ops in runs if is_chosen)
    return tuple((ops[0], ops[-1] + 1) for ops in chosen)


def recompute_choices(graph: Graph) -> dict[RecomputeName, Ranges]:
    """Ranges of ops by the word for them; blocks are layers that stand in a list of the model's."""
    blocks = [index for index, layer in enumerate(graph.layers) if "." in layer.name]
    runs = recompute_runs(graph, (*_SCORES, *_AFTER_SCORES))
    return {
        "none": (),
        "selective": tuple((start, stop) for start, stop in runs if _has_scores(graph, start)),
        "full": recompute_layers(graph, blocks),
    }


def _has_scores(graph: Graph, op: int) -> bool:
    """Whether an op is a softmax whose result weighs values in a product; that of a router, for one, is not."""
    if not graph.ops[op].kind.startswith(_SCORES):
        return False
    weights = set(graph.ops[op].outputs)
    for reader in graph.ops[op + 1 :]:
        if weights.intersection(reader.inputs):
            if reader.kind.startswith(_PRODUCTS):
                return True
            if reader.kind.startswith((*_AFTER_SCORES, *_VIEWS)):
                weights.update(reader.outputs)
    return False


def read_recompute(graph: Graph, text: str) -> Ranges:
    """What ``none``, ``selective``, ``full`` or layers (``0:12,20:24``) mean for a graph.

    Raises PlanError for other words, and for a word that means nothing in this graph.
    """
    if text in RECOMPUTE_NAMES:
        ranges = recompute_choices(graph)[text]
        if not ranges and text != "none":
            lacking = "scores of attention that it keeps" if text == "selective" else "repeated blocks"
            raise PlanError(
                f"Computing again was asked for with {text!r}, but graph {graph.name!r} has no {lacking}. "
                "Name layers, as 0:12, or give none."
            )
        return ranges
    chosen: list[int] = []
    for part in text.split(","):
        first, colon, last = part.partition(":")
        numbers = [number.strip() for number in ((first, last) if colon else (first,))]
        if not all(number.isdecimal() and len(number) < 10 for number in numbers):
            raise PlanError(
                f"{text!r} does not say what to compute again{suggest(text, RECOMPUTE_NAMES)}; expected "
                f"{', '.join(RECOMPUTE_NAMES)}, or layers as 0:12 or 0:12,20:24."
            )
        start, stop = int(numbers[0]), int(numbers[-1]) + (not colon)
        if not start < stop <= len(graph.layers):
            raise PlanError(
                f"Layers {part.strip()} were to be computed again, but the graph has layers 0 to "
                f"{len(graph.layers) - 1}; expected start:stop with start below stop. Choose among them."
            )
        chosen += range(start, stop)
    return recompute_layers(graph, sorted(set(chosen)))


@lru_cache(maxsize=32)
def with_recompute(graph: Graph, ranges: Ranges) -> Graph:
    """The graph with these ranges computed again; blocks of layers of which other parts are have another name."""
    ranges = tuple(sorted(ranges))
    if ranges == graph.recompute:
        return graph
    layers = []
    for layer in graph.layers:
        block = layer.block.partition(_AGAIN)[0]
        mine = [f"{a - layer.start}:{b - layer.start}" for a, b in ranges if a < layer.stop and layer.start < b]
        layers.append(replace(layer, block=block + _AGAIN + ",".join(mine) if block and mine else block))
    return replace(graph, layers=tuple(layers), recompute=ranges)


def check_recompute(graph: Graph) -> None:
    """Raise GraphError unless the graph's ranges lie in it, ascending and apart, and it is for training."""
    if not graph.recompute:
        return
    inside = all(0 <= start < stop <= len(graph.ops) for start, stop in graph.recompute)
    if not inside or any(before[1] > after[0] for before, after in pairwise(graph.recompute)):
        raise GraphError(
            f"Ranges of ops to compute again were given as {list(graph.recompute)[:8]}; expected ascending ranges "
            f"within 0:{len(graph.ops)} that do not overlap. Take them from `recompute_layers`."
        )
    if graph.mode != "training" or any(op.phase == "backward" for op in graph.ops):
        raise GraphError(
            f"Graph {graph.name!r} is for inference or holds its own backward, so nothing can be computed again in it. "
            "Capture the model alone, for training."
        )


def computed_again(graph: Graph, start: int, stop: int) -> range:
    """The ops of a range that run again: up to the last one that makes or keeps a value that their backward reads."""
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


def read_from_outside(graph: Graph, start: int, stop: int) -> set[int]:
    """Storages of values that a range reads and does not make: all that is kept of it until it runs again."""
    ops = graph.ops[start:stop]
    made = {i for op in ops for i in op.outputs}
    read = {i for op in ops for i in op.inputs} - made
    return {graph.tensors[i].storage for i in read if graph.tensors[i].role == "activation"}
