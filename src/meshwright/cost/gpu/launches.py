"""The kernels that torch launches for an op on a CUDA device, without products and attention, forward and backward.

Counted from what torch runs (torch 2.11 and 2.13, derivatives.yaml and aten/src/ATen/native/cuda):

    layer_norm, rms_norm    one kernel per pass; the backward's also sum the gradients of the weights
    batch_norm              a block per channel sums it up, then one kernel writes; the backward does both in one
    cross_entropy_loss      log_softmax and nll_loss; the backward fills zeros for nll_loss, then that of log_softmax
    embedding               rows are copied; the backward fills zeros, then adds rows: up to 3,072 by a block that
                            processes all, more after a sort (Embedding.cu)
    dropout                 writes a mask of a byte per element; the backward multiplies the gradient with the mask
    max_pool2d              each output searches its window; in the backward each input searches its windows
    linear with a bias      the bias is added by the product; its gradient is a sum over rows
    convolutions            a bias is added by a separate kernel
    recurrent layers        after the products of a time step one kernel makes its states

Everything else reads and writes once per gradient, as counted by `cost.work`. A kernel finds in the cache what the
previous one wrote: the first input, or the gradient of the output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.cost.gpu.rates import Launch
from meshwright.cost.traits import Passes, is_view
from meshwright.cost.work.calls import read_call
from meshwright.cost.work.operators import find_operator
from meshwright.cost.work.products import time_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshwright.cost.widths import Widths
    from meshwright.cost.work.calls import OpCall
    from meshwright.cost.work.operators import WorkRow
    from meshwright.spec import Graph, Op

    _Kernels = Callable[["_Counted"], tuple[Launch, ...]]

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
    """The kernels of an op's passes."""

    forward: tuple[Launch, ...] = ()
    backward: tuple[Launch, ...] = ()


def copied(elements: float, read: int, written: int) -> Launch:
    """Return a copy to another type: ``read`` and ``written`` are bytes of an element."""
    sort = "widening" if written > read else "pointwise"
    return Launch(sort=sort, width=max(read, written), cold=elements * written, hot=elements * read)


def sum_of(elements: float, width: int) -> Launch:
    """Return an addition to existing values, one of whose operands was just made."""
    return Launch(sort="pointwise", width=width, cold=2.0 * elements * width, hot=elements * width)


def launches_of(
    graph: Graph, op: Op, batch_size: int, key: str, passes: Passes, widths: Widths, num_multiprocessors: int
) -> Launched:
    """Return the kernels of an op, without products and attention.

    ``key``: its key in the measurement table. ``passes``: the work counted for its operator.
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
        """Return whether the op, a view if all values have one type, converts its input."""
        return bool(self.in_widths and self.out_widths) and self.in_widths[0] != self.width

    def casts(self) -> tuple[Launch, Launch]:
        """Return the conversion and that of the gradient."""
        elements, own = self.in_elements[0], self.in_widths[0]
        return copied(elements, own, self.width), copied(elements, self.width, own)

    def given(self, place: int = 0) -> float:
        """Return the bytes of an input."""
        return float(self.in_elements[place] * self.in_widths[place]) if place < len(self.in_elements) else 0.0

    @property
    def written(self) -> float:
        """Bytes of the outputs."""
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
        """Return one kernel for statistics and output."""
        sort = "rms_norm" if self.name == "rms_norm" else "layer_norm"
        return (Launch(sort=sort, width=self.width, row=self._row(), cold=self.written, hot=self.given()),)

    def group_norm(self) -> tuple[Launch, ...]:
        """Return two kernels: one reads for the statistics, one reads again and writes."""
        first = self.given()
        return Launch(sort="pointwise", width=self.width, hot=first), self._moved(first + self.written)

    def batch_norm(self) -> tuple[Launch, ...]:
        """Return the sums of the channels, then the output."""
        output = channel_writes(self.width, self.call.shapes[0], self.given(), self.written, self.units)
        return channel_sums("batch_norm", self.width, self.call.shapes[0], self.units), output

    def softmax(self) -> tuple[Launch, ...]:
        """Return one kernel."""
        return (Launch(sort="softmax", width=self.width, row=self._row(), cold=self.written, hot=self.given()),)

    def cross_entropy(self) -> tuple[Launch, ...]:
        """Return log_softmax and nll_loss, which picks a value of each row."""
        width, first = self.in_widths[0], self.given()
        return (
            Launch(sort="softmax", width=width, row=self._row(), cold=first, hot=first),
            Launch(sort="picking", width=width),
        )

    def max_pool(self) -> tuple[Launch, ...]:
        """Return one kernel with a thread for each output."""
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
        """Return one kernel over input and gradient; its rate includes the sums of the weights' gradients."""
        return (
            Launch(sort="norm_backward", width=self.width, row=self._row(), cold=2 * self.given(), hot=self.written),
        )

    def group_norm_backward(self) -> tuple[Launch, ...]:
        """Return the sums, then the gradient of the input."""
        both = self.given() + self.written
        return self._moved(both), self._moved(both + self.given())

    def batch_norm_backward(self) -> tuple[Launch, ...]:
        """Return one kernel with a block per channel that sums and writes it."""
        return (channel_sums("batch_norm_backward", self.width, self.call.shapes[0], self.units),)

    def softmax_backward(self) -> tuple[Launch, ...]:
        """Return one pass over the output and its gradient."""
        moved = self.written + self.given()
        return (Launch(sort="softmax_backward", width=self.width, row=self._row(), cold=moved, hot=self.written),)

    def cross_entropy_backward(self) -> tuple[Launch, ...]:
        """Return zeros with a value in each row, then log_softmax."""
        width, first = self.in_widths[0], self.given()
        back = Launch(sort="softmax_backward", width=width, row=self._row(), cold=2 * first, hot=first)
        return Launch(sort="filling", width=width, cold=first), back

    def embedding_backward(self) -> tuple[Launch, ...]:
        """Return zeros for the whole table, then the rows."""
        return embedding_gradients(self.width, self.in_elements[1], self.given(), self.written, self._row())

    def max_pool_backward(self) -> tuple[Launch, ...]:
        """Return one kernel: a thread for each input searches the windows that contain it."""
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
    """Return one kernel with a block per channel that processes all of its elements; ``units``: multiprocessors."""
    channels = shape[1]
    each = math.prod(shape) / max(channels, 1)
    crowd = (1 + (channels / units / _BLOCKS) ** 3) ** (1 / 3)
    return Launch(sort=sort, width=width, turns=each * crowd)


def channel_writes(width: int, shape: Sequence[int], read: float, written: float, units: int) -> Launch:
    """Return the kernel that writes a batch norm's output: a block per channel and sample, slow with few elements."""
    samples = min(shape[0], max(_MOST_BLOCKS // max(shape[1], 1), _LEAST_BLOCKS))
    return Launch(sort="batch_norm_output", width=width, cold=written, hot=read, turns=shape[1] * samples / units)


def embedding_gradients(width: int, rows: float, table: float, gathered: float, columns: int) -> tuple[Launch, ...]:
    """Return zeros for the whole table, then the addition of ``rows`` rows."""
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
