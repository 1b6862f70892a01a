"""What the predictor of kernels refuses, and that all else has an answer: a finite time inside its interval."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost import CostModel
from meshwright.cost.kernels import Kernel, adapt_kernels, shipped_model
from meshwright.cost.kernels.demand import MAX_SIZE, SIZES, has_rate
from meshwright.cost.kernels.kernel_fit import split_parts
from meshwright.cost.op_estimates import GPU_ROOFLINE
from meshwright.records import make_records, named_shapes
from meshwright.spec import Extent, MeasurementError, load_cluster
from tests.cost.facts import B, GraphMaker
from tests.cost.kernels import make_rows
from tests.marks import examples

DEVICES = {name: load_cluster(name).device_kinds[0] for name in ("A100", "H100", "L40S", "V100", "B200")}
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fn:block", "bfloat16:kv=float8_e4m3fn")
ODD_DTYPES = ("int8", "complex64", "bool", "float9", "", ":", "bfloat16:kv=", "bfloat16:kv=int8", "bfloat16:kv=nothing")
FAMILIES = ("", "vllm_flash_attn_fa4", "CutlassFP8ScaledMMLinearKernel", "a kernel of my own")
PRODUCT = {"m": 16, "n": 16, "k": 16}
# Whole numbers and what is none, small and beyond all that can be.
odd_sizes = st.one_of(
    st.integers(-2, 2**20),
    st.integers(2**39, 2**41),
    st.floats(),
    st.sampled_from([1e18, 10**30, "16", None, 1j, True, (), [1, 2], [[1]], np.float32(7)]),
)
sound_sizes = st.one_of(st.integers(1, 5000), st.integers(1, MAX_SIZE), st.just(MAX_SIZE))


def kernels():
    return st.builds(
        Kernel,
        op=st.sampled_from(list(SIZES)),
        dtype=st.sampled_from(DTYPES),
        device=st.sampled_from(list(DEVICES.values())),
        family=st.sampled_from(FAMILIES),
    )


@settings(max_examples=examples(200), deadline=None)
@given(kernel=kernels(), data=st.data())
@pytest.mark.long
def test_what_can_be_has_an_answer(kernel, data):
    sizes = {name: data.draw(sound_sizes, name) for name in SIZES[kernel.op]}
    if "heads" in sizes:
        sizes["heads"] = max(sizes["heads"], sizes["kv_heads"])
        sizes["window"] = data.draw(st.sampled_from([0, 1, 4096, MAX_SIZE]), "window")
    if not has_rate(kernel.device, kernel.dtype):
        with pytest.raises(MeasurementError, match="states a rate of"):
            shipped_model().predict(kernel, sizes)
        return
    found = shipped_model().predict(kernel, sizes)
    assert found.seconds.shape == (1,)
    assert 0 < found.low_s[0] < found.seconds[0] < found.high_s[0] < np.inf


@settings(max_examples=examples(200), deadline=None)
@given(kernel=kernels(), odd=st.sampled_from(ODD_DTYPES + DTYPES), data=st.data())
def test_odd_questions_are_refused_or_answered(kernel, odd, data):
    sizes = {name: data.draw(odd_sizes, name) for name in data.draw(st.permutations((*SIZES[kernel.op], "count")))}
    if data.draw(st.booleans(), "without count"):
        del sizes["count"]
    try:
        found = shipped_model().predict(replace(kernel, dtype=odd), sizes)
    except MeasurementError:
        return
    assert (np.isfinite(found.seconds) & (found.seconds > 0)).all()


@pytest.mark.parametrize("dtype", ODD_DTYPES)
def test_odd_dtypes_are_refused(dtype):
    with pytest.raises(MeasurementError, match=r"expected a floating-point dtype .*bfloat16"):
        shipped_model().predict(Kernel(op="matmul", dtype=dtype, device=DEVICES["H100"]), PRODUCT)


@pytest.mark.parametrize("device", ["V100", "A100"])
def test_a_dtype_without_a_rate_is_refused(device):
    with pytest.raises(MeasurementError, match="state the rate"):
        shipped_model().predict(Kernel(op="matmul", dtype="float8_e4m3fn", device=DEVICES[device]), PRODUCT)


@pytest.mark.parametrize("field", ["num_multiprocessors", "cache_bytes", "clock_hz"])
def test_a_datasheet_with_a_gap_is_refused(field):
    device = replace(DEVICES["H100"], **{field: 0})
    with pytest.raises(MeasurementError, match=field):
        shipped_model().predict(Kernel(op="matmul", dtype="bfloat16", device=device), PRODUCT)


def test_a_datasheet_beyond_all_numbers_is_refused():
    device = replace(DEVICES["H100"], peak_flops_per_s={"bfloat16": 1e-300}, clock_hz=1e-300)
    with pytest.raises(MeasurementError, match="Correct the rates"):
        shipped_model().predict(Kernel(op="matmul", dtype="bfloat16", device=device), PRODUCT)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (PRODUCT | {"m": 1e18}, "m is 1e[+]18"),
        (PRODUCT | {"m": 10**30}, "m has dtype object"),
        (PRODUCT | {"m": "16"}, "m has dtype <U2"),
        (PRODUCT | {"m": 1j}, "m has dtype complex128"),
        (PRODUCT | {"m": True}, "m has dtype bool"),
        (PRODUCT | {"m": [[16]]}, "shape"),
        (PRODUCT | {"m": [1, 2], "n": [1, 2, 3]}, r"different lengths \(2, 3\)"),
        (PRODUCT | {"m": [], "n": [1, 2]}, r"different lengths \(0, 2\)"),
        (PRODUCT | {"heads": 2}, "unknown heads"),
    ],
)
def test_sizes_that_are_none_are_refused(sizes, message):
    with pytest.raises(MeasurementError, match=message):
        shipped_model().predict(Kernel(op="matmul", dtype="bfloat16", device=DEVICES["H100"]), sizes)


def test_more_heads_of_keys_than_of_queries_are_refused():
    sizes = dict.fromkeys(SIZES["attention_prefill"], 64) | {"heads": 8}
    with pytest.raises(MeasurementError, match=r"kv_heads is 64 .* as many as heads"):
        shipped_model().predict(Kernel(op="attention_prefill", dtype="bfloat16", device=DEVICES["H100"]), sizes)


def test_one_number_stands_for_all_queries():
    kernel = Kernel(op="matmul", dtype="bfloat16", device=DEVICES["H100"])
    found = shipped_model().predict(kernel, {"m": 64, "n": [512, 4096], "k": [1024]})
    alone = [shipped_model().predict(kernel, {"m": 64, "n": n, "k": 1024}).seconds[0] for n in (512, 4096)]
    assert found.seconds == pytest.approx(alone)


def test_rows_in_odd_dtypes_move_nothing():
    rows = make_rows(DEVICES["A100"], count=5)
    for dtype in ("int8", "float8_e4m3fn"):
        odd = replace(rows, dtype=np.full(len(rows), dtype, object))
        assert adapt_kernels(shipped_model(), odd, DEVICES) is shipped_model()
        assert split_parts(odd, DEVICES) == []


def test_rows_of_sizes_that_cannot_be_are_refused():
    shapes = named_shapes(m=10**17, n=1, k=1)
    rows = make_records(op="matmul", shapes=shapes, dtype="bfloat16", device="H100", seconds=[1.0], source="odd")
    with pytest.raises(MeasurementError, match="m is"):
        adapt_kernels(shipped_model(), rows, DEVICES)


def linear(rows):
    """x (b, rows, 2) → (b, rows, 2)."""
    make = GraphMaker("inference")
    x = make.tensor("x", (B, rows, 2), role="input", grad=False)
    weight = make.tensor("weight", (2, 2), role="parameter")
    y = make.tensor("y", (B, rows, 2), grad=False)
    make.op("aten.linear.default", (x, weight), (y,), flops=Extent(0, 8 * rows))
    return make.graph()


@pytest.mark.parametrize(
    ("device", "precision", "rows"), [("V100", "bfloat16", 64), ("L40S", "float64", 64), ("H100", "bfloat16", 2**41)]
)
def test_a_graph_keeps_the_roofline_of_what_cannot_be_asked(device, precision, rows):
    cluster = load_cluster(device)
    costs = CostModel(cluster=cluster, precision=precision).estimate_ops(linear(rows), 1, cluster.device_kinds[0])
    assert costs.basis == ("roofline",)
    assert costs.high_s[0, 0] == pytest.approx(GPU_ROOFLINE.high * costs.forward_s[0])
