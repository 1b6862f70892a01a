"""Find ranks that need more memory than their devices have (`find_overflows`); explain them (`explain_overflows`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.cost.memory import MemoryLimit
from meshwright.simulator.simulation import Simulation
from meshwright.spec import (
    Cluster,
    Timeline,
    format_bytes,
    format_seconds,
    to_seconds,
)

# Ranks that a message lists one by one; of the rest it gives the number.
_MOST_TOLD = 3
_MOST_PARTS = 3
# No margin: a plan that exceeds this limit cannot run, however accurate the prediction.
_LIMIT = MemoryLimit(margin=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overflow:
    """A rank that needs more memory than its device has.

    ``reserved_bytes`` is what it needs, ``limit_bytes`` what is usable on its ``device``. The limit is first exceeded
    at ``time_s`` of the simulation, in the instruction ``span``. ``parts_bytes``: bytes by part at the rank's peak.
    """

    rank: int
    device: str
    limit_bytes: int
    reserved_bytes: int
    time_s: float
    span: str
    parts_bytes: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        """The rank's peak memory in bytes, the sum of all parts."""
        return sum(self.parts_bytes.values())

    def row(self) -> dict[str, Any]:
        """Return the fields and ``peak_bytes`` by name, for JSON."""
        names = ("rank", "device", "limit_bytes", "reserved_bytes", "peak_bytes", "time_s", "span", "parts_bytes")
        return {name: getattr(self, name) for name in names}

    def explain(self) -> str:
        """Return one sentence: need, limit, first time and instruction of the excess, and the largest parts."""
        largest = sorted(self.parts_bytes.items(), key=lambda item: -item[1])[:_MOST_PARTS]
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
        needs = "reserves" if self.reserved_bytes > self.peak_bytes else "needs"
        return (
            f"Rank {self.rank} {needs} up to {format_bytes(self.reserved_bytes)}, but its {self.device} has "
            f"{format_bytes(self.limit_bytes)}: too much from {format_seconds(self.time_s)} on, in {self.span}; most "
            f"at its peak are {parts}."
        )


def find_overflows(result: Simulation, cluster: Cluster, reserved: Sequence[int] = ()) -> tuple[Overflow, ...]:
    """Return every rank that needs more memory than its device leaves after CUDA and NCCL, by rank; () if all fit.

    ``reserved``: bytes that each rank's allocator reserves (`predict_reserved`). By default, the limit is compared with
    the ranks' peaks.
    """
    needed = reserved or [use.total_bytes for use in result.memory]
    limits = [_LIMIT.usable_bytes(cluster.device_kind(rank)) for rank in range(len(result.memory))]
    return tuple(
        _overflow(result, cluster, rank, limits[rank], needed[rank])
        for rank in range(len(result.memory))
        if needed[rank] > limits[rank]
    )


def explain_overflows(overflows: Sequence[Overflow]) -> tuple[str, ...]:
    """Return sentences: one for each of the first ranks, the number of other ranks, and advice; () if all fit."""
    if not overflows:
        return ()
    more = len(overflows) - _MOST_TOLD
    return (
        *(item.explain() for item in overflows[:_MOST_TOLD]),
        *((f"So do {more} more ranks.",) if more > 0 else ()),
        "This plan would not run there: plan for this cluster (`meshwright plan --cluster`), with smaller microbatches "
        "(-m), more stages, or a schedule that keeps fewer in flight.",
    )


def _overflow(result: Simulation, cluster: Cluster, rank: int, limit_bytes: int, needed_bytes: int) -> Overflow:
    timeline, kind = result.timeline, cluster.device_kind(rank)
    mine = timeline.memory_rank == rank
    times, in_use = timeline.memory_time_ps[mine], timeline.memory_bytes[mine]
    # An excess that is over within one moment leaves no sample of its own: then take the moment of the largest sample.
    time_ps = int(times[np.argmax(np.minimum(in_use, limit_bytes + 1))])
    return Overflow(
        rank=rank,
        device=kind.name,
        limit_bytes=limit_bytes,
        reserved_bytes=needed_bytes,
        time_s=to_seconds(time_ps),
        span=_span_at(timeline, rank, time_ps),
        parts_bytes={name: size for name, size in result.memory[rank].parts.items() if size},
    )


def _span_at(timeline: Timeline, rank: int, time_ps: int) -> str:
    """Return the name of what a rank begins at a moment, computations first; at time 0 its resident memory."""
    tracks = [index for index, stream in enumerate(timeline.tracks) if stream.rank == rank]
    found = np.flatnonzero(np.isin(timeline.track, tracks) & (timeline.start_ps == time_ps))
    computed = [i for i in found.tolist() if timeline.tracks[timeline.track[i]].name == "compute"]
    chosen = (computed or found.tolist())[-1:]
    return timeline.name(chosen[0]) if chosen else "its resident memory"
