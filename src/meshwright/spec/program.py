"""Program: the instructions of every rank, as columns that both the simulator and the runtime read.

A program has named streams for each rank; the instructions of a stream run in order. An instruction waits for other
instructions, or for marks that they raise while they run ("the gradients of bucket k are ready"). Instruction ids
run stream by stream: stream s holds ids ``stream_offsets[s]:stream_offsets[s + 1]``. Columns, per instruction:

    opcode, stage, microbatch, version   kind of instruction (`Opcode`), stage, microbatch and weight version
    peer                                 the other stage (send, receive), the bucket (exchange), the piece (offload) or
                                         the layer (saved); -1 elsewhere
    group                                index into ``groups``: the ranks that take part; -1 for work of one rank
    num_bytes                            bytes that are transferred; 0 elsewhere
    wait_offsets, waits                  CSR: ids awaited; ``num_instructions + m`` stands for mark m
    mark_instruction, mark_index         ``mark_instruction[m]`` raises mark m when bucket ``mark_index[m]`` is ready
                                         or, -1 - layer, activations of a layer may be copied
    join_instruction, join_need          ``join_instruction[j]`` starts after ``join_need[j]`` of its waits, not all
    late_instruction, late_section,      ``late_instruction[l]`` waits for ``late_awaited[l]`` of another section,
    late_awaited, late_lag               ``late_lag[l]`` repetitions earlier (below)

The dataclasses of `spec.instructions` are views of the rows. `program.ProgramBuilder` writes the rows; modules that cut
or repeat a program (`program.endless_program`, `program.build`) copy them.

A program is ``prologue``, then ``body`` repeated, then ``epilogue``: a synchronous schedule has only a body. In an
asynchronous schedule, a microbatch may enter the pipeline in one repetition of the body and leave in another. The
columns number microbatches and versions as if the body ran once. In repetition r, and in the epilogue after r
repetitions, r·``advance`` is added to microbatches, and r·(updates of the stage in the body) to versions.

A *late wait* refers to an earlier repetition: when an asynchronous schedule sums waves of minibatches, or when the
gradient exchange of one step continues in the next (`program.gradient_exchange`). With n repetitions the sections have
the positions -1 (prologue), 0 ... n - 1 (body) and n (epilogue). A late wait in the section at position x waits for an
instruction of the section at position x - lag: of the prologue if ``late_section`` is 0, of the body if it is 1. If
that position has another section, or does not exist, the wait is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from meshwright.spec.errors import ProgramError
from meshwright.spec.instructions import RECEIVES, Instruction, Opcode, StreamName, instruction_of

if TYPE_CHECKING:
    from collections.abc import Iterator

# Ranks that may do nothing at all. More would let a small file request tables of any length.
MAX_IDLE_RANKS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One queue of instructions of a rank, which run in order.

    ``lane`` distinguishes several streams of one name, such as those to different parameter servers.
    """

    rank: int
    name: StreamName
    lane: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Section:
    """One section of a program: prologue, body or epilogue. The module's docstring describes the columns."""

    stream_offsets: NDArray[np.int64]
    opcode: NDArray[np.int8]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    version: NDArray[np.int32]
    peer: NDArray[np.int32]
    group: NDArray[np.int32]
    num_bytes: NDArray[np.int64]
    wait_offsets: NDArray[np.int64]
    waits: NDArray[np.int64]
    mark_instruction: NDArray[np.int64]
    mark_index: NDArray[np.int32]
    join_instruction: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    join_need: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    late_instruction: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    late_section: NDArray[np.int8] = field(default_factory=lambda: np.zeros(0, np.int8))
    late_awaited: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    late_lag: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Section) and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def num_instructions(self) -> int:
        """Number of instructions in this section."""
        return len(self.opcode)

    def instruction(self, index: int) -> Instruction:
        """Return the instruction with the id ``index`` as a dataclass of `spec.instructions`."""
        columns = self.opcode, self.stage, self.microbatch, self.version, self.peer, self.num_bytes
        return instruction_of([int(column[index]) for column in columns])

    def waits_of(self, index: int) -> NDArray[np.int64]:
        """Return the ids for which instruction ``index`` waits; ids from ``num_instructions`` on are marks."""
        return self.waits[self.wait_offsets[index] : self.wait_offsets[index + 1]]

    def stream_range(self, stream: int) -> range:
        """Return the range of instruction ids of stream number ``stream``."""
        return range(int(self.stream_offsets[stream]), int(self.stream_offsets[stream + 1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The instructions of all ranks: ``prologue``, then ``body`` any number of times, then ``epilogue``.

    ``streams`` are ordered by rank. ``groups`` lists the ranks of process groups, to which the column ``group`` refers.
    ``schedule`` and ``plan_hash`` record the origin of the program. ``advance`` is the number of microbatches by which
    each repetition of the body is ahead of the previous one; 0 for synchronous programs. ``body_steps`` is the number
    of training steps in one repetition of the body. Raises ProgramError if the columns contradict each other.
    """

    schedule: str
    plan_hash: str
    num_ranks: int
    streams: tuple[Stream, ...]
    groups: tuple[tuple[int, ...], ...]
    prologue: Section
    body: Section
    epilogue: Section
    advance: int = 0
    body_steps: int = 1

    SCHEMA_VERSION: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_ranks <= len(self.streams) + MAX_IDLE_RANKS:
            raise ProgramError(
                f"The program is for {self.num_ranks} ranks, but has {len(self.streams)} streams. "
                "Build the program again from its plan."
            )
        ranks = [stream.rank for stream in self.streams] + [rank for group in self.groups for rank in group]
        if ranks and not (min(ranks) >= 0 and max(ranks) < self.num_ranks):
            raise ProgramError(
                f"The program names ranks {min(ranks)} to {max(ranks)}, but it is for {self.num_ranks} ranks "
                "(0 and up). Build the program again from its plan."
            )
        if self.body_steps < 1:
            raise ProgramError(
                f"The program's body_steps is {self.body_steps}; expected 1 or more training steps per repetition."
            )
        if self.advance < 0:
            raise ProgramError(f"The program's advance is {self.advance} microbatches; expected 0 or more.")
        for name, section in self.sections():
            _check_section(name, section, len(self.streams), len(self.groups))
        for name, section in self.sections():
            _check_late_waits(self, name, section)

    __hash__ = None  # type: ignore[assignment]

    @property
    def crosses_steps(self) -> bool:
        """Whether a repetition of the body exchanges messages with other repetitions, or has late waits for them."""
        return self.advance > 0 or any(len(section.late_instruction) for _, section in self.sections())

    @property
    def splits_backwards(self) -> bool:
        """Whether some backwards are split into `BackwardInput` and `BackwardWeight`."""
        return any(bool((section.opcode == Opcode.BACKWARD_INPUT).any()) for _, section in self.sections())

    def sections(self) -> Iterator[tuple[str, Section]]:
        """Yield (name, section) for prologue, body and epilogue, in order of execution."""
        yield "prologue", self.prologue
        yield "body", self.body
        yield "epilogue", self.epilogue

    def streams_of(self, rank: int) -> tuple[int, ...]:
        """Return the indices of the streams of one rank."""
        return tuple(index for index, stream in enumerate(self.streams) if stream.rank == rank)


def empty_section(num_streams: int) -> Section:
    """Return a section without instructions for a program with ``num_streams`` streams."""
    return Section(
        stream_offsets=np.zeros(num_streams + 1, np.int64),
        opcode=np.zeros(0, np.int8),
        stage=np.zeros(0, np.int32),
        microbatch=np.zeros(0, np.int32),
        version=np.zeros(0, np.int32),
        peer=np.zeros(0, np.int32),
        group=np.zeros(0, np.int32),
        num_bytes=np.zeros(0, np.int64),
        wait_offsets=np.zeros(1, np.int64),
        waits=np.zeros(0, np.int64),
        mark_instruction=np.zeros(0, np.int64),
        mark_index=np.zeros(0, np.int32),
    )


def _check_section(name: str, section: Section, num_streams: int, num_groups: int) -> None:
    count = section.num_instructions
    num_marks = len(section.mark_instruction)

    def require(condition: bool, what: str) -> None:
        if not condition:
            raise ProgramError(f"The program's {name} is damaged: {what}. Build the program again from its plan.")

    for column in ("stage", "microbatch", "version", "peer", "group", "num_bytes"):
        require(len(getattr(section, column)) == count, f"column {column} does not have {count} rows")
    for column, rows, total in (("stream_offsets", num_streams, count), ("wait_offsets", count, len(section.waits))):
        offsets = getattr(section, column)
        legal = (
            len(offsets) == rows + 1
            and offsets[0] == 0
            and offsets[-1] == total
            and bool((offsets[1:] >= offsets[:-1]).all())
        )
        require(legal, f"column {column} does not divide {total} entries into consecutive ranges")
    require(len(section.mark_index) == num_marks, "the mark columns differ in length")
    require(len(section.join_need) == len(section.join_instruction), "the join columns differ in length")
    for column, low, high in (
        ("opcode", 0, len(Opcode)),
        ("group", -1, num_groups),
        ("waits", 0, count + num_marks),
        ("mark_instruction", 0, count),
        ("join_instruction", 0, count),
        ("num_bytes", 0, np.iinfo(np.int64).max),
    ):
        values = getattr(section, column)
        require(
            not len(values) or (values.min() >= low and values.max() < high),
            f"column {column} has values outside {low}..{high - 1}",
        )
    joins = section.join_instruction
    require(bool((np.diff(joins) > 0).all()), "column join_instruction does not ascend")
    num_waits = section.wait_offsets[joins + 1] - section.wait_offsets[joins]
    legal = (section.join_need >= 1) & (section.join_need <= num_waits)
    require(bool(legal.all()), "column join_need is below 1 or above the number of waits of an instruction")
    late = section.late_instruction
    same = {len(getattr(section, f"late_{column}")) for column in ("section", "awaited", "lag")} == {len(late)}
    require(same, "the columns of late waits differ in length")
    receives = np.isin(section.opcode[joins], RECEIVES)
    require(not receives.any(), "column join_instruction names a receive, which always waits for its send")


def _check_late_waits(program: Program, name: str, section: Section) -> None:
    late = section.late_instruction
    if not len(late):
        return
    counts = np.array([program.prologue.num_instructions, program.body.num_instructions])
    legal = (
        bool(((late >= 0) & (late < section.num_instructions)).all())
        and bool(np.isin(section.late_section, (0, 1)).all())
        and bool(((section.late_awaited >= 0) & (section.late_awaited < counts[section.late_section])).all())
        and bool((section.late_lag >= 1).all())
    )
    if not legal:
        raise ProgramError(
            f"The program's {name} is damaged: its late waits do not name instructions of the prologue or the body, 1 "
            "or more repetitions earlier. Build the program again from its plan."
        )
