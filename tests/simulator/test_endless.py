"""Programs that never flush, simulated: against the oracle, closed forms of steady steps, memory."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.program import build_program
from meshwright.report.perfetto import pair_transfers
from meshwright.simulator import estimate_program, explain_step, simulate_plan, simulate_program
from meshwright.spec import Opcode
from meshwright.spec.schedules import ASYNCHRONOUS_SCHEDULES
from tests.marks import examples
from tests.program.endless_plans import endless_plan, endless_plans
from tests.simulator.oracle import Oracle
from tests.simulator.oracle_fair import FairOracle
from tests.simulator.plans import FixedCost, small_cluster
from tests.simulator.replicas import with_kinds


@pytest.mark.parametrize("oracle", [Oracle, FairOracle])
@settings(max_examples=examples(25))
@given(case=endless_plans(), num_steps=st.integers(1, 2), seconds=st.lists(st.integers(1, 9), min_size=6, max_size=6))
@pytest.mark.matrix
def test_programs_that_never_flush_equal_the_oracle(oracle, case, num_steps, seconds):
    plan, graph = case
    names = ("forward", "backward", "send", "all_reduce", "optimizer", "fill")
    all_seconds = {name: each * 1e-6 for name, each in zip(names, seconds, strict=True)}
    cost = FixedCost(cluster=small_cluster(num_nodes=4, devices=4), **all_seconds)
    program = build_program(plan, graph)
    costs = estimate_program(program, plan, graph, cost)
    contention = "queued" if oracle is Oracle else "fair"
    timeline = simulate_program(program, costs, num_steps, contention=contention)
    assert timeline.end_ps.tolist() == oracle(program, costs, num_steps).ends()


@pytest.mark.parametrize(
    ("schedule", "updates"), [("pipedream", 8), ("pipedream-vertical", 8), ("pipedream-2bw", 1), ("hetpipe", 8)]
)
def test_a_steady_step_is_as_long_as_its_busiest_stage(schedule, updates):
    """No bubble: M (f + b), and the updates; in 1F1B it is (M + p - 1) (f + b)."""
    plan, graph = endless_plan(schedule, [1, 1, 1, 1], 8)
    found = simulate_plan(plan, graph, small_cluster(), cost=FixedCost(forward=3e-6, backward=5e-6, optimizer=1e-6))
    # Transfers take 1 ps at the least.
    assert found.step_time_s == pytest.approx(8 * 8e-6 + updates * 1e-6, rel=1e-6)
    assert found.samples_per_s == pytest.approx(plan.workload.global_batch / found.step_time_s)
    assert [rank.busy_s for rank in found.ranks] == pytest.approx([found.step_time_s] * 4, rel=1e-6)
    assert found.bubble_fraction == pytest.approx(0, abs=1e-6)


def test_replicas_share_the_work():
    """The second stage takes a microbatch in 8 µs; the two replicas of the first one every 4."""
    plan, graph = endless_plan("pipedream", [2, 1], 8)
    found = simulate_plan(plan, graph, small_cluster(), cost=FixedCost(forward=3e-6, backward=5e-6))
    assert found.step_time_s == pytest.approx(8 * 8e-6, rel=1e-9)
    assert [rank.busy_s / found.step_time_s for rank in found.ranks] == pytest.approx([0.5, 0.5, 1.0])


def test_copies_take_time():
    plan, graph = endless_plan("pipedream", [1, 1], 4)
    found = simulate_plan(plan, graph, small_cluster(), cost=FixedCost(fill=2e-6))
    assert found.ranks[0].optimizer_s == pytest.approx(4 * 2e-6)
    assert found.ranks[1].optimizer_s == 0


@pytest.mark.parametrize(
    ("schedule", "copies"),
    [
        ("pipedream", [3, 2, 1, 0]),
        ("pipedream-vertical", [3, 3, 3, 3]),
        ("pipedream-2bw", [1, 1, 1, 1]),
        ("hetpipe", [3, 3, 3, 3]),
    ],
)
def test_memory_holds_the_copies_and_comes_back(schedule, copies):
    plan, graph = endless_plan(schedule, [1, 1, 1, 1], 8)
    cost = FixedCost()
    resident = estimate_program(build_program(plan, graph), plan, graph, cost).resident_bytes.sum(axis=1)
    found = simulate_plan(plan, graph, cost.cluster, cost=cost, num_steps=3)
    weights = 4 * 4 * 4
    assert [use.parts["stashed weights"] for use in found.memory] == [count * weights for count in copies]
    timeline = found.timeline
    for rank in range(plan.num_ranks):
        used = timeline.memory_bytes[timeline.memory_rank == rank]
        assert used[-1] == resident[rank]
        assert used.min() == resident[rank]


@pytest.mark.parametrize("schedule", ASYNCHRONOUS_SCHEDULES)
def test_the_timeline_counts_microbatches_on(schedule):
    plan, graph = endless_plan(schedule, [1, 1], 4)
    timeline = simulate_plan(plan, graph, small_cluster(), cost=FixedCost(), num_steps=3).timeline
    forwards = (timeline.opcode == Opcode.FORWARD) & (timeline.stage == 0)
    order = np.argsort(timeline.start_ps[forwards])
    assert timeline.microbatch[forwards][order].tolist() == list(range(5 * 4))
    assert set(timeline.step.tolist()) == {0, 1, 2}


def test_a_longer_simulation_finds_the_same_steady_step():
    """Transfers bound this one, and its steps differ in turn."""
    plan, graph = endless_plan("pipedream", [1, 1, 1, 1], 8)
    cost = FixedCost(forward=1e-6, backward=2e-6, send=4e-6)
    steps = [simulate_plan(plan, graph, cost.cluster, cost=cost, num_steps=count).step_time_s for count in (1, 60)]
    assert steps[0] == pytest.approx(steps[1], rel=0.02)


def test_the_critical_path_of_a_steady_step():
    plan, graph = endless_plan("pipedream", [1, 1], 4)
    found = explain_step(plan, graph, small_cluster(), cost=FixedCost(optimizer=1e-6))
    assert found.step_time_s == pytest.approx(4 * 9e-6)
    assert found.path.duration_s == pytest.approx(found.step_time_s)


def test_messages_that_arrive_in_a_later_step_are_paired():
    plan, graph = endless_plan("pipedream", [1, 1, 1], 4)
    timeline = simulate_plan(plan, graph, small_cluster(), cost=FixedCost(), num_steps=2).timeline
    partner = pair_transfers(timeline)
    moves = np.flatnonzero(np.isin(timeline.opcode, (2, 3, 4, 5)))
    assert (partner[moves] >= 0).all()
    assert (partner[partner[moves]] == moves).all()
    assert (timeline.microbatch[partner[moves]] == timeline.microbatch[moves]).all()
    assert (timeline.step[partner[moves]] != timeline.step[moves]).any()


@pytest.mark.parametrize(("staleness", "exposed"), [(0, 7e-6), (1, 0)])
def test_a_sum_of_a_wave_hides_behind_the_next_waves(staleness, exposed):
    """A merge takes two passes over the weights, and waits for the sum of its own wave or of an earlier one."""
    plan, graph = endless_plan("hetpipe", [2], 8, staleness=staleness)
    cost = FixedCost(forward=3e-6, backward=5e-6, optimizer=1e-6, all_reduce=7e-6, fill=0.5e-6)
    found = simulate_plan(plan, graph, cost.cluster, cost=cost)
    # After every backward its gradients are added to those of the wave, which is one more pass.
    assert found.step_time_s == pytest.approx(4 * (8e-6 + 0.5e-6 + 1e-6) + 2 * 0.5e-6 + exposed)
    assert found.ranks[0].exposed_communication_s == pytest.approx(exposed)
    buckets = found.memory[0].parts["gradient buckets"]
    assert buckets == (2 + staleness) * 4 * 4 * 4


class HalfAsFast(FixedCost):
    """Where the cluster says so."""

    def estimate_ops(self, graph, batch_size, device_kind):
        cost = (
            replace(self, forward=2 * self.forward, backward=2 * self.backward) if device_kind.name == "slow" else self
        )
        return FixedCost.estimate_ops(cost, graph, batch_size, device_kind)


@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
def test_no_virtual_worker_runs_more_waves_ahead_than_it_may(staleness):
    """The second one is half as fast: the first runs ahead, by as much as it may, and then keeps its pace."""
    plan, graph = endless_plan("hetpipe", [2], 8, staleness=staleness)
    cost = HalfAsFast(cluster=with_kinds(small_cluster(num_nodes=2, devices=1), (1,)))
    found = simulate_plan(plan, graph, cost.cluster, cost=cost, num_steps=12)
    ends = [updates_of(found.timeline, rank) for rank in range(2)]
    lead = [done - int(np.searchsorted(ends[1], now, side="right")) for done, now in enumerate(ends[0], 1)]
    wave = 4
    assert staleness * wave < max(lead) < (staleness + 1) * wave
    assert found.step_time_s == pytest.approx(wave * 16e-6)


def updates_of(timeline, rank):
    """When the updates of a rank end, in ps."""
    ranks = np.array([track.rank for track in timeline.tracks])[timeline.track]
    return np.sort(timeline.end_ps[(timeline.opcode == Opcode.OPTIMIZER_STEP) & (ranks == rank)])
