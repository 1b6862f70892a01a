"""Even slices against every way to cut, to the last bit of a sum."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.rank_layouts import slice_evenly
from tests.marks import examples


def largest(seconds, bounds):
    """Sums as they are made one after the other."""
    sums = []
    for start, stop in bounds:
        total = 0.0
        for each in seconds[start:stop]:
            total += each
        sums.append(total)
    return max(sums)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.floats(0, 1) | st.sampled_from([0.0, 0.1, 1.0, 3.0]), min_size=1, max_size=8), st.data())
def test_no_cut_has_a_smaller_largest_slice(seconds, data):
    count = data.draw(st.integers(1, len(seconds)))
    found = slice_evenly(seconds, count)
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == len(seconds)
    assert all(start < stop for start, stop in found)
    every = itertools.combinations(range(1, len(seconds)), count - 1)
    cuts = [list(itertools.pairwise((0, *cut, len(seconds)))) for cut in every]
    assert largest(seconds, found) == min(largest(seconds, bounds) for bounds in cuts)
