"""Measure a device of this machine: matrix products, copies, and sends between ranks.

    rate of a dtype     2·m·k·n / t of an (m, k) × (k, n) product      copy     2·bytes / t, read and written

Medians, with all processes busy at once. A CPU device is one core with one thread (the products are those of the
shipped ``cpu.toml``); a GPU is alone, and its products are large enough to fill it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

import torch
import torch.distributed as dist

from meshwright.host import Rates
from meshwright.measurement.processes import RankContext, run_ranks
from meshwright.measurement.transfers import measure_transfers
from meshwright.report import fit_transfers
from meshwright.spec import EventSink, Link

_CPU_SHAPE, _GPU_SHAPE = (768, 768, 3072), (8192, 8192, 8192)
_CPU_DTYPES = ("float64", "float32", "bfloat16")
_GPU_DTYPES = ("float64", "float32", "float16", "bfloat16")
_CPU_COPY_BYTES, _GPU_COPY_BYTES = 2**26, 2**30
# The time limit of a figure: some CPUs have no fast bfloat16, some GPUs no fast float64.
_BUDGET_S = 1.0
_FEWEST_REPEATS = 3


def measure_rates(
    device: str = "cpu",
    *,
    num_ranks: int = 2,
    repeats: int = 10,
    timeout_s: float = 300.0,
    events: EventSink | None = None,
) -> Rates:
    """Time one device of this machine: ``cpu`` in ``num_ranks`` processes at once, or ``cuda:0`` in one.

    Raises MeasurementError if a process fails or ``timeout_s`` passes.
    """
    num_ranks = num_ranks if device == "cpu" else 1
    parts = run_ranks(_measure_rank, device, repeats, num_ranks=num_ranks, timeout_s=timeout_s, events=events)
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    how = f"{num_ranks} processes at once with one thread each" if device == "cpu" else "one process"
    return Rates(
        peak_flops_per_s={dtype: _rounded(rates[dtype] for rates, _, _ in parts) for dtype in parts[0][0]},
        memory_bandwidth_bytes_per_s=_rounded(copy for _, copy, _ in parts),
        link=parts[0][2],
        conditions=f"Measured {date} with torch {torch.__version__}, {how}, medians of up to {repeats}",
    )


def _measure_rank(context: RankContext, device: str, repeats: int) -> tuple[dict[str, float], float, Link | None]:
    rates = {}
    dtypes = _CPU_DTYPES if device == "cpu" else _GPU_DTYPES
    for done, dtype in enumerate(dtypes):
        rates[dtype] = _product_rate(device, getattr(torch, dtype), repeats)
        context.events.progress("measure rates", done + 1, len(dtypes))
    copied = _copy_rate(device, repeats)
    link = _measure_link(repeats, context.events) if context.num_ranks > 1 else None
    return rates, copied, link


def _product_rate(device: str, dtype: torch.dtype, repeats: int) -> float:
    rows, inner, columns = _CPU_SHAPE if device == "cpu" else _GPU_SHAPE
    left = torch.randn(rows, inner, device=device).to(dtype)
    right = torch.randn(inner, columns, device=device).to(dtype)
    return 2 * rows * inner * columns / _median_seconds(lambda: left @ right, device, repeats)


def _copy_rate(device: str, repeats: int) -> float:
    num_bytes = _CPU_COPY_BYTES if device == "cpu" else _GPU_COPY_BYTES
    source = torch.zeros(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _median_seconds(lambda: target.copy_(source), device, repeats)


def _rounded(figures: Iterable[float]) -> float:
    """The mean to four digits: further ones are not reproducible."""
    return float(f"{statistics.mean(figures):.4g}")


def _measure_link(repeats: int, events: EventSink) -> Link | None:
    """α and β of a send between ranks 0 and 1; None if the time does not grow with size."""
    rows = [row for row in measure_transfers(repeats=repeats, events=events) if row.kind == "send"]
    if not rows:
        return None
    latency_s, bandwidth = fit_transfers(rows)
    if not bandwidth:
        return None
    return Link(latency_s=_rounded([latency_s]), bandwidth_bytes_per_s=_rounded([bandwidth]))


def _median_seconds(action: Callable[[], object], device: str, repeats: int) -> float:
    """The median time of an action that every rank starts together."""
    samples: list[float] = []
    action()
    dist.barrier()
    for _ in range(repeats):
        finish(device)
        start = time.perf_counter()
        action()
        finish(device)
        samples.append(time.perf_counter() - start)
        if sum(samples) > _BUDGET_S and len(samples) >= _FEWEST_REPEATS:
            break
    return statistics.median(samples)


def finish(device: str | torch.device) -> None:
    """Wait until a device has finished the issued work; on processors it has."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
