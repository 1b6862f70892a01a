"""The order of runs of one job: Kendall's tau and the regret of the run predicted fastest, against brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.validation.scores import rank_runs

RUNS = st.lists(st.tuples(st.integers(0, 3), st.floats(1, 2), st.floats(1, 2)), min_size=1, max_size=12)


@given(runs=RUNS)
def test_tau_and_regret_are_those_of_brute_force(runs):
    jobs, measured, predicted = zip(*runs, strict=True)
    found = rank_runs(jobs, np.array(measured), np.array(predicted))
    agreeing = pairs = 0
    regrets = []
    for job in set(jobs):
        mine = [(m, p) for j, m, p in runs if j == job]
        if len(mine) < 2:
            continue
        for (m, p), (n, q) in itertools.combinations(mine, 2):
            if abs(np.log(m / n)) > 0.01:
                pairs += 1
                agreeing += ((m > n) - (m < n)) * ((p > q) - (p < q))
        chosen = min(mine, key=lambda run: run[1])
        regrets.append(chosen[0] / min(m for m, _ in mine) - 1)
    assert found.num_jobs == len(regrets)
    assert found.tau == (pytest.approx(agreeing / pairs) if pairs else None)
    assert found.regret == (pytest.approx(100 * np.mean(regrets)) if regrets else None)


def test_the_right_order_is_one_and_the_reverse_minus_one():
    measured = np.array([1.0, 2.0, 3.0])
    right, wrong = (rank_runs("aaa", measured, predicted) for predicted in (measured**2, -measured))
    assert (right.tau, right.regret) == (1.0, 0.0)
    assert (wrong.tau, wrong.regret) == (-1.0, pytest.approx(200.0))
    assert rank_runs("abc", measured, measured).tau is None
