"""The one writer of programs: instructions are appended in any order, stream by stream order is made at the end."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from meshwright.spec.errors import ProgramError
from meshwright.spec.program import (
    STREAM_NAMES,
    AllReduce,
    Backward,
    Forward,
    Instruction,
    Opcode,
    OptimizerStep,
    Program,
    Receive,
    Section,
    Send,
    Stream,
    StreamName,
    empty_section,
)

_PLACES = {name: place for place, name in enumerate(STREAM_NAMES)}
# Stream, the columns of `_row`, group: packed, a row is stored in half the time of eight numbers.
_ROW = struct.Struct("8q")


class ProgramBuilder:
    """Collects the instructions of a program's body.

    `append` and `mark` return handles to wait for: instructions count up from 0, marks count down from -1.
    Instructions of one
    stream run in the order in which they were appended; a handle may be awaited before the stream's order is final.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        # Flat arrays of integers, not objects per instruction: programs have many.
        self._rows = array("q")
        self._num_instructions = 0
        self._waiting = array("q")
        self._awaited = array("q")
        self._marks: list[tuple[int, int]] = []
        self._groups: dict[tuple[int, ...], int] = {}

    def append(
        self,
        rank: int,
        stream: StreamName,
        instruction: Instruction,
        *,
        group: tuple[int, ...] = (),
        waits: Iterable[int] = (),
    ) -> int:
        """Append one instruction to a stream of a rank; ``group`` names the ranks that take part in communication."""
        if not 0 <= rank < self._num_ranks:
            raise ProgramError(
                f"{instruction} was given to rank {rank}; the program has ranks 0 to {self._num_ranks - 1}."
            )
        number = self._groups.setdefault(group, len(self._groups)) if group else -1
        try:
            key = rank * len(STREAM_NAMES) + _PLACES[stream]
            self._rows.frombytes(_ROW.pack(key, *_row(instruction), number))
        except struct.error:
            raise ProgramError(
                f"{instruction} moves more bytes than 64 bits can count. Plan with a smaller batch."
            ) from None
        handle = self._num_instructions
        self._num_instructions += 1
        for awaited in waits:
            self._waiting.append(handle)
            self._awaited.append(awaited)
        return handle

    def wait(self, instruction: int, handle: int) -> None:
        """Let an appended instruction wait for one more handle."""
        self._waiting.append(instruction)
        self._awaited.append(handle)

    def mark(self, instruction: int, bucket: int) -> int:
        """Let an instruction raise a mark when ``bucket`` is ready; returns the handle of the mark."""
        self._marks.append((instruction, bucket))
        return -len(self._marks)

    def build(self, *, schedule: str, plan_hash: str) -> Program:
        """The program whose body is what was appended."""
        rows = np.array(self._rows, np.int64).reshape(-1, 8)
        order = np.argsort(rows[:, 0], kind="stable")
        position = np.empty(len(order), np.int64)
        position[order] = np.arange(len(order))
        used = np.unique(rows[:, 0])
        streams = tuple(
            Stream(rank=int(key) // len(STREAM_NAMES), name=STREAM_NAMES[int(key) % len(STREAM_NAMES)]) for key in used
        )
        rows = rows[order]
        body = Section(
            stream_offsets=np.append(np.searchsorted(rows[:, 0], used), len(rows)).astype(np.int64),
            opcode=rows[:, 1].astype(np.int8),
            stage=rows[:, 2].astype(np.int32),
            microbatch=rows[:, 3].astype(np.int32),
            version=rows[:, 4].astype(np.int32),
            peer=rows[:, 5].astype(np.int32),
            num_bytes=rows[:, 6].copy(),
            group=rows[:, 7].astype(np.int32),
            **self._wait_columns(position),
            mark_instruction=np.array([position[instruction] for instruction, _ in self._marks], np.int64),
            mark_index=np.array([bucket for _, bucket in self._marks], np.int32),
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

    def _wait_columns(self, position: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        count = self._num_instructions
        waiting = position[np.array(self._waiting, np.int64)]
        handles = np.array(self._awaited, np.int64)
        awaited = np.where(handles >= 0, position[np.maximum(handles, 0)], count - 1 - handles)
        offsets = np.append(0, np.cumsum(np.bincount(waiting, minlength=count)))
        return {"wait_offsets": offsets.astype(np.int64), "waits": awaited[np.argsort(waiting, kind="stable")]}


def _row(instruction: Instruction) -> tuple[int, int, int, int, int, int]:
    """Opcode, stage, microbatch, version, peer, num_bytes."""
    match instruction:
        case Forward():
            return (Opcode.FORWARD, instruction.stage, instruction.microbatch, instruction.version, -1, 0)
        case Backward():
            return (Opcode.BACKWARD, instruction.stage, instruction.microbatch, instruction.version, -1, 0)
        case Send():
            opcode = Opcode.SEND_ACTIVATION if instruction.payload == "activation" else Opcode.SEND_GRADIENT
            return (opcode, instruction.stage, instruction.microbatch, -1, instruction.peer, instruction.num_bytes)
        case Receive():
            opcode = Opcode.RECEIVE_ACTIVATION if instruction.payload == "activation" else Opcode.RECEIVE_GRADIENT
            return (opcode, instruction.stage, instruction.microbatch, -1, instruction.peer, instruction.num_bytes)
        case AllReduce():
            return (Opcode.ALL_REDUCE, instruction.stage, -1, -1, instruction.bucket, instruction.num_bytes)
        case OptimizerStep():
            return (Opcode.OPTIMIZER_STEP, instruction.stage, -1, instruction.version, -1, 0)
        case _:
            assert_never(instruction)
