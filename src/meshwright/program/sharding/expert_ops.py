"""Mixtures of experts: find those computed by grouped products (`find_grouped`); check the size of the expert axis."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from meshwright.program.sharding.dims import OpDims
from meshwright.program.sharding.op_signatures import one
from meshwright.program.sharding.placement_table import operator_name
from meshwright.spec import Graph, Op, PlanError

# The label of the sorted choices, and of the experts that they are sorted by.
ROWS = "rows"
PRODUCTS = ("grouped_mm", "_grouped_mm")
_SAME = ("to", "_to_copy", "clone", "contiguous", "alias", "detach")
_COUNTS = ("histc", "bincount")
_BLANK = ("empty_like", "zeros_like")
_PUT = ("index_put", "index_put_", "scatter", "scatter_")
# Matches a size that grows with the batch.
_COUNTS_ROWS = re.compile(r"\bb\b")
# Role of a tensor for the sorted choices; "biases" are rows of a parameter, one for the expert of each choice.
_Kind = Literal["ids", "order", "rows", "biases", "counts", "blank", "inverse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """A mixture of experts: the part of a graph that computes on a router's choices, sorted by expert.

    Tensors are given by id, ops by index. ``ends``: tensor with the last row of each expert. ``moved``: ops that run on
    the rank of the experts, ascending. ``entering`` and ``leaving``: rows that are sent to the experts' ranks, and
    back. ``ids``: sorted expert numbers. ``rows``: all tensors whose first dim is the sorted choices. ``dims``:
    labelled dims of ops that depend on the sort, which `placements.toml` cannot describe.
    """

    module: str
    num_experts: int
    ends: int
    moved: tuple[int, ...]
    entering: tuple[int, ...]
    leaving: tuple[int, ...]
    ids: frozenset[int]
    rows: frozenset[int]
    dims: Mapping[int, OpDims]


# A mixture without capacity computes every matrix of its experts by one product (torch's ``_grouped_mm``; transformers,
# torchtitan): of T tokens with k choices each, the S = k·T choices are sorted by expert, and ``ends`` holds where the
# rows of each expert end.
#
#     ids (S)  ─sort─▶ sorted ids, order ;   tokens[order // k] ─▶ rows (S, ·) ;   histogram(ids) ─cumsum─▶ ends (E)
#     rows ─grouped product(matrices, ends)─▶ ... ─grouped product─▶ rows ;   rows[inverse of order] ─▶ choices
#
# On the expert axis each rank sorts the choices of its own samples. The ops between the first product and the last one,
# including biases that an expert's rows read, run on the rank that has the expert: ``entering`` rows are sent there,
# ``leaving`` ones back, and none is dropped. The number of rows depends on the router: the local graph has the number
# for experts that are chosen equally often.
#
# Any graph is read in this way, by operators and not by names; a grouped product whose rows are sorted in another way
# is refused.
@lru_cache(maxsize=8)
def find_grouped(graph: Graph) -> tuple[Grouped, ...]:
    """Return the mixtures of experts of a graph that use grouped products, in the graph's order.

    Raises PlanError for a grouped product whose groups do not come from choices sorted by expert.
    """
    producer = {tensor: index for index, op in enumerate(graph.ops) for tensor in op.outputs}
    found: dict[int, _Reading] = {}
    for index, op in enumerate(graph.ops):
        if operator_name(op.kind) in PRODUCTS:
            ends = op.inputs[2] if len(op.inputs) == 3 else -1
            if ends not in found:
                found[ends] = _Reading(graph, producer, op, _sort_of(graph, producer, op))
            found[ends].products.append(index)
    readings = {reading.sort: reading for reading in found.values()}
    of: dict[int, _Reading] = {}
    for index, op in enumerate(graph.ops):
        if index in readings:
            of |= dict.fromkeys(op.outputs, readings[index])
            readings[index].start(index)
            continue
        reading = next((of[i] for i in op.inputs if i in of), None)
        if reading is not None:
            of |= dict.fromkeys(reading.read(index), reading)
    return tuple(reading.finish(ends) for ends, reading in found.items())


def _sort_of(graph: Graph, producer: Mapping[int, int], product: Op) -> int:
    """Return the op that sorted the choices from which a product's groups are counted."""
    tensor = product.inputs[2] if len(product.inputs) == 3 else None
    passed = set[str]()
    while tensor is not None:
        index = producer.get(tensor)
        op = graph.ops[index] if index is not None else None
        name = operator_name(op.kind) if op is not None else ""
        if index is not None and name == "sort" and {"cumsum"} < passed and passed & set(_COUNTS):
            return index
        passed.add(name)
        known = op is not None and name in ("cumsum", *_COUNTS, *_SAME)
        tensor = op.inputs[0] if op is not None and known else None
    raise _refuse(product, "takes its groups from something else than the cumulative sum of a histogram of the choices")


def _refuse(op: Op, why: str) -> PlanError:
    return PlanError(
        f"The expert axis cannot split the mixture of experts in {op.module or op.name!r}: op {op.name!r} ({op.kind}) "
        f"{why}. Expected choices that are sorted by expert, grouped products of their rows, and rows put back into "
        "the original order, as in transformers' grouped_mm. Plan with expert = 1."
    )


@dataclass(slots=True)
class _Reading:
    """The roles of the tensors that follow from one sort."""

    graph: Graph
    producer: Mapping[int, int]
    product: Op
    sort: int
    products: list[int] = field(default_factory=list)
    kinds: dict[int, _Kind] = field(default_factory=dict)
    of_rows: list[int] = field(default_factory=list)
    dims: dict[int, OpDims] = field(default_factory=dict)

    def start(self, index: int) -> None:
        """Read the sort itself."""
        op = self.graph.ops[index]
        if len(self.graph.tensors[op.inputs[0]].shape) != 1:
            raise _refuse(op, "sorts a tensor of more than one dim")
        self.kinds |= {op.outputs[0]: "ids", op.outputs[1]: "order"}
        self._label(index)

    def read(self, index: int) -> tuple[int, ...]:
        """Read an op that uses tensors of this sort; return its outputs, () if they are in the original order again."""
        op = self.graph.ops[index]
        kind = self._kind_made(index, op, operator_name(op.kind))
        if kind is None:
            return ()
        self.kinds |= dict.fromkeys(op.outputs, kind)
        return op.outputs

    def _kind_made(self, index: int, op: Op, name: str) -> _Kind | None:
        known = [self.kinds.get(i) for i in op.inputs]
        first = known[0]
        if name in PRODUCTS:
            if known != ["rows", None, "counts"] or not self._is_of_parameter(op.inputs[1]):
                raise _refuse(op, "does not multiply sorted rows with a parameter that has one matrix per expert")
            self._label(index, *op.inputs)
            self.of_rows.append(index)
            return "rows"
        if name == "index" and len(op.inputs) == 2:
            return self._indexed(index, op, first, known[1])
        if name in _COUNTS and first == "ids":
            self._label(index, inner=True)
            return "counts"
        if name in _BLANK and first == "order":
            return "blank"
        if name in _PUT and known[:2] == ["blank", "order"]:
            self._label(index, *op.inputs)
            self._label_range(op)
            return "inverse"
        if name == "argsort" and first == "order":
            self._label(index)
            return "inverse"
        if first in ("ids", "counts", "order") and len(op.inputs) == 1 and name in (*_SAME, "cumsum", "floor_divide"):
            return first
        if all(kind in ("rows", "biases", None) for kind in known):
            is_alone = all(kind == "biases" for kind in known)
            self.of_rows.append(index)
            return "biases" if is_alone else "rows"
        raise _refuse(op, "uses sorted choices in an unsupported way")

    def _indexed(self, index: int, op: Op, source: _Kind | None, chosen: _Kind | None) -> _Kind | None:
        if source == "rows" and chosen == "inverse":
            self._label(index, *op.inputs)
            return None
        if source is None and chosen == "order":
            self._label(index, *op.inputs)
            return "rows"
        if source is None and chosen == "ids" and self._is_of_parameter(op.inputs[0]):
            self._label(index, *op.inputs)
            self.of_rows.append(index)
            return "biases"
        raise _refuse(op, "picks rows by something else than the sorted order or the sorted expert numbers")

    def _is_of_parameter(self, tensor: int) -> bool:
        """Whether a tensor is a parameter, or a view or copy of one, with the experts as its first dim."""
        shape = self.graph.tensors[tensor].shape
        while self.graph.tensors[tensor].role != "parameter":
            made = self.producer.get(tensor)
            if made is None or len(self.graph.ops[made].inputs) != 1:
                return False
            tensor = self.graph.ops[made].inputs[0]
        given = self.graph.tensors[tensor].shape
        return bool(shape and given) and shape[0] == given[0]

    def _label_range(self, op: Op) -> None:
        """Label the range that is put into order, because it counts the choices of a rank, too."""
        made = self.producer.get(op.inputs[2]) if len(op.inputs) == 3 else None
        source = self.graph.ops[made] if made is not None else None
        if made is None or source is None or operator_name(source.kind) != "arange":
            raise _refuse(op, "inverts the sorted order with something else than a range")
        self._label(made)
        self.kinds[source.outputs[0]] = "inverse"

    def _label(self, index: int, *labelled: int, inner: bool = False) -> None:
        """Label the first dim of an op's inputs (all, or those given) and outputs as the sorted choices."""
        op, wanted = self.graph.ops[index], labelled or self.graph.ops[index].inputs
        made = () if inner else op.outputs
        self.dims[index] = OpDims(
            tuple(self._dims_of(i, at, i in wanted) for at, i in enumerate(op.inputs)),
            tuple(self._dims_of(i, f"out{at}", i in made) for at, i in enumerate(op.outputs)),
            inner=frozenset({ROWS}) if inner else frozenset(),
        )

    def _dims_of(self, tensor: int, tag: object, is_labelled: bool) -> tuple[tuple[tuple[str, int], ...], ...]:
        # Labels have the sizes of a batch of one sample: they only say which dims are split.
        sizes = [extent.at(1) for extent in self.graph.tensors[tensor].shape]
        return tuple(
            one(ROWS if at == 0 and is_labelled else f"X{tag}.{at}", size) if at or not is_labelled else ((ROWS, size),)
            for at, size in enumerate(sizes)
        )

    def finish(self, ends: int) -> Grouped:
        """Return the mixture that was read."""
        ops, moved = self.graph.ops, self._moved()
        made = {i for index in moved for i in ops[index].outputs}
        entering = [i for index in moved for i in ops[index].inputs if self.kinds.get(i) == "rows" and i not in made]
        outside = {i for index, op in enumerate(ops) if index > moved[0] and index not in moved for i in op.inputs}
        leaving = [i for index in moved for i in ops[index].outputs if i in outside or i in self.graph.outputs]
        for op in (ops[index] for index in moved):
            if any(_COUNTS_ROWS.search(text) for _, text in op.attributes):
                raise _refuse(op, "has a fixed number of rows, but the router decides this number at run time")
        weights = ops[self.products[0]].inputs[1]
        return Grouped(
            module=self.product.module or self.product.name,
            num_experts=self.graph.tensors[weights].shape[0].fixed,
            ends=ends,
            moved=moved,
            entering=tuple(dict.fromkeys(entering)),
            leaving=tuple(dict.fromkeys(leaving)),
            ids=frozenset(i for i, kind in self.kinds.items() if kind == "ids"),
            rows=frozenset(i for i, kind in self.kinds.items() if kind not in ("counts",)),
            dims=self.dims,
        )

    def _moved(self) -> tuple[int, ...]:
        """Return the products, ops that read or make rows of biases, and the ops between them."""
        kinds, ops = self.kinds, self.graph.ops
        behind: set[int] = set()
        for index in self.of_rows:
            if index in self.products or not behind.isdisjoint(ops[index].inputs):
                behind.update(ops[index].outputs)
        needed: set[int] = set()
        moved: list[int] = []
        for index in reversed(self.of_rows):
            op = ops[index]
            biased = any(kinds.get(i) == "biases" for i in (*op.inputs, *op.outputs))
            between = not needed.isdisjoint(op.outputs) and not behind.isdisjoint(op.inputs)
            if index in self.products or biased or between:
                moved.append(index)
                needed.update(i for i in op.inputs if kinds.get(i) in ("rows", "biases"))
        return tuple(reversed(moved))


def misplaced(
    graph: Graph, mixtures: Sequence[Grouped], places: Mapping[int, tuple[int, int] | None]
) -> Iterator[PlanError]:
    """Yield an error for each mixture of experts in which the sorted rows of different ranks' samples are mixed.

    ``places``: by tensor id, (dim, parts) at which the tensor is split; sorted rows need (0, 1).
    """
    for mixture in mixtures:
        for tensor in sorted(mixture.rows):
            if places.get(tensor) != (0, 1):
                maker = next(op for op in graph.ops if tensor in op.outputs)
                yield _refuse(maker, "mixes the rows of different samples")
                break


# Keys of the number of experts per layer in configurations of transformers 5, which depend on the type of model.
_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "num_routed_experts", "moe_num_experts")


def check_experts(size: int, module: str, num_experts: int) -> None:
    """Raise PlanError if ``size``, the size of the expert axis, does not divide the number of experts of a module."""
    if num_experts % size:
        few = f"fewer experts than ranks: {num_experts}" if num_experts < size else f"{num_experts} experts"
        raise PlanError(
            f"Expert parallelism over expert = {size} ranks was requested, but {module!r} has {few}; expected a "
            f"divisor of {num_experts}. Choose such a number of ranks."
        )


def check_configured_experts(config: Mapping[str, Any], where: str, sizes: Sequence[int]) -> None:
    """Raise PlanError if none of ``sizes`` divides the numbers of experts in a Hugging Face configuration.

    ``where`` names the configuration in the message. A configuration without numbers of experts is accepted; its graph
    is checked later.
    """
    counts = dict(_expert_counts(config))
    errors = []
    for size in sizes:
        try:
            for key, count in counts.items():
                check_experts(size, f"{where}: {key}", count)
        except PlanError as error:
            errors.append(error)
    if errors and len(errors) == len(sizes):
        raise errors[0]


def _expert_counts(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield keys and numbers of experts, including those of a multimodal model's text part."""
    for key in _KEYS:
        count = config.get(key)
        if type(count) is int and count > 1:
            yield key, count
    text = config.get("text_config")
    if isinstance(text, dict):
        yield from ((f"text_config.{key}", count) for key, count in _expert_counts(text))
