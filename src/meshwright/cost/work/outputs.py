"""Elements and dtypes of a call's outputs, from its inputs and attributes.

One function per word of the column ``output`` of ``operators.toml``. Checked against the outputs of every op of every
shipped graph, as capture recorded them.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, NamedTuple

from meshwright.cost.work.products import attended, product_sizes, time_steps
from meshwright.spec.units import FLOAT_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshwright.cost.work.calls import OpCall
    from meshwright.cost.work.operators import WorkRow

# Torch's types for Python's numbers.
_FLOAT, _INTEGER = "float32", "int64"
# These return floats for integers (torch, native_functions.yaml: structured unary float functions).
_FLOATING = frozenset({"div", "exp", "log", "sin", "cos", "tanh", "sigmoid", "sqrt", "rsqrt", "reciprocal"})
_A_FLOAT = re.compile(r"-?(?:\d*\.\d*(?:e[+-]?\d+)?|\d+e[+-]?\d+|inf|nan)")
# Arguments of arange with their defaults (torch, native_functions.yaml).
_ARANGE = (("start", "0"), ("end", "0"), ("step", "1"))


class OpOutput(NamedTuple):
    """Elements and dtype of one output."""

    elements: int
    dtype: str


def outputs_of(call: OpCall, operator: WorkRow) -> tuple[OpOutput, ...]:
    """Return the outputs of a call; a view's are counted as if they were memory.

    Raises ArithmeticError, LookupError or ValueError for inputs that do not match the operator.
    """
    return _OUTPUTS[operator.output](call)


def _like(call: OpCall) -> tuple[OpOutput, ...]:
    return (OpOutput(_broadcast(call), _promoted(call)),)


def _first(call: OpCall) -> tuple[OpOutput, ...]:
    return (OpOutput(call.elements(0), call.dtypes[0]),)


def _truth(call: OpCall) -> tuple[OpOutput, ...]:
    return (OpOutput(_broadcast(call), "bool"),)


def _converted(call: OpCall) -> tuple[OpOutput, ...]:
    dtype = call.attributes.get("dtype") or call.dtypes[-1]
    return (OpOutput(call.elements(0), dtype),)


def _product(call: OpCall) -> tuple[OpOutput, ...]:
    m, n, _, count = product_sizes(call)
    return (OpOutput(round(m * n * count), call.dtypes[0]),)


def _attended(call: OpCall) -> tuple[OpOutput, ...]:
    heads, queries, _, _ = attended(call)
    return (OpOutput(heads * queries * call.shapes[2][-1], call.dtypes[0]),)


def _sequence(call: OpCall) -> tuple[OpOutput, ...]:
    steps, batch = time_steps(call)
    states = call.shapes[1]
    sides = 1 + (call.attributes.get("bidirectional") == "True")
    sequence = OpOutput(steps * batch * states[-1] * sides, call.dtypes[0])
    num_states = 2 if call.operator == "lstm" else 1
    return (sequence, *(OpOutput(math.prod(states), call.dtypes[0]) for _ in range(num_states)))


def _loss(call: OpCall) -> tuple[OpOutput, ...]:
    summed = call.attributes.get("reduction", "1") != "0"
    return (OpOutput(1 if summed else call.elements(1), call.dtypes[0]),)


def _reduced(call: OpCall) -> tuple[OpOutput, ...]:
    shape, dims = call.shapes[0], call.listed("dim")
    left = math.prod(shape) // math.prod(shape[dim] for dim in dims) if dims else 1
    dtype = call.attributes.get("dtype", call.dtypes[0])
    if call.operator == "argmax" or (call.operator == "sum" and dtype not in FLOAT_DTYPES):
        dtype = _INTEGER
    return (OpOutput(left, dtype),)


def _top(call: OpCall) -> tuple[OpOutput, ...]:
    shape, (dim,), (k,) = call.shapes[0], call.numbers("dim", 1, -1), call.numbers("k", 1, 1)
    chosen = math.prod(shape) // shape[dim] * k
    return OpOutput(chosen, call.dtypes[0]), OpOutput(chosen, _INTEGER)


def _pooled(call: OpCall) -> tuple[OpOutput, ...]:
    shape = call.shapes[0]
    kernel = call.numbers("kernel_size", 2, 1)
    stride = call.numbers("stride", 2, 1) if call.listed("stride") else kernel
    padding, dilation = call.numbers("padding", 2, 0), call.numbers("dilation", 2, 1)
    up = call.attributes.get("ceil_mode") == "True"
    places = [
        (size + 2 * pad - gap * (window - 1) - 1 + (step - 1) * up) // step + 1
        for size, window, step, pad, gap in zip(shape[-2:], kernel, stride, padding, dilation, strict=True)
    ]
    return (OpOutput(math.prod(shape[:-2]) * math.prod(places), call.dtypes[0]),)


def _resized(call: OpCall) -> tuple[OpOutput, ...]:
    shape, sizes = call.shapes[0], call.listed("output_size")
    if sizes:
        return (OpOutput(math.prod(shape[: len(shape) - len(sizes)]) * math.prod(sizes), call.dtypes[0]),)
    scales = [float(text) for text in re.findall(r"[\d.]+", call.attributes["scale_factors"])]
    grown = (math.floor(size * scale) for size, scale in zip(shape[-len(scales) :], scales, strict=True))
    return (OpOutput(math.prod(shape[: -len(scales)]) * math.prod(grown), call.dtypes[0]),)


def _joined(call: OpCall) -> tuple[OpOutput, ...]:
    return (OpOutput(sum(call.elements(i) for i in range(len(call.shapes))), _promoted(call)),)


def _padded(call: OpCall) -> tuple[OpOutput, ...]:
    shape, pads = list(call.shapes[0]), call.listed("pad")
    for place in range(len(pads) // 2):
        shape[-1 - place] += pads[2 * place] + pads[2 * place + 1]
    return (OpOutput(math.prod(shape), call.dtypes[0]),)


def _repeated(call: OpCall) -> tuple[OpOutput, ...]:
    return (OpOutput(call.elements(0) * math.prod(call.listed("repeats")), call.dtypes[0]),)


def _rows(call: OpCall) -> tuple[OpOutput, ...]:
    return (OpOutput(call.elements(1) * math.prod(call.shapes[0][1:]), call.dtypes[0]),)


def _selected(call: OpCall) -> tuple[OpOutput, ...]:
    shape, (dim,) = call.shapes[0], call.numbers("dim", 1, 0)
    return (OpOutput(math.prod(shape) // shape[dim] * call.elements(1), call.dtypes[0]),)


def _indexed(call: OpCall) -> tuple[OpOutput, ...]:
    # A key does not contain which dims are indexed: assumed are the last ones, with the batch in front.
    indices = len(call.shapes) - 1
    left = math.prod(call.shapes[0][: max(len(call.shapes[0]) - indices, 0)])
    return (OpOutput(left * max(call.elements(i + 1) for i in range(indices)), call.dtypes[0]),)


def _gathered(call: OpCall) -> tuple[OpOutput, ...]:
    return (OpOutput(call.elements(1), call.dtypes[0]),)


def _asked(call: OpCall) -> tuple[OpOutput, ...]:
    given = call.attributes
    if call.operator == "arange":
        start, end, step = (float(given.get(name, default)) for name, default in _ARANGE)
        whole = not any(_A_FLOAT.fullmatch(given.get(name, "")) for name, _ in _ARANGE)
        count = max(math.ceil((end - start) / step), 0)
        return (OpOutput(count, given.get("dtype", _INTEGER if whole else _FLOAT)),)
    if call.operator == "tril_indices":
        rows, columns, offset = (call.numbers(name, 1, 0)[0] for name in ("row", "col", "offset"))
        if rows < 0 or columns < 0:
            raise ValueError(f"{rows} rows and {columns} columns")
        return (OpOutput(2 * _triangle(rows, columns, offset), given.get("dtype", _INTEGER)),)
    dtype = given.get("dtype") or (call.dtypes[0] if call.dtypes else _FLOAT)
    return (OpOutput(math.prod(call.listed("size")) if "size" in given else call.elements(0), dtype),)


def _triangle(rows: int, columns: int, offset: int) -> int:
    """Return the number of places (i, j) of a matrix with j <= i + offset."""
    first = min(max(-offset, 0), rows)  # rows above it are empty
    full = min(max(columns - offset - 1, first), rows)  # and those from it on are full
    slanted = full - first
    return slanted * (first + offset + 1) + slanted * (slanted - 1) // 2 + (rows - full) * columns


def _expanded(call: OpCall) -> tuple[OpOutput, ...]:
    if call.operator == "broadcast_tensors":
        return tuple(OpOutput(_broadcast(call), dtype) for dtype in call.dtypes)
    if call.operator == "expand_as":
        return (OpOutput(call.elements(1), call.dtypes[0]),)
    sizes = call.listed("size")
    shape = (1,) * (len(sizes) - len(call.shapes[0])) + call.shapes[0]
    grown = (old if new == -1 else new for old, new in zip(shape, sizes, strict=True))
    return (OpOutput(math.prod(grown), call.dtypes[0]),)


def _part(call: OpCall) -> tuple[OpOutput, ...]:
    shape, (dim,) = call.shapes[0], call.numbers("dim", 1, 0)
    rest, size = math.prod(shape) // max(shape[dim], 1), shape[dim]
    if call.operator == "select":
        return (OpOutput(rest, call.dtypes[0]),)
    if call.operator == "narrow":
        return (OpOutput(rest * call.numbers("length", 1, size)[0], call.dtypes[0]),)
    start, stop, step = (call.numbers(name, 1, other)[0] for name, other in (("start", 0), ("end", size), ("step", 1)))
    return (OpOutput(rest * len(range(*slice(start, stop, step).indices(size))), call.dtypes[0]),)


def _broadcast(call: OpCall) -> int:
    """Return the elements of the broadcast shape of all inputs."""
    width = max(len(shape) for shape in call.shapes)
    padded = [(1,) * (width - len(shape)) + shape for shape in call.shapes]
    return math.prod(max(sizes) for sizes in zip(*padded, strict=True))


def _promoted(call: OpCall) -> str:
    """Return the promoted dtype of all inputs and numbers (torch's type promotion; among equals the first)."""
    dtypes = call.dtypes[1:] if call.operator == "where" else call.dtypes
    numbers = [text for name, text in call.attributes.items() if name in ("other", "self", "exponent", "min", "max")]
    floats = [dtype for dtype in dtypes if dtype in FLOAT_DTYPES]
    if floats:
        return floats[0]
    if call.operator in _FLOATING or any(_A_FLOAT.fullmatch(text) for text in numbers):
        return _FLOAT
    whole = [dtype for dtype in dtypes if dtype != "bool"]
    return whole[0] if whole else _INTEGER if numbers else "bool"


_OUTPUTS: dict[str, Callable[[OpCall], tuple[OpOutput, ...]]] = {
    "asked": _asked,
    "attended": _attended,
    "converted": _converted,
    "expanded": _expanded,
    "first": _first,
    "gathered": _gathered,
    "indexed": _indexed,
    "joined": _joined,
    "like": _like,
    "loss": _loss,
    "padded": _padded,
    "part": _part,
    "pooled": _pooled,
    "product": _product,
    "reduced": _reduced,
    "repeated": _repeated,
    "resized": _resized,
    "rows": _rows,
    "selected": _selected,
    "sequence": _sequence,
    "top": _top,
    "truth": _truth,
}
