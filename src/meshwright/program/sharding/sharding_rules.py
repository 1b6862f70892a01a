"""The rules by which ops are split on each mesh axis, for any captured graph: no rule uses the name of a module.

tensor     a product with a parameter is row-parallel if its other input is split along the summed dim. It is
           column-parallel if all readers can use a part of its output, down to another product, attention or loss.
           A table of many rows is split by rows. Any other op is split as its inputs are. Partial sums are all-reduced,
           or reduce-scattered over tokens (sequence parallelism)
context    the tokens of all inputs are split, and all ops follow; attention reads whole keys and values
expert     every rank computes different samples. Products with a matrix per expert, batched or grouped (`expert_ops`),
           are split over the experts, and tables by the user's placements; partial sums are scattered over the samples
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from meshwright.program.sharding.axis_facts import UNEVEN_FROM, AxisGraph, divides
from meshwright.program.sharding.dims import OpSplit, find_label
from meshwright.program.sharding.expert_ops import ROWS, check_experts
from meshwright.program.sharding.propagate import AxisRule, Place, PropagationState, arriving, follow
from meshwright.program.sharding.sharded import MESH
from meshwright.spec import FLOAT_DTYPES, Op, OpPlacement, PlanError, Sharding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from meshwright.spec.exchange import Axis


# A tensor split at (dim, parts).
_Piece = tuple[int, int, int]


class _Walk(NamedTuple):
    """The tensors reached from op ``source``, and other tensors that must be split in the same way."""

    state: PropagationState
    source: int
    reached: dict[_Piece, bool]
    needed: set[_Piece]


# The output of a column-parallel product can stay split if every path from there leads, without a reader that needs it
# whole, to a row-parallel product, to a loss over the vocabulary, or out of the graph; and if other inputs of ops on
# the way are split in the same way.
def is_absorbed(state: PropagationState, index: int, split: OpSplit) -> bool:
    """Return whether all readers of op ``index`` can use its outputs split along ``split``, without a gather."""
    walk = _Walk(state, index, {}, set())
    return _outputs_absorbed(walk, index, split) and all(_may_be(walk, piece) for piece in walk.needed)


def _outputs_absorbed(walk: _Walk, index: int, split: OpSplit) -> bool:
    facts = walk.state.facts
    dims = facts.dims[index]
    for tensor, item in zip(facts.graph.ops[index].outputs, dims.outputs, strict=True):
        place = dims.place_in(item, split)
        if place is None:
            continue
        piece = (tensor, *place)
        if piece not in walk.reached:
            walk.reached[piece] = True
            readers = facts.readers.get(tensor, ())
            walk.reached[piece] = all(_reader_absorbs(walk, at, position, place) for at, position in readers)
        if not walk.reached[piece]:
            return False
    return True


def _reader_absorbs(walk: _Walk, index: int, position: int, place: tuple[int, int]) -> bool:
    facts = walk.state.facts
    dims, row = facts.dims[index], facts.rows[index]
    split = dims.split_at(dims.inputs[position], place)
    if split is None or not facts.can_split(index, split):
        return False
    if split.label in dims.inner:
        return True
    others = [(tensor, item) for at, tensor, item in facts.operands(index) if at != position]
    if not dims.in_outputs(split.label):
        weighted = any(facts.is_parameter(tensor) and find_label(item, split.label) for tensor, item in others)
        return row is not None and row.product and weighted
    for tensor, item in others:
        beside = dims.place_in(item, split)
        if beside and not facts.is_parameter(tensor) and facts.requires_gradient(tensor):
            walk.needed.add((tensor, *beside))
    return _outputs_absorbed(walk, index, split)


def _may_be(walk: _Walk, piece: _Piece) -> bool:
    """Whether a tensor is split in this way, or may still be; a tensor that follows from the source must be reached."""
    state, (tensor, *place) = walk.state, piece
    made = state.facts.producer.get(tensor)
    if made is None or piece in walk.reached:
        return made is not None
    if made < len(state.splits):
        return state.places.get(tensor) == tuple(place) or state.facts.input_free[tensor]
    return not state.facts.ancestors[made] >> walk.source & 1


_ATTENTION = "aten.scaled_dot_product_attention"
# Characters that make a name a pattern (`fnmatch`).
_WILD = frozenset("*?[")
# Products that make queries, keys and values at once, or gate and value, are split in each of these parts.
_FUSED = (1, 3, 2)


def rule_for(axis: Axis, sharding: Sharding) -> AxisRule:
    """Return the rule of a mesh axis; it applies the placements of the user's ``sharding`` before its own choices."""
    own = tuple(placement for placement in sharding.placements if placement.axis == axis)
    if axis == "tensor":
        return TensorRule(own, sequence_parallel=sharding.sequence_parallel)
    return ContextRule(own) if axis == "context" else ExpertRule(own)


def is_meant(placement: OpPlacement, op: Op) -> bool:
    """Return whether a placement's pattern matches the op's name or module; False for ops that sharding inserted."""
    named = fnmatchcase(op.name, placement.op) or fnmatchcase(op.module, placement.op)
    return named and not op.kind.startswith(MESH)


@dataclass(frozen=True)
class _OwnFirst:
    """Applies the user's placements before the axis' own rule."""

    own: Sequence[OpPlacement]

    def start(self, facts: AxisGraph) -> dict[int, Place]:  # noqa: ARG002 - nothing is split
        """Return no splits: all graph inputs are whole."""
        return {}

    def scatter(self, state: PropagationState, tensor: int) -> Place:  # noqa: ARG002 - whole
        """Return None: partial sums are all-reduced."""
        return None

    @cached_property
    def _by_name(self) -> dict[str, int]:
        """The last placement of each name without a wildcard; indexed, because a search makes hundreds of them."""
        return {placement.op: i for i, placement in enumerate(self.own) if not _WILD.intersection(placement.op)}

    @cached_property
    def _by_pattern(self) -> list[int]:
        return [i for i, placement in enumerate(self.own) if _WILD.intersection(placement.op)][::-1]

    def _last_meant(self, op: Op) -> int:
        """Return the index of the last placement for an op; -1 without one."""
        if op.kind.startswith(MESH):
            return -1
        named = max(self._by_name.get(name, -1) for name in (op.name, op.module))
        return max(named, next((i for i in self._by_pattern if i > named and is_meant(self.own[i], op)), -1))

    def is_given(self, facts: AxisGraph, index: int) -> bool:
        """Return whether a placement of the user specifies the split of op ``index``."""
        return self._last_meant(facts.graph.ops[index]) >= 0

    def choose(self, state: PropagationState, index: int) -> OpSplit | None:
        """Return the split of op ``index``: that of the user's last matching placement, else that of the axis' rule.

        Raises PlanError if the op cannot be split as the placement requires.
        """
        last = self._last_meant(state.facts.graph.ops[index])
        return self.choose_by_rule(state, index) if last < 0 else _own_split(state.facts, index, self.own[last])

    def choose_by_rule(self, state: PropagationState, index: int) -> OpSplit | None:
        """Return the split of op ``index``, which has no placement of the user: that of its inputs."""
        return follow(state, index)


@dataclass(frozen=True)
class TensorRule(_OwnFirst):
    """Tensor parallelism as in Megatron-LM, derived from the shapes of matrix products instead of module names."""

    sequence_parallel: bool = False

    def choose_by_rule(self, state: PropagationState, index: int) -> OpSplit | None:
        """Return a row-parallel or column-parallel split of a matrix product, else the split of the op's inputs.

        Raises PlanError if the axis's size does not divide the heads of an attention.
        """
        facts = state.facts
        row = facts.rows[index]
        if row is None or not row.product:
            _check_heads(facts, index)
            return follow(state, index)
        return _rows(state, index) or _table_rows(facts, index) or _columns(state, index) or follow(state, index)

    def scatter(self, state: PropagationState, tensor: int) -> Place:
        """Return the place of the tokens, the dim before the last, with sequence parallelism; None without it.

        If that dim merges samples and tokens, the tokens of each sample are split. The merged dim is split as a whole
        instead if the readers can continue only with that split, as where tokens come before samples.
        """
        facts, shape = state.facts, state.facts.graph.tensors[tensor].shape
        if not self.sequence_parallel or len(shape) < 2 or not divides(shape[-2], facts.size):
            return None
        place = len(shape) - 2
        if not shape[-2].per_sample:
            return (place, 1) if shape[-2].fixed > 1 else None
        if shape[-2].fixed:
            return None
        ways = [way for way in ((place, facts.samples), (place, 1)) if _goes_on(facts, tensor, way)]
        return ways[0] if ways else (place, facts.samples)


@dataclass(frozen=True)
class ContextRule(_OwnFirst):
    """Context parallelism: the tokens of all inputs are split."""

    def start(self, facts: AxisGraph) -> dict[int, Place]:
        """Return the splits of graph inputs: those of shape (samples, tokens) and an integer dtype, over tokens.

        Raises PlanError if the graph has no attention, or no input whose number of tokens the axis's size divides.
        """
        graph = facts.graph
        if not any(op.kind.startswith(_ATTENTION) for op in graph.ops):
            raise PlanError(
                f"Graph {graph.name!r} has no attention, so it has no context to split; expected context = 1. Give the "
                "ranks to the tensor axis, or to more replicas."
            )
        texts = [i for i in graph.inputs if graph.tensors[i].dtype not in FLOAT_DTYPES and len(facts.shapes[i]) == 2]
        split = [i for i in texts if divides(graph.tensors[i].shape[1], facts.size)]
        if not split:
            shapes = ", ".join(
                f"{graph.tensors[i].name} {list(map(str, graph.tensors[i].shape))}" for i in graph.inputs
            )
            raise PlanError(
                f"context = {facts.size} splits the tokens of the inputs, but no input has a number of tokens that "
                f"this size divides; the inputs are {shapes}. Choose a divisor of the number of tokens."
            )
        return dict.fromkeys(split, (1, 1))


@dataclass(frozen=True)
class ExpertRule(_OwnFirst):
    """Expert parallelism: samples are split, as over replicas, and products with a matrix per expert by expert."""

    def start(self, facts: AxisGraph) -> dict[int, Place]:
        """Return the splits of graph inputs: all over samples.

        Raises PlanError if the graph has no experts, or a number of experts that the axis's size does not divide.
        """
        graph = facts.graph
        counts = {mixture.module: mixture.num_experts for mixture in facts.mixtures}
        for index, op in enumerate(graph.ops):
            for _, size in _expert_labels(facts, index):
                counts[op.module or op.name] = size
        if not (counts or self.own):
            raise PlanError(
                f"Expert parallelism over expert = {facts.size} ranks was requested, but graph {graph.name!r} has no "
                "experts: no grouped product, and no batched product with a matrix per expert. Choose 1, or placements "
                "of its tables."
            )
        for module, count in counts.items():
            check_experts(facts.size, module, count)
        batched = [i for i in graph.inputs if graph.tensors[i].shape and graph.tensors[i].shape[0].per_sample]
        return dict.fromkeys(batched, (0, 1))

    def scatter(self, state: PropagationState, tensor: int) -> Place:
        """Return the place of the samples, dim 0, if the tensor has them and they divide; otherwise None."""
        shape = state.facts.graph.tensors[tensor].shape
        return (0, 1) if shape and shape[0].per_sample and divides(shape[0], state.facts.size) else None

    def choose_by_rule(self, state: PropagationState, index: int) -> OpSplit | None:
        """Return the split over experts of products with a matrix per expert, else the split of the op's inputs.

        Among the inputs' splits, those over samples go first.
        """
        if index in state.facts.sorted_ops:
            return OpSplit(ROWS)
        for label, _ in _expert_labels(state.facts, index):
            return OpSplit(label)
        weights = arriving(state, index)
        return max(
            weights, key=lambda split: (_is_over_samples(state.facts, index, split), weights[split]), default=None
        )


def _goes_on(facts: AxisGraph, tensor: int, place: tuple[int, int]) -> bool:
    """Whether some reader of a tensor can be split as the tensor is."""
    for index, position in facts.readers.get(tensor, ()):
        dims = facts.dims[index]
        split = dims.split_at(dims.inputs[position], place)
        if split and facts.can_split(index, split):
            return True
    return False


def _is_over_samples(facts: AxisGraph, index: int, split: OpSplit) -> bool:
    op, dims = facts.graph.ops[index], facts.dims[index]
    places = ((tensor, dims.place_in(item, split)) for tensor, item in zip(op.outputs, dims.outputs, strict=True))
    return any(place and facts.graph.tensors[tensor].shape[place[0]].per_sample for tensor, place in places)


def _own_split(facts: AxisGraph, index: int, placement: OpPlacement) -> OpSplit | None:
    op, dims = facts.graph.ops[index], facts.dims[index]
    split: OpSplit | None = None
    for where, given, tensors in (
        ("output", placement.output_dim, dims.outputs),
        ("input", placement.input_dim, dims.inputs),
    ):
        if given is None:
            continue
        if tensors and -len(tensors[0]) <= given < len(tensors[0]):
            split = dims.split_at(tensors[0], (given % len(tensors[0]), 1))
        if split is None or not facts.can_split(index, split) or dims.in_outputs(split.label) != (where == "output"):
            raise PlanError(
                f"Op {op.name!r} ({op.kind}) cannot take the placement {placement.op!r}: split along {where}_dim "
                f"{given} over {facts.size} ranks. {_splittable(facts, index)}"
            )
    return split


def _splittable(facts: AxisGraph, index: int) -> str:
    """Return which dims of an op could be split, for messages."""
    dims, found = facts.dims[index], []
    for where, tensors in (("output", dims.outputs[:1]), ("input", dims.inputs[:1])):
        for dim in range(len(tensors[0]) if tensors else 0):
            split = dims.split_at(tensors[0], (dim, 1))
            if split and facts.can_split(index, split) and dims.in_outputs(split.label) == (where == "output"):
                found.append(f"{where}_dim {dim}")
    return f"It can be split along {' or '.join(found)}." if found else "It cannot be split: leave the placement out."


def _check_heads(facts: AxisGraph, index: int) -> None:
    """Raise PlanError for attention whose heads the ranks of the tensor axis do not divide."""
    op = facts.graph.ops[index]
    if not op.kind.startswith(_ATTENTION):
        return
    for tensor, what in zip(op.inputs, ("heads", "heads of keys", "heads of values"), strict=False):
        heads = facts.shapes[tensor][-3] if len(facts.shapes[tensor]) > 3 else 1
        if heads > 1 and heads % facts.size:
            raise PlanError(
                f"tensor = {facts.size} cannot split attention {op.name!r} ({op.module}), which has {heads} {what}; "
                f"expected a divisor of {heads}. Choose such a number of ranks."
            )


def _parameters(
    facts: AxisGraph, index: int
) -> Iterator[tuple[int, tuple[int, tuple[tuple[tuple[str, int], ...], ...]]]]:
    """Yield position, and tensor with dims, of the matrices among an op's inputs that are parameters."""
    for position, tensor, dims in facts.operands(index):
        if facts.is_parameter(tensor) and len(dims) > 1:
            yield position, (tensor, dims)


def _labels_of(facts: AxisGraph, index: int) -> Iterator[tuple[str, int, bool, bool]]:
    """Yield labels of an op's parameters: label, size, whether another input has it, whether an output has it."""
    others = [dims for _, tensor, dims in facts.operands(index) if not facts.is_parameter(tensor)]
    for _, (_, dims) in _parameters(facts, index):
        for factors in dims:
            for label, size in factors:
                shared = any(find_label(other, label) for other in others)
                yield label, size, shared, facts.dims[index].in_outputs(label)


def _rows(state: PropagationState, index: int) -> OpSplit | None:
    """Return the split along a summed dim of the other input, if that is split along it."""
    facts = state.facts
    for label, _, shared, made in _labels_of(facts, index):
        if not shared or made:
            continue
        for _, tensor, dims in facts.operands(index):
            place = state.places.get(tensor)
            if facts.is_parameter(tensor) or place is None:
                continue
            split = facts.dims[index].split_at(dims, place)
            if split and split.label == label and facts.can_split(index, split):
                return split
    return None


def _table_rows(facts: AxisGraph, index: int) -> OpSplit | None:
    """Return the split over the rows of a table that is looked up by values of the batch."""
    for label, size, shared, made in _labels_of(facts, index):
        big = not shared and not made and size >= UNEVEN_FROM
        if big and facts.can_split(index, OpSplit(label)) and facts.depends_on_batch(facts.graph.ops[index].outputs[0]):
            return OpSplit(label)
    return None


def _columns(state: PropagationState, index: int) -> OpSplit | None:
    """Return the split over columns, if all readers of the output can continue with a part of it."""
    facts = state.facts
    if not facts.depends_on_batch(facts.graph.ops[index].outputs[0]):
        return None
    for label, _, shared, made in _labels_of(facts, index):
        if shared or not made:
            continue
        for parts in _FUSED:
            split = OpSplit(label, parts)
            if facts.can_split(index, split) and is_absorbed(state, index, split):
                return split
    return None


def _expert_labels(facts: AxisGraph, index: int) -> Iterator[tuple[str, int]]:
    """Yield labels of products that an input, a parameter and the output share: one matrix per expert."""
    row, op = facts.rows[index], facts.graph.ops[index]
    if row is not None and row.product and _is_batched(op):
        for label, size, shared, made in _labels_of(facts, index):
            if shared and made:
                yield label, size


def _is_batched(op: Op) -> bool:
    return op.kind.startswith(("aten.bmm", "aten.baddbmm", "aten.matmul"))
