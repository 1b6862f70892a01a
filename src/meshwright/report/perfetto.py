"""Where does the time go, span by span? Timelines as a trace that https://ui.perfetto.dev opens.

The format is the Trace Event Format (Google, "Trace Event Format", 2016), which Perfetto imports:

    process   a rank of one timeline: "rank 0 predicted" above "rank 0 measured"
    thread    a stream of the rank, named alike in every timeline
    X         a span: ``ts`` and ``dur`` in microseconds, exact to the picosecond below 2^53 ps (two and a half hours)
              inside of it, where they are given, its ops
    s, f      an arrow from a send to the receive of the same bytes
    C         bytes in use on a rank

Perfetto wants the spans of a thread to nest. Transfers that are under way at the same time do not, so a stream gets as
many threads of one name as it has spans at once.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.spec import DocumentError, Opcode, OpSpans, Timeline, instruction_name, write_text

PICOSECONDS_PER_MICROSECOND = 1e6

_SENDS = (Opcode.SEND_ACTIVATION, Opcode.SEND_GRADIENT)
_RECEIVES = {Opcode.RECEIVE_ACTIVATION: Opcode.SEND_ACTIVATION, Opcode.RECEIVE_GRADIENT: Opcode.SEND_GRADIENT}

Event = dict[str, Any]
Ids = NDArray[np.int64]


def write_trace(timelines: Sequence[Timeline], path: Path | str, *, ops: OpSpans | None = None) -> Path:
    """Write timelines into one trace file, side by side; the file appears whole or not at all.

    Args:
        timelines: At least one. With a single one, processes are called "rank 0"; else "rank 0 predicted".
        path: The file to write (``.json``).
        ops: What happens inside the spans of the first timeline.

    Returns:
        The path.

    Raises:
        DocumentError: No timeline was given, or the file cannot be written.
    """
    if not timelines:
        raise DocumentError("A trace of no timelines was asked for; give at least one.")
    return write_text(trace_pieces(timelines, ops), path)


def trace_pieces(timelines: Sequence[Timeline], ops: OpSpans | None = None) -> Iterator[str]:
    """The text of a trace, in pieces."""
    yield '{"displayTimeUnit":"ms","traceEvents":[\n'
    separator = ""
    for event in _events(timelines, ops):
        yield separator + json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        separator = ",\n"
    yield "\n]}\n"


def _events(timelines: Sequence[Timeline], ops: OpSpans | None) -> Iterator[Event]:
    num_processes = max(timeline.num_ranks for timeline in timelines) * len(timelines)
    # Process 0 means "idle" to Perfetto, and a thread with its process's number counts as the main thread.
    tids = itertools.count(num_processes + 1)
    first_flow = 0
    for position, (timeline, suffix) in enumerate(zip(timelines, _suffixes(timelines), strict=True)):
        pids = [1 + rank * len(timelines) + position for rank in range(timeline.num_ranks)]
        for rank, pid in enumerate(pids):
            yield _metadata("process_name", pid, name=f"rank {rank}{suffix}")
            yield _metadata("process_sort_index", pid, sort_index=pid)
        order = np.lexsort((timeline.end_ps, timeline.start_ps, timeline.track))
        lanes = _assign_lanes(timeline, order)
        threads = _Threads(pids=pids, lanes=lanes, tids={})
        yield from _name_threads(timeline, threads, tids)
        yield from _span_events(timeline, order, threads, first_flow)
        if ops is not None and position == 0:
            yield from _op_events(timeline, ops, threads)
        yield from _memory_events(timeline, pids)
        first_flow += timeline.num_spans


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Threads:
    """Where spans are drawn: ``pids`` by rank, ``lanes`` by span, ``tids`` by (track, lane)."""

    pids: list[int]
    lanes: NDArray[np.int32]
    tids: dict[tuple[int, int], int]


def _suffixes(timelines: Sequence[Timeline]) -> list[str]:
    """What follows the rank in the name of a process: nothing for a single timeline, else its origin."""
    if len(timelines) == 1:
        return [""]
    seen: Counter[str] = Counter()
    suffixes = []
    for timeline in timelines:
        seen[timeline.origin] += 1
        again = f" {seen[timeline.origin]}" if seen[timeline.origin] > 1 else ""
        suffixes.append(f" {timeline.origin}{again}")
    return suffixes


def _metadata(kind: str, pid: int, tid: int = 0, **args: str | int) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _assign_lanes(timeline: Timeline, order: Ids) -> NDArray[np.int32]:
    """The first lane of its track that is free when a span starts, per span."""
    lanes = np.zeros(timeline.num_spans, np.int32)
    columns = (timeline.track[order], timeline.start_ps[order], timeline.end_ps[order])
    free_at: dict[int, list[int]] = defaultdict(list)
    for index, track, start, end in zip(order.tolist(), *(column.tolist() for column in columns), strict=True):
        ends = free_at[track]
        lane = next((lane for lane, free in enumerate(ends) if free <= start), len(ends))
        ends[lane : lane + 1] = [end]
        lanes[index] = lane
    return lanes


def _name_threads(timeline: Timeline, threads: _Threads, tids: Iterator[int]) -> Iterator[Event]:
    last = np.zeros(len(timeline.tracks), np.int64)
    np.maximum.at(last, timeline.track, threads.lanes)
    for track, stream in enumerate(timeline.tracks):
        for lane in range(int(last[track]) + 1):
            tid = threads.tids[track, lane] = next(tids)
            yield _metadata("thread_name", threads.pids[stream.rank], tid, name=stream.name)
            yield _metadata("thread_sort_index", threads.pids[stream.rank], tid, sort_index=tid)


def _span_events(timeline: Timeline, order: Ids, threads: _Threads, first_flow: int) -> Iterator[Event]:
    """The spans of each track by start, each transfer with its end of an arrow."""
    partner = pair_transfers(timeline)
    names: dict[tuple[int, int, int, int], str] = {}
    # Not `tolist`: a long timeline would hold every index as a Python number.
    for i in map(int, order):
        key = (int(timeline.opcode[i]), int(timeline.stage[i]), int(timeline.microbatch[i]), int(timeline.peer[i]))
        if key not in names:
            names[key] = instruction_name(*key)
        event = _span_event(timeline, i, names[key], threads)
        yield event
        other = int(partner[i])
        if other < 0:
            continue
        place = {"cat": "transfer", "name": "transfer", "pid": event["pid"], "tid": event["tid"]}
        if key[0] in _SENDS:
            yield {"ph": "s", "id": first_flow + i, "ts": event["ts"], **place}
        else:
            yield {"ph": "f", "bp": "e", "id": first_flow + other, "ts": _arrival(timeline, other, i), **place}


def _span_event(timeline: Timeline, i: int, name: str, threads: _Threads) -> Event:
    track = int(timeline.track[i])
    start, end = int(timeline.start_ps[i]), int(timeline.end_ps[i])
    return {
        "ph": "X",
        "name": name,
        "cat": Opcode(int(timeline.opcode[i])).name.lower(),
        "pid": threads.pids[timeline.tracks[track].rank],
        "tid": threads.tids[track, int(threads.lanes[i])],
        "ts": start / PICOSECONDS_PER_MICROSECOND,
        "dur": (end - start) / PICOSECONDS_PER_MICROSECOND,
        "args": {
            "stage": int(timeline.stage[i]),
            "microbatch": int(timeline.microbatch[i]),
            "bytes": int(timeline.num_bytes[i]),
            "step": int(timeline.step[i]),
        },
    }


def _op_events(timeline: Timeline, ops: OpSpans, threads: _Threads) -> Iterator[Event]:
    """Ops in the thread of their span, behind it in the file: of two that begin together the first holds the other."""
    for i in range(ops.num_parts):
        span, start = int(ops.span[i]), int(ops.start_ps[i])
        track = int(timeline.track[span])
        yield {
            "ph": "X",
            "name": ops.name(i),
            "cat": "op",
            "pid": threads.pids[timeline.tracks[track].rank],
            "tid": threads.tids[track, int(threads.lanes[span])],
            "ts": start / PICOSECONDS_PER_MICROSECOND,
            "dur": (int(ops.end_ps[i]) - start) / PICOSECONDS_PER_MICROSECOND,
        }


def _arrival(timeline: Timeline, send: int, receive: int) -> float:
    """A moment (µs) inside the receive and after the start of its send: Perfetto drops arrows that point back."""
    end = int(timeline.end_ps[receive])
    first = min(max(int(timeline.start_ps[send]), int(timeline.start_ps[receive])), end)
    return (first + end) / 2 / PICOSECONDS_PER_MICROSECOND


def pair_transfers(timeline: Timeline) -> Ids:
    """For each send the index of its receive and the reverse; -1 elsewhere. Shape (num_spans,).

    Step, payload, stages and microbatch say what belongs together; what occurs several times pairs up by start.
    """
    partner = np.full(timeline.num_spans, -1, np.int64)
    moves = np.flatnonzero(np.isin(timeline.opcode, [*_SENDS, *_RECEIVES]))
    moves = moves[np.argsort(timeline.start_ps[moves], kind="stable")]
    sends: dict[tuple[int, ...], deque[int]] = defaultdict(deque)
    receives: list[tuple[int, tuple[int, ...]]] = []
    columns = (timeline.opcode, timeline.stage, timeline.peer, timeline.microbatch, timeline.step)
    for index, opcode, stage, peer, microbatch, step in zip(
        moves.tolist(), *(column[moves].tolist() for column in columns), strict=True
    ):
        if opcode in _SENDS:
            sends[opcode, stage, peer, microbatch, step].append(index)
        else:
            receives.append((index, (_RECEIVES[Opcode(opcode)], peer, stage, microbatch, step)))
    for index, key in receives:
        if sends.get(key):
            partner[index] = sends[key].popleft()
            partner[partner[index]] = index
    return partner


def _memory_events(timeline: Timeline, pids: list[int]) -> Iterator[Event]:
    order = np.lexsort((timeline.memory_time_ps, timeline.memory_rank))
    columns = (timeline.memory_rank[order], timeline.memory_time_ps[order], timeline.memory_bytes[order])
    for rank, time_ps, num_bytes in zip(*(column.tolist() for column in columns), strict=True):
        yield {
            "ph": "C",
            "name": "memory",
            "pid": pids[rank],
            "ts": time_ps / PICOSECONDS_PER_MICROSECOND,
            "args": {"bytes": num_bytes},
        }
