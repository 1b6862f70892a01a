"""What a simulated plan is worth: step time, where each rank's time goes, memory with its owners, MFU and HFU.

All seconds are those of one steady step: the window from the end of the last step but one to the end of the last
step, or the mean over some last ones of a schedule that never flushes, where one may differ from the next. A rank that
is done earlier has an earlier window, so that each is seen with all that it does in a step. Per rank,

    busy            Σ spans of the compute stream, and its parts forward, backward, optimizer (copies of weights too)
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

from meshwright.cost.compiled import compiled
from meshwright.program import Fold
from meshwright.simulator.unfolding import unfold_ops, unfold_timeline
from meshwright.spec import Opcode, OpSpans, Timeline
from meshwright.spec.instructions import STASHING
from meshwright.spec.units import PICOSECONDS_PER_SECOND

Ids = NDArray[np.int64]


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
    of all; ``timeline`` is that of all ranks. ``simulated_ops`` and ``op_spans`` are the ops inside of their spans,
    None unless they were asked for.
    """

    simulated: Timeline
    simulated_ops: OpSpans | None
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
    def op_spans(self) -> OpSpans | None:
        """The ops inside of the spans of ``timeline``; made anew whenever they are asked for."""
        if self.fold is None or self.simulated_ops is None:
            return self.simulated_ops
        return unfold_ops(self.simulated_ops, self.simulated, self.fold)

    @property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """Peak of each rank."""
        return tuple(item.total_bytes for item in self.memory)


_COLUMNS = tuple(field.name for field in fields(RankSeconds))
# The column of what computes, by opcode; then what moves, and of that the sums of gradients.
_MOVES, _EXCHANGES = 3, 4
_COLUMN_OF_OPCODE = np.full(len(Opcode), _MOVES, np.int8)
_COLUMN_OF_OPCODE[Opcode.FORWARD] = 0
_COLUMN_OF_OPCODE[[Opcode.BACKWARD, Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT]] = 1
_COLUMN_OF_OPCODE[[Opcode.OPTIMIZER_STEP, *STASHING]] = 2
_COLUMN_OF_OPCODE[Opcode.ALL_REDUCE] = _EXCHANGES


def step_window(
    step: NDArray[np.int32], end_ps: NDArray[np.int64], num_steps: int = 1, *, drains: bool = False
) -> tuple[int, int]:
    """Start and end of the last steps in ps, of the step and end of every span: from the end of the one before them.

    ``drains``: an epilogue counts to the last step, so that the window ends with the step before.
    """
    stop = int(step.max(initial=0)) + 1 - drains
    ends = (end_ps[step < each].max(initial=0) for each in (stop - num_steps, stop))
    return int(next(ends)), int(next(ends))


def rank_seconds(timeline: Timeline, window: tuple[int, int], num_steps: int = 1) -> tuple[RankSeconds, ...]:
    """Where each rank's time goes in one of the steps between two moments (ps).

    Of a rank that is done before the last one, the window is earlier by as much: what it does already of the next step,
    which may not be simulated, it has done of this one too.
    """
    computes = np.array([stream.name == "compute" for stream in timeline.tracks], np.bool_)
    ranks = np.array([stream.rank for stream in timeline.tracks], np.int64)
    sums = _sum_spans(
        np.searchsorted(timeline.track, np.arange(len(ranks) + 1)),
        np.searchsorted(ranks, np.arange(timeline.num_ranks + 1)),
        computes,
        _COLUMN_OF_OPCODE[timeline.opcode],
        timeline.start_ps,
        timeline.end_ps,
        window[1] - window[0],
        _stops(timeline, ranks, window[1]),
    )
    idle = window[1] - window[0] - sums[:, :_MOVES].sum(axis=1, keepdims=True)
    return tuple(
        RankSeconds(**dict(zip(_COLUMNS, row, strict=True)))
        for row in (np.concatenate([sums, idle], axis=1) / (num_steps * PICOSECONDS_PER_SECOND)).tolist()
    )


def _stops(timeline: Timeline, ranks: Ids, latest: int) -> Ids:
    """When each rank is done, at the latest at a moment; ``ranks`` are those of the tracks."""
    stops = np.zeros(timeline.num_ranks, np.int64)
    np.maximum.at(stops, ranks[timeline.track], np.minimum(timeline.end_ps, latest))
    return stops


@compiled
def _sum_spans(
    offsets: Ids,
    first_stream: Ids,
    computes: NDArray[np.bool_],
    column: NDArray[np.int8],
    start_ps: Ids,
    end_ps: Ids,
    length_ps: int,
    stops_ps: Ids,
) -> Ids:
    """Per rank the ps of the first columns of `RankSeconds`; spans of a stream are in order and do not overlap.

    Of each rank so much time is looked at until its stop.

    A rank's streams are walked through together, from one moment at which a span begins or ends to the next.
    """
    sums = np.zeros((len(first_stream) - 1, _MOVES + 4), np.int64)
    place = offsets[:-1].copy()
    for rank in range(len(first_stream) - 1):
        streams = range(first_stream[rank], first_stream[rank + 1])
        stop = stops_ps[rank]
        now = stop - length_ps
        while now < stop:
            kind, moving, exchanging, then = np.int64(-1), False, False, stop
            for stream in streams:
                while place[stream] < offsets[stream + 1] and end_ps[place[stream]] <= now:
                    place[stream] += 1
                i = place[stream]
                if i == offsets[stream + 1]:
                    continue
                if start_ps[i] > now:
                    then = min(then, start_ps[i])
                    continue
                then = min(then, end_ps[i])
                if computes[stream]:
                    kind = np.int64(column[i])
                else:
                    moving, exchanging = True, exchanging or column[i] == _EXCHANGES
            passed = then - now
            if kind >= 0:
                sums[rank, kind] += passed
            if moving:
                sums[rank, _MOVES] += passed
                sums[rank, _MOVES + 1] += passed * (kind < 0)
            if exchanging:
                sums[rank, _MOVES + 2] += passed
                sums[rank, _MOVES + 3] += passed * (kind < 0)
            now = then
    return sums
