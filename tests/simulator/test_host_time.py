"""Processor time that transfers take from computations beside them."""

import pytest

from meshwright.simulator import simulate, simulate_plan
from meshwright.simulator import simulate as host_time
from meshwright.spec import GradientExchange
from tests.graphs import chain_graph, even_bounds, make_plan
from tests.simulator.plans import FixedCost, small_cluster


def test_a_transfer_slows_what_runs_beside_it():
    """Rank 0 sends microbatch 0 (3..5 µs) while it computes microbatch 1; rank 1 waits and loses nothing."""
    graph = chain_graph(2)
    plan = make_plan(graph, even_bounds(2, 2), [1, 1], 2, schedule="gpipe")
    timeline = simulate_plan(plan, graph, small_cluster(), cost=FixedCost(send=2e-6, host=1e-6)).timeline
    ends = {timeline.name(i): int(timeline.end_ps[i]) for i in range(timeline.num_spans)}
    assert ends["F0.0"] == 3_000_000
    assert ends["F0.1"] == 7_000_000
    # Rank 1 starts at 5. The second message is under way from 7 to 9, takes half of the processor meanwhile, and so
    # the last microsecond of the first computation takes two.
    assert ends["send 0→1.1"] == 9_000_000
    assert ends["F1.0"] == 9_000_000
    assert ends["F1.1"] == 12_000_000


def test_host_time_is_paid_once_where_the_exchange_overlaps_fully():
    """Sums that fit into the backward cost exactly their processor time; marks move with the computation."""
    graph = chain_graph(4)
    exchange = GradientExchange(bucket_bytes=4 * 4 * 4)
    plan = make_plan(graph, [(0, 4)], [2], 2, exchange=exchange)
    free, busy = (
        simulate_plan(plan, graph, small_cluster(), cost=FixedCost(backward=20e-6, all_reduce=4e-6, host=host))
        for host in (0.0, 2e-6)
    )
    # Three of four sums run beside the backward, the last one behind it.
    assert busy.ranks[0].backward_s - free.ranks[0].backward_s == pytest.approx(3 * 2e-6, rel=0.01)
    assert busy.step_time_s - free.step_time_s == pytest.approx(3 * 2e-6, rel=0.01)


def test_the_rounds_are_enough(monkeypatch):
    """Transfers that take half of the processor: more rounds change the step by less than a thousandth."""
    graph = chain_graph(8)
    plan = make_plan(graph, even_bounds(8, 4), [1, 2, 1, 1], 8)
    cost = FixedCost(send=2e-6, host=1e-6, all_reduce=3e-6)
    usual = simulate_plan(plan, graph, small_cluster(), cost=cost).step_time_s
    monkeypatch.setattr(simulate, "HOST_ROUNDS", host_time.HOST_ROUNDS + 20)
    more = simulate_plan(plan, graph, small_cluster(), cost=cost).step_time_s
    assert usual == pytest.approx(more, rel=1e-3)
