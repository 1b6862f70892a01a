"""Labelled dims of an op's inputs and outputs (`op_dims`): equal labels correspond, as in an einsum equation.

A dim is written as factors, major to minor, each with a label: 768 columns that are 12 heads of 64 are (h, k). An op
can be split along a label; then every tensor that has the label is split along it. If other labels come before it in
its dim, each of their parts is split separately (`Shard.parts`). Sizes are whole numbers: those that grow with the
batch are computed for a prime number of samples, `SAMPLES`, so that no other size divides them by chance. Functions
such as `normed`, `reduced` and `convolution` return the dims of operators whose equation follows from shapes and
attributes.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from meshwright.program.sharding import views
from meshwright.program.sharding.op_signatures import (
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
from meshwright.program.sharding.placement_table import operator_name, operator_rows

if TYPE_CHECKING:
    from collections.abc import Callable


def broadcast(call: OpSignature) -> Found:
    """Return dims of inputs and outputs that broadcast against each other."""
    rank = max(len(shape) for shape in (*call.inputs, *call.outputs))
    return [aligned(s, rank) for s in call.inputs], [aligned(s, rank) for s in call.outputs]


def along(call: OpSignature) -> Found:
    """Return dims of an operator on whole rows along the attribute ``dim`` (softmax); other dims can be split."""
    fixed = (call.dim(default=-1),)
    return [with_fixed(plain(s), fixed) for s in call.inputs], [with_fixed(plain(s), fixed) for s in call.outputs]


def normed(call: OpSignature) -> Found:
    """Return dims of an operator that normalises the last dims (layer norm); these dims cannot be split."""
    shape, count = call.inputs[0], len(call.numbers("normalized_shape"))
    rank = len(shape)
    fixed = range(rank - count, rank)
    weights = [with_fixed(aligned(s, rank), range(len(s))) for s in call.inputs[1:]]
    return [with_fixed(plain(shape), fixed), *weights], [with_fixed(plain(shape), fixed)]


def group_normed(call: OpSignature) -> Found:
    """Return dims of group normalisation; samples and groups can be split, channels in a group and positions cannot."""
    shape, groups = call.inputs[0], call.number("num_groups", 1)
    channels = (*one("g", groups), *one("Xc", shape[1] // groups))
    dims = (one("d0", shape[0]), channels, *whole(shape[2:], "place"))
    return [dims, *((channels,) for _ in call.inputs[1:])], [dims]


def reduced(call: OpSignature) -> Found:
    """Return dims of sums over the attribute ``dim``, by default over all dims.

    The summed dims can be split: the ranks then hold partial sums.
    """
    return _reduced(call, fixed=False)


def reduced_whole(call: OpSignature) -> Found:
    """Return dims of reductions over the attribute ``dim`` that are not sums (var); these dims cannot be split."""
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
    """Return dims of products of matrices with broadcast leading dims; None if an input has fewer than two dims."""
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
    """Return dims of a convolution: samples and channels can be split, but not positions, nor channels in groups."""
    return _convolution(call, "io")


def transposed_convolution(call: OpSignature) -> Found:
    """Return dims of a transposed convolution, whose weight has input channels before output channels."""
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


_FUNCTIONS = {**FUNCTIONS, **views.FUNCTIONS}
# A prime; tokens times this many samples stay within 63 bits.
SAMPLES = 1_000_003


class OpSplit(NamedTuple):
    """How an op is split: along the dim with ``label``, where each of ``parts`` equal parts is split separately."""

    label: str
    parts: int = 1


class OpDims(NamedTuple):
    """Labelled dims of one op's inputs and outputs.

    Labels in ``fixed`` cannot be split; a split along a label in ``inner`` needs a collective inside the op.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    fixed: frozenset[str] = frozenset()
    inner: frozenset[str] = frozenset()

    def in_outputs(self, label: str) -> bool:
        """Return whether some output has the label.

        If no output has it, a split along the label makes the outputs partial sums on each rank.
        """
        return any(find_label(dims, label) for dims in self.outputs)

    def split_at(self, dims: Dims, place: tuple[int, int]) -> OpSplit | None:
        """Return the split of the op that splits one of its tensors at ``place`` = (dim, parts).

        ``dims`` are the labelled dims of that tensor. Returns None if no split does this.
        """
        dim, parts = place
        before = 1
        found: OpSplit | None = None
        for label, size in dims[dim]:
            if parts % before == 0 and size % (parts // before) == 0:
                found = OpSplit(label, parts // before)
            before *= size
        return None if found is None or found.label in self.fixed else found

    def place_in(self, dims: Dims, split: OpSplit | None) -> tuple[int, int] | None:
        """Return the place (dim, parts) at which a split of the op splits a tensor with labelled dims ``dims``.

        Returns None if the tensor stays whole.
        """
        found = find_label(dims, split.label) if split else None
        return (found[0], found[1] * split.parts) if found and split else None


def gradient_is_sum(dims: OpDims, position: int, split: OpSplit | None, *, product: bool) -> bool:
    """Return whether each rank has only a partial sum of an input's gradient.

    This is so if the input at ``position`` is whole but the op is split. Exception: in a ``product`` that sums over the
    ranks, an input without the summed dim is a bias, which is added on one rank only.
    """
    if split is None or find_label(dims.inputs[position], split.label):
        return False
    return dims.in_outputs(split.label) or split.label in dims.inner or not product


def find_label(dims: Dims, label: str) -> tuple[int, int, int] | None:
    """Return (dim, number of parts before the label in its dim, size of the label) in a tensor with dims ``dims``.

    Returns None if the tensor does not have the label.
    """
    for dim, factors in enumerate(dims):
        parts = 1
        for name, size in factors:
            if name == label:
                return dim, parts, size
            parts *= size
    return None


@lru_cache(maxsize=65536)
def op_dims(
    kind: str, attributes: tuple[tuple[str, str], ...], inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]
) -> OpDims:
    """Return the labelled dims of an op whose inputs and outputs have these shapes.

    If the operator is not in `placements.toml`, or the shapes do not fit its row, all dims are fixed.
    """
    row = operator_rows().get(operator_name(kind))
    call = OpSignature(operator_name(kind), dict(attributes), inputs, outputs)
    if row is None:
        found = None
    elif row.dims:
        found = _FUNCTIONS[row.dims](call)
    else:
        readings = (_read_equation(call, equation) for equation in row.equation.split(";"))
        found = next((reading for reading in readings if reading is not None), None)
    if found is None or [_sizes(dims) for dims in (*found[0], *found[1])] != [*inputs, *outputs]:
        found = unknown(call)
    labels = {label for dims in (*found[0], *found[1]) for factors in dims for label, _ in factors}
    fixed = frozenset(label for label in labels if label[0].isupper())
    inner = frozenset(row.equation.partition("|")[2].split()) if row is not None else frozenset()
    return OpDims(tuple(found[0]), tuple(found[1]), fixed, inner & labels)


def _sizes(dims: Dims) -> Shape:
    return tuple(math.prod(size for _, size in factors) for factors in dims)


def _read_equation(call: OpSignature, equation: str) -> Found | None:
    given, _, made = equation.partition("|")[0].partition("->")
    terms, results = given.split(","), made.split(",")
    if len(call.inputs) > len(terms) or len(call.outputs) != len(results):
        return None
    inputs = [_name(term.strip(), shape) for term, shape in zip(terms, call.inputs, strict=False)]
    outputs = [_name(term.strip(), shape) for term, shape in zip(results, call.outputs, strict=True)]
    if None in inputs or None in outputs:
        return None
    return [dims for dims in inputs if dims is not None], [dims for dims in outputs if dims is not None]


def _name(term: str, shape: Shape) -> Dims | None:
    front, dots, back = term.partition("...")
    rest = len(shape) - len(front) - len(back)
    if rest < 0 or (rest and not dots):
        return None
    letters = [*front, *(f"...{rest - i}" for i in range(rest)), *back]
    return tuple(one(letter, size) for letter, size in zip(letters, shape, strict=True))
