"""Measure this machine on CPUs: a model's ops, optimizers, transfers, and the runtime's overhead (`measure_here`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from meshwright.capture import Captured, capture_model, flatten_batch, part
from meshwright.measurement import OpSource, measure_machine
from meshwright.runtime import measure_overhead
from meshwright.spec import EventSink, Measurements, NullSink
from meshwright.training.job import tile
from meshwright.zoo import ModelSource, load_model

Sizes = tuple[tuple[str, int], ...]


def measure_here(
    reference: str | None,
    microbatch_sizes: Sequence[int],
    *,
    sizes: Sizes = (),
    num_ranks: int = 2,
    repeats: int = 10,
    events: EventSink | None = None,
) -> Measurements:
    """Measure ops of a model, optimizers, transfers and the runtime's overhead on the CPUs of this host.

    ``reference`` names the model (None: no model), ``sizes`` its size options; its ops are timed at each of
    ``microbatch_sizes``. ``num_ranks``: the number of processes for transfers. Raises MeasurementError if a
    process fails, and the errors of loading or capturing the model.
    """
    events = events or NullSink()
    if reference is not None:
        captured_model(reference, sizes, None)  # a model that cannot be captured is refused here, not in the processes
    return measure_machine(
        partial(op_source, reference, sizes) if reference is not None else None,
        microbatch_sizes,
        num_ranks=num_ranks,
        repeats=repeats,
        overhead_s=host_overhead(),
        events=events,
    )


def host_overhead() -> float:
    """Return the host's seconds per instruction of the runtime, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure_overhead()
    finally:
        torch.set_num_threads(threads)


def op_source(reference: str, sizes: Sizes, batch_size: int) -> OpSource:
    """Return a model for `measurement`: its graph, modules of its ops, and batches from its example's samples."""
    source, captured = captured_model(reference, sizes, None)
    if captured.graph.batch_size not in (None, batch_size):
        source, captured = captured_model(reference, sizes, batch_size)

    def batch(count: int) -> Sequence[torch.Tensor]:
        example = (source.inputs, source.targets)
        inputs, targets = pytree.tree_map_only(torch.Tensor, lambda item: tile(item, count), example)
        return flatten_batch(captured, inputs, targets)

    return OpSource(
        graph=captured.graph,
        cut=lambda feeds, fetches, ops, size: part(captured, feeds, fetches, batch_size=size, ops=ops),
        batch=batch,
    )


@lru_cache(maxsize=4)
def captured_model(reference: str, sizes: Sizes, batch_size: int | None) -> tuple[ModelSource, Captured]:
    """Return the model of a reference, and its capture for training at one batch size.

    ``batch_size`` None: for all batch sizes if possible.
    """
    options: dict[str, Any] = dict(sizes)
    source = load_model(reference, batch_size=batch_size, **options)
    captured = capture_model(
        source.model, source.inputs, targets=source.targets, loss=source.loss, name=reference, verify=False
    )
    return source, captured
