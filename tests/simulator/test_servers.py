"""Parameter servers: closed forms with and without machines of their own, shares, credit, sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.program import build_program, gradient_buckets
from meshwright.program.gradient_exchange import assign_parts, server_shares
from meshwright.simulator import estimate_program, simulate_plan, simulate_program
from meshwright.spec import GradientExchange, Opcode, PlanError
from tests.graphs import chain_graph, make_plan
from tests.marks import examples
from tests.program.check import check_program
from tests.simulator.exchanges import even_machines, layered_plan
from tests.simulator.plans import FixedCost, small_cluster

WIDTH = 2048
M, B = 4 * WIDTH * WIDTH, 1e9
PARTS = 1500


def exchange_s(num_training: int, num_machines: int, servers: tuple[int, ...], **exchange) -> float:
    """Seconds of a step that computes nothing: one layer, no latency."""
    graph = chain_graph(1, width=WIDTH)
    given = GradientExchange(servers=servers, partition_bytes=M // PARTS, **exchange)
    plan = make_plan(graph, [(0, 1)], [num_training], num_training, exchange=given)
    cluster = even_machines(num_machines, B, flops_per_s=1e30)
    return simulate_plan(plan, graph, cluster, contention="fair").step_time_s


@pytest.mark.parametrize(
    ("n", "k"), [(2, 0), (8, 0), (2, 1), (3, 1), (4, 1), (4, 2), (2, 2), (4, 4), (8, 2), (8, 3), (8, 8)]
)
def test_all_machines_serve(n, k):
    """BytePS: t = 2 n (n - 1) M / ((n² + k n - 2 k) B) with k machines that only serve; k = 0 is the ring's limit."""
    expected = 2 * n * (n - 1) * M / ((n * n + k * n - 2 * k) * B)
    assert exchange_s(n, n + k, tuple(range(n + k))) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("n", "k"), [(4, 1), (4, 2), (3, 2), (4, 4), (2, 4), (8, 2)])
def test_machines_of_their_own_serve(n, k):
    """max(M / B, n M / (k B)): the cards of those who train, or those of the servers."""
    assert exchange_s(n, n + k, tuple(range(n, n + k))) == pytest.approx(max(1, n / k) * M / B, rel=0.02)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_the_ring_has_the_same_limit_as_servers_on_all_ranks(n):
    graph = chain_graph(1, width=WIDTH)
    plan = make_plan(graph, [(0, 1)], [n], n)
    ring = simulate_plan(plan, graph, even_machines(n, B, flops_per_s=1e30)).step_time_s
    # The optimizer's step starts a few kernels.
    assert ring == pytest.approx(2 * (n - 1) * M / (n * B), rel=2e-3)


def test_all_reduce_or_servers_is_a_matter_of_their_number():
    """n ranks that train: fewer than n / 2 machines of their own lose to the ring, more win."""
    n = 4
    ring = 2 * (n - 1) / n * M / B
    times = {k: exchange_s(n, n + k, tuple(range(n, n + k))) for k in (1, 2, 3, 4)}
    assert [k for k, seconds in times.items() if seconds < ring] == [3, 4]


@settings(max_examples=examples(100))
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    num_training=st.integers(1, 8),
    spare=st.integers(0, 10),
    colocated=st.booleans(),
)
def test_no_server_has_more_than_its_share_and_one_part(sizes, num_training, spare, colocated):
    servers = tuple(range(0 if colocated or not spare else num_training, num_training + spare))
    shares = server_shares(num_training, servers)
    assert shares.sum() == pytest.approx(1)
    assert (shares >= 0).all()
    n, k = num_training, spare
    if colocated and 0 < k <= n and n > 1:
        # No card is busier than another one, in either direction.
        own, machine = shares[0], shares[-1]
        out_of_rank = (n - 1) * own + k * machine + (n - 1) * own
        assert n * machine == pytest.approx(out_of_rank)
    load = np.bincount(assign_parts(np.array(sizes), shares), np.array(sizes), len(servers))
    assert load.sum() == sum(sizes)
    assert (load <= shares * sum(sizes) + max(sizes) + 1e-9).all()


@pytest.mark.parametrize("credit", [0, 300, 1000])
@pytest.mark.parametrize("across_steps", [False, True])
def test_every_part_is_pushed_summed_and_pulled_once(credit, across_steps):
    graph, cluster = chain_graph(3, width=16), small_cluster(num_nodes=5, devices=1)
    plan = layered_plan(
        graph,
        3,
        num_microbatches=6,
        servers=(1, 3, 4),
        partition_bytes=300,
        credit_bytes=credit,
        across_steps=across_steps,
    )
    program = build_program(plan, graph)
    check_program(program)
    assert program.num_ranks == plan.num_devices == 5
    cost = FixedCost(cluster=cluster, send=2e-6)
    costs = estimate_program(program, plan, graph, cost)
    timeline = simulate_program(program, costs, 2)
    ranks = np.array([track.rank for track in timeline.tracks])[timeline.track]
    held = sum(bucket.num_bytes for bucket in gradient_buckets(graph, plan))
    steps = 3 if across_steps else 2
    rows = {kind: np.flatnonzero(timeline.opcode == kind) for kind in (Opcode.PUSH, Opcode.SUM, Opcode.PULL)}
    assert set(ranks[rows[Opcode.SUM]]) == {1, 3, 4}
    assert timeline.num_bytes[rows[Opcode.SUM]].sum() == steps * held
    # What rank 1 sums of its own does not travel.
    own = timeline.num_bytes[rows[Opcode.SUM]][ranks[rows[Opcode.SUM]] == 1].sum()
    for kind in (Opcode.PUSH, Opcode.PULL):
        assert timeline.num_bytes[rows[kind]].sum() == steps * 3 * held - own
    resident = costs.resident_bytes.sum(axis=1)
    assert (resident[3:] > 0).all()
    assert resident[3:].sum() + own // steps == held
    if credit:
        _check_credit(program, costs, credit)


def _check_credit(program, costs, credit):
    """By the moments of one step: what a rank has pushed and not pulled is within its credit."""
    timeline = simulate_program(program, costs, 1)
    ranks = np.array([track.rank for track in timeline.tracks])[timeline.track]
    pushes, pulls = (np.flatnonzero(timeline.opcode == kind) for kind in (Opcode.PUSH, Opcode.PULL))
    lane = np.array([track.lane // 16 for track in timeline.tracks])[timeline.track]
    for rank in range(3):
        mine, back = pushes[ranks[pushes] == rank], pulls[lane[pulls] == rank]
        for moment in timeline.start_ps[mine]:
            pushed = timeline.num_bytes[mine][timeline.start_ps[mine] <= moment].sum()
            pulled = timeline.num_bytes[back][timeline.end_ps[back] <= moment].sum()
            assert pushed - pulled <= max(credit, timeline.num_bytes[mine].max())


def test_a_sum_takes_the_memory_of_its_server():
    """Three ranks' parts: two are added, each read with the sum so far, which is written."""
    graph, cluster = chain_graph(1, width=64), small_cluster(num_nodes=4, devices=1)
    plan = make_plan(graph, [(0, 1)], [3], 3, exchange=GradientExchange(servers=(3,)))
    program = build_program(plan, graph)
    costs = estimate_program(program, plan, graph, FixedCost(cluster=cluster))
    row = int(np.flatnonzero(program.body.opcode == Opcode.SUM)[0])
    seconds = costs.duration_ps[costs.body.cost_class[row]] / 1e12
    bandwidth = cluster.device_kinds[0].memory_bandwidth_bytes_per_s
    assert seconds == pytest.approx(2 * 3 * 64 * 64 * 4 / bandwidth, abs=1e-12)


def test_what_cannot_serve_is_refused():
    graph = chain_graph(2)
    plan = make_plan(graph, [(0, 2)], [2], 2, exchange=GradientExchange(servers=(5,)))
    with pytest.raises(PlanError, match="uses 6 devices, but cluster 'small' has 4"):
        simulate_plan(plan, graph, small_cluster(num_nodes=4, devices=1))
    for wrong in ({"servers": (1, 1)}, {"servers": (-1,)}, {"servers": (0,), "zero": 1}):
        with pytest.raises(PlanError, match="servers"):
            GradientExchange(**wrong)
    with pytest.raises(PlanError, match="credit_bytes is -1"):
        GradientExchange(credit_bytes=-1)
    assert not plan.is_runnable
