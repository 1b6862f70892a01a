"""Stages on parallel branches: who feeds whom, and how much has to be under way."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.program import build_program, max_in_flight, num_active, picture_schedule
from meshwright.simulator import simulate_plan
from meshwright.spec import Plan, PlanError, check_plan, decode_document, encode_document, with_branches
from meshwright.spec.schedules import ASYNCHRONOUS_SCHEDULES
from tests.graphs import chain_graph, even_bounds, make_plan
from tests.program.check import check_program
from tests.simulator.plans import FixedCost, small_cluster

# Layers 1 and 2 both read layer 0, layer 3 reads both.
DIAMOND = {"reads": {2: 0}, "skips": ((1, 3),)}


def diamond(num_microbatches=8, replicas=(1, 1, 1, 1), **settings):
    graph = chain_graph(4, **DIAMOND)
    plan = make_plan(graph, even_bounds(4, 4), list(replicas), num_microbatches, **settings)
    return plan, graph


def test_branches_are_found_and_written_down():
    plan, graph = diamond()
    found = with_branches(plan, graph)
    assert [stage.feeds for stage in found.stages] == [(1, 2), (3,), (3,), ()]
    assert [num_active(found, stage) for stage in range(4)] == [3, 2, 2, 1]
    assert [num_active(plan, stage) for stage in range(4)] == [4, 3, 2, 1]
    check_plan(found, graph)
    assert decode_document(Plan, encode_document(found), "plan") == found


def test_a_chain_stays_one_even_with_skips():
    graph = chain_graph(4, skips=((0, 2), (0, 3)))
    plan = make_plan(graph, even_bounds(4, 4), [1, 1, 1, 1], 8)
    assert with_branches(plan, graph) is plan


def test_replicas_count_along_the_longest_way():
    plan, graph = diamond(replicas=(2, 1, 4, 1))
    found = with_branches(plan, graph)
    assert [num_active(found, stage) for stage in range(4)] == [4, 2, 2, 1]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_branches_run_beside_each_other(schedule):
    """(m + 3 - 1)(f + b), as of a pipeline of three stages, not of four."""
    plan, graph = diamond(schedule=schedule)
    cost = FixedCost(forward=3e-6, backward=5e-6)
    found = simulate_plan(with_branches(plan, graph), graph, small_cluster(), cost=cost)
    assert found.step_time_s == pytest.approx((8 + 3 - 1) * 8e-6, rel=1e-6)


def test_fewer_microbatches_are_held_for_the_same_step():
    plan, graph = diamond()
    cost = FixedCost(forward=3e-6, backward=5e-6)
    chain, branches = (
        simulate_plan(item, graph, small_cluster(), cost=cost) for item in (plan, with_branches(plan, graph))
    )
    assert branches.step_time_s == pytest.approx(chain.step_time_s, rel=1e-6)
    assert branches.peak_memory_bytes[0] < chain.peak_memory_bytes[0]


@given(
    replicas=st.lists(st.sampled_from([1, 2, 4]), min_size=4, max_size=4),
    rounds=st.integers(1, 3),
    schedule=st.sampled_from(["gpipe", "1f1b", *ASYNCHRONOUS_SCHEDULES]),
)
def test_programs_of_branches_finish_and_hold_what_they_should(replicas, rounds, schedule):
    replicas = replicas[:1] * 4 if schedule == "hetpipe" else replicas
    plan, graph = diamond(num_microbatches=16 * rounds, replicas=replicas)
    plan = replace(with_branches(plan, graph), schedule=schedule)
    check_program(build_program(plan, graph))
    if schedule != "gpipe":
        for stage in range(4):
            assert max_in_flight(plan, stage) == min(num_active(plan, stage), 16 * rounds // replicas[stage]) or (
                plan.is_asynchronous
            )


def test_the_picture_shows_branches_beside_each_other():
    plan, graph = diamond(num_microbatches=4)
    timeline = picture_schedule(with_branches(plan, graph))
    starts = [timeline.start_ps[timeline.stage == stage].tolist() for stage in (1, 2)]
    assert starts[0] == starts[1]


def test_other_edges_than_those_of_the_graph_are_refused():
    plan, graph = diamond()
    stages = tuple(replace(stage, feeds=(index + 1,)) for index, stage in enumerate(plan.stages[:-1]))
    wrong = replace(plan, stages=(*stages, plan.stages[-1]))
    with pytest.raises(PlanError, match=r"\[\[1\], \[2\], \[3\], \[\]\], but by the graph they feed \[\[1, 2\], "):
        check_plan(wrong, graph)


@pytest.mark.parametrize("target", [0, 1, 9])
def test_stages_feed_later_ones_only(target):
    plan, _ = diamond()
    stages = (plan.stages[0], replace(plan.stages[1], feeds=(target,)), *plan.stages[2:])
    with pytest.raises(PlanError, match=rf"Stage 1 feeds stages \[{target}\]; expected later ones, up to 3"):
        replace(plan, stages=stages)
