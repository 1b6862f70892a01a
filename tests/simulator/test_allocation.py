"""A rank's memory op by op, in the order of its program: as the simulator has it, and what an allocator makes of it."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from meshwright.cost.memory import SharedUnit, SharedUnits, backend_of, weigh_stage
from meshwright.program import build_program, gradient_buckets
from meshwright.program.stage_transfers import RECEIVE_LOOKAHEAD
from meshwright.simulator import allocate_rank, simulate_plan
from meshwright.simulator.rank_allocation import MAX_VISITS, repeat_free, trace_rank
from meshwright.simulator.stage_bytes import MAX_GRADIENT_SENDS, compute_orders
from meshwright.simulator.state_shards import find_shards
from meshwright.spec import (
    GradientExchange,
    Opcode,
    Workload,
    load_cluster,
    load_shipped_graph,
    shipped_graphs,
    slice_graph,
)
from meshwright.spec.memory import BUCKETS, GRADIENTS, OPTIMIZER, WORKSPACE
from tests.graphs import make_plan
from tests.marks import left_to_ci

MODELS = [name for name in shipped_graphs() if name.endswith("-tiny")]


def plan_of(graph, num_stages, schedule, microbatches=4, replicas=1, size=1):
    layers = len(graph.layers)
    cuts = [layers * stage // num_stages for stage in range(num_stages + 1)]
    bounds, ranks = list(itertools.pairwise(cuts)), [replicas] * num_stages
    return make_plan(graph, bounds, ranks, microbatches, schedule=schedule, microbatch_size=size)


def passes(program, rank):
    return [(opcode != Opcode.FORWARD, microbatch) for opcode, _, microbatch in compute_orders(program)[rank].tolist()]


def test_the_order_is_that_of_the_schedule_and_repeats_are_left_out():
    graph = load_shipped_graph("gpt-tiny")
    program = build_program(plan_of(graph, 2, "1f1b", microbatches=8), graph)
    order = passes(program, 0)
    assert order[:6] == [(False, 0), (False, 1), (True, 0), (False, 2), (True, 1), (False, 3)]
    kept = [(False, 0), (False, 1), (True, 0), (False, 2), (True, 1), (True, 2)]
    assert repeat_free(order) == kept
    pipe = passes(build_program(plan_of(graph, 2, "gpipe", microbatches=8), graph), 0)
    assert repeat_free(pipe) == pipe


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_microbatches_in_flight_are_held_by_what_they_keep(schedule):
    graph = load_shipped_graph("gpt-tiny")
    plan = plan_of(graph, 3, schedule)
    cluster = load_cluster("3xcpu")
    peak = allocate_rank(plan, graph, cluster, 1).peak
    # Stage 1 holds blocks 1 and 2, as saved activations of each microbatch in flight: two in 1F1B, all four in GPipe.
    each = weigh_stage(graph, slice_graph(graph, plan.bounds)[1], 1, plan.workload).saved_bytes
    in_flight = {"1f1b": 2, "gpipe": 4}[schedule]
    assert 0.9 * in_flight * each <= peak.parts["saved activations"] <= in_flight * each


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("schedule", ["1f1b", *left_to_ci("gpipe")])
@pytest.mark.matrix
def test_the_simulators_peak_is_that_of_the_walk(name, schedule):
    """One stage to the byte; more of them but for messages that come early or leave late."""
    graph = load_shipped_graph(name)
    size = graph.batch_size or 1
    for num_stages, replicas, rounds in itertools.product((1, 2, 3), (1, 2), (1, 2, 5)):
        if num_stages > len(graph.layers):
            continue
        plan = plan_of(graph, num_stages, schedule, rounds * replicas, replicas, size)
        cluster = load_cluster(f"{plan.num_ranks}xcpu")
        stages = slice_graph(graph, plan.bounds)
        for rank, use in enumerate(simulate_plan(plan, graph, cluster).memory):
            walked = allocate_rank(plan, graph, cluster, rank).peak
            stage = stages[plan.stages_of(rank)[0]]
            entering = [(item.forward_bytes(graph, size), item.backward_bytes(graph, size)) for item in stage.incoming]
            leaving = [item.backward_bytes(graph, size) for item in stage.outgoing]
            # While one computation runs, the messages of two more may have begun, beside those of its own.
            early = (1 + RECEIVE_LOOKAHEAD) * (sum(map(sum, entering)) + sum(leaving))
            # Gradients that were sent are held for a while.
            early += MAX_GRADIENT_SENDS * sum(gradient for _, gradient in entering)
            assert 0 <= use.total_bytes - walked.num_bytes <= early, (num_stages, replicas, rounds, rank)
            if num_stages == 1:
                assert use.parts == walked.parts
                assert use.owner == walked.owner


def test_a_gpu_reserves_more_than_it_allocates():
    graph = load_shipped_graph("gpt2-small")
    cluster = load_cluster("2xA100")
    assert backend_of(cluster.device_kind(0)) == "cuda"
    plan = plan_of(graph, 2, "1f1b")
    found = allocate_rank(plan, graph, cluster, 1)
    assert found.peak.num_bytes <= found.allocated_bytes <= found.reserved_bytes
    assert found.explain().startswith("Op by op, rank 1 is fullest in the ")


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


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_allocator_is_followed_with_a_ranks_part_of_the_states(zero):
    """Whole ones fill the blocks that activations left, and later activations find no room."""
    graph = load_shipped_graph("gpt2-small")
    plan = replace(plan_of(graph, 1, "1f1b", 16, replicas=8, size=2), exchange=GradientExchange(zero=zero))
    (stage,) = slice_graph(graph, plan.bounds)
    shards = find_shards(plan, 0, load_cluster("8xH100"))
    events = trace_rank(plan, graph, stage, gradient_buckets(graph, plan), [(False, 0), (True, 0)], "cuda", shards)
    taken = events.num_bytes[(events.part == OPTIMIZER) & (events.num_bytes > 0)].sum()
    counters = 4 * len(graph.parameters)
    assert taken == pytest.approx(8 * graph.num_parameters() / 8 + counters, rel=1e-3)
    # Units are scattered: their gradients are whole at no time.
    gradients = events.num_bytes[np.isin(events.part, (GRADIENTS, BUCKETS))].cumsum().max()
    assert (gradients < 4 * graph.num_parameters() / 2) == (zero >= 2)


def test_parts_of_gradients_are_as_wide_as_the_master_weights():
    """FSDP2 casts a rank's part of a sum to the type of its parameters: nothing is widened in the optimizer's step."""
    graph = load_shipped_graph("gpt2-small")
    (stage,) = slice_graph(graph, [(0, len(graph.layers))])
    workload = Workload(global_batch=2, precision="mixed-bf16-gradients")
    root = SharedUnit(0, len(graph.ops) - 1, graph.parameters, 0, 2, 2)
    for shared, widened in ((None, 4 * graph.num_parameters()), (SharedUnits(root, (), stay_gathered=True), 0)):
        phases = weigh_stage(graph, stage, 2, workload, device="cuda", shared=shared).phases
        assert phases.optimizer.most[WORKSPACE] == widened
