"""Measure a whole model on batches of each size: inference on one device, as a server runs it.

All sizes are warmed up. Then each round runs one batch of each size, so that disturbances of the machine affect all
sizes equally. A sample is the time of one call, on a GPU until the device has finished. Rounds end when the number of
repeats is reached or the budget is spent, but not before three rounds.

The function that makes a batch is an argument, because this package may not import `zoo`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshwright.measurement.machine_table import finish
from meshwright.measurement.optimizer_timing import is_out_of_memory
from meshwright.spec import BatchMeasurement, EventSink, MeasurementError, NullSink

# Positional or keyword arguments of a model's forward.
Inputs = tuple[Any, ...] | dict[str, Any]

_MIN_REPEATS = 3
# The first call at a size fills the allocator and the caches of oneDNN or cuDNN, the second uses them.
_WARM_UP = 2


def measure_batches(
    model: nn.Module,
    make_inputs: Callable[[int], Inputs],
    batch_sizes: Sequence[int],
    *,
    name: str,
    device: torch.device | str = "cpu",
    budget_s: float = 60.0,
    repeats: int = 100,
    events: EventSink | None = None,
) -> tuple[BatchMeasurement, ...]:
    """Return the times of a model's inference on batches of each size, in ascending order of the sizes.

    The model is moved to the device and runs in evaluation mode; afterwards its modules have their former modes. On
    CPUs it uses the number of threads that the caller has set. If a size does not fit in memory, this size and all
    larger ones are left out, and ``events`` receives a metric ``left_out_batch_size`` for each. (Linux may overcommit
    host memory and then kill the process.)

    Args:
        model: A model whose forward accepts any number of samples.
        make_inputs: A function of a batch size that returns the arguments of the forward, as a tuple or a dict.
        batch_sizes: Numbers of samples, in any order.
        name: The model's name in the table (`meshwright.spec.name_model`).
        device: A torch device, or its name.
        budget_s: Seconds after which no further round starts, not counting the warm-up.
        repeats: Samples of each size; fewer if the budget is spent, but at least 3.
        events: Receives the progress.

    Raises:
        MeasurementError: For sizes below 1 or fewer than 3 repetitions, if the smallest size does not fit in memory,
            or for errors of the model.
    """
    _check(batch_sizes, repeats)
    sink, place = events or NullSink(), torch.device(device)
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.inference_mode():
            batches = _warm_up(model, make_inputs, sorted(set(batch_sizes)), name, place, sink)
            samples: dict[int, list[float]] = {size: [] for size in batches}
            start = time.perf_counter()
            for done in range(repeats):
                if done >= _MIN_REPEATS and time.perf_counter() - start > budget_s:
                    break
                for size, inputs in batches.items():
                    samples[size].append(_seconds(model, inputs, place))
                sink.progress(f"measure batches of {name}", done + 1, repeats)
    finally:
        for module, training in modes:
            module.training = training
    return tuple(_summarise(name, size, seconds) for size, seconds in samples.items())


def _check(batch_sizes: Sequence[int], repeats: int) -> None:
    if not batch_sizes or min(batch_sizes) < 1:
        raise MeasurementError(
            f"The batch sizes are {list(batch_sizes)}; expected sizes of at least 1 sample, and at least one size."
        )
    if repeats < _MIN_REPEATS:
        raise MeasurementError(
            f"The number of repetitions is {repeats}; a typical time needs at least {_MIN_REPEATS}. Give more."
        )


def _warm_up(
    model: nn.Module,
    make_inputs: Callable[[int], Inputs],
    sizes: Sequence[int],
    name: str,
    place: torch.device,
    sink: EventSink,
) -> dict[int, Inputs]:
    """The batches of all sizes that fit in memory, each run often enough that its next call is typical."""
    batches: dict[int, Inputs] = {}
    for position, size in enumerate(sizes):
        try:
            model.to(place).eval()
            inputs = pytree.tree_map_only(torch.Tensor, lambda item: item.to(place), make_inputs(size))
            for _ in range(_WARM_UP):
                _seconds(model, inputs, place)
        except Exception as error:
            if not is_out_of_memory(error):
                raise MeasurementError(
                    f"{name} raised {type(error).__name__} for a batch of {size}: {str(error).strip()[:500]}. Expected "
                    "a model that accepts any number of samples; correct the model, or leave this batch size out."
                ) from error
            if not batches:
                raise MeasurementError(
                    f"{name} and a batch of {size} do not fit in the memory of {place}. Give smaller batch sizes, a "
                    "smaller model or a device with more memory."
                ) from error
            for left_out in sizes[position:]:
                sink.metric("left_out_batch_size", left_out, position)
            return batches
        batches[size] = inputs
    return batches


def _seconds(model: nn.Module, inputs: Inputs, place: torch.device) -> float:
    """Seconds of one call; its result is released after the clock was read."""
    finish(place)
    start = time.perf_counter()
    outputs = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    finish(place)
    seconds = time.perf_counter() - start
    del outputs
    return seconds


def _summarise(name: str, batch_size: int, samples: list[float]) -> BatchMeasurement:
    median, p90, p99 = np.percentile(samples, (50, 90, 99)).tolist()
    return BatchMeasurement(
        model=name, batch_size=batch_size, seconds=median, p90_s=p90, p99_s=p99, num_samples=len(samples)
    )
