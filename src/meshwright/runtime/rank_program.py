"""The instructions of one rank, arranged for a single issuing thread.

The compute stream determines the order. Everything else is asynchronous, and the moment of issue is known beforehand: a
transfer or collective follows the last of its own rank's computations that it waits for (or a mark inside it), and its
predecessor in its stream. Waits for other ranks are satisfied by the communication itself. Instructions in the host's
streams run in threads of their own, each when its waits have happened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from meshwright.spec import AllReduce, Instruction, Program, ProgramError, ReduceScatter, Section
from meshwright.spec.instructions import StreamName

SectionName = Literal["prologue", "body", "epilogue"]

_BEFORE_ALL = -1
# The names of the sections that late waits refer to.
_LATE_SECTIONS: tuple[SectionName, ...] = ("prologue", "body")
# Streams of the host in parallel with the computations.
_HOST_STREAMS: tuple[StreamName, ...] = ("down", "host", "up", "drives")


class MarkKey(NamedTuple):
    """A mark that a computation raises when a bucket, or a piece, is ready."""

    instruction: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostItem:
    """An instruction of the host, in a stream called ``name``.

    ``awaits`` are instructions of its rank in any stream; it may also wait for ``marks`` inside computations.
    """

    index: int
    stream: int
    name: StreamName
    instruction: Instruction
    awaits: tuple[int, ...]
    marks: tuple[MarkKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedInstruction:
    """An asynchronous instruction: its id in the program, its row, and the ranks that take part.

    ``awaits``: asynchronous instructions that must be done first. ``behind``: those in an earlier lane, after which it
    starts without blocking.
    """

    index: int
    stream: int
    instruction: Instruction
    group: tuple[int, ...]
    awaits: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LateWait:
    """A wait for ``index`` of another section, ``lag`` sections earlier; skipped unless that section is ``section``."""

    section: SectionName
    index: int
    lag: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """An instruction of the compute stream: first wait for ``awaits`` and ``late``, run, then issue ``then``.

    ``marked`` are issued while it runs, one after the other, each as soon as its bucket is ready.
    """

    index: int
    stream: int
    instruction: Instruction
    awaits: tuple[int, ...]
    then: tuple[IssuedInstruction, ...]
    marked: tuple[IssuedInstruction, ...]
    late: tuple[LateWait, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """The instructions of one rank in one run of a section: ``first`` at once, then the computations in order.

    ``beside`` are those of its host.
    """

    rank: int
    first: tuple[IssuedInstruction, ...]
    computations: tuple[Computed, ...]
    beside: tuple[HostItem, ...] = ()


def arrange_rank(program: Program, section: Section, rank: int) -> RankProgram:
    """Arrange the instructions of ``rank``. Raises ProgramError for joins, and for direct waits for another rank."""
    if len(section.join_instruction):
        first = section.instruction(int(section.join_instruction[0]))
        raise ProgramError(
            f"{first} continues when {section.join_need[0]} of its waits have happened. Such joins can be simulated; a "
            "run needs a program in which every instruction waits for all."
        )
    streams = program.streams_of(rank)
    compute = [stream for stream in streams if program.streams[stream].name == "compute"]
    order = {index: place for stream in compute for place, index in enumerate(section.stream_range(stream))}
    then: dict[int, list[IssuedInstruction]] = {place: [] for place in (_BEFORE_ALL, *order.values())}
    marked: dict[int, list[IssuedInstruction]] = {place: [] for place in order.values()}
    late = _late_waits(section)
    asynchronous: set[int] = set()
    beside: list[HostItem] = []
    for stream in streams:
        asynchronous.update(section.stream_range(stream) if stream not in compute else ())
        if program.streams[stream].name in _HOST_STREAMS:
            beside += _beside(program, section, stream)
    beginning: dict[int, tuple[int, bool]] = {}
    lanes = {index: stream for stream in streams for index in section.stream_range(stream)}
    for index in _in_turn(program, section, streams):
        stream = lanes[index]
        trigger, inside = _trigger(section, order, index, *beginning.get(stream, (_BEFORE_ALL, False)))
        beginning[stream] = trigger, inside
        (marked if inside else then)[trigger].append(_issued(program, section, index, lanes))
    return RankProgram(
        rank=rank,
        first=tuple(then[_BEFORE_ALL]),
        computations=tuple(
            Computed(
                index=index,
                stream=compute[0],
                instruction=section.instruction(index),
                awaits=_awaits(section, order, asynchronous, index, place),
                then=tuple(then[place]),
                marked=tuple(marked[place]),
                late=late.get(index, ()),
            )
            for index, place in order.items()
        ),
        beside=tuple(beside),
    )


def _beside(program: Program, section: Section, stream: int) -> list[HostItem]:
    """The instructions of one stream of the host, in order."""
    count, found = section.num_instructions, []
    for index in section.stream_range(stream):
        waits = section.waits_of(index).tolist()
        marks = [wait - count for wait in waits if wait >= count]
        found.append(
            HostItem(
                index=index,
                stream=stream,
                name=program.streams[stream].name,
                instruction=section.instruction(index),
                awaits=tuple(wait for wait in waits if wait < count),
                marks=tuple(
                    MarkKey(int(section.mark_instruction[mark]), int(section.mark_index[mark])) for mark in marks
                ),
            )
        )
    return found


def _trigger(section: Section, order: dict[int, int], index: int, trigger: int, inside: bool) -> tuple[int, bool]:
    """The computation after which (or inside which) an instruction may be issued, not before its predecessor's."""
    count = section.num_instructions
    for wait in section.waits_of(index).tolist():
        awaited = wait if wait < count else int(section.mark_instruction[wait - count])
        place = order.get(awaited)
        if place is None:
            continue
        is_mark = wait >= count
        if place > trigger or (place == trigger and inside and not is_mark):
            trigger, inside = place, is_mark
    return trigger, inside


def _awaits(section: Section, order: dict[int, int], asynchronous: set[int], index: int, place: int) -> tuple[int, ...]:
    waits = []
    for wait in section.waits_of(index).tolist():
        if wait in asynchronous:
            waits.append(wait)
        elif order.get(wait, place) >= place:
            raise ProgramError(
                f"Instruction {index} ({section.instruction(index)}) waits for instruction {wait}, which its rank has "
                "not issued before it; a computation can wait only for earlier computations and for the communication "
                "of its own rank."
            )
    return tuple(waits)


def _late_waits(section: Section) -> dict[int, tuple[LateWait, ...]]:
    found: dict[int, list[LateWait]] = {}
    for waiting, name, awaited, lag in zip(
        section.late_instruction.tolist(),
        section.late_section.tolist(),
        section.late_awaited.tolist(),
        section.late_lag.tolist(),
        strict=True,
    ):
        found.setdefault(waiting, []).append(LateWait(section=_LATE_SECTIONS[name], index=awaited, lag=lag))
    return {waiting: tuple(waits) for waiting, waits in found.items()}


def _in_turn(program: Program, section: Section, streams: Sequence[int]) -> Iterator[int]:
    """Issued instructions, stream by stream; those in further lanes of the exchange directly follow what they await."""
    lanes = [stream for stream in streams if program.streams[stream].name == "exchange"]
    for stream in streams:
        if stream in lanes[:1]:
            yield from _merge(section, [deque(section.stream_range(lane)) for lane in lanes])
        elif stream not in lanes and program.streams[stream].name not in ("compute", *_HOST_STREAMS):
            yield from section.stream_range(stream)


def _merge(section: Section, lanes: Sequence[deque[int]]) -> Iterator[int]:
    """Merge lanes into one order in which every instruction follows its waits; later lanes as early as possible."""
    left = {index for lane in lanes for index in lane}
    while left:
        for lane in reversed(lanes):
            if lane and left.isdisjoint(wait for wait in section.waits_of(lane[0]).tolist() if wait != lane[0]):
                left.remove(lane[0])
                yield lane.popleft()
                break
        else:
            raise ProgramError(f"Instructions {sorted(left)[:8]} wait for each other in the lanes of their rank.")


def bucket_of(instruction: Instruction) -> int:
    """Return the bucket, or the part of one, at whose mark an instruction is issued."""
    assert isinstance(instruction, AllReduce | ReduceScatter), "marks are of buckets"
    return instruction.bucket


def _issued(program: Program, section: Section, index: int, stream_of: Mapping[int, int]) -> IssuedInstruction:
    group, stream = int(section.group[index]), stream_of[index]
    lane, is_exchange = program.streams[stream].lane, program.streams[stream].name == "exchange"
    awaits, behind = [], []
    for wait in section.waits_of(index).tolist():
        other = program.streams[stream_of[wait]] if wait in stream_of else None
        if other is None or other.name != program.streams[stream].name:
            continue
        if other.lane < lane and is_exchange:
            behind.append(wait)
        elif stream_of[wait] == stream or is_exchange:
            awaits.append(wait)
    return IssuedInstruction(
        index=index,
        stream=stream,
        instruction=section.instruction(index),
        group=program.groups[group] if group >= 0 else (),
        awaits=tuple(awaits),
        behind=tuple(behind),
    )


def issue_order(rank_program: RankProgram) -> np.ndarray:
    """Instruction ids in the order of issue, marked ones directly after the computation that raises their marks."""
    order = [item.index for item in rank_program.first]
    for item in rank_program.computations:
        order += [item.index, *(other.index for other in item.marked), *(other.index for other in item.then)]
    return np.array(order, np.int64)
