"""Sort instructions from the order in which they came into streams: move columns, and distribute waits.

Instructions come in chunks, and a chunk consists of pieces: runs of instructions of one stream. So few numbers describe
where everything goes, and columns are moved piece by piece.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.compiled import compiled

Ids = NDArray[np.int64]
Column = NDArray[np.int32]


class InstructionRows(NamedTuple):
    """Instructions, a column each; see `spec.program.Section`."""

    opcode: NDArray[np.int8]
    stage: Column
    microbatch: Column
    version: Column
    peer: Column
    num_bytes: Ids
    group: Column


_TYPES: tuple[type[np.generic], ...] = (np.int8, np.int32, np.int32, np.int32, np.int32, np.int64, np.int32)


class Chunk(NamedTuple):
    """Instructions that came together; piece k has ``lengths[k]`` of them, of the stream ``keys[k]``.

    With ``form``, of shape (n,), only microbatches and groups are given one by one: all else is that of the form.
    """

    keys: Ids
    lengths: Ids
    rows: InstructionRows
    form: Column | None


class Sorted(NamedTuple):
    """Instructions by stream: ``keys[s]`` has ``offsets[s]:offsets[s + 1]``; ``position``: the new index of each."""

    keys: Ids
    offsets: Ids
    rows: InstructionRows
    position: Column


def make_rows(count: int, **columns: ArrayLike) -> InstructionRows:
    """Return columns of the right types; a single value is used for all instructions, or forms."""
    # There may be more forms than instructions.
    count = max(count, *(np.size(column) for column in columns.values()))
    made: list[NDArray[Any]] = [
        np.ascontiguousarray(columns[name], kind) if np.ndim(columns[name]) else np.full(count, columns[name], kind)
        for name, kind in zip(InstructionRows._fields, _TYPES, strict=True)
    ]
    return InstructionRows(*made)


def sort_chunks(chunks: list[Chunk]) -> Sorted:
    """Sort all pieces by stream; the pieces of a stream stay in the order in which they came."""
    keys = np.concatenate([np.zeros(0, np.int64), *(chunk.keys for chunk in chunks)])
    lengths = np.concatenate([np.zeros(0, np.int64), *(chunk.lengths for chunk in chunks)])
    order = np.argsort(keys, kind="stable")
    ends = np.cumsum(lengths[order])
    places = np.empty(len(order), np.int64)
    places[order] = ends - lengths[order]
    last = np.flatnonzero(np.diff(keys[order], append=-1))
    offsets = np.concatenate([np.zeros(1, np.int64), ends[last]])
    columns: list[NDArray[Any]] = [np.empty(offsets[-1], kind) for kind in _TYPES]
    rows, position = InstructionRows(*columns), np.empty(offsets[-1], np.int32)
    first = 0
    for chunk in chunks:
        own, places = places[: len(chunk.keys)], places[len(chunk.keys) :]
        if chunk.form is None:
            _copy(chunk.lengths, own, chunk.rows, rows)
        else:
            _look_up(chunk.lengths, own, chunk.form, chunk.rows, rows)
        first += _note_positions(chunk.lengths, own, position[first:])
    return Sorted(keys[order][last], offsets, rows, position)


def deal_waits(position: Column, waits: list[tuple[Ids, Ids]]) -> tuple[Ids, Ids]:
    """Return offsets and waits, in CSR form, from pairs (waiting instructions, handles), by instruction.

    Handles of marks, below 0, become numbers after those of instructions.
    """
    offsets = np.zeros(len(position) + 1, np.int64)
    for waiting, _ in waits:
        _count(position, waiting, offsets)
    np.cumsum(offsets, out=offsets)
    place, dealt = offsets[:-1].copy(), np.empty(offsets[-1], np.int64)
    for waiting, handles in waits:
        _deal_out(position, waiting, handles, place, dealt)
    return offsets, dealt


# Elements are copied one by one: slices take seconds to compile, for their check of shapes.


@compiled
def _copy(lengths: Ids, places: Ids, given: InstructionRows, made: InstructionRows) -> None:
    given_opcode, given_stage, given_microbatch, given_version, given_peer, given_bytes, given_group = given
    opcode, stage, microbatch, version, peer, num_bytes, group = made
    begin = 0
    for k in range(len(places)):
        place = places[k]
        for i in range(lengths[k]):
            opcode[place + i], stage[place + i] = given_opcode[begin + i], given_stage[begin + i]
            microbatch[place + i], version[place + i] = given_microbatch[begin + i], given_version[begin + i]
            peer[place + i], num_bytes[place + i] = given_peer[begin + i], given_bytes[begin + i]
            group[place + i] = given_group[begin + i]
        begin += lengths[k]


@compiled
def _look_up(lengths: Ids, places: Ids, forms: Column, given: InstructionRows, made: InstructionRows) -> None:
    # Arrays are taken out of the tuples once: loops that look them up there take several times as long.
    form_opcode, form_stage, given_microbatch, form_version, form_peer, form_bytes, given_group = given
    opcode, stage, microbatch, version, peer, num_bytes, group = made
    begin = 0
    for k in range(len(places)):
        place = places[k]
        for i in range(lengths[k]):
            form = forms[begin + i]
            opcode[place + i], stage[place + i], version[place + i] = (
                form_opcode[form],
                form_stage[form],
                form_version[form],
            )
            peer[place + i], num_bytes[place + i] = form_peer[form], form_bytes[form]
            microbatch[place + i], group[place + i] = given_microbatch[begin + i], given_group[begin + i]
        begin += lengths[k]


@compiled
def _note_positions(lengths: Ids, places: Ids, position: Column) -> int:
    """Record the new index of each instruction; return their number."""
    begin = 0
    for k in range(len(places)):
        for i in range(lengths[k]):
            position[begin + i] = places[k] + i
        begin += lengths[k]
    return begin


@compiled
def _count(position: Column, waiting: Ids, counts: Ids) -> None:
    """Count the waits of each instruction, shifted by one."""
    for k in range(len(waiting)):
        counts[position[waiting[k]] + 1] += 1


@compiled
def _deal_out(position: Column, waiting: Ids, handles: Ids, place: Ids, dealt: Ids) -> None:
    """Append waits to those of each instruction; ``place`` is where the next one goes."""
    for k in range(len(waiting)):
        i, handle = position[waiting[k]], handles[k]
        dealt[place[i]] = position[handle] if handle >= 0 else len(position) - 1 - handle
        place[i] += 1
