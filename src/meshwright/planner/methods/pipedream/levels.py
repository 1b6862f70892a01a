"""PipeDream's levels: machines that contain machines, each level with its own links, solved from the lowest up.

On the lowest level a machine is a device, on the next one a machine is everything that the level below contains, and so
on. The dynamic program of a level (`recurrence`) uses the best times of all intervals on the level below as seconds of
its own machines; from the top, every stage found is then split again by the level below.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.planner.methods.pipedream.recurrence import (
    Floats,
    IntervalTable,
    LevelProblem,
    fill_intervals,
    fill_table,
    make_table,
)
from meshwright.planner.methods.pipedream.states import ProfileStates

# Multiples of the bound within which a pipeline is searched first, before the search without a limit.
_SLACKS = (1.0625, 1.25, 2.0, 4.0)
# Relative differences of stage seconds below this are rounding errors of sums.
_ROUNDING = 1e-12
# Smaller than any share of a picosecond that a stage takes.
_NO_TIME_S = 1e-15


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A number of machines, and the bandwidth of each."""

    num_machines: int
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeDreamOptions:
    """Options of PipeDream's optimizer, with its own defaults.

    ``compression_ratio`` divides activation bytes on links; None for links that take no time. ``replicas`` are the
    allowed numbers of replicas on each level, (1,) for a straight pipeline, None for any number. ``fewer_machines``:
    some may stay idle. ``memory_bytes`` is the limit of each machine.
    """

    compression_ratio: float | None = None
    replicas: tuple[int, ...] | None = None
    fewer_machines: bool = False
    memory_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelStage:
    """The layers between two states (``start`` -1: from the first layer) as one stage, on the lowest level.

    ``replicas`` are those of each level, the lowest first: the stage is on their product of devices.
    """

    start: int
    stop: int
    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelSolution:
    """Stages in the order of the pipeline, and the seconds of the slowest one of the top level."""

    cuts: tuple[LevelStage, ...]
    bottleneck_s: float


def solve_levels(states: ProfileStates, levels: Sequence[Level], options: PipeDreamOptions) -> LevelSolution | None:
    """Return the stages with the least bottleneck, exact for these states; None if none fit."""
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
    """Return seconds per minibatch with replicas of everything on all machines, by PipeDream's formula."""
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
