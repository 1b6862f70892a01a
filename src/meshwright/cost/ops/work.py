"""What an op does, read from its key in the measurement table alone: FLOPs, bytes, kernels and the sizes behind them.

A table that somebody brings holds keys, not graphs; so that measured rows and asked ops are described alike, both are
described by their key (`spec.measurements.op_key`). Of an op with inputs of e₁, e₂, ... elements and an output of e:

    products          2·m·n·k FLOPs per product of an (m, k) by a (k, n); a convolution has k = channels · kernel;
                      backward: one more product for each input that wants a gradient
    everything else   bytes of the distinct inputs and the output; backward: output's gradient and inputs read, the
                      gradients that are wanted written
    views             nothing but their call; the backward of a partial view fills a gradient

``sizes`` are logarithms of what tells ops of one family apart (rows, columns, depth, count); the regressor measures
distances between ops in them. Operators that no family names have no description: their times are not guessed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from meshwright.spec.graph import MAX_GRAPH_BYTES, MAX_GRAPH_FLOPS
from meshwright.spec.units import DTYPE_BYTES, FLOAT_DTYPES

Family = Literal["product", "convolution", "attention", "recurrent", "norm", "pointwise", "reduction", "copy", "view"]

_NAMES: dict[Family, str] = {
    "product": "linear matmul mm bmm addmm baddbmm outer",
    "convolution": "conv1d conv2d conv3d conv_transpose1d conv_transpose2d convolution",
    "attention": "scaled_dot_product_attention",
    "recurrent": "lstm gru",
    "norm": "layer_norm rms_norm group_norm batch_norm native_layer_norm native_group_norm native_batch_norm",
    "pointwise": "add add_ sub sub_ mul mul_ div div_ relu relu_ gelu silu silu_ tanh sigmoid exp log sin cos pow neg "
    "abs sqrt rsqrt reciprocal clamp where masked_fill masked_fill_ eq ne lt le gt ge leaky_relu hardtanh softplus",
    "reduction": "softmax log_softmax cross_entropy_loss sum mean linalg_vector_norm mse_loss var amax argmax topk "
    "binary_cross_entropy_with_logits cumsum max_pool2d avg_pool2d adaptive_avg_pool2d",
    "copy": "cat stack pad repeat_interleave repeat embedding index index_select gather scatter contiguous clone zeros "
    "ones zeros_like ones_like new_zeros full arange tril_indices upsample_nearest2d upsample_bilinear2d tril triu",
    "view": "view reshape flatten unflatten transpose permute unsqueeze squeeze expand expand_as chunk split "
    "split_with_sizes select slice unbind narrow t detach alias broadcast_tensors dropout to type_as _to_copy identity",
}
_FAMILY_OF: dict[str, Family] = {name: family for family, names in _NAMES.items() for name in names.split()}
# Their backward passes the gradient on, summed only where an input was broadcast (torch, derivatives.yaml).
_PASS_ON = frozenset({"add", "add_", "sub", "sub_"})
# Views of a part: their backward is a copy into a gradient as large as the input (see `cost.traits`).
_PARTIAL = frozenset({"chunk", "split", "split_with_sizes", "select", "slice", "unbind", "narrow"})
# Their backward only looks at the gradient that arrives (torch, derivatives.yaml: narrow, unbind, expand).
_LOOK_BACK = frozenset({"cat", "stack", "sum"})
_LOOKUPS = frozenset({"embedding", "index", "index_select", "gather"})
# Inputs that are parameters wherever the operator is used as a layer.
_FIRST_PARAMETER: dict[Family, int] = {"product": 1, "convolution": 1, "norm": 1, "recurrent": 3}
# Products of two values that the model computes.
_NO_PARAMETERS = frozenset({"bmm", "baddbmm", "matmul", "outer"})
_KEY = re.compile(r"(?P<kind>[^(]+)\((?P<tensors>[^;|]*)(?P<attributes>(?:;[^|]*)?)\|(?P<grads>[01]*)\)", re.DOTALL)
# What no op of a graph reaches (`spec.graph`): a key that says more is damaged.
_MOST = float(max(MAX_GRAPH_BYTES, MAX_GRAPH_FLOPS))
# Products of attention's backward over the two of its forward: gradients of values, probabilities, queries and keys,
# and the scores again where they are not stored (Dao et al. 2022). torch stores them where it drops some.
ATTENTION_BACKWARD = 2.5
_STORED_ATTENTION_BACKWARD = 2.0
# Arguments of arange with their defaults (torch, native_functions.yaml).
_ARANGE = (("start", "0"), ("end", "0"), ("step", "1"))
# A size that is no number: written before keys held those of the batch, which nothing tells any more.
_SIZE_OF_BATCH = re.compile(r"\bb\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """What one pass of an op does."""

    flops: float = 0.0
    num_bytes: float = 0.0
    num_kernels: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpWork:
    """An op as its key describes it; ``sizes`` is of shape (4,), in powers of two."""

    operator: str
    variant: str
    family: Family
    dtype: str
    sizes: tuple[float, float, float, float]
    forward: Amount
    backward: Amount
    accumulate: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """The parts of a key."""

    operator: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    attributes: dict[str, str]
    grads: tuple[bool, ...]

    def elements(self, position: int) -> int:
        return math.prod(self.shapes[position]) if position < len(self.shapes) else 0

    def num_bytes(self, position: int) -> int:
        return self.elements(position) * DTYPE_BYTES[self.dtypes[position]] if position < len(self.shapes) else 0

    def numbers(self, name: str, count: int, default: int) -> list[int]:
        """An attribute such as ``[2, 2]``, one number standing for all."""
        found = [int(text) for text in re.findall(r"-?\d+", self.attributes.get(name, ""))] or [default]
        return (found * count)[:count] if len(found) < count else found[:count]


@lru_cache(maxsize=65536)
def read_work(key: str) -> OpWork | None:
    """The work of the op of this key; None if its operator belongs to no family, or its inputs do not fit it."""
    try:
        return _read_work(key)
    except (ArithmeticError, LookupError, ValueError):
        return None  # of a damaged table; its rows are still found by their keys


def _read_work(key: str) -> OpWork | None:
    call = _read_key(key)
    family = _FAMILY_OF.get(call.operator) if call is not None else None
    if call is None or family is None or _SIZE_OF_BATCH.search(call.attributes.get("size", "")):
        return None
    if family == "view" and _does_work(call):
        family = "pointwise"
    match family:
        case "product" | "convolution":
            forward, backward, sizes = _product(*_product_sizes(call, family), call)
        case "attention":
            forward, backward, sizes = _attention(call)
        case "recurrent":
            forward, backward, sizes = _recurrent(call)
        case _:
            forward, backward, sizes = _traffic(call, family)
    if any(0 in shape for shape in call.shapes) or max(forward.flops, forward.num_bytes) > _MOST:
        return None
    held = [call.num_bytes(i) for i in _parameter_places(call, family) if call.grads[i]]
    m, n, k, count = (math.log2(max(size, 1.0)) for size in sizes)
    return OpWork(
        operator=call.operator,
        variant="/".join((call.operator, family, *_qualities(call, family))),
        family=family,
        dtype=next((dtype for dtype in call.dtypes if dtype in FLOAT_DTYPES), ""),
        sizes=(m, n, k, count),
        forward=forward,
        backward=backward if any(call.grads) else Amount(),
        accumulate=Amount(num_bytes=3.0 * sum(held), num_kernels=len(held)),
    )


@lru_cache(maxsize=65536)
def relatives(key: str) -> str:
    """What keys of one op at different batch sizes have in common: all but the first sizes of what is no parameter."""
    call = _read_key(key)
    if call is None:
        return key
    family = _FAMILY_OF.get(call.operator)
    held = _parameter_places(call, family)
    cut = 2 if family == "recurrent" else 1  # its states are (layers, batch, width)
    kept = [shape if i in held else shape[cut:] for i, shape in enumerate(call.shapes)]
    attributes = dict(call.attributes)
    if "size" in attributes:
        attributes["size"] = str(attributes["size"].count(","))  # which of its numbers is the batch, no key says
    return f"{call.operator}({kept};{sorted(attributes.items())}|{call.grads})"


def _read_key(key: str) -> _Call | None:
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    parts = match["kind"].split(".")
    tensors = [text.partition(":") for text in match["tensors"].split(",") if text]
    if any(dtype not in DTYPE_BYTES for _, _, dtype in tensors):
        return None
    attributes = (text.partition("=") for text in match["attributes"].split(";") if text)
    return _Call(
        operator=parts[1] if len(parts) > 1 else parts[0],
        shapes=tuple(tuple(int(size) for size in sizes.split("x") if size) for sizes, _, _ in tensors),
        dtypes=tuple(dtype for _, _, dtype in tensors),
        attributes={name: value for name, _, value in attributes},
        grads=tuple(flag == "1" for flag in match["grads"]),
    )


def _does_work(call: _Call) -> bool:
    """Whether what is a view elsewhere computes here: a dropout that drops, a conversion to another type."""
    converted = call.attributes.get("dtype", "")
    return call.attributes.get("p", "0.0") != "0.0" or (converted not in ("", *call.dtypes))


def _qualities(call: _Call, family: Family) -> list[str]:
    """What makes an operator take another road through torch."""
    found = []
    if family == "attention":
        found += [
            "dropped" if _drops(call) else "fused",
            f"{len(call.shapes)} inputs",
            call.attributes.get("is_causal", ""),
        ]
    if family == "convolution":
        found += ["point" if math.prod(call.shapes[1][2:]) == 1 else "window"]
    if call.dtypes and call.dtypes[0] not in FLOAT_DTYPES:
        found.append("integers")
    wanted = [call.elements(i) for i, flag in enumerate(call.grads) if flag]
    if family == "pointwise" and wanted and min(wanted) < max(wanted):
        found.append("broadcast")
    return found


def _drops(call: _Call) -> bool:
    return call.attributes.get("dropout_p", "0.0") != "0.0"


def _parameter_places(call: _Call, family: Family | None) -> range:
    """The inputs that are parameters where the operator is used as a layer."""
    if call.operator == "embedding":
        return range(1)
    if family is None or call.operator in _NO_PARAMETERS:
        return range(0)
    return range(_FIRST_PARAMETER.get(family, len(call.shapes)), len(call.shapes))


Sizes = tuple[float, float, float, float]
_Described = tuple[Amount, Amount, Sizes]


def _product_sizes(call: _Call, family: Family) -> Sizes:
    """(m, n, k, count) of count products of (m, k) by (k, n)."""
    left, right = call.shapes[0], call.shapes[1]
    if family == "product":
        if call.operator == "linear":
            return math.prod(left[:-1]), right[0], left[-1], 1
        if call.operator == "outer":
            return left[0], right[0], 1, 1
        if call.operator in ("addmm", "baddbmm"):
            left, right = right, call.shapes[2]
        return left[-2] if len(left) > 1 else 1, right[-1], left[-1], math.prod(left[:-2])
    spatial = len(right) - 2
    stride, dilation = call.numbers("stride", spatial, 1), call.numbers("dilation", spatial, 1)
    padding, groups = call.numbers("padding", spatial, 0), call.numbers("groups", 1, 1)[0]
    if "transpose" in call.operator:
        return math.prod((left[0], *left[2:])), math.prod(right[1:]), left[1] / groups, groups
    places = [
        max((size + 2 * pad - gap * (kernel - 1) - 1) // step + 1, 1)
        for size, pad, gap, kernel, step in zip(left[2:], padding, dilation, right[2:], stride, strict=True)
    ]
    return left[0] * math.prod(places), right[0] / groups, math.prod(right[1:]), groups


def _product(m: float, n: float, k: float, count: float, call: _Call) -> _Described:
    flops = 2.0 * m * n * k * count
    written = m * n * count * DTYPE_BYTES[call.dtypes[0]]
    moved = written + sum(call.num_bytes(i) for i in range(len(call.shapes)))
    wanted = sum(call.grads[:2])
    backward = Amount(flops=flops * wanted, num_bytes=moved * wanted, num_kernels=sum(call.grads))
    return Amount(flops=flops, num_bytes=moved, num_kernels=1), backward, (m, n, k, count)


def _attention(call: _Call) -> _Described:
    query, key = call.shapes[0], call.shapes[1]
    heads, queries, width, keys = math.prod(query[:-2]), query[-2], query[-1], key[-2]
    flops = 4.0 * heads * queries * keys * width
    moved = float(sum(call.num_bytes(i) for i in range(len(call.shapes))) + call.num_bytes(0))
    times = _STORED_ATTENTION_BACKWARD if _drops(call) else ATTENTION_BACKWARD
    backward = Amount(flops=times * flops, num_bytes=2 * moved, num_kernels=2)
    return Amount(flops=flops, num_bytes=moved, num_kernels=1), backward, (queries, keys, width, heads)


def _recurrent(call: _Call) -> _Described:
    """Per time step one product of each weight matrix with the batch; ``batch_first`` says which dim is time."""
    given = call.shapes[0]
    steps, batch = (given[1], given[0]) if call.attributes.get("batch_first") == "True" else (given[0], given[1])
    matrices = [shape for shape in call.shapes[3:] if len(shape) == 2]
    flops = 2.0 * steps * batch * sum(math.prod(shape) for shape in matrices)
    moved = float(sum(call.num_bytes(i) for i in range(len(call.shapes))))
    kernels = steps * max(len(matrices), 1)
    columns = max((shape[0] for shape in matrices), default=1)
    backward = Amount(flops=2 * flops, num_bytes=2 * moved, num_kernels=2 * kernels)
    return Amount(flops=flops, num_bytes=moved, num_kernels=kernels), backward, (batch, columns, given[-1], steps)


def _traffic(call: _Call, family: Family) -> _Described:
    """Ops that read their inputs and write one output."""
    count = len(call.shapes)
    width = DTYPE_BYTES[call.dtypes[0] if count else call.attributes.get("dtype", "int64")]
    largest: float = max((call.elements(i) for i in range(count)), default=0)
    written, read = _output_elements(call, family, largest), float(sum(call.num_bytes(i) for i in range(count)))
    largest = largest if count else written
    if call.operator in _LOOKUPS and count:
        read += written * width - call.num_bytes(0)
    last = call.shapes[0][-1] if count and call.shapes[0] else 1
    sizes = (largest / max(last, 1), last, max(largest, 1) / max(written, 1.0), max(count, 1))
    moved = 0.0 if family == "view" else read + written * width
    forward = Amount(num_bytes=moved, num_kernels=1)
    wanted = [call.elements(i) for i, flag in enumerate(call.grads) if flag]
    backward = Amount(num_bytes=read + (written + sum(wanted)) * width, num_kernels=len(wanted))
    if family == "view":
        backward = Amount(num_bytes=2.0 * call.num_bytes(0) if call.operator in _PARTIAL else 0.0, num_kernels=1)
    if call.operator in _LOOK_BACK:
        backward = Amount(num_kernels=len(wanted))
    if call.operator in _PASS_ON:
        broadcast = sum(size for size in wanted if size < written)
        passed = (written + broadcast) * width if broadcast else 0.0
        backward = Amount(num_bytes=passed, num_kernels=1)
    return forward, backward, sizes


def _output_elements(call: _Call, family: Family, largest: float) -> float:
    if family == "reduction" and call.operator not in ("softmax", "log_softmax", "cumsum", "cross_entropy_loss"):
        if call.operator == "max_pool2d":
            return largest / math.prod(call.numbers("stride", 2, 1))
        return largest / max(call.shapes[0][-1], 1) if call.shapes and call.shapes[0] else 1.0
    if call.operator in ("cat", "stack"):
        return float(sum(call.elements(i) for i in range(len(call.shapes))))
    if call.operator in ("embedding", "index_select"):
        return float(call.elements(1) * math.prod(call.shapes[0][1:]))
    if call.operator in ("gather", "index"):
        return float(call.elements(1))
    if call.operator.startswith("upsample"):
        return largest * math.prod(
            float(text) for text in re.findall(r"[\d.]+", call.attributes.get("scale_factors", ""))
        )
    if call.operator == "arange":
        start, end, step = (float(call.attributes.get(name, default)) for name, default in _ARANGE)
        return float(max(math.ceil((end - start) / step), 0))
    if "size" in call.attributes:
        return float(math.prod(int(text) for text in re.findall(r"\d+", call.attributes["size"])))
    return float(largest if call.shapes else 1)
