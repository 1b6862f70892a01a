"""The results of a simulated plan: step time, where each rank's time goes, memory with its owners, MFU and HFU.

All seconds are those of one steady step: the window from the end of the last step but one to the end of the last step.
For an asynchronous schedule, whose steps may differ, they are the mean over several last steps. A rank's work for that
step counts even if it is done before or after the window. Per rank,

    busy            Σ spans of the compute stream, and its parts forward, backward, optimizer (including copies of
                    weights); waiting for the host inside a span counts as busy (`host_issue`)
    communication   the time in which at least one transfer or collective of the rank is under way
    exposed         the part of it in which the compute stream is idle
    exchange        the same two for collectives, and for transfers between ranks and servers
    offload         host work on offloaded states, and copies to and from the host; exposed where nothing is computed
                    or exchanged meanwhile
    idle            step time - busy

Bubble fraction = Σ idle / (ranks x step time). MFU = FLOPs of the model per step / (step time x Σ peak rate of the
devices used); HFU counts what the devices really execute, including ops repeated in several stages and recompute.

The timeline of all ranks is made from that of their representatives (`folding`). The spans of a rank are those of its
representative; only the number of the rank and the numbers of its microbatches differ. The result equals a simulation
of all ranks, column by column.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.program import Fold
from meshwright.simulator.host_memory import NodeMemory
from meshwright.spec import Opcode, OpSpans, Stream, Timeline, format_bytes, format_percent, format_seconds
from meshwright.spec.html import html_table
from meshwright.spec.instructions import INSTRUCTIONS, CostKind
from meshwright.spec.units import PICOSECONDS_PER_SECOND

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeconds:
    """Seconds of one rank within a steady step.

    ``exchanged_inside_s`` is the part of forwards and backwards spent waiting for collectives of split ops and sharded
    states; ``copied_inside_s`` the part spent waiting for copies of activations. ``host_s`` is the time in which the
    rank's host issues work for the device.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float
    communication_s: float
    exposed_communication_s: float
    exchange_s: float
    exposed_exchange_s: float
    offload_s: float
    exposed_offload_s: float
    idle_s: float
    exchanged_inside_s: float = 0.0
    copied_inside_s: float = 0.0
    host_s: float = 0.0

    def per_step(self, num_steps: int) -> RankSeconds:
        """Return the seconds of one step, if these are the seconds of ``num_steps`` steps."""
        if num_steps == 1:
            return self
        return RankSeconds(**{name: getattr(self, name) / num_steps for name in _COLUMNS})

    @property
    def busy_s(self) -> float:
        """Seconds in which the rank computes."""
        return self.forward_s + self.backward_s + self.optimizer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Bytes of one rank at the moment of its peak, by part; the parts add up to the peak."""

    parts: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Peak bytes."""
        return sum(self.parts.values())

    @property
    def owner(self) -> str:
        """The part that holds the most bytes."""
        return max(self.parts, key=lambda part: self.parts[part])


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The prediction for a plan. ``mfu`` and ``hfu`` are None where no peak rate is known for the precision.

    ``timeline`` covers all ranks. ``simulated`` is the timeline that was simulated: of all ranks, or of the
    representatives (``fold.plan``) if there is a fold. ``nodes`` lists the host memory in use, if any.
    ``simulated_ops`` and ``op_spans`` are the ops inside the spans, None unless requested.
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
    nodes: tuple[NodeMemory, ...] = ()
    _unfolded: list[Timeline] = field(init=False, repr=False, compare=False, default_factory=list)

    @property
    def timeline(self) -> Timeline:
        """The spans of all ranks, computed on first access."""
        if self.fold is None:
            return self.simulated
        if not self._unfolded:
            self._unfolded.append(unfold_timeline(self.simulated, self.fold))
        return self._unfolded[0]

    @property
    def op_spans(self) -> OpSpans | None:
        """The ops inside the spans of ``timeline``; computed on each access."""
        if self.fold is None or self.simulated_ops is None:
            return self.simulated_ops
        return unfold_ops(self.simulated_ops, self.simulated, self.fold)

    @property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """Peak bytes of each rank."""
        return tuple(item.total_bytes for item in self.memory)

    def _repr_html_(self) -> str:
        rows = (
            (
                rank,
                format_seconds(seconds.busy_s),
                format_seconds(seconds.communication_s),
                format_seconds(seconds.idle_s),
                format_bytes(memory.total_bytes),
            )
            for rank, (seconds, memory) in enumerate(zip(self.ranks, self.memory, strict=True))
        )
        caption = (
            f"{format_seconds(self.step_time_s)} per step, {self.samples_per_s:.4g} samples/s, bubble "
            f"{format_percent(self.bubble_fraction)}"
        )
        return html_table(caption, ("rank", "busy", "communication", "idle", "peak memory"), rows, len(self.ranks))


_OTHERS = ("exchanged_inside_s", "copied_inside_s", "host_s")
_COLUMNS = tuple(item.name for item in fields(RankSeconds) if item.name not in _OTHERS)
# The column of each opcode's time: computations first, then moves, and among these collectives and offload.
_MOVES, _EXCHANGES, _OFFLOADS = 3, 4, 5
_COLUMN_OF_KIND: dict[CostKind, int] = {
    "forward": 0,
    "backward": 1,
    "update": 2,
    "stash": 2,
    "message": _MOVES,
    "load": _MOVES,
    "collective": _EXCHANGES,
    "server": _EXCHANGES,
    "copy": _OFFLOADS,
    "host": _OFFLOADS,
    "drives": _OFFLOADS,
}
_COLUMN_OF_OPCODE = np.array([_COLUMN_OF_KIND[INSTRUCTIONS[opcode].kind] for opcode in Opcode], np.int8)


def step_window(
    step: NDArray[np.int32], end_ps: NDArray[np.int64], num_steps: int = 1, *, drains: bool = False
) -> tuple[int, int]:
    """Return start and end of the last ``num_steps`` steps in ps; the start is the end of the step before them.

    ``drains``: the last step includes an epilogue, so the window ends with the step before.
    """
    stop = int(step.max(initial=0)) + 1 - drains
    ends = (end_ps[step < each].max(initial=0) for each in (stop - num_steps, stop))
    return int(next(ends)), int(next(ends))


def rank_seconds(timeline: Timeline, length_ps: int, steps: range) -> tuple[RankSeconds, ...]:
    """Return where each rank's time goes in one of the given steps, which take ``length_ps`` in all.

    Steps repeat, so a rank's work is laid on a circle of that length: if a rank begins the next step while others are
    still in this one, its work overlaps theirs as it does in every step.
    """
    ranks = np.array([stream.rank for stream in timeline.tracks], np.int64)
    computes = np.array([stream.name == "compute" for stream in timeline.tracks], np.bool_)
    chosen = np.flatnonzero((timeline.step >= steps.start) & (timeline.step < steps.stop))
    chosen = chosen[(timeline.end_ps[chosen] > timeline.start_ps[chosen]) & (timeline.opcode[chosen] != Opcode.LOAD)]
    track, kind = timeline.track[chosen], _COLUMN_OF_OPCODE[timeline.opcode[chosen]]
    taken = np.minimum(timeline.end_ps[chosen] - timeline.start_ps[chosen], length_ps)
    work = np.zeros((timeline.num_ranks, _MOVES), np.int64)
    computed = computes[track]
    np.add.at(work, (ranks[track[computed]], kind[computed]), taken[computed])
    start = timeline.start_ps[chosen] % max(length_ps, 1)
    over = np.flatnonzero(start + taken > length_ps)
    rows = np.concatenate([np.arange(len(chosen)), over])
    start = np.concatenate([start, np.zeros(len(over), np.int64)])
    end = np.concatenate([np.minimum(start[: len(chosen)] + taken, length_ps), (start[over] + taken[over]) - length_ps])
    order = np.lexsort((start, track[rows]))
    sums = _sum_moves(
        np.searchsorted(track[rows][order], np.arange(len(ranks) + 1)),
        np.searchsorted(ranks, np.arange(timeline.num_ranks + 1)),
        computes,
        kind[rows][order],
        start[order],
        end[order],
        length_ps,
    )
    idle = length_ps - work.sum(axis=1, keepdims=True)
    sums[:, 1::2] = np.minimum(sums[:, 1::2], idle)
    return tuple(
        RankSeconds(**dict(zip(_COLUMNS, row, strict=True)))
        for row in (np.concatenate([work, sums, idle], axis=1) / (len(steps) * PICOSECONDS_PER_SECOND)).tolist()
    )


@compiled
def _sum_moves(
    offsets: Ids,
    first_stream: Ids,
    computes: NDArray[np.bool_],
    kind: NDArray[np.int8],
    start_ps: Ids,
    end_ps: Ids,
    length_ps: int,
) -> Ids:
    """Sum ps per rank: moving, moving while nothing is computed, and the same for exchanges and for offload.

    Spans of a stream are sorted by start. The streams of a rank are scanned together, from one start or end of a span
    to the next.
    """
    sums = np.zeros((len(first_stream) - 1, 6), np.int64)
    place = offsets[:-1].copy()
    for rank in range(len(first_stream) - 1):
        streams = range(first_stream[rank], first_stream[rank + 1])
        now = 0
        while now < length_ps:
            computing, moving, exchanging, offloading, then = False, False, False, False, length_ps
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
                computing = computing or computes[stream]
                moving = moving or not computes[stream]
                exchanging = exchanging or kind[i] == _EXCHANGES
                offloading = offloading or kind[i] == _OFFLOADS
            passed = then - now
            sums[rank, 0] += passed * moving
            sums[rank, 1] += passed * (moving and not computing)
            sums[rank, 2] += passed * exchanging
            sums[rank, 3] += passed * (exchanging and not computing)
            sums[rank, 4] += passed * offloading
            sums[rank, 5] += passed * (offloading and not exchanging and not computing)
            now = then
    return sums


_ALIKE = ("opcode", "stage", "peer", "step", "num_bytes", "start_ps", "end_ps")


def unfold_timeline(timeline: Timeline, fold: Fold) -> Timeline:
    """Return the timeline of ``fold.whole``, given that of ``fold.plan``."""
    stands = fold.representatives()
    tracks, rank_of_track = _spread_tracks(timeline, stands)
    spans, track_of_span = _spread(timeline.track.astype(np.int64), tracks)
    samples, rank_of_sample = _spread(timeline.memory_rank.astype(np.int64), stands)
    columns: dict[str, Any] = {name: getattr(timeline, name)[spans] for name in _ALIKE}
    ranks = rank_of_track[track_of_span]
    return Timeline(
        origin=timeline.origin,
        num_ranks=fold.whole.num_ranks,
        tracks=tuple(
            Stream(rank=rank, name=timeline.tracks[track].name)
            for rank, track in zip(rank_of_track.tolist(), tracks.tolist(), strict=True)
        ),
        track=track_of_span.astype(np.int32),
        microbatch=_number_microbatches(timeline.microbatch[spans], ranks, fold),
        **columns,
        memory_rank=rank_of_sample.astype(np.int32),
        memory_time_ps=timeline.memory_time_ps[samples],
        memory_bytes=timeline.memory_bytes[samples],
        peak_memory_bytes=tuple(timeline.peak_memory_bytes[rank] for rank in stands.tolist()),
    )


def unfold_ops(ops: OpSpans, timeline: Timeline, fold: Fold) -> OpSpans:
    """Return the ops inside the spans of the unfolded timeline, given those inside ``timeline``."""
    spans, _ = _spread(timeline.track.astype(np.int64), _spread_tracks(timeline, fold.representatives())[0])
    parts, span = _spread(ops.span, spans)
    return OpSpans(span=span, op=ops.op[parts], start_ps=ops.start_ps[parts], end_ps=ops.end_ps[parts], names=ops.names)


def _spread_tracks(timeline: Timeline, stands: Ids) -> tuple[Ids, Ids]:
    """Return, for each track of all ranks, the track of its representative and its rank."""
    return _spread(np.array([stream.rank for stream in timeline.tracks], np.int64), stands)


def _spread(owners: Ids, chosen: Ids) -> tuple[Ids, Ids]:
    """For rows sorted by owner: return the rows of each chosen owner, and the index into ``chosen`` of each row."""
    begins = np.searchsorted(owners, chosen)
    counts = np.searchsorted(owners, chosen, side="right") - begins
    shifts = np.repeat(begins - (np.cumsum(counts) - counts), counts)
    return np.arange(len(shifts)) + shifts, np.repeat(np.arange(len(chosen)), counts)


def _number_microbatches(microbatch: NDArray[np.int32], ranks: Ids, fold: Fold) -> NDArray[np.int32]:
    """Microbatch k + j K of a representative is r + j R in the rank's own pipeline r; -1 stays."""
    pipeline = np.empty(fold.whole.num_ranks, np.int64)
    for stage in fold.whole.stages:
        pipeline[list(stage.ranks)] = np.arange(len(stage.ranks))
    own = pipeline[ranks] + microbatch // len(fold.replicas) * len(fold.classes)
    return np.where(microbatch < 0, microbatch, own).astype(np.int32)
