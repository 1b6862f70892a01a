"""What explains a step that is longer than predicted, and which rank is slow since when, on timelines made for it."""

from dataclasses import replace

import numpy as np
import pytest

from meshwright.report import explain_difference, explain_stragglers, find_stragglers
from meshwright.simulator import simulate_plan
from meshwright.spec import Opcode
from tests.graphs import chain_graph, even_bounds, make_plan
from tests.simulator.plans import fast_cluster

STEPS = 6
GRAPH = chain_graph(4)


def predicted(ranks):
    plan = make_plan(GRAPH, even_bounds(4, len(ranks)), ranks, 8)
    return simulate_plan(plan, GRAPH, fast_cluster("4xA100"), num_steps=STEPS).timeline


def stretched(timeline, factor, *, opcode, rank, since=0):
    """The same, measured, but for one rank's work of an opcode; what comes later moves."""
    ranks = np.array([stream.rank for stream in timeline.tracks])[timeline.track]
    chosen = (timeline.opcode == opcode) & (ranks == rank) & (timeline.step >= since)
    longer = ((timeline.end_ps - timeline.start_ps) * (factor - 1.0) * chosen).astype(np.int64)
    # Every span moves by all that came before it on any rank: late enough for all that wait.
    order = np.argsort(timeline.start_ps, kind="stable")
    moved = np.empty_like(longer)
    moved[order] = np.cumsum(longer[order]) - longer[order]
    return replace(
        timeline, origin="measured", start_ps=timeline.start_ps + moved, end_ps=timeline.end_ps + moved + longer
    )


@pytest.mark.parametrize("ranks", [[1, 1], [2], [2, 2]])
@pytest.mark.parametrize(("opcode", "words"), [(Opcode.BACKWARD, "backward"), (Opcode.FORWARD, "forward")])
def test_the_work_that_takes_longer_is_named(ranks, opcode, words):
    before = predicted(ranks)
    slow = sum(ranks) - 1
    said = explain_difference(before, stretched(before, 2.5, opcode=opcode, rank=slow))
    assert said.startswith(f"Largest difference: {words} of stage {len(ranks) - 1} on rank {slow}, ")


def test_a_link_is_named_where_computations_do_not_explain():
    before = predicted([1, 1])
    sends = [op for op in set(before.opcode.tolist()) if Opcode(op).name.startswith("SEND")]
    assert sends
    said = explain_difference(before, stretched(before, 400.0, opcode=Opcode.SEND_ACTIVATION, rank=0))
    assert "send activation of stage 0 on rank 0" in said


@pytest.mark.parametrize("since", [0, 2, 4])
@pytest.mark.parametrize("by_prediction", [True, False])
def test_a_slow_rank_is_found_with_its_step(since, by_prediction):
    before = predicted([4])
    after = stretched(before, 1.6, opcode=Opcode.BACKWARD, rank=2, since=since)
    (found,) = find_stragglers(after, before if by_prediction else None)
    assert (found.rank, found.opcode, found.since) == (2, Opcode.BACKWARD, since)
    assert found.ratio == pytest.approx(1.6, rel=0.01)
    (said,) = explain_stragglers([found], first_step=10)
    assert said == f"Rank 2 is slow: backward takes 1.60 times as long as elsewhere, since step {11 + since}."


def test_stages_of_unequal_work_are_no_stragglers():
    before = predicted([1, 2])
    assert find_stragglers(replace(before, origin="measured"), before) == []
    assert find_stragglers(replace(before, origin="measured")) == []


def test_replicas_with_unequal_shares_are_no_stragglers():
    plan = make_plan(GRAPH, even_bounds(4, 1), [2], 4)
    plan = replace(plan, stages=(replace(plan.stages[0], shares=(3, 1)),))
    before = simulate_plan(plan, GRAPH, fast_cluster("4xA100"), num_steps=STEPS).timeline
    assert find_stragglers(replace(before, origin="measured")) == []


def test_one_slow_step_and_what_was_over_in_time_are_none():
    before = predicted([4])
    assert find_stragglers(stretched(before, 3.0, opcode=Opcode.FORWARD, rank=1, since=STEPS - 1), before) == []
    assert find_stragglers(stretched(before, 1.15, opcode=Opcode.FORWARD, rank=1), before) == []
