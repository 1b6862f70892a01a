"""Recompute (activation checkpointing): ranges of ops that run again in the backward, and ops whose results are kept.

A range ``start:stop`` keeps the values that it reads from outside, and the results of its ops in `Graph.keeps`. When
the backward reaches the end of the range, the other ops of the range run again, up to the last value that their
backward reads. (torch.utils.checkpoint stops early, too; its create_selective_checkpoint_contexts keeps results.)
`read_recompute` parses the words by which users choose what is recomputed.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from meshwright.spec.errors import GraphError, PlanError, suggest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from meshwright.spec.graph import Graph, Op


Ranges = tuple[tuple[int, int], ...]

ATTENTION = ("aten.scaled_dot_product_attention", "aten._scaled_dot_product")
# In the name of a block, separates its own name from its recomputed ranges.
_AGAIN = "+again "


class Recompute(NamedTuple):
    """Ranges of ops that are recomputed, and ops in them whose results are kept, both ascending."""

    ranges: Ranges = ()
    keeps: tuple[int, ...] = ()


def recompute_layers(graph: Graph, layers: Iterable[int]) -> Ranges:
    """Return one range of ops for each of ``layers`` (indices), so that each layer is recomputed separately."""
    return tuple((graph.layers[i].start, graph.layers[i].stop) for i in layers)


def recompute_runs(graph: Graph, kinds: tuple[str, ...]) -> Ranges:
    """Return the maximal ranges of consecutive ops whose kinds start with one of ``kinds``, each within a layer."""
    home = [index for index, layer in enumerate(graph.layers) for _ in range(layer.start, layer.stop)]
    runs = groupby(range(len(graph.ops)), key=lambda op: (home[op], graph.ops[op].kind.startswith(kinds)))
    chosen = (list(ops) for (_, is_chosen), ops in runs if is_chosen)
    return tuple((ops[0], ops[-1] + 1) for ops in chosen)


def with_recompute(graph: Graph, ranges: Iterable[tuple[int, int]], keeps: Iterable[int] = ()) -> Graph:
    """Return the graph with ``ranges`` of ops recomputed, except that the results of the ops ``keeps`` are kept.

    Layers that recompute or keep different ops get different names in `Layer.block`.
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
    """Raise GraphError unless a graph with recomputed ranges is consistent.

    It has to be a training graph whose ranges ascend without overlap, and the results of its ``keeps`` can be kept.
    """
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
            f"The ops whose results are kept are {list(graph.keeps)[:8]}; expected ascending ops within the "
            f"recomputed ranges {list(graph.recompute)[:8]}. Take both from `read_recompute`."
        )
    written = written_storages(graph) if graph.keeps else frozenset()
    for op in graph.keeps:
        if reason := why_not_kept(graph, op, written):
            raise GraphError(
                f"The result of {graph.ops[op].name!r} cannot be kept while the ops around it are recomputed: "
                f"{reason}. Leave it out of `keeps`."
            )


def written_storages(graph: Graph) -> frozenset[int]:
    """Return the storages (tensor ids) to which some op writes in place."""
    written = (graph.tensors[op.inputs[0]].storage for op in graph.ops if op.inputs and op.is_in_place)
    return frozenset(written)


def why_not_kept(graph: Graph, op: int, written: frozenset[int]) -> str:
    """Return the reason why the result of an op cannot be kept inside a recomputed range; "" if it can be kept.

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
    """Return the ops of a range up to the last one that makes or saves a value for the backward of the range.

    A recompute stops there; the range is empty if no op saves anything.
    """
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
    """Return the ops of a range that run again in the backward: those of `passed_again` whose results are not kept."""
    passed = passed_again(graph, start, stop)
    kept = kept_within(graph, start, stop)
    return tuple(passed) if not kept else tuple(op for op in passed if op not in kept)


def kept_within(graph: Graph, start: int, stop: int) -> frozenset[int]:
    """Return the ops of the range ``start:stop`` whose results are kept (`Graph.keeps`)."""
    return frozenset(graph.keeps[bisect_left(graph.keeps, start) : bisect_left(graph.keeps, stop)])


def read_from_outside(graph: Graph, start: int, stop: int) -> set[int]:
    """Return the storages of activations that a range reads but does not make; they are kept for the recompute."""
    ops = graph.ops[start:stop]
    made = {i for op in ops for i in op.outputs}
    read = {i for op in ops for i in op.inputs} - made
    return {graph.tensors[i].storage for i in read if graph.tensors[i].role == "activation"}


RecomputeName = Literal["none", "op", "attention", "full"]
RECOMPUTE_NAMES: tuple[RecomputeName, ...] = get_args(RecomputeName)
OLDER_NAMES = {"selective": "attention"}
_EVERY = re.compile(r"every-([1-9]\d{0,8})")
_LAYERS = re.compile(r"[\d:,]+")
_KEEP, _AT = "keep=", "@"
# A word for some layers, and a list of them separated by commas.
_IN_LAYERS = re.compile(r"([a-z]+)\[([\d:,]+)\]")
_ALL_IN_LAYERS = re.compile(rf"{_IN_LAYERS.pattern}(,{_IN_LAYERS.pattern})*")

# The op kinds of attention after its scores. A dropout alone keeps less in its mask than its input has.
_SCORES = ("aten.softmax", "aten._softmax")
_AFTER_SCORES = ("aten.dropout",)
_VIEWS = ("aten.view", "aten.reshape", "aten.expand", "aten._unsafe_view", "aten.clone", "aten._to_copy", "aten.to.")
_BATCHED = ("aten.bmm", "aten.baddbmm", "aten.matmul")
# Products before and after attention.
_PROJECTIONS = ("aten.linear.", "aten.addmm.", "aten.mm.", "aten.matmul.", "aten.bmm.", "aten.conv", "aten.einsum.")
# Always kept; a product of two matrices is kept every second time.
_ALWAYS_KEPT = ("aten.addmm.", "aten.bmm.", "aten.conv", "aten.einsum.", "aten._scaled_mm.", "aten.topk.")
_MAX = "aten.max.default"
_MATRICES = ("aten.mm.", "aten.matmul.", "aten.linear.")


# The words and their meaning for a graph:
#
#     none          nothing
#     full          every repeated block
#     op            every repeated block, except the results of products and of attention (below)
#     attention     attention alone: where scores are kept, their softmax and its dropout (Korthikanti et al., MLSys
#                   2023, section 5); where one kernel computes it, that op and all between the products before and
#                   after it
#     every-N       each N-th repeated block, as torchtitan's layer-wise selective checkpointing
#     keep=A+B      every repeated block, except the results of ops whose kind or name matches one of the patterns
#     0:12,20:24    these layers
#     op[0:12],full[12:20]   one of the words above except every-N for some layers
#     full@0,op@1:3 one of the words above for some stages, and nothing elsewhere
#
# ``selective`` is an older word for ``attention``. ``op`` keeps what torchtitan's selective policy saves
# (torchtitan/distributed/activation_checkpoint.py, SelectiveAC): results of attention in one kernel, of convolutions,
# of products with a bias or of batches of matrices (aten.addmm, bmm), and of every second plain product (aten.mm), the
# first, the third and so on of each block; also of topk and of the largest value of a tensor. If ops are sharded, the
# results of reduce-scatters and all-to-alls are kept, too (`program.plan_lowering`). torchtitan leaves routers, by
# their name, out of the count of plain products; here they count.
@lru_cache(maxsize=32)
def recompute_choices(graph: Graph) -> dict[RecomputeName, Recompute]:
    """Return the recomputed ranges and kept ops that each of the words none, op, attention and full means for a graph.

    Repeated blocks are the layers that are elements of a list in the model (their names contain a dot).
    """
    blocks = _blocks(graph)
    full = recompute_layers(graph, blocks)
    return {
        "none": Recompute(),
        "op": Recompute(full, tuple(op for block in blocks for op in _costly(graph, block))),
        "attention": Recompute(tuple(sorted((*_score_runs(graph), *_fused_runs(graph))))),
        "full": Recompute(full),
    }


def read_recompute(graph: Graph, text: str, bounds: Sequence[tuple[int, int]] | None = None) -> Recompute:
    """Parse a user's choice of what to recompute into the recomputed ranges and kept ops of a graph.

    The choice is a word (``full``), layers (``0:12``), words for layers (``op[0:12]``) or words for stages
    (``full@0,op@1:3``). Words for stages need ``bounds``, the layers (start, stop) of each stage.

    Raises PlanError for an unknown word, a word that means nothing in this graph, a pattern that matches no op, and a
    stage that does not exist.
    """
    if _AT in text:
        return _read_stages(graph, text, bounds)
    word = OLDER_NAMES.get(text, text)
    if word in RECOMPUTE_NAMES:
        found = recompute_choices(graph)[word]
        if not found.ranges and word != "none":
            lacking = "attention whose scores or result are saved" if word == "attention" else "repeated blocks"
            raise _means_nothing(graph, text, lacking)
        return found
    if every := _EVERY.fullmatch(text):
        blocks, step = _blocks(graph), int(every[1])
        if len(blocks) < step:
            raise _means_nothing(graph, text, f"{step} repeated blocks")
        return Recompute(recompute_layers(graph, blocks[step - 1 :: step]))
    if text.startswith(_KEEP):
        return _read_keep(graph, text)
    if _ALL_IN_LAYERS.fullmatch(text):
        return _read_in_layers(graph, text)
    return Recompute(_read_layers(graph, text))


def name_recompute(graph: Graph, again: Recompute) -> str:
    """Return a text that `read_recompute` parses to ``again``: ``op``, ``every-2``, ``1:3,5``, ``op[0:4],full[4:8]``.

    Returns "" if there is no such text.
    """
    choices = recompute_choices(graph)
    for word, found in choices.items():
        if found == again:
            return word
    place = {(layer.start, layer.stop): index for index, layer in enumerate(graph.layers)}
    if not all(item in place for item in again.ranges):
        return ""
    layers, blocks = [place[item] for item in again.ranges], _blocks(graph)
    if not again.keeps:
        step = blocks.index(layers[0]) + 1 if layers[0] in blocks else 0
        return f"every-{step}" if step and layers == blocks[step - 1 :: step] else _say_layers(layers)
    # A block without kept results is recomputed as a whole, unless its ops have nothing to keep.
    kept = set(again.keeps)
    words = {
        i: "op" if kept.intersection(range(graph.layers[i].start, graph.layers[i].stop)) else "full" for i in layers
    }
    named = ",".join(
        f"{word}[{_say_layers([i for i in layers if words[i] == word])}]"
        for word in dict.fromkeys(words[i] for i in layers)
    )
    return named if _read_in_layers(graph, named) == again else ""


def words_in_layers(text: str) -> tuple[str, ...]:
    """Return the distinct words in a text with words for layers: ``("op", "full")`` for ``op[0:12],full[12:20]``.

    Plain layers (``0:12``) and ``every-2`` give ``("full",)``; texts of other forms give ().
    """
    if _LAYERS.fullmatch(text) or _EVERY.fullmatch(text):
        return ("full",)
    return (
        tuple(dict.fromkeys(match[1] for match in _IN_LAYERS.finditer(text))) if _ALL_IN_LAYERS.fullmatch(text) else ()
    )


def is_alike(text: str) -> bool:
    """Return whether a text treats all equal blocks of the model alike (a single word, or ``keep=...``)."""
    return text in (*RECOMPUTE_NAMES, *OLDER_NAMES) or (text.startswith(_KEEP) and not is_by_stage(text))


def words_of(text: str) -> tuple[str, ...]:
    """Return the distinct recompute words in a text with words for stages, and ``none``; for other texts, the text.

    ``none`` applies to the stages that the text does not name.
    """
    if not is_by_stage(text):
        return (text,)
    return tuple(dict.fromkeys((*(part[0] for part in _parts_by_stage(text)), "none")))


def is_by_stage(text: str) -> bool:
    """Return whether a text has words for stages (``full@0``), so that its meaning depends on the cuts of the model."""
    return _AT in text


def num_named_stages(text: str) -> int:
    """Return the least number of stages with which all stages that a text names exist."""
    return max(stop for _, _, stop in _parts_by_stage(text))


def word_of_first(text: str) -> str:
    """Return the word for the lowest stage that a text with words for stages names; other texts unchanged."""
    return min(_parts_by_stage(text), key=lambda part: part[1])[0] if is_by_stage(text) else text


def _means_nothing(graph: Graph, text: str, lacking: str) -> PlanError:
    return PlanError(
        f"{text!r} was given as what to recompute, but graph {graph.name!r} has no {lacking}. Name layers, as "
        "0:12, or leave this choice out."
    )


def _blocks(graph: Graph) -> list[int]:
    return [index for index, layer in enumerate(graph.layers) if "." in layer.name]


def _costly(graph: Graph, block: int) -> Iterator[int]:
    """The ops of a block whose results torchtitan's policy saves."""
    layer, matrices, written = graph.layers[block], 0, written_storages(graph)
    for index in range(layer.start, layer.stop):
        op = graph.ops[index]
        is_plain = op.kind.startswith(_MATRICES) and _multiplies_matrices(graph, op)
        matrices += is_plain
        is_kept = op.kind.startswith((*ATTENTION, *_ALWAYS_KEPT, *_MATRICES)) or op.kind == _MAX
        if is_kept and not (is_plain and matrices % 2 == 0) and not why_not_kept(graph, index, written):
            yield index


def _multiplies_matrices(graph: Graph, op: Op) -> bool:
    """Whether torch computes a product by aten.mm: with a matrix, without a bias."""
    return len(op.inputs) == 2 and len(graph.tensors[op.inputs[1]].shape) == 2


def _score_runs(graph: Graph) -> Iterator[tuple[int, int]]:
    runs = recompute_runs(graph, (*_SCORES, *_AFTER_SCORES))
    return ((start, stop) for start, stop in runs if _has_scores(graph, start))


def _has_scores(graph: Graph, op: int) -> bool:
    """Whether an op is a softmax whose result weighs values in a product; the softmax of a router is not."""
    if not graph.ops[op].kind.startswith(_SCORES):
        return False
    weights = set(graph.ops[op].outputs)
    for reader in graph.ops[op + 1 :]:
        if weights.intersection(reader.inputs):
            if reader.kind.startswith(_BATCHED):
                return True
            if reader.kind.startswith((*_AFTER_SCORES, *_VIEWS)):
                weights.update(reader.outputs)
    return False


def _fused_runs(graph: Graph) -> Iterator[tuple[int, int]]:
    """Attention in one op, from after the product before it to the product after it, within a layer."""
    for layer in graph.layers:
        ops = range(layer.start, layer.stop)
        attending = [op for op in ops if graph.ops[op].kind.startswith(ATTENTION)]
        edges = [layer.start - 1, *(op for op in ops if graph.ops[op].kind.startswith(_PROJECTIONS)), layer.stop]
        runs = {(max(e for e in edges if e < op) + 1, min(e for e in edges if e > op)) for op in attending}
        yield from sorted(runs)


def _read_keep(graph: Graph, text: str) -> Recompute:
    patterns = [pattern.strip() for pattern in text.removeprefix(_KEEP).split("+")]
    if not all(patterns):
        raise PlanError(
            f"{text!r} names no op whose result is kept. Give kinds or names separated by plus signs, as "
            "keep=aten.linear+aten.scaled_dot_product*."
        )
    blocks = _blocks(graph)
    if not blocks:
        raise _means_nothing(graph, text, "repeated blocks")
    ops = [op for block in blocks for op in range(graph.layers[block].start, graph.layers[block].stop)]
    written, found = written_storages(graph), set()
    for pattern in patterns:
        matching = [op for op in ops if _matches(graph.ops[op], pattern)]
        if not matching:
            kinds = list(dict.fromkeys(_short(graph.ops[op].kind) for op in ops))
            raise PlanError(
                f"{pattern!r} was given after keep=, but no op in the repeated blocks of graph {graph.name!r} has such "
                f"a kind or name{suggest(pattern, kinds)}. Give kinds or patterns of kinds separated by plus signs, as "
                "keep=aten.linear+aten.scaled_dot_product*."
            )
        reasons = {op: why_not_kept(graph, op, written) for op in matching}
        if all(reasons.values()):
            op, reason = next(iter(reasons.items()))
            raise PlanError(
                f"{pattern!r} was given after keep=, but the result of {graph.ops[op].name!r} cannot be kept: "
                f"{reason}. Leave the pattern out."
            )
        found |= {op for op, reason in reasons.items() if not reason}
    return Recompute(recompute_layers(graph, blocks), tuple(sorted(found)))


def _matches(op: Op, pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in (op.kind, _short(op.kind), op.name))


def _short(kind: str) -> str:
    """An operator's name without its overload."""
    return ".".join(kind.split(".")[:2])


def _read_layers(graph: Graph, text: str) -> tuple[tuple[int, int], ...]:
    chosen: list[int] = []
    for part in text.split(","):
        try:
            start, stop = _read_numbers(part)
        except ValueError:
            known = (*RECOMPUTE_NAMES, *OLDER_NAMES, "every-2", _KEEP)
            raise PlanError(
                f"{text!r} is not a choice of what to recompute{suggest(text, known)}; expected "
                f"{', '.join(RECOMPUTE_NAMES)}, every-2 (each second block), keep=KIND+KIND (blocks without these "
                "ops), layers as 0:12 or 0:12,20:24, words for layers as op[0:12], or for stages as full@0,op@1:3."
            ) from None
        if not start < stop <= len(graph.layers):
            raise PlanError(
                f"Layers {part.strip()} were given as what to recompute, but the graph has layers 0 to "
                f"{len(graph.layers) - 1}; expected start:stop with start below stop. Choose among these layers."
            )
        chosen += range(start, stop)
    return recompute_layers(graph, sorted(set(chosen)))


def _say_layers(layers: Sequence[int]) -> str:
    """Ascending layers as text, runs of them as ``3:8``."""
    runs = [
        [value for _, value in group] for _, group in groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])
    ]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}:{run[-1] + 1}" for run in runs)


def _read_in_layers(graph: Graph, text: str) -> Recompute:
    found, seen = Recompute(), set[int]()
    for match in _IN_LAYERS.finditer(text):
        ranges = _read_layers(graph, match[2])
        starts = {start for start, _ in ranges}
        if seen & starts:
            raise PlanError(f"{text!r} chooses what layers recompute, but names a layer twice. Name each at most once.")
        seen |= starts
        for start, stop in ranges:
            more = _within(graph, match[1], start, stop)
            found = Recompute(found.ranges + more.ranges, found.keeps + more.keeps)
    return Recompute(tuple(sorted(found.ranges)), tuple(sorted(found.keeps)))


def _read_numbers(text: str) -> tuple[int, int]:
    """``3`` or ``3:5`` as start and stop. Raises ValueError for anything else."""
    first, colon, last = text.partition(":")
    numbers = [number.strip() for number in ((first, last) if colon else (first,))]
    if not all(number.isdecimal() and len(number) < 10 for number in numbers):
        raise ValueError(text)
    return int(numbers[0]), int(numbers[-1]) + (not colon)


def _parts_by_stage(text: str) -> list[tuple[str, int, int]]:
    """Word, first stage and the stage after the last one, for each part of ``full@0,op@1:3``."""
    found, seen = [], set[int]()
    for part in text.split(","):
        word, _, stages = part.strip().rpartition(_AT)
        try:
            start, stop = _read_numbers(stages)
        except ValueError:
            start, stop = 0, 0
        if not word or start >= stop or _AT in word or ":" in word or word.isdecimal():
            raise PlanError(
                f"{part.strip()!r} in {text!r} is not a choice of what stages recompute; expected a word, @ and a "
                "stage or a range of stages, separated by commas, as full@0,op@1:3. Or give one word for all stages."
            )
        twice = seen.intersection(range(start, stop))
        if twice:
            raise PlanError(
                f"{text!r} chooses what stages recompute, but names stage {min(twice)} twice. Name each at most once."
            )
        seen.update(range(start, stop))
        found.append((word, start, stop))
    return found


def _read_stages(graph: Graph, text: str, bounds: Sequence[tuple[int, int]] | None) -> Recompute:
    parts = _parts_by_stage(text)
    if bounds is None:
        raise PlanError(
            f"{text!r} names stages, but here the model is not cut into stages. Give one word, or layers as 0:12."
        )
    found = Recompute()
    for word, first, last in parts:
        if last > len(bounds):
            raise PlanError(
                f"{text!r} chooses what stages recompute, but names stage {last - 1}, and the plan has stages 0 to "
                f"{len(bounds) - 1}. Name stages of the plan."
            )
        start, stop = graph.layers[bounds[first][0]].start, graph.layers[bounds[last - 1][1] - 1].stop
        more = _within(graph, word, start, stop)
        found = Recompute(found.ranges + more.ranges, found.keeps + more.keeps)
    return Recompute(tuple(sorted(found.ranges)), tuple(sorted(found.keeps)))


def _within(graph: Graph, word: str, start: int, stop: int) -> Recompute:
    """The meaning of a word for the ops ``start:stop``; a stage may lack such ops."""
    found = read_recompute(graph, word)
    inside: Callable[[int], bool] = range(start, stop).__contains__
    return Recompute(tuple(item for item in found.ranges if inside(item[0])), tuple(filter(inside, found.keeps)))
