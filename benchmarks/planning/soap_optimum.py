"""The optimum of a small space: every strategy, simulated in full."""

from __future__ import annotations

import math
from decimal import Decimal
from itertools import pairwise, permutations
from typing import TYPE_CHECKING

import numpy as np

from meshwright.compiled import compiled
from meshwright.planner.methods.flexflow.configure import configure, configure_all
from meshwright.planner.methods.flexflow.full import NO_LIMIT, simulate_all
from meshwright.planner.methods.flexflow.soap_arrays import (
    Integers,
    Schedule,
    Soap,
    Strategy,
    empty_schedule,
    empty_strategy,
)
from meshwright.spec import PlanError

if TYPE_CHECKING:
    from meshwright.planner.methods.flexflow.soap_chains import StrategyArrays

MOST_STRATEGIES = 50_000_000


def list_configurations(soap: Soap, layer: int) -> StrategyArrays:
    """All of a layer, parts on distinct devices: candidates (c,) and devices (c, P)."""
    rows, devices = [], []
    for row in range(soap.candidates[layer], soap.candidates[layer + 1]):
        for chosen in permutations(range(len(soap.kind)), int(soap.parts[row])):
            rows.append(row)
            devices.append(chosen + (0,) * ((1 << soap.shift) - len(chosen)))
    return np.array(rows, np.int64), np.array(devices, np.int64)


def count_strategies(soap: Soap) -> int:
    """Strategies of a space, parts of a layer on distinct devices."""
    ends, num_devices = soap.candidates.tolist(), len(soap.kind)
    return math.prod(
        sum(math.perm(num_devices, parts) for parts in soap.parts[start:stop].tolist())
        for start, stop in pairwise(ends)
    )


def find_optimum(soap: Soap) -> tuple[int, StrategyArrays]:
    """The shortest step in ps and its strategy. Raises PlanError beyond 50 million strategies."""
    count = count_strategies(soap)
    if count > MOST_STRATEGIES:
        raise PlanError(
            f"The space has about {Decimal(count):.1e} strategies; expected at most {MOST_STRATEGIES:,} to go through "
            "all of them. Search them instead."
        )
    found = [list_configurations(soap, layer) for layer in range(len(soap.trains))]
    offsets = np.cumsum([0, *(len(rows) for rows, _ in found)], dtype=np.int64)
    rows, devices = (np.concatenate([item[k] for item in found]) for k in range(2))
    best = np.zeros(len(found), np.int64)
    step = _enumerate(soap, empty_strategy(soap), empty_schedule(soap), offsets, rows, devices, best)
    return int(step), (rows[best], devices[best])


@compiled
def _enumerate(
    soap: Soap,
    strategy: Strategy,
    schedule: Schedule,
    offsets: Integers,
    rows: Integers,
    devices: Integers,
    best: Integers,
) -> int:
    """Simulate all combinations, the last layer's fastest; the first best one into ``best``, as rows."""
    at = offsets[:-1].copy()
    configure_all(soap, strategy, rows[at], devices[at])
    shortest = NO_LIMIT
    while True:
        step = simulate_all(soap, strategy, schedule)
        if step < shortest:
            shortest = step
            best[:] = at
        layer = len(at) - 1
        while layer >= 0:
            at[layer] += 1
            if at[layer] < offsets[layer + 1]:
                break
            at[layer] = offsets[layer]
            layer -= 1
        if layer < 0:
            return shortest
        for changed in range(layer, len(at)):
            configure(soap, strategy, changed, rows[at[changed]], devices[at[changed]])
