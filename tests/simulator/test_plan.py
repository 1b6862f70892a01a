"""Plans with closed forms: GPipe, 1F1B, data parallel; memory in flight; utilisation. Times in whole picoseconds."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost import StageMemory
from meshwright.cost.memory import count_phases
from meshwright.program import build_program, gradient_buckets
from meshwright.simulator import estimate_program, simulate_plan, simulate_program
from meshwright.spec import GradientExchange, Opcode, PlanError, slice_graph
from meshwright.spec.memory import SAVED, SENT
from tests.graphs import chain_graph, even_bounds, make_plan
from tests.marks import examples
from tests.simulator.plans import FixedCost, small_cluster

US = 1_000_000  # ps


def free_transfers(program, costs):
    """The same costs with transfers that take no time and no link."""
    duration = costs.duration_ps.copy()
    sections = {}
    for name, section in program.sections():
        part = getattr(costs, name)
        moves = np.isin(section.opcode, [Opcode.SEND_ACTIVATION, Opcode.SEND_GRADIENT])
        duration[part.cost_class[moves]] = 0
        sections[name] = replace(part, route=np.full_like(part.route, -1))
    return replace(costs, duration_ps=duration, **sections)


@settings(max_examples=examples(60))
@given(
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    num_stages=st.integers(1, 8),
    num_microbatches=st.integers(1, 24),
    forward=st.integers(1, 9),
    backward=st.integers(1, 20),
)
def test_pipelines_with_free_communication(schedule, num_stages, num_microbatches, forward, backward):
    """(m + p - 1)(f + b), exactly."""
    graph = chain_graph(num_stages)
    plan = make_plan(graph, even_bounds(num_stages, num_stages), [1] * num_stages, num_microbatches, schedule=schedule)
    cost = FixedCost(forward=forward * 1e-6, backward=backward * 1e-6)
    program = build_program(plan, graph)
    timeline = simulate_program(program, free_transfers(program, estimate_program(program, plan, graph, cost)))
    expected = (num_microbatches + num_stages - 1) * (forward + backward) * US
    assert int(timeline.end_ps.max()) == expected


@settings(max_examples=examples(40))
@given(num_stages=st.integers(2, 7), num_microbatches=st.integers(1, 12), hop=st.integers(1, 3))
def test_gpipe_with_transfers_that_hide(num_stages, num_microbatches, hop):
    """Hops shorter than a computation show only while the pipeline fills and drains: 2 (p - 1) c more."""
    graph = chain_graph(num_stages)
    bounds = even_bounds(num_stages, num_stages)
    plan = make_plan(graph, bounds, [1] * num_stages, num_microbatches, schedule="gpipe")
    result = simulate_plan(plan, graph, small_cluster(), cost=FixedCost(send=hop * 1e-6))
    expected = (num_microbatches + num_stages - 1) * 8 * US + 2 * (num_stages - 1) * hop * US
    assert int(result.timeline.end_ps.max()) == expected
    assert result.step_time_s == pytest.approx(expected * 1e-12, abs=1e-15)
    busy = num_microbatches * 8e-6
    assert result.bubble_fraction == pytest.approx(1 - busy / result.step_time_s)


def test_transfers_over_one_nic_queue():
    """Two stages of two replicas on two nodes with one NIC each: the second replica's sends wait for the first's."""
    graph = chain_graph(2)
    plan = make_plan(graph, even_bounds(2, 2), [2, 2], 2, schedule="gpipe")
    cluster = small_cluster(num_nodes=2, devices=2)
    result = simulate_plan(plan, graph, cluster, cost=FixedCost(cluster=cluster, send=10e-6))
    timeline = result.timeline
    sends = timeline.opcode == Opcode.SEND_ACTIVATION
    assert timeline.end_ps[sends].tolist() == [13 * US, 23 * US]
    private = small_cluster(num_nodes=2, devices=2, num_nics=2)
    timeline = simulate_plan(plan, graph, private, cost=FixedCost(cluster=private, send=10e-6)).timeline
    assert timeline.end_ps[sends].tolist() == [13 * US, 13 * US]


def test_transfers_over_one_nic_share_it():
    """The same two sends at half the rate each, both in 20 µs; alone on a NIC nothing changes."""
    graph = chain_graph(2)
    plan = make_plan(graph, even_bounds(2, 2), [2, 2], 2, schedule="gpipe")
    for num_nics, end_us in ((1, 23), (2, 13)):
        cluster = small_cluster(num_nodes=2, devices=2, num_nics=num_nics)
        cost = FixedCost(cluster=cluster, send=10e-6)
        timeline = simulate_plan(plan, graph, cluster, cost=cost, contention="fair").timeline
        sends = timeline.opcode == Opcode.SEND_ACTIVATION
        assert timeline.start_ps[sends].tolist() == [3 * US, 3 * US]
        assert timeline.end_ps[sends].tolist() == [end_us * US, end_us * US]


@pytest.mark.parametrize("num_microbatches", [2, 4])
def test_filling_buckets_lengthens_the_first_backward_only(num_microbatches):
    """Four layers of 5 µs backward, a bucket each: filled (1 µs) one after the other; ready in the last backward."""
    graph = chain_graph(4)
    exchange = GradientExchange(bucket_bytes=4 * 4 * 4)
    plan = make_plan(graph, [(0, 4)], [2], num_microbatches, exchange=exchange)
    timeline = simulate_plan(plan, graph, small_cluster(), cost=FixedCost(fill=1e-6, all_reduce=1e-6)).timeline
    backwards = np.flatnonzero((timeline.opcode == Opcode.BACKWARD) & (timeline.track == timeline.track[0]))
    assert (timeline.end_ps - timeline.start_ps)[backwards].tolist() == [24 * US, 20 * US][: num_microbatches // 2]
    sums = np.sort(timeline.start_ps[timeline.opcode == Opcode.ALL_REDUCE])[::2]
    apart = 6 if num_microbatches == 2 else 5
    assert (sums - timeline.start_ps[backwards[-1]]).tolist() == [(1 + k) * apart * US for k in range(4)]


@pytest.mark.parametrize("overlap", [True, False])
def test_data_parallel_hides_buckets_behind_the_backward(overlap):
    """Four layers, a bucket each, ready every 5 µs from the last layer on; each sum takes 4 or 7 µs."""
    graph = chain_graph(4)
    layer_bytes = 4 * 4 * 4
    exchange = GradientExchange(bucket_bytes=layer_bytes, overlap=overlap)
    plan = make_plan(graph, [(0, 4)], [2], 2, exchange=exchange)
    assert len(gradient_buckets(graph, plan)) == 4
    computed = 4 * 3 + 4 * 5
    for sum_us, hidden in ((4, computed + 4), (7, 4 * 3 + 5 + 4 * 7)):
        cost = FixedCost(all_reduce=sum_us * 1e-6, optimizer=2e-6)
        result = simulate_plan(plan, graph, small_cluster(), cost=cost)
        expected = (hidden if overlap else computed + 4 * sum_us) + 2
        assert result.step_time_s == pytest.approx(expected * 1e-6, abs=1e-15)
        assert int(result.timeline.end_ps.max()) == expected * US
        exposed = expected - 2 - computed
        assert result.ranks[0].exchange_s == pytest.approx(4 * sum_us * 1e-6)
        assert result.ranks[1].exposed_exchange_s == pytest.approx(exposed * 1e-6)
        assert result.ranks[0].idle_s == pytest.approx(exposed * 1e-6)
        assert result.ranks[0].optimizer_s == pytest.approx(2e-6)


def test_later_microbatches_pay_for_accumulation_and_instructions_for_the_host():
    graph = chain_graph(2)
    plan = make_plan(graph, [(0, 1), (1, 2)], [1, 1], 3, schedule="gpipe")
    cost = FixedCost(accumulate=1e-6, overhead=0.5e-6)
    ranks = simulate_plan(plan, graph, small_cluster(), cost=cost).ranks
    # Each computation issues itself and its one transfer; the optimizer issues itself.
    for rank in ranks:
        assert rank.forward_s == pytest.approx(3 * (3e-6 + 1e-6))
        assert rank.backward_s == pytest.approx(3 * (5e-6 + 1e-6) + 2 * 1e-6)
        assert rank.optimizer_s == pytest.approx(0.5e-6)


MEMORY = StageMemory(
    parameter_bytes=1000,
    buffer_bytes=10,
    gradient_bytes=1000,
    optimizer_bytes=2000,
    saved_bytes=300,
    received_bytes=0,
    input_bytes=20,
    sent_bytes=40,
    phases=count_phases({SAVED: 300, SENT: 40}, gradient_bytes=1000, sent_bytes=0, workspace_bytes=7),
)


@pytest.mark.parametrize(("schedule", "in_flight"), [("gpipe", [6, 6, 6, 6]), ("1f1b", [4, 3, 2, 1])])
def test_memory_counts_microbatches_in_flight(schedule, in_flight):
    graph = chain_graph(4)
    plan = make_plan(graph, even_bounds(4, 4), [1] * 4, 6, schedule=schedule)
    cost = FixedCost(memory=MEMORY, send=1e-12)
    result = simulate_plan(plan, graph, small_cluster(), cost=cost)
    message = slice_graph(graph, plan.bounds)[0].outgoing[0].forward_bytes(graph, plan.microbatch_size)
    for rank, (memory, count) in enumerate(zip(result.memory, in_flight, strict=True)):
        parts = memory.parts
        assert parts["parameters"] + parts["buffers"] + parts["gradients"] + parts["optimizer states"] == 4010
        assert parts["saved activations"] == 300 * count
        assert parts["inputs"] == 20 * 6
        assert parts["workspace"] == 7
        # Activations of the microbatches in flight, and at most two that arrived early and one gradient.
        arrived = 0 if rank == 0 else count
        assert arrived * message <= parts["received"] <= (arrived + 3) * message
        assert memory.total_bytes == result.peak_memory_bytes[rank] == result.timeline.peak_memory_bytes[rank]
        assert memory.owner == "optimizer states"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_all_that_was_taken_is_given_back(schedule):
    graph = chain_graph(6, skips=((0, 4), (1, 5)), frozen=1, random=(2, 4), tied=False)
    plan = make_plan(graph, even_bounds(6, 3), [2, 1, 1], 4, schedule=schedule)
    result = simulate_plan(plan, graph, small_cluster(), num_steps=2)
    timeline = result.timeline
    for rank in range(4):
        series = timeline.memory_bytes[timeline.memory_rank == rank]
        always = ("parameters", "buffers", "inputs", "optimizer states", "gradient buckets", "received")
        resident = sum(result.memory[rank].parts[part] for part in always)
        # Gradients whose sending nobody waited for yet may stand beside it.
        assert resident <= series[-1] <= resident + result.memory[rank].parts["sent"]
        assert series[-1] == series.min()
        assert series.max() == timeline.peak_memory_bytes[rank] > resident


def test_buckets_have_buffers():
    graph = chain_graph(4)
    plan = make_plan(graph, [(0, 4)], [2], 2)
    parts = simulate_plan(plan, graph, small_cluster(), cost=FixedCost(memory=MEMORY)).memory[0].parts
    assert parts["gradient buckets"] == 4 * 4 * 4 * 4


def test_utilisation_is_flops_over_peak():
    graph = chain_graph(4, width=8)
    plan = make_plan(graph, even_bounds(4, 2), [1, 1], 4, microbatch_size=2)
    result = simulate_plan(plan, graph, small_cluster(), cost=FixedCost())
    flops = 4 * graph.flops(2)
    assert flops == 4 * 4 * 2 * (2 + 4) * 8 * 8
    assert result.mfu == pytest.approx(flops / (result.step_time_s * 2 * 1e9))
    assert result.hfu == result.mfu
    assert result.samples_per_s == pytest.approx(8 / result.step_time_s)


def test_a_steady_step_is_that_of_later_steps():
    """What is shown may be one step; the step time is the distance of later ones all the same."""
    graph = chain_graph(6)
    plan = make_plan(graph, even_bounds(6, 3), [1, 1, 1], 4)
    cost = FixedCost(optimizer=4e-6, send=2e-6)
    short, long = (simulate_plan(plan, graph, small_cluster(), cost=cost, num_steps=n) for n in (1, 8))
    assert int(short.timeline.step.max()) == 0
    assert long.timeline.step_seconds()[2:] == pytest.approx([short.step_time_s] * 6)
    for first, later in zip(short.ranks, long.ranks, strict=True):
        assert first.busy_s == pytest.approx(later.busy_s)
        assert first.exposed_communication_s == pytest.approx(later.exposed_communication_s)


def test_busy_and_idle_fill_the_step():
    graph = chain_graph(8)
    plan = make_plan(graph, even_bounds(8, 4), [2, 1, 1, 2], 6)
    result = simulate_plan(plan, graph, small_cluster(), cost=FixedCost(send=1e-6, all_reduce=3e-6, optimizer=1e-6))
    for rank in result.ranks:
        assert rank.busy_s + rank.idle_s == pytest.approx(result.step_time_s)
        assert rank.exposed_communication_s <= min(rank.idle_s, rank.communication_s) + 1e-15
    assert result.bubble_fraction == pytest.approx(
        1 - sum(rank.busy_s for rank in result.ranks) / (6 * result.step_time_s)
    )


def test_a_plan_for_more_devices_is_refused():
    graph = chain_graph(4)
    plan = make_plan(graph, even_bounds(4, 4), [3, 2, 2, 2], 3)
    with pytest.raises(PlanError, match="9 devices"):
        simulate_plan(plan, graph, small_cluster())


def test_inference_holds_a_microbatch_only_while_it_is_computed():
    """Without backwards the pipeline takes (m + p - 1) f, and memory does not grow with the microbatches."""
    graph = replace(chain_graph(4), mode="inference")
    held = replace(MEMORY, phases=count_phases({}, gradient_bytes=0, sent_bytes=0, workspace_bytes=300))
    peaks = []
    for count in (4, 16):
        plan = make_plan(graph, even_bounds(4, 4), [1] * 4, count)
        plan = replace(plan, workload=replace(plan.workload, kind="inference"))
        result = simulate_plan(plan, graph, small_cluster(), cost=FixedCost(send=1e-12, memory=held))
        assert int(result.timeline.end_ps.max()) == (count + 3) * 3 * US + 3
        peaks.append([item.parts["workspace"] for item in result.memory])
        assert all(item.parts["inputs"] == 20 * count for item in result.memory)
    assert peaks == [[300] * 4] * 2
