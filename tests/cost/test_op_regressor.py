"""Learned costs of ops: laws that are known, leaving out by brute force, and what is not claimed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost import CostModel
from meshwright.cost.ops import PASSES, fit_op_regressor
from meshwright.cost.ops import regressor as module
from meshwright.cost.work import read_work, relatives
from meshwright.spec import OpMeasurement, load_cluster
from tests.cost.facts import KIND, linear_graph, make_cluster, make_table, op_row

PEAK, BANDWIDTH, CALL_S = 3e8, 4e8, 9e-6


def linear_key(rows, columns, depth, batch=1):
    return f"aten.linear.default({batch}x{rows}x{depth}:float32,{columns}x{depth}:float32|11)"


def relu_key(*sizes, dtype="float32"):
    return f"aten.relu.default({'x'.join(map(str, sizes))}:{dtype}|1)"


def law(key):
    """A device that is a third as fast as its datasheet: times of any op, by hand."""
    work = read_work(key)

    def seconds(amount):
        return amount.flops / PEAK + amount.num_bytes / BANDWIDTH + amount.num_calls * CALL_S

    parts = {f"{part}_s": seconds(getattr(work, part)) for part in PASSES}
    return OpMeasurement(key=key, num_samples=10, **parts)


SIZES = (16, 64, 256, 1024)
LINEAR = tuple(law(linear_key(m, n, k)) for m in SIZES for n in SIZES for k in SIZES)
RELU = tuple(law(relu_key(m, n)) for m in (1, 8, 64, 512) for n in (10, 100, 1000, 10000))


@pytest.mark.parametrize("part", PASSES)
def test_a_law_of_the_form_is_found_between_its_rows(part):
    regressor = fit_op_regressor(LINEAR, KIND, "float32")
    keys = [linear_key(m, n, k, b) for m, n, k, b in ((128, 128, 128, 1), (100, 700, 40, 1), (32, 512, 512, 2))]
    found = regressor.predict(keys, part)
    expected = np.array([getattr(law(key), f"{part}_s") for key in keys])
    assert found.seconds == pytest.approx(expected, rel=0.05)
    assert ((found.low_s < expected) & (expected < found.high_s)).all()
    assert found.basis == ("regressed",) * 3


def test_an_op_far_from_all_rows_is_less_sure():
    regressor = fit_op_regressor(LINEAR, KIND, "float32")
    found = regressor.predict([linear_key(200, 200, 200), linear_key(2**20, 2, 2)], "forward")
    width = np.log(found.high_s / found.low_s)
    assert width[1] > 2 * width[0]


def test_a_new_operator_is_estimated_by_its_family_with_doubt():
    regressor = fit_op_regressor(RELU, KIND, "float32")
    known, new = relu_key(30, 300), relu_key(30, 300).replace("relu", "silu")
    found = regressor.predict([known, new], "forward")
    assert found.seconds[1] == pytest.approx(found.seconds[0], rel=0.2)
    assert found.high_s[1] / found.low_s[1] > found.high_s[0] / found.low_s[0]


def test_on_a_gpu_few_rows_do_not_replace_the_shipped_predictor():
    gpu = load_cluster("1xH100").device_kind(0)
    assert not fit_op_regressor(LINEAR[:3], gpu, "float32").knows(linear_key(3, 5, 7))
    assert fit_op_regressor(LINEAR[:3], KIND, "float32").knows(linear_key(3, 5, 7))


def test_what_was_not_measured_is_not_known():
    regressor = fit_op_regressor(LINEAR[:20], KIND, "float32")
    assert regressor.knows(linear_key(3, 5, 7))
    assert not regressor.knows(relu_key(5, 6))
    assert not regressor.knows("aten.conv2d.default(1x3x8x8:float32,4x3x3x3:float32|11)")
    assert not regressor.knows(linear_key(3, 5, 7).replace("float32", "bfloat16"))
    assert not regressor.knows("mine.op.default(3:float32|1)")


def test_times_below_the_clock_teach_nothing():
    rows = [OpMeasurement(key=row.key, forward_s=1e-7, backward_s=0.0, num_samples=1) for row in LINEAR]
    assert not fit_op_regressor(rows, KIND, "float32").processes


def test_relatives_are_the_other_batch_sizes():
    assert relatives(linear_key(8, 4, 2, batch=1)) == relatives(linear_key(8, 4, 2, batch=3))
    assert relatives(linear_key(8, 4, 2)) != relatives(linear_key(9, 4, 2))


def test_leaving_relatives_out_is_what_refitting_without_them_gives():
    rng = np.random.default_rng(0)
    rows = [
        OpMeasurement(
            key=linear_key(m, 64, k, b), forward_s=float(rng.uniform(1e-5, 1e-3)), backward_s=0.0, num_samples=1
        )
        for m in (4, 8)
        for k in (16, 32, 128)
        for b in (1, 2)
    ]
    known = [(read_work(row.key), row) for row in rows]
    process = module._fit_family(known, "forward", KIND, "float32")
    ratios = process.left_out([relatives(row.key) for row in rows])
    covariance = module._covariance(process.points, process.points)
    residual = np.log([row.forward_s for row in rows]) - module.explain(process.points.bounds, process.factors)
    for place, row in enumerate(rows):
        others = [i for i, other in enumerate(rows) if relatives(other.key) != relatives(row.key)]
        within = covariance[np.ix_(others, others)] + module._NOISE**2 * np.eye(len(others))
        across = covariance[place, others]
        mean = across @ np.linalg.solve(within, residual[others])
        variance = covariance[place, place] + module._NOISE**2 - across @ np.linalg.solve(within, across)
        assert ratios[place] == pytest.approx(abs(residual[place] - mean) / np.sqrt(variance))


@given(st.permutations(range(16)))
def test_the_order_of_rows_does_not_matter(order):
    first = fit_op_regressor(RELU, KIND, "float32").estimate(relu_key(20, 50))
    second = fit_op_regressor([RELU[i] for i in order], KIND, "float32").estimate(relu_key(20, 50))
    assert second.seconds.forward_s == pytest.approx(first.seconds.forward_s)
    assert second.high.backward_s == pytest.approx(first.high.backward_s)


def test_four_fifths_of_rows_left_out_are_inside_the_interval():
    rng = np.random.default_rng(1)
    rows = [
        OpMeasurement(
            key=row.key, forward_s=row.forward_s * float(np.exp(rng.normal(0, 0.4))), backward_s=0.0, num_samples=1
        )
        for row in LINEAR
    ]
    left_out = rng.permutation(len(rows))[:32]
    regressor = fit_op_regressor([row for i, row in enumerate(rows) if i not in left_out], KIND, "float32")
    measured = np.array([rows[i].forward_s for i in left_out])
    found = regressor.predict([rows[i].key for i in left_out], "forward")
    assert 0.6 <= np.mean((found.low_s <= measured) & (measured <= found.high_s)) <= 0.97


def test_the_cost_model_learns_from_its_table():
    graph = linear_graph()
    # ops of other sizes at the same table: x (b, 8) by (4, 8) itself was never measured
    costs = CostModel(cluster=make_cluster(), measurements=make_table(LINEAR)).estimate_ops(graph, 64, KIND)
    assert costs.basis == ("regressed", "roofline", "roofline")
    assert costs.forward_s[0] == pytest.approx(law(linear_key(64, 4, 8)).forward_s, rel=0.3)
    assert (costs.low_s <= costs.high_s).all()
    assert costs.low_s[0, 0] < costs.forward_s[0] < costs.high_s[0, 0]


def test_a_measured_row_still_decides():
    graph = linear_graph()
    table = make_table((*LINEAR, op_row(graph, 0, 64, 0.5, 0.25)))
    costs = CostModel(cluster=make_cluster(), measurements=table).estimate_ops(graph, 64, KIND)
    assert (costs.basis[0], costs.forward_s[0], costs.backward_s[0]) == ("measured", 0.5, 0.25)
