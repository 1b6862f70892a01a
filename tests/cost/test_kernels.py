"""The predictor of kernels: what is demanded, how it is fitted and carried over, and what it refuses."""

import gzip
import itertools
import json
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.kernels import (
    Kernel,
    adapt_kernels,
    fit_kernels,
    read_model,
    shipped_model,
    write_model,
)
from meshwright.cost.kernels.boosting import BoostingSettings, Scale, fit_correction, fit_trees
from meshwright.cost.kernels.demand import CANDIDATES, SPLITS, demand_of, dispatch_of, mean_keys, tiles_of
from meshwright.cost.kernels.law import first_prior, fit_law, law_seconds
from meshwright.records import concat_records, make_records
from meshwright.spec import DocumentError, MeasurementError, load_cluster
from tests.cost.kernels import LIBRARY, make_gpu, make_rows, rule_seconds

FEW_TREES = BoostingSettings(num_trees=40, depth=4)
GPUS = {gpu.name: gpu for gpu in (make_gpu(), make_gpu("g2", speed=2.0), make_gpu("g3", speed=1.3, units=140))}
KNOWN = {name: GPUS[name] for name in ("g1", "g2")}


def column(*numbers):
    return np.array(numbers, float)


def gemm(m, n, k):
    return {"m": column(m), "n": column(n), "k": column(k)}


@cache
def small_model():
    rows = concat_records([make_rows(gpu, seed=index) for index, gpu in enumerate(KNOWN.values())])
    return fit_kernels(rows, GPUS, FEW_TREES)


def ask(model, gpu, m, n, k, dtype="bfloat16", op="matmul"):
    return model.predict(Kernel(op=op, dtype=dtype, device=gpu), {"m": m, "n": n, "k": k})


@given(m=st.integers(1, 5000), n=st.integers(1, 5000), k=st.integers(1, 5000))
def test_demand_of_a_product_counts_tiles_and_waves(m, n, k):
    gpu = make_gpu()
    demand = demand_of("matmul", gemm(m, n, k), "bfloat16", LIBRARY, gpu)
    for way, ((a, b), splits) in enumerate(itertools.product(CANDIDATES, SPLITS)):
        blocks = math.ceil(m / a) * math.ceil(n / b) * splits
        waves = math.ceil(blocks / 100)
        assert demand.each("waves")[way, 0] == waves
        assert demand.each("fill")[way, 0] == pytest.approx(blocks / (100 * waves))
        # Whole waves of whole tiles never do less than the product itself.
        assert demand.each("work")[way, 0] >= demand.flops[0] * (1 - 1e-12)
    assert demand.flops[0] == pytest.approx(2 * m * n * k / 300e12)
    assert demand.memory[0] == pytest.approx(2 * (m * k + k * n + m * n) / 2e12)


@given(queries=st.integers(1, 40), more=st.integers(-30, 60), window=st.integers(0, 50))
def test_mean_keys_is_the_mean_over_the_mask(queries, more, window):
    keys = max(queries + more, 1)
    ends = [keys - queries + i if keys >= queries else min(i, keys) for i in range(1, queries + 1)]
    seen = [min(end, window) if window else end for end in ends]
    assert mean_keys(column(queries), column(keys), column(window))[0] == pytest.approx(np.mean(seen))


def test_float8_kernels_of_hopper_and_ada_choose_their_tiles_as_their_sources_say():
    kernel = "CutlassFP8ScaledMMLinearKernel"
    assert dispatch_of(kernel, 9.0) == "sm90"
    assert dispatch_of(kernel, 8.9) == "sm89"
    m, n, k = column(16, 64, 64, 128, 129, 8192), column(64, 1280, 1281, 64, 64, 64), column(*[6144] * 6)
    ((rows, columns, splits),) = tiles_of("sm90", m, n, k)
    assert rows.tolist() == [16, 16, 64, 64, 128, 256]
    assert columns.tolist() == [64, 64, 64, 128, 128, 128]
    assert splits == 1
    ((rows, columns, _),) = tiles_of("sm89", column(32, 64, 64, 128, 256, 300), column(64, 64, 16384, 64, 64, 8192), k)
    assert rows.tolist() == [32, 64, 64, 64, 64, 256]
    assert columns.tolist() == [64, 64, 128, 128, 128, 128]


def test_the_law_finds_the_factors_that_made_its_rows():
    rng = np.random.default_rng(1)
    m, n, k = 2 ** rng.uniform(4, 13, (3, 400)).round()
    demand = demand_of("matmul", {"m": m, "n": n, "k": k}, "bfloat16", LIBRARY, make_gpu())
    prior = first_prior()
    truth = prior.mean + prior.deviation * rng.standard_normal(len(prior.mean))
    seconds = law_seconds(demand, truth).seconds
    found = law_seconds(demand, fit_law(demand, seconds, prior)).seconds
    untouched = np.abs(law_seconds(demand, prior.mean).seconds / seconds - 1)
    assert np.median(np.abs(found / seconds - 1)) < 0.1 * np.median(untouched)


def test_without_rows_the_law_is_the_prior():
    nothing = {name: np.zeros(0) for name in "mnk"}
    demand = demand_of("matmul", nothing, "bfloat16", LIBRARY, make_gpu())
    assert fit_law(demand, np.zeros(0), first_prior()).tolist() == first_prior().mean.tolist()


@given(size=st.integers(4, 12), more=st.integers(1, 4), which=st.sampled_from("mnk"))
def test_the_law_never_takes_less_time_for_more_tiles(size, more, which):
    """In steps of the largest tile; within one, a library may well be slower on an odd size."""
    sizes = {"m": 256.0 * size, "n": 256.0 * size, "k": 256.0 * size}
    larger = {**sizes, which: sizes[which] * more}
    here, there = (
        law_seconds(demand_of("matmul", gemm(**s), "bfloat16", LIBRARY, make_gpu()), first_prior().mean).seconds[0]
        for s in (sizes, larger)
    )
    assert there >= here * (1 - 1e-12)


def test_trees_learn_a_step_and_nothing_from_noise_alone():
    rng = np.random.default_rng(0)
    columns = rng.standard_normal((3, 2000)).astype(np.float32)
    target = np.where(columns[1] > 0.3, 1.0, -1.0)
    trees = fit_trees(columns, target, BoostingSettings(num_trees=100))
    fresh = rng.standard_normal((3, 500)).astype(np.float32)
    said = trees.evaluate(fresh)
    clear = np.abs(fresh[1] - 0.3) > 0.1
    wrong = np.abs(said - np.where(fresh[1] > 0.3, 1.0, -1.0))[clear]
    assert wrong.max() < 0.5
    assert wrong.mean() < 0.05
    noise = fit_trees(columns, rng.standard_normal(2000), FEW_TREES).evaluate(fresh)
    assert noise.std() < 0.5


def test_trees_agree_with_a_walk_through_their_tables():
    rng = np.random.default_rng(0)
    columns = rng.standard_normal((4, 300)).astype(np.float32)
    trees = fit_trees(columns, rng.standard_normal(300), FEW_TREES)
    for row in (0, 7, 299):
        total = 0.0
        for features, thresholds, values in zip(trees.features, trees.thresholds, trees.values, strict=True):
            answers = columns[features, row] > thresholds
            total += values[sum(int(answer) << level for level, answer in enumerate(answers))]
        assert trees.evaluate(columns)[row] == pytest.approx(total, abs=1e-4)


def test_a_correction_goes_through_its_rows_and_fades_away():
    scale = Scale(spread=np.ones(2), amplitude=0.2, noise=1e-4)
    points = np.array([[0.0, 0.0], [3.0, 1.0]])
    correction = fit_correction(points, np.array([0.1, -0.2]), scale)
    assert correction.evaluate(points) == pytest.approx([0.1, -0.2], abs=1e-4)
    assert correction.evaluate(np.array([[50.0, 50.0]])) == pytest.approx([0.0], abs=1e-12)


def test_measured_devices_are_regressed_and_others_transferred():
    model = small_model()
    m, n, k = (np.array([96.0, 640.0, 3000.0, 5000.0]) for _ in range(3))
    for gpu, basis, error in ((GPUS["g1"], "regressed", 0.15), (GPUS["g3"], "transferred", 0.3)):
        found = ask(model, gpu, m, n, k)
        assert set(found.basis) == {basis}
        assert np.abs(found.seconds / rule_seconds(m, n, k, gpu) - 1).max() < error
        assert (found.low_s < found.seconds).all()
        assert (found.high_s > found.seconds).all()


def test_given_rows_make_a_new_device_surer():
    model = small_model()
    gpu = replace(GPUS["g3"], name="slow", peak_flops_per_s={"bfloat16": 800e12})  # half of its datasheet at best
    truth = make_rows(replace(GPUS["g3"], name="slow"), count=200, seed=9)
    sizes = {name: truth.size(name).astype(float) for name in "mnk"}

    def error(fitted):
        return np.abs(ask(fitted, gpu, **sizes).seconds / truth.seconds - 1).mean()

    some = adapt_kernels(model, make_rows(replace(GPUS["g3"], name="slow"), count=40, seed=5), {"slow": gpu})
    assert error(some) < 0.5 * error(model)
    assert set(ask(some, gpu, **sizes).basis) == {"regressed"}
    assert len(some.row_hashes) == len(model.row_hashes) + 40


def test_flagged_rows_and_other_devices_are_left_out():
    rows = make_rows(GPUS["g3"], count=3)
    nothing = make_records(
        op="matmul", shapes="m=0;n=1;k=1", dtype="bfloat16", device="g3", seconds=[0.0], flags="noop"
    )
    other = make_rows(make_gpu("g9"), count=5)
    some = adapt_kernels(small_model(), concat_records([rows, nothing, other]), GPUS)
    assert len(some.row_hashes) == len(small_model().row_hashes) + 3
    assert {group.device for group in some.groups} == {"g1", "g2", "g3"}


def test_one_row_is_enough_to_adapt_to():
    gpu = replace(GPUS["g3"], name="new")
    some = adapt_kernels(small_model(), make_rows(gpu, count=1), {"new": gpu})
    assert ask(some, gpu, 512, 512, 512).basis == ("regressed",)


def test_a_stored_model_says_the_same(tmp_path):
    model = adapt_kernels(small_model(), make_rows(GPUS["g3"], count=10), GPUS)
    again = read_model(write_model(model, tmp_path / "kernels.json.gz"))
    m, n, k = np.random.default_rng(0).integers(1, 5000, (3, 50)).astype(float)
    for gpu in GPUS.values():
        here, there = ask(model, gpu, m, n, k), ask(again, gpu, m, n, k)
        assert there.seconds == pytest.approx(here.seconds, rel=1e-3)
        assert there.high_s == pytest.approx(here.high_s, rel=1e-3)
    assert again.row_hashes.tolist() == model.row_hashes.tolist()


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return write_model(small_model(), tmp_path_factory.mktemp("model") / "kernels.json.gz")


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(schema="meshwright/kernels/999"),
        lambda d: d["ops"].update(conv=d["ops"]["matmul"]),
        lambda d: d["ops"]["matmul"]["features"][0].__setitem__(0, 999),
        lambda d: d["ops"]["matmul"]["features"][0].__setitem__(0, -1),
        lambda d: d["ops"]["matmul"]["values"][0].__setitem__(0, float("nan")),
        lambda d: d["ops"]["matmul"]["values"].pop(),
        lambda d: d["ops"]["matmul"].update(spread=[0.0]),
        lambda d: d["groups"][0]["factors"].update(launch_s=-1),
        lambda d: d["groups"][0]["factors"].pop("launch_s"),
        lambda d: d["groups"][0].update(interval=[2.0, 0.5]),
        lambda d: d.update(row_hashes="?"),
        lambda d: d.update(families=[1]),
        lambda d: d.update(groups=7),
    ],
)
def test_damaged_models_are_refused(stored, tmp_path, change):
    document = json.loads(gzip.decompress(stored.read_bytes()))
    change(document)
    path = tmp_path / "damaged.json.gz"
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    with pytest.raises(DocumentError, match=r"damaged\.json\.gz: not a valid kernel predictor"):
        read_model(path)


# Names of their own: what gzip writes holds the time, and processes that share the tests must see the same names.
@pytest.mark.parametrize(
    "content",
    [b"", b"{}", gzip.compress(b"[]"), gzip.compress(b"{"), gzip.compress(b"{}")[:-4]],
    ids=["empty", "no gzip", "a list", "half an object", "cut off"],
)
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "other.json.gz"
    path.write_bytes(content)
    with pytest.raises(DocumentError, match="not a valid kernel predictor"):
        read_model(path)


@pytest.mark.parametrize("wrong", [0, -1, math.nan, math.inf])
@pytest.mark.parametrize("name", ["m", "n", "k", "count"])
def test_sizes_that_cannot_be_are_refused(name, wrong):
    sizes = {"m": 16.0, "n": 16.0, "k": 16.0, "count": 1.0, name: wrong}
    with pytest.raises(MeasurementError, match=f"{name} is"):
        small_model().predict(Kernel(op="matmul", dtype="bfloat16", device=GPUS["g1"]), sizes)


def test_missing_sizes_unknown_ops_and_bare_datasheets_are_refused():
    kernel = Kernel(op="matmul", dtype="bfloat16", device=GPUS["g1"])
    with pytest.raises(MeasurementError, match="missing sizes k"):
        small_model().predict(kernel, {"m": 1, "n": 1})
    with pytest.raises(MeasurementError, match="does not contain the op 'fft'"):
        ask(small_model(), GPUS["g1"], 1, 1, 1, op="fft")
    with pytest.raises(MeasurementError, match="num_multiprocessors"):
        ask(small_model(), replace(GPUS["g1"], num_multiprocessors=0), 1, 1, 1)


def test_no_queries_have_no_answers():
    found = ask(small_model(), GPUS["g1"], [], [], [])
    assert found.seconds.shape == (0,)
    assert found.basis == ()


def test_too_few_rows_fit_nothing():
    with pytest.raises(MeasurementError, match="200 measured rows"):
        fit_kernels(make_rows(GPUS["g1"], count=20), GPUS, FEW_TREES)


@pytest.mark.parametrize("name", ["A100", "H100", "H200", "L40S"])
def test_the_shipped_model_knows_its_devices(name):
    device = load_cluster(name).device_kinds[0]
    found = ask(shipped_model(), device, 4096, 4096, 4096)
    assert found.basis == ("regressed",)
    share = 2 * 4096**3 / device.peak_flops_per_s["bfloat16"] / found.seconds[0]
    assert 0.4 < share < 1.0


def test_a_batch_of_products_lies_between_one_and_all_of_them_alone():
    kernel = Kernel(op="matmul", dtype="bfloat16", device=load_cluster("H100").device_kinds[0])
    one, many = (
        shipped_model().predict(kernel, {"m": 512, "n": 512, "k": 64, "count": count}).seconds[0] for count in (1, 64)
    )
    assert one < many < 64 * one
