"""Costs of ops: the roofline by hand, the table, and what lies between and beside its entries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost import LAUNCH_S, CostModel
from meshwright.cost.roofline import bound_op
from meshwright.spec import Extent, GraphError, Op
from tests.cost.facts import KIND, B, GraphMaker, linear_graph, make_cluster, make_table, op_row
from tests.graphs import chain_graph
from tests.strategies import graphs


def model(table=None, **settings):
    return CostModel(cluster=make_cluster(), measurements=table, **settings)


def test_the_roofline_of_a_linear_op_by_hand():
    costs = model().estimate_ops(linear_graph(), 2, KIND)
    # forward: 128 FLOP; x 64 B + weight 128 B read, y 32 B written
    assert costs.forward_s[0] == pytest.approx(224e-9 + LAUNCH_S)
    # backward: kept x 64 B, gradient of y 32 B, gradient of the weight 128 B; one kernel, as x needs no gradient
    assert costs.backward_s[0] == pytest.approx(224e-9 + LAUNCH_S)
    # accumulation: gradient of the weight read twice and written once
    assert costs.accumulate_s[0] == pytest.approx(3 * 128e-9 + LAUNCH_S)
    assert costs.basis == ("roofline",) * 3


def test_many_operations_are_bound_by_the_peak_of_the_precision():
    make = GraphMaker()
    x = make.tensor("x", (B,), role="input", grad=False)
    y = make.tensor("y", (B,))
    make.op("aten.costly.default", (x,), (y,), flops=Extent(0, 10**6))
    assert model().estimate_ops(make.graph(), 3, KIND).forward_s[0] == pytest.approx(3e6 / 1e9 + LAUNCH_S)
    half = model(precision="bfloat16").estimate_ops(make.graph(), 3, KIND)
    assert half.forward_s[0] == pytest.approx(3e6 / 4e9 + LAUNCH_S)


def test_half_the_width_moves_half_the_bytes():
    assert model(precision="bfloat16").estimate_ops(linear_graph(), 2, KIND).forward_s[0] == pytest.approx(
        112e-9 + LAUNCH_S
    )


def test_a_view_costs_nothing_and_its_reader_pays():
    costs = model().estimate_ops(linear_graph(), 2, KIND)
    assert costs.forward_s[1] == costs.backward_s[1] == costs.accumulate_s[1] == 0.0
    assert costs.forward_s[2] == pytest.approx(64e-9 + LAUNCH_S)


def test_a_part_of_a_tensor_is_free_to_look_at_but_its_gradient_is_written_whole():
    make = GraphMaker()
    x = make.tensor("x", (B, 100))
    make.op("aten.randn.default", (), (x,))
    part = make.tensor("part", (B,), storage=x)
    make.op("aten.select.int", (x,), (part,), attributes=(("dim", "1"), ("index", "0")))
    costs = model().estimate_ops(make.graph(), 1, KIND)
    assert costs.forward_s[1] == 0.0
    # zeros of 400 B, then the part of 4 B is read and written
    assert costs.backward_s[1] == pytest.approx(408e-9 + LAUNCH_S)


def test_in_place_work_is_no_view():
    make = GraphMaker()
    x = make.tensor("x", (B, 100), role="input", grad=False)
    same = make.tensor("same", (B, 100), storage=x, grad=False)
    make.op("aten.relu_.default", (x,), (same,))
    assert model().estimate_ops(make.graph(), 1, KIND).forward_s[0] == pytest.approx(800e-9 + LAUNCH_S)


def test_looking_up_rows_does_not_read_the_table():
    make = GraphMaker()
    rows = make.tensor("rows", (1000, 100), role="parameter")
    tokens = make.tensor("tokens", (B,), role="input", dtype="int64", grad=False)
    found = make.tensor("found", (B, 100))
    make.op("aten.embedding.default", (rows, tokens), (found,), saved=(tokens,))
    costs = model().estimate_ops(make.graph(), 1, KIND)
    assert costs.forward_s[0] == pytest.approx(808e-9 + LAUNCH_S)
    assert costs.backward_s[0] == pytest.approx((8 + 400 + 400_000) * 1e-9 + LAUNCH_S)


def test_inference_and_frozen_layers_have_no_backward():
    inference = model().estimate_ops(linear_graph("inference"), 2, KIND)
    assert not inference.backward_s.any()
    assert not inference.accumulate_s.any()
    frozen = model().estimate_ops(chain_graph(4, frozen=2), 2, KIND)
    assert [seconds > 0 for seconds in frozen.backward_s] == [False, False, True, True]


def test_an_op_of_a_joint_graph_runs_in_its_own_half():
    make = GraphMaker()
    x = make.tensor("x", (B, 8), role="input", grad=False)
    g = make.tensor("g", (B, 8), grad=False)
    make.op("aten.neg.default", (x,), (g,), phase="backward")
    costs = model().estimate_ops(make.graph(), 1, KIND)
    assert (costs.forward_s[0], costs.backward_s[0]) == (0.0, pytest.approx(64e-9 + LAUNCH_S))


@given(graphs(), st.integers(1, 5))
def test_every_op_has_the_cost_that_it_has_alone(graph, batch_size):
    if graph.batch_size is not None:
        batch_size = graph.batch_size
    costs = model().estimate_ops(graph, batch_size, KIND)
    for index, op in enumerate(graph.ops):
        alone = bound_op(graph, op, batch_size, KIND, "float32")
        columns = (costs.forward_s[index], costs.backward_s[index], costs.accumulate_s[index])
        if op.phase == "backward":
            assert columns == (0.0, alone.forward_s, alone.accumulate_s)
        else:
            assert columns == (alone.forward_s, alone.backward_s, alone.accumulate_s)


@given(st.integers(1, 6), st.integers(1, 6))
def test_a_larger_batch_is_never_cheaper(smaller, more):
    small, large = (model().estimate_ops(linear_graph(), size, KIND) for size in (smaller, smaller + more))
    assert (large.forward_s >= small.forward_s).all()
    assert (large.backward_s >= small.backward_s).all()


def test_what_was_measured_is_taken_as_it_is():
    graph = linear_graph()
    costs = model(make_table((op_row(graph, 0, 2, 7.0, 8.0, 9.0), op_row(graph, 1, 2, 1.0)))).estimate_ops(
        graph, 2, KIND
    )
    assert (costs.forward_s[0], costs.backward_s[0], costs.accumulate_s[0]) == (7.0, 8.0, 9.0)
    assert costs.forward_s[1] == 1.0
    assert costs.basis == ("measured", "measured", "roofline")


@given(st.integers(2, 7), st.floats(1e-9, 1), st.floats(1e-9, 1))
def test_between_two_batches_costs_run_straight(batch_size, low, rise):
    graph = linear_graph()
    rows = (op_row(graph, 0, 1, low, 2 * low), op_row(graph, 0, 8, low + rise, 2 * low + rise))
    costs = model(make_table(rows)).estimate_ops(graph, batch_size, KIND)
    assert costs.basis[0] == "interpolated"
    assert costs.forward_s[0] == pytest.approx(low + rise * (batch_size - 1) / 7)
    assert costs.backward_s[0] == pytest.approx(2 * low + rise * (batch_size - 1) / 7)


def test_the_nearest_two_measured_batches_decide():
    graph = linear_graph()
    rows = [op_row(graph, 0, size, seconds) for size, seconds in ((1, 0.0), (4, 10.0), (8, 30.0), (64, 0.0))]
    assert model(make_table(tuple(rows))).estimate_ops(graph, 6, KIND).forward_s[0] == pytest.approx(20.0)


def test_an_unknown_op_beside_what_was_measured_has_the_ratio_of_rooflines():
    make = GraphMaker()
    x = make.tensor("x", (B, 8), role="input", grad=False)
    make.op("mine.op.default", (x,), (make.tensor("y", (B, 8)),))
    graph = make.graph()
    costs = model(make_table((op_row(graph, 0, 2, 1.0, 1.0, 5.0),))).estimate_ops(graph, 40, KIND)
    assert costs.basis[0] == "transferred"
    # 40 samples: 1280 + 1280 bytes; 2 samples: 128 bytes
    assert costs.forward_s[0] == pytest.approx((2560e-9 + LAUNCH_S) / (128e-9 + LAUNCH_S))
    assert costs.accumulate_s[0] == 5.0


def test_one_measured_op_is_enough_for_its_family():
    graph, wide = linear_graph(), chain_graph(2)
    costs = model(make_table((op_row(wide, 0, 2, 1.0, 2.0),))).estimate_ops(graph, 2, KIND)
    assert costs.basis[0] == "regressed"
    ratio = bound_op(graph, graph.ops[0], 2, KIND, "float32").forward_s
    ratio /= bound_op(wide, wide.ops[0], 2, KIND, "float32").forward_s
    assert costs.forward_s[0] == pytest.approx(ratio, rel=0.3)


def test_an_op_with_other_attributes_is_not_the_same_op():
    make = GraphMaker()
    x = make.tensor("x", (B, 8), role="input", grad=False)
    for power in "23":
        make.op("aten.pow.Scalar", (x,), (make.tensor("y", (B, 8)),), attributes=(("exponent", power),))
    powers = make.graph()
    costs = model(make_table((op_row(powers, 0, 2, 1.0),))).estimate_ops(powers, 2, KIND)
    assert costs.basis == ("measured", "regressed")


def test_a_table_of_another_device_or_precision_is_not_used():
    graph = linear_graph()
    rows = (op_row(graph, 0, 2, 1.0),)
    assert model(make_table(rows, device="other")).estimate_ops(graph, 2, KIND).basis[0] == "roofline"
    assert model(make_table(rows), precision="bfloat16").estimate_ops(graph, 2, KIND).basis[0] == "roofline"
    halves = make_table((op_row(graph, 0, 2, 1.0, dtype="bfloat16"),))
    assert model(halves, precision="bfloat16").estimate_ops(graph, 2, KIND).basis[0] == "measured"


def test_asking_again_gives_the_same_arrays_which_nobody_can_change():
    graph, cost = linear_graph(), model()
    first = cost.estimate_ops(graph, 2, KIND)
    assert cost.estimate_ops(graph, 2, KIND) is first
    assert cost.estimate_ops(graph, 3, KIND) is not first
    with pytest.raises(ValueError, match="read-only"):
        first.forward_s[0] = 0.0


def test_a_batch_that_the_graph_does_not_describe_is_refused():
    make = GraphMaker()
    x = make.tensor("x", (2,), role="input", grad=False)
    make.op("aten.neg.default", (x,), (make.tensor("y", (2,)),))
    free = make.graph()
    fixed = type(free)(
        **{name: getattr(free, name) for name in ("name", "tensors", "ops", "layers", "inputs", "outputs")},
        batch_size=2,
    )
    with pytest.raises(GraphError, match="batch of 3"):
        model().estimate_ops(fixed, 3, KIND)


def test_a_graph_without_ops_has_no_costs():
    make = GraphMaker()
    make.tensor("x", (B,), role="input", grad=False)
    make.ops = [Op(name="none", kind="aten.none.default", inputs=(), outputs=())]
    costs = model().estimate_ops(make.graph(), 1, KIND)
    assert costs.forward_s.tolist() == [0.0]
