"""How intervals of ops add up to intervals of sums."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost import CostModel, add_intervals
from meshwright.cost.op_estimates import ROOFLINE
from tests.cost.facts import KIND, linear_graph, make_cluster, make_table, op_row
from tests.graphs import chain_graph


def test_what_errs_together_adds_up_and_what_does_not_adds_in_squares():
    seconds, low, high = np.full(4, 10.0), np.full(4, 7.0), np.full(4, 14.0)
    together = add_intervals(seconds, low, high, np.zeros(4, np.int64))
    assert (together.seconds, together.low_s, together.high_s) == (40.0, 28.0, 56.0)
    apart = add_intervals(seconds, low, high, np.arange(4))
    assert (apart.low_s, apart.high_s) == (40.0 - 6.0, 40.0 + 8.0)
    pairs = add_intervals(seconds, low, high, np.array([5, 5, 9, 9]))
    assert pairs.high_s == pytest.approx(40.0 + np.sqrt(8.0**2 + 8.0**2))


@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1), st.floats(1, 9), st.integers(0, 3)), min_size=1))
def test_a_sum_lies_in_its_interval_which_grows_with_what_is_shared(rows):
    seconds, below, above, group = (np.array(column) for column in zip(*rows, strict=True))
    low, high = seconds * below, seconds * above
    alone = add_intervals(seconds, low, high, np.arange(len(rows)))
    grouped = add_intervals(seconds, low, high, group)
    together = add_intervals(seconds, low, high, np.zeros(len(rows), np.int64))
    slack = 1e-9 * (1 + seconds.sum())
    for narrow, wide in ((alone, grouped), (grouped, together)):
        assert wide.low_s <= narrow.low_s + slack
        assert wide.high_s >= narrow.high_s - slack
    assert 0.0 <= grouped.low_s <= grouped.seconds + slack <= grouped.high_s + 2 * slack


def test_instances_of_one_op_err_together_and_so_do_all_rooflines():
    graph = chain_graph(4)
    cost = CostModel(cluster=make_cluster())
    costs = cost.estimate_ops(graph, 2, KIND)
    assert set(costs.basis) == {"roofline"}
    assert len(set(costs.group.tolist())) == 1
    total = costs.total()
    assert total.seconds == pytest.approx(float((costs.forward_s + costs.backward_s).sum()))
    assert total.high_s == pytest.approx(float(costs.high_s[:, :2].sum()))


def test_a_measured_op_is_as_unsure_as_another_run_or_its_own_spread():
    graph = linear_graph()
    steady, restless = (op_row(graph, 0, size, 1.0) for size in (2, 3))
    restless = type(restless)(key=restless.key, forward_s=1.0, backward_s=1.0, num_samples=5, spread=1.6)
    cost = CostModel(cluster=make_cluster(), measurements=make_table((steady, restless)))
    quiet, wide = (cost.estimate_ops(graph, size, KIND) for size in (2, 3))
    assert quiet.basis[0] == wide.basis[0] == "measured"
    assert 0.5 < quiet.low_s[0, 0] < 1.0 < quiet.high_s[0, 0] < 1.6
    assert (wide.low_s[0, 0], wide.high_s[0, 0]) == (pytest.approx(0.2), pytest.approx(1.8))
    assert not quiet.low_s.flags.writeable


def test_a_spread_beyond_reason_leaves_the_interval_finite():
    graph = linear_graph()
    row = op_row(graph, 0, 2, 1.0)
    wild = type(row)(key=row.key, forward_s=1.0, backward_s=1.0, num_samples=5, spread=1e300)
    costs = CostModel(cluster=make_cluster(), measurements=make_table((wild,))).estimate_ops(graph, 2, KIND)
    assert costs.low_s[0, 0] == 0.0
    assert costs.high_s[0, 0] == ROOFLINE.high
    assert costs.total().high_s < 100.0
