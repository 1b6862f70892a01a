"""Propagate: choose the labelled dim along which each op is split on one mesh axis, and so the layout of every tensor.

Ops are visited in the graph's order. A rule (`AxisRule`) chooses an op's label from the layouts of its inputs. The
op's row of `placements.toml` then determines the layouts that the inputs must have and that the outputs get. Parameters
get the layout that their first reader needs. A partial sum is completed by the op that makes it: all-reduced, or
reduce-scattered over a dim.

Some values are computed split if a reader needs them split: values that depend on parameters alone, such as a table of
positions; values that depend on nothing with a gradient, such as rows looked up by tokens; and values that have an
entry for every sample of a rank but depend on no sample, such as a repeated mask. A value that was repeated or cut out
of another, and that all readers need whole, is computed whole. The ops that make such values are assigned that split,
and the whole graph is propagated again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from meshwright.program.sharding.axis_facts import AxisGraph
from meshwright.program.sharding.dims import OpDims, OpSplit, gradient_is_sum

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwright.program.sharding.op_signatures import Dim

# (dim, parts) along which a tensor is split, None if it is whole.
Place = tuple[int, int] | None
# Each round assigns at least one more op; chains of views over a table of positions are short.
_ROUNDS = 32
# Functions of `views` whose results are cheaper to make from a whole tensor than to gather.
_REPEATS = ("expanded", "repeated", "part")


class AxisRule(Protocol):
    """Protocol: the decisions about the splits of tensors and ops on one mesh axis. `sharding_rules` implements it."""

    def start(self, facts: AxisGraph) -> dict[int, Place]:
        """Return, by tensor id, the place at which each graph input is split; inputs that are left out are whole."""

    def choose(self, state: PropagationState, index: int) -> OpSplit | None:
        """Return the split of op ``index``, None if the op stays whole."""

    def scatter(self, state: PropagationState, tensor: int) -> Place:
        """Return the place at which a completed partial sum is split: reduce-scattered there; None: all-reduced."""

    def is_given(self, facts: AxisGraph, index: int) -> bool:
        """Return whether the user's placements specify the split of op ``index``, which then must not change."""


class PropagationState(NamedTuple):
    """Layouts found so far on one axis.

    ``places``: by tensor id, the (dim, parts) at which the tensor is split, None if it is whole. ``splits``: the split
    of each op, None if it is whole. ``partial``: tensors that are partial sums on each rank.
    """

    facts: AxisGraph
    places: dict[int, Place]
    splits: list[OpSplit | None]
    partial: set[int]

    def wanted(self, index: int) -> list[Place]:
        """Return the place at which each input of op ``index`` must be split for the op's split."""
        dims, row = self.facts.dims[index], self.facts.rows[index]
        reads = len(dims.inputs) if row is None else row.reads
        unread = (self.places.get(tensor) for tensor in self.facts.graph.ops[index].inputs[reads:])
        return [*(dims.place_in(item, self.splits[index]) for item in dims.inputs[:reads]), *unread]

    def sums_gradient(self, index: int, position: int) -> bool:
        """Return whether each rank has only a partial sum of the gradient of the op's input at ``position``."""
        facts, row = self.facts, self.facts.rows[index]
        product = row is not None and row.product
        return facts.requires_gradient(facts.graph.ops[index].inputs[position]) and gradient_is_sum(
            facts.dims[index], position, self.splits[index], product=product
        )


def propagate(facts: AxisGraph, rule: AxisRule) -> PropagationState:
    """Return the place of every tensor and the split of every op on one mesh axis, chosen by ``rule``."""
    told: dict[int, OpSplit | None] = {}
    for _ in range(_ROUNDS):
        state = _propagate(facts, rule, told)
        more = _tell(state, told, rule)
        if not more:
            break
        told |= more
    return state


def _propagate(facts: AxisGraph, rule: AxisRule, told: Mapping[int, OpSplit | None]) -> PropagationState:
    state = PropagationState(facts, dict(rule.start(facts)), [], set())
    for index, op in enumerate(facts.graph.ops):
        split = told[index] if index in told else rule.choose(state, index)
        state.splits.append(split)
        for tensor, place in zip(op.inputs, state.wanted(index), strict=True):
            state.places.setdefault(tensor, place if facts.takes_layout(tensor) else None)
        _place_outputs(state, rule, index, split)
    return state


def _place_outputs(state: PropagationState, rule: AxisRule, index: int, split: OpSplit | None) -> None:
    facts, dims = state.facts, state.facts.dims[index]
    op = facts.graph.ops[index]
    summed = split is not None and not dims.in_outputs(split.label) and split.label not in dims.inner
    for tensor, item in zip(op.outputs, dims.outputs, strict=True):
        # A loss is summed over the ranks only for display, not for a gradient: each rank keeps its own, as in
        # torch, and likewise scalars computed from it.
        numbers = not facts.shapes[tensor] and any(i in state.partial and not facts.shapes[i] for i in op.inputs)
        if summed or numbers:
            state.partial.add(tensor)
        state.places[tensor] = rule.scatter(state, tensor) if summed else dims.place_in(item, split)


def _tell(state: PropagationState, told: Mapping[int, OpSplit | None], rule: AxisRule) -> dict[int, OpSplit | None]:
    """Return ops to reassign: parts are made in parts, and whole values whole, if their readers want them so."""
    facts = state.facts
    found: dict[int, OpSplit | None] = {}
    for index, op in enumerate(facts.graph.ops):
        for tensor, want in zip(op.inputs, state.wanted(index), strict=True):
            made, have = facts.producer.get(tensor), state.places.get(tensor)
            if made is None or made in told or (have is None) == (want is None):
                continue
            if rule.is_given(facts, made):
                continue
            if want is None:
                row = facts.rows[made]
                if row is not None and row.dims in _REPEATS and _is_read_whole(state, tensor):
                    found[made] = None
            elif _is_free(facts, tensor, made, want[0]) and (split := _split_of(facts, made, tensor, want)):
                found[made] = split
    return found


def _is_read_whole(state: PropagationState, tensor: int) -> bool:
    """Whether all readers want a tensor whole and give a whole gradient, which costs no collective."""
    return all(
        state.wanted(index)[position] is None and not state.sums_gradient(index, position)
        for index, position in state.facts.readers[tensor]
    )


def _is_free(facts: AxisGraph, tensor: int, made: int, dim: int) -> bool:
    row = facts.rows[made]
    if facts.own_samples and facts.input_free[tensor] and facts.graph.tensors[tensor].shape[dim].per_sample:
        # A mask for every sample that was repeated.
        return True
    if facts.requires_gradient(tensor):
        read = (i for i in facts.graph.ops[made].inputs if not facts.is_parameter(i))
        return facts.input_free[tensor] or not any(map(facts.requires_gradient, read))
    return row is not None and row.dims == "made" and facts.depends_on_batch(tensor)


def _split_of(facts: AxisGraph, index: int, tensor: int, place: tuple[int, int]) -> OpSplit | None:
    """Return the split of an op that splits one of its outputs at ``place``, None if there is no valid one."""
    dims: OpDims = facts.dims[index]
    item: tuple[Dim, ...] = dims.outputs[facts.graph.ops[index].outputs.index(tensor)]
    split = dims.split_at(item, place)
    return split if split and facts.can_split(index, split) else None


def follow(state: PropagationState, index: int) -> OpSplit | None:
    """Return the split with which most input elements of op ``index`` arrive; None if the op cannot keep any split."""
    weights = arriving(state, index)
    return max(weights, key=lambda split: weights[split], default=None)


def arriving(state: PropagationState, index: int) -> dict[OpSplit, int]:
    """Return the splits of op ``index`` that its inputs have and that it can keep.

    The values are the numbers of input elements that are split in this way.
    """
    facts = state.facts
    weights: dict[OpSplit, int] = {}
    for _, tensor, dims in facts.operands(index):
        if (place := state.places.get(tensor)) and (split := facts.dims[index].split_at(dims, place)):
            weights[split] = weights.get(split, 0) + facts.elements(tensor)
    return {split: weight for split, weight in weights.items() if facts.can_split(index, split)}
