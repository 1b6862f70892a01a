"""The instructions of one rank, arranged for a single issuing thread.

The compute stream determines the order of issue. All other instructions are asynchronous. A transfer or collective is
issued after its predecessor in its stream, and after the last computation of its own rank that it waits for (or at a
mark inside that computation). Waits for other ranks need no code, as the communication itself waits. Instructions in
the host's streams (offload) run in threads, each when its dependencies are done.
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
# The sections that late waits refer to, by their number.
_LATE_SECTIONS: tuple[SectionName, ...] = ("prologue", "body")
# Streams of the host in parallel with the computations.
_HOST_STREAMS: tuple[StreamName, ...] = ("down", "host", "up", "drives")


class MarkKey(NamedTuple):
    """A mark inside the computation ``instruction``: the bucket, or piece of offload, ``number`` is ready."""

    instruction: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostItem:
    """An instruction of the host (offload), in the stream number ``stream`` with this ``name``.

    ``awaits``: ids of the instructions of its rank, in any stream, that it waits for. ``marks``: marks inside
    computations that it waits for.
    """

    index: int
    stream: int
    name: StreamName
    instruction: Instruction
    awaits: tuple[int, ...]
    marks: tuple[MarkKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedInstruction:
    """An asynchronous transfer or collective: its id in the program, and the ranks that take part (``group``).

    ``awaits``: ids of asynchronous instructions that must be done before it is issued. ``behind``: ids of instructions
    in an earlier lane, after which it starts without blocking the issuing thread.
    """

    index: int
    stream: int
    instruction: Instruction
    group: tuple[int, ...]
    awaits: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LateWait:
    """A wait for an instruction of an earlier section.

    It applies only if the run of a section ``lag`` runs earlier was a run of ``section``; ``index`` is the id there.
    """

    section: SectionName
    index: int
    lag: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """An instruction of the compute stream: wait for ``awaits`` and ``late``, run it, then issue ``then``.

    ``marked`` are issued in order while it runs, each as soon as its bucket is full.
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
    """The instructions of one rank in one run of a section.

    ``first`` are issued at once, then the ``computations`` run in order. ``beside``: the instructions of its host.
    """

    rank: int
    first: tuple[IssuedInstruction, ...]
    computations: tuple[Computed, ...]
    beside: tuple[HostItem, ...] = ()


def arrange_rank(program: Program, section: Section, rank: int) -> RankProgram:
    """Return the instructions of ``rank`` in a section, in the order of issue.

    Raises ProgramError for joins, and for computations that wait for instructions not issued before them.
    """
    if len(section.join_instruction):
        first = section.instruction(int(section.join_instruction[0]))
        raise ProgramError(
            f"{first} is a join: it continues when {section.join_need[0]} of its waits have happened. Joins can only "
            "be simulated; in a program to run, every instruction has to wait for all of its waits."
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
                f"Instruction {index} ({section.instruction(index)}) waits for instruction {wait}, which its rank does "
                "not issue before it; a computation can wait only for earlier computations and for the communication "
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
            raise ProgramError(
                f"Instructions {sorted(left)[:8]} in the exchange lanes of one rank wait for each other. Build the "
                "program again."
            )


def bucket_of(instruction: Instruction) -> int:
    """Return the number of the bucket, or of the part of a bucket, at whose mark a sum is issued."""
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
    """Return instruction ids in the order of issue; those issued at a mark directly follow the computation with it."""
    order = [item.index for item in rank_program.first]
    for item in rank_program.computations:
        order += [item.index, *(other.index for other in item.marked), *(other.index for other in item.then)]
    return np.array(order, np.int64)
