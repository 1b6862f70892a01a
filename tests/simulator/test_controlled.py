"""Controlled runs against plain event-driven simulations that ask the same controller, and by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.program import ProgramBuilder, decided_program
from meshwright.simulator import bare_costs, controlled, simulate_controlled, simulate_program
from meshwright.spec import (
    AllReduce,
    DeadlockError,
    Forward,
    ProgramError,
    Receive,
    Send,
    decode_document,
    empty_section,
    encode_document,
)
from meshwright.spec.control import NOTHING, Decision, Ended, Issue, Rang, Started, Timer
from meshwright.spec.decision_log import EVENTS, DecisionLog, event_number, make_log
from tests.marks import examples
from tests.simulator.builders import RECEIVES, random_program
from tests.simulator.oracle_controlled import ControlledFairOracle, ControlledOracle
from tests.simulator.random_controllers import RandomController, RandomCosts

ORACLES = {"queued": ControlledOracle, "fair": ControlledFairOracle}
seeds = st.integers(0, 2**31)
contentions = st.sampled_from(sorted(ORACLES))


def without_empty_streams(program):
    """As `ProgramBuilder` makes it: only streams in which something happens."""
    none, body = empty_section(0), program.body
    kept = np.flatnonzero(np.diff(body.stream_offsets))
    nothing = replace(none, stream_offsets=np.zeros(len(kept) + 1, np.int64))
    return replace(
        program,
        streams=tuple(program.streams[s] for s in kept),
        prologue=nothing,
        body=replace(body, stream_offsets=np.append(body.stream_offsets[kept], body.num_instructions)),
        epilogue=nothing,
    )


def draw(seed, size, **facts):
    program, costs = random_program(seed, size, joins=seed % 2 == 1, body_alone=True)
    if seed % 3:
        program = without_empty_streams(program)
    changes = np.random.default_rng(seed).integers(0, 9, (2, len(costs.duration_ps), 1))
    costs = replace(costs, allocate_bytes=changes[0], free_bytes=changes[1])
    controller = RandomController(
        seed=seed, num_ranks=program.num_ranks, num_marks=len(program.body.mark_instruction), **facts
    )
    return program, costs, controller, RandomCosts(seed, len(costs.route_offsets) - 1)


# The first to run compiles the engine for controlled networks, 10 s of one core for each model of contention.
@pytest.mark.timeout(300)
@pytest.mark.parametrize("contention", sorted(ORACLES))
@settings(max_examples=examples(200))
@given(seed=seeds, size=st.integers(0, 20), may_deadlock=st.booleans())
@pytest.mark.matrix
def test_a_controlled_run_equals_the_oracle(contention, seed, size, may_deadlock):
    program, costs, controller, issue_costs = draw(seed, size, may_deadlock=may_deadlock)
    oracle = ORACLES[contention](program, costs, controller, issue_costs)
    expected = oracle.ends()
    if None in expected:
        with pytest.raises(DeadlockError):
            simulate_controlled(program, costs, controller, issue_costs, contention=contention)
        return
    run = simulate_controlled(program, costs, controller, issue_costs, contention=contention)
    assert run.timeline.end_ps.tolist() == expected
    arrivals = np.isin(run.timeline.opcode, RECEIVES)
    assert run.timeline.start_ps[~arrivals].tolist() == np.array(oracle.starts())[~arrivals].tolist()
    assert run.log.now_ps.tolist() == [now for _, now, _ in oracle.decided]
    assert [run.log.decision(k) for k in range(run.log.num_decisions)] == [what for _, _, what in oracle.decided]


@settings(max_examples=examples(100))
@given(seed=seeds, size=st.integers(0, 20), contention=contentions, timers=st.booleans())
@pytest.mark.long
def test_a_log_is_replayed_and_becomes_a_program(seed, size, contention, timers):
    program, costs, controller, issue_costs = draw(seed, size, timers=timers)
    run = simulate_controlled(program, costs, controller, issue_costs, contention=contention)
    log = decode_document(DecisionLog, json.loads(json.dumps(encode_document(run.log))), "log")
    assert log == run.log
    again = simulate_controlled(program, costs, log, issue_costs, contention=contention)
    assert again.timeline == run.timeline
    assert again.log == run.log
    rang = (log.event_kind == EVENTS.index(Rang)) & (np.diff(log.issue_offsets) > 0)
    if rang.any():
        with pytest.raises(ProgramError, match="a program cannot wait for a time, only for instructions"):
            decided_program(program, log)
    else:
        made = decided_program(program, log)
        assert simulate_program(made, run.costs, contention=contention) == run.timeline


@dataclass(frozen=True)
class Script:
    """Decides what is written down for the k-th event, given the handle that comes next; keeps the events."""

    decisions: tuple
    initial: tuple = ()

    def decide(self, state, event, now_ps):
        what = self.decisions[len(state)] if len(state) < len(self.decisions) else NOTHING
        return (*state, (type(event), event_number(event), now_ps)), what(event.next_handle) if callable(what) else what


def nothing(num_ranks, durations, routes=()):
    program = ProgramBuilder(num_ranks).build(schedule="test", plan_hash="")
    return program, bare_costs(program, durations, routes)


def compute(rank, cost, **facts):
    """A forward whose microbatch is its cost class."""
    return Issue(rank=rank, stream="compute", instruction=Forward(stage=rank, microbatch=cost), **facts)


def message(source, target, number, cost, **facts):
    ends = {"microbatch": number, "payload": "activation", "num_bytes": cost}
    return (
        Issue(rank=source, stream="send", instruction=Send(stage=source, peer=target, **ends), **facts),
        Issue(rank=target, stream="receive", instruction=Receive(stage=target, peer=source, **ends)),
    )


def issue_costs(issue, _):
    """Class by microbatch or bytes; messages and sums go over route 0."""
    if isinstance(issue.instruction, Forward):
        return issue.instruction.microbatch, -1
    return (0, -1) if isinstance(issue.instruction, Receive) else (issue.instruction.num_bytes, 0)


def run_script(num_ranks, durations, *decisions, routes=((0,),), cost=issue_costs, **facts):
    return simulate_controlled(*nothing(num_ranks, durations, routes), Script(decisions), cost, **facts)


def spans(run):
    return {
        run.timeline.name(i): (int(run.timeline.start_ps[i]), int(run.timeline.end_ps[i]))
        for i in range(run.timeline.num_spans)
    }


@pytest.mark.parametrize("contention", sorted(ORACLES))
def test_events_come_by_moment_then_ends_by_handle_then_timers_as_asked(contention):
    first = Decision(
        issues=(compute(0, 2, watched=True), compute(1, 1, watched=True), compute(2, 2, watched=True)),
        timers=(Timer(at_ps=5, number=7), Timer(at_ps=5, number=3), Timer(at_ps=0, number=1)),
    )
    run = run_script(3, [0, 4, 5], first, contention=contention)
    assert run.state == (
        (Started, 0, 0),
        (Rang, 1, 0),
        (Ended, 1, 4),
        (Ended, 0, 5),
        (Ended, 2, 5),
        (Rang, 7, 5),
        (Rang, 3, 5),
    )


@pytest.mark.parametrize("contention", sorted(ORACLES))
def test_what_is_issued_begins_with_its_decision_and_asks_for_links_before_they_are_given(contention):
    """At 5 two sends want a link: rank 2's, which waits in the body, and rank 0's, which is decided at that moment."""
    first = Decision(issues=(compute(1, 1, watched=True), *message(2, 0, 1, 2, waits=(0,))))
    run = run_script(3, [0, 5, 10], first, lambda _: Decision(issues=message(0, 1, 0, 2)), contention=contention)
    expected = {"queued": ((5, 15), (15, 25)), "fair": ((5, 25), (5, 25))}[contention]
    assert (spans(run)["send 0→1.0"], spans(run)["send 2→0.1"]) == expected


@pytest.mark.parametrize("contention", sorted(ORACLES))
def test_what_follows_a_join_at_a_moment_comes_before_its_events(contention):
    """The join closes at 5 with the end of 1, and takes no time; its end comes first, for it has the lower handle."""
    join = compute(0, 0, waits=(1, 2), need=1, watched=True)
    issues = (join, compute(1, 1, watched=True), *message(2, 0, 0, 1, waits=(4,)), compute(3, 2))
    run = run_script(4, [0, 5, 7], Decision(issues=issues), contention=contention)
    assert run.state == ((Started, 0, 0), (Ended, 0, 5), (Ended, 1, 5))


def test_a_stream_that_was_idle_does_not_begin_in_the_past():
    run = run_script(
        2, [0, 5, 8], Decision(issues=(compute(0, 1), compute(1, 2, watched=True))), Decision(issues=(compute(0, 1),))
    )
    assert run.timeline.start_ps.tolist() == [0, 8, 0]


def test_a_join_keeps_its_count_when_its_moment_becomes_a_wait():
    """One of two is needed: the end at 3 has happened when the end at 8 lets the join be issued, so it begins at 8."""
    first = Decision(issues=(compute(0, 1), compute(1, 2, watched=True), compute(2, 3)))
    join = compute(0, 1, waits=(0, 2), need=1)
    program, costs = nothing(3, [0, 3, 8, 20], [(0,)])
    run = simulate_controlled(program, costs, Script((first, Decision(issues=(join,)))), issue_costs)
    assert run.timeline.start_ps.tolist() == [0, 8, 0, 0]
    made = decided_program(program, run.log)
    assert simulate_program(made, run.costs) == run.timeline
    assert made.body.join_need.tolist() == [3]


def test_a_watched_end_behind_a_circle_is_named():
    circle = Decision(issues=(compute(0, 1, waits=(1,), watched=True), compute(1, 1, waits=(0,)), compute(2, 1)))
    with pytest.raises(DeadlockError) as caught:
        run_script(3, [0, 5], circle)
    assert "The controller waits for F0.1 (rank 0, compute), and these ended streams wait" in str(caught.value)
    assert str(caught.value).endswith("wait for the controller: rank 2, compute.")


def test_what_stops_before_its_receives_are_issued_is_a_deadlock_too():
    """The push of rank 0 would be received when it has ended, as policies do it."""
    push = message(0, 1, 0, 1, waits=(2,), watched=True)[0]
    circle = Decision(issues=(push, compute(0, 1, waits=(2,)), compute(1, 1, waits=(1,))))
    with pytest.raises(DeadlockError, match=r"F1\.1 \(rank 1, compute\).* The controller waits for send 0→1\.0"):
        run_script(2, [0, 5], circle)


REFUSED = {
    "rank 5": (Decision(issues=(compute(5, 1),)), "stream 'compute' of rank 5; expected one of"),
    "handle 1": (Decision(issues=(compute(0, 1, waits=(1,)),)), r"waits for \(1,\); expected handles"),
    "mark": (Decision(issues=(compute(0, 1, waits=(-1,)),)), r"waits for \(-1,\); expected handles"),
    "need": (Decision(issues=(compute(0, 1, need=1),)), "needs 1 of 0 waits"),
    "group": (Decision(issues=(compute(0, 1, group=(0, 9)),)), r"has the group \(0, 9\); expected ranks .* 3 ranks"),
    "no send": (Decision(issues=message(0, 1, 0, 1)[1:]), "no send of this message is pending"),
    "no receive": (Decision(issues=message(0, 1, 0, 1)[:1]), "the controller issued no receive of this message"),
    "twice": (Decision(issues=message(0, 1, 0, 1) * 2), "was issued twice"),
    "class": (Decision(issues=(compute(0, 9),)), "got class 9 and route -1; the costs have classes 0 to 1"),
    "no time": (Decision(issues=message(0, 1, 0, 0)), "of 0 ps and route 0; on a route it must take at least 1 ps"),
    "past": (Decision(timers=(Timer(at_ps=-1),)), "was set at 0 ps; expected that moment or a later one"),
    "watch": (Decision(watch=(0,)), "Instruction 0 cannot be watched; expected one of the 0 of the program's body"),
    "member": (
        Decision(
            issues=(
                Issue(rank=0, stream="exchange", instruction=AllReduce(stage=0, bucket=0, num_bytes=1), group=(0, 1)),
            )
        ),
        r"for ranks \[0\] of the group \(0, 1\); expected all of them in one decision",
    ),
    "stream": (
        Decision(
            issues=(Issue(rank=0, stream="send", instruction=AllReduce(stage=0, bucket=0, num_bytes=1), group=(0, 1)),)
        ),
        "expected .exchange., the stream of every AllReduce",
    ),
}


def forward(**facts):
    return Issue(rank=0, stream="compute", instruction=Forward(**{"stage": 0, "microbatch": 1} | facts))


SEND, RECEIVE = message(0, 1, 0, 1)
REFUSED |= {
    "wide microbatch": (Decision(issues=(forward(microbatch=2**32),)), r"from 0 to 2\^31 - 1 as its `microbatch`"),
    "wide stage": (Decision(issues=(forward(stage=2**31),)), r"from 0 to 2\^31 - 1 as its `stage`"),
    "negative version": (Decision(issues=(forward(version=-1),)), r"from 0 to 2\^31 - 1 as its `version`"),
    "half a microbatch": (Decision(issues=(forward(microbatch=0.5),)), r"from 0 to 2\^31 - 1 as its `microbatch`"),
    "wide peer": (Decision(issues=message(0, 2**31, 0, 1)[:1]), r"from 0 to 2\^31 - 1 as its `peer`"),
    "wide bytes": (Decision(issues=message(0, 1, 0, 2**63)), r"from 0 to 2\^63 - 2 as its `num_bytes`"),
    "no instruction": (
        Decision(issues=(replace(SEND, instruction="F"),)),
        r"issued 'F'; expected an instruction class of `meshwright\.spec`",
    ),
    "half a rank": (Decision(issues=(replace(SEND, rank=0.5),)), "has a wrong type; expected an int as `rank`"),
    "waits in a list": (Decision(issues=(replace(SEND, waits=[0]),)), "expected tuples of int as `waits`"),
    "half a moment": (
        Decision(timers=(Timer(at_ps=1.5),)),
        r"at_ps=1\.5.*; expected whole numbers of at most 2\^63 - 2",
    ),
    "wide moment": (Decision(timers=(Timer(at_ps=2**63),)), r"expected whole numbers of at most 2\^63 - 2"),
    "wide number": (Decision(timers=(Timer(at_ps=1, number=2**63),)), r"expected whole numbers of at most 2\^63 - 2"),
    "generator": (Decision(issues=(issue for issue in (SEND,))), "decision has issues=<generator .* a tuple of"),
    "other timers": (Decision(timers=(5,)), r"decision has timers=\(5,\); expected a tuple of `Timer`"),
    "no decision": (None, r"`decide` returned \(.*, None\); expected its state and a `Decision`"),
    "send in compute": (Decision(issues=(replace(SEND, stream="compute"),)), "expected 'send', the stream of every"),
    "forward in send": (Decision(issues=(replace(forward(), stream="send"),)), "expected 'compute', the stream of"),
    "other bytes": (
        Decision(issues=(SEND, message(0, 1, 0, 7)[1])),
        r"num_bytes=7\) was issued for Send\(.*expected the same `num_bytes` in both",
    ),
    "member of another": (
        Decision(
            issues=(
                Issue(rank=2, stream="exchange", instruction=AllReduce(stage=0, bucket=0, num_bytes=1), group=(0, 1)),
            )
        ),
        "was issued to rank 2; expected one of its members",
    ),
    "no number of a rank": (Decision(issues=(compute(3, 1),)), r"ProgramBuilder\(policy\.num_ranks\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_decisions_that_break_a_rule_are_refused(case):
    decision, message_ = REFUSED[case]
    with pytest.raises(ProgramError, match=message_):
        run_script(3, [0, 5], decision)


def test_what_cannot_be_controlled_is_refused():
    with pytest.raises(ProgramError, match=r"The instructions \(0,\) cannot be watched from 0 ps on, because they may"):
        run_script(1, [0, 1], Decision(timers=(Timer(at_ps=0),)), Decision(watch=(0,)))
    sums = tuple(
        Issue(rank=rank, stream="exchange", instruction=AllReduce(stage=0, bucket=0, num_bytes=1), group=(0, 1))
        for rank in range(2)
    )
    with pytest.raises(ProgramError, match="expected the same for all"):
        run_script(2, [0, 1], Decision(issues=sums), cost=lambda issue, _: (1, issue.rank - 1))
    program, costs = random_program(1, 5)
    with pytest.raises(ProgramError, match=r"the prologue has . instructions, not 0"):
        bare_costs(program, [1])
    with pytest.raises(ProgramError, match="expected a body alone"):
        simulate_controlled(program, costs, Script(()), issue_costs)
    program, costs = nothing(1, [0, 1])
    with pytest.raises(ProgramError, match="Give costs whose `host_ps` is zero"):
        simulate_controlled(program, replace(costs, host_ps=np.array([0, 1])), Script(()), issue_costs)


def test_a_log_that_does_not_fit_is_refused():
    program, costs = nothing(2, [0, 5])
    first = Decision(issues=(compute(0, 1, watched=True), compute(1, 1, watched=True)))
    log = simulate_controlled(program, costs, Script((first,)), issue_costs).log
    with pytest.raises(ProgramError, match=r"event 1 is the end of instruction 0 at 6 ps; the log has .* 0 at 5 ps"):
        simulate_controlled(program, replace(costs, duration_ps=np.array([0, 6])), log, issue_costs)
    with pytest.raises(ProgramError, match="of 2 ranks with 0 instructions; the given program has 3 ranks and 0"):
        simulate_controlled(*nothing(3, [0, 5]), log, issue_costs)
    shorter = make_log(2, 0, [(Started(next_handle=0), 0, first)])
    with pytest.raises(ProgramError, match="the log has nothing after its 1 decisions"):
        simulate_controlled(program, costs, shorter, issue_costs)
    more = [
        (Started(next_handle=0), 0, first),
        *((Ended(next_handle=2, handle=k, rank=k, instruction=None), 5, NOTHING) for k in range(2)),
        (Rang(next_handle=2, number=4), 9, NOTHING),
    ]
    with pytest.raises(
        ProgramError, match="this run, which ended after 3 events; the log continues with timer 4 at 9 ps"
    ):
        simulate_controlled(program, costs, make_log(2, 0, more), issue_costs)


@pytest.mark.parametrize("cost", [None, 1, (0.5, -1), (1,), (1, -1, 0), [1, -1]])
def test_a_cost_is_a_class_and_a_route(cost):
    with pytest.raises(ProgramError, match=r"The cost of Forward\(.*\) is .*; expected two ints, a cost class and a"):
        run_script(1, [0, 5], Decision(issues=(compute(0, 1),)), cost=lambda *_: cost)


@pytest.mark.parametrize("contention", sorted(ORACLES))
def test_a_route_without_links_is_none(contention):
    """Two messages and a sum take their time side by side, and so they do in the decided program."""
    sums = tuple(
        Issue(rank=rank, stream="exchange", instruction=AllReduce(stage=0, bucket=0, num_bytes=1), group=(0, 1))
        for rank in range(2)
    )
    decision = Decision(issues=(*message(0, 1, 0, 1), *message(1, 0, 1, 1), *sums))
    program, costs = nothing(2, [0, 5], [()])
    run = simulate_controlled(program, costs, Script((decision,)), issue_costs, contention=contention)
    assert run.timeline.end_ps.tolist() == [5] * 6
    assert simulate_program(decided_program(program, run.log), run.costs, contention=contention) == run.timeline
    assert run.costs.body.route.max() == 0


TOO_LONG = {
    "watched": (Decision(issues=(compute(0, 1, watched=True),) * 3),),
    "not watched": (Decision(issues=(compute(0, 1),) * 3),),
    "awaited": (Decision(issues=(compute(0, 1), compute(0, 1), compute(1, 2, waits=(1,)))),),
    "behind a timer": (Decision(timers=(Timer(at_ps=2**63 - 2),)), Decision(issues=(compute(0, 2),))),
    "over a link": (Decision(issues=(*message(0, 1, 0, 1), *message(0, 1, 1, 1), *message(1, 0, 2, 1))),),
}


@pytest.mark.parametrize("contention", sorted(ORACLES))
@pytest.mark.parametrize("case", TOO_LONG)
def test_a_run_that_takes_too_long_for_its_times_is_refused(case, contention):
    with pytest.raises(ProgramError, match=r"takes more than 2\^63 - 1 ps"):
        run_script(2, [0, 2**62, 5], *TOO_LONG[case], cost=by_first_two, contention=contention)


def by_first_two(issue, handle):
    """As `issue_costs`, but messages have class 1."""
    return (1, 0) if isinstance(issue.instruction, Send) else issue_costs(issue, handle)


class Forgetful:
    """Returns no state."""

    initial = 0

    def decide(self, state, event, now_ps):
        return NOTHING


def test_what_is_returned_is_a_state_and_a_decision():
    with pytest.raises(ProgramError, match=r"`decide` returned Decision\(.*expected its state and a `Decision`"):
        simulate_controlled(*nothing(1, [0]), Forgetful(), issue_costs)


def test_a_controller_that_never_ends_is_stopped(monkeypatch):
    monkeypatch.setattr(controlled, "MAX_UNROLLED", 10)
    endless = tuple(Decision(timers=(Timer(at_ps=0),)) for _ in range(20))
    with pytest.raises(ProgramError, match="Make the controller stop earlier"):
        run_script(1, [0], *endless)


def abandoning(*decisions):
    """A rank that computes for 10, 20 and 5 ps; a timer rings after 15."""
    begin = Decision(
        issues=tuple(
            Issue(
                rank=0,
                stream="compute",
                instruction=Forward(stage=0, microbatch=number),
                abandonable=number != 2,
                watched=number == 1,
            )
            for number in range(3)
        ),
        timers=(Timer(at_ps=15),),
    )
    program, costs = nothing(1, [10, 20, 5])
    return simulate_controlled(
        program, costs, Script((begin, *decisions)), lambda issue, _: (issue.instruction.microbatch, -1)
    )


def test_what_runs_ends_when_it_is_abandoned_and_its_end_is_told():
    run = abandoning(Decision(abandon=(1,)))
    assert run.timeline.end_ps.tolist() == [10, 15, 20]
    assert run.timeline.start_ps.tolist() == [0, 10, 15]
    assert run.state == ((Started, 0, 0), (Rang, 0, 15), (Ended, 1, 15))
    # What has ended stays, and nothing can be abandoned twice.
    assert abandoning(Decision(abandon=(0, 1))).timeline == run.timeline
    assert abandoning(Decision(abandon=(1, 1))).timeline == run.timeline


def test_what_has_not_begun_takes_no_time_when_it_is_abandoned():
    begin = Decision(
        issues=tuple(
            Issue(rank=0, stream="compute", instruction=Forward(stage=0, microbatch=number), abandonable=True)
            for number in range(3)
        ),
        timers=(Timer(at_ps=4),),
    )
    program, costs = nothing(1, [10, 20, 5])
    run = simulate_controlled(
        program,
        costs,
        Script((begin, Decision(abandon=(1,)))),
        lambda issue, _: (issue.instruction.microbatch, -1),
    )
    assert run.timeline.end_ps.tolist() == [10, 10, 15]


@pytest.mark.parametrize(
    ("abandon", "words"),
    [
        ((2,), "Instruction 2 cannot be abandoned; expected"),
        ((7,), "Instruction 7"),
        (("x",), "expected a tuple of `int`"),
    ],
)
def test_only_abandonable_computations_are_abandoned(abandon, words):
    with pytest.raises(ProgramError, match=words):
        abandoning(Decision(abandon=abandon))


def test_what_holds_links_or_is_sent_cannot_be_abandonable():
    program, costs = nothing(2, [10], [[0]])
    computed = Issue(rank=0, stream="compute", instruction=Forward(stage=0, microbatch=0), abandonable=True)
    with pytest.raises(ProgramError, match="a transfer that holds links cannot be abandoned"):
        simulate_controlled(program, costs, Script((Decision(issues=(computed,)),)), lambda *_: (0, 0))
    message = Send(stage=0, peer=1, microbatch=0, payload="gradient", num_bytes=1)
    sent = Issue(rank=0, stream="send", instruction=message, group=(0, 1), abandonable=True)
    with pytest.raises(ProgramError, match="issued with `abandonable=True`; expected a computation"):
        simulate_controlled(program, costs, Script((Decision(issues=(sent,)),)), lambda *_: (0, -1))
