"""Measure a device without a model: single operators on tensors of many sizes, without the host's time.

The sizes are those of language and image models: rows of 768 to 11,008 elements, vocabularies, attention heads, images
of a ResNet, cells of a recurrent network. The types are bfloat16 and float16 (in which the precisions ``amp``,
``mixed`` and ``amp-float16`` compute) and float32; for ``mixed``, also 2-byte gradients that are converted or added to
4-byte gradients. An operator is called repeatedly on the same inputs. Operators that exceed the device's memory, or
that the libraries do not support, are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.measurement.clocks import DeviceClock
from meshwright.measurement.device_timing import refuse_fatal
from meshwright.measurement.optimizer_timing import is_out_of_memory
from meshwright.records.one_device import device_row
from meshwright.records.record_table import Row
from meshwright.spec import EventSink, NullSink

aten = torch.ops.aten

DTYPES = ("bfloat16", "float16", "float32")
# After this number of seconds no further operator starts; a second call continues.
BUDGET_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSizes:
    """The sizes of the tensors on which `measure_device_table` times operators.

    The defaults are those of the shipped table. ``rows``, ``widths``: matrices. ``scores``: attention scores (heads
    times samples, tokens), with heads of ``depths`` elements. ``tokens``, ``vocabularies``: losses and embeddings.
    ``images``: (samples, channels, height and width). ``products``: (output, input) elements of a linear layer.
    """

    rows: tuple[int, ...] = (2048, 8192, 32768)
    widths: tuple[int, ...] = (768, 2048, 4096, 11008)
    scores: tuple[tuple[int, int], ...] = ((96, 512), (96, 1024), (384, 512), (32, 2048), (128, 128))
    depths: tuple[int, ...] = (64, 128)
    tokens: tuple[int, ...] = (2048, 8192)
    vocabularies: tuple[int, ...] = (30522, 50257, 128256)
    images: tuple[tuple[int, int, int], ...] = (
        (64, 64, 56),
        (64, 256, 56),
        (64, 512, 28),
        (64, 1024, 14),
        (64, 2048, 7),
        (128, 64, 112),
    )
    products: tuple[tuple[int, int], ...] = (
        (768, 768),
        (3072, 768),
        (768, 3072),
        (2048, 2048),
        (8192, 2048),
        (4096, 4096),
        (14336, 4096),
        (50257, 768),
    )
    # Samples, heads, tokens, elements of a head.
    attention: tuple[tuple[int, int, int, int], ...] = ((8, 12, 1024, 64), (32, 12, 512, 64), (1, 32, 4096, 128))
    # Samples, steps, width, layers.
    recurrent: tuple[tuple[int, int, int, int], ...] = ((64, 50, 1024, 1), (64, 50, 1024, 4), (32, 128, 512, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """An operator on inputs of these shapes; ``prepare`` creates them and returns the call."""

    op: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    prepare: Callable[[], Callable[[], object]]
    kernel: str = ""


def measure_device_table(
    clock: DeviceClock,
    write: Callable[[Row], None],
    *,
    sizes: TableSizes | None = None,
    dtypes: Sequence[str] = DTYPES,
    kept: Callable[[Row], bool] = lambda _: False,
    budget_s: float = BUDGET_S,
    events: EventSink | None = None,
) -> dict[str, str]:
    """Measure all operators, pass each row to ``write``, and return the reasons for those left out, by operator.

    A row has the columns of `device_row` and ``seconds``, ``spread`` and ``num_samples``. ``kept``: a function of a row
    without seconds, which returns whether the row was measured before and is skipped. After ``budget_s`` seconds no
    further operator starts. ``events`` receives the progress.
    """
    sink, begun, left_out = events or NullSink(), time.monotonic(), {}
    cases = list(_cases(sizes or TableSizes(), dtypes, clock.device))
    for done, case in enumerate(cases):
        row = device_row(case.op, case.dtype, case.shapes, case.kernel)
        if kept(row):
            continue
        if time.monotonic() - begun > budget_s:
            left_out["the rest"] = f"{len(cases) - done} operators not measured after {budget_s:g} s; measure again"
            break
        try:
            with clock.side():
                taken = clock.time([case.prepare()])
        except (RuntimeError, NotImplementedError) as error:
            refuse_fatal(error, case.op, clock)
            reason = "out of memory" if is_out_of_memory(error) else str(error).strip().partition("\n")[0][:200]
            kernel = f" by {case.kernel}" * bool(case.kernel)
            left_out[f"{case.op} {row['shapes']} in {case.dtype}{kernel}"] = reason
        else:
            if taken.seconds:
                write({**row, "seconds": taken.seconds, "spread": taken.spread, "num_samples": taken.num_samples})
        clock.release()
        sink.progress("measure the device", done + 1, len(cases))
    return left_out


def _cases(sizes: TableSizes, dtypes: Sequence[str], device: torch.device) -> Iterator[_Case]:
    for dtype in dtypes:
        make = _Maker(dtype, device)
        for part in (_rows, _scores, _losses, _images, _products, _attention, _recurrent):
            for op, shapes, prepare, *kernel in part(sizes, make):
                case_shapes = tuple(tuple(shape) for shape in shapes)
                yield _Case(op=op, dtype=dtype, shapes=case_shapes, prepare=prepare, kernel="".join(kernel))


class _Maker:
    """Creates random tensors on a device."""

    def __init__(self, dtype: str, device: torch.device) -> None:
        self.dtype, self.device = getattr(torch, dtype), device

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype or self.dtype, device=self.device)

    def index(self, bound: int, *shape: int) -> torch.Tensor:
        """Return random integers from 0 to ``bound`` - 1."""
        return torch.randint(bound, shape, device=self.device)

    @property
    def other(self) -> torch.dtype:
        """The type to which conversions are measured: float32 for 2-byte types, else bfloat16."""
        return torch.float32 if self.dtype.itemsize == 2 else torch.bfloat16


# Operator, shapes, a function that creates the inputs and returns the call, and the kernel if shapes leave it open.
_Told = Iterator[tuple[Any, ...]]


def _rows(sizes: TableSizes, make: _Maker) -> _Told:
    for n in sizes.rows:
        for d in sizes.widths:
            one, two = [(n, d)], [(n, d)] * 2

            def unary(call: Callable[[torch.Tensor], object], n: int = n, d: int = d) -> Callable[[], Any]:
                def prepare() -> Any:
                    x = make(n, d)
                    return lambda: call(x)

                return prepare

            def binary(call: Callable[[Any, Any], object], n: int = n, d: int = d) -> Callable[[], Any]:
                def prepare() -> Any:
                    x, y = make(n, d), make(n, d)
                    return lambda: call(x, y)

                return prepare

            def norm(call: Callable[[Any, Any, Any], object], n: int = n, d: int = d) -> Callable[[], Any]:
                def prepare() -> Any:
                    x, w, b = make(n, d), make(d), make(d)
                    return lambda: call(x, w, b)

                return prepare

            def norm_backward(n: int = n, d: int = d) -> Any:
                x, y, w, b = make(n, d), make(n, d), make(d), make(d)
                _, mean, rstd = aten.native_layer_norm(x, [d], w, b, 1e-5)
                return lambda: aten.native_layer_norm_backward(y, x, [d], mean, rstd, w, b, [True, True, True])

            def accumulated(n: int = n, d: int = d) -> Any:
                total, gradient = make(n, d, dtype=torch.float32), make(n, d)
                return lambda: total.add_(gradient)

            yield "aten.add", two, binary(torch.add)
            yield "aten.mul", two, binary(torch.mul)
            yield "aten.gelu", one, unary(aten.gelu)
            yield "aten.silu", one, unary(aten.silu)
            yield "aten.relu", one, unary(aten.relu)
            yield "aten.gelu_backward", two, binary(aten.gelu_backward)
            yield "aten.silu_backward", two, binary(aten.silu_backward)
            yield "aten.threshold_backward", two, binary(lambda x, y: aten.threshold_backward(x, y, 0))
            yield "aten.native_dropout", one, unary(lambda x: aten.native_dropout(x, 0.1, True))
            yield (
                "aten.native_layer_norm",
                one,
                norm(lambda x, w, b: aten.native_layer_norm(x, list(w.shape), w, b, 1e-5)),
            )
            yield "aten.native_layer_norm_backward", two, norm_backward
            yield "rms_norm", one, norm(lambda x, w, _: nn.functional.rms_norm(x, list(w.shape), w))
            yield "aten.sum.dim0", one, unary(lambda x: x.sum(0))
            yield "aten._to_copy", one, unary(lambda x: x.to(make.other))
            yield "aten.clone.transposed", one, unary(lambda x: x.t().contiguous())
            yield "aten.cat.dim1", two, binary(lambda x, y: torch.cat([x, y], 1))
            yield "aten.zero_", one, unary(lambda x: x.zero_())
            if make.dtype.itemsize == 2:
                yield "aten.add_.widened", two, accumulated


def _scores(sizes: TableSizes, make: _Maker) -> _Told:
    for many, t in sizes.scores:
        whole = (many, t, t)

        def softmax(many: int = many, t: int = t) -> Any:
            x = make(many, t, t)
            return lambda: aten._softmax(x, -1, False)

        def softmax_backward(many: int = many, t: int = t) -> Any:
            x, y = make(many, t, t), make(many, t, t)
            return lambda: aten._softmax_backward_data(y, x, -1, make.dtype)

        yield "aten._softmax", [whole], softmax
        yield "aten._softmax_backward_data", [whole] * 2, softmax_backward
        for k in sizes.depths:

            def transposed(many: int = many, t: int = t, k: int = k) -> Any:
                q, v = make(many, t, k), make(many, t, k)
                return lambda: torch.bmm(q, v.transpose(1, 2))

            def plain(many: int = many, t: int = t, k: int = k) -> Any:
                x, v = make(many, t, t), make(many, t, k)
                return lambda: torch.bmm(x, v)

            yield "aten.bmm", [(many, t, k), (many, k, t)], transposed, "nt"
            yield "aten.bmm", [whole, (many, t, k)], plain, "nn"


def _losses(sizes: TableSizes, make: _Maker) -> _Told:
    for n in sizes.tokens:
        for v in sizes.vocabularies:
            whole = (n, v)

            def softmax(n: int = n, v: int = v) -> Any:
                x = make(n, v)
                return lambda: aten._log_softmax(x, -1, False)

            def softmax_backward(n: int = n, v: int = v) -> Any:
                x, y = make(n, v), make(n, v)
                return lambda: aten._log_softmax_backward_data(x, y, -1, make.dtype)

            def loss(n: int = n, v: int = v) -> Any:
                x, classes = make(n, v), make.index(v, n)
                return lambda: aten.nll_loss_forward(x, classes, None, 1, -100)

            def loss_backward(n: int = n, v: int = v) -> Any:
                x, classes = make(n, v), make.index(v, n)
                _, weight = aten.nll_loss_forward(x, classes, None, 1, -100)
                one = torch.ones((), dtype=make.dtype, device=make.device)
                return lambda: aten.nll_loss_backward(one, x, classes, None, 1, -100, weight)

            yield "aten._log_softmax", [whole], softmax
            yield "aten._log_softmax_backward_data", [whole] * 2, softmax_backward
            yield "aten.nll_loss_forward", [whole], loss
            yield "aten.nll_loss_backward", [whole], loss_backward
            for d in sizes.widths[:2]:

                def look_up(n: int = n, v: int = v, d: int = d) -> Any:
                    table, places = make(v, d), make.index(v, n)
                    return lambda: aten.embedding(table, places)

                def look_up_backward(n: int = n, v: int = v, d: int = d) -> Any:
                    gradient, places = make(n, d), make.index(v, n)
                    return lambda: aten.embedding_dense_backward(gradient, places, v, -1, False)

                yield "aten.embedding", [(v, d), (n,)], look_up
                yield "aten.embedding_dense_backward", [(n, d), (n,), (v, d)], look_up_backward


def _images(sizes: TableSizes, make: _Maker) -> _Told:
    for n, c, h in sizes.images:
        whole = (n, c, h, h)

        def norm(n: int = n, c: int = c, h: int = h, *, back: bool = False) -> Any:
            x, w, b = make(n, c, h, h), make(c, dtype=torch.float32), make(c, dtype=torch.float32)
            mean, var = torch.zeros_like(w), torch.ones_like(w)
            if not back:
                return lambda: aten.native_batch_norm(x, w, b, mean, var, True, 0.1, 1e-5)
            _, kept, inverse = aten.native_batch_norm(x, w, b, mean, var, True, 0.1, 1e-5)
            wanted = [True, True, True]
            return lambda: aten.native_batch_norm_backward(x, x, w, mean, var, kept, inverse, True, 1e-5, wanted)

        def pool(n: int = n, c: int = c, h: int = h) -> Any:
            x = make(n, c, h, h)
            return lambda: aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])

        def relu(n: int = n, c: int = c, h: int = h) -> Any:
            return make(n, c, h, h).relu_

        yield "aten.native_batch_norm", [whole], norm
        yield "aten.native_batch_norm_backward", [whole] * 2, lambda norm=norm: norm(back=True)
        yield "aten.max_pool2d", [whole], pool
        yield "aten.relu_", [whole], relu
        for o, k in ((c, 3), (min(2048, c * 4), 1), (max(64, c // 4), 1)):

            def convolve(n: int = n, c: int = c, h: int = h, o: int = o, k: int = k, *, back: bool = False) -> Any:
                x, window = make(n, c, h, h), make(o, c, k, k)
                rest = (None, [1, 1], [k // 2] * 2, [1, 1], False, [0, 0], 1)
                if not back:
                    return lambda: aten.convolution(x, window, *rest)
                gradient = make(n, o, h, h)
                return lambda: aten.convolution_backward(gradient, x, window, *rest, [True, True, False])

            yield "aten.convolution", [whole, (o, c, k, k)], convolve
            shapes = [(n, o, h, h), whole, (o, c, k, k)]
            yield "aten.convolution_backward", shapes, lambda convolve=convolve: convolve(back=True)


def _products(sizes: TableSizes, make: _Maker) -> _Told:
    for m in (512, *sizes.tokens):
        for n, k in sizes.products:

            def forward(m: int = m, n: int = n, k: int = k) -> Any:
                x, w = make(m, k), make(n, k)
                return lambda: x @ w.t()

            def of_input(m: int = m, n: int = n, k: int = k) -> Any:
                g, w = make(m, n), make(n, k)
                return lambda: g @ w

            def of_weight(m: int = m, n: int = n, k: int = k) -> Any:
                g, x = make(m, n), make(m, k)
                return lambda: g.t() @ x

            yield "aten.mm", [(m, k), (k, n)], forward
            yield "aten.mm.dgrad", [(m, n), (n, k)], of_input
            yield "aten.mm.wgrad", [(n, m), (m, k)], of_weight


def _attention(sizes: TableSizes, make: _Maker) -> _Told:
    for samples, heads, t, k in sizes.attention:
        for causal in (True, False):

            def attend(
                samples: int = samples,
                heads: int = heads,
                t: int = t,
                k: int = k,
                causal: bool = causal,
                *,
                back: bool = False,
            ) -> Any:
                q, keys, v = (make(samples, heads, t, k).requires_grad_(back) for _ in range(3))

                def call() -> torch.Tensor:
                    return nn.functional.scaled_dot_product_attention(q, keys, v, is_causal=causal)

                return _backward_of(call, [q, keys, v]) if back else call

            shapes = [(samples, heads, t, k)] * 3
            kernel = "causal" if causal else ""
            name = "aten.scaled_dot_product_attention"
            yield name, shapes, attend, kernel
            yield f"{name}_backward", shapes, lambda attend=attend: attend(back=True), kernel


def _recurrent(sizes: TableSizes, make: _Maker) -> _Told:
    for samples, steps, width, layers in sizes.recurrent:
        for name, kind in (("lstm", nn.LSTM), ("gru", nn.GRU)):

            def run(
                kind: Any = kind,
                samples: int = samples,
                steps: int = steps,
                width: int = width,
                layers: int = layers,
                *,
                back: bool = False,
            ) -> Any:
                cells = kind(width, width, layers, batch_first=True, device=make.device, dtype=make.dtype)
                x = make(samples, steps, width).requires_grad_(back)

                def call() -> torch.Tensor:
                    with torch.set_grad_enabled(back):
                        output: torch.Tensor = cells(x)[0]
                    return output

                return _backward_of(call, [x, *cells.parameters()]) if back else call

            shapes = [(samples, steps, width), (layers, width, width)]
            yield f"aten.{name}", shapes, run
            yield f"aten.{name}_backward", shapes, lambda run=run: run(back=True)


def _backward_of(call: Callable[[], torch.Tensor], wanted: list[torch.Tensor]) -> Callable[[], object]:
    """The backward of a call whose forward ran once."""
    output = call()
    seed = torch.ones_like(output)
    return lambda: torch.autograd.grad([output], wanted, [seed], retain_graph=True)
