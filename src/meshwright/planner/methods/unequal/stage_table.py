"""What a stage costs on every group of devices: the dynamic program of `mapping` for one threshold. Compiled.

    sums[left, i, h] = min over groups g of `left` and ends j of  f (t + x) + sums[left - g, j, g]

over stages i:j on g that fit into memory and whose bottleneck is at most θ. ``left`` are the devices that are left, by
class; h is the group before, of which only the classes matter: they say over which link x comes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.cost.memory.fullest import fullest
from meshwright.planner.buckets import sum_in_buckets
from meshwright.planner.methods.unequal.shares import share_out

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Microbatches that a schedule keeps in flight: the one that is computed, those of 1F1B, all.
KEEPS_ONE, KEEPS_SOME, KEEPS_ALL = range(3)


class MappingProblem(NamedTuple):
    """L layers, K classes of devices, G groups of them, P different sets of classes, E links.

    Shapes: ``seconds``, ``backward_s``, ``optimizer_s`` (kinds, L, L + 1), ``kind_of`` and ``memory_limit`` (K,);
    ``*_bytes`` (L, L + 1), but for ``most_bytes`` (2, L, L + 1, 4), all as in `SlicingProblem`; ``counts`` (G, K),
    ``set_of`` (G,), ``latency_s`` and ``bucket_s`` (G,); ``link_of`` (P, P) from a set to a set, ``transfer_s`` (E, L),
    zero for layer 0. ``sizes`` (K,) are the devices of each class. ``zero`` is 0 or 1.
    """

    num_microbatches: int
    num_fills: int
    keeps: int
    overlap: bool
    bucket_bytes: float
    seconds: Floats
    backward_s: Floats
    optimizer_s: Floats
    zero: int
    static_bytes: Floats
    shared_bytes: Floats
    flight_bytes: Floats
    leaving_bytes: Floats
    input_bytes: Floats
    beside_bytes: Floats
    most_bytes: Floats
    exchange_bytes: Floats
    kind_of: Integers
    memory_limit: Floats
    sizes: Integers
    counts: Integers
    set_of: Integers
    latency_s: Floats
    bucket_s: Floats
    link_of: Integers
    transfer_s: Floats

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.static_bytes)


class StageTable(NamedTuple):
    """What a stage i:j on group g costs, entry [g, i, j], shape (G, L, L + 1).

    ``first_s`` is the microbatch of its fastest device, ``busy_s`` all that the busiest one computes, ``most`` the
    microbatches of the device that has most, ``rest_s`` exchange and optimizer; ``fits``, entry [g, i, j, b], whether
    all its devices have the memory if b devices stand behind it.
    """

    first_s: Floats
    busy_s: Floats
    most: Integers
    rest_s: Floats
    fits: NDArray[np.bool_]


class MappingTables(NamedTuple):
    """What one threshold fills, (states, L + 1, P), and where groups lead: ``following`` (states, G), -1 for nowhere.

    ``left`` (states,) are the devices of each state; the last state has all of them.
    """

    sums: Floats
    stops: NDArray[np.int32]
    takes: NDArray[np.int32]
    following: Integers
    left: Integers


@compiled
def estimate_stages(p: MappingProblem) -> StageTable:
    """Estimate all stages on all groups."""
    num_groups, num_layers = len(p.counts), len(p.static_bytes)
    shape = (num_groups, num_layers, num_layers + 1)
    table = StageTable(
        np.zeros(shape),
        np.zeros(shape),
        np.zeros(shape, np.int64),
        np.zeros(shape),
        np.zeros((*shape, p.sizes.sum() + 1), np.bool_),
    )
    num_classes = len(p.kind_of)
    seconds, most = np.empty(num_classes), np.empty(num_classes, np.int64)
    for g in range(num_groups):
        if p.counts[g].sum() > p.num_microbatches:
            continue
        for i in range(num_layers):
            for j in range(i + 1, num_layers + 1):
                for k in range(num_classes):
                    seconds[k] = p.seconds[p.kind_of[k], i, j]
                share_out(p.counts[g], seconds, p.num_microbatches, most)
                entry = g, i, j
                first, busy = np.inf, 0.0
                for k in range(num_classes):
                    if p.counts[g, k] > 0:
                        first, busy = min(first, seconds[k]), max(busy, most[k] * seconds[k])
                table.first_s[entry], table.busy_s[entry], table.most[entry] = first, busy, most.max()
                table.rest_s[entry] = _rest_of(p, g, i, j)
                _find_fits(p, g, i, j, most, table.fits[entry])
    return table


@compiled
def _rest_of(p: MappingProblem, g: int, i: int, j: int) -> float:
    """Seconds of the exchange that no backward hides, and of the optimizer."""
    num_ranks = p.counts[g].sum()
    backward, optimizer = np.inf, 0.0
    for k in range(len(p.kind_of)):
        if p.counts[g, k] > 0:
            backward = min(backward, p.backward_s[p.kind_of[k], i, j])
            optimizer = max(optimizer, p.optimizer_s[p.kind_of[k], i, j])
    exchange, num_bytes = 0.0, p.exchange_bytes[i, j]
    if num_ranks > 1 and num_bytes > 0.0:
        exchange, last = sum_in_buckets(num_bytes, p.bucket_bytes, p.latency_s[g], p.bucket_s[g])
        if p.overlap:
            exchange = max(exchange - backward, last)
    return float(exchange + optimizer / (num_ranks if p.zero else 1))


@compiled
def _find_fits(p: MappingProblem, g: int, i: int, j: int, most: Integers, fits: NDArray[np.bool_]) -> None:
    """With how many devices behind the stage all of its devices have the memory."""
    behind = len(fits) - p.counts[g].sum()
    fits[:behind] = True
    for k in range(len(most)):
        if p.counts[g, k] == 0:
            continue
        known, is_within = -1, False
        for b in range(behind):
            in_flight = in_flight_of(p, most[k], b)
            if in_flight != known:
                known, is_within = in_flight, memory_of(p, g, i, j, most[k], in_flight) <= p.memory_limit[k]
            fits[b] &= is_within


@compiled
def in_flight_of(p: MappingProblem, count: int, behind: int) -> int:
    """Microbatches in flight on a device that has ``count`` of all, and ``behind`` devices after it.

    With 1F1B it is given one of M / count microbatches, and keeps those that the ones behind it work on.
    """
    if p.keeps == KEEPS_ONE:
        return 1
    if p.keeps == KEEPS_ALL:
        return count
    return min(count, 1 + (behind * count + p.num_microbatches - 1) // p.num_microbatches)


@compiled
def memory_of(p: MappingProblem, g: int, i: int, j: int, count: int, in_flight: int) -> float:
    """Bytes of a device with ``count`` microbatches of stage i:j on group g, so many of them in flight."""
    num_ranks = p.counts[g].sum()
    static = p.static_bytes[i, j] - p.shared_bytes[i, j] * (1.0 - 1.0 / num_ranks)
    static += count * p.input_bytes[i, j] + p.beside_bytes[i, j]
    each, gradients = p.flight_bytes[i, j] + p.leaving_bytes[i, j], p.exchange_bytes[i, j]
    # With an exchange, gradients lie in buckets, which are there all the time.
    exchanged = 1 if num_ranks > 1 else 0
    gathered = 0.0 if exchanged else gradients
    moment = fullest(p.most_bytes[exchanged, i, j], each, gathered, in_flight, count)
    return float(static + exchanged * gradients + moment)


@compiled
def bottleneck_of(p: MappingProblem, table: StageTable, g: int, i: int, j: int, transfer: float) -> float:
    """Seconds of the stage beyond its first microbatch."""
    first = max(table.first_s[g, i, j], transfer)
    busy = max(table.busy_s[g, i, j], table.most[g, i, j] * transfer)
    return float(busy - p.num_fills * first + table.rest_s[g, i, j])


@compiled
def fill_tables(p: MappingProblem, stages: StageTable, theta: float, tables: MappingTables) -> float:
    """Fill the tables for a threshold.

    Returns a threshold above ``theta`` below which nothing changes (infinite if nothing was refused for ``theta``).
    """
    num_layers, num_states = len(p.static_bytes), len(tables.left)
    tables.sums[:] = np.inf
    tables.sums[0, num_layers] = 0.0
    above = np.inf
    for i in range(num_layers - 1, -1, -1):
        # The first stage has all devices, every other one leaves some before it; each needs a layer.
        for state in range(num_states - 1 if i == 0 else 1, num_states if i == 0 else num_states - 1):
            for g in range(len(p.counts)):
                if tables.following[state, g] >= 0:
                    above = min(above, _extend(p, stages, theta, i, state, g, tables))
    return above


@compiled
def _extend(
    p: MappingProblem, stages: StageTable, theta: float, i: int, state: int, g: int, tables: MappingTables
) -> float:
    """Try all ends of a stage on group g that begins at layer i; improve ``sums[state, i]`` for all sets before.

    Returns the least bottleneck above ``theta`` of a stage that was refused for it (infinite if none was).
    """
    num_layers, following, own = len(p.static_bytes), tables.following[state, g], p.set_of[g]
    behind, above = tables.left[following], np.inf
    for j in range(i + 1 if behind else num_layers, num_layers if behind else num_layers + 1):
        tail = tables.sums[following, j, own]
        if not tail < np.inf or not stages.fits[g, i, j, behind]:
            continue
        for before in range(len(p.link_of) if i else 1):
            transfer = p.transfer_s[p.link_of[before, own], i]
            total = p.num_fills * (stages.first_s[g, i, j] + transfer) + tail
            if not total < tables.sums[state, i, before]:
                # Nothing to report: it stays the dearer one up to the next threshold at which a sum changes at all.
                continue
            bottleneck = bottleneck_of(p, stages, g, i, j, transfer)
            if bottleneck > theta:
                above = min(above, bottleneck)
                continue
            tables.sums[state, i, before] = total
            tables.stops[state, i, before], tables.takes[state, i, before] = j, g
    return above
