"""Packed columns are read by an independent decoder; the browser's is tested in tests/browser."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.report.page import pack_column
from tests.report.page.decoding import decode_column

numbers = st.lists(st.integers(-(2**53), 2**53), max_size=300)


@given(numbers, st.booleans(), st.booleans())
def test_what_is_packed_is_read_again(values, delta, deflate):
    column = pack_column(np.array(values, np.int64), delta=delta, deflate=deflate)
    assert decode_column(column) == values


@given(st.lists(st.integers(-(2**62), 2**62), max_size=50))
def test_all_of_int64_is_packed(values):
    assert decode_column(pack_column(np.array(values, np.int64))) == values


@pytest.mark.parametrize(("value", "size"), [(0, 1), (63, 1), (-64, 1), (64, 2), (8191, 2), (8192, 3), (2**53, 8)])
def test_a_number_takes_the_bytes_of_leb128(value, size):
    # zigzag doubles; seven bits a byte
    assert len(decode_column(pack_column(np.array([value])))) == 1
    data = pack_column(np.array([value] * 9), deflate=False)["data"]
    assert len(data) * 3 // 4 == 9 * size


def test_short_columns_are_not_deflated_and_long_even_ones_shrink():
    assert not pack_column(np.arange(100), delta=True)["deflate"]
    long = pack_column(np.full(100_000, 12345))
    assert long["deflate"]
    assert len(long["data"]) < 2000
