"""Decide whether the output of a column-parallel product can stay split.

It can if every path from there leads, without a reader that needs it whole, to a row-parallel product, to a
loss over the vocabulary, or out of the graph; and if other inputs of ops on the way are split in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from meshwright.program.sharding.dims import find_label

if TYPE_CHECKING:
    from meshwright.program.sharding.dims import OpSplit
    from meshwright.program.sharding.propagate import PropagationState

# A tensor split at (dim, parts).
_Piece = tuple[int, int, int]


class _Walk(NamedTuple):
    """The tensors reached from op ``source``, and other tensors that must be split in the same way."""

    state: PropagationState
    source: int
    reached: dict[_Piece, bool]
    needed: set[_Piece]


def is_absorbed(state: PropagationState, index: int, split: OpSplit) -> bool:
    """Whether all readers of the outputs of op ``index`` can continue with them split along ``split``."""
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
