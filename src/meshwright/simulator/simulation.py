"""The results of a simulated plan (`Simulation`): step time, where each rank's time goes, memory by owner, MFU and HFU.

All seconds are those of one steady step: the window from the end of the second last step to the end of the last step.
For an asynchronous schedule, whose steps may differ, they are the mean over several of the last steps. A rank's work
for that step counts even if it is done before or after the window. Per rank,

    busy            Σ spans of the compute stream, and its parts forward, backward, optimizer (including copies of
                    weights); waiting for the host inside a span counts as busy (`host_issue`)
    communication   the time in which at least one transfer or collective of the rank is under way
    exposed         the part of this time in which the compute stream is idle
    exchange        the same two times for collectives, and for transfers between ranks and parameter servers
    offload         host work on offloaded states, and copies to and from the host; exposed where nothing is computed
                    or exchanged meanwhile
    idle            step time - busy

Bubble fraction = Σ idle / (ranks x step time). MFU = FLOPs of the model per step / (step time x Σ peak rate of the
devices used); HFU counts what the devices really execute, including ops repeated in several stages and recompute.

If only one of several identical pipelines was simulated (`pipeline_alike`), the timeline of all ranks is made from that
of their representatives: a rank has the spans of its representative, with its own rank number and microbatch numbers.
The result equals a simulation of all ranks, column by column. `node_memory` returns the memory in use on hosts and
drives, `steady_rows` the rows for ``--json``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.cost.memory import backend_of
from meshwright.program import Fold, count_host_needs
from meshwright.spec import (
    Cluster,
    Graph,
    Opcode,
    OpSpans,
    Placement,
    Plan,
    Stream,
    Timeline,
    format_bytes,
    format_count,
    format_percent,
    format_seconds,
)
from meshwright.spec.html import html_table
from meshwright.spec.instructions import INSTRUCTIONS, CostKind
from meshwright.spec.offload import ON_DEVICE
from meshwright.spec.units import PICOSECONDS_PER_SECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """Bytes in use on one node's host and NVMe drives, with their limits; ``ranks`` are the plan's ranks there."""

    name: str
    ranks: tuple[int, ...]
    host_bytes: int
    host_limit_bytes: int
    nvme_bytes: int
    nvme_limit_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the bytes on the host and on the drives are within their limits."""
        return self.host_bytes <= self.host_limit_bytes and self.nvme_bytes <= self.nvme_limit_bytes

    @property
    def share(self) -> float:
        """The used fraction of the host or of the drives, whichever is fuller."""
        nvme = self.nvme_bytes / self.nvme_limit_bytes if self.nvme_bytes else 0.0
        return max(self.host_bytes / self.host_limit_bytes, nvme)

    def describe(self) -> str:
        """Return text such as ``the host of node0 keeps 37 GiB of 1.86 TiB, its drives 31.7 GiB of 13.6 TiB``."""
        host = f"the host of {self.name} keeps {format_bytes(self.host_bytes)} of {format_bytes(self.host_limit_bytes)}"
        if not self.nvme_bytes:
            return host
        return f"{host}, its drives {format_bytes(self.nvme_bytes)} of {format_bytes(self.nvme_limit_bytes)}"


def explain_nodes(nodes: Sequence[NodeMemory]) -> list[str]:
    """Return a sentence on the fullest node, and how many nodes exceed their limits; [] for no nodes."""
    if not nodes:
        return []
    fullest, over = max(nodes, key=lambda node: node.share), sum(not node.fits for node in nodes)
    sentence = f"{fullest.describe()}."
    if over:
        return [f"{over} of {format_count(len(nodes), 'node')} have too little memory: {sentence}"]
    return [sentence[0].upper() + sentence[1:]]


# `program.count_host_needs` counts the bytes of each rank, here as for a real run. All devices of a node share its host
# and drives. Where ranks are teams, the bytes are those of one device of each team, and the node's limits are
# the share of these devices (`spec.teams`).
def node_memory(plan: Plan | Placement, graph: Graph, cluster: Cluster) -> tuple[NodeMemory, ...]:
    """Return the memory that a plan uses on the host and drives of each node; () if everything is on devices."""
    if isinstance(plan, Placement) or plan.offload == ON_DEVICE:
        return ()
    ranks: dict[int, list[int]] = defaultdict(list)
    for rank in range(plan.num_ranks):
        ranks[cluster.node_index(rank)].append(rank)
    found = []
    for index, members in ranks.items():
        node = cluster.nodes[index]
        kept = [count_host_needs(plan, graph, rank, backend_of(cluster.device_kind(rank))) for rank in members]
        found.append(
            NodeMemory(
                name=node.name,
                ranks=tuple(members),
                host_bytes=sum(needs.host_bytes for needs in kept),
                host_limit_bytes=node.host_memory_bytes,
                nvme_bytes=sum(needs.drive_bytes for needs in kept),
                nvme_limit_bytes=node.nvme.capacity_bytes if node.nvme else 0,
            )
        )
    return tuple(found)


Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeconds:
    """Seconds of one rank within a steady step; the module's docstring defines them.

    ``exchanged_inside_s`` is the part of forwards and backwards spent waiting for collectives of split ops and sharded
    states, ``copied_inside_s`` the part spent waiting for copies of activations. ``host_s`` is the time in which the
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
        """Return these seconds, which are those of ``num_steps`` steps, divided by ``num_steps``."""
        if num_steps == 1:
            return self
        return RankSeconds(**{name: getattr(self, name) / num_steps for name in _COLUMNS})

    @property
    def busy_s(self) -> float:
        """Seconds in which the rank computes."""
        return self.forward_s + self.backward_s + self.optimizer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Bytes of one rank when its memory is largest, by part of memory; the parts add up to the peak."""

    parts: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """The peak in bytes."""
        return sum(self.parts.values())

    @property
    def owner(self) -> str:
        """The name of the part of memory with the most bytes."""
        return max(self.parts, key=lambda part: self.parts[part])


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The prediction for a plan: a steady step's times, memory, and the timeline.

    ``simulated`` is the timeline that was simulated: of all ranks, or of the representatives (ranks of ``fold.plan``)
    if there is a fold; ``timeline`` covers all ranks. ``ranks`` and ``memory`` have one entry per rank, ``nodes`` lists
    host memory in use. ``mfu`` and ``hfu`` (0..1) are None if the peak rate for the precision is unknown.
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
        """The peak memory of each rank in bytes."""
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
    """Return each rank's seconds in one of the given ``steps``, which take ``length_ps`` together.

    Steps repeat, so times are taken modulo that length: if a rank begins the next step while other ranks are still in
    this step, its work overlaps with theirs as it does in every step.
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


Row = dict[str, Any]

# From this share of the step on, the host's issue time bounds it; in a pipeline other ranks' steps may be a bit longer.
_BINDING_SHARE = 0.99


# MFU counts the FLOPs of the graph's forward and backward for the global batch, each once; HFU counts all FLOPs that
# the devices execute, including recompute and ops repeated in several stages. Both are shares of what the plan's
# devices could execute in the step at their peak rate for the plan's precision.
def steady_rows(result: Simulation) -> Row:
    """Return ``step_time_s``, ``samples_per_s``, ``bubble_share``, ``mfu_share``, ``hfu_share``, and ``ranks``.

    A row of ``ranks`` has the seconds of `RankSeconds`, ``busy_s``, and three shares of the step that add up to 1:
    computing (``busy_share``), exposed communication (``exposed_share``), other idle time (``waiting_share``).
    """
    return {
        "step_time_s": result.step_time_s,
        "samples_per_s": result.samples_per_s,
        "bubble_share": result.bubble_fraction,
        "mfu_share": result.mfu,
        "hfu_share": result.hfu,
        "ranks": [_rank_row(result, rank) for rank in range(len(result.ranks))],
    }


def describe_steady_step(result: Simulation) -> str:
    """Return ``Steady step: 63.3 ms, bubble 20.7 %, MFU 31.0 %, HFU 31.0 % ...``, without MFU and HFU if unknown.

    With asynchronous hosts, a second sentence gives the issue time of the slowest host.
    """
    facts = [format_seconds(result.step_time_s), f"bubble {format_percent(result.bubble_fraction)}"]
    if result.mfu is not None and result.hfu is not None:
        facts += [f"MFU {format_percent(result.mfu)}", f"HFU {format_percent(result.hfu)}"]
    return f"Steady step: {', '.join(facts)}.{_describe_host(result)}"


def _describe_host(result: Simulation) -> str:
    host_s, step_s = max(rank.host_s for rank in result.ranks), result.step_time_s
    if not host_s:
        return ""
    binds = ", which bounds the step" if host_s >= _BINDING_SHARE * step_s else ""
    return f" The host issues kernels for {format_seconds(host_s)} of {format_seconds(step_s)}{binds}."


def _rank_row(result: Simulation, rank: int) -> Row:
    seconds, step_s = result.ranks[rank], result.step_time_s
    exposed_s = seconds.exposed_communication_s
    shares = {"busy": seconds.busy_s, "exposed": exposed_s, "waiting": seconds.idle_s - exposed_s}
    return {
        "rank": rank,
        "busy_s": seconds.busy_s,
        **asdict(seconds),
        **{f"{name}_share": value / step_s if step_s else 0.0 for name, value in shares.items()},
    }
