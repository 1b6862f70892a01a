"""Exact assignment of stages to unequal devices (`solve_mapping`): which devices get which layers, in which order.

The model. Layers 0..L-1 in order; devices in classes of equal ones (`find_classes`). A stage holds layers i:j on a
group g of devices (`find_groups`), of which device d computes m_d of the M microbatches, so that all are done soonest
(`batch_shares`). With

    t_d = seconds of forward and backward of one microbatch on device d,  t = min t_d
    x = what enters the stage per microbatch and returns, over the slowest link between its group and the one before
    e, o = exchange of gradients in the group, optimizer on its slowest device              as in `slicing`

a mapping costs, as a slicing does,

    f · sum over stages (t + x)  +  max over stages (max_d m_d max(t_d, x) - f max(t, x) + e + o)

with f = 1 in training, f = 0 in inference. A stage fits on a device if the memory that `slicing` computes for m_d
microbatches is within the device's memory; with 1F1B, min(m_d, 1 + ceil(b m_d / M)) microbatches are in flight, with b
the devices of the later stages.

The method. `slicing` keeps devices in one order and chooses how many each stage takes. Here, a state consists of the
remaining layers, the remaining devices of each class, and the classes of the group before, which determine the incoming
link. This covers all orders of the devices, for every threshold on the second term
(`thresholds.minimise_over_thresholds`). With counts n_k of K classes there are Π (n_k + 1) states instead of Π n_k!
orders.

Sources: Zheng et al., "Alpa" (OSDI 2022), section 5.2 (enumeration of the bottleneck); Park et al., "HetPipe" (ATC
2020), section 7 (partition by the memory and speed of each device); Strati et al., "Sailor" (SOSP 2025), section 4
(counts of devices left as states).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import gcd, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.cost.memory.ledger import fullest
from meshwright.planner.exchange_search import sum_in_buckets
from meshwright.planner.methods.unequal.batch_shares import share_out
from meshwright.planner.thresholds import minimise_over_thresholds
from meshwright.spec import Cluster, PlanError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Microbatches that a schedule keeps in flight: the one that is computed, those of 1F1B, all.
KEEPS_ONE, KEEPS_SOME, KEEPS_ALL = range(3)


class MappingProblem(NamedTuple):
    """The input of `solve_mapping`: L layers, K classes of devices, G groups, P sets of classes, E links.

    As in `SlicingProblem`: ``seconds``, ``backward_s``, ``optimizer_s`` (kinds, L, L + 1); ``*_bytes`` (L, L + 1), but
    ``most_bytes`` (2, L, L + 1, 4); ``transfer_s`` (E, L), zero for layer 0.

    By class, (K,): ``kind_of``, ``memory_limit``, ``sizes`` (numbers of devices). By group: ``counts`` (G, K), its
    devices of each class; ``set_of`` (G,), its set of classes; ``latency_s`` and ``bucket_s`` (G,), seconds to reduce a
    byte and a bucket. ``link_of`` (P, P): the link from one set to another. ``keeps``: microbatches in flight, one of
    `KEEPS_ONE`, `KEEPS_SOME`, `KEEPS_ALL`. ``zero`` is 0 or 1.
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
        """The number of layers, L."""
        return len(self.static_bytes)


class StageTable(NamedTuple):
    """Estimates of every stage i:j on every group g, entry [g, i, j], shape (G, L, L + 1).

    ``first_s``: seconds of one microbatch on the fastest device. ``busy_s``: seconds of all microbatches on the busiest
    device. ``most``: the largest number of microbatches of a device. ``rest_s``: seconds of gradient reduction (as far
    as exposed) and optimizer. ``fits`` (G, L, L + 1, devices + 1), entry [g, i, j, b]: whether the stage fits on all
    its devices if the later stages have b devices.
    """

    first_s: Floats
    busy_s: Floats
    most: Integers
    rest_s: Floats
    fits: NDArray[np.bool_]


class MappingTables(NamedTuple):
    """The tables of the dynamic program, which are filled again for each threshold.

    Shape (states, L + 1, P), entry [remaining devices, first remaining layer, set of the group before]: ``sums``, the
    least sum in seconds; ``stops``, the end of the next stage; ``takes``, its group. ``following`` (states, G): the
    state after a group is taken, -1 if that is impossible. ``left`` (states,): the number of remaining devices; the
    last state has all devices.
    """

    sums: Floats
    stops: NDArray[np.int32]
    takes: NDArray[np.int32]
    following: Integers
    left: Integers


@compiled
def estimate_stages(p: MappingProblem) -> StageTable:
    """Return the estimates of all stages on all groups; groups of more devices than microbatches do not fit."""
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
    """Return the microbatches in flight on a device that computes ``count`` of M, with ``behind`` devices after it.

    With 1F1B, it computes every (M / count)-th microbatch, and keeps those that the devices behind it work on.
    """
    if p.keeps == KEEPS_ONE:
        return 1
    if p.keeps == KEEPS_ALL:
        return count
    return min(count, 1 + (behind * count + p.num_microbatches - 1) // p.num_microbatches)


@compiled
def memory_of(p: MappingProblem, g: int, i: int, j: int, count: int, in_flight: int) -> float:
    """Return the most bytes on a device of stage i:j on group g at one moment.

    The device computes ``count`` microbatches, of which ``in_flight`` are in flight at once.
    """
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
    """Return the seconds of stage i:j on group g after its first microbatch, including reduction and optimizer.

    ``transfer``: seconds per microbatch to receive its input and return the gradient.
    """
    first = max(table.first_s[g, i, j], transfer)
    busy = max(table.busy_s[g, i, j], table.most[g, i, j] * transfer)
    return float(busy - p.num_fills * first + table.rest_s[g, i, j])


# The dynamic program for one threshold, compiled:
#
#     sums[left, i, h] = min over groups g of `left` and ends j of  f (t + x) + sums[left - g, j, g]
#
# over stages i:j on g that fit into memory and whose bottleneck is at most θ. ``left``: the remaining devices, by
# class; h: the group before, of which only the classes matter, since they determine over which link x comes.
@compiled
def fill_tables(p: MappingProblem, stages: StageTable, theta: float, tables: MappingTables) -> float:
    """Fill the tables for the threshold ``theta``.

    Return the next threshold (above ``theta``) at which the tables may change; infinite if no stage exceeded ``theta``.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClass:
    """Interchangeable devices: the name of their kind, their ranks, and how many of them are in one node."""

    kind: str
    ranks: tuple[int, ...]
    per_node: int

    @property
    def size(self) -> int:
        """The number of devices of the class."""
        return len(self.ranks)


def find_classes(cluster: Cluster, *, merged: bool = False) -> tuple[DeviceClass, ...]:
    """Return the classes of a cluster's devices, in the order of their first ranks.

    A class has the devices of one kind in one node; with ``merged``, in all nodes that differ only in their names.
    """
    columns = cluster.columns()
    nodes = columns.node_kind if merged else columns.node
    members: dict[tuple[int, int], list[int]] = {}
    for rank, key in enumerate(zip(nodes.tolist(), columns.kind.tolist(), strict=True)):
        members.setdefault(key, []).append(rank)
    return tuple(
        DeviceClass(
            kind=cluster.device_kind(ranks[0]).name,
            ranks=tuple(ranks),
            per_node=sum(columns.node[rank] == columns.node[ranks[0]] for rank in ranks),
        )
        for ranks in members.values()
    )


def count_states(classes: Sequence[DeviceClass]) -> int:
    """Return the number of possible numbers of remaining devices by class: the states of the dynamic program."""
    return prod(item.size + 1 for item in classes)


# A **class** is the devices of one kind in one node: they are interchangeable. A **group** takes a number of each
# class. Groups that a stage may get are
#
# - any number of devices of one class;
# - of several classes that belong together (those of one node, those of one kind, and all), a whole fraction 1/f of
#   each;
# - two classes that are next to each other in speed, whole.
#
# Nodes that differ only in their names may be **merged**: their devices of one kind are then one class, which has fewer
# states; a group that fills more than one such node is estimated with the link between nodes.
def find_groups(cluster: Cluster, classes: Sequence[DeviceClass], most: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of at most ``most`` devices on which a stage may run, each as numbers of devices by class."""
    found: dict[tuple[int, ...], None] = {}
    for index, item in enumerate(classes):
        for count in range(1, item.size + 1):
            found[tuple(count * (k == index) for k in range(len(classes)))] = None
    for together in _belonging(cluster, classes):
        whole = gcd(*(classes[k].size for k in together))
        for parts in (f for f in range(1, whole + 1) if whole % f == 0):
            found[tuple(item.size // parts if k in together else 0 for k, item in enumerate(classes))] = None
    for pair in pairwise(sorted(range(len(classes)), key=lambda k: (_speed(cluster, classes[k]), k))):
        found[tuple(item.size if k in pair else 0 for k, item in enumerate(classes))] = None
    return tuple(group for group in found if sum(group) <= most)


def _speed(cluster: Cluster, item: DeviceClass) -> float:
    """By the datasheet, which is good enough to put classes in an order."""
    kind = cluster.device_kind(item.ranks[0])
    return max(kind.peak_flops_per_s.values()) / kind.slowdown


def _belonging(cluster: Cluster, classes: Sequence[DeviceClass]) -> Iterator[tuple[int, ...]]:
    """The classes of each node, of each kind, and all."""
    of_nodes = [cluster.node_index(item.ranks[0]) for item in classes]
    of_kinds = [item.kind for item in classes]
    for keys in (of_nodes, of_kinds):
        yield from _alike(keys)
    yield tuple(range(len(classes)))


def _alike(keys: Sequence[int] | Sequence[str]) -> Iterable[tuple[int, ...]]:
    return (tuple(k for k, item in enumerate(keys) if item == key) for key in dict.fromkeys(keys))


# Entries of the tables of one threshold: 16 bytes each; and the largest number of stages tried for each.
MAX_ENTRIES = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapping:
    """The result of `solve_mapping`: stage s has the layers ``bounds[s]`` (first, end) on group ``groups[s]``.

    ``seconds`` is the closed-form step time: ``sum_s`` (the first microbatch through all stages) + ``bottleneck_s``
    (the rest of the busiest stage).
    """

    bounds: tuple[tuple[int, int], ...]
    groups: tuple[int, ...]
    seconds: float
    sum_s: float
    bottleneck_s: float


def solve_mapping(problem: MappingProblem, *, cutoff_s: float = np.inf) -> Mapping | None:
    """Return the mapping with the shortest step that fits into memory and uses every device.

    Returns None if no mapping takes less than ``cutoff_s`` seconds. The result is exact up to rounding, and
    deterministic. Raises PlanError if the tables would have more than `MAX_ENTRIES` entries.
    """
    tables = make_tables(problem)
    stages = estimate_stages(problem)

    def solve(theta: float) -> tuple[Mapping | None, float]:
        above = fill_tables(problem, stages, theta, tables)
        return _read_mapping(problem, stages, tables), above

    return minimise_over_thresholds(solve, cutoff_s)


def num_entries(num_layers: int, sizes: Sequence[int], num_sets: int) -> int:
    """Return the number of entries in the tables of a problem.

    ``sizes``: numbers of devices by class. ``num_sets``: P, the number of sets of classes.
    """
    return int(np.prod(np.asarray(sizes, np.float64) + 1)) * (num_layers + 1) * num_sets


def make_tables(problem: MappingProblem) -> MappingTables:
    """Return tables of the right shapes for a problem. Raises PlanError for more than `MAX_ENTRIES` entries."""
    num_sets = len(problem.link_of)
    if num_entries(problem.num_layers, problem.sizes.tolist(), num_sets) > MAX_ENTRIES:
        raise PlanError(
            f"{problem.sizes.tolist()} devices of {len(problem.sizes)} classes and {problem.num_layers} layers are too "
            f"many for the exact mapping, whose tables have at most {MAX_ENTRIES:,} entries. Merge classes or layers."
        )
    states = np.array(list(product(*(range(size + 1) for size in problem.sizes.tolist()))), np.int64)
    strides = np.cumprod([1, *(problem.sizes[::-1] + 1)])[-2::-1]
    after = states[:, None, :] - problem.counts[None, :, :]
    following = np.where((after >= 0).all(axis=2), after @ strides, -1)
    shape = (len(states), problem.num_layers + 1, num_sets)
    return MappingTables(
        sums=np.empty(shape),
        stops=np.zeros(shape, np.int32),
        takes=np.zeros(shape, np.int32),
        following=following,
        left=states.sum(axis=1),
    )


def _read_mapping(problem: MappingProblem, stages: StageTable, tables: MappingTables) -> Mapping | None:
    """The mapping of least sum that filled tables hold, or None."""
    state, layer, before = len(tables.left) - 1, 0, 0
    sum_s = float(tables.sums[state, layer, before])
    if not np.isfinite(sum_s):
        return None
    bounds, groups, bottleneck_s = [], [], 0.0
    while layer < problem.num_layers:
        stop, group = int(tables.stops[state, layer, before]), int(tables.takes[state, layer, before])
        own = int(problem.set_of[group])
        transfer = float(problem.transfer_s[problem.link_of[before, own], layer])
        bottleneck_s = max(bottleneck_s, bottleneck_of(problem, stages, group, layer, stop, transfer))
        bounds.append((layer, stop))
        groups.append(group)
        state, layer, before = int(tables.following[state, group]), stop, own
    return Mapping(
        bounds=tuple(bounds),
        groups=tuple(groups),
        seconds=sum_s + bottleneck_s,
        sum_s=sum_s,
        bottleneck_s=bottleneck_s,
    )
