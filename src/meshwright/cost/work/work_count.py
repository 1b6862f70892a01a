"""The work of an op from its key in the measurement table: FLOPs, bytes and kernels (`read_work`), sizes and outputs.

A user's measurement table contains keys, not graphs. So that measured rows and queried ops are described in the same
way, both are described by their key (`spec.measurements.op_key`) and the table ``operators.toml``:

    forward    reads the distinct inputs; writes the outputs and values for its backward; a view is only a host call
    backward   for each gradient that is made: reads the output's gradient and the saved values, writes the gradient;
               gradients that share the memory of the output's gradient move no bytes
    accumulate 3 × bytes of the parameters: read the old and the new gradient, write the sum

``sizes`` are logarithms of the sizes that distinguish ops of one family (rows, columns, depth, count). The regressor
measures distances between ops by them. Operators that ``operators.toml`` lacks have no description, so the regressor
does not estimate them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from meshwright.cost.work.op_calls import Amount, Family, OpCall, WorkRow, find_operator, parameter_places, read_call
from meshwright.spec import DTYPE_BYTES, FLOAT_DTYPES
from meshwright.spec.graph import MAX_GRAPH_BYTES, MAX_GRAPH_FLOPS

if TYPE_CHECKING:
    from collections.abc import Callable


# (m, n, k, count): the sizes that distinguish ops of one family.
Sizes = tuple[float, float, float, float]
Described = tuple[Amount, Amount, Sizes]

# Products of attention's backward over the two of its forward: gradients of values, probabilities, queries and keys,
# and the scores again if they are not stored (Dao et al. 2022). Torch stores them with dropout.
ATTENTION_BACKWARD = 2.5
_STORED_ATTENTION_BACKWARD = 2.0
# How often stored scores are written or read, counted in _scaled_dot_product_attention_math
# (aten/src/ATen/native/transformers/attention.cpp): product, softmax, mask, dropout, product; backward: product, mask,
# softmax, the products of queries and keys, that of the values.
_SCORES_FORWARD, _SCORES_BACKWARD = 8, 10
# Weights of the gates come after the sequence and the states.
_FIRST_WEIGHT = 3


# Sizes and work of the passes:
#
#     product       2·m·n·k FLOPs for each of count products of an (m, k) by a (k, n); a convolution has k = channels ·
#                   kernel; backward: one more product for each input that needs a gradient, a sum for a bias
#     attention     two such products per head, 2.5 times that backward; with dropout, the scores pass through memory,
#                   as torch then computes it step by step
#     recurrent     per time step one product of each weight matrix with the batch
def product_sizes(call: OpCall) -> Sizes:
    """Return (m, n, k, count) of a call that multiplies ``count`` matrices (m, k) by (k, n); also of convolutions."""
    if "conv" in call.operator:
        return _convolution_sizes(call)
    left, right = call.shapes[0], call.shapes[1]
    if call.operator == "linear":
        return math.prod(left[:-1]), right[0], left[-1], 1
    if call.operator == "outer":
        return left[0], right[0], 1, 1
    if call.operator == "grouped_mm":
        # Rows of all groups, as if groups were equal.
        return left[0] / right[0], right[-1], left[-1], right[0]
    if call.operator in ("addmm", "baddbmm"):
        left, right = right, call.shapes[2]
    return left[-2] if len(left) > 1 else 1, right[-1], left[-1], math.prod(left[:-2])


def _convolution_sizes(call: OpCall) -> Sizes:
    given, kernel = call.shapes[0], call.shapes[1]
    spatial = len(kernel) - 2
    stride, dilation = call.numbers("stride", spatial, 1), call.numbers("dilation", spatial, 1)
    padding, groups = call.numbers("padding", spatial, 0), call.numbers("groups", 1, 1)[0]
    if "transpose" in call.operator:
        return math.prod((given[0], *given[2:])), math.prod(kernel[1:]), kernel[0] / groups, groups
    places = [
        max((size + 2 * pad - gap * (window - 1) - 1) // step + 1, 1)
        for size, pad, gap, window, step in zip(given[2:], padding, dilation, kernel[2:], stride, strict=True)
    ]
    return given[0] * math.prod(places), kernel[0] / groups, math.prod(kernel[1:]), groups


def product(call: OpCall, written_bytes: float) -> Described:
    """Return the forward's work, the backward's work and the sizes of a matrix product or convolution.

    ``written_bytes``: bytes of the output.
    """
    m, n, k, count = product_sizes(call)
    first = 1 if call.operator in ("addmm", "baddbmm") else 0
    flops = 2.0 * m * n * k * count
    factors = (first, first + 1)
    moved = written_bytes + sum(call.num_bytes(i) for i in factors)
    biases = [i for i in range(len(call.shapes)) if i not in factors]
    wanted = call.wanted()
    products = sum(i in factors for i in wanted)
    # A convolution's backward includes the bias's sum over values that it has loaded; elsewhere this is a separate op.
    summed = sum(written_bytes + call.num_bytes(i) for i in wanted if i not in factors and "conv" not in call.operator)
    forward = Amount(flops=flops, num_bytes=moved + sum(map(call.num_bytes, biases)), num_kernels=1)
    backward = Amount(flops=flops * products, num_bytes=moved * products + summed, num_kernels=len(wanted))
    return forward, backward, (m, n, k, count)


def attended(call: OpCall) -> tuple[int, int, int, int]:
    """Return the sizes of an attention: heads (times samples), queries, keys, and the width of a head."""
    query, key = call.shapes[0], call.shapes[1]
    return math.prod(query[:-2]), query[-2], key[-2], query[-1]


def drops(call: OpCall) -> bool:
    """Return whether an attention call has dropout."""
    return call.attributes.get("dropout_p", "0.0") != "0.0"


def attention(call: OpCall, written_bytes: float) -> Described:
    """Return the forward's work, the backward's work and the sizes of an attention.

    With dropout it is computed step by step, else by a fused kernel. ``written_bytes``: bytes of the output.
    """
    heads, queries, keys, width = attended(call)
    flops = 4.0 * heads * queries * keys * width
    moved = written_bytes + sum(call.num_bytes(i) for i in range(len(call.shapes)))
    scores = float(heads * queries * keys * DTYPE_BYTES[call.dtypes[0]]) if drops(call) else 0.0
    times = _STORED_ATTENTION_BACKWARD if drops(call) else ATTENTION_BACKWARD
    forward = Amount(flops=flops, num_bytes=moved + _SCORES_FORWARD * scores, num_kernels=1)
    backward = Amount(flops=times * flops, num_bytes=2 * moved + _SCORES_BACKWARD * scores, num_kernels=2)
    return forward, backward, (queries, keys, width, heads)


def time_steps(call: OpCall) -> tuple[int, int]:
    """Return the numbers of time steps and of samples of a recurrent layer's input."""
    first, second = call.shapes[0][:2]
    return (second, first) if call.attributes.get("batch_first") == "True" else (first, second)


def recurrent(call: OpCall, written_bytes: float) -> Described:
    """Return the forward's work, the backward's work and the sizes of a recurrent layer over a sequence.

    Its products run one after the other. ``written_bytes``: bytes of the outputs.
    """
    steps, batch = time_steps(call)
    matrices = [shape for shape in call.shapes[_FIRST_WEIGHT:] if len(shape) == 2]
    flops = 2.0 * steps * batch * sum(math.prod(shape) for shape in matrices)
    moved = written_bytes + sum(call.num_bytes(i) for i in range(len(call.shapes)))
    kernels = steps * max(len(matrices), 1)
    columns = max((shape[0] for shape in matrices), default=1)
    forward = Amount(flops=flops, num_bytes=moved, num_kernels=kernels)
    backward = Amount(flops=2 * flops, num_bytes=2 * moved, num_kernels=2 * kernels)
    return forward, backward, (batch, columns, call.shapes[0][-1], steps)


# Torch's types for Python's numbers.
_FLOAT, _INTEGER = "float32", "int64"
# These return floats for integers (torch, native_functions.yaml: structured unary float functions).
_FLOATING = frozenset({"div", "exp", "log", "sin", "cos", "tanh", "sigmoid", "sqrt", "rsqrt", "reciprocal"})
_A_FLOAT = re.compile(r"-?(?:\d*\.\d*(?:e[+-]?\d+)?|\d+e[+-]?\d+|inf|nan)")
# Arguments of arange with their defaults (torch, native_functions.yaml).
_ARANGE = (("start", "0"), ("end", "0"), ("step", "1"))


class OpOutput(NamedTuple):
    """The number of elements and the dtype of one output of a call."""

    elements: int
    dtype: str


# One function per word of the column ``output`` of ``operators.toml`` (`_OUTPUTS`). Checked against the outputs of
# every op of every shipped graph, as capture recorded them.
def outputs_of(call: OpCall, operator: WorkRow) -> tuple[OpOutput, ...]:
    """Return the elements and dtypes of a call's outputs; those of views are counted like new memory.

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
            raise ValueError(f"tril_indices has {rows} rows and {columns} columns; expected 0 or more of each")
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


# The limit of any op of a graph (`spec.graph`): a key beyond it is damaged.
_MOST = float(max(MAX_GRAPH_BYTES, MAX_GRAPH_FLOPS))
# A size that is not a number: written before keys held the batch's sizes, and now unknown.
_SIZE_OF_BATCH = re.compile(r"\bb\b")
_INDEX_BYTES = DTYPE_BYTES["int64"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpWork:
    """The work of an op, as described by its key.

    ``variant``: operator, family and properties that change its implementation in torch. ``dtype``: that of its first
    floating-point input, "" without one. ``sizes``: log₂ of the four sizes (see the module).
    """

    operator: str
    variant: str
    family: Family
    dtype: str
    sizes: Sizes
    forward: Amount
    backward: Amount
    accumulate: Amount


@lru_cache(maxsize=65536)
def read_work(key: str) -> OpWork | None:
    """Return the work of the op with this key; None if the operator is unknown, or its inputs do not match it."""
    try:
        call = read_call(key)
        return _count(call) if call is not None else None
    except (ArithmeticError, LookupError, ValueError):
        return None  # of a damaged table; its rows are still found by their keys


def _count(call: OpCall) -> OpWork | None:
    operator = find_operator(call.operator, call.attributes, call.dtypes)
    if operator is None or _SIZE_OF_BATCH.search(call.attributes.get("size", "")):
        return None
    outputs = outputs_of(call, operator)
    written = float(sum(item.elements * DTYPE_BYTES[item.dtype] for item in outputs))
    match operator.family:
        case "product" | "convolution":
            forward, backward, sizes = product(call, written)
        case "attention":
            forward, backward, sizes = attention(call, written)
        case "recurrent":
            forward, backward, sizes = recurrent(call, written)
        case _:
            forward, backward, sizes = _traffic(call, operator, outputs, written)
    if any(0 in shape for shape in call.shapes) or max(forward.flops, forward.num_bytes) > _MOST:
        return None
    held = [call.num_bytes(i) for i in parameter_places(call) if call.grads[i]]
    m, n, k, count = (math.log2(max(size, 1.0)) for size in sizes)
    return OpWork(
        operator=call.operator,
        variant="/".join((call.operator, operator.family, *_qualities(call, operator.family))),
        family=operator.family,
        dtype=next((dtype for dtype in call.dtypes if dtype in FLOAT_DTYPES), ""),
        sizes=(m, n, k, count),
        forward=forward,
        backward=backward if any(call.grads) else Amount(),
        accumulate=Amount(num_bytes=3.0 * sum(held), num_kernels=len(held)),
    )


def _qualities(call: OpCall, family: Family) -> list[str]:
    """Return the properties that make an operator take another path through torch."""
    found = []
    if family == "attention":
        found += [
            "dropped" if drops(call) else "fused",
            f"{len(call.shapes)} inputs",
            call.attributes.get("is_causal", ""),
        ]
    if family == "convolution":
        found += ["point" if math.prod(call.shapes[1][2:]) == 1 else "window"]
    if call.dtypes and call.dtypes[0] not in FLOAT_DTYPES:
        found.append("integers")
    wanted = [call.elements(i) for i in call.wanted()]
    if family == "pointwise" and wanted and min(wanted) < max(wanted):
        found.append("broadcast")
    return found


def _traffic(call: OpCall, operator: WorkRow, outputs: tuple[OpOutput, ...], written: float) -> Described:
    """Return the work of ops that read their inputs and write their outputs."""
    count, elements = len(call.shapes), outputs[0].elements
    largest = max((call.elements(i) for i in range(count)), default=elements)
    last = call.shapes[0][-1] if count and call.shapes[0] else 1
    sizes = (largest / max(last, 1), last, max(largest, 1) / max(elements, 1), max(count, 1))
    if operator.family == "view":
        return Amount(num_views=1), _backward(call, operator, outputs, written), sizes
    read = float(sum(call.num_bytes(i) for i in range(count)))
    if operator.reads == "none":
        read = 0.0
    if operator.reads == "rows":
        read += written - call.num_bytes(0)
    made = _made_bytes(call, operator, outputs) if any(call.grads) else 0.0
    forward = Amount(num_bytes=read + written + made, num_kernels=1)
    return forward, _backward(call, operator, outputs, written), sizes


def _backward(call: OpCall, operator: WorkRow, outputs: tuple[OpOutput, ...], written: float) -> Amount:
    """Return the sums over the needed gradients."""
    wanted = _wanted(call, operator)
    made = [i for i in wanted if not operator.passes_on(i, call.elements(i), outputs[0].elements)]
    views = len(wanted) - len(made) if operator.gradient == "viewed" else int(bool(wanted) and not made)
    if not made:
        return Amount(num_views=views)
    read = [_read_bytes(call, operator, outputs, written, place) for place in made]
    moved = (max(read) if operator.together else sum(read)) + sum(call.num_bytes(place) for place in made)
    if operator.gradient == "filled":
        moved += written  # zeros everywhere first, then the part once more
    if operator.between:
        moved += 2 * call.num_bytes(0)
    if operator.keeps[:1] == ("others",):
        # First as large as the output, then summed for broadcast inputs.
        moved += sum(2 * written for place in made if call.elements(place) < outputs[0].elements)
    return Amount(num_bytes=moved, num_kernels=len(made) + bool(operator.between), num_views=views)


def _wanted(call: OpCall, operator: WorkRow) -> list[int]:
    """Return the inputs that get a gradient."""
    if operator.gradient == "none":
        return []
    return [place for place in call.wanted() if operator.wants == "all" or place == 0]


def _read_bytes(call: OpCall, operator: WorkRow, outputs: tuple[OpOutput, ...], written: float, gradient: int) -> float:
    """Return the bytes that the gradient of an input is made from."""
    kept = {place for name in operator.keeps for place in _places(call, name, gradient)}
    read = written + sum(call.num_bytes(place) for place in kept)
    read += written * ("output" in operator.keeps)
    return read + _made_bytes(call, operator, outputs) * ("made" in operator.keeps)


def _places(call: OpCall, name: str, gradient: int) -> tuple[int, ...]:
    """Return the inputs that the gradient of one of them is made from."""
    if name == "others":
        return tuple(i for i in range(len(call.shapes)) if i != gradient)
    places = {"first": 0, "second": 1}
    return (places[name],) if name in places else ()


def _made_bytes(call: OpCall, operator: WorkRow, outputs: tuple[OpOutput, ...]) -> float:
    """Return the bytes that the forward makes only for its backward."""
    if operator.makes == "index":
        return float(outputs[0].elements * _INDEX_BYTES)
    sources = {"first": call.num_bytes(0), "output": outputs[0].elements * DTYPE_BYTES[outputs[0].dtype], "": 0}
    return float(sources[operator.makes])
