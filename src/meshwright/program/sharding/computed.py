"""Dims of operators whose equation follows from shapes and attributes: norms, sums, convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.program.sharding.calls import aligned, one, plain, whole, with_fixed

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshwright.program.sharding.calls import Dims, Found, OpSignature, Shape


def broadcast(call: OpSignature) -> Found:
    """Return dims of inputs and outputs that broadcast against each other."""
    rank = max(len(shape) for shape in (*call.inputs, *call.outputs))
    return [aligned(s, rank) for s in call.inputs], [aligned(s, rank) for s in call.outputs]


def along(call: OpSignature) -> Found:
    """Return dims of an operator on rows along ``dim``; every other dim can be split."""
    fixed = (call.dim(default=-1),)
    return [with_fixed(plain(s), fixed) for s in call.inputs], [with_fixed(plain(s), fixed) for s in call.outputs]


def normed(call: OpSignature) -> Found:
    """Return dims of an operator that normalises the last dims, which stay whole."""
    shape, count = call.inputs[0], len(call.numbers("normalized_shape"))
    rank = len(shape)
    fixed = range(rank - count, rank)
    weights = [with_fixed(aligned(s, rank), range(len(s))) for s in call.inputs[1:]]
    return [with_fixed(plain(shape), fixed), *weights], [with_fixed(plain(shape), fixed)]


def group_normed(call: OpSignature) -> Found:
    """Return dims of a normalisation of channels in groups, over all positions; groups can be split."""
    shape, groups = call.inputs[0], call.number("num_groups", 1)
    channels = (*one("g", groups), *one("Xc", shape[1] // groups))
    dims = (one("d0", shape[0]), channels, *whole(shape[2:], "place"))
    return [dims, *((channels,) for _ in call.inputs[1:])], [dims]


def reduced(call: OpSignature) -> Found:
    """Return dims of sums over ``dim``, by default all dims; parts of a split sum are summed up."""
    return _reduced(call, fixed=False)


def reduced_whole(call: OpSignature) -> Found:
    """Return dims of reductions over ``dim`` that cannot be completed by a sum, so that these dims stay whole."""
    return _reduced(call, fixed=True)


def _reduced(call: OpSignature, *, fixed: bool) -> Found:
    shape = call.inputs[0]
    gone = {d % len(shape) for d in call.numbers("dim")} if shape else set()
    gone = gone or set(range(len(shape)))
    dims = plain(shape)
    kept = call.attributes.get("keepdim") == "True"
    left = tuple(() if i in gone else d for i, d in enumerate(dims) if kept or i not in gone)
    return [with_fixed(dims, tuple(gone)) if fixed else dims], [left]


def matmul(call: OpSignature) -> Found | None:
    """Return dims of products of matrices, with the leading dims broadcast."""
    left, right = call.inputs
    if min(len(left), len(right)) < 2:
        return None
    rank = max(len(left), len(right))
    tensors = [
        (*aligned(shape, rank)[:-2], one(rows, shape[-2]), one(columns, shape[-1]))
        for shape, rows, columns in ((left, "m", "k"), (right, "k", "n"), (call.outputs[0], "m", "n"))
    ]
    return tensors[:2], tensors[2:]


def convolution(call: OpSignature) -> Found:
    """Return dims of a convolution: channels can be split, but not positions, nor channels in groups."""
    return _convolution(call, "io")


def transposed_convolution(call: OpSignature) -> Found:
    """The same with the channels of the weight in the other order."""
    return _convolution(call, "oi")


def _convolution(call: OpSignature, letters: str) -> Found:
    given, weight, result = call.inputs[0], call.inputs[1], call.outputs[0]
    i, o = ("Xi", "Xo") if call.number("groups", 1) != 1 else ("i", "o")
    first, second = (i, o) if letters == "oi" else (o, i)
    source = (one("b", given[0]), one(i, given[1]), *whole(given[2:], "place"))
    kernel = (one(first, weight[0]), one(second, weight[1]), *whole(weight[2:], "kernel"))
    target = (one("b", result[0]), one(o, result[1]), *whole(result[2:], "made"))
    return [source, kernel, *((one(o, s[0]),) for s in call.inputs[2:])], [target]


def recurrent(call: OpSignature) -> Found:
    """Return dims of a recurrent layer: only samples can be split; time steps and states stay whole."""
    place = 0 if call.attributes.get("batch_first") == "True" else 1

    def state(shape: Shape, tag: str) -> Dims:
        return tuple(one("b", s) if i == 1 else one(f"X{tag}{i}", s) for i, s in enumerate(shape))

    def steps(shape: Shape, tag: str) -> Dims:
        return tuple(one("b", s) if i == place else one(f"X{tag}{i}", s) for i, s in enumerate(shape))

    states = 2 if call.operator == "lstm" else 1
    inputs = [steps(call.inputs[0], "in"), *(state(s, "state") for s in call.inputs[1 : 1 + states])]
    inputs += [whole(s, f"weight{i}") for i, s in enumerate(call.inputs[1 + states :])]
    return inputs, [steps(call.outputs[0], "out"), *(state(s, "state") for s in call.outputs[1:])]


FUNCTIONS: dict[str, Callable[[OpSignature], Found | None]] = {
    function.__name__: function
    for function in (
        along,
        broadcast,
        convolution,
        group_normed,
        matmul,
        normed,
        recurrent,
        reduced,
        reduced_whole,
        transposed_convolution,
    )
}
