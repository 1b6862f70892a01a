"""The timeline of all ranks, from that of the ranks that stand for them (`folding`).

The spans of a rank are those of its representative; only its number and the numbers of its microbatches differ. Equal
to what a simulation of all ranks gives, column by column.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.program import Fold
from meshwright.spec import OpSpans, Stream, Timeline

Ids = NDArray[np.int64]

_ALIKE = ("opcode", "stage", "peer", "step", "num_bytes", "start_ps", "end_ps")


def unfold_timeline(timeline: Timeline, fold: Fold) -> Timeline:
    """The timeline of ``fold.whole``, of that of ``fold.plan``."""
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
    """The ops inside of the spans of the unfolded timeline, of those inside of ``timeline``."""
    spans, _ = _spread(timeline.track.astype(np.int64), _spread_tracks(timeline, fold.representatives())[0])
    parts, span = _spread(ops.span, spans)
    return OpSpans(span=span, op=ops.op[parts], start_ps=ops.start_ps[parts], end_ps=ops.end_ps[parts], names=ops.names)


def _spread_tracks(timeline: Timeline, stands: Ids) -> tuple[Ids, Ids]:
    """The track of the representative, and the rank, of each track of all ranks."""
    return _spread(np.array([stream.rank for stream in timeline.tracks], np.int64), stands)


def _spread(owners: Ids, chosen: Ids) -> tuple[Ids, Ids]:
    """For rows that are sorted by owner: the rows of each chosen owner, and which of the chosen each belongs to."""
    begins = np.searchsorted(owners, chosen)
    counts = np.searchsorted(owners, chosen, side="right") - begins
    shifts = np.repeat(begins - (np.cumsum(counts) - counts), counts)
    return np.arange(len(shifts)) + shifts, np.repeat(np.arange(len(chosen)), counts)


def _number_microbatches(microbatch: NDArray[np.int32], ranks: Ids, fold: Fold) -> NDArray[np.int32]:
    """Microbatch k + j K of a representative is r + j R of the rank's own pipeline r; -1 stays."""
    pipeline = np.empty(fold.whole.num_ranks, np.int64)
    for stage in fold.whole.stages:
        pipeline[list(stage.ranks)] = np.arange(len(stage.ranks))
    own = pipeline[ranks] + microbatch // len(fold.replicas) * len(fold.classes)
    return np.where(microbatch < 0, microbatch, own).astype(np.int32)
