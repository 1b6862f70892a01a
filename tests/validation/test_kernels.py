"""The kernels' comparison: what is left out stays left out, and what small fits reach already."""

from functools import cache

import numpy as np
import pytest

from meshwright.cost import LAUNCH_S
from meshwright.cost.costs import fit_interval
from meshwright.cost.kernels import fit_kernels
from meshwright.cost.kernels.boosting import BoostingSettings
from meshwright.cost.kernels.demand import demand_of
from meshwright.cost.kernels.kernel_fit import split_parts
from meshwright.cost.kernels.kernel_model import MIN_ROWS
from meshwright.cost.op_estimates import GPU_ROOFLINE
from meshwright.records import concat_records
from meshwright.spec import MeasurementError
from meshwright.validation import kernels, load_records
from meshwright.validation.kernels import (
    NUM_DRAWS,
    NUM_GIVEN,
    best_constant,
    fitted_arms,
    given_rows,
    kinds,
    roofline_seconds,
    score_devices,
    score_folds,
    select_features,
)
from meshwright.validation.scores import read_folds
from tests.cost.kernels import make_gpu, make_rows


@cache
def products():
    rows = load_records("kernels")
    return rows.select((rows.op == "matmul") & (rows.dtype == "bfloat16"))


@pytest.mark.parametrize("op", list(kernels.SPLITS))
def test_the_folds_are_those_of_the_shipped_rows_and_group_devices(op):
    rows = load_records("kernels").where(op=op)
    folds = read_folds(kernels.SPLITS[op], list(rows.shapes))
    assert set(folds) == set(range(5))
    by_key = {}
    for key, fold in zip(rows.shapes, folds, strict=True):
        assert by_key.setdefault(key, fold) == fold


def test_draws_give_as_many_keys_as_they_say_and_grow():
    keys = [f"m={index % 300}" for index in range(400)]
    for draw in range(NUM_DRAWS):
        some, more = (given_rows(keys, draw, count) for count in NUM_GIVEN[1:3])
        assert len({key for key, flag in zip(keys, some, strict=True) if flag}) == NUM_GIVEN[1]
        assert (some <= more).all()
    assert not (given_rows(keys, 0, 20) == given_rows(keys, 1, 20)).all()
    assert not given_rows(keys, 0, 0).any()


def test_rows_that_were_fitted_on_are_not_scored(monkeypatch):
    rows = make_rows(make_gpu("A100"), count=400)
    monkeypatch.setattr(kernels, "folds_of", lambda rows, op: np.arange(len(rows)) % 5)
    monkeypatch.setattr(
        kernels, "fit_kernels", lambda train, kinds: fit_kernels(rows, kinds, BoostingSettings(num_trees=5))
    )
    with pytest.raises(MeasurementError, match="fitted on"):
        list(score_folds(rows, "matmul", folds=(0,), slow_arms=False))


def test_the_best_constant_is_the_best_of_all():
    part = split_parts(make_rows(make_gpu(), count=300), {"g1": make_gpu()})[0]
    bound = roofline_seconds(part)
    errors = {c: np.abs(c * bound / part.seconds - 1).mean() for c in np.linspace(0.5, 10, 500)}
    assert best_constant([part]) == pytest.approx(min(errors, key=errors.__getitem__), abs=0.03)


def test_alike_features_are_used_once():
    rng = np.random.default_rng(0)
    first, second = rng.standard_normal((2, 200))
    features = np.column_stack([first, 2 * first, second, np.ones(200)])
    used = select_features(features, second + 0.1 * first)
    assert len(used) == 2
    assert 2 in used


@pytest.mark.parametrize("arm", [name for name, _ in fitted_arms(slow=True)])
def test_every_arm_predicts_something_sound(arm):
    gpu = make_gpu()
    train, test = (split_parts(make_rows(gpu, count=80, seed=seed), {"g1": gpu})[0] for seed in (0, 1))
    predicted = dict(fitted_arms(slow=True))[arm](train, test)
    assert predicted.shape == test.seconds.shape
    assert (predicted > 0).all()


@pytest.mark.long
def test_products_of_the_untouched_fold_on_sister_devices():
    """H100 and H200 alone, whose bfloat16 products have 2,000 rows each."""
    rows = products()
    some = rows.select(np.isin(rows.device, ["H100", "H200"]))
    for score in score_folds(some, "matmul", folds=(kernels.UNTOUCHED_FOLD,), slow_arms=False):
        if score.arm == "ours":
            assert score.met, score
            assert 70 <= score.coverage <= 90, score
        else:
            assert score.median > 2 * kernels.MEDIAN_TARGET


@pytest.mark.long
def test_a_device_left_out_and_its_first_rows():
    rows = products()
    alone = {d: rows.select(np.flatnonzero(rows.device == d)[:1500]) for d in ("A100", "H100", "H200")}
    scores = {s.part: s for s in score_devices(concat_records(alone.values()), "matmul", ("H200",)) if s.arm == "ours"}
    assert scores["H200 bfloat16, 0 rows given"].met
    assert scores["H200 bfloat16, 20 rows given"].met
    assert scores["H200 bfloat16, 100 rows given"].met
    assert scores["H200 bfloat16, 100 rows given"].mape < scores["H200 bfloat16, 0 rows given"].mape


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_measured_devices_in_full():
    rows = load_records("kernels").where(op="attention_decode")
    scores = [s for s in score_folds(rows, "attention_decode", slow_arms=False) if s.arm == "ours"]
    large = [score for score in scores if score.num_rows >= MIN_ROWS]
    assert len(large) == 7
    for score in large:
        assert score.met, score
        assert 70 <= score.coverage <= 90, score


def test_the_kinds_are_those_of_the_rows():
    rows = load_records("kernels")
    assert set(rows.device) == set(kinds())


def test_the_interval_of_rooflines_on_gpus_is_that_of_products_which_the_memory_bounds():
    ends, count = [], 0
    for part in split_parts(products(), kinds()):
        demand = demand_of("matmul", part.sizes, part.kernel.dtype, part.kernel.family, part.kernel.device)
        bound = demand.memory > demand.flops
        ends.append(fit_interval(part.seconds[bound], demand.memory[bound] + LAUNCH_S))
        count += int(bound.sum())
    assert (len(ends), count) == (4, 8401)
    assert min(interval.low for interval in ends) == pytest.approx(GPU_ROOFLINE.low, abs=0.005)
    assert max(interval.high for interval in ends) == pytest.approx(GPU_ROOFLINE.high, abs=0.005)
