"""Squishy bin packing (Nexus, SOSP 2019, section 6.1): which device serves which models, in which batch sizes.

A model with rate r and SLO L takes whole devices first: B is the largest batch with 2 l(B) ≤ L, each device serves
B / l(B) requests per time, and ⌊r l(B) / B⌋ devices are full. The remaining rate r' is served in rounds: in a duty
cycle D a device runs a batch of b = ⌈D r'⌉ of each of its models, which is in time if D + l(b) ≤ L. For a model alone
on a device, D is the largest possible: b / r' with the largest b such that (b − 1) / r' + l(b) ≤ L. Then models are
merged, those that take most of a device first, each onto the device that is fullest afterwards: D is the smallest of
their cycles, batches shrink to it, and the merge fits if Σ l(b) ≤ D and the device has memory for all models.

The result is one table of rows (device, model, batch, rate share, duty cycle, load), which `pack` fills. The rate share
is in requests per ns, the duty cycle in ns, and the load the share of time in which the device computes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

DEVICE_OF, MODEL_OF, BATCH, SHARE, CYCLE, LOAD = range(6)
# ⌈D r⌉ with room for rounding, as in the published code.
_ROUNDING = 1e-3
# Rounding error of sums of memory shares.
_ROOM = 1e-9


@compiled
def pack(
    latency: Ints, row: int, most: Ints, slo: Ints, rates: Floats, memory: Floats, num_devices: int, table: Floats
) -> int:
    """Fill ``table`` with a packing; return its number of rows, or -1 if ``num_devices`` devices do not suffice.

    ``latency``, ``most`` and ``slo`` are columns of a pool, ``row`` is its ``ROW``. ``rates`` are in requests per ns;
    ``memory`` is the share of a device's memory that each model takes. The table needs at least one row for each
    device and each model.
    """
    num_models = len(rates)
    rows, device = 0, 0
    residue, cycle, load = np.zeros(num_models), np.zeros(num_models), np.zeros(num_models)
    for model in range(num_models):
        if rates[model] <= 0.0:
            continue
        full = _saturating(latency, row, most, slo, model)
        capacity = full / latency[model * row + full]
        if rates[model] / capacity >= num_devices + 1 - device:
            return -1
        whole = int(rates[model] / capacity)
        for _ in range(whole):
            table[rows, DEVICE_OF], table[rows, MODEL_OF], table[rows, BATCH] = device, model, full
            table[rows, SHARE], table[rows, CYCLE], table[rows, LOAD] = capacity, latency[model * row + full], 1.0
            rows += 1
            device += 1
        residue[model] = rates[model] - whole * capacity
        if residue[model] > 1e-9 * rates[model]:
            cycle[model], load[model] = _alone(latency, row, slo, model, full, residue[model])
    shared = device
    for model in np.argsort(-load, kind="mergesort"):
        if load[model] <= 0.0:
            break
        best, fullest = -1, -1.0
        for candidate in range(shared, device):
            filled = _fill(latency, row, most, slo, residue, memory, table, rows, candidate, model, cycle[model])
            if filled > fullest:
                best, fullest = candidate, filled
        if best < 0:
            if device == num_devices:
                return -1
            best = device
            device += 1
        table[rows, DEVICE_OF], table[rows, MODEL_OF] = best, model
        table[rows, SHARE], table[rows, CYCLE] = residue[model], cycle[model]
        rows += 1
        _shrink(latency, row, residue, table, rows, best)
    return rows


@compiled
def _saturating(latency: Ints, row: int, most: Ints, slo: Ints, model: int) -> int:
    """Return the largest batch of which two take at most the SLO; at least 1."""
    batch = 1
    while batch < most[model] and 2 * latency[model * row + batch + 1] <= slo[model]:
        batch += 1
    return batch


@compiled
def _alone(latency: Ints, row: int, slo: Ints, model: int, full: int, rate: float) -> tuple[float, float]:
    """Return the longest duty cycle of a model on a device of its own, and the share of it that the device computes."""
    batch = 1
    while batch < full and batch / rate + latency[model * row + batch + 1] <= slo[model]:
        batch += 1
    needed = latency[model * row + batch]
    cycle = min(float(max(slo[model] - needed, needed)), batch / rate)
    return cycle, needed / cycle


@compiled
def _fill(
    latency: Ints, row: int, most: Ints, slo: Ints, residue: Floats, memory: Floats, table: Floats, rows: int,
    device: int, model: int, cycle: float,
) -> float:  # fmt: skip
    """Return the load of a device with one more model; -1 if it does not fit."""
    shortest = cycle
    for at in range(rows):
        if table[at, DEVICE_OF] == device:
            shortest = min(shortest, table[at, CYCLE])
    used = held = 0.0
    for at in range(rows + 1):
        if at < rows and table[at, DEVICE_OF] != device:
            continue
        each = int(table[at, MODEL_OF]) if at < rows else model
        batch = max(int(np.ceil(shortest * residue[each] - _ROUNDING)), 1)
        if batch > most[each] or shortest + latency[each * row + batch] > slo[each]:
            return -1.0
        used += latency[each * row + batch]
        held += memory[each]
    return used / shortest if used <= shortest and held <= 1.0 + _ROOM else -1.0


@compiled
def _shrink(latency: Ints, row: int, residue: Floats, table: Floats, rows: int, device: int) -> None:
    """Set all models of a device to the shortest of their duty cycles, with batches that fit it."""
    shortest, used = np.inf, 0.0
    for at in range(rows):
        if table[at, DEVICE_OF] == device:
            shortest = min(shortest, table[at, CYCLE])
    for at in range(rows):
        if table[at, DEVICE_OF] == device:
            each = int(table[at, MODEL_OF])
            table[at, CYCLE] = shortest
            table[at, BATCH] = max(int(np.ceil(shortest * residue[each] - _ROUNDING)), 1)
            used += latency[each * row + int(table[at, BATCH])]
    for at in range(rows):
        if table[at, DEVICE_OF] == device:
            table[at, LOAD] = used / shortest


@compiled
def pack_all(
    latency: Ints, row: int, most: Ints, slo: Ints, rates: Floats, memory: Floats, num_devices: int, table: Floats
) -> int:
    """Pack about the highest multiple of all rates for which the devices suffice; return the number of rows.

    A multiple below 1 means that the rates are served in part; above 1, devices have room for uneven arrivals. It is
    found by bisection to a hundredth, assuming that if some rates fit, lower rates fit, too. The arguments are those of
    `pack`.
    """
    low, high = 0.0, 1.0
    while high < 1e6 and pack(latency, row, most, slo, rates * high, memory, num_devices, table) >= 0:
        low, high = high, high * 2
    while high - low > 0.01 * high and high > 1e-6:
        middle = (low + high) / 2
        if pack(latency, row, most, slo, rates * middle, memory, num_devices, table) >= 0:
            low = middle
        else:
            high = middle
    return max(pack(latency, row, most, slo, rates * low, memory, num_devices, table), 0)


@compiled
def spread(latency: Ints, row: int, most: Ints, slo: Ints, num_devices: int, table: Floats) -> int:
    """Fill ``table`` without packing, for models that `pack` cannot place; return its number of rows.

    Models are assigned to devices round-robin until each model has a device and each device a model.
    """
    num_models = len(most)
    rows = max(num_models, num_devices)
    for place in range(rows):
        model = place % num_models
        batch = _saturating(latency, row, most, slo, model)
        needed = latency[model * row + batch]
        table[place, DEVICE_OF], table[place, MODEL_OF], table[place, BATCH] = place % num_devices, model, batch
        table[place, SHARE], table[place, CYCLE], table[place, LOAD] = batch / needed, needed, 1.0
    return rows
