"""Sends and all-reduces: measured curves, the ring by hand, and where each applies."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost import CostModel
from meshwright.cost.op_estimates import fit_curve
from meshwright.spec import ClusterError
from tests.cost.facts import make_cluster, make_table, transfer_row

ALPHA, BETA = 50e-6, 1.25e-9
SIZES = (4, 1000, 10**6, 10**8)


def alpha_beta(num_bytes):
    return ALPHA + BETA * num_bytes


def model(transfers=(), device="box", **cluster):
    return CostModel(cluster=make_cluster(**cluster), measurements=make_table(transfers=transfers, device=device))


SENDS = tuple(transfer_row("send", 2, size, alpha_beta(size), host_s=alpha_beta(size) / 4) for size in SIZES)


@given(st.integers(4, 10**9))
def test_a_line_is_reproduced_between_and_above_its_points(num_bytes):
    assert model(SENDS).collective_seconds("send", (0, 1), num_bytes) == pytest.approx(alpha_beta(num_bytes), rel=1e-9)
    assert model(SENDS).collective_host_seconds("send", (0, 1), num_bytes) == pytest.approx(
        alpha_beta(num_bytes) / 4, rel=1e-9
    )


def test_a_message_of_nothing_takes_the_latency():
    assert ALPHA <= model(SENDS).collective_seconds("send", (0, 1), 0) <= alpha_beta(4)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(1e-9, 1.0)), min_size=1, max_size=8), st.data())
def test_more_bytes_never_take_less(points, data):
    sizes = sorted(data.draw(st.tuples(st.integers(0, 2 * 10**6), st.integers(0, 2 * 10**6))))
    small_s, large_s = fit_curve(points).at(np.array(sizes, np.float64))
    assert small_s <= large_s * (1 + 1e-12)


def test_a_size_that_was_measured_twice_counts_with_its_mean():
    assert fit_curve([(10, 1.0), (10, 3.0)]).at(np.array([10.0])) == 2.0


def test_without_measurements_the_link_decides():
    cost = CostModel(cluster=make_cluster(num_nodes=2, num_devices=2))
    assert cost.collective_seconds("send", (0, 1), 10**6) == pytest.approx(1e-6 + 1e-3)
    assert cost.collective_seconds("send", (0, 2), 10**6) == pytest.approx(10e-6 + 1e-2)
    with pytest.raises(ClusterError, match="each once"):
        cost.collective_seconds("send", (1, 1), 10**6)
    assert cost.collective_host_seconds("send", (0, 1), 10**6) == 0.0


def test_a_ring_by_hand():
    cost = CostModel(cluster=make_cluster(num_nodes=2, num_devices=2))
    # two ranks of one node: 2 steps of half the bytes each
    assert cost.collective_seconds("all_reduce", (0, 1), 10**6) == pytest.approx(2 * (1e-6 + 0.5e6 / 1e9))
    # four ranks over two nodes: 6 steps of a quarter at the pace of the NIC; every second step of a message is inside
    assert cost.collective_seconds("all_reduce", (0, 1, 2, 3), 10**6) == pytest.approx(6 * (5.5e-6 + 0.25e6 / 1e8))
    assert cost.collective_seconds("all_reduce", (3,), 10**6) == 0.0


def test_measured_sums_are_used_inside_a_node_of_the_measured_kind_only():
    rows = tuple(transfer_row("all_reduce", 2, size, 1e-3 + 1e-6 * size, host_s=0.5) for size in SIZES)
    measured = model(rows, num_nodes=2, num_devices=2)
    assert measured.collective_seconds("all_reduce", (0, 1), 1000) == pytest.approx(2e-3)
    assert measured.collective_host_seconds("all_reduce", (0, 1), 1000) == pytest.approx(0.5)
    assert measured.collective_seconds("all_reduce", (0, 2), 1000) == pytest.approx(2 * (10e-6 + 500 / 1e8))
    assert measured.collective_host_seconds("all_reduce", (0, 2), 1000) == 0.0
    other = model(rows, device="other", num_nodes=2, num_devices=2)
    assert other.collective_seconds("all_reduce", (0, 1), 1000) == pytest.approx(2 * (1e-6 + 500 / 1e9))


def test_the_measured_number_of_ranks_is_preferred():
    rows = (transfer_row("all_reduce", 2, 4, 1.0), transfer_row("all_reduce", 4, 4, 5.0))
    assert model(rows).collective_seconds("all_reduce", (0, 1), 4) == 1.0
    assert model(rows).collective_seconds("all_reduce", (0, 1, 2, 3), 4) == 5.0


@given(st.integers(2, 8), st.integers(2, 8), st.sampled_from(SIZES))
def test_a_ring_measured_on_some_ranks_gives_the_ring_on_others(measured, asked, num_bytes):
    def ring(num_ranks, size):
        return 2 * (num_ranks - 1) * (ALPHA + BETA * size / num_ranks)

    rows = tuple(transfer_row("all_reduce", measured, size, ring(measured, size)) for size in (0, *SIZES))
    cost = model(rows, num_devices=8)
    # The smallest message that says something has four bytes; a few hundred-thousandths of it are no latency.
    found = cost.collective_seconds("all_reduce", tuple(range(asked)), num_bytes)
    assert found == pytest.approx(ring(asked, num_bytes), rel=1e-5)


def test_a_table_without_sends_leaves_them_to_the_link():
    cost = model((transfer_row("all_reduce", 2, 4, 1.0),))
    assert cost.collective_seconds("send", (0, 1), 10**6) == pytest.approx(1e-6 + 1e-3)
    assert cost.collective_host_seconds("send", (0, 1), 10**6) == 0.0
