"""Copies between a device and its host, by the node's PCIe link."""

import math

import pytest

from meshwright.cost import CostModel
from meshwright.cost.host_costs import HOST_COPY, estimate_host_copy
from meshwright.spec import Link, MeasurementError
from tests.cost.facts import make_cluster

PCIE = Link(latency_s=2e-6, bandwidth_bytes_per_s=1e9)


def test_a_copy_is_a_message_over_the_link():
    found = estimate_host_copy(PCIE, 1e6)
    assert found.seconds == pytest.approx(2e-6 + 1e-3)
    assert (found.basis, found.low_s, found.high_s) == ("roofline", found.seconds, found.seconds * HOST_COPY.high)


def test_nothing_takes_no_time():
    assert estimate_host_copy(PCIE, 0).high_s == 0.0


@pytest.mark.parametrize("num_bytes", [-1, -math.inf, math.nan])
def test_what_is_no_size_is_refused(num_bytes):
    with pytest.raises(MeasurementError, match="0 or more"):
        estimate_host_copy(PCIE, num_bytes)


def test_a_rank_copies_over_the_link_of_its_node():
    cluster = make_cluster(num_nodes=2)
    cost = CostModel(cluster=cluster)
    assert cost.host_transfer_seconds(5, 1e6) == pytest.approx(1e-6 + 1e-3)
    assert cost.at_end("high").host_transfer_seconds(5, 1e6) == pytest.approx(HOST_COPY.high * (1e-6 + 1e-3))
    assert cost.estimate_host_transfer(5, 1e6) == estimate_host_copy(cluster.nodes[1].pcie, 1e6)
