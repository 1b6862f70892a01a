"""Programs and timelines: rows of columns, names of spans, sums over spans, and damage that is noticed."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given

from meshwright.spec import (
    AllGather,
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    DocumentError,
    Drop,
    Forward,
    Load,
    Merge,
    Opcode,
    OptimizerStep,
    Program,
    ProgramError,
    Pull,
    Push,
    Receive,
    ReduceScatter,
    Send,
    Stash,
    Stream,
    Sum,
    empty_section,
    encode_document,
    instruction_name,
    read_document,
    write_document,
)
from meshwright.spec.offload_instructions import (
    CopyDown,
    CopyUp,
    HostStep,
    ReadStates,
    SavedDown,
    SavedUp,
    WriteStates,
)
from tests.spec.examples import PROGRAM, TIMELINE
from tests.strategies import programs, timelines

ROWS = {
    Opcode.FORWARD: (Forward(stage=1, microbatch=2, version=3), "F1.2"),
    Opcode.BACKWARD: (Backward(stage=1, microbatch=2, version=3), "B1.2"),
    Opcode.SEND_ACTIVATION: (Send(stage=1, microbatch=2, peer=4, payload="activation", num_bytes=5), "send 1→4.2"),
    Opcode.RECEIVE_ACTIVATION: (
        Receive(stage=1, microbatch=2, peer=4, payload="activation", num_bytes=5),
        "receive 4→1.2",
    ),
    Opcode.SEND_GRADIENT: (Send(stage=1, microbatch=2, peer=4, payload="gradient", num_bytes=5), "send gradient 1→4.2"),
    Opcode.RECEIVE_GRADIENT: (
        Receive(stage=1, microbatch=2, peer=4, payload="gradient", num_bytes=5),
        "receive gradient 4→1.2",
    ),
    Opcode.ALL_REDUCE: (AllReduce(stage=1, bucket=4, num_bytes=5), "all-reduce 1 #4"),
    Opcode.OPTIMIZER_STEP: (OptimizerStep(stage=1, version=3), "optimizer 1"),
    Opcode.BACKWARD_INPUT: (BackwardInput(stage=1, microbatch=2, version=3), "I1.2"),
    Opcode.BACKWARD_WEIGHT: (BackwardWeight(stage=1, microbatch=2, version=3), "W1.2"),
    Opcode.STASH: (Stash(stage=1, version=3), "stash 1"),
    Opcode.DROP: (Drop(stage=1, version=3), "drop 1"),
    Opcode.MERGE: (Merge(stage=1, version=3), "merge 1"),
    Opcode.REDUCE_SCATTER: (ReduceScatter(stage=1, bucket=4, num_bytes=5), "reduce-scatter 1 #4"),
    Opcode.LOAD: (Load(stage=1, microbatch=2), "load 2"),
    Opcode.PUSH: (Push(stage=1, bucket=4, num_bytes=5), "push 1 #4"),
    Opcode.SUM: (Sum(stage=1, bucket=4, num_bytes=5), "sum 1 #4"),
    Opcode.PULL: (Pull(stage=1, bucket=4, num_bytes=5), "pull 1 #4"),
    Opcode.ALL_GATHER: (AllGather(stage=1, bucket=4, num_bytes=5), "all-gather 1 #4"),
    Opcode.COPY_DOWN: (CopyDown(stage=1, piece=4, num_bytes=5), "copy down 1 #4"),
    Opcode.HOST_STEP: (HostStep(stage=1, piece=4, num_bytes=5), "host step 1 #4"),
    Opcode.COPY_UP: (CopyUp(stage=1, piece=4, num_bytes=5), "copy up 1 #4"),
    Opcode.READ_STATES: (ReadStates(stage=1, piece=4, num_bytes=5), "read 1 #4"),
    Opcode.WRITE_STATES: (WriteStates(stage=1, piece=4, num_bytes=5), "write 1 #4"),
    Opcode.SAVED_DOWN: (SavedDown(stage=1, microbatch=2, layer=4, num_bytes=5), "saved down 1.2 #4"),
    Opcode.SAVED_UP: (SavedUp(stage=1, microbatch=2, layer=4, num_bytes=5), "saved up 1.2 #4"),
}


@pytest.mark.parametrize("opcode", list(Opcode))
def test_a_row_is_its_instruction(opcode):
    section = replace(
        empty_section(1),
        stream_offsets=np.array([0, 1]),
        opcode=np.array([opcode], np.int8),
        stage=np.array([1], np.int32),
        microbatch=np.array([2], np.int32),
        version=np.array([3], np.int32),
        peer=np.array([4], np.int32),
        group=np.array([-1], np.int32),
        num_bytes=np.array([5]),
        wait_offsets=np.array([0, 0]),
    )
    instruction, name = ROWS[opcode]
    assert section.instruction(0) == instruction
    assert instruction_name(int(opcode), 1, 2, 4) == name


@given(programs())
def test_streams_and_waits_part_the_columns(program):
    for _, section in program.sections():
        ids = [i for stream in range(len(program.streams)) for i in section.stream_range(stream)]
        assert ids == list(range(section.num_instructions))
        waits = [int(w) for i in range(section.num_instructions) for w in section.waits_of(i)]
        assert waits == section.waits.tolist()
    owners = sorted(index for rank in range(program.num_ranks) for index in program.streams_of(rank))
    assert owners == list(range(len(program.streams)))


@given(programs())
def test_programs_compare_by_their_columns(program):
    copied = replace(program, body=replace(program.body, stage=program.body.stage.copy()))
    assert copied == program
    if program.body.num_instructions:
        assert replace(program, body=replace(program.body, stage=program.body.stage + 1)) != program


BODY = PROGRAM.body
DAMAGED = {
    "opcode": np.array([0, 1, len(Opcode)], np.int8),
    "group": np.array([-1, -1, 1], np.int32),
    "waits": np.array([0, 4]),
    "mark_instruction": np.array([3]),
    "num_bytes": np.array([0, -1, 0]),
    "stream_offsets": np.array([0, 2, 2]),
    "wait_offsets": np.array([0, 2, 1, 2]),
    "stage": np.array([0, 0], np.int32),
    "microbatch": np.array([0], np.int32),
    "version": np.array([], np.int32),
    "peer": np.array([0, 0, 0, 0], np.int32),
    "mark_index": np.array([0, 1], np.int32),
    "join_instruction": np.array([1]),
    "join_need": np.array([1], np.int32),
    "late_instruction": np.array([0]),
    "late_section": np.array([1], np.int8),
    "late_awaited": np.array([0]),
    "late_lag": np.array([1], np.int32),
}


def test_every_column_is_checked():
    assert set(DAMAGED) == {field.name for field in fields(BODY)}


@pytest.mark.parametrize("column", sorted(DAMAGED))
@pytest.mark.parametrize("part", ["prologue", "body", "epilogue"])
def test_damaged_columns_are_noticed(column, part):
    with pytest.raises(ProgramError, match=f"program's {part} is damaged"):
        replace(PROGRAM, **{part: replace(BODY, **{column: DAMAGED[column]})})


LATE = {
    "late_instruction": np.array([2]),
    "late_section": np.array([1], np.int8),
    "late_awaited": np.array([0]),
    "late_lag": np.array([1], np.int32),
}


def test_late_waits_and_messages_join_steps():
    body = replace(BODY, **LATE)
    assert [replace(PROGRAM, body=body, advance=advance).crosses_steps for advance in (0, 1)] == [True, True]
    assert [replace(PROGRAM, advance=advance).crosses_steps for advance in (0, 1)] == [False, True]


@pytest.mark.parametrize(
    ("column", "value"),
    [("late_instruction", 3), ("late_section", 2), ("late_section", -1), ("late_awaited", 3), ("late_lag", 0)],
)
def test_damaged_late_waits_are_noticed(column, value):
    late = {**LATE, column: np.array([value], LATE[column].dtype)}
    with pytest.raises(ProgramError, match="body is damaged: its late waits do not name"):
        replace(PROGRAM, body=replace(BODY, **late), advance=1)


JOINED = replace(BODY, wait_offsets=np.array([0, 0, 2, 3]), waits=np.array([0, 0, 3]))


@pytest.mark.parametrize(
    ("joins", "need", "message"),
    [
        ([2, 1], [1, 1], "does not ascend"),
        ([1, 1], [1, 1], "does not ascend"),
        ([1], [3], "is below 1 or above the number of waits"),
        ([1], [0], "is below 1 or above the number of waits"),
        ([0], [1], "is below 1 or above the number of waits"),
        ([3], [1], "has values outside 0..2"),
    ],
)
def test_damaged_joins_are_noticed(joins, need, message):
    columns = {"join_instruction": np.array(joins), "join_need": np.array(need, np.int32)}
    with pytest.raises(ProgramError, match=message):
        replace(PROGRAM, body=replace(JOINED, **columns))


def test_a_receive_is_no_join():
    columns = {"join_instruction": np.array([1]), "join_need": np.array([1], np.int32)}
    receive = np.array([Opcode.FORWARD, Opcode.RECEIVE_ACTIVATION, Opcode.FORWARD], np.int8)
    with pytest.raises(ProgramError, match="join_instruction names a receive, which always waits for its send"):
        replace(PROGRAM, body=replace(JOINED, opcode=receive, **columns))


def test_programs_without_joins_are_written_as_before_there_were_any(tmp_path):
    assert "join_need" not in encode_document(PROGRAM)["body"]
    columns = {"join_instruction": np.array([1]), "join_need": np.array([2], np.int32)}
    joined = replace(PROGRAM, body=replace(JOINED, **columns))
    assert read_document(Program, write_document(joined, tmp_path / "program.json")) == joined


@pytest.mark.parametrize(
    "changes",
    [
        {"streams": (*PROGRAM.streams[:1], Stream(rank=2, name="send"))},
        {"streams": (*PROGRAM.streams[:1], Stream(rank=-1, name="send"))},
        {"groups": ((0, 2),)},
        {"num_ranks": 1},
    ],
)
def test_ranks_out_of_range_are_noticed(changes):
    with pytest.raises(ProgramError, match="Build the program again"):
        replace(PROGRAM, **changes)


# --- timelines ---


@given(timelines())
def test_sums_over_spans(timeline):
    seconds = (timeline.end_ps - timeline.start_ps) / 1e12
    busy = [0.0] * timeline.num_ranks
    for i in range(timeline.num_spans):
        stream = timeline.tracks[timeline.track[i]]
        busy[stream.rank] += seconds[i] if stream.name == "compute" else 0.0
    assert timeline.busy_seconds() == pytest.approx(busy)
    end = max(timeline.end_ps.tolist(), default=0) / 1e12
    assert timeline.duration_s == pytest.approx(end)
    # Spans of a rank may lie on each other.
    expected = max(1 - sum(busy) / (end * timeline.num_ranks), 0.0) if end else 0.0
    assert timeline.bubble_fraction() == pytest.approx(expected, abs=1e-9)


def test_the_seconds_of_each_step():
    assert TIMELINE.step_seconds() == pytest.approx([15e-12, 25e-12])
    assert TIMELINE.until(1).step_seconds() == pytest.approx([15e-12])
    assert TIMELINE.until(0).num_spans == 0
    assert TIMELINE.busy_seconds() == pytest.approx([30e-12, 0])
    assert TIMELINE.bubble_fraction() == pytest.approx(1 - 30 / 80)
    assert [TIMELINE.name(i) for i in range(3)] == ["F0.0", "send 0→1.0", "B0.0"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"track": np.array([0, 1], np.int32)}, "differ in length"),
        ({"memory_bytes": np.array([1])}, "differ in length"),
        ({"track": np.array([0, 2, 0], np.int32)}, "column track has values outside 0..1"),
        ({"opcode": np.array([0, len(Opcode), 0], np.int8)}, f"column opcode has values outside 0..{len(Opcode) - 1}"),
        ({"step": np.array([0, -1, 0], np.int32)}, "column step"),
        ({"memory_rank": np.array([0, 2], np.int32)}, "column memory_rank has values outside 0..1"),
        ({"end_ps": np.array([10, 9, 40])}, "end before they start"),
        ({"num_ranks": 1}, "of 1 ranks, but has tracks of other ranks"),
    ],
)
def test_damaged_timelines_are_noticed(changes, message):
    with pytest.raises(DocumentError, match=message):
        replace(TIMELINE, **changes)


def test_a_small_file_cannot_ask_for_endless_ranks():
    with pytest.raises(ProgramError, match="2 streams"):
        replace(PROGRAM, num_ranks=10**9)
    with pytest.raises(DocumentError, match="2 tracks"):
        replace(TIMELINE, num_ranks=10**9)


def test_a_timeline_has_a_memory_peak_for_every_rank_or_for_none():
    assert replace(TIMELINE, peak_memory_bytes=()).num_ranks == 2
    with pytest.raises(DocumentError, match="1 memory peaks for 2 ranks"):
        replace(TIMELINE, peak_memory_bytes=(1,))
