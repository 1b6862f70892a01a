"""Labelled dims (`dims`) of operators that move elements: views, slices, joins, repetitions, selections by an index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.program.sharding.op_signatures import (
    Dim,
    Dims,
    Found,
    OpSignature,
    Shape,
    aligned,
    one,
    plain,
    unknown,
    whole,
    with_fixed,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def permuted(call: OpSignature) -> Found:
    """Return dims of permute, transpose and swapaxes: the input's dims in another order."""
    rank = len(call.inputs[0])
    order = list(range(rank))
    if call.operator == "permute":
        order = [d % rank for d in call.numbers("dims")]
    elif rank > 1:
        names = ("axis0", "axis1") if call.operator == "swapaxes" else ("dim0", "dim1")
        first, second = (call.number(name, i) % rank for i, name in enumerate(names))
        order[first], order[second] = second, first
    dims = plain(call.inputs[0])
    return [dims], [tuple(dims[d] for d in order)]


def reshaped(call: OpSignature) -> Found:
    """Return dims of a reshape: the common factors of both shapes, from the front, get the same labels."""
    left: list[list[tuple[str, int]]] = [[] for _ in call.inputs[0]]
    right: list[list[tuple[str, int]]] = [[] for _ in call.outputs[0]]
    ours, theirs = _Side(call.inputs[0], left), _Side(call.outputs[0], right)
    number = 0
    while ours.more() and theirs.more():
        small, large = (ours, theirs) if ours.rest <= theirs.rest else (theirs, ours)
        if small.rest == 0 or large.rest % small.rest:
            return unknown(call)
        size, label = small.rest, f"d{number}"
        small.take(label, size)
        large.take(label, size)
        number += 1
    return [tuple(map(tuple, left))], [tuple(map(tuple, right))]


class _Side:
    """The remaining factors of a shape, taken from the front."""

    def __init__(self, shape: Shape, dims: list[list[tuple[str, int]]]) -> None:
        self.shape, self.dims, self.place, self.rest = shape, dims, -1, 1

    def more(self) -> bool:
        while self.rest == 1 and self.place + 1 < len(self.shape):
            self.place += 1
            self.rest = self.shape[self.place]
        return self.rest != 1

    def take(self, label: str, size: int) -> None:
        self.dims[self.place].append((label, size))
        self.rest //= size


def divided(call: OpSignature) -> Found:
    """Return dims of split, chunk and unbind; if the parts are equal, each part can be split separately."""
    dim = call.dim()
    size, dims = call.inputs[0][dim], plain(call.inputs[0])
    if call.operator == "unbind":
        return [with_fixed(dims, (dim,))], [dims[:dim] + dims[dim + 1 :] for _ in call.outputs]
    count, part = len(call.outputs), call.outputs[0][dim]
    if any(s[dim] != part for s in call.outputs) or part * count != size:
        return [with_fixed(dims, (dim,))], [_put(dims, dim, one(f"Xp{i}", s[dim])) for i, s in enumerate(call.outputs)]
    inner = one("w", part)
    return [_put(dims, dim, (*one("Xn", count), *inner))], [_put(dims, dim, inner) for _ in call.outputs]


def joined(call: OpSignature) -> Found:
    """Return dims of cat and stack; if the joined inputs are equally large, each can be split separately."""
    count, rank = len(call.inputs), len(call.outputs[0])
    dim = call.number("dim", 0) % rank
    if call.operator == "stack":
        dims = plain(call.inputs[0])
        return [dims] * count, [(*dims[:dim], one("Xn", count), *dims[dim:])]
    sizes, dims = {s[dim] for s in call.inputs}, plain(call.inputs[0])
    if len(sizes) > 1:
        parts = [_put(dims, dim, one(f"Xp{i}", s[dim])) for i, s in enumerate(call.inputs)]
        return parts, [_put(dims, dim, one("Xall", call.outputs[0][dim]))]
    inner = one("w", sizes.pop())
    return [_put(dims, dim, inner)] * count, [_put(dims, dim, (*one("Xn", count), *inner))]


def _put(dims: Dims, dim: int, factors: Dim) -> Dims:
    return (*dims[:dim], factors, *dims[dim + 1 :])


def part(call: OpSignature) -> Found:
    """Return the labels of the dims of select, slice and narrow.

    The dim of the attribute ``dim`` cannot be split unless all of it is taken.
    """
    dim, shape = call.dim(), call.inputs[0]
    dims = plain(shape)
    if call.operator == "select":
        return [with_fixed(dims, (dim,))], [dims[:dim] + dims[dim + 1 :]]
    if shape == call.outputs[0]:
        return [dims], [dims]
    return [with_fixed(dims, (dim,))], [_put(dims, dim, one("Xpart", call.outputs[0][dim]))]


def expanded(call: OpSignature) -> Found:
    """Return dims of expand: dims of size one are repeated and can be split in the output only."""
    rank = len(call.outputs[0])
    return [aligned(call.inputs[0], rank)], [plain(call.outputs[0])]


def repeated(call: OpSignature) -> Found:
    """Return dims of repeat_interleave along the attribute ``dim``."""
    dim, times = call.dim(default=-1), call.number("repeats", 1)
    dims = plain(call.inputs[0])
    return [dims], [_put(dims, dim, (*dims[dim], *one("Xr", times)))]


def picked(call: OpSignature) -> Found:
    """Return dims of gather and scatter along the attribute ``dim``; the other dims correspond to each other."""
    dim = call.dim()
    dims = [_put(plain(s), dim, one(f"Xs{i}", s[dim])) for i, s in enumerate(call.inputs)]
    if call.operator == "gather":
        index = _put(plain(call.inputs[1]), dim, one("w", call.inputs[1][dim]))
        dims = [dims[0], index]
        same = [a == b for a, b in zip(call.inputs[0], call.inputs[1], strict=True)]
        dims[0] = with_fixed(dims[0], [i for i, equal in enumerate(same) if not equal])
        return dims, [index]
    return dims, [dims[0]]


def selected(call: OpSignature) -> Found:
    """Return dims of index_select along the attribute ``dim``, which cannot be split; the index can."""
    dim = call.dim()
    dims = plain(call.inputs[0])
    index = one("w", call.inputs[1][0] if call.inputs[1] else 1)
    return [with_fixed(dims, (dim,)), (index,) if call.inputs[1] else ()], [_put(dims, dim, index)]


def indexed(call: OpSignature) -> Found | None:
    """Return dims of indexing with several index tensors of one shape, in adjacent dims of the source.

    If the shapes allow several positions of the indexed dims, the last position is assumed. Returns None if no position
    fits.
    """
    (source, *indices), (result,) = call.inputs, call.outputs
    shape, left = indices[0], len(source) - len(indices)
    if any(index != shape for index in indices) or len(result) != left + len(shape):
        return None
    for first in range(left, -1, -1):
        behind = len(source) - left + first
        if result == (*source[:first], *shape, *source[behind:]):
            dims = plain(source)
            chosen = tuple(one(f"w{i}", size) for i, size in enumerate(shape))
            given = with_fixed(dims, range(first, behind))
            return [given, *(chosen for _ in indices)], [(*dims[:first], *chosen, *dims[behind:])]
    return None


def changed(call: OpSignature) -> Found:
    """Return dims of operators that change the sizes of some dims (pad); these dims cannot be split."""
    grown = [i for i, (a, b) in enumerate(zip(call.inputs[0], call.outputs[0], strict=True)) if a != b]
    return [with_fixed(plain(call.inputs[0]), grown)], [with_fixed(plain(call.outputs[0]), grown)]


def made(call: OpSignature) -> Found:
    """Return dims of values that do not depend on the inputs (arange, zeros): each rank makes its own part."""
    return [whole(s, i) for i, s in enumerate(call.inputs)], [plain(s) for s in call.outputs]


def made_like(call: OpSignature) -> Found:
    """Return dims of values that take at most the shape of an input (new_empty).

    Dims have the labels of the input where the sizes are equal.
    """
    if len(call.inputs) != 1 or len(call.inputs[0]) != len(call.outputs[0]):
        return made(call)
    differ = [i for i, (a, b) in enumerate(zip(call.inputs[0], call.outputs[0], strict=True)) if a != b]
    return [with_fixed(plain(call.inputs[0]), differ)], [with_fixed(plain(call.outputs[0]), differ)]


FUNCTIONS: dict[str, Callable[[OpSignature], Found | None]] = {
    function.__name__: function
    for function in (
        changed,
        divided,
        expanded,
        indexed,
        joined,
        made,
        made_like,
        part,
        permuted,
        picked,
        repeated,
        reshaped,
        selected,
    )
}
