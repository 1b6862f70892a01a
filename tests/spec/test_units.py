"""Units as people read them, picoseconds, measurements' keys and the errors' suggestions."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec import (
    MAX_SECONDS,
    MIN_SECONDS,
    MeasurementError,
    Measurements,
    OpMeasurement,
    OptimizerMeasurement,
    TransferMeasurement,
    format_bytes,
    format_flops,
    format_percent,
    format_seconds,
    op_key,
    suggest,
    to_picoseconds,
    to_seconds,
)
from tests.spec.examples import GRAPH


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1.5, "1.5 s"),
        (0.9996, "1000 ms"),
        (0.00124, "1.24 ms"),
        (7e-06, "7 µs"),
        (3e-10, "0.3 ns"),
        (12345.6, "12346 s"),
        (-0.002, "-2 ms"),
        (1e-09, "1 ns"),
    ],
)
def test_seconds(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1023 * 1024, "1023 KiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (5000 * 2**40, "5000 TiB"),
        (-(2**20), "-1 MiB"),
    ],
)
def test_bytes(number, text):
    assert format_bytes(number) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 FLOP"), (2.1e12, "2.1 TFLOP"), (3e18, "3000 PFLOP"), (12345, "12345 FLOP")]
)
def test_flops(number, text):
    assert format_flops(number) == text


@given(st.floats(-1e15, 1e15))
def test_formatted_numbers_are_near_and_without_exponent(value):
    factors = {"s": 1, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
    number, unit = format_seconds(value).split(" ")
    assert float(number) * factors[unit] == pytest.approx(value, rel=0.006, abs=1e-12 if value == 0 else 0)
    assert "e" not in number or abs(value) < 1e-12


@given(st.integers(-(10**15), 10**15))
def test_picoseconds_survive(picoseconds):
    assert to_picoseconds(to_seconds(picoseconds)) == picoseconds


def test_the_key_of_an_op():
    linear, mean = GRAPH.ops
    assert op_key(GRAPH, linear, 3) == "aten.linear.default(3x4:float32,4x4:float32;p=0.5|01)"
    assert op_key(GRAPH, mean, 1) == "aten.mean.default(1x4:float32|1)"
    # what changes the work changes the key; what does not, does not
    assert op_key(GRAPH, replace(linear, attributes=()), 3) != op_key(GRAPH, linear, 3)
    assert op_key(GRAPH, replace(linear, name="other", module="c"), 3) == op_key(GRAPH, linear, 3)


@pytest.mark.parametrize(
    ("value", "at_3"),
    [
        ("[2, b, 64]", "[2, 3, 64]"),
        ("[b]", "[3]"),
        ("b", "3"),
        ("[4*b+1, -1]", "[13, -1]"),
        ("[2, 3, 64]", "[2, 3, 64]"),
        ("bilinear", "bilinear"),
        ("b->b", "b->b"),
        ("[b, bb]", "[b, bb]"),
        ("False", "False"),
    ],
)
def test_sizes_among_attributes_are_those_of_the_batch(value, at_3):
    op = replace(GRAPH.ops[0], attributes=(("size", value),))
    assert op_key(GRAPH, op, 3) == f"aten.linear.default(3x4:float32,4x4:float32;size={at_3}|01)"


@pytest.mark.parametrize(
    "odd", [-1.0, float("nan"), float("inf"), MAX_SECONDS * 1.001, 1e300, MIN_SECONDS / 1.001, 5e-324]
)
def test_impossible_measurements(odd):
    for name in ("forward_s", "backward_s", "accumulate_s"):
        with pytest.raises(MeasurementError, match="not a number"):
            OpMeasurement(**{"key": "k", "forward_s": 1.0, "backward_s": 1.0, "num_samples": 1, name: odd})
    with pytest.raises(MeasurementError, match="impossible"):
        OptimizerMeasurement(kind="adamw", dtype="float32", num_elements=1, num_tensors=1, seconds=odd)
    with pytest.raises(MeasurementError, match="impossible"):
        Measurements(device="cpu", software="", date="", overhead_s=odd)
    for changes in ({"seconds": 0.0}, {"seconds": odd}, {"host_s": odd}, {"num_bytes": -1}, {"num_ranks": 1}):
        values = {"kind": "send", "num_ranks": 2, "num_bytes": 1, "seconds": 1.0}
        with pytest.raises(MeasurementError):
            TransferMeasurement(**{**values, **changes})


@pytest.mark.parametrize("seconds", [0.0, MIN_SECONDS, 1.0, MAX_SECONDS])
def test_times_within_the_bounds(seconds):
    op = OpMeasurement(key="k", forward_s=seconds, backward_s=seconds, accumulate_s=seconds, num_samples=1)
    assert Measurements(device="cpu", software="", date="", ops=(op,), overhead_s=seconds).ops == (op,)


@pytest.mark.parametrize("odd", [-1.0, float("nan"), float("inf")])
def test_impossible_spreads(odd):
    with pytest.raises(MeasurementError, match="not a number"):
        OpMeasurement(key="k", forward_s=1.0, backward_s=1.0, num_samples=1, spread=odd)


def test_suggestions():
    assert suggest("gpt2-smal", ["gpt2-small", "vgg16"]) == " (did you mean 'gpt2-small'?)"
    assert suggest("zzz", ["b", "a"]) == " (known are a, b)"
    assert suggest("zzz", []) == ""
    assert suggest("zzz", [f"a{i:02d}" for i in range(50)]).endswith("a46, a47 and 2 more)")


@pytest.mark.parametrize("seconds", [1e300, float("inf"), float("nan"), 1e7])
def test_a_time_that_a_simulation_cannot_hold_is_refused(seconds):
    with pytest.raises(MeasurementError, match="longer than a simulation can hold"):
        to_picoseconds(seconds)


@pytest.mark.parametrize(("share", "digits", "text"), [(0.1234, 1, "12.3 %"), (0.615, 0, "62 %"), (0.0, 1, "0.0 %")])
def test_a_share_is_a_percentage_after_a_space(share, digits, text):
    assert format_percent(share, digits) == text
