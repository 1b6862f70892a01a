"""ByteScheduler: parts, priorities, credit, and an exchange that goes on into the next step."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.program import ReadyPart, build_program, gradient_buckets, order_parts
from meshwright.simulator import estimate_program, schedule_exchange, simulate_plan, simulate_program
from meshwright.spec import GradientExchange, Opcode, PlanError
from tests.graphs import chain_graph
from tests.marks import examples
from tests.program.check import check_program
from tests.simulator.exchanges import START_S, even_machines, layered_plan, simplified
from tests.simulator.plans import FixedCost, small_cluster

MIB = 2**20
PARTS = st.lists(st.tuples(*[st.integers(0, 30)] * 2, st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12)


@settings(max_examples=examples(200))
@given(rows=PARTS, credit=st.integers(0, 25))
def test_the_most_urgent_ready_part_is_admitted_while_credit_is_left(rows, credit):
    parts = [
        ReadyPart(index=index, stage=0, urgency=urgency, ready_ps=ready, num_bytes=size, duration_ps=duration)
        for index, (urgency, ready, size, duration) in enumerate(rows)
    ]
    admitted = order_parts(parts, credit)
    assert sorted(index for _, index in admitted) == list(range(len(parts)))
    free_ps, under_way, waiting, last = 0, [], set(range(len(parts))), 0
    for now, index in admitted:
        part = parts[index]
        assert last <= now >= part.ready_ps
        in_flight = sum(size for end, size in under_way if end > now)
        assert in_flight + part.num_bytes <= max(credit, part.num_bytes)
        ready = [parts[other] for other in waiting if parts[other].ready_ps <= now]
        assert min((other.urgency, other.index) for other in ready) == (part.urgency, index)
        # It could not have been admitted before: something was under way, more urgent, or it was not ready.
        if now > part.ready_ps:
            assert any(end == now for end, _ in under_way) or last == now
        waiting.discard(index)
        free_ps = max(free_ps, now) + part.duration_ps
        under_way.append((free_ps, part.num_bytes))
        last = now


def step_us(order, sizes, forward, backward, num_layers, num_steps=12):
    """Two ranks' step by a recurrence: parts (layer, µs) leave in one order, forwards wait for their layer alone."""
    updated, computed, exchanged, ends = [0] * num_layers, 0, 0, []
    for _ in range(num_steps):
        for i in range(num_layers):
            computed = max(computed, updated[i]) + forward
        ready = [0] * num_layers
        for i in reversed(range(num_layers)):
            ready[i] = computed = computed + backward
        ends.append(computed)
        for layer, part in order:
            exchanged = updated[layer] = max(exchanged, ready[layer]) + sizes[layer][part]
    return ends[-1] - ends[-2]


@settings(max_examples=examples(40))
@given(
    num_layers=st.integers(1, 5),
    forward=st.integers(1, 9),
    backward=st.integers(1, 9),
    moving=st.integers(1, 20),
    num_parts=st.integers(1, 3),
    seed=st.randoms(use_true_random=False),
)
def test_the_next_forward_waits_for_its_own_layer_alone(num_layers, forward, backward, moving, num_parts, seed):
    graph = chain_graph(num_layers)
    elements = 4 * 4
    plan = layered_plan(graph, 2, across_steps=True, bucket_bytes=1, partition_bytes=4 * -(-elements // num_parts))
    # Buckets are numbered from the last layer on.
    parts = [(num_layers - 1 - k // num_parts, k % num_parts) for k in range(num_layers * num_parts)]
    sequence = list(range(len(parts)))
    seed.shuffle(sequence)
    plan = replace(plan, exchange=replace(plan.exchange, sequence=tuple(sequence)))
    cost = FixedCost(forward=forward * 1e-6, backward=backward * 1e-6, all_reduce=moving * 1e-6)
    result = simulate_plan(plan, graph, small_cluster(), cost=cost)
    order = [parts[index] for index in sequence]
    expected = step_us(order, [[moving] * num_parts] * num_layers, forward, backward, num_layers)
    assert result.step_time_s == pytest.approx(expected * 1e-6, abs=1e-12)


@pytest.mark.parametrize("tied", [False, True])
def test_every_byte_once_in_one_order_and_no_forward_before_its_parameters(tied):
    graph = chain_graph(4, width=16, tied=tied)
    cluster = small_cluster(num_nodes=3, devices=1)
    plan = layered_plan(graph, 3, num_microbatches=6, across_steps=True, bucket_bytes=2000, partition_bytes=300)
    cost = FixedCost(cluster=cluster, all_reduce=2e-6, optimizer=1e-6)
    plan = schedule_exchange(plan, graph, cluster, credit_bytes=600, cost=cost)
    assert sorted(plan.exchange.sequence) == list(range(len(plan.exchange.sequence)))
    assert list(plan.exchange.sequence) != sorted(plan.exchange.sequence)
    program = build_program(plan, graph)
    check_program(program)
    costs = estimate_program(program, plan, graph, cost)
    timeline = simulate_program(program, costs, 3)
    ranks = np.array([track.rank for track in timeline.tracks])[timeline.track]
    held = sum(bucket.num_bytes for bucket in gradient_buckets(graph, plan))
    orders = []
    for rank in range(3):
        mine = np.flatnonzero(ranks == rank)
        rows = {kind: mine[timeline.opcode[mine] == kind] for kind in Opcode}
        sums = rows[Opcode.ALL_REDUCE]
        orders.append(timeline.peer[sums].tolist())
        # Three repetitions and the prologue: four steps, the last of which is updated in the epilogue.
        assert timeline.num_bytes[sums].sum() == 4 * held
        for stage in range(4):
            of_stage = {kind: ids[timeline.stage[ids] == stage] for kind, ids in rows.items()}
            updates, forwards = of_stage[Opcode.OPTIMIZER_STEP], of_stage[Opcode.FORWARD].reshape(4, 2)
            assert len(updates) == 4
            assert (timeline.start_ps[forwards[1:, 0]] >= timeline.end_ps[updates[:3]]).all()
            assert (timeline.end_ps[of_stage[Opcode.BACKWARD].reshape(4, 2)[:, 1]] < timeline.start_ps[updates]).all()
            parts = sums[timeline.stage[sums] == stage].reshape(4, -1)
            # A parameter that two stages share is summed with the first.
            assert parts.size or (tied and stage == 3)
            if parts.size:
                assert (timeline.end_ps[parts].max(axis=1) <= timeline.start_ps[updates]).all()
    assert orders[0] == orders[1] == orders[2] == list(plan.exchange.sequence) * 4


@pytest.mark.parametrize(
    ("name", "gains"),
    [
        ("vgg16", (1.11, 1.28, 1.00)),
        ("resnet50", (1.00, 1.00, 1.00)),
        ("gpt2-small", (1.11, 1.05, 1.00)),
        ("gpt2-small untied", (1.07, 1.17, 1.00)),
    ],
)
def test_gains_over_whole_tensors_first_in_first_out(name, gains):
    """An event simulation of one link, 300 ms of computation (a third of it forward) and 100 µs per message.

    Source: our own study of 2026-11-20 at 1.25, 3.1 and 12.5 GB/s; a sum over many machines moves two bytes per byte,
    one of two machines one, so that the link is half as fast here.
    """
    graph, plan, flops_per_s = simplified(name)
    for bytes_per_s, expected in zip((1.25e9, 3.1e9, 12.5e9), gains, strict=True):
        cluster = even_machines(2, bytes_per_s / 2, latency_s=START_S / 2, flops_per_s=flops_per_s)
        whole = replace(plan, exchange=GradientExchange(bucket_bytes=1, across_steps=True))
        baseline = simulate_plan(whole, graph, cluster)
        steps = [baseline.step_time_s]
        for size in (8 * MIB, 64 * MIB):
            exchange = GradientExchange(bucket_bytes=size, partition_bytes=size, across_steps=True)
            ordered = schedule_exchange(replace(plan, exchange=exchange), graph, cluster)
            steps.append(simulate_plan(ordered, graph, cluster).step_time_s)
        assert baseline.step_time_s / min(steps) == pytest.approx(expected, rel=0.02)
        # No order beats what must be computed, nor what must move.
        rank = baseline.ranks[0]
        assert min(steps) >= rank.forward_s + rank.backward_s
        moved = sum(bucket.num_bytes for bucket in gradient_buckets(graph, plan))
        assert min(steps) >= moved / (bytes_per_s / 2)


def test_a_sequence_of_other_parts_is_refused():
    graph = chain_graph(3)
    plan = layered_plan(graph, 2, sequence=(0, 1, 1))
    with pytest.raises(PlanError, match="expected each of the parts 0 to 2 once"):
        build_program(plan, graph)
    with pytest.raises(PlanError, match="partition_bytes is -1"):
        GradientExchange(partition_bytes=-1)
    with pytest.raises(PlanError, match="it exchanges parameters across steps already"):
        GradientExchange(zero=1, across_steps=True)
