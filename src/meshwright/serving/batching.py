"""Equations of batching under deadlines, and their bounds; latencies from a table (`take_latencies`).

The equations give rates for given devices, and devices for given rates. l(b) is the latency of a batch of b requests,
α b + β or interpolated linearly between measured sizes; L is the SLO, N the number of devices, r the request rate.

    throughput       N b / l(b)                 `throughput`
    uncoordinated    2 l(b) ≤ L                 a request that just misses a batch waits for all of it (Nexus)
    staggered        (1 + 1/N) l(b) ≤ L         a device is free every l(b) / N
                     or b = 1 and l(1) ≤ L      a single request waits for no other request
    for N < 1        l(b) + b / r ≤ L           waiting for b requests at rate r, for both equations; or b = 1

Each of several models that share devices needs a fractional number of devices, N = r l(b) / b (`devices_for`). The
devices can serve all models if the sum is at most the number of devices (`bound_scale`).

Sources: Nexus (SOSP 2019, section 4.1) for throughput and the uncoordinated equation; Symphony (arXiv 2308.07470,
section 3) for the staggered equation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.spec import Deployment, Latency, Measurements, ServedModel, ServingError, name_model


# Models that have a latency keep it. The others take the medians of all measured batch sizes of their model
# (`meshwright measure MODEL --batches`), found by name (`spec.name_model`): the reference as it was typed, or another
# path to the same file.
def take_latencies(deployment: Deployment, table: Measurements) -> Deployment:
    """Return the deployment with measured latencies from ``table`` for the models that have no latency.

    Raises ServingError if the table lacks one of these models, and if all models have a latency already.
    """
    if all(model.latency is not None for model in deployment.models):
        raise ServingError("All models of the deployment have a latency already; the measurements are not needed.")
    return replace(deployment, models=tuple(_with_latency(model, table) for model in deployment.models))


def _with_latency(model: ServedModel, table: Measurements) -> ServedModel:
    if model.latency is not None:
        return model
    name = name_model(model.model or model.name, model.sizes.items())
    key = _key(name)
    measured = {row.batch_size: row.seconds for row in table.batches if _key(row.model) == key}
    if not measured:
        known = ", ".join(sorted({row.model for row in table.batches})) or "none"
        raise ServingError(
            f"Model {model.name!r}: the measurements have no batches of {name}; they have those of: {known}. Measure "
            f"it: meshwright measure {model.model or 'MODEL'} --batches 1..64:7log"
        )
    return replace(model, latency=Latency.through(measured.items()))


def _key(name: str) -> str:
    """Return a key that is the same for two paths to one file."""
    return str(Path(name).expanduser().resolve()) if "/" in name or Path(name).suffix else name


Equation = Literal["staggered", "uncoordinated"]


def throughput(latency: Latency, batch: int, num_devices: float = 1.0) -> float:
    """Return the requests per second of ``num_devices`` devices that compute only batches of size ``batch``."""
    return num_devices * batch / latency.of(batch)


def largest_batch(latency: Latency, seconds: float) -> int:
    """Return the size of the largest batch that takes at most ``seconds``; 0 if a batch of one takes longer."""
    if latency.of(1) > seconds:
        return 0
    low, high = 1, latency.largest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if latency.of(middle) <= seconds else (low, middle - 1)
    return low


def best_batch(latency: Latency, most: int) -> int:
    """Return the batch size up to ``most`` with the highest throughput.

    This is ``most`` for a latency α b + β, but not always for a latency given by points.
    """
    sizes = [most, *(size for size, _ in latency.points if size < most)]
    return max(sizes, key=lambda size: throughput(latency, size))


def devices_for(latency: Latency, slo_s: float, rate: float, equation: Equation = "staggered") -> float:
    """Return the number of devices that a model needs for ``rate`` requests per second, by an equation of this module.

    The number is not rounded; it is infinite if no number of devices suffices.
    """
    if rate == 0:
        return 0.0
    low, high = 1, largest_batch(latency, slo_s / 2 if equation == "uncoordinated" else slo_s)
    most = high
    if not high:
        return math.inf
    # Where devices are staggered, l(b) / N is also b / r.
    while low < high:
        middle = (low + high + 1) // 2
        if latency.of(middle) + middle / rate <= slo_s:
            low = middle
        else:
            high = middle - 1
    needed = rate / throughput(latency, best_batch(latency, low))
    if low < most and latency.of(low + 1) < slo_s:
        # A larger batch fills too slowly, but can start before it is full, as if requests came faster: the devices that
        # serve a higher rate also serve a lower one.
        needed = min(needed, latency.of(low + 1) / (slo_s - latency.of(low + 1)))
    return needed


def bound_scale(
    models: Sequence[ServedModel], rates: Sequence[float], num_devices: int, equation: Equation = "staggered"
) -> float:
    """Return the highest factor on all rates at which the devices can serve all models, by an equation.

    Each device holds all models. ``rates``: requests per second of one copy of each model. Infinite if all rates are 0.
    """
    if not any(rates):
        return math.inf

    def fits(scale: float) -> bool:
        needs = (
            model.copies * devices_for(model.line, model.slo, rate * scale, equation)
            for model, rate in zip(models, rates, strict=True)
        )
        return math.fsum(needs) <= num_devices

    low, high = 0.0, 1.0
    while fits(high):
        low, high = high, high * 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def batch_nanoseconds(latency: Latency, slo_s: float) -> NDArray[np.int64]:
    """Return the time (ns) of each batch size, from 0 (unused) to the largest size that takes at most ``slo_s``."""
    sizes = np.arange(latency.largest + 1)
    if latency.points:
        seconds = np.array([latency.of(size) for size in sizes.tolist()])
    else:
        seconds = latency.alpha * sizes + latency.beta
    return np.round(seconds[seconds <= slo_s] * 1e9).astype(np.int64)
