"""Which time counts where traces end, and what comes in it: against counts by hand, and integrals of waves."""

from dataclasses import replace

import numpy as np
import pytest

from meshwright.serving import (
    describe_traces,
    find_capacity,
    find_goodput,
    load_policy,
    scale_bound,
    simulate_deployment,
    sweep_deployment,
)
from meshwright.serving.counted import counted_time, rates_within
from meshwright.simulator.scenarios import read_parameter
from meshwright.spec import Deployment, Diurnal, Poisson, ServingError, Trace
from tests.serving.deployments import model

pytestmark = pytest.mark.timeout(400)  # the first test of a policy compiles it
EAGER = load_policy("eager")


@pytest.fixture
def traced(tmp_path):
    """A model whose requests come at these moments."""

    def make(moments, name="a", **facts):
        path = tmp_path / f"{name}.txt"
        path.write_text("".join(f"{moment:.9f}\n" for moment in moments))
        return replace(model(name, **facts), arrivals=Trace(file=str(path)))

    return make


def steadily(rate, seconds, first=0.0):
    return first + np.arange(1, round(rate * seconds) + 1) / rate


def test_the_counted_time_ends_with_the_last_trace(traced):
    short, long = traced(steadily(100, 2)), traced(steadily(100, 4), "b")
    assert counted_time([short, long], 10.0) == (0.0, 4.0)
    assert counted_time([short, long], 10.0, 1.0) == (1.0, 4.0)
    assert counted_time([short, long], 10.0, 1.0, 4.0) == (0.1, 1.0)
    assert counted_time([short, long], 2.0, 1.0) == (1.0, 3.0)
    assert counted_time([short, model("c")], 10.0, 1.0) == (1.0, 11.0)
    # What never comes does not make the time longer.
    assert counted_time([short, model("c", rate=0.0)], 10.0) == (0.0, 2.0)
    assert counted_time([short], 10.0, scale=0.0) == (0.0, 10.0)


def test_rates_are_those_of_the_time(traced):
    wave = replace(model("w"), arrivals=Diurnal(low=100, high=500, period=40.0))
    found = rates_within([traced(steadily(100, 2)), wave, model(rate=7.0)], 0.5, 10.0, 2.0)
    # The trace runs twice as fast, to 1 s.
    assert found[0] == pytest.approx(100 / 9.5, abs=2 / 9.5)
    moments = np.linspace(0.5, 10.0, 100_001)
    expected = 2 * (100 + 400 * (1 - np.cos(2 * np.pi * moments / 40)) / 2).mean()
    assert found[1:] == pytest.approx([expected, 14.0], rel=1e-4)


def test_a_trace_that_ends_early_is_told_as_it_is(traced):
    deployment = Deployment(models=(traced(steadily(100, 10)),), devices=2)
    result = simulate_deployment(deployment, EAGER, 10.0, scale=4.0)
    assert (result.num_requests, result.seconds) == (1000, 2.5)
    assert result.goodput_per_s == 400.0
    (sentence,) = describe_traces(deployment.models, 10.0, 4.0)
    assert "ends at 2.5 s, and 10 s are simulated" in sentence
    assert not describe_traces(deployment.models, 10.0)
    rows = sweep_deployment([read_parameter("scale=1,2,4")], replace(deployment, policy="eager"), 10.5).rows
    assert [row["goodput_per_s"] for row in rows] == [100, 200, 400]


def test_capacity_and_goodput_of_a_short_trace(traced):
    """With 2 b + 8 ms + b / (1000/s) within 50 ms, batches are of 14, which take 36 ms; of 21, they take all 50."""
    deployment = Deployment(models=(traced(steadily(1000, 0.9), alpha=0.002, beta=0.008),), devices=2)
    found = find_capacity(deployment, EAGER, 10.0)
    assert found.staggered == pytest.approx(1000 * 0.036 / 14, rel=0.01)
    assert found.devices >= found.staggered
    scale, result = find_goodput(deployment, EAGER, 10.0)
    assert result.goodput_per_s == pytest.approx(1000 * scale, rel=0.02)
    assert scale < 2 * 21 / 0.05 / 1000 * 1.05


def test_a_trace_behind_the_run_is_refused(traced):
    late = Deployment(models=(traced([1.7e9, 1.7e9 + 1, 1.7e9 + 3]),), devices=1, policy="eager")
    for ask in (find_capacity, find_goodput):
        with pytest.raises(ServingError, match="subtract the first one from all of them"):
            ask(late, EAGER, 2.0)
    with pytest.raises(ServingError, match="No request is counted in 2 s"):
        sweep_deployment([read_parameter("devices=1,2")], late, 2.0)


def test_what_never_comes_has_no_capacity():
    with pytest.raises(ServingError, match="No requests arrive"):
        find_capacity(Deployment(models=(model(rate=0.0),), devices=1), EAGER, 1.0)


def test_less_than_a_wave_is_refused():
    wave = Deployment(models=(replace(model(), arrivals=Diurnal(low=100, high=1500, period=4.0)),), devices=1)
    for ask in (find_capacity, find_goodput):
        with pytest.raises(ServingError, match="--seconds 4"):
            ask(wave, EAGER, 3.0)
    found = find_capacity(wave, EAGER, 4.0)
    # As many as the highest rate needs; and what is simulated of the wave bounds it.
    steady = replace(wave, models=(replace(model(), arrivals=Poisson(rate=1500.0)),))
    assert found.staggered == pytest.approx(find_capacity(steady, EAGER, 4.0).staggered)
    mean = scale_bound(replace(wave, models=(replace(model(), arrivals=Poisson(rate=800.0)),)), 4.0)
    assert scale_bound(wave, 4.0) == pytest.approx(mean)
    assert scale_bound(wave, 1.0) > 2 * mean
