"""Dims of operators whose equation follows from their attributes: views, reductions over given dims, joins, ...

Each function takes a call and yields the labelled dims of its inputs and outputs. A label that begins with a capital
cannot be split; a dim of size one has no label, because it is broadcast.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Dim = tuple[tuple[str, int], ...]
Shape = tuple[int, ...]
Dims = tuple[Dim, ...]
Found = tuple[list[Dims], list[Dims]] | tuple[list[Dims], list[Dims], frozenset[str]]


class Call(NamedTuple):
    """An op: its operator, attributes, and the shapes of its inputs and outputs."""

    operator: str
    attributes: dict[str, str]
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]

    def number(self, name: str, default: int) -> int:
        """A whole number among the attributes."""
        text = self.attributes.get(name, "")
        return int(text) if re.fullmatch(r"-?\d+", text) else default

    def numbers(self, name: str) -> list[int]:
        """All whole numbers of an attribute."""
        return [int(text) for text in re.findall(r"-?\d+", self.attributes.get(name, ""))]

    def dim(self, name: str = "dim", default: int = 0) -> int:
        """A dim of the first input, counted from the front."""
        return self.number(name, default) % max(len(self.inputs[0]), 1)


def one(label: str, size: int) -> Dim:
    """A dim of one factor; of none where its size is one."""
    return ((label, size),) if size != 1 else ()


def plain(shape: Shape) -> Dims:
    """A label for each dim, from the front."""
    return tuple(one(f"d{i}", size) for i, size in enumerate(shape))


def unknown(call: Call) -> Found:
    """Nothing can be split."""
    return [whole(s, i) for i, s in enumerate(call.inputs)], [whole(s, "out") for s in call.outputs]


def whole(shape: Shape, tag: object) -> Dims:
    """Dims that cannot be split."""
    return tuple(one(f"X{tag}.{i}", size) for i, size in enumerate(shape))


def with_fixed(dims: Dims, fixed: Sequence[int]) -> Dims:
    """The same, some of them not to be split."""
    return tuple(
        tuple((f"X{label}.{size}", size) for label, size in d) if i in fixed else d for i, d in enumerate(dims)
    )


def aligned(shape: Shape, rank: int) -> Dims:
    """Labels of dims that broadcast against those of a tensor of ``rank`` dims."""
    return tuple(one(f"d{i + rank - len(shape)}", size) for i, size in enumerate(shape))


def broadcast(call: Call) -> Found:
    """Inputs and outputs broadcast against each other."""
    rank = max(len(shape) for shape in (*call.inputs, *call.outputs))
    return [aligned(s, rank) for s in call.inputs], [aligned(s, rank) for s in call.outputs]


def along(call: Call) -> Found:
    """Every row along ``dim`` is worked on by itself."""
    fixed = (call.dim(default=-1),)
    return [with_fixed(plain(s), fixed) for s in call.inputs], [with_fixed(plain(s), fixed) for s in call.outputs]


def normed(call: Call) -> Found:
    """The last dims are normalised."""
    shape, count = call.inputs[0], len(call.numbers("normalized_shape"))
    rank = len(shape)
    fixed = range(rank - count, rank)
    weights = [with_fixed(aligned(s, rank), range(len(s))) for s in call.inputs[1:]]
    return [with_fixed(plain(shape), fixed), *weights], [with_fixed(plain(shape), fixed)]


def group_normed(call: Call) -> Found:
    """Channels are normalised in groups, over all places."""
    shape, groups = call.inputs[0], call.number("num_groups", 1)
    channels = (*one("g", groups), *one("Xc", shape[1] // groups))
    dims = (one("d0", shape[0]), channels, *whole(shape[2:], "place"))
    return [dims, *((channels,) for _ in call.inputs[1:])], [dims]


def reduced(call: Call) -> Found:
    """Sums over ``dim``, all dims where none is given; the parts of a sum are summed up."""
    return _reduced(call, fixed=False)


def reduced_whole(call: Call) -> Found:
    """Reductions over ``dim`` whose parts are no sums."""
    return _reduced(call, fixed=True)


def _reduced(call: Call, *, fixed: bool) -> Found:
    shape = call.inputs[0]
    gone = {d % len(shape) for d in call.numbers("dim")} if shape else set()
    gone = gone or set(range(len(shape)))
    dims = plain(shape)
    kept = call.attributes.get("keepdim") == "True"
    left = tuple(() if i in gone else d for i, d in enumerate(dims) if kept or i not in gone)
    return [with_fixed(dims, tuple(gone)) if fixed else dims], [left]


def permuted(call: Call) -> Found:
    """The dims in another order."""
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


def reshaped(call: Call) -> Found:
    """Dims are merged and divided: common factors, from the front."""
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
    """What is left of a shape whose factors are taken from the front."""

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


def divided(call: Call) -> Found:
    """One dim is cut into parts: equal ones are split each by itself."""
    dim = call.dim()
    size, dims = call.inputs[0][dim], plain(call.inputs[0])
    if call.operator == "unbind":
        return [with_fixed(dims, (dim,))], [dims[:dim] + dims[dim + 1 :] for _ in call.outputs]
    count, part = len(call.outputs), call.outputs[0][dim]
    if any(s[dim] != part for s in call.outputs) or part * count != size:
        return [with_fixed(dims, (dim,))], [_put(dims, dim, one(f"Xp{i}", s[dim])) for i, s in enumerate(call.outputs)]
    inner = one("w", part)
    return [_put(dims, dim, (*one("Xn", count), *inner))], [_put(dims, dim, inner) for _ in call.outputs]


def joined(call: Call) -> Found:
    """Inputs beside each other along a dim; equal ones are split each by itself."""
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


def part(call: Call) -> Found:
    """A part along ``dim``, which stays whole unless it is all of it."""
    dim, shape = call.dim(), call.inputs[0]
    dims = plain(shape)
    if call.operator == "select":
        return [with_fixed(dims, (dim,))], [dims[:dim] + dims[dim + 1 :]]
    if shape == call.outputs[0]:
        return [dims], [dims]
    return [with_fixed(dims, (dim,))], [_put(dims, dim, one("Xpart", call.outputs[0][dim]))]


def expanded(call: Call) -> Found:
    """Dims of size one are repeated."""
    rank = len(call.outputs[0])
    return [aligned(call.inputs[0], rank)], [plain(call.outputs[0])]


def repeated(call: Call) -> Found:
    """Each element along ``dim`` several times."""
    dim, times = call.dim(default=-1), call.number("repeats", 1)
    dims = plain(call.inputs[0])
    return [dims], [_put(dims, dim, (*dims[dim], *one("Xr", times)))]


def picked(call: Call) -> Found:
    """Elements at an index along ``dim``; the other dims run beside each other."""
    dim = call.dim()
    dims = [_put(plain(s), dim, one(f"Xs{i}", s[dim])) for i, s in enumerate(call.inputs)]
    if call.operator == "gather":
        index = _put(plain(call.inputs[1]), dim, one("w", call.inputs[1][dim]))
        dims = [dims[0], index]
        same = [a == b for a, b in zip(call.inputs[0], call.inputs[1], strict=True)]
        dims[0] = with_fixed(dims[0], [i for i, equal in enumerate(same) if not equal])
        return dims, [index]
    return dims, [dims[0]]


def selected(call: Call) -> Found:
    """Rows at an index along ``dim``."""
    dim = call.dim()
    dims = plain(call.inputs[0])
    index = one("w", call.inputs[1][0] if call.inputs[1] else 1)
    return [with_fixed(dims, (dim,)), (index,) if call.inputs[1] else ()], [_put(dims, dim, index)]


def changed(call: Call) -> Found:
    """Dims that change their size stay whole."""
    grown = [i for i, (a, b) in enumerate(zip(call.inputs[0], call.outputs[0], strict=True)) if a != b]
    return [with_fixed(plain(call.inputs[0]), grown)], [with_fixed(plain(call.outputs[0]), grown)]


def made(call: Call) -> Found:
    """Values that no input has: each rank makes its own."""
    return [whole(s, i) for i, s in enumerate(call.inputs)], [plain(s) for s in call.outputs]


def matmul(call: Call) -> Found | None:
    """Products of matrices, the dims in front broadcast."""
    left, right = call.inputs
    if min(len(left), len(right)) < 2:
        return None
    rank = max(len(left), len(right))
    tensors = [
        (*aligned(shape, rank)[:-2], one(rows, shape[-2]), one(columns, shape[-1]))
        for shape, rows, columns in ((left, "m", "k"), (right, "k", "n"), (call.outputs[0], "m", "n"))
    ]
    return tensors[:2], tensors[2:]


def convolution(call: Call) -> Found:
    """Channels; places stay whole, and so do channels in groups."""
    return _convolution(call, "io")


def transposed_convolution(call: Call) -> Found:
    """The same with the channels of the weight in the other order."""
    return _convolution(call, "oi")


def _convolution(call: Call, letters: str) -> Found:
    given, weight, result = call.inputs[0], call.inputs[1], call.outputs[0]
    i, o = ("Xi", "Xo") if call.number("groups", 1) != 1 else ("i", "o")
    first, second = (i, o) if letters == "oi" else (o, i)
    source = (one("b", given[0]), one(i, given[1]), *whole(given[2:], "place"))
    kernel = (one(first, weight[0]), one(second, weight[1]), *whole(weight[2:], "kernel"))
    target = (one("b", result[0]), one(o, result[1]), *whole(result[2:], "made"))
    return [source, kernel, *((one(o, s[0]),) for s in call.inputs[2:])], [target]


def recurrent(call: Call) -> Found:
    """Samples; steps and states stay whole."""
    place = 0 if call.attributes.get("batch_first") == "True" else 1

    def state(shape: Shape, tag: str) -> Dims:
        return tuple(one("b", s) if i == 1 else one(f"X{tag}{i}", s) for i, s in enumerate(shape))

    def steps(shape: Shape, tag: str) -> Dims:
        return tuple(one("b", s) if i == place else one(f"X{tag}{i}", s) for i, s in enumerate(shape))

    states = 2 if call.operator == "lstm" else 1
    inputs = [steps(call.inputs[0], "in"), *(state(s, "state") for s in call.inputs[1 : 1 + states])]
    inputs += [whole(s, f"weight{i}") for i, s in enumerate(call.inputs[1 + states :])]
    return inputs, [steps(call.outputs[0], "out"), *(state(s, "state") for s in call.outputs[1:])]


FUNCTIONS: dict[str, Callable[[Call], Found | None]] = {
    function.__name__: function
    for function in (
        along,
        broadcast,
        changed,
        convolution,
        divided,
        expanded,
        group_normed,
        joined,
        made,
        matmul,
        normed,
        part,
        permuted,
        picked,
        recurrent,
        reduced,
        reduced_whole,
        repeated,
        reshaped,
        selected,
        transposed_convolution,
    )
}
