"""Shares of microbatches: who computes what, in an order that never waits in a circle, with what in flight."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.program import SCHEDULES, build_program, compute_orders, local_microbatches
from meshwright.program.program_check import play_orders
from meshwright.spec import (
    GradientExchange,
    Opcode,
    Plan,
    PlanError,
    StagePlan,
    Workload,
    decode_document,
    encode_document,
)
from tests.graphs import chain_graph
from tests.marks import examples
from tests.program.check import check_program


def plan_of(shares, schedule="1f1b", **changes):
    """One stage of one layer for each entry, with so many microbatches for each of its replicas."""
    total = sum(shares[0])
    stages, rank = [], 0
    for index, own in enumerate(shares):
        ranks = tuple(range(rank, rank + len(own)))
        stages.append(StagePlan(start=index, stop=index + 1, ranks=ranks, shares=tuple(own)))
        rank += len(own)
    facts = {
        "model": "m",
        "graph_hash": "0" * 16,
        "cluster": "c",
        "workload": Workload(global_batch=total),
        "stages": tuple(stages),
        "num_microbatches": total,
        "schedule": schedule,
    }
    return Plan(**(facts | changes))


@st.composite
def share_lists(draw):
    total = draw(st.integers(1, 24))
    stages = []
    for _ in range(draw(st.integers(1, 4))):
        replicas = draw(st.integers(1, min(4, total)))
        cuts = (
            sorted(draw(st.sets(st.integers(1, total - 1), min_size=replicas - 1, max_size=replicas - 1)))
            if replicas > 1
            else []
        )
        edges = [0, *cuts, total]
        stages.append([b - a for a, b in itertools.pairwise(edges)])
    return stages


def chain_needs(stages):
    """What a chain of stages must have computed before."""
    last = stages - 1

    def needs(backward, stage):
        if backward:
            return [stage + 1] if stage < last else []
        return [stage - 1] if stage else []

    return needs


@settings(max_examples=examples(200), deadline=None)
@given(share_lists(), st.sampled_from(["1f1b", "gpipe"]))
def test_every_replica_computes_its_share_and_nobody_waits_in_a_circle(shares, schedule):
    plan = plan_of(shares, schedule)
    orders = compute_orders(plan)
    seen = set()
    for index, stage in enumerate(plan.stages):
        for rank, share in zip(stage.ranks, stage.shares, strict=True):
            own = local_microbatches(plan, index, rank)
            rows = orders[rank].columns.table().tolist()
            assert len(own) == share
            assert all(stage.rank_of(m) == rank for m in own)
            assert [m for opcode, _, m in rows if opcode == Opcode.FORWARD] == list(own)
            assert [m for opcode, _, m in rows if opcode == Opcode.BACKWARD] == list(own)
            seen |= {(index, m) for m in own}
    assert len(seen) == len(shares) * plan.num_microbatches
    # Raises DeadlockError for a circle.
    play_orders(plan, orders, chain_needs(len(shares)))


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 4), st.sampled_from(["1f1b", "gpipe"]))
def test_equal_shares_are_none(replicas, rounds, schedule):
    total = math.lcm(*replicas) * rounds
    given_shares = plan_of([[total // r] * r for r in replicas], schedule)
    stages = tuple(StagePlan(start=s.start, stop=s.stop, ranks=s.ranks) for s in given_shares.stages)
    without = plan_of([[total // r] * r for r in replicas], schedule, stages=stages)
    for own, other in zip(compute_orders(given_shares), compute_orders(without), strict=True):
        assert own.columns == other.columns


def test_the_faster_replica_is_due_more_often():
    stage = StagePlan(start=0, stop=1, ranks=(4, 7), shares=(4, 2))
    assert [stage.rank_of(m) for m in range(12)] == [4, 7, 4, 4, 7, 4] * 2
    assert stage.counts(6) == (4, 2)
    assert stage.describe() == "0:1 ×2 (4 + 2)"


def test_a_stage_alone_keeps_one_microbatch_in_flight():
    for order in compute_orders(plan_of([[5, 2, 1]])):
        kinds = order.columns.opcode.tolist()
        assert kinds == [Opcode.FORWARD, Opcode.BACKWARD] * (len(kinds) // 2)


def test_a_fast_replica_in_front_keeps_its_share_of_what_is_behind():
    # Behind it two replicas, of which the slower is due every 6th microbatch of 12.
    orders = compute_orders(plan_of([[9, 3], [10, 2]]))
    flights = []
    for order in orders:
        steps = np.where(order.columns.opcode == Opcode.FORWARD, 1, -1)
        flights.append(int(np.cumsum(steps).max()))
    # 1 + 6 microbatches of all, of which 3 of 4 are its own; 4 + 6, of which 1 of 4 are; at the end each its own.
    assert flights == [6, 3, 1, 1]


def test_programs_with_shares_keep_every_rule():
    graph = chain_graph(2)
    plan = plan_of([[3, 1], [2, 1, 1]], graph_hash=graph.content_hash)
    program = build_program(plan, graph)
    check_program(program)
    forwards = program.body.opcode == Opcode.FORWARD
    stages, microbatches = program.body.stage[forwards], program.body.microbatch[forwards]
    assert sorted(zip(stages.tolist(), microbatches.tolist(), strict=True)) == [
        (s, m) for s in range(2) for m in range(4)
    ]


def test_shares_are_read_and_written():
    plan = plan_of([[3, 1], [4]])
    data = encode_document(plan)
    assert data["stages"][0]["shares"] == [3, 1]
    assert decode_document(Plan, data, "plan") == plan
    assert plan.describe().startswith("2 stages [0:1 ×2 (3 + 1), 1:2 ×1]")


@pytest.mark.parametrize("schedule", sorted(set(SCHEDULES) - {"gpipe", "1f1b"}))
def test_other_schedules_refuse_shares(schedule):
    with pytest.raises(PlanError):
        compute_orders(plan_of([[3, 1], [3, 1]], schedule))


def test_bad_shares_are_refused():
    with pytest.raises(PlanError, match=r"shares \[3\] were given for the ranks \[0, 1\]"):
        StagePlan(start=0, stop=1, ranks=(0, 1), shares=(3,))
    with pytest.raises(PlanError, match="at least 1"):
        StagePlan(start=0, stop=1, ranks=(0, 1), shares=(3, 0))
    with pytest.raises(PlanError, match=r"shares of 3 \+ 1 microbatches; expected 8 in all"):
        plan_of([[3, 1]], num_microbatches=8, workload=Workload(global_batch=8))
    with pytest.raises(PlanError, match="the schedule hetpipe, where replicas update weights by themselves"):
        plan_of([[3, 1]], "hetpipe")
    with pytest.raises(PlanError, match="an exchange with every_steps > 1"):
        plan_of([[3, 1]], exchange=GradientExchange(every_steps=2))
