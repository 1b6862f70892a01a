"""Balanced cuts against all slicings there are."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.playground.workbench import balanced_cuts


def weights(seconds, cuts):
    return [sum(seconds[start:stop]) for start, stop in pairwise((0, *cuts, len(seconds)))]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_the_slowest_stage_is_as_fast_as_in_any_slicing_and_the_rest_as_even(seconds, data):
    num_stages = data.draw(st.integers(1, len(seconds)))
    cuts = balanced_cuts(np.array(seconds, float), num_stages)
    every = [weights(seconds, chosen) for chosen in combinations(range(1, len(seconds)), num_stages - 1)]
    best = min((max(stages), sum(weight**2 for weight in stages)) for stages in every)
    ours = weights(seconds, cuts)
    assert len(ours) == num_stages
    assert (max(ours), sum(weight**2 for weight in ours)) == pytest.approx(best)


def test_layers_that_take_no_time_are_cut_too():
    assert len(balanced_cuts(np.zeros(5), 5)) == 4
