"""The work of an op from its key in the measurement table: FLOPs, bytes, kernels and the sizes behind them.

A user's table holds keys, not graphs; so that measured rows and queried ops have equal descriptions, both are described
by their key (`spec.measurements.op_key`), and by the table ``operators.toml``:

    forward    reads the distinct inputs, writes the outputs and what it makes for its backward; a view is only a call
    backward   per gradient that is made: reads the output's gradient and what the forward kept, writes it; gradients
               that are passed on move nothing
    accumulate 3 × bytes of the parameters: read the old and the new gradient, write the sum

``sizes`` are logarithms of the sizes that distinguish ops of one family (rows, columns, depth, count); the regressor
measures distances between ops in them. Operators missing in the table have no description: their times are not guessed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from meshwright.cost.work.amounts import Amount
from meshwright.cost.work.calls import parameter_places, read_call
from meshwright.cost.work.operators import find_operator
from meshwright.cost.work.outputs import outputs_of
from meshwright.cost.work.products import attention, drops, product, recurrent
from meshwright.spec.graph_checks import MAX_GRAPH_BYTES, MAX_GRAPH_FLOPS
from meshwright.spec.units import DTYPE_BYTES, FLOAT_DTYPES

if TYPE_CHECKING:
    from meshwright.cost.work.calls import OpCall
    from meshwright.cost.work.operators import Family, WorkRow
    from meshwright.cost.work.outputs import OpOutput
    from meshwright.cost.work.products import Described, Sizes

# The limit of any op of a graph (`spec.graph`): a key beyond it is damaged.
_MOST = float(max(MAX_GRAPH_BYTES, MAX_GRAPH_FLOPS))
# A size that is not a number: written before keys held the batch's sizes, and now unknown.
_SIZE_OF_BATCH = re.compile(r"\bb\b")
_INDEX_BYTES = DTYPE_BYTES["int64"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpWork:
    """An op as its key describes it; ``sizes`` is of shape (4,), in powers of two."""

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
    """Return the work of the op of this key; None if its operator is unknown, or its inputs do not match it."""
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
