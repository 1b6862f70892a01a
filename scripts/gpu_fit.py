"""Fit the rates of memory-bound kernels to kernels measured alone, one sort and width after the other.

    minimise  Σ (ln measured / predicted)² + Σ ((p - prior) / deviation)²      p: logarithms of a rate's figures

by Gauss-Newton steps. A measured op has one or several kernels; all except the fitted ones are known by then. In the
measurements an op ran repeatedly, so all of its inputs are hot.

    validation/data/h100_ops.parquet   a table of the device, as `meshwright measure --device-table` writes it of others
    cost/models/gpu.json               what ``scripts/renew_gpu_model.py`` fits to it
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.costs import Interval, fit_interval
from meshwright.cost.gpu.gpu_products import GpuModel, Launch, ProductRates, Rate, alignment, launch_seconds
from meshwright.cost.gpu.launches import channel_sums, channel_writes, embedding_gradients
from meshwright.cost.kernels import Kernel, shipped_model
from meshwright.cost.optimizers import bytes_per_element
from meshwright.records.one_device import read_device_row
from meshwright.records.record_table import parse_sizes
from meshwright.spec import DTYPE_BYTES, Optimizer, load_cluster
from meshwright.validation import load_records

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshwright.cost.costs import Floats
    from meshwright.cost.optimizers import OptimizerLoop
    from meshwright.spec import DeviceKind

    Shapes = Sequence[Sequence[int]]
    # Seconds of ``count`` products of (m, k) by (k, n) of a dtype.
    Predict = Callable[[float, float, float, float, str], float]

# Priors of a rate, and the deviation of its logarithm: 2 µs for a kernel (`cost.roofline.LAUNCH_S`), most of the
# bandwidth, a cache twice as fast, some cycles for a turn.
_PRIOR = {"fixed": (2e-6, 1.0), "cached": (2.0, 0.3), "turn": (1e-8, 5.0)}
_SHARE = (0.8, 0.5)
# For a sort whose rows cannot separate its share from the rest of their time: it writes like element-wise ops.
_WRITING, _WRITING_SHARE = "batch_norm_output", (0.9, 0.1)
# Sorts in fitting order: those measured together with other kernels come later.
_ORDER: tuple[tuple[str, ...], ...] = (
    ("pointwise",),
    ("filling",),
    ("widening",),
    ("dropping",),
    ("layer_norm",),
    ("rms_norm",),
    ("norm_backward",),
    ("softmax",),
    ("softmax_backward",),
    ("column_sum",),
    ("joining",),
    ("gathering",),
    ("picking",),
    ("adding_rows",),
    ("adding_sorted_rows",),
    ("batch_norm", "batch_norm_output"),
    ("batch_norm_backward",),
    ("pooling",),
)
# Sorts whose share depends on the length of a row, with the fitted lengths; others have one share.
_ROWS: dict[str, tuple[int, ...]] = {
    "layer_norm": (768, 2048, 4096, 11008),
    "rms_norm": (768, 2048, 4096, 11008),
    "norm_backward": (768, 2048, 4096, 11008),
    "column_sum": (768, 2048, 4096, 11008),
    "softmax": (128, 512, 1024, 2048, 30522, 50257, 128256),
    "softmax_backward": (128, 512, 1024, 2048, 30522, 50257, 128256),
}
# The residual of a rate.
_SPREAD = 0.05
# Gauss-Newton steps; they converge long before.
_STEPS = 60
_PRODUCTS = frozenset({"aten.mm", "aten.mm.dgrad", "aten.mm.wgrad", "aten.bmm"})
# Sides of the measured convolutions' images.
_SIDES = (7, 14, 28, 56, 112)
# Intervals of other devices, whose shares of the datasheet were not measured. V100 to H200 reach 0.8 to 0.95 of their
# bandwidth in BabelStream (Deakin et al. and the tables of its repository), and the libraries' kernels differ.
_ELSEWHERE = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOp:
    """Seconds of one aten op on its own; ``shapes`` of its inputs as in the benchmark."""

    op: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """Seconds of an AdamW step over a number of elements, by a loop over them."""

    loop: OptimizerLoop
    dtype: str
    num_elements: int
    seconds: float


def kernels_of(row: MeasuredOp, num_multiprocessors: int) -> tuple[Launch, ...]:
    """Return the kernels of a measured op; empty for other ops."""
    describe = _KERNELS.get(row.op)
    return describe(DTYPE_BYTES[row.dtype], row.shapes, num_multiprocessors) if describe is not None else ()


def fit_gpu(rows: Sequence[MeasuredOp], steps: Sequence[MeasuredStep], kind: DeviceKind, predict: Predict) -> GpuModel:
    """Return the model from ops and optimizer steps measured on a device; its interval from held-out ops.

    ``predict``: seconds of a product by the kernel predictor, given m, n, k, count and dtype.
    """
    rates = _fit(rows, kind)
    ratios = np.array([ratio for part in ("large", "small") for _, ratio in left_out(rows, kind, part)])
    regressed = fit_interval(ratios, np.ones(len(ratios)))
    elsewhere = Interval(low=regressed.low / _ELSEWHERE, high=regressed.high * _ELSEWHERE)
    return GpuModel(
        device=kind.name,
        clock_hz=kind.clock_hz,
        rates=rates,
        products=fit_products(rows, kind, predict),
        optimizer_shares=fit_optimizer_shares(steps, kind),
        regressed=regressed,
        transferred=elsewhere,
    )


def fit_products(rows: Sequence[MeasuredOp], kind: DeviceKind, predict: Predict) -> ProductRates:
    """Return the errors of the product predictor: medians over the rows of each question."""
    aligned: dict[str, list[float]] = {"float32": [], "float32_many": []}
    odd: dict[str, list[float]] = {"read": [], "written": []}
    cycles = kind.num_multiprocessors * kind.clock_hz
    for row in rows:
        if row.op not in _PRODUCTS:
            continue
        (*batch, m, k), n = row.shapes[0], row.shapes[1][-1]
        count = math.prod(batch)
        if row.dtype == "float32":
            ratio = row.seconds / predict(m, n, k, count, row.dtype)
            aligned["float32_many" if batch else "float32"].append(ratio)
        elif min(map(alignment, (m, n, k))) == 1:
            which = "written" if alignment(n) == 1 else "read"
            odd[which].append(2.0 * m * n * k * count / row.seconds / cycles)
    factors = {
        kernel: {
            str(DTYPE_BYTES[dtype]): tuple(_convolution_factor(rows, dtype, side, kernel, predict) for side in _SIDES)
            for dtype in ("bfloat16", "float32")
        }
        for kernel in ("point", "window")
    }
    return ProductRates(
        odd_input=float(np.median(odd["read"])),
        odd_output=float(np.median(odd["written"])),
        float32=float(np.median(aligned["float32"])),
        float32_many=float(np.median(aligned["float32_many"])),
        places=tuple(side**2 for side in _SIDES),
        point=factors["point"],
        window=factors["window"],
    )


def _convolution_factor(rows: Sequence[MeasuredOp], dtype: str, side: int, kernel: str, predict: Predict) -> float:
    """Return mean measured over predicted seconds of convolutions on images of a side, forward and backward."""
    arithmetic = "tf32" if dtype == "float32" else dtype
    found = []
    for row in rows:
        if "convolution" not in row.op or row.dtype != dtype:
            continue
        (samples, channels, height, width), (outputs, _, *window) = row.shapes[-2:]
        if height != side or (math.prod(window) == 1) != (kernel == "point"):
            continue
        m, n, k = samples * height * width, outputs, channels * math.prod(window)
        products = [(m, k, n), (k, n, m)] if row.op.endswith("backward") else [(m, n, k)]
        found.append(row.seconds / sum(predict(*sizes, 1, arithmetic) for sizes in products))
    return float(np.exp(np.mean(np.log(found))))


def fit_optimizer_shares(steps: Sequence[MeasuredStep], kind: DeviceKind) -> dict[str, float]:
    """Return the share of the bandwidth in steps of fused AdamW that are long enough to be limited by the device."""
    shares: dict[str, float] = {}
    for step in steps:
        moved = step.num_elements * bytes_per_element(Optimizer(kind="adamw"), step.dtype, step.loop)
        width = str(DTYPE_BYTES[step.dtype])
        share = moved / (step.seconds * kind.memory_bandwidth_bytes_per_s)
        if step.loop == "fused":
            shares[width] = max(shares.get(width, 0.0), share)
    return shares


def left_out(rows: Sequence[MeasuredOp], kind: DeviceKind, part: str) -> list[tuple[MeasuredOp, float]]:
    """Return measured / predicted of a third of each op's rows.

    They are those with the most seconds ("large") or with the fewest ("small").
    """
    kept, tested = split_by_size(rows, kind, part)
    rates = _fit(kept, kind)
    return [(row, row.seconds / predicted(rates, row, kind)) for row in tested]


def split_by_size(rows: Sequence[MeasuredOp], kind: DeviceKind, part: str) -> tuple[list[MeasuredOp], list[MeasuredOp]]:
    """Return (rows to fit, rows held out): a third of each op, dtype and row length with at least three rows."""
    alike: dict[tuple[str, str, int], list[MeasuredOp]] = {}
    for row in rows:
        launches = kernels_of(row, kind.num_multiprocessors)
        if launches:
            knots = any(launch.sort in _ROWS for launch in launches)
            alike.setdefault((row.op, row.dtype, row.shapes[0][-1] if knots else 0), []).append(row)
    kept, tested = [], []
    for group in alike.values():
        ordered = sorted(group, key=lambda row: row.seconds, reverse=part == "large")
        count = len(ordered) // 3
        tested += ordered[:count]
        kept += ordered[count:]
    return kept, tested


def predicted(rates: dict[str, Rate], row: MeasuredOp, kind: DeviceKind) -> float:
    """Return the seconds of a measured op by rates that were fitted on its device."""
    launches = kernels_of(row, kind.num_multiprocessors)
    return sum(launch_seconds(rates[_name(launch)], launch, kind, kind.clock_hz) for launch in launches)


def _fit(rows: Sequence[MeasuredOp], kind: DeviceKind) -> dict[str, Rate]:
    rates: dict[str, Rate] = {}
    described = [(row, kernels_of(row, kind.num_multiprocessors)) for row in rows]
    for sorts in _ORDER:
        for width in (2, 4):
            names = [f"{sort}/{width}" for sort in sorts]
            wanted = [(row, launches) for row, launches in described if any(_name(one) in names for one in launches)]
            known = [
                (row, launches)
                for row, launches in wanted
                if all(_name(one) in names or _name(one) in rates for one in launches)
            ]
            rates.update(_fit_together(names, known, rates, kind))
    return rates


def _name(launch: Launch) -> str:
    return f"{launch.sort}/{launch.width}"


def _fit_together(
    names: list[str], rows: list[tuple[MeasuredOp, tuple[Launch, ...]]], rates: dict[str, Rate], kind: DeviceKind
) -> dict[str, Rate]:
    """Return the rates of some sorts, from rows without other unknown sorts."""
    knots = [_ROWS.get(name.partition("/")[0], (1,)) for name in names]
    lengths = [3 + len(rows_at) for rows_at in knots]
    prior, deviation = (
        np.array([
            value[part]
            for name, rows_at in zip(names, knots, strict=True)
            for value in (*_PRIOR.values(), *[_share_prior(name)] * len(rows_at))
        ])
        for part in (0, 1)
    )  # fmt: skip
    prior = np.log(prior)
    target = np.log([row.seconds for row, _ in rows])

    def made(at: Floats) -> dict[str, Rate]:
        parts = np.split(np.exp(at), np.cumsum(lengths)[:-1])
        return {
            name: Rate(
                fixed_s=float(part[0]),
                rows=rows_at,
                shares=tuple(float(share) for share in part[3:]),
                cached=float(part[1]),
                turn_s=float(part[2]),
            )
            for name, rows_at, part in zip(names, knots, parts, strict=True)
        }

    def residuals(at: Floats) -> Floats:
        known = {**rates, **made(at)}
        sums = [
            sum(launch_seconds(known[_name(one)], one, kind, kind.clock_hz) for one in launches) for _, launches in rows
        ]
        return np.concatenate([(np.log(sums) - target) / _SPREAD, (at - prior) / deviation])

    return made(_least_squares(residuals, prior))


def _share_prior(name: str) -> tuple[float, float]:
    return _WRITING_SHARE if name.startswith(_WRITING) else _SHARE


def _least_squares(residuals: Callable[[Floats], Floats], start: Floats) -> Floats:
    """Minimise by Levenberg-Marquardt from ``start`` (shape: parameters)."""
    at, damping = start.copy(), 1.0
    rest = residuals(at)
    for _ in range(_STEPS):
        slopes = np.stack([(residuals(at + 1e-4 * unit) - rest) / 1e-4 for unit in np.eye(len(at))], axis=1)
        curvature = slopes.T @ slopes
        while damping < 1e9:
            step = -np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), slopes.T @ rest)
            there = at + step.clip(-1.0, 1.0)
            new = residuals(there)
            if new @ new < rest @ rest:
                break
            damping *= 4
        else:
            break
        at, rest, damping = there, new, max(damping / 4, 1e-9)
    return at


def _rowed(sort: str, reads: int, writes: int) -> Callable[[int, Shapes, int], tuple[Launch, ...]]:
    """Return a description of one kernel with these passes over its first input; its rows are the last dim."""

    def describe(width: int, shapes: Shapes, units: int) -> tuple[Launch, ...]:
        del units
        moved = float(np.prod(shapes[0])) * width * (reads + writes)
        return (Launch(sort=sort, width=width, row=shapes[0][-1], hot=moved),)

    return describe


def _cast(width: int, shapes: Shapes, units: int) -> tuple[Launch, ...]:
    del units
    sort = "widening" if width == DTYPE_BYTES["bfloat16"] else "pointwise"
    moved = float(np.prod(shapes[0])) * (DTYPE_BYTES["bfloat16"] + DTYPE_BYTES["float32"])
    return (Launch(sort=sort, width=4, hot=moved),)


def _dropped(width: int, shapes: Shapes, units: int) -> tuple[Launch, ...]:
    del units
    return (Launch(sort="dropping", width=width, hot=float(np.prod(shapes[0])) * (2 * width + 1)),)


def _gathered(width: int, shapes: Shapes, units: int) -> tuple[Launch, ...]:
    del units
    return (Launch(sort="gathering", width=width, hot=2.0 * shapes[1][0] * shapes[0][1] * width),)


def _picked(width: int, shapes: Shapes, units: int) -> tuple[Launch, ...]:
    del shapes, units
    return (Launch(sort="picking", width=width),)


def _embedding_gradients(width: int, shapes: Shapes, units: int) -> tuple[Launch, ...]:
    del units
    table, gathered = (math.prod(shapes[place]) * width for place in (2, 0))
    return embedding_gradients(width, shapes[1][0], table, gathered, shapes[0][1])


def _batch_norm(width: int, shapes: Shapes, units: int) -> tuple[Launch, ...]:
    size = float(np.prod(shapes[0])) * width
    output = channel_writes(width, shapes[0], size, size, units)
    return channel_sums("batch_norm", width, shapes[0], units), _all_hot(output)


def _all_hot(launch: Launch) -> Launch:
    return replace(launch, cold=0.0, hot=launch.hot + launch.cold)


_KERNELS: dict[str, Callable[[int, Shapes, int], tuple[Launch, ...]]] = {
    **dict.fromkeys(("aten.add", "aten.mul"), _rowed("pointwise", 2, 1)),
    **dict.fromkeys(("aten.gelu", "aten.silu", "aten.relu", "aten.relu_"), _rowed("pointwise", 1, 1)),
    **dict.fromkeys(("aten.gelu_backward", "aten.silu_backward", "aten.threshold_backward"), _rowed("pointwise", 2, 1)),
    "aten._to_copy": _cast,
    "aten.zero_": _rowed("filling", 0, 1),
    "aten.nll_loss_backward": _rowed("filling", 0, 1),
    "aten.nll_loss_forward": _picked,
    "aten.native_dropout": _dropped,
    "aten.native_layer_norm": _rowed("layer_norm", 1, 1),
    "rms_norm": _rowed("rms_norm", 1, 1),
    "aten.native_layer_norm_backward": _rowed("norm_backward", 2, 1),
    "aten.sum.dim0": _rowed("column_sum", 1, 0),
    "aten.cat.dim1": _rowed("joining", 2, 2),
    **dict.fromkeys(("aten._softmax", "aten._log_softmax"), _rowed("softmax", 1, 1)),
    **dict.fromkeys(
        ("aten._softmax_backward_data", "aten._log_softmax_backward_data"), _rowed("softmax_backward", 2, 1)
    ),
    "aten.embedding": _gathered,
    "aten.embedding_dense_backward": _embedding_gradients,
    "aten.native_batch_norm": _batch_norm,
    "aten.native_batch_norm_backward": lambda width, shapes, units: (
        channel_sums("batch_norm_backward", width, shapes[0], units),
    ),
    "aten.max_pool2d": lambda width, shapes, units: (
        Launch(sort="pooling", width=width, turns=float(np.prod(shapes[0])) / 4 * 9 / units),
    ),
}

_LOOPS: dict[str, OptimizerLoop] = {"optimizer.adamw.fused": "fused", "optimizer.adamw.foreach": "foreach"}


def measured_kind() -> DeviceKind:
    """The kind of device that the ops were measured on."""
    return load_cluster("H100").device_kinds[0]


def load_ops() -> list[MeasuredOp]:
    """The ops with their seconds."""
    rows = load_records("h100_ops")
    columns = zip(rows.op, rows.shapes, rows.kernel, rows.dtype, rows.seconds.tolist(), strict=True)
    found = ((read_device_row(op, shapes, kernel), dtype, seconds) for op, shapes, kernel, dtype, seconds in columns)
    return [
        MeasuredOp(op=read[0], dtype=dtype, shapes=read[1], seconds=seconds)
        for read, dtype, seconds in found
        if read is not None
    ]


def load_optimizer_steps() -> list[MeasuredStep]:
    """Steps of AdamW over many tensors at once."""
    rows = load_records("h100_ops")
    columns = zip(rows.op, rows.shapes, rows.dtype, rows.seconds.tolist(), strict=True)
    return [
        MeasuredStep(
            loop=_LOOPS[op], dtype=dtype, num_elements=(parse_sizes(shapes) or {})["elements"], seconds=seconds
        )
        for op, shapes, dtype, seconds in columns
        if op in _LOOPS
    ]


def fit_shipped() -> GpuModel:
    """The model of the shipped rows."""
    kind, kernels = measured_kind(), shipped_model()

    def predict(m: float, n: float, k: float, count: float, dtype: str) -> float:
        sizes = {"m": [m], "n": [n], "k": [k], "count": [count]}
        return float(kernels.predict(Kernel(op="matmul", dtype=dtype, device=kind), sizes).seconds[0])

    return fit_gpu(load_ops(), load_optimizer_steps(), kind, predict)
