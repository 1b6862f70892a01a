"""Answers: they are those of the planner and simulator, whatever was asked before."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost import CostModel
from meshwright.planner import evaluate_plan
from meshwright.playground.controls import base_cluster, scenario_cost
from meshwright.playground.service import answer_data, pinned_data
from meshwright.spec import MeshwrightError, Plan, decode_document
from tests.marks import examples
from tests.playground.examples import let_hosts_issue_at_once, make_bench, make_state

STATES = st.builds(
    make_state,
    model=st.sampled_from(["chain", "tied"]),
    kind=st.sampled_from(["A100", "H100", "cpu"]),
    num_nodes=st.integers(1, 3),
    devices_per_node=st.integers(1, 4),
    num_nics=st.integers(0, 2),
    num_stages=st.integers(1, 5),
    microbatch_size=st.sampled_from([1, 2, 4, 8]),
    layout=st.sampled_from(["stage-major", "replica-major", "reversed"]),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    precision=st.sampled_from(["float32", "bfloat16"]),
    optimizer=st.sampled_from(["adamw", "sgd"]),
    overlap=st.booleans(),
    slow_rank=st.integers(0, 3),
    slowdown=st.sampled_from([1.0, 2.0]),
    nic_slowdown=st.sampled_from([1.0, 3.0]),
    memory_gib=st.sampled_from([0.0, 0.001]),
)
BENCH = make_bench()


@settings(max_examples=examples(40))
@given(STATES)
def test_an_answer_is_what_the_planner_says_of_its_plan(state):
    try:
        answer = BENCH.answer(state)
    except MeshwrightError:
        return
    cost = scenario_cost(state, CostModel(cluster=base_cluster(state, {}), precision=state.precision))
    fresh = evaluate_plan(answer.plan, answer.graph, cost.cluster, cost)
    assert answer.ranked == fresh
    assert answer_data(answer)["figures"]["step_time_s"] == fresh.step_time_s


def test_the_same_state_is_answered_once():
    assert BENCH.answer(make_state()) is BENCH.answer(make_state())


def test_data_of_an_answer_is_plain_json_with_the_plan_in_it():
    answer = BENCH.answer(make_state(num_stages=3, slowdown=2.0))
    data = json.loads(json.dumps(answer_data(answer), allow_nan=False))
    assert data["status"] == "fits"
    assert decode_document(Plan, data["document"]["documents"]["plan.json"], "plan") == answer.plan
    assert data["layers"]["cuts"] == list(answer.balanced) == [4, 8]
    assert "rank 0 2× slower" in data["document"]["results"][0]["explanation"]


def test_too_little_memory_is_told_with_the_rank_its_owner_and_remedies():
    state = make_state(
        memory_gib=0.001,
        schedule="gpipe",
        num_stages=2,
        cuts=(1,),
        replicas=(1,),
        global_batch=65536,
        microbatch_size=32,
    )
    data = answer_data(BENCH.answer(state))
    assert data["status"] == "too large"
    for words in (
        "Does not fit: rank 1",
        "more than its 0 B",
        "microbatches smaller than 32",
        "1f1b",
        "more stages",
        "balanced cuts",
    ):
        assert words in data["message"]
    assert data["document"]["results"][0]["timelines"]


def test_the_pinned_state_says_who_is_faster():
    fast, slow = BENCH.answer(make_state()), BENCH.answer(make_state(slowdown=100.0))
    assert "loses" in pinned_data(slow, fast)["difference"]
    assert "gains" in pinned_data(fast, slow)["difference"]
    assert "as fast" in pinned_data(fast, fast)["difference"]


def test_cost_models_of_scenarios_are_not_mixed_up(monkeypatch):
    let_hosts_issue_at_once(monkeypatch)
    bench = make_bench()
    states = [make_state(**changes) for changes in ({}, {"slowdown": 2.0}, {"nic_slowdown": 9.0}, {"kind": "H100"})]
    first = [bench.answer(state).simulation.step_time_s for state in states]
    for _ in range(20):
        bench.answer(make_state(slowdown=2.0, slow_rank=_ % 8, global_batch=64 + 2 * _))
    assert [bench.answer(state).simulation.step_time_s for state in states] == first
    assert len(set(first)) >= 3
    assert pytest.approx(first[0]) == make_bench().answer(replace(states[0])).simulation.step_time_s
