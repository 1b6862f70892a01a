"""Exact slicing of a chain of layers into replicated stages (`solve_slicing`), by a dynamic program for each threshold.

For one threshold θ (`fill_tables`, compiled), the program finds the least sum with every stage's bottleneck at most θ:

    sums[i, d] = min over ends j and replicas r of  t + x + sums[j, d - r]        layers i.. on the last d ranks

over stages i:j with r replicas that fit into memory and whose bottleneck is at most θ (terms: `solve_slicing`). Two
relaxed tables prune the search. ``fewest`` has the fewest replicas with which a stage i:j could work on any ranks. From
it follow the fewest ranks that the layers before i need (``before``), and those that the layers from i on need
(``after``). A state that leaves too few ranks to either side is never visited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.cost.memory.ledger import fullest
from meshwright.planner.exchange_search import sum_in_buckets
from meshwright.planner.thresholds import minimise_over_thresholds

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class SlicingProblem(NamedTuple):
    """The problem of `slicing`, for L layers and D ranks; the comments before `solve_slicing` define the terms.

    Tables over stages i:j have the shape (L, L + 1): ``*_bytes``, and by device kind ``seconds``, ``backward_s`` and
    ``optimizer_s`` (kinds, L, L + 1). ``most_bytes`` (2, L, L + 1, 4) is without and with an exchange of gradients
    (`cost.memory.ledger`). ``transfer_s`` (links, L) is zero for layer 0. Tables over places, (D, D + 1), have the
    entry [a, r] for r ranks after the first a: ``in_flight``, ``kind_of``, ``link_of``, ``memory_limit``,
    ``latency_s``, ``bucket_s``, ``shared_s``. Entries with j <= i or a + r > D are not read.

    ``static_bytes`` include ``shared_bytes``, which replicas shard under ``zero`` in groups of ``shard_size`` (0: all),
    and ``alone_bytes``, which exist only without further replicas. The gathers and scatters of ZeRO in the passes of a
    microbatch take as long as the all-reduce of ``pass_bytes``, in parallel to ops or, if ``passes_wait``, before them.

    Only ``most_bytes``, ``leaving_bytes``, ``beside_bytes`` and ``backward_s`` may decrease with j. The least
    ``in_flight`` over all a must not grow with r, if several r are allowed.
    """

    num_microbatches: int
    num_fills: int
    in_flight: Integers
    overlap: bool
    bucket_bytes: float
    seconds: Floats
    backward_s: Floats
    optimizer_s: Floats
    zero: int
    shard_size: int
    passes_wait: bool
    pass_bytes: Floats
    static_bytes: Floats
    shared_bytes: Floats
    alone_bytes: Floats
    flight_bytes: Floats
    leaving_bytes: Floats
    input_bytes: Floats
    beside_bytes: Floats
    most_bytes: Floats
    exchange_bytes: Floats
    transfer_s: Floats
    kind_of: Integers
    link_of: Integers
    memory_limit: Floats
    latency_s: Floats
    bucket_s: Floats
    shared_s: Floats

    @property
    def num_layers(self) -> int:
        """The number of layers, L."""
        return len(self.static_bytes)

    @property
    def num_ranks(self) -> int:
        """The number of ranks, D."""
        return len(self.kind_of)


class SlicingTables(NamedTuple):
    """The tables of the dynamic program, which are filled again for each threshold.

    Entry [s, d, i] of ``sums``, ``stops`` and ``takes`` (S + 1, D + 1, L + 1) is for layers i.. on the last d ranks in
    s stages (S = 0: in any number of stages): the least sum in seconds, the end of the first stage, and its replicas.
    ``fewest`` (L, L + 1), ``before`` and ``after`` (L + 1,) are described at the module. ``fastest_s`` (L, L + 1),
    ``least_transfer_s`` (L,), ``least_in_flight`` (D + 1,) and ``most_memory`` are the best values over all places.
    """

    sums: Floats
    stops: Integers
    takes: Integers
    fewest: Integers
    before: Integers
    after: Integers
    fastest_s: Floats
    least_transfer_s: Floats
    least_in_flight: Integers
    most_memory: float


def make_tables(problem: SlicingProblem, num_stages: int) -> SlicingTables:
    """Return tables for a problem with exactly ``num_stages`` stages; for any number of stages if 0."""
    num_layers = problem.num_layers
    shape = (num_stages + 1, problem.num_ranks + 1, num_layers + 1)
    return SlicingTables(
        sums=np.empty(shape),
        stops=np.zeros(shape, np.int64),
        takes=np.zeros(shape, np.int64),
        fewest=np.empty((num_layers, num_layers + 1), np.int64),
        before=np.empty(num_layers + 1, np.int64),
        after=np.empty(num_layers + 1, np.int64),
        fastest_s=problem.seconds.min(axis=0),
        least_transfer_s=problem.transfer_s.min(axis=0),
        least_in_flight=_least_in_flight(problem),
        most_memory=float(problem.memory_limit.max()),
    )


def _least_in_flight(problem: SlicingProblem) -> Integers:
    """Return the fewest microbatches in flight of a stage with r replicas over all places, shape (D + 1,)."""
    num_ranks = problem.num_ranks
    return np.array([problem.in_flight[: num_ranks + 1 - max(r, 1), r].min() for r in range(num_ranks + 1)], np.int64)


@compiled
def parts_of(p: SlicingProblem, r: int) -> int:
    """Return the number of shards into which r replicas divide sharded states."""
    return min(p.shard_size, r) if p.shard_size else r


@compiled
def bottleneck_of(p: SlicingProblem, i: int, j: int, a: int, r: int) -> float:
    """Return the bottleneck (n - f) max(t, x) + e + o, in seconds, of stage i:j on ranks a..a+r-1."""
    kind = p.kind_of[a, r]
    period = p.seconds[kind, i, j]
    if r > 1 and p.pass_bytes[i, j] > 0.0:
        passing = p.shared_s[a, r] * (p.pass_bytes[i, j] / p.bucket_bytes)
        period = period + passing if p.passes_wait else max(period, passing)
    period = max(period, p.transfer_s[p.link_of[a, r], i])
    rounds = (p.num_microbatches + r - 1) // r
    exchange = 0.0
    num_bytes = p.exchange_bytes[i, j]
    if r > 1 and num_bytes > 0.0 and p.zero < 2:
        exchange, last = sum_in_buckets(num_bytes, p.bucket_bytes, p.latency_s[a, r], p.bucket_s[a, r])
        if p.overlap:
            exchange = max(exchange - p.backward_s[kind, i, j], last)
    parts = parts_of(p, r) if p.zero else 1
    if r > parts and p.zero >= 2:
        # Groups all-reduce the part that each of their members keeps.
        exchange = p.bucket_s[a, r] * (num_bytes / parts / p.bucket_bytes)
    return float((rounds - p.num_fills) * period + exchange + p.optimizer_s[kind, i, j] / parts)


@compiled
def static_of(p: SlicingProblem, i: int, j: int, r: int) -> float:
    """Return the bytes that a rank of stage i:j with r replicas holds all the time, such as parameters and states."""
    alone = p.alone_bytes[i, j] if r > 1 else 0.0
    return float(p.static_bytes[i, j] - alone - p.shared_bytes[i, j] * (1.0 - 1.0 / parts_of(p, r)))


@compiled
def memory_of(p: SlicingProblem, i: int, j: int, a: int, r: int) -> float:
    """Return the most bytes that a rank of stage i:j on ranks a..a+r-1 needs at one moment."""
    rounds = (p.num_microbatches + r - 1) // r
    each, gradients = p.flight_bytes[i, j] + p.leaving_bytes[i, j], p.exchange_bytes[i, j]
    static = static_of(p, i, j, r) + rounds * p.input_bytes[i, j] + p.beside_bytes[i, j]
    in_flight = min(p.in_flight[a, r], rounds)
    if r > 1 and p.zero >= 2:
        # Each replica keeps a part of the gradients, which are then not in buckets.
        own = gradients / parts_of(p, r)
        least = np.maximum(p.most_bytes[0, i, j] - (gradients - own), 0.0)
        return float(static + fullest(least, each, own, in_flight, rounds))
    # With an all-reduce, gradients are in buckets, which exist all the time.
    exchanged = 1 if r > 1 else 0
    most, gathered = p.most_bytes[exchanged, i, j], (0.0 if exchanged else gradients)
    return float(static + exchanged * gradients + fullest(most, each, gathered, in_flight, rounds))


@compiled
def fill_tables(p: SlicingProblem, choices: Integers, theta: float, tables: SlicingTables) -> float:
    """Fill the tables for plans whose stages take at most ``theta`` seconds per microbatch (their bottleneck).

    ``choices``: the allowed numbers of replicas, ascending. Return the smallest time above ``theta`` of a stage that
    was left out, the next threshold at which the tables may change; infinite if no stage exceeded ``theta``.
    """
    sums, before, after = tables.sums, tables.before, tables.after
    num_layers, num_ranks, num_stages = p.static_bytes.shape[0], p.kind_of.shape[0], sums.shape[0] - 1
    above = _find_fewest_replicas(p, choices, theta, tables)
    _find_fewest_ranks(tables)
    sums.fill(np.inf)
    sums[0, 0, num_layers] = 0.0
    for stage in range(min(num_stages, 1), num_stages + 1):
        # Each earlier and each of these stages needs a layer and a rank.
        earlier = num_stages - stage
        for i in range(num_layers - max(stage, 1), earlier - 1, -1):
            # The first stage has all ranks; every other one leaves enough ranks for the layers before.
            fewest = num_ranks if i == 0 else max(after[i], stage)
            for d in range(fewest, num_ranks - max(before[i], earlier) + 1):
                for r in choices:
                    if r > d:
                        break
                    above = min(above, _extend(p, theta, i, d, r, stage, tables))
    return above


@compiled
def _find_fewest_replicas(p: SlicingProblem, choices: Integers, theta: float, tables: SlicingTables) -> float:
    """Find the fewest replicas with which a stage i:j could stay within ``theta`` and memory on any ranks.

    If impossible, the number is above that of all ranks. Return the least value above ``theta`` for which a stage was
    refused.
    """
    num_layers, num_ranks = p.static_bytes.shape[0], p.kind_of.shape[0]
    above = np.inf
    for i in range(num_layers):
        for j in range(i + 1, num_layers + 1):
            tables.fewest[i, j] = num_ranks + 1
            period = max(tables.fastest_s[i, j], tables.least_transfer_s[i])
            # More replicas mean less time and less memory: search from the most replicas downwards.
            for r in choices[::-1]:
                rounds = (p.num_microbatches + r - 1) // r
                held = p.flight_bytes[i, j] * min(tables.least_in_flight[r], rounds) + p.input_bytes[i, j] * rounds
                if static_of(p, i, j, r) + held > tables.most_memory:
                    break
                if (rounds - p.num_fills) * period > theta:
                    above = min(above, (rounds - p.num_fills) * period)
                    break
                tables.fewest[i, j] = r
    return above


@compiled
def _find_fewest_ranks(tables: SlicingTables) -> None:
    """Find the fewest ranks that hold the layers before i and from i on (more than all ranks if impossible)."""
    fewest, before, after = tables.fewest, tables.before, tables.after
    num_layers = fewest.shape[0]
    none = tables.sums.shape[1]
    before[0], after[num_layers] = 0, 0
    for j in range(1, num_layers + 1):
        before[j] = none
        for i in range(j):
            before[j] = min(before[j], before[i] + fewest[i, j])
    for i in range(num_layers - 1, -1, -1):
        after[i] = none
        for j in range(i + 1, num_layers + 1):
            after[i] = min(after[i], after[j] + fewest[i, j])


@compiled
def _extend(p: SlicingProblem, theta: float, i: int, d: int, r: int, stage: int, tables: SlicingTables) -> float:
    """Try all ends of a stage that starts at layer i with r of the d ranks left; improve ``sums[stage, d, i]``.

    Return the least bottleneck above ``theta`` of a stage that was refused for it (infinite if none was refused).
    """
    sums, rest = tables.sums, max(stage - 1, 0)
    num_layers, a = p.static_bytes.shape[0], p.kind_of.shape[0] - d
    kind, transfer, limit = p.kind_of[a, r], p.transfer_s[p.link_of[a, r], i], p.memory_limit[a, r]
    rounds = (p.num_microbatches + r - 1) // r
    in_flight = min(p.in_flight[a, r], rounds)
    least, above = sums[stage, d, i], np.inf
    for j in range(i + 1 if d > r else num_layers, num_layers if d > r else num_layers + 1):
        if tables.fewest[i, j] > r:
            break
        if tables.after[j] > d - r:
            continue
        # If parts that grow with j exceed the limit, the search ends; if the whole does, only this stage is skipped.
        if static_of(p, i, j, r) + in_flight * p.flight_bytes[i, j] + rounds * p.input_bytes[i, j] > limit:
            break
        if memory_of(p, i, j, a, r) > limit:
            continue
        total = p.num_fills * (p.seconds[kind, i, j] + transfer) + sums[rest, d - r, j]
        if not total < least:
            # Nothing to report: it stays more expensive up to the next threshold at which any sum changes.
            continue
        bottleneck = bottleneck_of(p, i, j, a, r)
        if bottleneck > theta:
            above = min(above, bottleneck)
            continue
        least = total
        sums[stage, d, i], tables.stops[stage, d, i], tables.takes[stage, d, i] = total, j, r
    return above


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """A slicing: stage s has the layers ``bounds[s]`` (first, end) on ``replicas[s]`` ranks.

    ``seconds`` is the closed-form step time: ``sum_s`` (the first microbatch through all stages) + ``bottleneck_s``
    (the rest of the busiest stage).
    """

    bounds: tuple[tuple[int, int], ...]
    replicas: tuple[int, ...]
    seconds: float
    sum_s: float
    bottleneck_s: float


# The model. Layers 0..L-1 in order; ranks 0..D-1 in order. Stage s holds layers i:j on the r ranks a..a+r-1, with a
# ranks before it, and each of its replicas works on at most n = ceil(M / r) of the M microbatches. With
#
#     t = seconds[k, i, j]         forward and backward of one microbatch, on the ranks' kind k = kind_of[a, r]
#     x = transfer_s[l, i]         input of the stage per microbatch and its gradient, over the link l = link_of[a, r]
#     g = exchange_bytes[i, j]     gradients to reduce: whole buckets at bucket_s[a, r], the rest from latency_s[a, r]
#     e = exchange(g)              0 if r = 1; with overlap, max(e - backward, its last bucket alone)
#     o = optimizer_s[k, i, j]     step of the optimizer
#
# a slicing costs
#
#     f · sum_s (t_s + x_s)  +  max_s ((n_s - f) max(t_s, x_s) + e_s + o_s)
#
# that is, the first microbatch's way through all stages, then the busiest stage's other microbatches, its gradient
# reduction and its optimizer; f = 1. In inference there is no flush, steps follow each other without a gap, and f = 0.
# Without replicas, transfers and reduction this is Alpa's sum + (M - 1) max. A stage fits if
#
#     static_bytes + beside_bytes + n · input_bytes + (exchange_bytes if r > 1, for the buckets' buffers)
#         + the fullest moment of a step (`cost.memory.ledger`)  <=  memory_limit[a, r]        all at [i, j]
#
# where each microbatch keeps flight_bytes + leaving_bytes, with in_flight[a, r] in flight: n (GPipe), min(n, ceil((D -
# a) / r)) (1F1B), or counted from a schedule of the user's own.
#
# The method. For a threshold θ on the second term, the least sum over slicings whose stages all stay within θ is a
# small dynamic program (`fill_tables`); the best θ is found by `thresholds.minimise_over_thresholds`.
#
# Sources: Zheng et al., "Alpa" (OSDI 2022), section 5.2 (enumeration of the bottleneck); Narayanan et al., "PipeDream"
# (SOSP 2019), section 3.1 (replicated stages).
def solve_slicing(
    problem: SlicingProblem,
    *,
    replicas: Sequence[int] | None = None,
    num_stages: int | None = None,
    cutoff_s: float = np.inf,
) -> Slicing | None:
    """Return the slicing with the shortest step that fits into memory and uses every rank.

    Returns None if no slicing takes less than ``cutoff_s`` seconds. ``replicas`` are the allowed numbers of replicas of
    a stage (default: any), ``num_stages`` is the number of stages (default: any). The result is exact up to rounding,
    and deterministic.
    """
    most = min(problem.num_ranks, problem.num_microbatches)
    choices = np.array(sorted({r for r in replicas or range(1, most + 1) if 1 <= r <= most}), np.int64)
    if not len(choices):
        return None
    tables = make_tables(problem, num_stages or 0)

    def solve(theta: float) -> tuple[Slicing | None, float]:
        above = fill_tables(problem, choices, theta, tables)
        return _read_slicing(problem, tables), above

    return minimise_over_thresholds(solve, cutoff_s)


def _read_slicing(problem: SlicingProblem, tables: SlicingTables) -> Slicing | None:
    """Return the slicing with the least sum in filled tables; None if no slicing fits."""
    stage, layer, left = len(tables.sums) - 1, 0, problem.num_ranks
    sum_s = float(tables.sums[stage, left, layer])
    if not np.isfinite(sum_s):
        return None
    bounds, replicas, bottleneck_s = [], [], 0.0
    while layer < problem.num_layers:
        stop, take = int(tables.stops[stage, left, layer]), int(tables.takes[stage, left, layer])
        bounds.append((layer, stop))
        replicas.append(take)
        bottleneck_s = max(bottleneck_s, bottleneck_of(problem, layer, stop, problem.num_ranks - left, take))
        stage, layer, left = max(stage - 1, 0), stop, left - take
    return Slicing(
        bounds=tuple(bounds),
        replicas=tuple(replicas),
        seconds=sum_s + bottleneck_s,
        sum_s=sum_s,
        bottleneck_s=bottleneck_s,
    )
