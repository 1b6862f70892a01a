"""Intervals of devices without rows: what is left out together, how samples are pooled, which step a device takes."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.kernels import Kernel, fit_kernels, shipped_model
from meshwright.cost.kernels.boosting import BoostingSettings
from meshwright.cost.kernels.kernel_fit import STEPS, UNKNOWN, fit_transfers, left_out_sets
from meshwright.cost.kernels.kernel_model import prior_of
from meshwright.records import concat_records
from meshwright.spec import load_cluster
from tests.cost.kernels import LIBRARY, make_gpu, make_rows

FEW_TREES = BoostingSettings(num_trees=20, depth=3)


def test_devices_are_left_out_alone_and_with_those_like_them():
    sets = left_out_sets({"A100": 8.0, "H100": 9.0, "H200": 9.0, "L40S": 8.9})
    assert sorted(map(sorted, sets)) == [["A100"], ["H100"], ["H100", "H200"], ["H200"], ["L40S"]]
    assert sorted(map(sorted, left_out_sets({"H100": 9.0, "H200": 9.0}))) == [["H100"], ["H200"]]
    assert left_out_sets({"A100": 8.0}) == []


def test_samples_have_the_same_weight_however_many_rows_they_have():
    rng = np.random.default_rng(0)
    few, many = rng.uniform(-1, 0, 400), rng.uniform(0, 1, 40_000)
    near = fit_transfers([("near", few), ("near", many)])["near"]
    # The mixture is uniform from -1 to 1, of which 10 % lie below -0.8 and above 0.8.
    assert np.log(near.low) == pytest.approx(-0.8, abs=0.03)
    assert np.log(near.high) == pytest.approx(0.8, abs=0.03)


residuals = st.lists(st.floats(-3, 3), min_size=1, max_size=30).map(np.array)


@given(st.lists(st.tuples(st.sampled_from(STEPS), residuals), max_size=6))
def test_a_larger_step_is_never_surer(samples):
    found = fit_transfers(samples)
    assert set(found) == set(STEPS)
    known = [found[step] for step in STEPS if found[step] is not UNKNOWN]
    for small, large in itertools.pairwise(known):
        assert large.low <= small.low
        assert small.high <= large.high


def test_a_step_that_no_sample_shows_is_as_unsure_as_the_next_larger_one():
    found = fit_transfers([("far", np.linspace(-1, 1, 99))])
    assert found["sister"] == found["near"] == found["far"] != UNKNOWN
    assert set(fit_transfers([]).values()) == {UNKNOWN}


@pytest.mark.parametrize(
    ("dtype", "family", "capability", "step"),
    [
        ("bfloat16", "", 8.0, "sister"),
        ("bfloat16", LIBRARY, 7.5, "near"),
        ("bfloat16", "a kernel of my own", 8.0, "far"),
        ("float16", LIBRARY, 8.0, "far"),
    ],
)
@pytest.mark.matrix
def test_steps_tell_code_architecture_and_arithmetic(dtype, family, capability, step):
    gpu = make_gpu("g1")
    model = fit_kernels(concat_records([make_rows(gpu), make_rows(make_gpu("g2"))]), {"g1": gpu, "g2": make_gpu("g2")})
    new = replace(gpu, name="new", compute_capability=capability, peak_flops_per_s={dtype: 300e12})
    kernel = Kernel(op="matmul", dtype=dtype, device=new)
    assert prior_of(model.groups, kernel, family or model.usual_family(kernel))[1] == step


@pytest.mark.long
def test_a_device_unlike_those_measured_is_covered():
    """Seven devices, each with launches of its own; the interval from six of them holds rows of the seventh."""
    rng = np.random.default_rng(7)
    gpus = {f"g{i}": replace(make_gpu(f"g{i}"), compute_capability=float(i)) for i in range(7)}
    factor = dict(zip(gpus, np.exp(0.3 * rng.standard_normal(7)), strict=True))
    rows = {name: make_rows(gpu, seed=i) for i, (name, gpu) in enumerate(gpus.items())}
    rows = {name: replace(some, seconds=factor[name] * some.seconds) for name, some in rows.items()}
    inside = []
    for out in gpus:
        model = fit_kernels(concat_records([some for name, some in rows.items() if name != out]), gpus, FEW_TREES)
        sizes = {name: rows[out].size(name) for name in "mnk"}
        found = model.predict(Kernel(op="matmul", dtype="bfloat16", device=gpus[out]), sizes)
        assert set(found.basis) == {"transferred"}
        inside.append(((found.low_s <= rows[out].seconds) & (rows[out].seconds <= found.high_s)).mean())
    assert 0.55 < np.mean(inside) < 0.97


@pytest.mark.parametrize("op", ["matmul", "attention_prefill", "attention_decode"])
def test_the_shipped_model_is_surer_of_sisters_than_of_strangers(op):
    found = shipped_model().ops[op].transfers
    assert found["sister"].high / found["sister"].low < 0.9 * found["near"].high / found["near"].low
    assert found["near"].low < found["sister"].low
    assert found["near"].high > found["sister"].high


@pytest.mark.parametrize(
    ("device", "dtype", "step"),
    [("B200", "bfloat16", "near"), ("V100", "float16", "far"), ("B200", "float8_e4m3fn", "far")],
)
def test_devices_without_a_row_take_the_interval_of_their_step(device, dtype, step):
    kernel = Kernel(op="matmul", dtype=dtype, device=load_cluster(device).device_kinds[0])
    found = shipped_model().predict(kernel, {"m": 4096, "n": 4096, "k": 4096})
    assert found.basis == ("transferred",)
    interval = shipped_model().ops["matmul"].transfers[step]
    assert found.low_s[0] == pytest.approx(interval.low * found.seconds[0])
    assert found.high_s[0] == pytest.approx(interval.high * found.seconds[0])
