"""When requests come: moments against closed forms within five deviations, traces as they stand in their files."""

import math
from dataclasses import replace

import numpy as np
import pytest

from meshwright.serving import draw_arrivals, mean_rate
from meshwright.serving.arrivals import MOST_REQUESTS
from meshwright.spec import Diurnal, DocumentError, Gamma, Poisson, ServingError, Trace
from tests.serving.deployments import model

SECONDS = 100.0


def coming(arrivals, *, seconds=SECONDS, copies=1, **options):
    """Moments in seconds of one model."""
    return draw_arrivals((replace(model(copies=copies), arrivals=arrivals),), seconds, **options)[0] / 1e9


def traced(tmp_path, text):
    path = tmp_path / "trace.txt"
    path.write_text(text)
    return Trace(file=str(path))


def test_poisson_has_its_rate_and_gaps():
    moments = coming(Poisson(rate=200))
    assert abs(len(moments) - 20_000) < 5 * math.sqrt(20_000)
    gaps = np.diff(moments)
    # CV² of n exponential gaps deviates by about sqrt(8 / n).
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1, abs=5 * math.sqrt(8 / len(gaps)))
    assert np.histogram(moments, 10, (0, SECONDS))[0] == pytest.approx([2000] * 10, abs=5 * math.sqrt(2000))


@pytest.mark.parametrize("shape", [0.1, 0.5, 1.0, 8.0])
def test_gamma_has_its_rate_and_bursts(shape):
    moments = coming(Gamma(rate=200, shape=shape))
    assert abs(len(moments) - 20_000) < 5 * math.sqrt(20_000 / shape)
    gaps = np.diff(moments)
    # Of the square of the coefficient of variation of gamma gaps: excess kurtosis 6 / shape.
    deviation = math.sqrt((2 + 6 / shape + 4 / shape) / len(gaps)) / shape
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1 / shape, abs=5 * deviation)


@pytest.mark.parametrize("shape", [0.01, 0.1, 10.0])
def test_gamma_begins_as_it_goes_on(shape):
    """Of many beginnings as long as twenty gaps, the mean number is twenty: no burst and no pause at the begin."""
    moments, owners = draw_arrivals((replace(model(copies=4000), arrivals=Gamma(rate=20, shape=shape)),), 1.0)
    counts = np.bincount(owners, minlength=4000)
    assert counts.mean() == pytest.approx(20, abs=5 * counts.std() / math.sqrt(4000))
    early = (moments < 10**8).sum() / 4000
    assert early == pytest.approx(2, abs=5 * counts.std() / math.sqrt(4000))


def test_a_day_is_a_wave_that_begins_low():
    moments = coming(Diurnal(low=20, high=420, period=50.0), seconds=200.0)
    assert mean_rate(Diurnal(low=20, high=420)) == 220
    assert abs(len(moments) - 44_000) < 5 * math.sqrt(44_000)
    counts = np.histogram(moments % 50, 10, (0, 50))[0]
    edges = np.linspace(0, 50, 11)
    # The integral of low + (high − low) (1 − cos(2 π t / 50)) / 2, of four periods.
    wave = 220 * edges - 200 * 50 / (2 * math.pi) * np.sin(2 * math.pi * edges / 50)
    expected = 4 * np.diff(wave)
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()


def test_a_flat_wave_is_poisson_and_an_empty_one_nothing():
    assert abs(len(coming(Diurnal(low=100, high=100))) - 10_000) < 500
    for nothing in (Diurnal(low=0, high=0), Poisson(rate=0), Gamma(rate=0, shape=1)):
        assert len(coming(nothing)) == 0


def test_a_trace_is_replayed_as_it_stands_and_faster(tmp_path):
    trace = traced(tmp_path, "0\n0.5\n0.5\n\n2.25\n8\n")
    assert coming(trace, seconds=9.0).tolist() == [0, 0.5, 0.5, 2.25, 8]
    assert coming(trace, seconds=8.0).tolist() == [0, 0.5, 0.5, 2.25]
    assert coming(replace(trace, speed=2.0), seconds=9.0).tolist() == [0, 0.25, 0.25, 1.125, 4]
    assert coming(trace, seconds=9.0, scale=4.0).tolist() == [0, 0.125, 0.125, 0.5625, 2]
    assert coming(trace, seconds=9.0, scale=0.0).tolist() == []
    assert mean_rate(trace) == 5 / 8
    assert mean_rate(replace(trace, speed=2.0)) == 5 / 4


def test_scale_multiplies_rates():
    for arrivals in (Poisson(rate=50), Gamma(rate=50, shape=0.5), Diurnal(low=25, high=75, period=10.0)):
        assert len(coming(arrivals, scale=3.0)) == pytest.approx(15_000, abs=5 * math.sqrt(30_000))
        assert len(coming(arrivals, scale=0.0)) == 0


def test_moments_ascend_and_lie_within_the_time():
    models = (
        model("a", rate=300, copies=3),
        model("b", rate=300, shape=0.1),
        replace(model("c"), arrivals=Diurnal(low=0, high=400, period=7.0)),
    )
    moments, owners = draw_arrivals(models, 10.0, seed=5)
    assert (np.diff(moments) >= 0).all()
    assert (moments[0], moments[-1]) >= (0, 0)
    assert moments[-1] < 10 * 10**9
    assert moments.dtype == np.int64
    counts = np.bincount(owners, minlength=5)
    # Three copies, then one of each.
    assert len(counts) == 5
    assert counts == pytest.approx([3000, 3000, 3000, 3000, 2000], abs=5 * math.sqrt(30_000))


def test_a_model_is_left_as_it_was_when_another_changes():
    first = model("a", rate=200, shape=0.5)

    def of_first(other, seed=0):
        moments, owners = draw_arrivals((first, other), 20.0, seed=seed)
        return moments[owners == 0].tolist()

    usual = of_first(model("b", rate=100, shape=0.5))
    assert usual == of_first(model("b", rate=900, shape=2.0)) == of_first(model("b", rate=30))
    assert usual != of_first(model("b", rate=100, shape=0.5), seed=1)
    moments, owners = draw_arrivals((first, replace(first, name="b", copies=2)), 20.0)
    apart = [moments[owners == number].tolist() for number in range(3)]
    assert apart[0] == usual
    assert apart[0] != apart[1] != apart[2] != apart[0]


def test_models_of_one_rate_share_it_evenly():
    moments, owners = draw_arrivals((model("a", rate=100, copies=3), model("b", rate=100)), SECONDS)
    assert np.bincount(owners) == pytest.approx([10_000] * 4, abs=500)
    gaps = np.diff(moments[owners == 3]) / 1e9
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1, abs=5 * math.sqrt(8 / len(gaps)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "trace.txt: no moments; expected at least two moments"),
        ("1.0", "trace.txt: one moment; expected at least two moments"),
        ("2\n1\n", "line 2: 1 follows 2; expected ascending"),
        ("0\n\n1e300\n 0.25\n", "line 4: 0.25 follows 1e300; expected ascending"),
        ("0 1 0.5\n2", "line 1: 0.5 follows 1; expected ascending"),
        ("-1\n1\n", "line 1: the moment is -1; expected seconds since the start"),
        ("1\nnan\n", "line 2: the moment is nan; expected seconds since the start"),
        ("1\r\n2\r\n1e400\r\n", "line 3: the moment is 1e400; expected seconds since the start"),
        ("0\n0\n", "all its moments are 0"),
        ("when,what\n1,2\n", "line 1: 'when,what' is not a number; expected a moment in seconds in each line"),
        ("1.0\n2.0s\n", "line 2: '2.0s' is not a number"),
        ("\x00\xff", "line 1: .* is not a number"),
    ],
)
def test_what_is_no_trace(tmp_path, text, words):
    with pytest.raises(DocumentError, match=words) as caught:
        coming(traced(tmp_path, text))
    assert "trace.txt" in str(caught.value)


def test_places_that_hold_no_trace(tmp_path, monkeypatch):
    for place, words in ((tmp_path, "a folder"), (tmp_path / "absent", "cannot be read")):
        with pytest.raises(DocumentError, match=words):
            coming(Trace(file=str(place)))
    monkeypatch.setattr("meshwright.serving.arrivals.MOST_TRACE_BYTES", 100)
    with pytest.raises(DocumentError, match="split the trace"):
        coming(traced(tmp_path, "1\n" * 60))


def test_too_many_requests_are_refused_before_they_are_drawn():
    with pytest.raises(ServingError, match="Simulate fewer seconds"):
        coming(Poisson(rate=1e9))
    with pytest.raises(ServingError, match="Simulate fewer seconds"):
        coming(Poisson(rate=1), seconds=1.0, scale=2.0 * MOST_REQUESTS)


def test_a_trace_has_as_many_requests_as_moments(tmp_path):
    """Two moments a picosecond apart would be 6e12 requests at their mean rate."""
    assert coming(traced(tmp_path, "0\n1e-12\n"), seconds=3.0).tolist() == [0, 0]


def test_what_does_not_fit_into_memory_says_so(monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr("meshwright.serving.arrivals._homogeneous", fail)
    with pytest.raises(ServingError, match="do not fit into memory"):
        coming(Poisson(rate=10))
