"""How sure a step time is: all of it where one op decides, less where many do, and nothing where no op was measured."""

import pytest

from meshwright.cost import CostModel
from meshwright.planner import explain_step_interval, predict_step_interval
from meshwright.simulator import simulate_plan
from meshwright.spec import Measurements, OpMeasurement, load_cluster, op_key
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


def test_rooflines_alone_have_no_interval():
    cost = CostModel(cluster=CLUSTER)
    assert predict_step_interval(PLAN, GRAPH, CLUSTER, cost) is None
    assert explain_step_interval(None) == ""


@pytest.mark.parametrize("spread", [1.0, 1.6])
def test_the_ends_are_the_steps_of_slower_and_faster_ops(spread):
    cost = CostModel(cluster=CLUSTER, measurements=table(spread))
    step_s = simulate_plan(PLAN, GRAPH, CLUSTER, cost=cost).step_time_s
    low, high = predict_step_interval(PLAN, GRAPH, CLUSTER, cost)
    assert low < step_s < high
    # nothing but ops takes time here but for microseconds of transfers and of the optimizer
    whole = cost.price_ops(GRAPH, 2, CLUSTER.device_kind(0)).total()
    assert low / step_s == pytest.approx(whole.low_s / whole.seconds, rel=1e-3)
    assert high / step_s == pytest.approx(whole.high_s / whole.seconds, rel=1e-3)
    assert explain_step_interval((low, high)).startswith("Step time, 80 % interval")


def test_a_cost_model_at_one_end_is_sure_of_it():
    cost = CostModel(cluster=CLUSTER, measurements=table(1.0))
    kind = CLUSTER.device_kind(0)
    whole = cost.price_ops(GRAPH, 2, kind).total()
    for end, expected in (("low", whole.low_s), ("high", whole.high_s)):
        total = cost.at_end(end).price_ops(GRAPH, 2, kind).total()
        assert (total.low_s, total.seconds, total.high_s) == pytest.approx((expected,) * 3)
    assert cost.price_ops(GRAPH, 2, kind).total().seconds == whole.seconds
