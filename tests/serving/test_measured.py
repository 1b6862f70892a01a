"""Latencies from measurement tables, and what is simulated with them."""

from dataclasses import replace

import pytest

from meshwright.serving import load_policy, simulate_deployment, take_latencies
from meshwright.serving.simulation.simulate_serving import batch_nanoseconds
from meshwright.spec import (
    BatchMeasurement,
    Deployment,
    Latency,
    Measurements,
    Poisson,
    ServedModel,
    ServingError,
)

LINE = Latency(alpha=0.001, beta=0.004, largest=16)


def table(**seconds_of):
    rows = [
        BatchMeasurement(model=name, batch_size=size, seconds=median, p90_s=median, p99_s=median, num_samples=9)
        for name, row in seconds_of.items()
        for size, median in row.items()
    ]
    return Measurements(device="cpu", software="torch", date="2026-11-20", batches=tuple(rows))


def serving(*models):
    return Deployment(models=models, devices=2, policy="symphony")


def test_models_without_a_latency_take_the_measured_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ServedModel(name="given", slo=0.05, latency=LINE)
    zoo = ServedModel(name="zoo", slo=0.05, model="gpt-tiny", sequence_length=8)
    own = ServedModel(name="own", slo=0.05, model=str(tmp_path / "mine.py:build"))
    rows = {"gpt-tiny(sequence_length=8)": {1: 0.002, 4: 0.003}, "mine.py:build": {2: 0.001}, "gpt-tiny": {1: 1.0}}
    found = take_latencies(serving(given, zoo, own), table(**rows)).models
    assert found[0] is given
    assert found[1] == replace(zoo, latency=Latency(points=((1, 0.002), (4, 0.003)), largest=4))
    assert found[2] == replace(own, latency=Latency(points=((2, 0.001),), largest=2))


@pytest.mark.parametrize(
    ("latency", "measured", "words"),
    [
        (None, {"bert-tiny": {1: 0.001}}, r"no batches of gpt-tiny; they have those of: bert-tiny\."),
        (None, {}, r"those of: none\. Measure it: meshwright measure gpt-tiny --batches"),
        (LINE, {"gpt-tiny": {1: 0.001}}, "All models of the deployment have a latency"),
        (None, {"gpt-tiny": {1: 0.1}}, r"longer than its SLO of 0\.05 s"),
    ],
)
def test_what_was_not_measured_is_named(latency, measured, words):
    model = ServedModel(name="a", slo=0.05, model="gpt-tiny", latency=latency)
    with pytest.raises(ServingError, match=words):
        take_latencies(serving(model), table(**measured))


def test_points_of_a_line_are_simulated_as_the_line():
    points = Latency.through((size, LINE.of(size)) for size in (1, 3, 16))
    assert points.of(2) == pytest.approx(LINE.of(2))
    assert batch_nanoseconds(points, 0.017).tolist()[1:] == [1_000_000 * (4 + size) for size in range(1, 14)]
    results = []
    for latency in (LINE, points):
        model = ServedModel(name="a", slo=0.03, latency=latency, arrivals=Poisson(rate=500.0))
        results.append(simulate_deployment(serving(model), load_policy("symphony"), 2.0).row())
    assert results[0] == results[1]
