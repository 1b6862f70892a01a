"""A rank's memory op by op: in the order of its program, and beside the simulator's quick figure."""

from __future__ import annotations

import itertools

import pytest

from meshwright.program import build_program
from meshwright.simulator import allocate_rank, simulate_plan
from meshwright.simulator.allocation import MAX_VISITS, compute_order, has_caching_allocator, repeat_free
from meshwright.spec import load_cluster, load_shipped_graph
from meshwright.spec.shipped import shipped_graphs
from tests.graphs import make_plan

# The quick figure leaves out what the optimizer's step copies of a large table (dlrm) and what one op's backward makes
# of many weights at once (gnmt).
BEYOND = ("dlrm-tiny", "gnmt-tiny")
MODELS = [name for name in shipped_graphs() if name.endswith("-tiny") and name not in BEYOND]


def plan_of(graph, num_stages, schedule, microbatches=4):
    layers = len(graph.layers)
    cuts = [layers * stage // num_stages for stage in range(num_stages + 1)]
    return make_plan(graph, list(itertools.pairwise(cuts)), [1] * num_stages, microbatches, schedule=schedule)


def test_the_order_is_that_of_the_schedule_and_repeats_are_left_out():
    graph = load_shipped_graph("gpt-tiny")
    program = build_program(plan_of(graph, 2, "1f1b", microbatches=8), graph)
    order = compute_order(program, 0)
    assert order[:6] == [(False, 0), (False, 1), (True, 0), (False, 2), (True, 1), (False, 3)]
    assert repeat_free(order) == [(False, 0), (False, 1), (True, 0), (False, 2), (True, 1), (True, 2)]
    pipe = compute_order(build_program(plan_of(graph, 2, "gpipe", microbatches=8), graph), 0)
    assert repeat_free(pipe) == pipe


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_microbatches_in_flight_are_held_by_what_they_keep(schedule):
    graph = load_shipped_graph("gpt-tiny")
    plan = plan_of(graph, 3, schedule)
    cluster = load_cluster("3xcpu")
    peak = allocate_rank(plan, graph, cluster, 1).peak
    # Stage 1 holds blocks 1 and 2, as saved activations of each microbatch in flight: two in 1F1B, all four in GPipe.
    quick = simulate_plan(plan, graph, cluster).memory[1].parts
    in_flight = {"1f1b": 2, "gpipe": 4}[schedule]
    assert quick["saved activations"] % in_flight == 0
    assert peak.parts["saved activations"] == pytest.approx(quick["saved activations"], rel=0.2)
    assert peak.parts["parameters"] == quick["parameters"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_simulators_figure_is_above_and_near(name, schedule):
    graph = load_shipped_graph(name)
    plan = plan_of(graph, min(2, len(graph.layers)), schedule)
    cluster = load_cluster(f"{plan.num_ranks}xcpu")
    for rank, quick in enumerate(simulate_plan(plan, graph, cluster).peak_memory_bytes):
        found = allocate_rank(plan, graph, cluster, rank)
        assert found.reserved_bytes is None
        assert 0.4 * quick < found.allocated_bytes < 1.05 * quick, (name, rank, found)


def test_a_gpu_reserves_more_than_it_allocates():
    graph = load_shipped_graph("gpt2-small")
    cluster = load_cluster("2xA100")
    assert has_caching_allocator(cluster.device_kind(0))
    plan = plan_of(graph, 2, "1f1b")
    found = allocate_rank(plan, graph, cluster, 1)
    assert found.peak.num_bytes <= found.allocated_bytes <= found.reserved_bytes
    assert found.explain().startswith("Op by op, rank 1 allocates ")
    assert "reserves" in found.explain()


def test_what_cannot_be_followed_is_none():
    graph = load_shipped_graph("gpt-tiny")
    names = ("name", "tensors", "ops", "layers", "inputs", "outputs")
    without_loss = type(graph)(**{name: getattr(graph, name) for name in names})
    cluster = load_cluster("1xcpu")
    assert allocate_rank(plan_of(without_loss, 1, "1f1b"), without_loss, cluster, 0) is None
    # GPipe holds all microbatches at once: too many ops to follow one by one; 1F1B holds two.
    many = MAX_VISITS // len(graph.ops)
    assert allocate_rank(plan_of(graph, 1, "gpipe", many), graph, cluster, 0) is None
    assert allocate_rank(plan_of(graph, 1, "1f1b", many), graph, cluster, 0) is not None
