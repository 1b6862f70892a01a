"""Figures of a steady step: utilisation by its two counts of FLOPs, and where the time of each rank goes."""

from dataclasses import replace

import pytest

from meshwright.simulator import describe_steady_step, simulate_plan, steady_rows
from meshwright.spec import Extent, Op, Tensor
from tests.graphs import chain_graph, even_bounds, make_plan
from tests.simulator.plans import FixedCost, small_cluster

TABLE_FLOPS = 1000


def with_table(graph):
    """The chain, with a table that every layer reads and every stage therefore computes for itself."""
    table = Tensor(name="table", shape=(Extent(4),), dtype="float32", role="activation", storage=len(graph.tensors))
    made = Op(
        name="table",
        kind="aten.arange.default",
        inputs=(),
        outputs=(len(graph.tensors),),
        flops=Extent(TABLE_FLOPS),
        replicable=True,
    )
    ops = [replace(op, inputs=(*op.inputs, len(graph.tensors))) for op in graph.ops]
    layers = [replace(layer, start=layer.start + (layer.start > 0), stop=layer.stop + 1) for layer in graph.layers]
    return replace(graph, tensors=(*graph.tensors, table), ops=(made, *ops), layers=tuple(layers))


def test_what_stages_repeat_counts_for_the_hardware_alone():
    graph = with_table(chain_graph(4, width=8))
    plan = make_plan(graph, even_bounds(4, 4), [1] * 4, 6, microbatch_size=2)
    found = steady_rows(simulate_plan(plan, graph, small_cluster(), cost=FixedCost()))
    available = found["step_time_s"] * 4 * 1e9
    model = 6 * (4 * 2 * (2 + 4) * 8 * 8 + TABLE_FLOPS)
    assert found["mfu_share"] == pytest.approx(model / available)
    assert found["hfu_share"] == pytest.approx((model + 6 * 3 * TABLE_FLOPS) / available)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_time_of_a_rank_is_that_of_the_closed_form(schedule):
    """Equal stages without transfers to speak of: m (f + b) busy, (p - 1)(f + b) waiting, on every rank."""
    graph = chain_graph(4)
    plan = make_plan(graph, even_bounds(4, 4), [1] * 4, 8, schedule=schedule)
    found = steady_rows(simulate_plan(plan, graph, small_cluster(), cost=FixedCost()))
    assert found["bubble_share"] == pytest.approx(3 / 11, abs=1e-6)
    for rank in found["ranks"]:
        assert rank["busy_s"] == pytest.approx(8 * 8e-6)
        assert rank["busy_share"] == pytest.approx(8 / 11, abs=1e-6)
        assert rank["waiting_share"] == pytest.approx(3 / 11, abs=1e-6)
        assert rank["busy_share"] + rank["exposed_share"] + rank["waiting_share"] == pytest.approx(1)


def test_without_a_peak_rate_there_is_no_utilisation():
    graph, cluster = chain_graph(2), small_cluster()
    kind = replace(cluster.device_kinds[0], peak_flops_per_s={"float16": 1e9})
    cluster = replace(cluster, device_kinds=(kind,))
    plan = make_plan(graph, even_bounds(2, 2), [1, 1], 2)
    known = simulate_plan(plan, graph, small_cluster(), cost=FixedCost())
    assert "MFU" in describe_steady_step(known)
    result = simulate_plan(plan, graph, cluster, cost=FixedCost(cluster=cluster))
    assert (result.mfu, result.hfu) == (None, None)
    assert describe_steady_step(result).startswith("Steady step: 24 µs, bubble ")
    assert "MFU" not in describe_steady_step(result)
