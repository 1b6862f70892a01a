"""Sizes of products, convolutions, attention and recurrent layers, and the work of their passes.

product       2·m·n·k FLOPs for each of count products of an (m, k) by a (k, n); a convolution has k = channels ·
              kernel; backward: one more product for each input that needs a gradient, a sum for a bias
attention     two such products per head, 2.5 times that backward; with dropout, the scores pass through memory, as
              torch then computes it step by step
recurrent     per time step one product of each weight matrix with the batch

"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from meshwright.cost.work.amounts import Amount
from meshwright.spec.units import DTYPE_BYTES

if TYPE_CHECKING:
    from meshwright.cost.work.calls import OpCall

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


def product_sizes(call: OpCall) -> Sizes:
    """Return (m, n, k, count) of count products of (m, k) by (k, n)."""
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
    """Return the work of products and convolutions; `addmm` and `baddbmm` have their bias first."""
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
    """Return heads of the batch, queries, keys and the width of a head."""
    query, key = call.shapes[0], call.shapes[1]
    return math.prod(query[:-2]), query[-2], key[-2], query[-1]


def drops(call: OpCall) -> bool:
    """Return whether an attention has dropout."""
    return call.attributes.get("dropout_p", "0.0") != "0.0"


def attention(call: OpCall, written_bytes: float) -> Described:
    """Return the work of fused attention, or step by step with dropout."""
    heads, queries, keys, width = attended(call)
    flops = 4.0 * heads * queries * keys * width
    moved = written_bytes + sum(call.num_bytes(i) for i in range(len(call.shapes)))
    scores = float(heads * queries * keys * DTYPE_BYTES[call.dtypes[0]]) if drops(call) else 0.0
    times = _STORED_ATTENTION_BACKWARD if drops(call) else ATTENTION_BACKWARD
    forward = Amount(flops=flops, num_bytes=moved + _SCORES_FORWARD * scores, num_kernels=1)
    backward = Amount(flops=times * flops, num_bytes=2 * moved + _SCORES_BACKWARD * scores, num_kernels=2)
    return forward, backward, (queries, keys, width, heads)


def time_steps(call: OpCall) -> tuple[int, int]:
    """Return time steps and batch of a recurrent layer; ``batch_first`` says which dim is which."""
    first, second = call.shapes[0][:2]
    return (second, first) if call.attributes.get("batch_first") == "True" else (first, second)


def recurrent(call: OpCall, written_bytes: float) -> Described:
    """Return the work of a recurrent layer over a sequence: its products run one after the other."""
    steps, batch = time_steps(call)
    matrices = [shape for shape in call.shapes[_FIRST_WEIGHT:] if len(shape) == 2]
    flops = 2.0 * steps * batch * sum(math.prod(shape) for shape in matrices)
    moved = written_bytes + sum(call.num_bytes(i) for i in range(len(call.shapes)))
    kernels = steps * max(len(matrices), 1)
    columns = max((shape[0] for shape in matrices), default=1)
    forward = Amount(flops=flops, num_bytes=moved, num_kernels=kernels)
    backward = Amount(flops=2 * flops, num_bytes=2 * moved, num_kernels=2 * kernels)
    return forward, backward, (batch, columns, call.shapes[0][-1], steps)
