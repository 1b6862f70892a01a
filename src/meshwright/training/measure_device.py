"""Measure a CUDA device for a model: every distinct op by itself, and the host's time to issue them."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import torch

from meshwright.host import Host, find_gpu_state, name_gpu
from meshwright.measurement import (
    CudaClock,
    DeviceClock,
    measure_call,
    measure_device_ops,
    measure_device_optimizers,
    measure_issue,
    measure_links,
    merge_measurements,
    refuse_fatal,
)
from meshwright.records import to_measurements
from meshwright.spec import (
    EventSink,
    MeasurementError,
    Measurements,
    OpMeasurement,
)
from meshwright.spec.measurements import BUCKET_COPY, read_move_key
from meshwright.spec.precision import SIMULATED_ONLY, Precision, numbers_of
from meshwright.training.device_ops import ModelOps, capture_unallocated
from meshwright.training.measure import Sizes, host_overhead


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRun:
    """The measured table; ``left_out``: reasons by key. ``num_kept``: rows that the table had already."""

    table: Measurements
    left_out: dict[str, str] = field(default_factory=dict)
    num_kept: int = 0
    warnings: tuple[str, ...] = ()


def measure_device_here(
    reference: str | None,
    microbatch_sizes: Sequence[int],
    *,
    precisions: Sequence[str] = (),
    sizes: Sizes = (),
    device: str = "cuda:0",
    repeats: int = 10,
    known: Measurements | None = None,
    save: Callable[[Measurements], object] = lambda _: None,
    events: EventSink | None = None,
) -> DeviceRun:
    """Measure ops of the model (if one is named), optimizers, and the links among the GPUs of this host.

    ``known``: the table to which the rows are added; its rows of this device and torch are not measured again;
    ``save`` receives the whole table every few rows. ``precisions``: by default that of plans for this device.
    Raises MeasurementError for a table of another device, for a precision that no device computes in, and for errors
    of the device; and the errors of loading or capturing the model.
    """
    place, empty = empty_table(device)
    _refuse_other(known, empty)
    words = tuple(precisions) or (default_precision(place),)
    for word in words:
        _check_precision(word)
    uuid = str(torch.cuda.get_device_properties(place).uuid)
    before = find_gpu_state(Host(), uuid)
    links = _links(events)
    clock = CudaClock(place, repeats)
    run = measure_on(
        clock,
        replace(empty, transfers=links, overhead_s=host_overhead()),
        reference,
        microbatch_sizes,
        precisions=words,
        sizes=sizes,
        repeats=repeats,
        known=known,
        save=save,
        events=events,
    )
    after = find_gpu_state(Host(), uuid)
    told = [f"{state.clocks} {when}" for state, when in ((before, "before"), (after, "after")) if state is not None]
    table = replace(run.table, conditions="; ".join((run.table.conditions, *told)))
    save(table)
    return replace(run, table=table, warnings=before.warnings() if before is not None else ())


def measure_on(
    clock: DeviceClock,
    empty: Measurements,
    reference: str | None,
    microbatch_sizes: Sequence[int],
    *,
    precisions: Sequence[str],
    sizes: Sizes = (),
    repeats: int = 10,
    known: Measurements | None = None,
    save: Callable[[Measurements], object] = lambda _: None,
    events: EventSink | None = None,
) -> DeviceRun:
    """Like `measure_device_here`, with a clock of any device; ``empty`` names it and holds earlier measurements."""
    writer = _Writer(empty, known, save)
    writer.put(host_call_s=measure_call(clock))
    left_out: dict[str, str] = {}
    for size in microbatch_sizes if reference is not None else ():
        captured = capture_unallocated(str(reference), sizes, size)
        for word in precisions:
            model = ModelOps(captured, numbers_of(word), size, clock.device)
            missing = [op for op in model.ops() if op.key not in writer.kept]
            writer.num_kept += len(model.keys) - len(missing)
            chosen = (*missing, *model.moves(writer.kept))
            if not chosen:
                continue
            issued = _issue(model, clock, repeats, left_out, events) if missing else {}
            left_out |= measure_device_ops(chosen, clock, writer.add, issued=issued, events=events)
    states = dict.fromkeys(numbers_of(word).states for word in precisions)
    gradients = dict.fromkeys(numbers_of(word).gradients for word in precisions)
    wanted = writer.without_steps(tuple(states)), writer.without_copies(tuple(gradients))
    if any(wanted):
        rows = measure_device_optimizers(clock, states=wanted[0], gradients=wanted[1], events=events)
        writer.put(optimizers=rows)
    return DeviceRun(table=writer.save(), left_out=left_out, num_kept=writer.num_kept)


def default_precision(device: torch.device) -> Precision:
    """The precision of plans for a kind of device: mixed if bfloat16 is faster than float32."""
    return "mixed" if torch.cuda.get_device_capability(device) >= (8, 0) else "float32"


class _Writer:
    """The table as it grows: known rows stay, and it is saved every few seconds."""

    def __init__(
        self,
        empty: Measurements,
        known: Measurements | None,
        save: Callable[[Measurements], object],
        every_s: float = 2.0,
    ) -> None:
        self._table = empty if known is None else merge_measurements(known, empty)
        self._rows = {row.key: row for row in self._table.ops}
        self._save, self._every_s, self._saved = save, every_s, time.monotonic()
        same = known is not None and known.software == empty.software
        # Ops that a host issues have a time for that, unless their layer failed.
        issued = any(row.forward_issue_s for row in self._rows.values())
        done = (key for key, row in self._rows.items() if row.forward_issue_s or not issued or read_move_key(key))
        self.kept = frozenset(done) if same else frozenset()
        steps = self._table.optimizers if same else ()
        self._steps = {row.dtype for row in steps if row.issue_s}
        self._copies = {row.dtype for row in steps if row.kind == BUCKET_COPY}
        self.num_kept = 0

    def without_steps(self, states: tuple[str, ...]) -> tuple[str, ...]:
        """Types of optimizer states that are not measured yet."""
        return tuple(dtype for dtype in states if dtype not in self._steps)

    def without_copies(self, gradients: tuple[str, ...]) -> tuple[str, ...]:
        """Types of gradients whose copies into buckets are not measured yet."""
        return tuple(dtype for dtype in gradients if dtype not in self._copies)

    def add(self, row: OpMeasurement) -> None:
        self._rows[row.key] = row
        if time.monotonic() - self._saved > self._every_s:
            self.save()

    def put(self, **rows: Any) -> None:
        self._table = merge_measurements(self._table, replace(self._table, ops=(), **rows))
        self.save()

    def save(self) -> Measurements:
        self._table = replace(self._table, ops=tuple(self._rows.values()))
        self._save(self._table)
        self._saved = time.monotonic()
        return self._table


def _issue(
    model: ModelOps,
    clock: DeviceClock,
    repeats: int,
    left_out: dict[str, str],
    events: EventSink | None,
) -> dict[str, tuple[float, float]]:
    """Seconds of the host by key; layers that fail are left out, and their costs stay predicted."""
    found: dict[str, tuple[float, float]] = {}
    for name, make in model.segments():
        try:
            taken = measure_issue([make], clock, repeats=repeats, surrounding=model.surrounding, events=events)
        except Exception as error:
            refuse_fatal(error, f"Layer {name}", clock)
            left_out[f"issuing of layer {name}"] = f"{type(error).__name__}: {str(error).strip()[:200]}"
            clock.release()
            continue
        found = {**taken, **found}
    return found


def empty_table(device: str) -> tuple[torch.device, Measurements]:
    """The device, and an empty table for it."""
    if device not in {f"cuda:{index}" for index in range(torch.cuda.device_count())}:
        raise MeasurementError(
            f"Device {device!r} was given to time ops on; torch sees {torch.cuda.device_count()} CUDA devices here. "
            "Give cpu, or cuda:0 and so on."
        )
    place = torch.device(device)
    name = torch.cuda.get_device_name(place)
    return place, Measurements(
        device=name_gpu(name),
        software=f"torch {torch.__version__}, Python {platform.python_version()}",
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        conditions=f"{name}, CUDA {torch.version.cuda}; each op by itself, by CUDA graphs",
    )


def _refuse_other(known: Measurements | None, empty: Measurements) -> None:
    """Refuse a table of another device before anything is timed."""
    if known is not None:
        merge_measurements(known, empty)


def _check_precision(word: str) -> None:
    if numbers_of(word).products or word in SIMULATED_ONLY:
        raise MeasurementError(
            f"The precision {word!r} was given; ops are timed in types that torch multiplies by itself. Measure "
            "float32 for tf32 and mixed for float8 and mixed-float16: the differences are predicted."
        )


def _links(events: EventSink | None) -> tuple[Any, ...]:
    """Collectives among the GPUs of this host over NCCL; empty with one GPU."""
    count = torch.cuda.device_count()
    if count < 2:
        return ()
    rows = measure_links(num_ranks=count, events=events)
    return to_measurements(rows, str(rows.device[0])).transfers


def choose_device(device: str | None) -> str:
    """The device to time ops on: ``cpu``, or the first GPU if torch sees one and no ``device`` was named."""
    if device is None:
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    return "cuda:0" if device == "cuda" else device
