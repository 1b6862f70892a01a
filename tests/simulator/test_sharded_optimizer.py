"""ZeRO-1: sums are scattered, each replica updates its part, parameters are gathered while the next step begins."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost import CostModel
from meshwright.program import build_program, gradient_buckets
from meshwright.simulator import estimate_program, simulate_plan
from meshwright.spec import GradientExchange, Opcode, PlanError, ProgramError
from tests.graphs import chain_graph, make_plan
from tests.marks import examples
from tests.program.check import check_program
from tests.simulator.exchanges import layered_plan
from tests.simulator.plans import FixedCost, small_cluster


def step_us(num_layers, forward, backward, moving, update, num_steps=12):
    """One rank's step by a recurrence over layers; sums and gathers take ``moving`` and go one after the other."""
    gathered, computed, exchanged, ends = [0] * num_layers, 0, 0, []
    for _ in range(num_steps):
        for i in range(num_layers):
            computed = max(computed, gathered[i]) + forward
        summed = [0] * num_layers
        for i in reversed(range(num_layers)):
            computed += backward
            exchanged = summed[i] = max(exchanged, computed) + moving
        for i in range(num_layers):
            computed = max(computed, summed[i]) + update
            exchanged = gathered[i] = max(exchanged, computed) + moving
        ends.append(exchanged)
    return ends[-1] - ends[-2]


@settings(max_examples=examples(40))
@given(
    num_layers=st.integers(1, 5),
    replicas=st.integers(2, 4),
    forward=st.integers(1, 9),
    backward=st.integers(1, 9),
    moving=st.integers(1, 20),
    update=st.integers(0, 4),
)
def test_gathers_overlap_with_the_next_forward(num_layers, replicas, forward, backward, moving, update):
    graph = chain_graph(num_layers)
    plan = layered_plan(graph, replicas, zero=1)
    cost = FixedCost(
        forward=forward * 1e-6, backward=backward * 1e-6, all_reduce=moving * 1e-6, optimizer=update * 1e-6
    )
    result = simulate_plan(plan, graph, small_cluster(), cost=cost)
    expected = step_us(num_layers, forward, backward, moving, update)
    assert result.step_time_s == pytest.approx(expected * 1e-6, abs=1e-12)


def test_every_bucket_is_scattered_once_and_gathered_once_on_every_rank():
    graph = chain_graph(5, tied=True)
    plan = layered_plan(graph, 3, num_microbatches=6, zero=1, bucket_bytes=1)
    program = build_program(plan, graph)
    check_program(program)
    body, buckets = program.body, gradient_buckets(graph, plan)
    assert not np.isin(Opcode.ALL_REDUCE, body.opcode)
    for index, stream in enumerate(program.streams):
        if stream.name == "exchange":
            rows = np.array(body.stream_range(index))
            sums, gathers = (rows[body.opcode[rows] == kind] for kind in (Opcode.REDUCE_SCATTER, Opcode.ALL_GATHER))
            assert sorted(body.peer[sums]) == sorted(body.peer[gathers]) == [bucket.index for bucket in buckets]
            assert body.num_bytes[sums].sum() == body.num_bytes[gathers].sum() == sum(b.num_bytes for b in buckets)
            # Those of the first layers are gathered first, for they are needed first.
            assert (np.diff(body.stage[gathers]) >= 0).all()
    # The first forward of a stage waits for its gathers of the step before, and nothing else does.
    waiting = body.late_instruction
    assert set(body.opcode[waiting]) == {Opcode.FORWARD}
    assert set(body.opcode[body.late_awaited]) == {Opcode.ALL_GATHER}
    assert (body.microbatch[waiting] < 3).all()


def test_states_and_the_update_are_those_of_one_part():
    graph, cluster = chain_graph(3, width=64), small_cluster(num_nodes=1, devices=4)
    plan = make_plan(graph, [(0, 3)], [4], 4)
    sharded = replace(plan, exchange=GradientExchange(zero=1))
    whole, part = (simulate_plan(each, graph, cluster) for each in (plan, sharded))
    states = whole.memory[0].parts["optimizer states"]
    assert part.memory[0].parts["optimizer states"] == -(-states // 4)
    kind, ids = cluster.device_kinds[0], tuple(i for i, t in enumerate(graph.tensors) if t.role == "parameter")
    cost = CostModel(cluster=cluster)
    full, shard = (cost.optimizer_seconds(graph, ids, plan.workload.optimizer, kind, num_shards=n) for n in (1, 4))
    assert part.ranks[0].optimizer_s - whole.ranks[0].optimizer_s == pytest.approx(shard - full, abs=2e-12)


def test_costs_are_those_of_the_two_collectives():
    graph, cluster = chain_graph(2, width=256), small_cluster(num_nodes=2, devices=2)
    plan = make_plan(graph, [(0, 2)], [4], 4, exchange=GradientExchange(zero=1))
    cost, program = CostModel(cluster=cluster), build_program(plan, graph)
    costs = estimate_program(program, plan, graph, cost)
    for opcode, op in ((Opcode.REDUCE_SCATTER, "reduce_scatter"), (Opcode.ALL_GATHER, "all_gather")):
        rows = np.flatnonzero(program.body.opcode == opcode)
        seconds = costs.duration_ps[costs.body.cost_class[rows]] / 1e12
        expected = [cost.collective_seconds(op, range(4), size) for size in program.body.num_bytes[rows].tolist()]
        assert seconds == pytest.approx(expected, abs=1e-12)


def test_what_takes_no_sharded_optimizer_says_so():
    graph = chain_graph(2)
    plan = make_plan(graph, [(0, 1), (1, 2)], [1, 1], 2, exchange=GradientExchange(zero=1))
    with pytest.raises(PlanError, match="asynchronous schedule"):
        replace(plan, schedule="pipedream")


def test_a_late_wait_for_nothing_is_refused():
    graph = chain_graph(2)
    program = build_program(layered_plan(graph, 2, zero=1), graph)
    body = replace(program.body, late_lag=np.zeros_like(program.body.late_lag))
    with pytest.raises(ProgramError, match="late waits"):
        replace(program, body=body)
