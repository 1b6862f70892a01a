"""Busy, communication and idle time of each rank. Rows for `timeline_table` and ``--json``.

Over all steps of a timeline of length T = `Timeline.duration_s`, per rank and per step (divided by their number):

    busy            Σ spans of the compute stream
    communication   time with at least one transfer or collective under way
    exposed         the part of it in which the compute stream is idle
    idle            T - busy

A measured transfer ends when something has waited for it, so measured communication is an upper bound.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.spec import Timeline, to_seconds

Row = dict[str, Any]


def timeline_rows(timeline: Timeline) -> Row:
    """Step time, bubble and, under ``ranks``, one row per rank.

    Keys: ``origin``, ``num_ranks``, ``num_steps``, ``num_spans``, ``median_step_s``, ``slowest_step_s``,
    ``bubble_share``, ``ranks``: ``rank``, ``busy_s``, ``communication_s``, ``exposed_s``, ``idle_s`` (per step),
    ``busy_share``, ``communication_share``, ``idle_share``, ``peak_memory_bytes`` (None if not known).
    """
    steps = timeline.step_seconds()
    ranks = np.array([stream.rank for stream in timeline.tracks], np.int64)[timeline.track]
    order = np.argsort(ranks, kind="stable")
    spans_of_rank = np.split(order, np.searchsorted(ranks[order], np.arange(1, timeline.num_ranks)))
    return {
        "origin": timeline.origin,
        "num_ranks": timeline.num_ranks,
        "num_steps": len(steps),
        "num_spans": timeline.num_spans,
        "median_step_s": float(np.median(steps)) if len(steps) else 0.0,
        "slowest_step_s": float(steps.max(initial=0.0)),
        "bubble_share": timeline.bubble_fraction(),
        "ranks": [_rank_row(timeline, rank, spans, max(len(steps), 1)) for rank, spans in enumerate(spans_of_rank)],
    }


def _rank_row(timeline: Timeline, rank: int, spans: NDArray[np.int64], num_steps: int) -> Row:
    computes = np.array([stream.name == "compute" for stream in timeline.tracks], np.bool_)[timeline.track[spans]]
    busy_ps = int((timeline.end_ps - timeline.start_ps)[spans[computes]].sum())
    communication_ps = _length(merge_spans(timeline, spans[~computes]))
    # |moving and not computing| = |moving or computing| - |computing|
    exposed_ps = _length(merge_spans(timeline, spans)) - _length(merge_spans(timeline, spans[computes]))
    total_ps = int(timeline.end_ps.max(initial=0))
    peaks = timeline.peak_memory_bytes
    return {
        "rank": rank,
        "busy_s": to_seconds(busy_ps) / num_steps,
        "communication_s": to_seconds(communication_ps) / num_steps,
        "exposed_s": to_seconds(exposed_ps) / num_steps,
        "idle_s": to_seconds(total_ps - busy_ps) / num_steps,
        "busy_share": busy_ps / total_ps if total_ps else 0.0,
        "communication_share": communication_ps / total_ps if total_ps else 0.0,
        "idle_share": 1 - busy_ps / total_ps if total_ps else 0.0,
        "peak_memory_bytes": peaks[rank] if peaks else None,
    }


def merge_spans(timeline: Timeline, spans: NDArray[np.int64]) -> NDArray[np.int64]:
    """The time that some spans cover together: disjoint intervals (start, end) in ps, shape (intervals, 2)."""
    order = spans[np.argsort(timeline.start_ps[spans], kind="stable")]
    start, end = timeline.start_ps[order], np.maximum.accumulate(timeline.end_ps[order])
    if not len(order):
        return np.zeros((0, 2), np.int64)
    opens = np.concatenate([[True], start[1:] > end[:-1]])
    closes = np.concatenate([opens[1:], [True]])
    return np.stack([start[opens], end[closes]], axis=1)


def _length(intervals: NDArray[np.int64]) -> int:
    return int((intervals[:, 1] - intervals[:, 0]).sum())
