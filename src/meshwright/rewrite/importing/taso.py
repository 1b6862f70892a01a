"""Read TASO's substitution rules (``graph_subst.pb``), over concat, matmul, add, mul, conv, ReLU and split.

The file is a protobuf message: rules (field 1), each with source operators (1), target operators (2) and mapped outputs
(3). Conventions of TASO's operators (jiazhihao/TASO, ``include/taso/ops.h``): a convolution is padded to "same", and
its number of groups follows from the channels of input and weight. TASO's generator only uses convolutions of one
group, so source convolutions are read that way. A split is the inverse of a concat: on the right side, a tensor is
split at the position that gives both sides the same shapes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.rewrite.calculus import Arithmetic, Indexed
from meshwright.rewrite.expressions import Call, Expression, Formula, names_of
from meshwright.rewrite.importing.records import Record, term
from meshwright.rewrite.operators import operator
from meshwright.rewrite.operators.products import convolve
from meshwright.rewrite.rules import Rule
from meshwright.spec import RewriteError

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_BYTES = 16 * 2**20

_KINDS = {
    3: "conv", 6: "max_pool", 7: "avg_pool", 8: "relu", 9: "sigmoid", 10: "tanh", 12: "concat", 13: "split",
    14: "reshape", 15: "transpose", 16: "add", 17: "mul", 18: "matmul",
}  # fmt: skip
_PARAMETERS = {
    0: "op", 1: "num_inputs", 2: "num_outputs", 3: "group", 4: "kernel_h", 5: "kernel_w", 6: "stride_h", 7: "stride_w",
    8: "pad", 9: "activation", 10: "num_dims", 11: "axis", 12: "order", 13: "outshuffle", 14: "merge_count",
}  # fmt: skip
_RELU = 2
_SAME = 0


@operator
def conv_same(a: Arithmetic, x: Indexed, weight: Indexed, *, stride: tuple[Any, ...]) -> Indexed:
    """Return a convolution of one group with "same" padding (for odd kernels).

    x: (n, c, h, w); weight: (o, c, kh, kw).
    """
    a.same(x.rank, 4, "dims of a convolution's input")
    a.same(x.shape[1], weight.shape[1], "channels of a convolution")
    return _padded_same(a, x, weight, stride, 1)


@operator
def conv_same_grouped(a: Arithmetic, x: Indexed, weight: Indexed, *, stride: tuple[Any, ...]) -> Indexed:
    """Return a grouped convolution with "same" padding (for odd kernels).

    The number of groups is x.shape[1] / weight.shape[1].
    """
    a.same(x.rank, 4, "dims of a convolution's input")
    groups = a.quotient(x.shape[1], weight.shape[1], "channels of a grouped convolution")
    return _padded_same(a, x, weight, stride, groups)


def _padded_same(a: Arithmetic, x: Indexed, weight: Indexed, stride: tuple[Any, ...], groups: Any) -> Indexed:
    padding = tuple(a.quotient(size - 1, 2, "a kernel's odd size") for size in weight.shape[2:])
    return convolve(a, x, weight, None, stride, padding, (1, 1), groups, 2)


def read_taso(path: str | Path, *, grouped: bool = False) -> list[Rule]:
    """Return the rules of TASO's file ``graph_subst.pb``.

    ``grouped``: convolutions on the left side may have several groups, too. Raises RewriteError if the file is not a
    rule file of TASO or is damaged.
    """
    place = Path(path)
    data = place.read_bytes()
    if len(data) > _MOST_BYTES:
        raise RewriteError(f"{place} has {len(data):,} bytes; expected a rule file of at most {_MOST_BYTES:,} bytes.")
    try:
        return [_rule(message, index, place.name, grouped) for index, (_, message) in enumerate(_fields(data))]
    except (IndexError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RewriteError(
            f"{place} is not a rule file of TASO, or is damaged ({type(error).__name__}: {error}); expected a protobuf "
            "file like TASO's graph_subst.pb."
        ) from error


def _rule(message: bytes | int, index: int, source: str, grouped: bool) -> Rule:
    sides: dict[int, list[Record]] = {1: [], 2: []}
    outputs = []
    for number, value in _fields(_bytes(message)):
        if number == 3:
            mapped = _numbers(value)
            outputs.append(((mapped[1], mapped[3]), (mapped[2], mapped[4])))
        else:
            sides[number].append(_record(value))
    left, right, ranks = [], [], {}
    for (from_place, from_output), (to_place, to_output) in outputs:
        left.append(term(sides[1], from_place, from_output, _Built("s", grouped=grouped)))
        right.append(term(sides[2], to_place, to_output, _Built("t", grouped=True)))
    names = {name for side in (*left, *right) for name in names_of(side)}
    dims = {
        record.parameters["num_dims"]
        for record in (*sides[1], *sides[2])
        if "num_dims" in record.parameters and record.kind in ("concat", "split")
    }
    if len(dims) == 1:
        rank = dims.pop()
        ranks = dict.fromkeys(names, rank)
    elif not any(record.kind == "conv" for record in sides[1]):
        ranks = dict.fromkeys(names, 2)
    return Rule(
        name=f"taso-{index}",
        left=tuple(left),
        right=tuple(right),
        ranks=tuple(sorted(ranks.items())),
        source=f"{source}, rule {index}",
    )


def _record(message: bytes | int) -> Record:
    kind, operands, parameters = "", [], {}
    for number, value in _fields(_bytes(message)):
        if number == 1:
            kind = _KINDS[_int(value)]
        elif number == 2:
            held = _numbers(value)
            operands.append((held[1], held[2]))
        else:
            held = _numbers(value)
            parameters[_PARAMETERS[held[1]]] = held[2]
    return Record(kind, tuple(operands), parameters)


class _Built:
    """Builds an operator's expression; ``side`` keeps the letters of splits on both sides distinct."""

    def __init__(self, side: str, *, grouped: bool) -> None:
        self._side = side
        self._convolution = "conv_same_grouped" if grouped else "conv_same"

    def __call__(self, record: Record, operands: list[Expression], output: int, place: int) -> Expression:
        values = record.parameters
        if record.kind == "split":
            if output > 1:
                raise ValueError(f"output {output} of a split that has outputs 0 and 1")
            cut = Formula("", (f"cut_{self._side}{place}",))
            axis = values["axis"]
            end = Formula("", (f"end_{self._side}{place}",))
            attributes = (("axis", axis), ("start", cut if output else 0), ("stop", end if output else cut))
            return Call("slice", tuple(operands), attributes)
        if record.kind == "concat":
            return Call("concat", tuple(operands), (("axis", values["axis"]),))
        if record.kind == "conv":
            if values["pad"] != _SAME:
                raise ValueError(f"a convolution with padding mode {values['pad']}; only {_SAME} ('same') is supported")
            made = Call(self._convolution, tuple(operands), (("stride", (values["stride_h"], values["stride_w"])),))
            return Call("relu", (made,)) if values.get("activation") == _RELU else made
        if record.kind in ("matmul", "add", "mul", "relu"):
            made = Call(record.kind, tuple(operands))
            return Call("relu", (made,)) if values.get("activation") == _RELU else made
        raise ValueError(f"the operator {record.kind!r} is not supported")


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        value: bytes | int
        if key & 7 == 0:
            value, place = _varint(data, place)
        elif key & 7 == 2:
            length, place = _varint(data, place)
            if place + length > len(data):
                raise ValueError("a field is longer than the rest of the file")
            value, place = data[place : place + length], place + length
        else:
            raise ValueError(f"a field has the protobuf wire type {key & 7}; expected 0 or 2")
        yield key >> 3, value


def _varint(data: bytes, place: int) -> tuple[int, int]:
    result = shift = 0
    while shift < 70:
        byte = data[place]
        place += 1
        result |= (byte & 127) << shift
        if byte < 128:
            return result, place
        shift += 7
    raise ValueError("a number has more than 10 bytes")


def _numbers(message: bytes | int) -> dict[int, int]:
    return {number: _signed(_int(value)) for number, value in _fields(_bytes(message))}


def _signed(value: int) -> int:
    value = value - 2**64 if value >= 2**63 else value
    return value - 2**32 if value >= 2**31 else value


def _bytes(value: bytes | int) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where a message was expected")
    return value


def _int(value: bytes | int) -> int:
    if not isinstance(value, int):
        raise ValueError("a message where a number was expected")
    return value
