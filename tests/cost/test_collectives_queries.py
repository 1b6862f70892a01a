"""Questions about collectives that have no answer are refused, whoever asks."""

import math

import pytest

from meshwright.cost import CostModel
from meshwright.cost.collectives.algorithms import parameter_server_seconds
from meshwright.spec import ClusterError, MeasurementError, load_cluster

COST = CostModel(cluster=load_cluster("2x4xA100"))


@pytest.mark.parametrize("op", ["", "ALL_REDUCE", "gather"])
def test_what_is_no_collective_is_refused(op):
    with pytest.raises(MeasurementError, match="all_reduce, all_gather"):
        COST.collective_seconds(op, (0, 1), 1e6)


@pytest.mark.parametrize("num_bytes", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    "ask",
    [
        lambda size: COST.collective_seconds("all_gather", (0, 1), size),
        lambda size: COST.collective_seconds("all_reduce", (0, 1), size),
        lambda size: COST.collective_seconds("send", (0, 1), size),
    ],
)
def test_messages_without_a_size_are_refused(ask, num_bytes):
    with pytest.raises(MeasurementError, match="expected zero or more"):
        ask(num_bytes)


@pytest.mark.parametrize("ranks", [(), (0, 99), (-1, 0), (0, 1, 1)])
def test_groups_that_the_cluster_does_not_have_are_refused(ranks):
    with pytest.raises(ClusterError, match="from 0 to 7"):
        COST.collective_seconds("all_reduce", ranks, 1e6)
    with pytest.raises(ClusterError, match="from 0 to 7"):
        COST.collective_seconds("all_reduce", (0, 1), 1e6, [ranks])


@pytest.mark.parametrize(("num_bytes", "bandwidth"), [(-1.0, 1e9), (1e6, 0.0), (1e6, -1.0), (1e6, math.nan)])
def test_servers_that_cannot_be_are_refused(num_bytes, bandwidth):
    with pytest.raises(MeasurementError, match="expected"):
        parameter_server_seconds(4, 1, num_bytes, bandwidth)
