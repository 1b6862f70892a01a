"""Kernels and seconds of ops on a CUDA device: `launches_of`, `attention_seconds`, and `estimate_launches` for a graph.

`launches_of` returns the kernels that torch launches for an op, without products and attention (counted in the sources
of torch 2.11 and 2.13, derivatives.yaml and aten/src/ATen/native/cuda):

    layer_norm, rms_norm    one kernel per pass; that of the backward also sums the gradients of the weights
    batch_norm              one block per channel sums it, then one kernel writes the output; in the backward one kernel
                            does both
    cross_entropy_loss      log_softmax and nll_loss; the backward fills zeros for nll_loss, then runs log_softmax's
    embedding               rows are copied; the backward fills zeros, then adds rows: up to 3,072 rows without sorting,
                            more rows after a sort (Embedding.cu)
    dropout                 writes a mask of a byte per element; the backward multiplies the gradient with the mask
    max_pool2d              each output searches its window; in the backward each input searches its windows
    linear with a bias      the bias is added by the product; its gradient is a sum over rows
    convolutions            a bias is added by a separate kernel
    recurrent layers        after the products of a time step one kernel makes its states

For all other ops, one kernel in the forward and one per gradient reads and writes the bytes that `cost.work` counts. A
kernel reads from the cache what the previous kernel wrote: the first input, or the gradient of the output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from meshwright.cost.costs import Interval, OpCost, op_cost_around
from meshwright.cost.gpu.gpu_products import GpuModel, Launch, between
from meshwright.cost.roofline import LAUNCH_S, RooflineSeconds, peak_flops
from meshwright.cost.software import PYTORCH, Software
from meshwright.cost.traits import Passes, is_view, passes_of
from meshwright.cost.work import ATTENTION_BACKWARD, read_work
from meshwright.cost.work.op_calls import OpCall, WorkRow, find_operator, read_call
from meshwright.cost.work.work_count import time_steps
from meshwright.spec import DTYPE_BYTES, DeviceKind, Graph, Op

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshwright.cost.autocast import Widths
    from meshwright.cost.kernels import KernelQueries

    _Kernels = Callable[["_Counted"], tuple[Launch, ...]]


# The figures are from others, with other versions of the libraries.
ATTENTION = Interval(low=0.75, high=1.35)
# Queries, keys and values; a mask is the fourth input.
_NUM_UNMASKED = 3
# One preparing and one computing kernel.
_FIXED_S = 5e-6
_WIDTHS = [math.log(width) for width in (64, 128, 256)]
# Shares of the peak for long sequences by the width of a head, forward and backward.
_SHARES: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cudnn": ((0.417, 0.605, 0.587), (0.438, 0.523, 0.523)),
    "flash": ((0.327, 0.374, 0.330), (0.294, 0.325, 0.325)),
    "flash 8": ((0.64, 0.73, 0.64), (0.57, 0.63, 0.63)),
}
# Additional keys of short sequences, forward and backward, and more of them under a causal mask.
_SHORT: dict[str, tuple[float, float]] = {"cudnn": (115.0, 290.0), "flash": (77.0, 240.0), "flash 8": (77.0, 240.0)}
_CAUSAL_SHORT = 245.0
_EFFICIENT, _EFFICIENT_FLOAT32 = 1.8, 3.0
# How often scores and heads pass through memory step by step, and the number of kernels, forward and backward, counted
# in _scaled_dot_product_attention_math and _safe_softmax (torch 2.11, attention.cpp): scaled and copied heads, product,
# mask, softmax, whether a row is empty (two reads), where, dropout, product; the backward the same, softmax with two
# kernels, and the sum for the mask. At softmax's share of the bandwidth (`models/gpu.json`: 0.7 to 0.9).
_SCORES, _HEADS, _KERNELS, _SCORES_SHARE = (12, 16), (3.5, 4.25), (13, 16), 0.8
# The share of the float32 peak that products of scores reach (`h100_ops.parquet`: bmm, median).
_SCORES_RATE = 0.57
_AMPERE, _HOPPER, _AFTER_BLACKWELL = 8.0, 9.0, 11.0
# FlashAttention reaches 25 to 40 % of an A100's peak, FlashAttention-2 50 to 73 % (Dao 2023, abstract): the middles.
_FLASH_1 = 0.615 / 0.325
# The widest heads that flash and cuDNN support.
_WIDEST = 256


def kernel_of(graph: Graph, op: Op, call: OpCall, dtype: str, kind: DeviceKind, software: Software = PYTORCH) -> str:
    """Return the attention kernel that the software uses: "cudnn", "flash", "flash 8", "efficient" or "math".

    "flash 8" is FlashAttention on devices of compute capability below 9; "efficient" is CUTLASS's kernel.
    """
    if len(op.inputs) > _NUM_UNMASKED:
        mask = graph.tensors[op.inputs[_NUM_UNMASKED]]
        if mask.requires_grad and mask.storage != op.inputs[_NUM_UNMASKED]:
            return "math"
    without_flash = DTYPE_BYTES.get(dtype) != 2 or call.shapes[0][-1] > _WIDEST or kind.compute_capability < _AMPERE
    masked = len(op.inputs) > _NUM_UNMASKED or (_is_part(call) and not software.balanced_context)
    if masked or without_flash:
        return "efficient"
    if software.attention == "torch" and _HOPPER <= kind.compute_capability < _AFTER_BLACKWELL:
        return "cudnn"
    return "flash" if kind.compute_capability >= _HOPPER else "flash 8"


# Seconds of `scaled_dot_product_attention` by the kernel that torch chooses:
#
#     t = fixed + 4·heads·queries·keys·width·f · (1 + short / keys) / (share · peak)       f: ½ under a causal mask
#     t = fixed + bytes / bandwidth                                                        the longer of both
#
#     cudnn      16-bit types without a mask, on devices of compute capability 9 and 10 (torch 2.11, sdp_utils.cpp)
#     flash      the same on others, and with older software (`cost.software`): FlashAttention-2, or its first version
#     efficient  float32, a mask, wide heads or older devices: CUTLASS kernels; in 16 bits 1.8 times as long as flash,
#                in float32 three times as long as that
#     math       a mask with a gradient that is a view of another tensor, step by step and in float32: scores pass
#                through memory
#
# ``share`` of the peak by the width of a head, and ``short``, a number of additional keys, are read from the tables of
# FlashAttention-3 (Shah et al. 2024, figures 5 and 6: cuDNN and FlashAttention-2 on H100 SXM5, 512 to 16,384 keys). On
# devices of compute capability 8: 73 % of the peak forward and 63 % backward (Dao, FlashAttention-2, 2023, A100; width
# 128), less for narrower heads in the same proportion. A causal mask adds half a block of 128 queries and the idle time
# at an uneven end of the grid: 245 keys in the same tables. CUTLASS: xFormers in figure 4 of FlashAttention-2; float32
# over float16 from the benchmarks of xFormers' pull request 587 (A100).
#
# Causal attention of fewer queries than keys belongs to a rank with a part of each sequence (context parallelism). In a
# plain model torch would start the mask at the first key, which no known model needs. The runtime gives tokens to ranks
# in order and makes the mask, so that the kernel is "efficient"; the last rank computes with all keys, and the others
# wait for it: f is 1. Other software gives each rank tokens of the beginning and of the end: f is ½.
def attention_seconds(
    graph: Graph, op: Op, call: OpCall, dtype: str, kind: DeviceKind, *, trained: bool, software: Software = PYTORCH
) -> RooflineSeconds:
    """Return the seconds of one `scaled_dot_product_attention`, forward and, if ``trained``, backward.

    ``call``: its sizes; ``dtype``: the type in which it computes.
    """
    query, keys = call.shapes[0], call.shapes[1][-2]
    heads, width = math.prod(query[:-2]), query[-1]
    causal = call.attributes.get("is_causal") == "True"
    seen = 0.5 if causal and (software.balanced_context or not _is_part(call)) else 1.0
    name = kernel_of(graph, op, call, dtype, kind, software)
    element = DTYPE_BYTES.get(dtype, 4)
    flops = 4.0 * heads * query[-2] * keys * width
    moved = float(element * sum(math.prod(shape) for shape in call.shapes[:3]) + element * math.prod(query))
    if name == "math":
        scores, moved = 4.0 * heads * query[-2] * keys, moved * 4 / element
        times = [
            (many * moved + count * scores) / (_SCORES_SHARE * kind.memory_bandwidth_bytes_per_s)
            + part * flops / (_SCORES_RATE * peak_flops(kind, "float32"))
            + kernels * LAUNCH_S
            for many, count, kernels, part in zip(_HEADS, _SCORES, _KERNELS, (1.0, 2.0), strict=True)
        ]
        return RooflineSeconds(forward_s=times[0], backward_s=times[1] if trained else 0.0, accumulate_s=0.0)
    slower, fused = _FLASH_1 if software.attention == "flash-1" and name.startswith("flash") else 1.0, name
    if name == "efficient":
        slower = _EFFICIENT * (_EFFICIENT_FLOAT32 if element > 2 else 1.0)
        fused = "flash" if kind.compute_capability >= _HOPPER else "flash 8"
    peak = kind.peak_flops_per_s.get("bfloat16") or peak_flops(kind, "float16")
    parts = []
    for backward in (False, True):
        share = between(math.log(width), _WIDTHS, _SHARES[fused][backward])
        short = _SHORT[fused][backward] + _CAUSAL_SHORT * causal
        times_flops = flops * seen * (ATTENTION_BACKWARD if backward else 1.0)
        computing = slower * times_flops * (1 + short / keys) / (share * peak)
        moving = (1 + backward) * moved / kind.memory_bandwidth_bytes_per_s
        parts.append(_FIXED_S + max(computing, moving))
    return RooflineSeconds(forward_s=parts[0], backward_s=parts[1] if trained else 0.0, accumulate_s=0.0)


def _is_part(call: OpCall) -> bool:
    """Return whether a rank computes causal attention of its part of each sequence."""
    return call.attributes.get("is_causal") == "True" and call.shapes[0][-2] < call.shapes[1][-2]


# Up to this number of rows, gradients are added to an embedding's without sorting them (Embedding.cu).
_UNSORTED_ROWS = 3072
# The number of blocks (one per channel of a batch norm) on a multiprocessor before they slow each other down: of 1.4,
# 1.6 and 2, the value with the smallest residuals for 6 shapes with 64 to 2,048 channels
# (`scripts/renew_gpu_model.py`).
_BLOCKS = 2.0
# Limits of the blocks of the kernel that writes a batch norm's output, one per sample (Normalization.cuh).
_LEAST_BLOCKS, _MOST_BLOCKS = 1, 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """The kernels that torch launches in an op's forward and in its backward, in order."""

    forward: tuple[Launch, ...] = ()
    backward: tuple[Launch, ...] = ()


def copied(elements: float, read: int, written: int) -> Launch:
    """Return the kernel that copies a tensor to another type; ``read``, ``written``: bytes of an element of each."""
    sort = "widening" if written > read else "pointwise"
    return Launch(sort=sort, width=max(read, written), cold=elements * written, hot=elements * read)


def sum_of(elements: float, width: int) -> Launch:
    """Return the kernel that adds a tensor that was just computed to an existing tensor.

    The new tensor is read from the cache; the existing one is read from memory, and the sum is written to memory.
    ``width``: bytes of an element.
    """
    return Launch(sort="pointwise", width=width, cold=2.0 * elements * width, hot=elements * width)


def launches_of(
    graph: Graph, op: Op, batch_size: int, key: str, passes: Passes, widths: Widths, num_multiprocessors: int
) -> Launched:
    """Return the kernels that torch launches for an op, without products and attention.

    ``key``: the op's key in the measurement table. ``passes``: the counted work of its forward and backward.
    """
    call = read_call(key)
    operator = find_operator(call.operator, call.attributes, call.dtypes) if call is not None else None
    if call is None:
        return Launched()
    counted = _Counted(graph, op, batch_size, call, operator, widths, num_multiprocessors)
    looks = operator is not None and operator.family == "view" and is_view(graph, op)
    trained = passes.backward.num_kernels > 0
    if looks and counted.is_cast():
        there, back = counted.casts()
        return Launched(forward=(there,), backward=(back,) if 0 in counted.wanted else ())
    return Launched(
        forward=() if looks else counted.forward(passes, trained),
        backward=counted.backward(passes) if trained else (),
    )


class _Counted:
    """Bytes of one call, by the types of its tensors."""

    def __init__(
        self,
        graph: Graph,
        op: Op,
        batch_size: int,
        call: OpCall,
        operator: WorkRow | None,
        widths: Widths,
        units: int,
    ) -> None:
        self.name, self.call, self.operator, self.units = call.operator, call, operator, units
        self.family = operator.family if operator is not None else ""
        self.in_widths, self.out_widths = ([widths.of(i) for i in tensors] for tensors in (op.inputs, op.outputs))
        self.in_elements = [graph.tensors[i].num_elements(batch_size) for i in op.inputs]
        self.out_elements = [
            graph.tensors[i].num_elements(batch_size) if op.is_in_place or graph.tensors[i].storage == i else 0
            for i in op.outputs
        ]
        self.wanted = [place for place, i in enumerate(op.inputs) if graph.tensors[i].requires_grad]
        self.distinct = [place for place, i in enumerate(op.inputs) if op.inputs.index(i) == place]
        self.made = self.out_elements[0] if self.out_elements else 0
        self.width = self.out_widths[0] if self.out_widths else 4

    def is_cast(self) -> bool:
        """Return whether the op converts its input to another type."""
        return bool(self.in_widths and self.out_widths) and self.in_widths[0] != self.width

    def casts(self) -> tuple[Launch, Launch]:
        """Return the kernel that converts the input, and the one that converts its gradient."""
        elements, own = self.in_elements[0], self.in_widths[0]
        return copied(elements, own, self.width), copied(elements, self.width, own)

    def given(self, place: int = 0) -> float:
        """Return the bytes of the input at position ``place``; 0 if it is missing."""
        return float(self.in_elements[place] * self.in_widths[place]) if place < len(self.in_elements) else 0.0

    @property
    def written(self) -> float:
        """Bytes of all outputs."""
        return float(sum(count * width for count, width in zip(self.out_elements, self.out_widths, strict=True)))

    def forward(self, passes: Passes, trained: bool) -> tuple[Launch, ...]:
        """Return the kernels of the forward."""
        if self.family == "product":
            return ()
        if self.family == "convolution":
            return self._convolution_bias(backward=False)
        if self.family == "recurrent":
            return self._cells()
        known = _FORWARDS.get(self.name)
        if known is not None:
            return known(self)
        return self._elementwise(passes, trained)

    def _elementwise(self, passes: Passes, trained: bool) -> tuple[Launch, ...]:
        width, written, operator = self.width, self.written, self.operator
        if operator is not None and operator.makes == "output" and trained:
            return (Launch(sort="dropping", width=width, cold=written + self.made, hot=self.given()),)
        if operator is not None and operator.reads == "none":
            return (Launch(sort="filling", width=width, cold=written),)
        if operator is not None and operator.reads == "rows":
            return (Launch(sort="gathering", width=width, cold=2 * written),)
        if len(self.in_widths) == 1 and self.in_widths[0] != width and self.family == "pointwise":
            return (copied(self.made, self.in_widths[0], width),)
        read = [self.given(place) for place in self.distinct]
        hot = max(read, default=0.0)
        sort = "joining" if operator is not None and operator.output == "joined" else "pointwise"
        further = (Launch(sort="pointwise", width=width),) * (passes.forward.num_kernels - 1)
        return (Launch(sort=sort, width=width, cold=sum(read) - hot + written, hot=hot), *further)

    def norm(self) -> tuple[Launch, ...]:
        """Return the forward of a layer or RMS norm: one kernel for statistics and output."""
        sort = "rms_norm" if self.name == "rms_norm" else "layer_norm"
        return (Launch(sort=sort, width=self.width, row=self._row(), cold=self.written, hot=self.given()),)

    def group_norm(self) -> tuple[Launch, ...]:
        """Return the forward of a group norm: one kernel for the statistics, one that reads again and writes."""
        first = self.given()
        return Launch(sort="pointwise", width=self.width, hot=first), self._moved(first + self.written)

    def batch_norm(self) -> tuple[Launch, ...]:
        """Return the forward of a batch norm: one kernel that sums the channels, one that writes the output."""
        output = channel_writes(self.width, self.call.shapes[0], self.given(), self.written, self.units)
        return channel_sums("batch_norm", self.width, self.call.shapes[0], self.units), output

    def softmax(self) -> tuple[Launch, ...]:
        """Return the forward of a softmax: one kernel."""
        return (Launch(sort="softmax", width=self.width, row=self._row(), cold=self.written, hot=self.given()),)

    def cross_entropy(self) -> tuple[Launch, ...]:
        """Return the forward of a cross entropy: log_softmax, and nll_loss, which picks a value of each row."""
        width, first = self.in_widths[0], self.given()
        return (
            Launch(sort="softmax", width=width, row=self._row(), cold=first, hot=first),
            Launch(sort="picking", width=width),
        )

    def max_pool(self) -> tuple[Launch, ...]:
        """Return the forward of a max pooling: one kernel with a thread for each output."""
        window = math.prod(self.call.numbers("kernel_size", 2, 1))
        return (Launch(sort="pooling", width=self.width, turns=self.made * window / self.units),)

    def backward(self, passes: Passes) -> tuple[Launch, ...]:
        """Return the kernels of the backward."""
        if self.family == "product":
            return tuple(self._summed() for place in self.wanted if place not in self._factors())
        if self.family == "convolution":
            return self._convolution_bias(backward=True)
        if self.family == "recurrent":
            return self._cells()
        known = _BACKWARDS.get(self.name)
        if known is not None:
            return known(self)
        operator, written = self.operator, self.written
        if operator is not None and operator.makes == "output":
            return (Launch(sort="pointwise", width=self.width, cold=self.made + self.given(), hot=written),)
        sort = "joining" if operator is not None and operator.gradient == "joined" else "pointwise"
        # The bytes counted for each gradient are all that it reads and writes, including the output's gradient.
        kernels = max(passes.backward.num_kernels, 1)
        each = passes.backward.num_bytes / kernels
        hot = min(written, each)
        return (Launch(sort=sort, width=self.width, cold=each - hot, hot=hot),) * kernels

    def norm_backward(self) -> tuple[Launch, ...]:
        """Return the backward of a layer or RMS norm: one kernel, whose rate includes the sums for the weights."""
        return (
            Launch(sort="norm_backward", width=self.width, row=self._row(), cold=2 * self.given(), hot=self.written),
        )

    def group_norm_backward(self) -> tuple[Launch, ...]:
        """Return the backward of a group norm: a kernel for the sums, then one for the gradient of the input."""
        both = self.given() + self.written
        return self._moved(both), self._moved(both + self.given())

    def batch_norm_backward(self) -> tuple[Launch, ...]:
        """Return the backward of a batch norm: one kernel with a block per channel, which sums and writes."""
        return (channel_sums("batch_norm_backward", self.width, self.call.shapes[0], self.units),)

    def softmax_backward(self) -> tuple[Launch, ...]:
        """Return the backward of a softmax: one kernel over the output and its gradient."""
        moved = self.written + self.given()
        return (Launch(sort="softmax_backward", width=self.width, row=self._row(), cold=moved, hot=self.written),)

    def cross_entropy_backward(self) -> tuple[Launch, ...]:
        """Return the backward of a cross entropy: zeros with a value in each row, then that of log_softmax."""
        width, first = self.in_widths[0], self.given()
        back = Launch(sort="softmax_backward", width=width, row=self._row(), cold=2 * first, hot=first)
        return Launch(sort="filling", width=width, cold=first), back

    def embedding_backward(self) -> tuple[Launch, ...]:
        """Return the backward of an embedding: zeros for the whole table, then the addition of the rows."""
        return embedding_gradients(self.width, self.in_elements[1], self.given(), self.written, self._row())

    def max_pool_backward(self) -> tuple[Launch, ...]:
        """Return the backward of a max pooling: one kernel with a thread for each input."""
        window, stride = self.call.numbers("kernel_size", 2, 1), self.call.numbers("stride", 2, 0)
        covering = math.prod(math.ceil(size / (step or size)) for size, step in zip(window, stride, strict=True))
        return (Launch(sort="pooling", width=self.width, turns=self.in_elements[0] * covering / self.units),)

    def _row(self) -> int:
        return self.call.shapes[0][-1] if self.call.shapes and self.call.shapes[0] else 1

    def _factors(self) -> tuple[int, int]:
        first = 1 if self.name in ("addmm", "baddbmm") else 0
        return first, first + 1

    def _moved(self, num_bytes: float) -> Launch:
        return Launch(sort="pointwise", width=self.width, cold=num_bytes)

    def _summed(self) -> Launch:
        """Return the gradient of a bias: the sum over the rows of the output's gradient."""
        columns = self.call.shapes[self._factors()[1]][0 if self.name == "linear" else -1]
        return Launch(sort="column_sum", width=self.width, row=columns, hot=self.written)

    def _cells(self) -> tuple[Launch, ...]:
        steps, batch = time_steps(self.call)
        gates = [shape[0] for shape in self.call.shapes if len(shape) == 2][::2]
        return tuple(
            Launch(sort="pointwise", width=self.width, hot=float(2 * batch * count * self.width))
            for count in gates
            for _ in range(steps)
        )

    def _convolution_bias(self, *, backward: bool) -> tuple[Launch, ...]:
        if len(self.call.shapes) < 3 or (backward and 2 not in self.wanted):
            return ()
        if backward:
            return (Launch(sort="column_sum", width=self.width, row=self.call.shapes[2][0], hot=self.written),)
        return (Launch(sort="pointwise", width=self.width, cold=self.written, hot=self.written),)


def channel_sums(sort: str, width: int, shape: Sequence[int], units: int) -> Launch:
    """Return one kernel of a batch norm, with a thread block per channel that processes all of its elements.

    ``width``: bytes of an element; ``shape``: that of the input; ``units``: the number of multiprocessors.
    """
    channels = shape[1]
    each = math.prod(shape) / max(channels, 1)
    crowd = (1 + (channels / units / _BLOCKS) ** 3) ** (1 / 3)
    return Launch(sort=sort, width=width, turns=each * crowd)


def channel_writes(width: int, shape: Sequence[int], read: float, written: float, units: int) -> Launch:
    """Return the kernel that writes a batch norm's output, with a thread block per channel and sample.

    ``read``, ``written``: bytes of the input and the output; ``units``: the number of multiprocessors.
    """
    samples = min(shape[0], max(_MOST_BLOCKS // max(shape[1], 1), _LEAST_BLOCKS))
    return Launch(sort="batch_norm_output", width=width, cold=written, hot=read, turns=shape[1] * samples / units)


def embedding_gradients(width: int, rows: float, table: float, gathered: float, columns: int) -> tuple[Launch, ...]:
    """Return the kernels of an embedding's gradient: zeros for the whole table, then the addition of ``rows`` rows.

    ``table``, ``gathered``: bytes of the table and of the output's gradient; ``columns``: elements of a row.
    """
    zeros = Launch(sort="filling", width=width, cold=table)
    if rows <= _UNSORTED_ROWS:
        return zeros, Launch(sort="adding_rows", width=width, row=columns, hot=gathered, turns=rows)
    return zeros, Launch(sort="adding_sorted_rows", width=width, row=columns, cold=gathered)


def _by_name(of: dict[str, _Kernels]) -> dict[str, _Kernels]:
    return {name: kernels for names, kernels in of.items() for name in names.split()}


_FORWARDS = _by_name(
    {
        "layer_norm native_layer_norm rms_norm": _Counted.norm,
        "group_norm native_group_norm": _Counted.group_norm,
        "batch_norm native_batch_norm": _Counted.batch_norm,
        "softmax log_softmax": _Counted.softmax,
        "cross_entropy_loss": _Counted.cross_entropy,
        "max_pool2d": _Counted.max_pool,
    }
)
_BACKWARDS = _by_name(
    {
        "layer_norm native_layer_norm rms_norm": _Counted.norm_backward,
        "group_norm native_group_norm": _Counted.group_norm_backward,
        "batch_norm native_batch_norm": _Counted.batch_norm_backward,
        "softmax log_softmax": _Counted.softmax_backward,
        "cross_entropy_loss": _Counted.cross_entropy_backward,
        "embedding": _Counted.embedding_backward,
        "max_pool2d": _Counted.max_pool_backward,
    }
)


_DENSE = ("product", "convolution", "recurrent")


# Products, convolutions and recurrent layers take the product predictor (`cost.kernels`) and the additional kernels;
# attention the kernel that torch chooses; all others the kernels of each pass at fitted rates
# (`cost.gpu.gpu_products`). Only rooflines are replaced: measurements and traces stay.
def estimate_launches(
    model: GpuModel,
    asked: KernelQueries,
    predicted: list[OpCost],
    dtypes: list[str],
    widths: Widths,
    kind: DeviceKind,
    software: Software,
) -> list[OpCost]:
    """Return the costs of the ops of ``asked``; ops with a basis other than "roofline" keep their costs.

    ``predicted``: the costs of the ops by the product predictor (`cost.kernels`). ``dtypes``: the types in which the
    ops compute.
    """
    columns = zip(asked.costs, predicted, asked.ops, asked.keys, dtypes, strict=True)
    return [
        _estimate(model, asked, op, key, dtype, widths, kind, dense, software) if bound.basis == "roofline" else bound
        for bound, dense, op, key, dtype in columns
    ]


def _estimate(
    model: GpuModel,
    asked: KernelQueries,
    op: Op,
    key: str,
    dtype: str,
    widths: Widths,
    kind: DeviceKind,
    predicted: OpCost,
    software: Software,
) -> OpCost:
    graph, batch_size = asked.graph, asked.batch_size
    passes = passes_of(graph, op, batch_size, dtype, key)
    work, call = read_work(key), read_call(key)
    family = work.family if work is not None else ""
    width = DTYPE_BYTES[dtype]
    accumulated = passes.accumulate.num_bytes / (3 * width)
    if call is None:
        return predicted
    basis, interval = model.basis_on(kind)
    if family == "attention":
        trained = passes.backward.num_kernels > 0
        seconds = attention_seconds(graph, op, call, dtype, kind, trained=trained, software=software)
        return op_cost_around(seconds, ATTENTION, "transferred")
    launched = launches_of(graph, op, batch_size, key, passes, widths, kind.num_multiprocessors)
    extra = [sum_of(0.0, width)] * (passes.accumulate.num_kernels - 1)
    accumulate = [sum_of(accumulated, width), *extra] if passes.accumulate.num_kernels else []
    seconds = RooflineSeconds(
        forward_s=model.seconds(launched.forward, kind),
        backward_s=model.seconds(launched.backward, kind),
        accumulate_s=model.seconds(accumulate, kind),
    )
    if family not in _DENSE:
        return op_cost_around(seconds, interval, basis)
    beside = replace(predicted, seconds=replace(predicted.seconds, accumulate_s=0.0))
    return replace(beside, low=_kept(beside.low), high=_kept(beside.high)).plus(seconds, interval)


def _kept(seconds: RooflineSeconds) -> RooflineSeconds:
    return replace(seconds, accumulate_s=0.0)
