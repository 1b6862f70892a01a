"""What a simulated plan is worth: step time, where each rank's time goes, memory with its owners, MFU and HFU.

All seconds are those of one steady step: the window from the end of the last step but one to the end of the last step.
In it, per rank,

    busy            Σ spans of the compute stream, and its parts forward, backward, optimizer
    communication   the time in which at least one transfer or collective of the rank is under way
    exposed         the part of it in which the compute stream is idle
    exchange        the same two for all-reduces alone
    idle            step time - busy

Bubble fraction = Σ idle / (ranks x step time). MFU = FLOPs of the model per step / (step time x Σ peak rate of the
devices used); HFU counts what the devices really execute, ops repeated in several stages included.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from meshwright.program import Fold
from meshwright.simulator.unfolding import unfold_timeline
from meshwright.spec import Opcode, Timeline
from meshwright.spec.units import PICOSECONDS_PER_SECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeconds:
    """Seconds of one rank within a steady step."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    communication_s: float
    exposed_communication_s: float
    exchange_s: float
    exposed_exchange_s: float
    idle_s: float

    @property
    def busy_s(self) -> float:
        """Seconds in which the rank computes."""
        return self.forward_s + self.backward_s + self.optimizer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Bytes of one rank at the moment when most are in use, by part; the parts add up to the peak."""

    parts: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """The peak."""
        return sum(self.parts.values())

    @property
    def owner(self) -> str:
        """The part that holds most of it."""
        return max(self.parts, key=lambda part: self.parts[part])


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The prediction for a plan. ``mfu`` and ``hfu`` are None where no peak rate is known for the precision.

    ``simulated`` is the timeline of what was simulated: of the ranks of ``fold.plan`` where some stand for others, else
    of all; ``timeline`` is that of all ranks.
    """

    simulated: Timeline
    fold: Fold | None
    step_time_s: float
    samples_per_s: float
    ranks: tuple[RankSeconds, ...]
    memory: tuple[PeakMemory, ...]
    bubble_fraction: float
    mfu: float | None
    hfu: float | None
    _unfolded: list[Timeline] = field(init=False, repr=False, compare=False, default_factory=list)

    @property
    def timeline(self) -> Timeline:
        """The spans of all ranks, made when they are first asked for."""
        if self.fold is None:
            return self.simulated
        if not self._unfolded:
            self._unfolded.append(unfold_timeline(self.simulated, self.fold))
        return self._unfolded[0]

    @property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """Peak of each rank."""
        return tuple(item.total_bytes for item in self.memory)


_COLUMNS = tuple(field.name for field in fields(RankSeconds))


def step_window(step: NDArray[np.int32], end_ps: NDArray[np.int64]) -> tuple[int, int]:
    """Start and end of the last step in ps, of the step and end of every span: from the end of the one before it."""
    before = end_ps[step < step.max(initial=0)]
    return int(before.max(initial=0)), int(end_ps.max(initial=0))


def rank_seconds(timeline: Timeline, window: tuple[int, int]) -> tuple[RankSeconds, ...]:
    """Where each rank's time goes between two moments (ps)."""
    start, end = np.clip(timeline.start_ps, *window), np.clip(timeline.end_ps, *window)
    ranks = np.array([stream.rank for stream in timeline.tracks], np.int64)[timeline.track]
    computes = np.array([stream.name == "compute" for stream in timeline.tracks], np.bool_)[timeline.track]
    columns: list[NDArray[np.float64]] = []
    backwards = (Opcode.BACKWARD, Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT)
    for opcodes in ((Opcode.FORWARD,), backwards, (Opcode.OPTIMIZER_STEP,)):
        mine = np.isin(timeline.opcode, opcodes)
        columns.append(_sum_per_rank(ranks[mine], (end - start)[mine], timeline.num_ranks))
    for chosen in (~computes, timeline.opcode == Opcode.ALL_REDUCE):
        shown = np.flatnonzero((end > start) & (computes | chosen))
        columns += _covered(ranks[shown], start[shown], end[shown], computes[shown], timeline.num_ranks)
    columns.append(window[1] - window[0] - np.sum(columns[:3], axis=0))
    return tuple(
        RankSeconds(**dict(zip(_COLUMNS, row, strict=True)))
        for row in (np.stack(columns, axis=1) / PICOSECONDS_PER_SECOND).tolist()
    )


def _covered(
    ranks: NDArray[np.int64],
    start: NDArray[np.int64],
    end: NDArray[np.int64],
    computes: NDArray[np.bool_],
    num_ranks: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Per rank, the ps covered by spans that do not compute, and by them but by no computation."""
    rank, time = np.concatenate([ranks, ranks]), np.concatenate([start, end])
    opens = np.repeat([1, -1], len(ranks))
    order = np.lexsort((time, rank))
    rank, time, opens, of_compute = rank[order], time[order], opens[order], np.tile(computes, 2)[order]
    # Every span of a rank is closed at its last moment, so the running sums start at 0 for the next rank.
    computing, moving = np.cumsum(opens * of_compute), np.cumsum(opens * ~of_compute)
    gaps = np.diff(time, append=time[-1:])
    gaps[np.diff(rank, append=num_ranks) != 0] = 0
    covered = _sum_per_rank(rank, gaps * (moving > 0), num_ranks)
    exposed = _sum_per_rank(rank, gaps * ((moving > 0) & (computing == 0)), num_ranks)
    return covered, exposed


def _sum_per_rank(ranks: NDArray[np.int64], values: NDArray[np.int64], num_ranks: int) -> NDArray[np.float64]:
    return np.bincount(ranks, values, num_ranks).astype(np.float64)
