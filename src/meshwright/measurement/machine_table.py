"""Measure a machine with the number of ranks that will use it (`measure_machine`), or one device (`measure_rates`).

All processes do the same work at once, so they share the memory's bandwidth as in a real run. The result is one table
(`Measurements`): ops of a model at given batch sizes, optimizer steps, sends and all-reduces. Figures are averaged over
ranks. `probe` prints the properties of torch on this machine.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from meshwright.host import Host, Rates, processor_name
from meshwright.measurement.copy_timing import DEFAULT_SIZES, measure_transfers
from meshwright.measurement.merge import merge_measurements
from meshwright.measurement.op_timing import measure_ops
from meshwright.measurement.optimizer_timing import measure_optimizers
from meshwright.measurement.rank_processes import RankContext, run_ranks
from meshwright.measurement.segments import OpSource
from meshwright.report import fit_transfers
from meshwright.spec import EventSink, Link, MeasurementError, Measurements, OpMeasurement, Optimizer

_CPU_SHAPE, _GPU_SHAPE = (768, 768, 3072), (8192, 8192, 8192)
_CPU_DTYPES = ("float64", "float32", "bfloat16")
_GPU_DTYPES = ("float64", "float32", "float16", "bfloat16")
_CPU_COPY_BYTES, _GPU_COPY_BYTES = 2**26, 2**30
# The time limit of a figure: some CPUs have no fast bfloat16, some GPUs no fast float64.
_BUDGET_S = 1.0
_FEWEST_REPEATS = 3


# Matrix products, copies, and sends between ranks:
#
#     rate of a dtype     2·m·k·n / t of an (m, k) × (k, n) product      copy     2·bytes / t, read and written
#
# Medians, with all processes busy at once. A CPU device is one core with one thread (the products are those of the
# shipped ``cpu.toml``); a GPU is alone, and its products are large enough to fill it.
def measure_rates(
    device: str = "cpu",
    *,
    num_ranks: int = 2,
    repeats: int = 10,
    timeout_s: float = 300.0,
    events: EventSink | None = None,
) -> Rates:
    """Return the measured peak FLOP/s by dtype, memory bandwidth and link of one device of this machine.

    ``device``: "cpu", measured in ``num_ranks`` processes at once, or for example "cuda:0", measured in one process.
    Raises MeasurementError if a process fails or ``timeout_s`` passes.
    """
    num_ranks = num_ranks if device == "cpu" else 1
    parts = run_ranks(_measure_rank_rates, device, repeats, num_ranks=num_ranks, timeout_s=timeout_s, events=events)
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    how = f"{num_ranks} processes at once with one thread each" if device == "cpu" else "one process"
    return Rates(
        peak_flops_per_s={dtype: _rounded(rates[dtype] for rates, _, _ in parts) for dtype in parts[0][0]},
        memory_bandwidth_bytes_per_s=_rounded(copy for _, copy, _ in parts),
        link=parts[0][2],
        conditions=f"Measured {date} with torch {torch.__version__}, {how}, medians of up to {repeats}",
    )


def _measure_rank_rates(context: RankContext, device: str, repeats: int) -> tuple[dict[str, float], float, Link | None]:
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
    """Wait until a CUDA device has finished the issued work; return at once for a CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


_MEETING_TIMEOUT = timedelta(seconds=10)


# ``python -m meshwright.measurement.machine_table RANK ADDRESS:PORT ...`` prints facts of torch as JSON lines.
#
# Two processes are started, with ranks 0 and 1; the first prints. They meet at each address over a TCP store, and gloo
# adds 1 and 2. Lines: ``{"build": ...}``, ``{"pair": ADDRESS, "error": ...}``, ``{"device": ...}``. `meshwright.host`
# reads them; it loads no torch and survives any failure here.
def probe(rank: int, meetings: list[str]) -> None:
    """Print JSON lines with torch's build, with the result of a connection at every address, and with the devices.

    Two processes, with ``rank`` 0 and 1, must call this function; rank 0 prints. ``meetings``: texts "ADDRESS:PORT".
    """
    if rank == 0:
        _print({"build": _describe_build()})
    if dist.is_available() and dist.is_gloo_available():
        for meeting in meetings:
            row = {"pair": meeting.rpartition(":")[0], **_meet(rank, meeting)}
            if rank == 0:
                _print(row)
    if rank == 0:
        for device in _describe_devices():
            _print(device)


def _meet(rank: int, meeting: str) -> dict[str, Any]:
    try:
        dist.init_process_group(
            "gloo", init_method=f"tcp://{meeting}", rank=rank, world_size=2, timeout=_MEETING_TIMEOUT
        )
        total = torch.tensor([1.0 + rank])
        dist.all_reduce(total)
        dist.destroy_process_group()
    except Exception as error:  # any error is the answer
        return {"error": str(error).strip().partition("\n")[0] or type(error).__name__}
    return {} if total.item() == 3.0 else {"error": f"1 + 2 gave {total.item():g}"}


def _describe_build() -> dict[str, Any]:
    nccl = None
    if torch.version.cuda and dist.is_available() and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl}


def _describe_devices() -> list[dict[str, Any]]:
    """One line per CUDA device, or the reason why none is usable although torch was built for CUDA."""
    if not torch.version.cuda:
        return []
    try:
        torch.cuda.init()
        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except Exception as error:  # a missing or old driver raises several kinds
        reason = str(error).strip().partition("\n")[0]
        return [{"build": {**_describe_build(), "cuda_error": reason}}]
    return [
        {
            "device": {
                "name": item.name,
                "memory_bytes": item.total_memory,
                "capability": [item.major, item.minor],
                "uuid": str(getattr(item, "uuid", "")),
            }
        }
        for item in properties
    ]


def _print(row: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    probe(int(sys.argv[1]), sys.argv[2:])


ALL_OPTIMIZERS = (Optimizer(kind="sgd"), Optimizer(kind="sgd", momentum=True), Optimizer(kind="adamw"))
# Share of the free memory that the processes may fill together.
_MEMORY_SHARE = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The request to every rank."""

    source: Callable[[int], OpSource] | None
    batch_sizes: tuple[int, ...]
    repeats: int
    budget_s: float
    optimizers: tuple[Optimizer, ...]
    dtype: str
    transfer_sizes: tuple[int, ...]
    max_bytes: int


def measure_machine(
    source: Callable[[int], OpSource] | None,
    batch_sizes: Sequence[int] = (),
    *,
    num_ranks: int = 2,
    repeats: int = 10,
    budget_s: float = 60.0,
    optimizers: Sequence[Optimizer] = ALL_OPTIMIZERS,
    dtype: str = "float32",
    transfer_sizes: Sequence[int] = DEFAULT_SIZES,
    device: str = "cpu",
    overhead_s: float = 0.0,
    timeout_s: float = 1800.0,
    events: EventSink | None = None,
) -> Measurements:
    """Return a table measured on this machine by ``num_ranks`` processes at once, each with one thread and core.

    ``source``: a function of a batch size that returns the model; None to measure no ops. It is called in every
    process, so it must be picklable (a function of a module, or a functools.partial of one). ``repeats``: repetitions
    per batch size; fewer if they would take longer than ``budget_s`` seconds. ``device``: name of the device kind in
    cluster descriptions. ``overhead_s``: seconds of the runtime per instruction, as measured by the runtime. Raises
    MeasurementError for a model without batch sizes, and if a process fails or ``timeout_s`` passes.
    """
    if source is not None and not batch_sizes:
        raise MeasurementError("A model was given without batch sizes; give the microbatch sizes to measure.")
    request = _Request(
        source=source,
        batch_sizes=tuple(batch_sizes),
        repeats=repeats,
        budget_s=budget_s,
        optimizers=tuple(optimizers),
        dtype=dtype,
        transfer_sizes=tuple(transfer_sizes) if num_ranks > 1 else (),
        max_bytes=int(_MEMORY_SHARE * _free_bytes() / num_ranks),
    )
    empty = Measurements(
        device=device,
        software=f"torch {torch.__version__}, Python {platform.python_version()}",
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        conditions=f"{processor_name(Host())}, {os.cpu_count()} cores; {num_ranks} processes at once, one thread each, "
        "one core each; gloo",
        overhead_s=overhead_s,
    )
    parts = run_ranks(_measure_rank, request, empty, num_ranks=num_ranks, timeout_s=timeout_s, events=events)
    return _average(parts)


class _Neighbours:
    """The other ranks, through the process group."""

    def wait(self) -> None:
        dist.barrier()

    def agree(self, count: int) -> int:
        smallest = torch.tensor(count)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        return int(smallest)


def _measure_rank(context: RankContext, request: _Request, empty: Measurements) -> Measurements:
    table = empty
    if request.transfer_sizes:
        transfers = measure_transfers(sizes=request.transfer_sizes, repeats=request.repeats, events=context.events)
        table = replace(table, transfers=transfers)
    if request.optimizers:
        steps = measure_optimizers(
            request.optimizers,
            dtype=request.dtype,
            repeats=request.repeats,
            before_repeat=dist.barrier,
            events=context.events,
        )
        table = replace(table, optimizers=steps)
    for batch_size in request.batch_sizes if request.source is not None else ():
        assert request.source is not None
        run = measure_ops(
            request.source(batch_size),
            batch_size,
            repeats=request.repeats,
            max_bytes=request.max_bytes,
            budget_s=request.budget_s,
            company=_Neighbours(),
            events=context.events,
        )
        context.events.metric(f"residual_batch_{batch_size}", run.residual, 0)
        table = merge_measurements(table, replace(empty, ops=run.ops))
    return table


def _average(tables: list[Measurements]) -> Measurements:
    """The mean over ranks of every figure (not all ranks take part in every transfer)."""
    return replace(
        tables[0],
        ops=tuple(_mean_op([table.ops[i] for table in tables]) for i in range(len(tables[0].ops))),
        optimizers=_mean_rows([table.optimizers for table in tables], ("kind", "dtype", "num_elements", "num_tensors")),
        transfers=_mean_rows([table.transfers for table in tables], ("kind", "num_ranks", "num_bytes")),
    )


def _mean_op(rows: list[OpMeasurement]) -> OpMeasurement:
    figures = ("forward_s", "backward_s", "accumulate_s", "spread")
    means = {name: float(np.mean([getattr(row, name) for row in rows])) for name in figures}
    return OpMeasurement(key=rows[0].key, num_samples=sum(row.num_samples for row in rows), **means)


def _mean_rows(tables: list[tuple[Any, ...]], identity: tuple[str, ...]) -> tuple[Any, ...]:
    """Average the float columns of rows that agree in ``identity``."""
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for row in (row for table in tables for row in table):
        groups.setdefault(tuple(getattr(row, name) for name in identity), []).append(row)
    averaged = []
    for rows in groups.values():
        columns = [name for name in rows[0].__dataclass_fields__ if name not in identity]
        averaged.append(
            replace(rows[0], **{name: float(np.mean([getattr(row, name) for row in rows])) for name in columns})
        )
    return tuple(averaged)


def _free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
