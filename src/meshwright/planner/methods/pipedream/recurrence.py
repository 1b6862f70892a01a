"""PipeDream's dynamic program over states, compiled (`fill_table`), and over levels of machines (`solve_levels`).

A level has M machines with links of b bytes per second. On m of them, the layers between two states i and j
(`profile_states`) take B seconds per minibatch:

    B[i, j, m] = min of   (t + w(m) / f) / m                            one stage with m replicas
                          max(B[i, k, m - r], (t' + w'(r)) / r, x)      the last stage, after state k, has r replicas

    t     C[i, j]: seconds on all machines of the level below; on the lowest level T(j) - T(i); t' = C[k, j]
    w     4 (m - 1) P / (b m): the gradient reduction of the stage's P bytes, added to its seconds
    f     machines of the level right below; 1 on the lowest level
    x     2 a / (b r c), for the frontiers of k and, unless j is the last state, of j; 0 without a compression ratio c

All m machines are used, unless idle machines are allowed. With a memory limit, a stage of r replicas at the end of m
machines is allowed only if ceil((M - m) / r) (A + P) is within the limit. For the level above, C[i, j] = B[i, j, M].

Among plans with the same bottleneck, the one with the fewest stages is chosen: by the same recurrence that counts
stages, restricted to stages that take no longer than the bottleneck.

A stage that takes T(j) - T(k) on one machine takes at least that divided by all machines of its level and the levels
below. Since seconds of states ascend, for each j the search for k goes back only until this bound is reached.

Source: `optimizer_graph_hierarchical.py` (`compute_partitioning`) of the PipeDream repository. There, on levels below
the last, i and k need not be nested; such an interval is not a set of layers, and is left out here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.planner.methods.pipedream.profile_states import ProfileStates, Words

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


class LevelProblem(NamedTuple):
    """The input of the dynamic program on one level of ``num_machines`` (M) machines, with S states.

    ``members`` (S, words), ``seconds`` T, ``activation_bytes`` A, ``parameter_bytes`` P and ``frontier_bytes`` a (S,)
    are from `ProfileStates`. ``below_s`` (S + 1, S) is C, entry [i + 1, j]; shape (0, 0) on the lowest level.
    ``machines_below`` is f; ``all_below`` the product of the machines of all levels below. ``ratio`` is c, 0 for free
    transfers. ``allowed`` (M + 1,) marks the allowed numbers of replicas. ``fewer_machines``: machines may stay idle.
    ``memory_bytes`` is infinite without a limit.
    """

    members: Words
    seconds: Floats
    activation_bytes: Floats
    parameter_bytes: Floats
    frontier_bytes: Floats
    below_s: Floats
    num_machines: int
    machines_below: int
    all_below: int
    bandwidth_bytes_per_s: float
    ratio: float
    allowed: Flags
    fewer_machines: bool
    memory_bytes: float


class IntervalTable(NamedTuple):
    """The results for the layers between one state i and all states j on m machines; shapes (S, M + 1), entry [j, m].

    ``best``: B in seconds, or the fewest stages. ``cuts``: the state k before the last stage, -2 if one stage is best.
    ``replicas``: the number of replicas r of the last stage.
    """

    best: Floats
    cuts: Integers
    replicas: Integers


def make_table(problem: LevelProblem) -> IntervalTable:
    """Return a table of the right shape for a level, with no results."""
    shape = (len(problem.seconds), problem.num_machines + 1)
    return IntervalTable(np.full(shape, np.inf), np.full(shape, -2, np.int64), np.zeros(shape, np.int64))


@compiled
def fill_intervals(p: LevelProblem, table: IntervalTable) -> Floats:
    """Return the seconds per minibatch of the layers between two states on all machines of the level.

    Shape (S + 1, S): entry [i + 1, j] is for the layers after state i up to state j, where i = -1 starts with the first
    layer; infinite if impossible. ``table`` is overwritten.
    """
    count = len(p.seconds)
    found = np.full((count + 1, count), np.inf)
    for i in range(-1, count - 1):
        fill_table(p, i, count - 1, np.inf, False, table)
        found[i + 1] = table.best[:, p.num_machines]
    return found


@compiled
def fill_table(p: LevelProblem, i: int, stop: int, cutoff_s: float, counting: bool, table: IntervalTable) -> None:
    """Fill the table for the layers after state i (-1: from the first layer) up to every state until ``stop``.

    Entries that cannot be part of a pipeline below ``cutoff_s`` seconds may be left out. With ``counting``, entries are
    the fewest stages that each take less than ``cutoff_s``.
    """
    table.best.fill(np.inf)
    table.cuts.fill(-2)
    # States behind which a stage may start, ascending.
    useful = np.empty(len(p.seconds), np.int64)
    count = 0
    for j in range(i + 1, stop + 1):
        if (i >= 0 and not lies_inside(p, i, j)) or not lies_inside(p, j, stop):
            continue
        _take_one_stage(p, i, j, cutoff_s, counting, table)
        _cut(p, i, j, stop, cutoff_s, counting, useful[:count], table)
        for m in range(2, p.num_machines + 1) if p.fewer_machines else range(0):
            if table.best[j, m - 1] <= table.best[j, m]:
                table.best[j, m] = table.best[j, m - 1]
                table.cuts[j, m] = table.cuts[j, m - 1]
                table.replicas[j, m] = table.replicas[j, m - 1]
        if _sending_seconds(p, j) < cutoff_s * p.num_machines and _is_reached(table.best[j], cutoff_s, counting):
            useful[count] = j
            count += 1


@compiled
def lies_inside(p: LevelProblem, k: int, j: int) -> bool:
    """Return whether all layers of state k are layers of state j."""
    outside = np.uint64(0)
    for word in range(p.members.shape[1]):
        outside |= p.members[k, word] & ~p.members[j, word]
    return bool(outside == 0)


@compiled
def stage_seconds(p: LevelProblem, k: int, j: int, r: int) -> float:
    """Return (t + w(r)) / r: the seconds of a stage after state k up to state j with r replicas."""
    weights = p.parameter_bytes[j] - p.parameter_bytes[k]
    return float((_interval_seconds(p, k, j) + 4.0 * (r - 1) * weights / (p.bandwidth_bytes_per_s * r)) / r)


@compiled
def _sending_seconds(p: LevelProblem, k: int) -> float:
    """Return the seconds to send the frontier of a state over the link of one machine, in both directions."""
    return float(2.0 * p.frontier_bytes[k] / p.bandwidth_bytes_per_s / p.ratio) if p.ratio else 0.0


@compiled
def _interval_seconds(p: LevelProblem, k: int, j: int) -> float:
    if p.below_s.shape[0]:
        return float(p.below_s[k + 1, j])
    return float(p.seconds[j] - (p.seconds[k] if k >= 0 else 0.0))


@compiled
def _take_one_stage(p: LevelProblem, i: int, j: int, cutoff_s: float, counting: bool, table: IntervalTable) -> None:
    weights = p.parameter_bytes[j] - (p.parameter_bytes[i] if i >= 0 else 0.0)
    kept = p.activation_bytes[j] - (p.activation_bytes[i] if i >= 0 else 0.0) + weights
    for m in range(1, p.num_machines + 1):
        if p.allowed[m] and (p.num_machines - 1) // m * kept <= p.memory_bytes:
            exchange = 4.0 * (m - 1) * weights / (p.bandwidth_bytes_per_s * m) / p.machines_below
            seconds = (_interval_seconds(p, i, j) + exchange) / m
            if not counting or seconds < cutoff_s:
                table.best[j, m] = 1.0 if counting else seconds
                table.replicas[j, m] = m


@compiled
def _cut(
    p: LevelProblem, i: int, j: int, stop: int, cutoff_s: float, counting: bool, useful: Integers, table: IntervalTable
) -> None:
    """Try all last stages of the interval behind i up to j, which start behind one of the useful states."""
    best, last, most = table.best[j], j == len(p.seconds) - 1, p.num_machines
    # Layers before and behind j need machines too, if they are to take less than the cutoff.
    least_here = int((p.seconds[j] - (p.seconds[i] if i >= 0 else 0.0)) / p.all_below / cutoff_s)
    most_here = most - int((p.seconds[stop] - p.seconds[j]) / p.all_below / cutoff_s)
    sending_here_s = 0.0 if last else _sending_seconds(p, j)
    if least_here > most_here or sending_here_s >= cutoff_s * most:
        return
    reach = _reach(best, cutoff_s, counting)
    for k in useful[::-1]:
        # The least total seconds of each part, on machines of this level.
        behind_s = (p.seconds[j] - p.seconds[k]) / p.all_below
        before_s = (p.seconds[k] - (p.seconds[i] if i >= 0 else 0.0)) / p.all_below
        if behind_s >= reach:
            break
        if not lies_inside(p, k, j):
            continue
        sending_s = max(_sending_seconds(p, k), sending_here_s)
        kept = p.activation_bytes[j] - p.activation_bytes[k] + p.parameter_bytes[j] - p.parameter_bytes[k]
        improved = False
        for m in range(2, most_here + 1):
            limit_s = cutoff_s if counting else min(best[m], cutoff_s)
            if limit_s <= 0.0:
                continue
            fewest = max(int(max(behind_s, sending_s) / limit_s), 1)
            fewest_before = max(int(before_s / limit_s), 1)
            for r in range(fewest, m - fewest_before + 1):
                before = table.best[k, m - r]
                if not p.allowed[r] or (before + 1.0 >= best[m] if counting else before >= limit_s):
                    continue
                if (most - m + r - 1) // r * kept > p.memory_bytes:
                    continue
                taken = max(stage_seconds(p, k, j, r), sending_s / r)
                if taken < limit_s:
                    best[m] = before + 1.0 if counting else max(before, taken)
                    limit_s = cutoff_s if counting else best[m]
                    table.cuts[j, m], table.replicas[j, m] = k, r
                    improved = True
        if improved:
            reach = _reach(best, cutoff_s, counting)


@compiled
def _reach(best: Floats, cutoff_s: float, counting: bool) -> float:
    """Return the single-machine seconds from which a last stage improves nothing, whatever its number of replicas."""
    reach = 0.0
    for m in range(2, len(best)):
        reach = max(reach, (cutoff_s if counting else min(best[m], cutoff_s)) * (m - 1))
    return reach


@compiled
def _is_reached(best: Floats, cutoff_s: float, counting: bool) -> bool:
    """Return whether the layers up to a state take less than the cutoff on some machines, with one to spare."""
    return bool(best[: len(best) - 1].min() < (np.inf if counting else cutoff_s))


# Multiples of the bound within which a pipeline is searched first, before the search without a limit.
_SLACKS = (1.0625, 1.25, 2.0, 4.0)
# Relative differences of stage seconds below this are rounding errors of sums.
_ROUNDING = 1e-12
# Smaller than any share of a picosecond that a stage takes.
_NO_TIME_S = 1e-15


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of machines: their number, and the bandwidth of each machine's link in bytes/s."""

    num_machines: int
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeDreamOptions:
    """Options of PipeDream's optimizer, with PipeDream's defaults.

    ``compression_ratio`` divides the activation bytes sent over links; None: transfers take no time. ``replicas`` are
    the allowed numbers of replicas on each level; (1,) gives a straight pipeline, None allows any number.
    ``fewer_machines``: machines may stay idle. ``memory_bytes`` is the limit per machine, None for no limit.
    """

    compression_ratio: float | None = None
    replicas: tuple[int, ...] | None = None
    fewer_machines: bool = False
    memory_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelStage:
    """One stage: the layers after state ``start`` (-1: from the first layer) up to state ``stop``.

    ``replicas`` has the number of replicas on each level, the lowest first; their product is the number of devices.
    """

    start: int
    stop: int
    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelSolution:
    """The result of `solve_levels`: stages in the order of the pipeline (``cuts``), and the bottleneck.

    ``bottleneck_s``: seconds per minibatch of the slowest stage of the top level.
    """

    cuts: tuple[LevelStage, ...]
    bottleneck_s: float


# On the lowest level a machine is a device, on the next one a machine is everything that the level below contains, and
# so on; each level has its own links. Levels are solved from the lowest up: the dynamic program of a level uses the
# best times of all intervals on the level below as seconds of its own machines. From the top, every stage found is then
# split again by the level below.
def solve_levels(states: ProfileStates, levels: Sequence[Level], options: PipeDreamOptions) -> LevelSolution | None:
    """Return the stages with the least bottleneck among all that cut at these states; None if no stages fit."""
    problems: list[LevelProblem] = []
    below_s: Floats = np.empty((0, 0))
    for index, level in enumerate(levels):
        problems.append(_problem(states, levels[:index], level, below_s, options))
        if index < len(levels) - 1:
            below_s = fill_intervals(problems[-1], make_table(problems[-1]))
    top, last = len(levels) - 1, len(states) - 1
    seconds = _least_seconds(problems[top])
    if not math.isfinite(seconds):
        return None

    def stages(level: int, start: int, stop: int, seconds: float, outer: tuple[int, ...]) -> Iterator[LevelStage]:
        problem = problems[level]
        table = make_table(problem)
        fill_table(problem, start, stop, max(seconds * (1 + _ROUNDING), _NO_TIME_S), True, table)
        for first, last, replicas in _read_stages(table, start, stop, problem.num_machines):
            if level == 0:
                yield LevelStage(start=first, stop=last, replicas=(replicas, *outer))
            else:
                inside = float(problem.below_s[first + 1, last])
                yield from stages(level - 1, first, last, inside, (replicas, *outer))

    return LevelSolution(cuts=tuple(stages(top, -1, last, seconds, ())), bottleneck_s=seconds)


def data_parallel_seconds(seconds: float, parameter_bytes: float, levels: Sequence[Level]) -> float:
    """Return the seconds per minibatch of layers that are replicated on all machines, by PipeDream's formula.

    ``seconds``: of the layers on one machine. ``parameter_bytes``: of their parameters.
    """
    before = 1
    for level in levels:
        machines = level.num_machines
        exchange = 4 * (machines - 1) * parameter_bytes / (level.bandwidth_bytes_per_s * machines) / before
        seconds, before = (seconds + exchange) / machines, machines
    return seconds


def _problem(
    states: ProfileStates, below: Sequence[Level], level: Level, below_s: Floats, options: PipeDreamOptions
) -> LevelProblem:
    return LevelProblem(
        members=states.members,
        seconds=states.seconds,
        activation_bytes=states.activation_bytes,
        parameter_bytes=states.parameter_bytes,
        frontier_bytes=states.frontier_bytes,
        below_s=below_s,
        num_machines=level.num_machines,
        machines_below=below[-1].num_machines if below else 1,
        all_below=math.prod(item.num_machines for item in below),
        bandwidth_bytes_per_s=float(level.bandwidth_bytes_per_s),
        ratio=options.compression_ratio or 0.0,
        allowed=np.array([options.replicas is None or r in options.replicas for r in range(level.num_machines + 1)]),
        fewer_machines=options.fewer_machines,
        memory_bytes=math.inf if options.memory_bytes is None else float(options.memory_bytes),
    )


def _least_seconds(problem: LevelProblem) -> float:
    """Return B of the whole pipeline.

    Cutoffs just above the bound make this quick; a solution below a cutoff is always found.
    """
    table = make_table(problem)
    bound_s = problem.seconds[-1] / (problem.all_below * problem.num_machines)
    for cutoff_s in (*(slack * bound_s for slack in _SLACKS if bound_s > 0), math.inf):
        fill_table(problem, -1, len(problem.seconds) - 1, cutoff_s, False, table)
        if table.best[-1, problem.num_machines] < cutoff_s:
            break
    return float(table.best[-1, problem.num_machines])


def _read_stages(table: IntervalTable, start: int, stop: int, machines: int) -> list[tuple[int, int, int]]:
    """Return the stages (first state, last state, replicas) of an interval, in the order of the pipeline."""
    found: list[tuple[int, int, int]] = []
    while stop > start:
        cut, replicas = int(table.cuts[stop, machines]), int(table.replicas[stop, machines])
        found.append((start if cut == -2 else cut, stop, replicas))
        machines -= replicas
        stop = found[-1][0]
    return found[::-1]
