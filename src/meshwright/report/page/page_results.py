"""Plans, clusters, timelines, memory and comparisons as parts of a page: plain rows, and the data of the pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.report.comparison import Comparison, comparison_rows
from meshwright.report.page.columns import pack_column
from meshwright.report.report_tables import plan_rows
from meshwright.spec import Cluster, Graph, Link, Opcode, Plan, Timeline, instruction_name
from meshwright.spec.instructions import COLLECTIVES, SENDS
from meshwright.spec.memory import MEMORY_GROUPS

Row = dict[str, Any]

# More nodes and devices are counted, not drawn: each device is a tile.
MAX_NODES = 64
MAX_DEVICES = 1024


def cluster_part(cluster: Cluster) -> Row:
    """Return the nodes of a cluster with links and devices (up to `MAX_NODES`, `MAX_DEVICES`), and the device kinds."""
    nodes, rank = [], 0
    for node in cluster.nodes[:MAX_NODES]:
        room = max(MAX_DEVICES - rank, 0)
        devices = [group.kind for group in node.devices for _ in range(min(group.count, room))][:room]
        nodes.append(
            {
                "name": node.name,
                "first_rank": rank,
                "num_devices": node.num_devices,
                "devices": devices,
                "device_link": _link_row(node.device_link),
                "nic": _link_row(node.nic),
                "num_nics": node.num_nics,
            }
        )
        rank += node.num_devices
    return {
        "name": cluster.name,
        "num_ranks": cluster.num_ranks,
        "num_nodes": len(cluster.nodes),
        "nodes": nodes,
        "kinds": [
            {
                "kind": kind.name,
                "memory_bytes": kind.memory_bytes,
                "memory_bytes_per_s": kind.memory_bandwidth_bytes_per_s,
                **{f"{dtype}_flops_per_s": peak for dtype, peak in kind.peak_flops_per_s.items()},
            }
            for kind in cluster.device_kinds
        ],
    }


# Flows are the bytes of the timeline's sends and reductions in one step; a flow's link is inside a node or between
# nodes, depending on its ends.
def plan_part(
    plan: Plan, graph: Graph | None = None, cluster: Cluster | None = None, timeline: Timeline | None = None
) -> Row:
    """Return the stages of a plan: layers (names need ``graph``), ranks, bytes sent per step (need ``timeline``)."""
    work = plan.workload
    return {
        "words": plan.describe(),
        "model": plan.model,
        "cluster": plan.cluster,
        "workload": f"{work.kind}, {work.global_batch} samples per step, {work.precision}"
        + (f", {work.optimizer.name}" if work.kind == "training" else ""),
        "num_ranks": plan.num_ranks,
        "num_microbatches": plan.num_microbatches,
        "microbatch_size": plan.microbatch_size,
        "schedule": plan.schedule,
        "stages": [
            {key: row[key] for key in ("stage", "first_layer", "last_layer", "num_layers", "ranks", "replicas")}
            for row in plan_rows(plan, graph)
        ],
        "flows": [] if timeline is None else _flow_rows(plan, cluster, timeline),
    }


def _link_row(link: Link) -> Row:
    return {"latency_s": link.latency_s, "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s}


def _flow_rows(plan: Plan, cluster: Cluster | None, timeline: Timeline) -> list[Row]:
    """One row per pair of stages and payload, and one per stage whose replicas sum their gradients; first step."""
    moves = (*SENDS, *COLLECTIVES)
    chosen = np.flatnonzero(np.isin(timeline.opcode, moves) & (timeline.step == timeline.step.min(initial=0)))
    reduces = np.isin(timeline.opcode[chosen], COLLECTIVES)
    # The peer of a reduction is its bucket: a stage's buckets are one flow.
    ends = np.where(reduces, timeline.stage[chosen], timeline.peer[chosen])
    keys = np.stack([timeline.opcode[chosen].astype(np.int64), timeline.stage[chosen], ends], axis=1)
    known, group = np.unique(keys, axis=0, return_inverse=True)
    totals = np.bincount(group.ravel(), timeline.num_bytes[chosen], len(known))
    rows = []
    for (opcode, stage, peer), num_bytes in zip(known.tolist(), totals.tolist(), strict=True):
        # Every member of a reduction has its own span.
        members = len(plan.stages[stage].ranks) if opcode in COLLECTIVES and stage < len(plan.stages) else 1
        rows.append(
            {
                "payload": Opcode(opcode).name.lower().replace("send_", "").replace("_", " "),
                "stage": stage,
                "peer": peer,
                "moved_bytes": int(num_bytes) // members,
                "link": _link_words(plan, cluster, stage, peer),
            }
        )
    return rows


def _link_words(plan: Plan, cluster: Cluster | None, stage: int, peer: int) -> str:
    if cluster is None or max(stage, peer) >= len(plan.stages) or cluster.num_ranks < plan.num_ranks:
        return ""
    nodes = [{cluster.node_index(rank) for rank in plan.stages[end].ranks} for end in (stage, peer)]
    if len(nodes[0] | nodes[1]) == 1:
        return "inside a node"
    return "between nodes" if nodes[0].isdisjoint(nodes[1]) else "inside and between nodes"


# 100,000 spans of 64 ranks make a page of about half a megabyte (benchmarks/report_page.py).
MAX_SPANS = 200_000
# Numbers that do not otherwise occur in names of instructions; each is replaced by the name of its field.
_STAGE, _MICROBATCH, _PEER = 9_000_001, 9_000_002, 9_000_003


# Spans and memory samples are packed. Spans are ordered by track and start. ``gap`` is the time from the end of the
# previous span on the same track (0 for the first) to the start, ``length`` the time from start to end, both in units
# of ``unit_ps``: the greatest number of picoseconds that divides every time, so nothing is rounded and measured times,
# which are whole nanoseconds, are short. A page shows at most `MAX_SPANS` spans: whole steps from the first on, or the
# earliest spans of the first step.
def timeline_part(timeline: Timeline, *, deflate: bool = True, max_spans: int = MAX_SPANS) -> Row:
    """Return a timeline for `result_part`. ``deflate=False`` packs faster, but larger, for pages on this machine."""
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
    """Return the name of an instruction with ``{stage}``, ``{microbatch}`` and ``{peer}`` for its numbers."""
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
    """Return the memory of ranks: ``num_ranks``, ``num_over`` (ranks beyond their limit), ``groups`` and ``rows``.

    ``groups`` maps each group of memory to its parts.

    Rows are the `MAX_RANKS` fullest ranks, by rank. A row has ``rank``, ``peak_bytes`` and ``limit_bytes`` (each None
    if not known) and ``parts``, the bytes at the peak by owner.

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
    """Return the indices of rows that no other row beats in step time, peak memory and samples/s at once."""
    points = [(row["step_time_s"], row["peak_memory_bytes"], -row["samples_per_s"]) for row in rows]

    def beaten(point: tuple[float, ...]) -> bool:
        return any(other != point and all(a <= b for a, b in zip(other, point, strict=True)) for other in points)

    return [place for place, point in enumerate(points) if not beaten(point)]


def plans_part(rows: Sequence[Mapping[str, Any]], *, limit_bytes: int | None = None) -> Row:
    """Return the planner's ``rows``, and under ``front`` the indices of the plans on the Pareto front."""
    return {"rows": [dict(row) for row in rows], "front": pareto_front(rows), "limit_bytes": limit_bytes}


def comparison_part(comparison: Comparison, predicted: Timeline, measured: Timeline) -> Row:
    """Return the rows of a comparison, with p10 and p90 (s) of each kind of instruction and of the measured step."""
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
