"""Where a rank's time goes, against a look at every half microsecond."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.simulator import simulate_plan
from meshwright.simulator.simulation import rank_seconds
from meshwright.spec import Opcode
from tests.graphs import chain_graph, even_bounds, make_plan
from tests.marks import examples
from tests.program.endless_plans import endless_plan
from tests.simulator.plans import FixedCost, small_cluster

US = 1_000_000  # ps
BACKWARDS = (Opcode.BACKWARD, Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT)


def looked_at(timeline, rank, length_ps):
    """Seconds by name of a rank's spans of the first step, each seen in every step: laid on a circle."""
    counts = dict.fromkeys(("forward", "backward", "optimizer", "communication", "exchange", "idle"), 0)
    counts |= dict.fromkeys(("exposed_communication", "exposed_exchange"), 0)
    mine = [
        i
        for i in np.flatnonzero(timeline.step == 0).tolist()
        if timeline.tracks[timeline.track[i]].rank == rank and timeline.end_ps[i] > timeline.start_ps[i]
    ]
    for moment in range(US // 2, length_ps, US):
        on = [
            i for i in mine if (moment - timeline.start_ps[i]) % length_ps < timeline.end_ps[i] - timeline.start_ps[i]
        ]
        compute = [timeline.opcode[i] for i in on if timeline.tracks[timeline.track[i]].name == "compute"]
        moves = [timeline.opcode[i] for i in on if timeline.tracks[timeline.track[i]].name != "compute"]
        counts["forward"] += Opcode.FORWARD in compute
        counts["backward"] += any(opcode in compute for opcode in BACKWARDS)
        counts["optimizer"] += Opcode.OPTIMIZER_STEP in compute
        counts["communication"] += bool(moves)
        counts["exchange"] += Opcode.ALL_REDUCE in moves
        counts["exposed_communication"] += bool(moves) and not compute
        counts["exposed_exchange"] += Opcode.ALL_REDUCE in moves and not compute
        counts["idle"] += not compute
    return counts


@settings(max_examples=examples(30))
@given(
    schedule=st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    replicas=st.integers(1, 2),
    send=st.integers(1, 6),
    all_reduce=st.integers(1, 9),
    more=st.integers(0, 30),
)
def test_seconds_are_those_that_one_sees(schedule, replicas, send, all_reduce, more):
    graph = chain_graph(6)
    plan = make_plan(graph, even_bounds(6, 3), [replicas] * 3, 3 * replicas, schedule=schedule)
    cost = FixedCost(backward=6e-6, send=send * 1e-6, all_reduce=all_reduce * 1e-6, optimizer=3e-6)
    timeline = simulate_plan(plan, graph, small_cluster(), cost=cost).timeline
    # Whole microseconds: a step may take longer than what is in it, but not less.
    length_ps = -(-int(timeline.end_ps.max()) // US) * US + more * US
    for rank, found in enumerate(rank_seconds(timeline, length_ps, range(1))):
        for name, count in looked_at(timeline, rank, length_ps).items():
            assert getattr(found, f"{name}_s") == pytest.approx(count * 1e-6, abs=1e-12), name


def work_of(plan, stages, forward_s, backward_s):
    """Seconds that each rank computes in a step, from the plan alone."""
    total = [0.0] * plan.num_ranks
    for stage, has_backward in zip(plan.stages, stages, strict=True):
        for microbatch in range(plan.num_microbatches):
            total[stage.rank_of(microbatch)] += forward_s + backward_s * has_backward
    return total


@settings(max_examples=examples(40))
@given(
    num_stages=st.integers(2, 4),
    num_frozen=st.integers(0, 2),
    num_microbatches=st.integers(1, 6),
    schedule=st.sampled_from(["gpipe", "1f1b", "zb-h2"]),
    send=st.integers(0, 9),
    num_steps=st.sampled_from([1, 3, 6]),
)
def test_a_rank_is_busy_with_what_it_computes(num_stages, num_frozen, num_microbatches, schedule, send, num_steps):
    """Also a rank that runs ahead of the others, as those of frozen stages do; and however many steps are shown."""
    graph = chain_graph(num_stages, frozen=num_frozen)
    plan = make_plan(graph, even_bounds(num_stages, num_stages), [1] * num_stages, num_microbatches, schedule=schedule)
    cost = FixedCost(forward=1e-6, backward=6e-6, send=send * 1e-6)
    found = simulate_plan(plan, graph, small_cluster(), cost=cost, num_steps=num_steps)
    trained = [stage >= num_frozen for stage in range(num_stages)]
    expected = work_of(plan, trained, 1e-6, 6e-6)
    assert [rank.busy_s for rank in found.ranks] == pytest.approx(expected, rel=1e-9)
    idle = 1 - sum(expected) / (num_stages * found.step_time_s)
    assert found.bubble_fraction == pytest.approx(idle, abs=1e-9)


@pytest.mark.parametrize("send_us", [0, 2, 9])
def test_ranks_of_inference_are_busy_with_their_forwards(send_us):
    graph = replace(chain_graph(2, frozen=2), mode="inference")
    plan = make_plan(graph, even_bounds(2, 2), [1, 1], 2)
    plan = replace(plan, workload=replace(plan.workload, kind="inference"))
    cost = FixedCost(forward=3e-6, send=send_us * 1e-6)
    found = simulate_plan(plan, graph, small_cluster(), cost=cost)
    assert [rank.busy_s for rank in found.ranks] == pytest.approx([6e-6, 6e-6])
    assert [rank.communication_s for rank in found.ranks] == pytest.approx([2e-6 * send_us] * 2, abs=1e-11)


def test_frozen_stages_of_schedules_that_never_flush():
    plan, _ = endless_plan("pipedream", [1, 1, 1], 4)
    graph = chain_graph(3, frozen=1)
    plan = replace(plan, graph_hash=graph.content_hash)
    found = simulate_plan(plan, graph, small_cluster(), cost=FixedCost(forward=1e-6, backward=6e-6))
    assert [rank.busy_s for rank in found.ranks] == pytest.approx([4e-6, 28e-6, 28e-6], rel=1e-6)
