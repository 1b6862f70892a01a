"""Larger products take longer: always by the law; by the whole predictor they fall less often than measured ones do."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_order import next_larger, share_of_falls, share_of_false_falls

from meshwright.cost.kernels import shipped_model
from meshwright.cost.kernels.demand import demand_of
from meshwright.cost.kernels.kernel_fit import split_parts
from meshwright.cost.kernels.kernel_model import MIN_ROWS
from meshwright.cost.kernels.law import law_seconds
from meshwright.validation import load_records
from meshwright.validation.kernels import kinds
from tests.marks import examples

LIBRARY = "torch.nn.functional.linear"
KINDS = kinds()


@settings(max_examples=examples(300), deadline=None)
@given(
    st.sampled_from(sorted(KINDS)),
    st.tuples(*[st.integers(1, 300)] * 3),
    st.sampled_from("mnk"),
    st.integers(1, 300),
    st.sampled_from([1, 8, 64]),
)
def test_the_law_never_falls(device, sizes, name, more, aligned):
    group = next(g for g in shipped_model().groups if (g.device, g.family, g.dtype) == (device, LIBRARY, "bfloat16"))
    small = dict(zip("mnk", aligned * np.array(sizes, float), strict=True))
    both = {size: np.array([number, number + (size == name) * aligned * more]) for size, number in small.items()}
    demand = demand_of("matmul", both, "bfloat16", LIBRARY, KINDS[device])
    here, there = law_seconds(demand, group.factors).seconds
    assert there >= here * (1 - 1e-9)


def test_pairs_are_those_next_to_each_other_with_the_same_alignment():
    sizes = {"m": np.array([128.0, 64, 100, 256, 64, 7]), "n": np.array([8.0] * 4 + [9, 8]), "k": np.full(6, 8.0)}
    pairs = next_larger(sizes)
    assert sorted(map(tuple, pairs.tolist())) == [(0, 3), (1, 0)]
    predicted = np.array([1.0, 1.1, 0, 0.9, 0, 0])
    assert share_of_falls(predicted, pairs) == 1.0
    # Of the two falls, only that from 128 rows to 256 is measured as well.
    assert share_of_false_falls(predicted, np.array([1.0, 0.9, 0, 0.8, 0, 0]), pairs) == 0.5


PARTS = {
    f"{part.kernel.device.name} {part.kernel.dtype} {part.kernel.family}": part
    for part in split_parts(load_records("kernels").where(op="matmul"), KINDS)
    if len(part.seconds) >= MIN_ROWS
}


@pytest.mark.parametrize("name", PARTS)
def test_larger_products_are_cheaper_less_often_than_measured_ones(name):
    part = PARTS[name]
    pairs = next_larger(part.sizes)
    assert len(pairs) >= 50
    predicted = shipped_model().predict(part.kernel, part.sizes).seconds
    measured = share_of_falls(part.seconds, pairs)
    assert share_of_falls(predicted, pairs) < measured
    assert share_of_false_falls(predicted, part.seconds, pairs) < 0.25 * measured
