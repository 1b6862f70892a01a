"""The line through batch sizes against other ways to find it; names of models; batches that cannot be."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwright.spec import (
    BatchMeasurement,
    MeasurementError,
    Measurements,
    fit_latency,
    name_model,
    read_document,
    write_document,
)

seconds = st.floats(1e-6, 1e3)
rows = st.lists(st.tuples(st.integers(1, 4096), seconds, st.floats(0.01, 100)), min_size=2, max_size=8)
BATCH = {"model": "m", "batch_size": 2, "seconds": 1.0, "p90_s": 2.0, "p99_s": 3.0, "num_samples": 20}


def system(sizes, times, weights):
    """The rows of the least squares problem, written down once more: (αb + β) / t = 1, each times √w."""
    sizes, times, roots = np.array(sizes, float), np.array(times), np.sqrt(weights)
    return np.column_stack([sizes / times, 1 / times]) * roots[:, None], roots


@given(rows)
def test_no_line_has_less_error(rows):
    pytest.importorskip("scipy")
    from scipy.optimize import nnls

    sizes, times, weights = map(list, zip(*rows, strict=True))
    assume(len(set(sizes)) > 1)
    matrix, target = system(sizes, times, weights)
    found = np.array(fit_latency(sizes, times, weights))
    scale = np.linalg.norm(matrix, axis=0)
    best, least = nnls(matrix / scale, target)
    assert (found >= 0).all()
    assert np.linalg.norm(matrix @ found - target) == pytest.approx(least, rel=1e-6, abs=1e-9)
    np.testing.assert_allclose(found * scale, best, rtol=1e-4, atol=1e-6 * np.abs(best).max())


@given(st.lists(st.integers(1, 64), min_size=2, max_size=5, unique=True), st.data())
def test_every_point_of_a_grid_has_more_error(sizes, data):
    times = [data.draw(st.floats(0.01, 10)) for _ in sizes]

    def error(alpha, beta):
        return sum(((alpha * size + beta) / time - 1) ** 2 for size, time in zip(sizes, times, strict=True))

    least = error(*fit_latency(sizes, times))
    grid = [0.0, *np.geomspace(1e-5, 10, 40)]
    assert all(error(alpha, beta) >= least - 1e-9 for alpha in grid for beta in grid)


@given(st.floats(1e-6, 1), st.floats(1e-6, 1), st.sets(st.integers(1, 512), min_size=2, max_size=8))
def test_a_line_is_found_again(alpha, beta, sizes):
    found = fit_latency(sorted(sizes), [alpha * size + beta for size in sorted(sizes)])
    assert found == (pytest.approx(alpha, rel=1e-6), pytest.approx(beta, rel=1e-4, abs=1e-9))


def test_neither_part_is_negative():
    alpha, beta = fit_latency([1, 2, 4], [1.0, 3.0, 7.0])  # α = 2, β = -1 otherwise
    assert beta == 0.0
    ratios = np.array([1 / 1, 2 / 3, 4 / 7])
    assert alpha == pytest.approx(ratios.sum() / (ratios**2).sum())
    alpha, beta = fit_latency([1, 2, 4], [4.0, 3.0, 1.0])
    inverse = 1 / np.array([4.0, 3.0, 1.0])
    assert (alpha, beta) == (0.0, pytest.approx(inverse.sum() / (inverse**2).sum()))


def test_a_weight_counts_as_so_many_rows():
    several = fit_latency([1, 1, 1, 2, 4], [1.0, 1.0, 1.0, 1.5, 2.0])
    assert fit_latency([1, 2, 4], [1.0, 1.5, 2.0], [3, 1, 1]) == pytest.approx(several)
    assert fit_latency([1, 2, 3], [1.0, 2.0, 9.0], [1, 1, 0]) == pytest.approx(fit_latency([1, 2], [1.0, 2.0]))
    assert fit_latency([1, 2, 4], [1.0, 1.5, 2.0], [1e300] * 3) == fit_latency([1, 2, 4], [1.0, 1.5, 2.0])


@pytest.mark.parametrize(
    ("sizes", "times", "weights", "told"),
    [
        ([4], [1.0], None, "of 1 size; expected at least two"),
        ([4, 4], [1.0, 2.0], None, "of 1 size; expected at least two"),
        ([], [], None, "of 0 sizes"),
        ([1, 2], [1.0, 2.0], [1, 0], "of 1 size;"),
        ([1, 2], [1.0], None, "2 batch sizes, 1 times"),
        ([1, 2], [1.0, 2.0], [1.0], "1 weights"),
        ([1, 2], [1.0, 0.0], None, "The seconds of measured batches are impossible: they contain 0"),
        ([0, 2], [1.0, 2.0], None, "The sizes of measured batches are impossible: they contain 0"),
        ([1, 2], [1.0, math.nan], None, "they contain nan"),
        ([1, 2], [1.0, math.inf], None, "they contain inf"),
        ([1, 2], [1.0, 2.0], [1, -1], "weights of measured batches are impossible: they contain -1"),
        ([[1, 2]], [[1.0, 2.0]], None, "2 dimensions"),
    ],
)
def test_what_no_line_goes_through(sizes, times, weights, told):
    with pytest.raises(MeasurementError, match=told):
        fit_latency(sizes, times, weights)


def test_a_model_has_one_name():
    assert name_model("gpt-tiny") == "gpt-tiny"
    assert name_model("gpt-tiny", (("sequence_length", 64),)) == "gpt-tiny(sequence_length=64)"
    both = (("sequence_length", 8), ("image_size", 32))
    assert name_model("a/b.py:f", both) == name_model("a/b.py:f", both[::-1])
    assert name_model("a/b.py:f", both) == "a/b.py:f(image_size=32, sequence_length=8)"


@pytest.mark.parametrize(
    "change",
    [
        {"model": ""},
        {"batch_size": 0},
        {"seconds": 0.0},
        {"seconds": -1.0},
        {"seconds": math.nan},
        {"seconds": 2.5},
        {"p90_s": 3.5},
        {"p90_s": math.nan},
        {"p99_s": 1e9},
        {"p99_s": math.inf},
        {"num_samples": -1},
    ],
)
def test_batches_that_cannot_be(change):
    assert BatchMeasurement(**BATCH).p90_s == 2.0
    with pytest.raises(MeasurementError, match="is impossible: expected the name of a model"):
        BatchMeasurement(**{**BATCH, **change})


def test_a_table_without_batches_is_still_read(tmp_path):
    old = '{"schema": "meshwright/measurements/1", "device": "cpu", "software": "s", "date": "d"}'
    (tmp_path / "old.json").write_text(old)
    table = read_document(Measurements, tmp_path / "old.json")
    assert table.batches == ()
    assert "batches" not in write_document(table, tmp_path / "new.json").read_text()
