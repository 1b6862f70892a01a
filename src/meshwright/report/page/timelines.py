"""A timeline as a part of a page: all spans and memory samples, packed.

Spans are ordered by track and start. ``gap`` is the time from the end of the previous span on the same track (0 for
the first) to the start, ``length`` the time from start to end, both in units of ``unit_ps``: the greatest number of
picoseconds that divides every time, so nothing is rounded and measured times, which are whole nanoseconds, are short.

A page shows at most `MAX_SPANS` spans: whole steps from the first on, or the earliest spans of the first step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.report.page.columns import pack_column
from meshwright.spec import Opcode, Timeline, instruction_name

Row = dict[str, Any]

# 100,000 spans of 64 ranks make a page of about half a megabyte (benchmarks/report_page.py).
MAX_SPANS = 200_000
# Numbers that do not otherwise occur in names of instructions; each is replaced by the name of its field.
_STAGE, _MICROBATCH, _PEER = 9_000_001, 9_000_002, 9_000_003


def timeline_part(timeline: Timeline, *, deflate: bool = True, max_spans: int = MAX_SPANS) -> Row:
    """A timeline for `result_part`; ``deflate=False`` packs faster and larger, for pages served on this machine."""
    shown = _shown_spans(timeline, max_spans)
    order = shown[np.lexsort((timeline.end_ps[shown], timeline.start_ps[shown], timeline.track[shown]))]
    cut_ps = int(timeline.end_ps[order].max(initial=0))
    samples = _shown_samples(timeline, cut_ps)
    start, end, track = timeline.start_ps[order], timeline.end_ps[order], timeline.track[order]
    times = (start, end, timeline.memory_time_ps[samples])
    unit_ps = max(int(np.gcd.reduce(np.concatenate(times))) if sum(map(len, times)) else 1, 1)
    before = np.where(np.diff(track, prepend=-1) != 0, 0, np.concatenate([[0], end[:-1]]))
    columns = {
        "gap": pack_column((start - before) // unit_ps, deflate=deflate),
        "length": pack_column((end - start) // unit_ps, deflate=deflate),
        **{
            name: pack_column(getattr(timeline, name)[order], delta=name != "num_bytes", deflate=deflate)
            for name in ("opcode", "stage", "microbatch", "peer", "step", "num_bytes")
        },
    }
    return {
        "origin": timeline.origin,
        "num_ranks": timeline.num_ranks,
        "num_spans": timeline.num_spans,
        "num_shown": len(order),
        "tracks": [[stream.rank, stream.name] for stream in timeline.tracks],
        "spans_per_track": np.bincount(track, minlength=len(timeline.tracks)).tolist(),
        "opcodes": [{"name": opcode.name.lower(), "template": name_template(opcode)} for opcode in Opcode],
        "unit_ps": unit_ps,
        "columns": columns,
        "memory": _memory_columns(timeline, samples, unit_ps, deflate),
        "peak_memory_bytes": list(timeline.peak_memory_bytes),
    }


def name_template(opcode: Opcode) -> str:
    """The name of an instruction with ``{stage}``, ``{microbatch}`` and ``{peer}`` for its numbers."""
    name = instruction_name(opcode, _STAGE, _MICROBATCH, _PEER)
    for number, field in ((_STAGE, "stage"), (_MICROBATCH, "microbatch"), (_PEER, "peer")):
        name = name.replace(str(number), f"{{{field}}}")
    return name


def _memory_columns(timeline: Timeline, samples: NDArray[np.int64], unit_ps: int, deflate: bool) -> Row:
    num_bytes = timeline.memory_bytes[samples]
    unit_bytes = max(int(np.gcd.reduce(num_bytes)), 1) if len(samples) else 1
    ranks, counts = np.unique(timeline.memory_rank[samples], return_counts=True)
    return {
        "ranks": ranks.tolist(),
        "samples_per_rank": counts.tolist(),
        "unit_bytes": unit_bytes,
        "time": pack_column(timeline.memory_time_ps[samples] // unit_ps, delta=True, deflate=deflate),
        "bytes": pack_column(num_bytes // unit_bytes, delta=True, deflate=deflate),
    }


def _shown_spans(timeline: Timeline, max_spans: int) -> NDArray[np.int64]:
    if timeline.num_spans <= max_spans:
        return np.arange(timeline.num_spans)
    steps, counts = np.unique(timeline.step, return_counts=True)
    num_steps = int(np.searchsorted(np.cumsum(counts), max_spans, side="right"))
    if num_steps:
        return np.flatnonzero(timeline.step <= steps[num_steps - 1])
    return np.argsort(timeline.start_ps, kind="stable")[:max_spans]


def _shown_samples(timeline: Timeline, cut_ps: int) -> NDArray[np.int64]:
    """Samples up to a moment, by rank and time; at equal times in the timeline's own order."""
    order = np.lexsort((timeline.memory_time_ps, timeline.memory_rank))
    return order[timeline.memory_time_ps[order] <= cut_ps]
