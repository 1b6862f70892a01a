"""Measures a machine as its ranks will use it: the same work in all processes at once, sharing the memory.

All results go into one table (`Measurements`): ops of the given model at the given batch sizes, optimizer steps, sends
and all-reduces. Figures of several ranks are averaged.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from meshwright.host import Host, processor_name
from meshwright.measurement.merge import merge_measurements
from meshwright.measurement.ops import measure_ops
from meshwright.measurement.optimizers import measure_optimizers
from meshwright.measurement.processes import RankContext, run_ranks
from meshwright.measurement.segments import OpSource
from meshwright.measurement.transfers import DEFAULT_SIZES, measure_transfers
from meshwright.spec import EventSink, MeasurementError, Measurements, OpMeasurement, Optimizer

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
    """Measure this machine with ``num_ranks`` processes at once, each with one thread on a core of its own.

    ``source(batch_size)`` makes the model in every process, so it must be picklable (a function of a module, or a
    functools.partial of one); None measures no ops. Each batch size gets up to ``repeats`` repetitions, fewer if they
    would take longer than ``budget_s``. ``device`` is the device kind's name in cluster descriptions;
    ``overhead_s`` is the runtime's time per instruction, which the runtime measures.
    Raises MeasurementError if a process fails or ``timeout_s`` passes.
    """
    if source is not None and not batch_sizes:
        raise MeasurementError("A model was given, but no batch sizes; name the microbatch sizes to measure.")
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
