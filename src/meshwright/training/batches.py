"""Times of batches of a named model on a device of this machine: joins zoo, host and measurement."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch.utils import _pytree as pytree

from meshwright.host import Host, name_gpu, processor_name
from meshwright.measurement import BATCH_CONDITIONS, measure_batches, merge_measurements
from meshwright.spec import EventSink, MeasurementError, Measurements, ModelReferenceError, name_model
from meshwright.training.job import tile
from meshwright.training.measure import Sizes
from meshwright.zoo import ModelSource, load_model


def measure_batches_here(
    reference: str,
    batch_sizes: Sequence[int],
    *,
    sizes: Sizes = (),
    device: str | None = None,
    repeats: int = 100,
    budget_s: float = 60.0,
    known: Measurements | None = None,
    events: EventSink | None = None,
) -> Measurements:
    """Time the model's inference on batches of each size, on one device of this host; return a table of only these.

    ``device`` is ``cpu`` or ``cuda:0``; by default the first GPU if torch sees one. A processor computes with one
    thread, because the device kind ``cpu`` is one core. ``known``: the table to which the rows will be added; it is
    refused before anything is timed if it is for another device.

    Raises MeasurementError for a device that is not here or not the table's, for invalid sizes and for errors of the
    model while it runs, and the errors of loading the model.
    """
    place = _choose_device(device)
    name = name_model(reference, sizes)
    kind, hardware = _describe(place)
    empty = Measurements(
        device=kind,
        software=f"torch {torch.__version__}, Python {platform.python_version()}",
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        conditions=f"{BATCH_CONDITIONS}{name}: {hardware}, one process, one thread",
    )
    if known is not None:
        merge_measurements(known, empty)
    source = _load(reference, max(batch_sizes, default=1), sizes)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = measure_batches(
            source.model,
            _sliced(source),
            batch_sizes,
            name=name,
            device=place,
            repeats=repeats,
            budget_s=budget_s,
            events=events,
        )
    finally:
        torch.set_num_threads(threads)
    return replace(empty, batches=rows)


def _choose_device(device: str | None) -> torch.device:
    if device is None:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    here = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    chosen = "cuda:0" if device == "cuda" else device
    if chosen not in here:
        raise MeasurementError(
            f"Device {device!r} was given to time batches on; torch sees {', '.join(here)} here. Give one of these."
        )
    return torch.device(chosen)


def _describe(place: torch.device) -> tuple[str, str]:
    """The device kind, and the device's name in this machine."""
    if place.type == "cpu":
        return "cpu", processor_name(Host())
    name = torch.cuda.get_device_name(place)
    return name_gpu(name), name


def _load(reference: str, batch_size: int, sizes: Sizes) -> ModelSource:
    """The model with an example of the largest batch; with its own example, if its function takes no batch size."""
    options: dict[str, Any] = dict(sizes)
    try:
        return load_model(reference, batch_size=batch_size, **options)
    except ModelReferenceError:
        # Any other error would occur without a batch size, too.
        return load_model(reference, **options)


def _sliced(source: ModelSource) -> Callable[[int], Any]:
    """Batches of any size from the samples of the example, repeated if there are too few."""

    def first(tensor: torch.Tensor, count: int) -> torch.Tensor:
        return tensor[:count] if tensor.ndim and len(tensor) >= count else tile(tensor, count)

    return lambda count: pytree.tree_map_only(torch.Tensor, lambda item: first(item, count), source.inputs)
