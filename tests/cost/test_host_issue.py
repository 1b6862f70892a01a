"""What the host takes to issue ops: counted calls times what was measured."""

import numpy as np
import pytest

from meshwright.cost import CostModel
from meshwright.cost.host_issue import count_issued, issue_seconds, load_host_calls, optimizer_issue_seconds
from meshwright.cost.traits import operator_name
from meshwright.spec import Optimizer, load_cluster, load_shipped_graph
from meshwright.spec.precision import numbers_of

GRAPH = load_shipped_graph("gpt-tiny")
CALLS = load_host_calls()


def op_named(name):
    return next(op for op in GRAPH.ops if operator_name(op) == name)


def seconds_of(name, precision="float32"):
    return issue_seconds(GRAPH, op_named(name), 1, "float32", "", numbers_of(precision))


def test_seconds_are_those_of_the_page():
    """docs/concepts/simulation.md, in µs."""
    found = [CALLS.forward_call_s, CALLS.node_s, CALLS.launch_s, CALLS.engine_s, CALLS.call_s]
    assert [round(1e6 * value, 1) for value in found] == [9.6, 8.2, 4.7, 37.9, 6.5]
    assert round(CALLS.speed, 2) == 1.52


def test_attention_is_one_node_of_the_backward():
    issued = count_issued(GRAPH, op_named("scaled_dot_product_attention"), 8, "float32", "", numbers_of("float32"))
    assert (issued.calls, issued.kernels, issued.nodes) == (5, 1, 1)


def test_a_linear_layer_flattens_its_input():
    """Three dims: a product, the transposed weight, and two views of what goes in and comes out."""
    found = seconds_of("linear")
    assert found.forward_s == pytest.approx(4 * CALLS.forward_call_s + CALLS.launch_s)
    gradients = len(op_named("linear").inputs)
    # Each gradient is a kernel; weight and bias have nodes of their own and are added to gradients that exist.
    assert found.backward_s == pytest.approx((4 + gradients - 1) * CALLS.node_s + gradients * CALLS.launch_s)
    assert found.accumulate_s == pytest.approx((gradients - 1) * CALLS.call_s)


def test_autocast_issues_casts():
    plain, cast = seconds_of("linear"), seconds_of("linear", "amp")
    casts = len(op_named("linear").inputs)
    assert cast.forward_s - plain.forward_s == pytest.approx(casts * (CALLS.forward_call_s + CALLS.launch_s))


@pytest.mark.parametrize(
    ("kind", "optimizer"), [("fused", Optimizer(kind="adamw")), ("foreach", Optimizer(kind="sgd"))]
)
def test_a_step_goes_over_tensors(kind, optimizer):
    found = optimizer_issue_seconds(100, optimizer, kind)
    assert found == pytest.approx(100 * optimizer_issue_seconds(1, optimizer, kind))
    assert found < optimizer_issue_seconds(100, optimizer, "tensors")


def test_hosts_are_beside_cuda_devices_alone():
    issued, own = (load_cluster(name) for name in ("1xH100", "1xcpu"))
    costs = CostModel(cluster=issued).estimate_ops(GRAPH, 1, issued.device_kind(0))
    more = CostModel(cluster=issued).estimate_ops(GRAPH, 64, issued.device_kind(0))
    assert np.array_equal(costs.issue_s, more.issue_s)
    assert costs.issue_s.shape == (len(GRAPH.ops), 3)
    assert CostModel(cluster=own).estimate_ops(GRAPH, 1, own.device_kind(0)).issue_s is None
