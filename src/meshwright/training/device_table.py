"""A table of a CUDA device of this host, whatever the model: operators, optimizers, and the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from meshwright.host import Host, find_gpu_state
from meshwright.measurement import (
    CudaClock,
    DeviceClock,
    TableSizes,
    measure_call,
    measure_device_optimizers,
    measure_device_table,
)
from meshwright.records import Records, concat_records, from_measurements, make_records
from meshwright.records.table import Row, columns_of
from meshwright.spec import EventSink, Measurements
from meshwright.training.measure_device import empty_table


def device_table_here(
    *,
    device: str = "cuda:0",
    repeats: int = 10,
    known: Records | None = None,
    save: Callable[[Records], object] = lambda _: None,
    events: EventSink | None = None,
) -> tuple[Records, dict[str, str], tuple[str, ...]]:
    """Measure single operators, optimizers and the host on a CUDA device, whatever the model.

    Returns the rows, the reasons for omitted ones, and warnings. ``known``: rows that the table has already; those of
    this device and torch are not measured again. ``save`` receives the new rows every few seconds.
    Raises MeasurementError for a device that is not here.
    """
    place, empty = empty_table(device)
    state = find_gpu_state(Host(), str(torch.cuda.get_device_properties(place).uuid))
    if state is not None:
        empty = replace(empty, conditions=f"{empty.conditions}; {state.clocks} before")
    rows, left_out = device_table_on(CudaClock(place, repeats), empty, known=known, save=save, events=events)
    return rows, left_out, state.warnings() if state is not None else ()


def device_table_on(
    clock: DeviceClock,
    empty: Measurements,
    *,
    sizes: TableSizes | None = None,
    known: Records | None = None,
    save: Callable[[Records], object] = lambda _: None,
    every_s: float = 2.0,
    events: EventSink | None = None,
) -> tuple[Records, dict[str, str]]:
    """Like `device_table_here`, with a clock of any device; ``empty`` names the device."""
    columns = ("op", "phase", "shapes", "dtype", "kernel", "seconds", "spread", "num_samples")
    taken: list[Row] = []
    saved = [time.monotonic()]
    identity = ("op", "phase", "shapes", "dtype", "kernel")
    same = known.where(device=empty.device, software=empty.software) if known is not None else make_records(seconds=())
    have = set(zip(*(getattr(same, name).tolist() for name in identity), strict=True))

    def made() -> Records:
        return make_records(
            **columns_of(taken, columns),
            device=empty.device,
            software=empty.software,
            date=empty.date,
            source=empty.conditions,
        )

    def write(row: Row) -> None:
        taken.append(row)
        if time.monotonic() - saved[0] >= every_s:
            save(made())
            saved[0] = time.monotonic()

    left_out = measure_device_table(
        clock, write, sizes=sizes, kept=lambda row: tuple(row[name] for name in identity) in have, events=events
    )
    calls = replace(empty, host_call_s=measure_call(clock))
    if not any(op.startswith("optimizer.") for op, *_ in have):
        steps = measure_device_optimizers(
            clock, states=("float32", "bfloat16"), gradients=("float32", "bfloat16"), events=events
        )
        calls = replace(calls, optimizers=steps)
    rows = concat_records([made(), from_measurements(calls)])
    save(rows)
    return rows, left_out
