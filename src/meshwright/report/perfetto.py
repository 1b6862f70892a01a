"""Write timelines as a trace for https://ui.perfetto.dev (`write_trace`); format many lines fast (`render_lines`).

The format is the Trace Event Format (Google, "Trace Event Format", 2016), which Perfetto imports:

    process   a rank of one timeline: "rank 0 predicted" above "rank 0 measured"
    thread    a stream of the rank, with the same name in every timeline
    X         a span: ``ts`` and ``dur`` in microseconds, exact to the picosecond below 2^53 ps (two and a half hours);
              also an op inside a span, if ops are given
    s, f      an arrow from a send to the receive of the same bytes (`pair_transfers`)
    C         bytes in use on a rank

Perfetto requires the spans of a thread to nest. Concurrent transfers do not nest, so a stream gets as many threads of
one name as it has concurrent spans.

The text is made and written some ten thousand spans at a time. Beside the timelines themselves, memory holds a few
numbers per span: output order, thread, and receiver.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.spec import DocumentError, Opcode, OpSpans, Timeline, instruction_name
from meshwright.spec.files import write_bytes
from meshwright.spec.instructions import RECEIVES, SENDS

Ids = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]
# Adjacent columns of bytes, some of them in one word.
Words: TypeAlias = Iterable[NDArray[np.uint32] | NDArray[np.uint64]]

_GROUP = 10_000
# Forms of a group of four digits in the table of `_lookup`: all of them, without zeros in front, the same but for the
# last 0, two digits behind a point, and nothing.
_FULL, _FIRST, _LAST, _POINT, _NOTHING = (form * _GROUP for form in range(5))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextChoice:
    """A part of each line that is one of several texts: ``texts[which[i]]`` in line i; ``which`` of shape (n,)."""

    texts: Sequence[str]
    which: NDArray[np.integer]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Number:
    """A part of each line that is a whole number, shape (n,).

    With ``millionths``, numbers have six digits behind the point: 1234567 is printed as 1.234567. ``shown``: whether
    each line has the number, shape (n,); by default all have it.
    """

    values: NDArray[np.integer]
    millionths: bool = False
    shown: Mask | None = None


Part: TypeAlias = str | TextChoice | Number


# Many lines of text are formatted from columns of numbers, without a Python object per line. n lines are a table of
# bytes, shape (n, width): every part of a line is as wide as its longest text, unused bytes are 0, and all zeros are
# removed at the end. Numbers are looked up four digits at a time, and bytes are written into the table four or eight at
# a time.
def render_lines(parts: Sequence[Part], count: int) -> bytes:
    """Return the text of ``count`` lines. Each line consists of all ``parts`` in their order."""
    columns: list[bytes | NDArray[np.uint32] | NDArray[np.uint64]] = []
    for part in parts:
        match part:
            case str():
                columns.append(part.encode())
            case TextChoice():
                columns.extend(_choice_words(part))
            case Number():
                columns.extend(_number_words(part))
    widths = [len(column) if isinstance(column, bytes) else column.itemsize for column in columns]
    table = np.empty((count, sum(widths)), np.uint8)
    alike = (column if isinstance(column, bytes) else bytes(column.itemsize) for column in columns)
    table[:] = np.frombuffer(b"".join(alike), np.uint8)
    place = 0
    for column, width in zip(columns, widths, strict=True):
        if not isinstance(column, bytes) and count:
            np.ndarray(count, column.dtype, table.data, place, (table.shape[1],))[:] = column
        place += width
    return table.tobytes().translate(None, b"\0")


def _choice_words(part: TextChoice) -> Words:
    texts = [text.encode() for text in part.texts]
    if not any(texts):
        return []
    width = -(-max(map(len, texts)) // 8) * 8
    table = np.frombuffer(b"".join(text.ljust(width, b"\0") for text in texts), np.uint64).reshape(len(texts), -1)
    return [column.take(part.which) for column in table.T]


def _number_words(part: Number) -> Words:
    values = part.values.astype(np.int64)
    size = np.abs(values)
    whole = size // 10**6 if part.millionths else size
    groups = _whole_groups(whole)
    if part.millionths:
        rest = size - 10**6 * whole
        high = rest // _GROUP
        groups += [_POINT + high, _FULL + rest - _GROUP * high]
    negative = values < 0
    if part.shown is not None:
        groups, negative = [np.where(part.shown, group, _NOTHING) for group in groups], negative & part.shown
    words = [_lookup().take(group) for group in groups]
    if negative.any():
        words.insert(0, np.where(negative, np.frombuffer(b"-\0\0\0", np.uint32)[0], np.uint32(0)))
    return words


def _whole_groups(values: Ids) -> list[Ids]:
    """Positions of a number's groups of four digits in the table, the highest group first."""
    count = max(1, -(-len(str(int(values.max(initial=0)))) // 4))
    groups, rest = [], values
    for place in range(count):
        above = rest // _GROUP
        form = np.where(above > 0, _FULL, _FIRST if place else _LAST)
        groups.append(form + rest - _GROUP * above)
        rest = above
    return groups[::-1]


@cache
def _lookup() -> NDArray[np.uint32]:
    full = np.frombuffer("".join(f"{group:04}" for group in range(_GROUP)).encode(), np.uint8).reshape(_GROUP, 4)
    in_front = np.cumsum(full != ord("0"), axis=1) == 0
    first = np.where(in_front, 0, full)
    last = first.copy()
    last[0, -1] = ord("0")
    point = full.copy()
    point[:, :2] = 0, ord(".")
    nothing = np.zeros((1, 4), np.uint8)
    return np.concatenate([full, first, last, point, nothing]).astype(np.uint8).view(np.uint32).ravel()


_GRADIENTS = (Opcode.SEND_GRADIENT, Opcode.RECEIVE_GRADIENT)
_MOVES = (*SENDS, *RECEIVES)


# Payload, stages and microbatch identify a pair within a step; several equal ones are paired by start. Under an
# asynchronous schedule microbatch numbers continue from step to step, and a message may arrive in a later step: a
# transfer without a partner in its step is paired regardless of steps.
def pair_transfers(timeline: Timeline) -> Ids:
    """Return the index of each send's receive, and of each receive's send; -1 for other spans. Shape (num_spans,)."""
    partner = np.full(timeline.num_spans, -1, np.int64)
    moves = np.flatnonzero(_choose(_MOVES)[timeline.opcode])
    if not _look_up(timeline, moves, partner):
        _pair(timeline, moves, partner, by_step=True)
    left = moves[partner[moves] < 0]
    if len(left):
        _pair(timeline, left, partner, by_step=False)
    return partner


def _choose(opcodes: tuple[Opcode, ...]) -> NDArray[np.bool_]:
    """Which opcodes are among some, by opcode."""
    return np.isin(list(Opcode), opcodes)


def _look_up(timeline: Timeline, moves: Ids, partner: Ids) -> bool:
    """Pair distinct transfers in place by a table of all possible keys.

    Returns False if the table would be too large or keys repeat. Sorting takes ten times as long. Steps and
    microbatches count up from 0, and few stages send to each other.
    """
    opcode, stage, peer = (column[moves] for column in (timeline.opcode, timeline.stage, timeline.peer))
    receives = _choose(RECEIVES)[opcode]
    num_stages = 1 + int(max(stage.max(initial=0), peer.max(initial=0)))
    num_steps, num_microbatches = (
        1 + int(column[moves].max(initial=0)) for column in (timeline.step, timeline.microbatch)
    )
    lowest = min(int(column[moves].min(initial=0)) for column in (timeline.stage, timeline.peer, timeline.microbatch))
    if lowest < 0 or 2 * num_stages**2 > len(moves):
        return False
    route = (np.where(receives, peer, stage) * num_stages + np.where(receives, stage, peer)) * 2 + _choose(_GRADIENTS)[
        opcode
    ]
    used = np.flatnonzero(np.bincount(route, minlength=2 * num_stages**2))
    size = len(used) * num_steps * num_microbatches
    if size > 4 * len(moves):
        return False
    number = np.zeros(2 * num_stages**2, np.int64)
    number[used] = np.arange(len(used))
    place = (number[route] * num_steps + timeline.step[moves]) * num_microbatches + timeline.microbatch[moves]
    table = np.full((2, size), -1, np.int64)
    for way, chosen in enumerate((~receives, receives)):
        table[way, place[chosen]] = moves[chosen]
    if not np.array_equal(table[receives.astype(np.int8), place], moves):
        return False
    partner[moves] = table[1 - receives, place]
    return True


def _pair(timeline: Timeline, moves: Ids, partner: Ids, *, by_step: bool) -> None:
    """Pair some transfers, in place."""
    opcode, stage, peer = (column[moves] for column in (timeline.opcode, timeline.stage, timeline.peer))
    receives = np.isin(opcode, RECEIVES)
    keys = (
        timeline.step[moves] * np.int32(by_step),
        timeline.microbatch[moves],
        np.where(receives, stage, peer),
        np.where(receives, peer, stage),
        np.isin(opcode, _GRADIENTS),
    )
    order = np.lexsort((timeline.start_ps[moves], receives, *keys))
    same = np.ones(max(len(order) - 1, 0), np.bool_)
    for key in keys:
        same &= np.diff(key[order].astype(np.int64)) == 0
    # Among equal keys the sends come first: the k-th receive belongs to the k-th send.
    group = np.cumsum(np.append(False, ~same)[: len(order)])
    first = np.searchsorted(group, group)
    num_sends = np.bincount(group, ~receives[order]).astype(np.int64)[group] if len(order) else group
    place = np.arange(len(order)) - first
    send = first + place - num_sends
    paired = receives[order] & (place - num_sends < num_sends)
    ends = moves[order[paired]], moves[order[send[paired]]]
    partner[ends[0]], partner[ends[1]] = ends[1], ends[0]


# Lines that are formatted at once: some megabytes, enough that numpy's calls cost little.
CHUNK = 16_384
# Texts of spans are so repetitive that a higher level takes longer and saves little.
_LEVEL = 3


def write_trace(
    timelines: Sequence[Timeline],
    path: Path | str,
    *,
    ranks: Sequence[int] | None = None,
    ops: OpSpans | None = None,
) -> Path:
    """Write timelines into one trace file, side by side; the file appears whole or not at all.

    Args:
        timelines: At least one. With one timeline, processes are called "rank 0"; with several, "rank 0 predicted".
        path: The file to write (``.json``); gzip if it ends in ``.gz``, which Perfetto opens too.
        ranks: Only these ranks, and the arrows between them; by default all.
        ops: The ops inside the spans of the first timeline.

    Returns:
        The path.

    Raises:
        DocumentError: No timeline was given, a rank is in none of them, or the file cannot be written.
    """
    pieces = trace_pieces(timelines, ranks, ops)
    return write_bytes(_compress(pieces) if Path(path).suffix == ".gz" else pieces, path)


def trace_pieces(
    timelines: Sequence[Timeline], ranks: Sequence[int] | None = None, ops: OpSpans | None = None
) -> Iterator[bytes]:
    """Yield the text of the trace that `write_trace` writes, in pieces. Raises DocumentError as `write_trace` does."""
    if not timelines:
        raise DocumentError("No timeline was given for the trace; give at least one.")
    num_ranks = max(timeline.num_ranks for timeline in timelines)
    check_ranks(ranks, num_ranks)
    chosen = np.zeros(num_ranks, np.bool_)
    chosen[slice(None) if ranks is None else list(ranks)] = True
    return _pieces(timelines, chosen, ops)


def check_ranks(ranks: Sequence[int] | None, num_ranks: int) -> None:
    """Raise DocumentError if ``ranks`` of a trace is empty or has a rank outside 0 to num_ranks - 1; None means all."""
    odd = next((rank for rank in ranks or () if not 0 <= rank < num_ranks), None)
    if odd is not None or (ranks is not None and not ranks):
        asked = "No ranks were" if odd is None else f"Rank {odd} was"
        raise DocumentError(f"{asked} asked for in a trace; the ranks are 0 to {num_ranks - 1}. Choose from these.")


def _compress(pieces: Iterable[bytes]) -> Iterator[bytes]:
    packer = zlib.compressobj(_LEVEL, wbits=16 + zlib.MAX_WBITS)  # 16 +: a gzip header, without a time stamp
    for piece in pieces:
        yield packer.compress(piece)
    yield packer.flush()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Places:
    """Where a timeline is drawn: ``pids`` by rank, ``first_tids`` by track, ``lanes`` (threads of a track) by span."""

    pids: Ids
    first_tids: Ids
    lanes: NDArray[np.int32]
    track_ranks: Ids


def _pieces(timelines: Sequence[Timeline], chosen: NDArray[np.bool_], ops: OpSpans | None) -> Iterator[bytes]:
    yield b'{"displayTimeUnit":"ms","traceEvents":['
    # Process 0 means "idle" to Perfetto, and a thread with its process's number counts as the main thread.
    first_tid = 1 + len(chosen) * len(timelines)
    first_flow, separator = 0, "\n"
    for position, (timeline, suffix) in enumerate(zip(timelines, _suffixes(timelines), strict=True)):
        track_ranks = np.array([stream.rank for stream in timeline.tracks], np.int64)
        drawn = chosen[track_ranks]
        order = _sort_rows(np.flatnonzero(drawn[timeline.track]), timeline.track, timeline.start_ps, timeline.end_ps)
        lanes = _assign_lanes(timeline, order)
        num_lanes = np.ones(len(timeline.tracks), np.int64)
        np.maximum.at(num_lanes, timeline.track[order], lanes[order] + 1)
        places = _Places(
            pids=1 + np.arange(timeline.num_ranks) * len(timelines) + position,
            first_tids=first_tid + np.cumsum(num_lanes) - num_lanes,
            lanes=lanes,
            track_ranks=track_ranks,
        )
        for event in _names(timeline, places, num_lanes, suffix, chosen):
            yield f"{separator}{json.dumps(event, ensure_ascii=False, separators=(',', ':'))}".encode()
            separator = ",\n"
        yield from _span_lines(timeline, order, places, first_flow)
        if ops is not None and position == 0:
            yield from _op_lines(timeline, ops, places, drawn)
        yield from _memory_lines(timeline, places, chosen)
        first_flow += timeline.num_spans
        first_tid += int(num_lanes.sum())
    yield b"\n]}\n"


def _sort_rows(rows: Ids, *columns: NDArray[np.integer]) -> Ids:
    """Some rows in the order of their entries in columns, the first of which counts most; equal ones stay in order.

    Timelines are mostly sorted already; checking that takes a fraction of the time of sorting.
    """
    keys = [column[rows] for column in columns]
    later = np.zeros(max(len(rows) - 1, 0), np.bool_)
    for key in keys[::-1]:
        later = (key[1:] > key[:-1]) | ((key[1:] == key[:-1]) & later) if key is not keys[-1] else key[1:] >= key[:-1]
    return rows if later.all() else rows[np.lexsort(keys[::-1])]


def _suffixes(timelines: Sequence[Timeline]) -> list[str]:
    """The suffix of a process name after the rank: "" for a single timeline, else its origin."""
    if len(timelines) == 1:
        return [""]
    seen: Counter[str] = Counter()
    suffixes = []
    for timeline in timelines:
        seen[timeline.origin] += 1
        again = f" {seen[timeline.origin]}" if seen[timeline.origin] > 1 else ""
        suffixes.append(f" {timeline.origin}{again}")
    return suffixes


def _names(
    timeline: Timeline, places: _Places, num_lanes: Ids, suffix: str, chosen: NDArray[np.bool_]
) -> Iterator[dict[str, Any]]:
    """Events that name and order the chosen processes and their threads."""
    for rank in np.flatnonzero(chosen[: timeline.num_ranks]).tolist():
        pid = int(places.pids[rank])
        yield metadata_event("process_name", pid, name=f"rank {rank}{suffix}")
        yield metadata_event("process_sort_index", pid, sort_index=pid)
    for track, stream in enumerate(timeline.tracks):
        if chosen[stream.rank]:
            pid, first = int(places.pids[stream.rank]), int(places.first_tids[track])
            for tid in range(first, first + int(num_lanes[track])):
                yield metadata_event("thread_name", pid, tid, name=stream.name)
                yield metadata_event("thread_sort_index", pid, tid, sort_index=tid)


def metadata_event(kind: str, pid: int, tid: int = 0, **args: str | int) -> dict[str, Any]:
    """Return an event that sets the name of a process or thread (``name``) or its position (``sort_index``)."""
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _assign_lanes(timeline: Timeline, order: Ids) -> NDArray[np.int32]:
    """The first lane of its track that is free when a span starts, per span; ``order`` is by track and start."""
    lanes = np.zeros(timeline.num_spans, np.int32)
    track, start, end = timeline.track[order], timeline.start_ps[order], timeline.end_ps[order]
    late = (track[1:] == track[:-1]) & (start[1:] < end[:-1])
    for crowded in np.unique(track[1:][late]).tolist():
        first, last = np.searchsorted(track, [crowded, crowded + 1])
        ends: list[int] = []
        for index, begin, finish in zip(
            order[first:last].tolist(), start[first:last].tolist(), end[first:last].tolist(), strict=True
        ):
            lane = next((lane for lane, free in enumerate(ends) if free <= begin), len(ends))
            ends[lane : lane + 1] = [finish]
            lanes[index] = lane
    return lanes


def _span_lines(timeline: Timeline, order: Ids, places: _Places, first_flow: int) -> Iterator[bytes]:
    """The spans of each track by start, each transfer with its end of an arrow."""
    drawn = np.zeros(timeline.num_spans, np.bool_)
    drawn[order] = True
    partner = pair_transfers(timeline)
    partner[(partner >= 0) & ~drawn[partner]] = -1
    for begin in range(0, len(order), CHUNK):
        spans = order[begin : begin + CHUNK]
        track, opcode = timeline.track[spans], timeline.opcode[spans]
        pid, tid = places.pids[places.track_ranks[track]], places.first_tids[track] + places.lanes[spans]
        start_ps = timeline.start_ps[spans]
        parts: list[Part] = [
            ',\n{"ph":"X","name":"',
            *_name_parts(timeline, spans),
            '","cat":"',
            TextChoice(texts=[item.name.lower() for item in sorted(Opcode)], which=opcode),
            '","pid":',
            Number(values=pid),
            ',"tid":',
            Number(values=tid),
            ',"ts":',
            Number(values=start_ps, millionths=True),
            ',"dur":',
            Number(values=timeline.end_ps[spans] - start_ps, millionths=True),
            ',"args":{"stage":',
            Number(values=timeline.stage[spans]),
            ',"microbatch":',
            Number(values=timeline.microbatch[spans]),
            ',"bytes":',
            Number(values=timeline.num_bytes[spans]),
            ',"step":',
            Number(values=timeline.step[spans]),
            "}}",
        ]
        if (partner[spans] >= 0).any():
            parts += _arrow_parts(timeline, spans, partner[spans], pid, tid, first_flow)
        yield render_lines(parts, len(spans))


def _op_lines(timeline: Timeline, ops: OpSpans, places: _Places, drawn: NDArray[np.bool_]) -> Iterator[bytes]:
    """Ops in the thread of their span, after it in the file.

    Of two with equal starts, the first contains the other. ``drawn``: the tracks that are drawn.
    """
    names = [json.dumps(name, ensure_ascii=False) for name in ops.names]
    for begin in range(0, ops.num_parts, CHUNK):
        chosen = begin + np.flatnonzero(drawn[timeline.track[ops.span[begin : begin + CHUNK]]])
        spans, start_ps = ops.span[chosen], ops.start_ps[chosen]
        track = timeline.track[spans]
        parts: list[Part] = [
            ',\n{"ph":"X","name":',
            TextChoice(texts=names, which=ops.op[chosen]),
            ',"cat":"op","pid":',
            Number(values=places.pids[places.track_ranks[track]]),
            ',"tid":',
            Number(values=places.first_tids[track] + places.lanes[spans]),
            ',"ts":',
            Number(values=start_ps, millionths=True),
            ',"dur":',
            Number(values=ops.end_ps[chosen] - start_ps, millionths=True),
            "}",
        ]
        yield render_lines(parts, len(chosen))


def _arrow_parts(timeline: Timeline, spans: Ids, partner: Ids, pid: Ids, tid: Ids, first_flow: int) -> list[Part]:
    """A second line for each span at an end of a transfer: the start or the end of an arrow."""
    drawn = partner >= 0
    receives = drawn & np.isin(timeline.opcode[spans], RECEIVES)
    send = np.where(receives, partner, spans)
    kind = drawn * (1 + receives)
    # Inside the receive and after the start of its send: Perfetto drops arrows that point back in time.
    end_ps = timeline.end_ps[spans]
    first_ps = np.minimum(np.maximum(timeline.start_ps[send], timeline.start_ps[spans]), end_ps)
    moment_ps = np.where(receives, first_ps + (end_ps - first_ps) // 2, timeline.start_ps[spans])

    def text(*lines: str) -> TextChoice:
        return TextChoice(texts=("", *lines), which=kind if len(lines) > 1 else drawn.astype(np.int64))

    return [
        text(',\n{"ph":"s","id":', ',\n{"ph":"f","bp":"e","id":'),
        Number(values=first_flow + send, shown=drawn),
        text(',"ts":'),
        Number(values=moment_ps, millionths=True, shown=drawn),
        text(',"cat":"transfer","name":"transfer","pid":'),
        Number(values=pid, shown=drawn),
        text(',"tid":'),
        Number(values=tid, shown=drawn),
        text("}"),
    ]


@cache
def _name_forms() -> tuple[list[list[str]], NDArray[np.int8]]:
    """The parts of `instruction_name`: by opcode, the texts before, between and after its numbers.

    Also the kind of each number, shape (opcodes, numbers): 0 stage, 1 microbatch, 2 peer, -1 unused.
    """
    numbers = (1_000_001, 1_000_002, 1_000_003)
    cut = [
        re.split("(" + "|".join(map(str, numbers)) + ")", instruction_name(item, *numbers)) for item in sorted(Opcode)
    ]
    most = max(len(pieces) for pieces in cut) // 2
    texts = [pieces[::2] + [""] * (most + 1 - len(pieces[::2])) for pieces in cut]
    found = [[numbers.index(int(number)) for number in pieces[1::2]] for pieces in cut]
    return texts, np.array([row + [-1] * (most - len(row)) for row in found], np.int8)


def _name_parts(timeline: Timeline, spans: Ids) -> list[Part]:
    """The names of spans, as `instruction_name` returns them."""
    texts, numbers = _name_forms()
    opcode = timeline.opcode[spans]
    columns = [column[spans].astype(np.int64) for column in (timeline.stage, timeline.microbatch, timeline.peer)]
    parts: list[Part] = [TextChoice(texts=[row[0] for row in texts], which=opcode)]
    for place in range(numbers.shape[1]):
        which = numbers[:, place][opcode]
        parts.append(Number(values=np.choose(np.maximum(which, 0), columns), shown=which >= 0))
        parts.append(TextChoice(texts=[row[place + 1] for row in texts], which=opcode))
    return parts


def _memory_lines(timeline: Timeline, places: _Places, chosen: NDArray[np.bool_]) -> Iterator[bytes]:
    order = _sort_rows(np.flatnonzero(chosen[timeline.memory_rank]), timeline.memory_rank, timeline.memory_time_ps)
    for begin in range(0, len(order), CHUNK):
        samples = order[begin : begin + CHUNK]
        parts: list[Part] = [
            ',\n{"ph":"C","name":"memory","pid":',
            Number(values=places.pids[timeline.memory_rank[samples]]),
            ',"ts":',
            Number(values=timeline.memory_time_ps[samples], millionths=True),
            ',"args":{"bytes":',
            Number(values=timeline.memory_bytes[samples]),
            "}}",
        ]
        yield render_lines(parts, len(samples))
