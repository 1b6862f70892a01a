"""Plans, memory and comparisons as parts of a page: plain rows, and what the pictures need besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshwright.report.comparison import Comparison, comparison_rows
from meshwright.spec import Cluster, Opcode, Timeline
from meshwright.spec.memory import MEMORY_GROUPS

Row = dict[str, Any]

# More ranks would be larger than the rest of the page; the fullest are kept.
MAX_RANKS = 2048
# Of the durations of one kind of instruction, the middle 80 % make its interval.
_INTERVAL = (10, 90)


def memory_part(
    num_ranks: int,
    *,
    peak_memory_bytes: Sequence[int] = (),
    parts: Sequence[Mapping[str, int]] = (),
    cluster: Cluster | None = None,
    limits_bytes: Sequence[int] = (),
) -> Row:
    """``num_ranks``, ``num_over`` (ranks beyond their limit), ``groups`` (group → its parts) and ``rows``.

    Rows are the `MAX_RANKS` fullest ranks, by rank. A row has ``rank``, ``peak_bytes`` and ``limit_bytes`` (each None
    if not known) and ``parts`` at the peak.

    Args:
        num_ranks: Ranks of the plan.
        peak_memory_bytes: Peak per rank, for timelines without parts.
        parts: Bytes by owner at each rank's peak, one mapping per rank.
        cluster: Where the limits come from: the memory of each rank's device.
        limits_bytes: Other limits, one per rank.
    """
    # Only ranks with known facts get a row, whatever number of ranks a document claims.
    num_known = min(num_ranks, max(len(parts), len(peak_memory_bytes)))
    rows: list[Row] = []
    for rank in range(num_known):
        owners = {name: size for name, size in parts[rank].items() if size} if rank < len(parts) else {}
        known = peak_memory_bytes[rank] if rank < len(peak_memory_bytes) else None
        limit = limits_bytes[rank] if rank < len(limits_bytes) else None
        if limit is None and cluster is not None and rank < cluster.num_ranks:
            limit = cluster.device_kind(rank).memory_bytes
        rows.append(
            {
                "rank": rank,
                "peak_bytes": sum(owners.values()) if owners else known,
                "limit_bytes": limit,
                "parts": owners,
            }
        )
    over = [row for row in rows if row["peak_bytes"] is not None and row["peak_bytes"] > (row["limit_bytes"] or np.inf)]
    fullest = sorted(rows, key=_spare_bytes)[:MAX_RANKS]
    return {
        "num_ranks": num_ranks,
        "num_over": len(over),
        "groups": {group: list(names) for group, names in MEMORY_GROUPS.items()},
        "rows": sorted(fullest, key=lambda row: int(row["rank"])),
    }


def _spare_bytes(row: Row) -> float:
    """Bytes that a rank has left; unknown peaks come last, unknown limits count as 0."""
    return np.inf if row["peak_bytes"] is None else float((row["limit_bytes"] or 0) - row["peak_bytes"])


def pareto_front(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Indices of the rows whose plans no other one beats in step time, peak memory and samples/s together."""
    points = [(row["step_time_s"], row["peak_memory_bytes"], -row["samples_per_s"]) for row in rows]

    def beaten(point: tuple[float, ...]) -> bool:
        return any(other != point and all(a <= b for a, b in zip(other, point, strict=True)) for other in points)

    return [place for place, point in enumerate(points) if not beaten(point)]


def plans_part(rows: Sequence[Mapping[str, Any]], *, limit_bytes: int | None = None) -> Row:
    """Ranked plans from the planner's rows, and the indices of those on the Pareto front."""
    return {"rows": [dict(row) for row in rows], "front": pareto_front(rows), "limit_bytes": limit_bytes}


def comparison_part(comparison: Comparison, predicted: Timeline, measured: Timeline) -> Row:
    """A comparison with the interval of each kind of instruction: ``predicted`` and ``measured``, p10 and p90 in s."""
    rows = comparison_rows(comparison)
    intervals = [_intervals(timeline) for timeline in (predicted, measured)]
    for row in rows["instructions"]:
        key = (row["opcode"], row["stage"])
        row["predicted_interval_s"], row["measured_interval_s"] = (known.get(key) for known in intervals)
    rows["step"]["measured_interval_s"] = np.percentile(measured.step_seconds(), _INTERVAL).tolist()
    return rows


def _intervals(timeline: Timeline) -> dict[tuple[str, int], list[float]]:
    lengths = (timeline.end_ps - timeline.start_ps) / 1e12
    keys = timeline.opcode.astype(np.int64) << 32 | timeline.stage.astype(np.int64)
    order = np.argsort(keys, kind="stable")
    known, first = np.unique(keys[order], return_index=True)
    return {
        (Opcode(key >> 32).name.lower(), key & 0xFFFFFFFF): np.percentile(part, _INTERVAL).tolist()
        for key, part in zip(known.tolist(), np.split(lengths[order], first[1:]), strict=True)
    }
