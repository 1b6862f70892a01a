"""Bounds against every method's plans, on shipped graphs, odd clusters and all kinds of choices, drawn at random."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost import CostModel
from meshwright.planner import Choices, Problem, evaluate_plan, list_shardings
from meshwright.planner.methods.grid import bound_grid
from meshwright.planner.methods.grid.grid_method import plans_of
from meshwright.spec import MeshwrightError, Offload, Optimizer, Workload, load_cluster, load_shipped_graph
from meshwright.spec.sharding import UNSHARDED
from tests.planner.searching import solve

GRAPHS = ("gpt-tiny", "llama-lora-tiny", "t5-tiny", "gnmt-tiny", "mixtral-tiny", "unet-tiny", "dlrm-tiny")
CLUSTERS = ("1xA100", "2xA100", "3xcpu", "2x2xA100", "6xL40S")
# ZeRO stages, and sizes of groups of replicas that share.
SHARING = (((0,), (0,)), ((1,), (0,)), ((3,), (0, 2)), ((0, 2), (0,)), ((0, 1, 2), (2,)))
SCHEDULES = (("gpipe", "1f1b"), ("zb-h1",), ("zb-v",), ("interleaved",), ("1f1b", "dualpipe"), ("1f1b", "pipedream"))


@st.composite
def problems(draw):
    graph = load_shipped_graph(draw(st.sampled_from(GRAPHS)))
    cluster = load_cluster(draw(st.sampled_from(CLUSTERS)))
    workload = Workload(
        global_batch=draw(st.sampled_from([1, 2, 6, 8])),
        precision=draw(st.sampled_from(["float32", "bfloat16"])),
        optimizer=Optimizer.named(draw(st.sampled_from(["adamw", "sgd"]))),
    )
    zero, shard_sizes = draw(st.sampled_from(SHARING))
    return Problem(
        graph_for=lambda _: graph,
        cluster=cluster,
        workload=workload,
        cost=CostModel(cluster=cluster, precision=workload.precision),
        choices=Choices(
            zero=zero,
            shard_sizes=shard_sizes,
            recompute=draw(st.sampled_from([("none",), ("full",)])),
            offload=draw(st.sampled_from([(Offload(),), (Offload(), Offload(optimizer="host"))])),
            schedules=draw(st.sampled_from(SCHEDULES)),
            shardings=draw(st.sampled_from([(UNSHARDED,), list_shardings(tensor=(1, 2))])),
            num_devices=draw(st.sampled_from([(), (1,)])),
        ),
    )


@pytest.mark.long
@settings(max_examples=12, deadline=None)
@given(problems())
def test_no_method_beats_the_bound(problem):
    found = []
    for method in ("slicing", "grid", "pipedream"):
        try:
            found.append(solve(problem, method, max_plans=4))
        except MeshwrightError:
            continue
    best_s = min((plans.best.step_time_s for plans in found), default=0.0)
    assert all(plans.bound_s <= best_s for plans in found)
    for plans in found:
        assert not any(problem.objection(item.plan) for item in plans.ranked)


@settings(max_examples=12, deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_no_configuration_beats_its_bounds(problem, random):
    try:
        sheets = bound_grid(problem).sheets
    except MeshwrightError:
        return
    for sheet in sheets:
        sheet.refine()
    rows = [(sheet, row) for sheet in sheets for row in range(len(sheet.seconds))]
    for sheet, row in random.sample(rows, min(len(rows), 6)):
        try:
            items = [
                evaluate_plan(plan, problem.graph_for(1), problem.cluster, problem.cost)
                for plan in plans_of(problem, sheet.configuration(row))
            ]
        except MeshwrightError:
            continue
        for item in items:
            assert sheet.seconds[row] <= item.step_time_s, item.plan.describe()
            assert sheet.bytes[row] <= max(item.peak_memory_bytes), item.plan.describe()
