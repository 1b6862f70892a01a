"""Logs of decisions: what is written is what was decided, and damage is refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from meshwright.program import ProgramBuilder
from meshwright.program.decided import check_fit
from meshwright.spec import DocumentError, Forward, ProgramError, read_document, write_document
from meshwright.spec.control import Decision, Ended, Issue, Started
from meshwright.spec.decision_log import DecisionLog, make_log
from meshwright.spec.instructions import STREAM_NAMES
from tests.strategies import decision_logs


@given(drawn=decision_logs())
def test_a_log_says_what_was_decided(drawn):
    log, decisions = drawn
    assert [log.decision(k) for k in range(log.num_decisions)] == decisions


LOG = make_log(
    2,
    3,
    [
        (
            Started(next_handle=3),
            0,
            Decision(
                issues=(
                    Issue(rank=1, stream="compute", instruction=Forward(stage=0, microbatch=7), group=(0, 1)),
                    Issue(
                        rank=0,
                        stream="send",
                        instruction=Forward(stage=0, microbatch=8),
                        waits=(3, -1),
                        need=1,
                        watched=True,
                    ),
                ),
                watch=(2,),
            ),
        )
    ],
)


def test_a_log_is_a_document(tmp_path):
    path = write_document(LOG, tmp_path / "log.json")
    assert '"schema": "meshwright/decisionlog/1"' in path.read_text()
    assert read_document(DecisionLog, path) == LOG
    assert LOG.watched.tolist() == [2, 4]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"num_ranks": 1}, r"column rank has values outside 0\.\.0"),
        ({"num_ranks": 0}, "num_ranks is below 1"),
        ({"num_instructions": 2**63}, r"num_instructions is 2\^62 or more"),
        ({"event_kind": np.array([1], np.int8)}, "its first event is not the start"),
        ({"event_kind": np.array([7], np.int8)}, r"column event_kind has values outside 0\.\.2"),
        ({"event_number": np.zeros(2, np.int64)}, "the columns of events differ in length"),
        ({"now_ps": np.array([-1])}, "column now_ps does not ascend"),
        ({"issue_offsets": np.array([0, 1])}, "issue_offsets do not divide the issued instructions among decisions"),
        ({"timer_offsets": np.array([0, 1])}, "timer_offsets do not divide the timers among decisions"),
        ({"timer_number": np.array([1])}, "the columns of timers differ in length"),
        ({"watched": np.array([5])}, r"column watched has values outside 0\.\.4"),
        ({"watched": np.array([2, 2])}, "column watched does not ascend"),
        ({"stream": np.array([0, 99], np.int8)}, rf"column stream has values outside 0\.\.{len(STREAM_NAMES) - 1}"),
        ({"rank": np.array([0], np.int32)}, "rank and stream do not have 2 rows"),
        ({"groups": ((0, 5),)}, r"column groups has values outside 0\.\.1"),
        ({"groups": ((0, 2**63),)}, r"column groups has values outside 0\.\.1"),
        ({"groups": ((-1, 0),)}, r"column groups has values outside 0\.\.1"),
        ({"event_number": np.array([1])}, "column event_number does not begin with 0"),
        ({"event_number": np.array([-1])}, "column event_number has a negative entry"),
        ({"groups": ()}, r"column group has values outside -1\.\.-1"),
        ({"num_instructions": 1}, r"column watched has values outside|column waits has values outside"),
    ],
)
def test_a_damaged_log_is_refused(damage, message):
    with pytest.raises(DocumentError, match=message):
        replace(LOG, **damage)


FORWARD = Forward(stage=0, microbatch=0)
FIRST = Issue(rank=0, stream="compute", instruction=FORWARD, watched=True)
TWO = make_log(
    1,
    0,
    [
        (Started(next_handle=0), 0, Decision(issues=(FIRST, replace(FIRST, watched=False)))),
        (Ended(next_handle=2, handle=0, rank=0, instruction=FORWARD), 5, Decision(issues=(FIRST,))),
    ],
)


@pytest.mark.parametrize("number", [1, 2, 3, 2**40, -1])
def test_ends_of_what_is_not_watched_yet_are_refused(number):
    with pytest.raises(
        DocumentError, match="damaged: column event_number names an instruction that was not issued before"
    ):
        replace(TWO, event_number=np.array([0, number]))


def test_waits_for_later_decisions_and_unknown_marks_are_refused():
    def waiting_for(handle):
        issued = replace(TWO.issued, wait_offsets=np.array([0, 1, 1, 1]), waits=np.array([handle]))
        return replace(TWO, issued=issued)

    waiting_for(1)
    with pytest.raises(DocumentError, match="column waits names an instruction of a later decision"):
        waiting_for(2)
    with pytest.raises(ProgramError, match="its column `waits` names mark 0, but the program has 0 marks"):
        check_fit(ProgramBuilder(1).build(schedule="test", plan_hash=""), waiting_for(-1))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"stream_offsets": np.array([0, 1])}, "not a single stream without marks and late waits"),
        ({"late_lag": np.ones(1, np.int32)}, "not a single stream without marks and late waits"),
        ({"stage": np.zeros(1, np.int32)}, "column stage does not have 2 rows"),
        ({"wait_offsets": np.array([0, 2])}, "wait_offsets do not divide the waits"),
        ({"waits": np.array([5, -1])}, "column waits has values outside"),
        ({"join_need": np.array([3], np.int32)}, "column join_need is below 1 or above the number of waits"),
        ({"join_need": np.array([1, 1], np.int32)}, "the columns of joins differ in length"),
        ({"join_instruction": np.array([2])}, r"column join_instruction has values outside 0\.\.1"),
        ({"opcode": np.array([99, 0], np.int8)}, "column opcode has values outside"),
    ],
)
def test_damaged_instructions_of_a_log_are_refused(damage, message):
    with pytest.raises(DocumentError, match=message):
        replace(LOG, issued=replace(LOG.issued, **damage))
