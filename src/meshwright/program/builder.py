"""The builder of programs (`ProgramBuilder`): it accepts instructions in any order and sorts them into streams.

`sort_chunks` sorts instructions into streams, `deal_waits` lists the waits of each instruction.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.compiled import compiled
from meshwright.spec import Instruction, Program, ProgramError, Receive, Section, Stream, empty_section
from meshwright.spec.instructions import STREAM_NAMES, StreamName, instruction_row

Ids = NDArray[np.int64]
Column = NDArray[np.int32]


class InstructionRows(NamedTuple):
    """Instructions as columns of shape (n,), with the meaning that they have in `spec.program.Section`."""

    opcode: NDArray[np.int8]
    stage: Column
    microbatch: Column
    version: Column
    peer: Column
    num_bytes: Ids
    group: Column


_TYPES: tuple[type[np.generic], ...] = (np.int8, np.int32, np.int32, np.int32, np.int32, np.int64, np.int32)


# Instructions come in chunks, and a chunk consists of pieces: runs of instructions of one stream. So few numbers
# describe where everything goes, and columns are moved piece by piece.
class Chunk(NamedTuple):
    """Instructions that were appended by one call: piece k is ``lengths[k]`` instructions of the stream ``keys[k]``.

    If ``form`` (shape (n,)) is given, ``rows.microbatch`` and ``rows.group`` have one entry per instruction; the other
    columns have one entry per form, and instruction i takes entry ``form[i]``.
    """

    keys: Ids
    lengths: Ids
    rows: InstructionRows
    form: Column | None


class Sorted(NamedTuple):
    """Instructions sorted by stream: stream ``keys[s]`` has the rows ``offsets[s]:offsets[s + 1]``.

    ``position`` is the new row of each instruction, in the order in which instructions were appended.
    """

    keys: Ids
    offsets: Ids
    rows: InstructionRows
    position: Column


def make_rows(count: int, **columns: ArrayLike) -> InstructionRows:
    """Return instruction columns of the types of `Section`; a scalar is repeated for all ``count`` rows."""
    # There may be more forms than instructions.
    count = max(count, *(np.size(column) for column in columns.values()))
    made: list[NDArray[Any]] = [
        np.ascontiguousarray(columns[name], kind) if np.ndim(columns[name]) else np.full(count, columns[name], kind)
        for name, kind in zip(InstructionRows._fields, _TYPES, strict=True)
    ]
    return InstructionRows(*made)


def sort_chunks(chunks: list[Chunk]) -> Sorted:
    """Sort the pieces of all chunks by stream; the pieces of a stream stay in the order in which they were appended."""
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
    """Return the waits of all instructions in CSR form: offsets of shape (instructions + 1,), and awaited ids.

    ``waits`` are pairs of arrays (waiting handles, awaited handles); ``position`` is the row of each instruction.
    Handles of marks (-1, -2, ...) become the ids n, n + 1, ... after those of the n instructions.
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


# Most lanes of one stream, in the numbering of keys.
_MAX_LANES = 2**20
_PLACES = {name: place for place, name in enumerate(STREAM_NAMES)}
# Stream, then the columns of `InstructionRows`: packed, a row is stored in half the time of eight numbers.
_ROW = struct.Struct("8q")


class ProgramBuilder:
    """Collects the instructions of a program's body.

    `append`, `extend` and `mark` return handles, with which other instructions wait: instructions count up from 0,
    marks count down from -1. Instructions of one stream run in the order in which they were appended.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        # Flat arrays of integers, not objects per instruction: programs have many.
        self._chunks: list[Chunk] = []
        self._rows = array("q")
        self._num_instructions = 0
        self._waits: list[tuple[Ids, Ids]] = []
        self._waiting = array("q")
        self._awaited = array("q")
        # For each mark, the instruction that raises it and the bucket that is ready.
        self._raising, self._ready = array("q"), array("q")
        self._joins: dict[int, int] = {}
        self._late: list[tuple[Ids, Ids, Ids]] = []
        self._groups: dict[tuple[int, ...], int] = {}

    def append(
        self,
        rank: int,
        stream: StreamName,
        instruction: Instruction,
        *,
        group: tuple[int, ...] = (),
        waits: Iterable[int] = (),
        need: int | None = None,
    ) -> int:
        """Append one instruction to a stream of a rank and return its handle.

        ``group`` lists the ranks that take part in a communication. The instruction starts when ``need`` of the handles
        in ``waits`` have happened, by default all.
        """
        if not 0 <= rank < self._num_ranks:
            raise ProgramError(
                f"{instruction} was appended to rank {rank}; expected one of the program's ranks, 0 to "
                f"{self._num_ranks - 1}."
            )
        if need is not None and (need < 1 or isinstance(instruction, Receive)):
            raise ProgramError(
                f"{instruction} needs {need} of its waits; expected 1 or more, and not for a receive, which always "
                "waits for its send. Leave `need` out to wait for all."
            )
        number = self.group(group) if group else -1
        try:
            key = (rank * len(STREAM_NAMES) + _PLACES[stream]) * _MAX_LANES
            self._rows.frombytes(_ROW.pack(key, *instruction_row(instruction), number))
        except struct.error:
            raise ProgramError(
                f"{instruction} moves more bytes than 64 bits can count. Plan with a smaller batch."
            ) from None
        handle = self._num_instructions
        self._num_instructions += 1
        for awaited in waits:
            self.wait(handle, awaited)
        if need is not None:
            self._joins[handle] = need
        return handle

    def extend(
        self,
        offsets: Ids,
        stream: StreamName,
        *,
        lane: int = 0,
        form: NDArray[np.int32] | None = None,
        **columns: ArrayLike,
    ) -> Ids:
        """Append n instructions to the streams of one name on all ranks; return their handles, shape (n,).

        Rank r gets the instructions ``offsets[r]:offsets[r + 1]``. ``columns`` are named as in `Section`, each of shape
        (n,) or one value for all; by default ``microbatch``, ``peer`` and ``group`` are -1, ``version`` and
        ``num_bytes`` 0. With ``form``, of shape (n,), instruction i takes row ``form[i]`` of all columns except
        ``microbatch`` and ``group``, which still have one entry per instruction.
        """
        self._flush()
        lengths, count = np.diff(offsets), int(offsets[-1])
        ranks = np.flatnonzero(lengths)
        given: dict[str, ArrayLike] = {
            "microbatch": -1,
            "version": 0,
            "peer": -1,
            "num_bytes": 0,
            "group": -1,
        } | columns
        rows = make_rows(count, **given)
        keys = (ranks * len(STREAM_NAMES) + _PLACES[stream]) * _MAX_LANES + lane
        self._chunks.append(Chunk(keys, lengths[ranks], rows, form))
        self._num_instructions += count
        return np.arange(self._num_instructions - count, self._num_instructions)

    def group(self, ranks: tuple[int, ...]) -> int:
        """Return the number of a process group of ``ranks``, for the column ``group``; add the group if it is new."""
        return self._groups.setdefault(ranks, len(self._groups))

    def wait(self, instruction: int, handle: int) -> None:
        """Make an appended instruction also wait for ``handle``."""
        self._waiting.append(instruction)
        self._awaited.append(handle)

    def wait_each(self, instructions: Ids, handles: Ids) -> None:
        """Make each instruction wait for the handle at the same index."""
        self._waits.append((instructions, handles))

    def wait_late_each(self, instructions: Ids, handles: Ids, lag: ArrayLike = 1) -> None:
        """Make each instruction wait for the handle at the same index of an earlier repetition of the body.

        ``lag``: how many repetitions earlier, one number for all or one per instruction.
        """
        self._late.append((instructions, handles, np.broadcast_to(np.asarray(lag, np.int64), instructions.shape)))

    def join_each(self, instructions: Ids, need: NDArray[np.integer]) -> None:
        """Make instruction i start when ``need[i]`` of its waits have happened; both of shape (n,)."""
        self._joins.update(zip(instructions.tolist(), need.tolist(), strict=True))

    def mark(self, instruction: int, bucket: int) -> int:
        """Make an instruction raise a mark when the gradients of ``bucket`` are ready; return the mark's handle.

        For copies of activations, ``bucket`` is -1 - the number of a layer (see `mark_index` in `spec.program`).
        """
        self._raising.append(instruction)
        self._ready.append(bucket)
        return -len(self._raising)

    def mark_each(self, instructions: Ids, buckets: Ids) -> Ids:
        """Make each instruction raise a mark when the bucket at the same index is ready; return the marks' handles."""
        first = len(self._raising)
        self._raising.frombytes(instructions.astype(np.int64).tobytes())
        self._ready.frombytes(buckets.astype(np.int64).tobytes())
        return -1 - np.arange(first, len(self._raising))

    def build(self, *, schedule: str, plan_hash: str) -> Program:
        """Return the program whose body has all appended instructions; its prologue and epilogue are empty.

        Raises ProgramError if an instruction needs more waits than it has.
        """
        self._flush()
        keys, stream_offsets, rows, position = sort_chunks(self._chunks)
        streams = tuple(
            Stream(rank=place // len(STREAM_NAMES), name=STREAM_NAMES[place % len(STREAM_NAMES)], lane=lane)
            for place, lane in (divmod(key, _MAX_LANES) for key in keys.tolist())
        )
        single = np.array(self._waiting, np.int64), np.array(self._awaited, np.int64)
        wait_offsets, waits = deal_waits(position, [*self._waits, single])
        body = Section(
            stream_offsets=stream_offsets,
            **rows._asdict(),
            wait_offsets=wait_offsets,
            waits=waits,
            mark_instruction=position[np.array(self._raising, np.int64)].astype(np.int64),
            mark_index=np.array(self._ready, np.int32),
            **self._join_columns(position, wait_offsets),
            **self._late_columns(position),
        )
        return Program(
            schedule=schedule,
            plan_hash=plan_hash,
            num_ranks=self._num_ranks,
            streams=streams,
            groups=tuple(self._groups),
            prologue=empty_section(len(streams)),
            body=body,
            epilogue=empty_section(len(streams)),
        )

    def _flush(self) -> None:
        """Close the chunk of instructions that were appended one by one."""
        if self._rows:
            keys, *columns = np.array(self._rows, np.int64).reshape(-1, 1 + len(InstructionRows._fields)).T
            begins = np.flatnonzero(np.diff(keys, prepend=-1))
            rows = make_rows(len(keys), **dict(zip(InstructionRows._fields, columns, strict=True)))
            self._chunks.append(Chunk(keys[begins], np.diff(begins, append=len(keys)), rows, None))
            self._rows = array("q")

    def _late_columns(self, position: NDArray[np.int32]) -> dict[str, Any]:
        none = np.zeros(0, np.int64)
        columns = zip(*self._late, strict=True) if self._late else ([], [], [])
        instructions, handles, lag = (np.concatenate([none, *column]) for column in columns)
        waiting, awaited = position[instructions], position[handles]
        return {
            "late_instruction": waiting.astype(np.int64),
            "late_section": np.ones(len(waiting), np.int8),
            "late_awaited": awaited.astype(np.int64),
            "late_lag": lag.astype(np.int32),
        }

    def _join_columns(self, position: NDArray[np.int32], wait_offsets: Ids) -> dict[str, Any]:
        handles = np.array(list(self._joins), np.int64)
        need = np.array(list(self._joins.values()), np.int64)
        joins = position[handles].astype(np.int64)
        num_waits = wait_offsets[joins + 1] - wait_offsets[joins]
        if (need > num_waits).any():
            first = int(np.argmax(need > num_waits))
            raise ProgramError(
                f"Instruction {handles[first]} needs {need[first]} of its waits, but has {num_waits[first]}. Give it "
                "more handles to wait for, or a smaller `need`."
            )
        order = np.argsort(joins)
        return {"join_instruction": joins[order], "join_need": need[order].astype(np.int32)}
