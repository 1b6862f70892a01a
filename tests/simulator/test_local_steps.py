"""Exchanges that are rare, and numbers on which all ranks agree before every update."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.program import build_program, gradient_buckets
from meshwright.simulator import explain_step, simulate_plan
from meshwright.spec import GradientExchange, Opcode, PlanError
from tests.graphs import chain_graph, make_plan
from tests.marks import examples
from tests.program.check import check_program
from tests.simulator.exchanges import layered_plan
from tests.simulator.plans import FixedCost, small_cluster


@settings(max_examples=examples(30))
@given(every=st.integers(2, 5), replicas=st.integers(2, 3), more=st.integers(0, 2), moving=st.integers(1, 30))
def test_local_sgd_pays_for_one_exchange_in_so_many_steps(every, replicas, more, moving):
    """H steps without any sum, then parameters are averaged: (H · computed + s) / H."""
    graph, count = chain_graph(2), replicas + more
    exchange = GradientExchange(every_steps=every)
    plan = make_plan(graph, [(0, 2)], [replicas], count, exchange=exchange)
    cost = FixedCost(all_reduce=moving * 1e-6, optimizer=2e-6)
    result = simulate_plan(plan, graph, small_cluster(), cost=cost)
    computed = -(-count // replicas) * 2 * (3 + 5) + 2
    assert result.step_time_s == pytest.approx((every * computed + moving) / every * 1e-6, abs=1e-12)
    assert result.ranks[0].exchange_s == pytest.approx(moving / every * 1e-6)
    assert result.ranks[0].optimizer_s == pytest.approx(2e-6)
    assert result.samples_per_s == pytest.approx(plan.workload.global_batch / result.step_time_s)
    assert explain_step(plan, graph, small_cluster(), cost=cost).step_time_s == pytest.approx(result.step_time_s)


def test_every_step_updates_and_the_last_one_averages():
    graph = chain_graph(3)
    plan = layered_plan(graph, 2, num_microbatches=4, every_steps=3, bucket_bytes=1)
    program = build_program(plan, graph)
    check_program(program)
    body = program.body
    assert program.body_steps == 3
    for rank in range(2):
        rows = np.concatenate([np.array(body.stream_range(s)) for s in program.streams_of(rank)])
        counts = {kind: int((body.opcode[rows] == kind).sum()) for kind in Opcode}
        assert counts[Opcode.FORWARD] == counts[Opcode.BACKWARD] == 3 * 3 * 2
        assert counts[Opcode.OPTIMIZER_STEP] == 3 * 3
        assert counts[Opcode.ALL_REDUCE] == len(gradient_buckets(graph, plan)) == 3
    # Averages come after the last updates, and the first forwards of the next body wait for them.
    averages = np.flatnonzero(body.opcode == Opcode.ALL_REDUCE)
    for i in averages.tolist():
        (update,) = body.waits_of(i).tolist()
        assert body.opcode[update] == Opcode.OPTIMIZER_STEP
        later = (body.opcode[update + 1 :] == Opcode.OPTIMIZER_STEP) & (body.stage[update + 1 :] == body.stage[update])
        assert later.sum() in (0, 3)
    assert set(body.opcode[body.late_instruction]) == {Opcode.FORWARD}
    assert set(body.microbatch[body.late_instruction]) == {0, 1}


@pytest.mark.parametrize(("clip", "scale"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("way", [{}, {"zero": 1}, {"servers": (0, 1)}, {"across_steps": True}])
def test_all_ranks_agree_before_any_update(clip, scale, way):
    graph = chain_graph(3)
    plan = layered_plan(graph, 2, clip_norm=clip, loss_scale=scale, bucket_bytes=1, **way)
    program = build_program(plan, graph)
    check_program(program)
    body = program.body
    numbers = np.flatnonzero((body.opcode == Opcode.ALL_REDUCE) & (body.num_bytes == 4))
    assert len(numbers) == 2 * (clip + scale)
    assert all(program.groups[group] == (0, 1) for group in body.group[numbers].tolist())
    # What comes back from servers is there before; sums of a rank's own stream are, for they stand before the number.
    pulls = np.flatnonzero(body.opcode == Opcode.PULL)
    awaited = {rank: set(body.waits_of(i).tolist()) for rank, i in enumerate(numbers[:: clip + scale].tolist())}
    assert all(any(pull in found for found in awaited.values()) for pull in pulls.tolist())
    updates = np.flatnonzero(body.opcode == Opcode.OPTIMIZER_STEP)
    waits = {i: set(body.waits_of(i).tolist()) for i in updates.tolist()}
    for waiting, awaited, section in zip(
        body.late_instruction.tolist(), body.late_awaited.tolist(), body.late_section.tolist(), strict=True
    ):
        if section == 1 and waiting in waits:
            waits[waiting].add(awaited)
    assert all(len(found & set(numbers.tolist())) == clip + scale for found in waits.values())


def test_clipping_costs_an_agreement_and_three_passes():
    """One layer: its sum, then the number, then the step and what it reads and writes of the gradients."""
    graph = chain_graph(1)
    plan = make_plan(graph, [(0, 1)], [2], 2)
    cost = FixedCost(all_reduce=7e-6, optimizer=2e-6, fill=4e-6)
    plain, clipped, scaled = (
        simulate_plan(replace(plan, exchange=GradientExchange(**facts)), graph, small_cluster(), cost=cost).step_time_s
        for facts in ({}, {"clip_norm": True}, {"loss_scale": True})
    )
    assert clipped - plain == pytest.approx(7e-6 + 1.5 * 4e-6)
    assert scaled - plain == pytest.approx(7e-6 + 4e-6)
    # A pipeline's ranks agree, too, whether or not any has a replica.
    chain = chain_graph(2)
    pipeline = make_plan(chain, [(0, 1), (1, 2)], [1, 1], 2, exchange=GradientExchange(clip_norm=True))
    body = build_program(pipeline, chain).body
    assert (body.opcode == Opcode.ALL_REDUCE).sum() == 2


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"every_steps": 0}, "every 0 steps"),
        ({"every_steps": 2, "servers": (0,)}, "servers and every_steps"),
        ({"every_steps": 2, "zero": 1}, "zero and every_steps"),
        ({"every_steps": 2, "across_steps": True}, "across steps already"),
        ({"every_steps": 2, "algorithm": "hierarchical", "node_size": 2}, "plain all-reduces"),
    ],
)
def test_ways_that_exclude_each_other_are_refused(facts, message):
    with pytest.raises(PlanError, match=message):
        GradientExchange(**facts)
