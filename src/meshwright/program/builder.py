"""The one writer of programs: instructions come in any order, one by one or in bulk; `build` puts streams in order."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.cost.compiled import compiled
from meshwright.spec.errors import ProgramError
from meshwright.spec.instructions import Instruction, Receive, instruction_row
from meshwright.spec.program import STREAM_NAMES, Program, Section, Stream, StreamName, empty_section

Ids = NDArray[np.int64]

_PLACES = {name: place for place, name in enumerate(STREAM_NAMES)}
# Stream, the columns of `instruction_row`, group: packed, a row is stored in half the time of eight numbers.
_ROW = struct.Struct("8q")
_COLUMNS = ("key", "opcode", "stage", "microbatch", "version", "peer", "num_bytes", "group")
_TYPES = {"opcode": np.int8, "num_bytes": np.int64}


class ProgramBuilder:
    """Collects the instructions of a program's body.

    `append`, `extend` and `mark` return handles to wait for: instructions count up from 0, marks count down from -1.
    Instructions of one stream run in the order in which they came; a handle may be awaited before the stream's order is
    final.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        # Flat arrays of integers, not objects per instruction: programs have many.
        self._chunks: list[dict[str, NDArray[np.int64]]] = []
        self._rows = array("q")
        self._num_instructions = 0
        self._waits: list[tuple[Ids, Ids]] = []
        self._waiting = array("q")
        self._awaited = array("q")
        # Of each mark, the instruction that raises it and the bucket that is ready.
        self._raising, self._ready = array("q"), array("q")
        self._joins: dict[int, int] = {}
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
        """Append one instruction to a stream of a rank; ``group`` names the ranks that take part in communication.

        It goes on when ``need`` of its waits have happened, or all of them if that is not given.
        """
        if not 0 <= rank < self._num_ranks:
            raise ProgramError(
                f"{instruction} was given to rank {rank}; the program has ranks 0 to {self._num_ranks - 1}."
            )
        if need is not None and (need < 1 or isinstance(instruction, Receive)):
            raise ProgramError(
                f"{instruction} was to go on after {need} of its waits; expected 1 or more, and no receive, which "
                "waits for its send. Leave `need` out to wait for all."
            )
        number = self.group(group) if group else -1
        try:
            key = rank * len(STREAM_NAMES) + _PLACES[stream]
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

    def extend(self, ranks: NDArray[np.integer], stream: StreamName, **columns: ArrayLike) -> Ids:
        """Append many instructions of one kind of stream, in the order of the streams; returns their handles.

        ``columns`` are those of `Section`, without a microbatch, peer or group where that is -1: each of shape (n,), as
        ``ranks`` are, or one value for all.
        """
        self._flush()
        all_columns: dict[str, ArrayLike] = {"microbatch": -1, "version": 0, "peer": -1, "num_bytes": 0, "group": -1}
        all_columns |= columns
        key = ranks.astype(np.int64) * len(STREAM_NAMES) + _PLACES[stream]
        given: dict[str, Any] = {name: np.broadcast_to(value, key.shape) for name, value in all_columns.items()}
        self._chunks.append({"key": key, **given})
        first = self._num_instructions
        self._num_instructions += len(key)
        return np.arange(first, self._num_instructions)

    def group(self, ranks: tuple[int, ...]) -> int:
        """The number of a group of ranks in the program, for the column ``group``."""
        return self._groups.setdefault(ranks, len(self._groups))

    def wait(self, instruction: int, handle: int) -> None:
        """Let an appended instruction wait for one more handle."""
        self._waiting.append(instruction)
        self._awaited.append(handle)

    def wait_each(self, instructions: Ids, handles: Ids) -> None:
        """Let each of the instructions wait for the handle at its place."""
        self._waits.append((instructions, handles))

    def join_each(self, instructions: Ids, need: NDArray[np.integer]) -> None:
        """Let each of the instructions go on when so many of its waits have happened."""
        self._joins.update(zip(instructions.tolist(), need.tolist(), strict=True))

    def mark(self, instruction: int, bucket: int) -> int:
        """Let an instruction raise a mark when ``bucket`` is ready; returns the handle of the mark."""
        self._raising.append(instruction)
        self._ready.append(bucket)
        return -len(self._raising)

    def mark_each(self, instructions: Ids, buckets: Ids) -> Ids:
        """Let each of the instructions raise a mark when the bucket at its place is ready; the handles of the marks."""
        first = len(self._raising)
        self._raising.frombytes(instructions.astype(np.int64).tobytes())
        self._ready.frombytes(buckets.astype(np.int64).tobytes())
        return -1 - np.arange(first, len(self._raising))

    def build(self, *, schedule: str, plan_hash: str) -> Program:
        """The program whose body is what was appended."""
        self._flush()
        chunks = self._chunks or [{name: np.zeros(0, np.int64) for name in _COLUMNS}]
        keys = np.concatenate([chunk["key"] for chunk in chunks])
        # Few keys: sorting them as small integers takes time in proportion to their number.
        order = np.argsort(keys.astype(np.min_scalar_type(int(keys.max(initial=0)))), kind="stable")
        position = np.empty(len(order), np.int64)
        position[order] = np.arange(len(order))
        counts = np.bincount(keys, minlength=1)
        used = np.flatnonzero(counts)
        streams = tuple(
            Stream(rank=int(key) // len(STREAM_NAMES), name=STREAM_NAMES[int(key) % len(STREAM_NAMES)]) for key in used
        )
        columns: dict[str, Any] = {
            name: np.concatenate([chunk[name] for chunk in chunks]).astype(_TYPES.get(name, np.int32))[order]
            for name in _COLUMNS[1:]
        } | self._wait_columns(position)
        columns |= self._join_columns(position, columns["wait_offsets"])
        body = Section(
            stream_offsets=np.concatenate([[0], np.cumsum(counts[used])]).astype(np.int64),
            **columns,
            mark_instruction=position[np.array(self._raising, np.int64)],
            mark_index=np.array(self._ready, np.int32),
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
            rows = np.array(self._rows, np.int64).reshape(-1, len(_COLUMNS))
            self._chunks.append({name: rows[:, place] for place, name in enumerate(_COLUMNS)})
            self._rows = array("q")

    def _wait_columns(self, position: Ids) -> dict[str, Ids]:
        count = self._num_instructions
        single = (np.array(self._waiting, np.int64), np.array(self._awaited, np.int64))
        waiting, handles = (np.concatenate(parts) for parts in zip(*self._waits, single, strict=True))
        waiting = position[waiting]
        awaited = np.where(handles >= 0, position[np.maximum(handles, 0)], count - 1 - handles) if count else handles
        offsets = np.append(0, np.cumsum(np.bincount(waiting, minlength=count))).astype(np.int64)
        return {"wait_offsets": offsets, "waits": _deal_out(waiting, awaited, offsets[:-1].copy())}

    def _join_columns(self, position: Ids, wait_offsets: Ids) -> dict[str, Any]:
        handles = np.array(list(self._joins), np.int64)
        need = np.array(list(self._joins.values()), np.int64)
        joins = position[handles]
        num_waits = np.diff(wait_offsets)[joins]
        if (need > num_waits).any():
            first = int(np.argmax(need > num_waits))
            raise ProgramError(
                f"Instruction {handles[first]} needs {need[first]} of its waits, but has {num_waits[first]}. Give it "
                "more handles to wait for, or a smaller `need`."
            )
        order = np.argsort(joins)
        return {"join_instruction": joins[order], "join_need": need[order].astype(np.int32)}


@compiled
def _deal_out(waiting: Ids, awaited: Ids, place: Ids) -> Ids:
    """What each instruction waits for, in order of the instructions; ``place`` is where those of each begin."""
    dealt = np.empty(len(awaited), np.int64)
    for k in range(len(waiting)):
        dealt[place[waiting[k]]] = awaited[k]
        place[waiting[k]] += 1
    return dealt
