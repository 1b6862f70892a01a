"""What the host takes to issue ops: counted calls times what was measured."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.cost import CostModel
from meshwright.cost.host_issue import issue_seconds, load_host_calls, optimizer_issue_seconds
from meshwright.cost.traits import operator_name
from meshwright.spec import Optimizer, load_cluster, load_shipped_graph
from meshwright.spec.precision import numbers_of

GRAPH = load_shipped_graph("gpt-tiny")
CALLS = load_host_calls()


def op_named(name):
    return next(op for op in GRAPH.ops if operator_name(op) == name)


def seconds_of(name, precision="float32"):
    return issue_seconds(GRAPH, op_named(name), 1, "float32", "", numbers_of(precision))


def test_what_was_measured_is_made_of_calls_and_nodes():
    assert CALLS.linear_s == pytest.approx(2 * CALLS.call_s + 2 * CALLS.node_s)
    assert 0 < CALLS.node_s < CALLS.call_s < CALLS.engine_s < CALLS.linear_backward_s


def test_a_linear_layer_flattens_its_input():
    """Three dims: a product, the transposed weight, and two views of what goes in and comes out."""
    found = seconds_of("linear")
    assert found.forward_s == pytest.approx(4 * (CALLS.call_s + CALLS.node_s))
    gradients = len(op_named("linear").inputs)
    # Each gradient is a kernel with a transposed factor; weight and bias are added to gradients that exist.
    assert found.backward_s == pytest.approx((2 * gradients + 3) * CALLS.call_s + (4 + gradients - 1) * CALLS.node_s)
    assert found.accumulate_s == pytest.approx((gradients - 1) * CALLS.call_s)


def test_autocast_issues_casts():
    plain, cast = seconds_of("linear"), seconds_of("linear", "amp")
    casts = len(op_named("linear").inputs)
    assert cast.forward_s - plain.forward_s == pytest.approx(casts * (CALLS.call_s + CALLS.node_s))


@pytest.mark.parametrize(
    ("kind", "optimizer"), [("fused", Optimizer(kind="adamw")), ("foreach", Optimizer(kind="sgd"))]
)
def test_a_step_goes_over_tensors(kind, optimizer):
    found = optimizer_issue_seconds(100, optimizer, kind)
    assert found == pytest.approx(100 * optimizer_issue_seconds(1, optimizer, kind))
    assert found < optimizer_issue_seconds(100, optimizer, "tensors")


def test_hosts_are_beside_cuda_devices_alone():
    issued, own = (load_cluster(name) for name in ("1xH100", "1xcpu"))
    prices = CostModel(cluster=issued).price_ops(GRAPH, 1, issued.device_kind(0))
    more = CostModel(cluster=issued).price_ops(GRAPH, 64, issued.device_kind(0))
    assert np.array_equal(prices.issue_s, more.issue_s)
    assert prices.issue_s.shape == (len(GRAPH.ops), 3)
    assert CostModel(cluster=own).price_ops(GRAPH, 1, own.device_kind(0)).issue_s is None
