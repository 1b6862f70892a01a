"""How sure a step time is: every estimate at its end, and said to be a datasheet's where no op was measured."""

from dataclasses import replace

import numpy as np
import pytest

from meshwright.cost import CostModel
from meshwright.cost.op_estimates import ROOFLINE
from meshwright.planner import explain_step_interval, predict_step_interval
from meshwright.simulator import simulate_plan
from meshwright.spec import (
    Measurements,
    OpMeasurement,
    Optimizer,
    OptimizerMeasurement,
    TransferMeasurement,
    load_cluster,
    op_key,
)
from tests.graphs import chain_graph, even_bounds, make_plan

CLUSTER = load_cluster("2xcpu")
GRAPH = chain_graph(4)
PLAN = make_plan(GRAPH, even_bounds(4, 2), [1, 1], 4)


def table(spread):
    rows = {
        op_key(GRAPH, op, 2): OpMeasurement(
            key=op_key(GRAPH, op, 2), forward_s=1.0, backward_s=2.0, num_samples=5, spread=spread
        )
        for op in GRAPH.ops
    }
    return Measurements(device="cpu", software="none", date="never", ops=tuple(rows.values()))


def everything(spread):
    """The same with transfers and optimizer."""
    transfers = [
        TransferMeasurement(
            kind=kind, num_ranks=2, num_bytes=size, seconds=1e-5 + size * 1e-9, spread=spread, host_s=1e-6
        )
        for kind in ("send", "all_reduce")
        for size in (2**10, 2**16, 2**20, 2**24)
    ]
    steps = [
        OptimizerMeasurement(kind=kind, dtype="float32", num_elements=size, num_tensors=1, seconds=1e-6 + size * 1e-9)
        for kind in ("adamw", "bucket_copy")
        for size in (1, 1000)
    ]
    return replace(table(spread), transfers=tuple(transfers), optimizers=tuple(steps))


def test_rooflines_alone_have_the_interval_of_rooflines():
    """One rank without transfers: all is scaled by the same factors."""
    cost, alone = CostModel(cluster=load_cluster("1xcpu")), make_plan(GRAPH, even_bounds(4, 1), [1], 4)
    step_s = simulate_plan(alone, GRAPH, cost.cluster, cost=cost).step_time_s
    found = predict_step_interval(alone, GRAPH, cost.cluster, cost)
    assert not found.measured
    assert found.low_s / step_s == pytest.approx(ROOFLINE.low, rel=1e-6)
    assert found.high_s / step_s == pytest.approx(ROOFLINE.high, rel=1e-6)
    assert explain_step_interval(found).startswith("Step time, 80 % interval (from datasheets")


@pytest.mark.parametrize("spread", [1.0, 1.6])
def test_the_ends_are_the_steps_of_slower_and_faster_ops(spread):
    cost = CostModel(cluster=CLUSTER, measurements=table(spread))
    step_s = simulate_plan(PLAN, GRAPH, CLUSTER, cost=cost).step_time_s
    found = predict_step_interval(PLAN, GRAPH, CLUSTER, cost)
    assert found.measured
    assert found.low_s < step_s < found.high_s
    # nothing but ops takes time here but for microseconds of transfers and of the optimizer
    whole = cost.estimate_ops(GRAPH, 2, CLUSTER.device_kind(0)).total()
    assert found.low_s / step_s == pytest.approx(whole.low_s / whole.seconds, rel=1e-3)
    assert found.high_s / step_s == pytest.approx(whole.high_s / whole.seconds, rel=1e-3)
    assert explain_step_interval(found).startswith("Step time, 80 % interval (from its ops")


@pytest.mark.parametrize("spread", [0.1, 1.6])
@pytest.mark.parametrize("measured", [False, True])
def test_every_cost_is_at_its_end(spread, measured):
    """Ops, transfers, optimizer and buckets: none is left in the middle, and none is beyond what it claims itself."""
    cost = CostModel(cluster=CLUSTER, measurements=everything(spread) if measured else None)
    kind, adamw = CLUSTER.device_kind(0), Optimizer(kind="adamw")
    parameters = [i for op in GRAPH.ops for i in op.inputs if GRAPH.tensors[i].role == "parameter"]
    costs = [
        lambda cost: cost.collective_seconds("send", (0, 1), 1e6),
        lambda cost: cost.collective_seconds("all_reduce", (0, 1), 1e6),
        lambda cost: cost.optimizer_seconds(GRAPH, parameters, adamw, kind),
        lambda cost: cost.bucket_seconds(GRAPH, parameters, kind),
        lambda cost: cost.estimate_ops(GRAPH, 2, kind).total().seconds,
    ]
    for estimate in costs:
        low, middle, high = (estimate(model) for model in (cost.at_end("low"), cost, cost.at_end("high")))
        assert 0 < low < middle < high
    for op in ("send", "all_reduce"):
        claimed = cost.predict_collective(op, (0, 1), np.array([1e6]))
        for end, expected in (("low", claimed.low_s), ("high", claimed.high_s)):
            assert cost.at_end(end).collective_seconds(op, (0, 1), 1e6) == expected[0]


def test_transfers_and_optimizer_widen_the_interval_of_sure_ops():
    """Of ops that are sure, a step by itself has no interval; what remains is that of the rest."""
    cost = CostModel(cluster=CLUSTER)
    ranks = make_plan(GRAPH, even_bounds(4, 1), [2], 8)
    step_s, low_s, high_s = (
        simulate_plan(ranks, GRAPH, CLUSTER, cost=model).step_time_s
        for model in (cost, cost.at_end("low"), cost.at_end("high"))
    )
    kind = CLUSTER.device_kind(0)
    ops_s = [2 * model.estimate_ops(GRAPH, 2, kind).total().seconds for model in (cost, cost.at_end("high"))]
    assert high_s - step_s > ops_s[1] - ops_s[0]
    assert low_s < step_s


def test_a_cost_model_at_one_end_is_sure_of_it():
    cost = CostModel(cluster=CLUSTER, measurements=table(1.0))
    kind = CLUSTER.device_kind(0)
    whole = cost.estimate_ops(GRAPH, 2, kind).total()
    for end, expected in (("low", whole.low_s), ("high", whole.high_s)):
        total = cost.at_end(end).estimate_ops(GRAPH, 2, kind).total()
        assert (total.low_s, total.seconds, total.high_s) == pytest.approx((expected,) * 3)
    assert cost.estimate_ops(GRAPH, 2, kind).total().seconds == whole.seconds
