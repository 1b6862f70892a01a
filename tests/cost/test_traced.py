"""Ops of a trace of somebody's own run cost the same ops of a captured model: real profiles, and tables by hand."""

from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from meshwright.cost import load_cost_model
from meshwright.cost.op_estimates import collect_traced
from meshwright.cost.roofline import bound_op
from meshwright.records import add_records, import_file, make_records
from meshwright.spec import load_cluster, load_shipped_graph
from meshwright.zoo import load_model

CLUSTER = load_cluster("1xcpu")


@pytest.fixture(scope="module")
def traced_table(tmp_path_factory):
    """The table of a trace of two training steps of gpt-tiny."""
    folder = tmp_path_factory.mktemp("traced")
    source = load_model("gpt-tiny")
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(2):
            source.compute_loss().backward()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    rows = import_file(folder / "trace.json").records
    return add_records(rows, folder / "table.parquet"), source.batch_size, rows


def test_a_trace_of_a_model_costs_that_model(traced_table):
    path, batch_size, rows = traced_table
    graph = load_shipped_graph("gpt-tiny")
    cost = load_cost_model(CLUSTER, path, "float32")
    costs = cost.estimate_ops(graph, batch_size, CLUSTER.device_kind(0))
    counts = Counter(costs.basis)
    # Making positions leaves no row with tensors; sums and splits run no operator of their own in the backward.
    assert counts["roofline"] <= 1
    assert counts["measured"] >= 0.8 * len(graph.ops)
    gelu = next(i for i, op in enumerate(graph.ops) if "gelu" in op.kind)
    assert costs.forward_s[gelu] == rows.where(op="aten.gelu").seconds[0]
    assert costs.backward_s[gelu] == rows.where(op="aten.gelu_backward").seconds[0]
    assert (costs.low_s[gelu] < [costs.forward_s[gelu], costs.backward_s[gelu], 1e-9]).all()
    # Another batch was not traced.
    other = cost.estimate_ops(graph, 2 * batch_size, CLUSTER.device_kind(0))
    assert "measured" not in [other.basis[gelu]]


def test_a_product_takes_its_gradients_from_the_products_of_its_backward():
    graph = load_shipped_graph("gpt-tiny")
    kind = CLUSTER.device_kind(0)
    op = next(op for op in graph.ops if op.kind.startswith("aten.linear") and len(op.inputs) == 3)
    shapes = [[extent.at(8) for extent in graph.tensors[i].shape] for i in op.inputs]
    m, n, k = shapes[0][0] * shapes[0][1], shapes[1][0], shapes[0][2]
    times = {(m, n, k): 1e-3, (m, k, n): 2e-3, (n, k, m): 4e-3}
    rows = make_records(
        op="matmul",
        shapes=[f"m={a};n={b};k={c}" for a, b, c in times],
        dtype="float32",
        device="cpu",
        seconds=list(times.values()),
    )
    bound = bound_op(graph, op, 8, kind, "float32")
    found, basis = collect_traced(rows).find(graph, op, 8, "float32", bound)
    assert (found.forward_s, found.backward_s, basis) == (1e-3, 6e-3, "measured")
    # Without the products of its backward: as far from the roofline as the forward is.
    alone, basis = collect_traced(rows.select(rows.seconds == 1e-3)).find(graph, op, 8, "float32", bound)
    assert basis == "transferred"
    assert alone.backward_s == pytest.approx(bound.backward_s * 1e-3 / bound.forward_s)
    assert collect_traced(rows.select(rows.seconds == 2e-3)).find(graph, op, 8, "float32", bound) is None


def test_rows_of_measure_itself_are_no_trace():
    rows = make_records(
        op=["aten.gelu.default", "all_reduce", "optimizer.adamw"],
        phase=["forward", "", "step"],
        shapes=[
            "4x8:float32|1",
            "bytes=4;ranks=2;groups=1;stride=1;nodes=1;devices_per_node=2",
            "elements=4;tensors=1",
        ],
        dtype="float32",
        device="cpu",
        seconds=[1e-3, 1e-3, 1e-3],
    )
    assert not collect_traced(rows)


def test_dtypes_are_told_apart(traced_table):
    path, batch_size, _ = traced_table
    graph = load_shipped_graph("gpt-tiny")
    costs = load_cost_model(CLUSTER, path, "bfloat16").estimate_ops(graph, batch_size, CLUSTER.device_kind(0))
    gelu = next(i for i, op in enumerate(graph.ops) if "gelu" in op.kind)
    assert costs.basis[gelu] != "measured"
    assert torch.get_default_dtype() is torch.float32
