"""The equations of batching, against brute force over the batch and published figures."""

import math
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from meshwright.serving import bound_scale, devices_for, largest_batch
from meshwright.spec import Latency, Poisson, ServedModel

LINES = st.builds(
    lambda alpha, beta, largest: Latency(alpha=alpha, beta=beta, largest=largest),
    st.just(0.0) | st.floats(1e-5, 0.01),
    st.floats(1e-6, 0.02),
    st.integers(1, 80),
)


def through(steps, largest):
    """A latency of points: from each to the next so many samples and seconds more."""
    sizes = accumulate(size for size, _ in steps)
    times = accumulate((seconds for _, seconds in steps), initial=1e-4)
    next(times)
    return replace(Latency.through(zip(sizes, times, strict=True)), largest=largest)


POINTS = st.builds(
    through,
    st.lists(st.tuples(st.integers(1, 20), st.just(0.0) | st.floats(1e-5, 0.05)), min_size=1, max_size=5),
    st.integers(1, 80),
)
LATENCIES = LINES | POINTS
SLOS = st.floats(1e-3, 0.5)
EQUATIONS = ("staggered", "uncoordinated")


def seconds(latency, batch):
    if not latency.points:
        return latency.alpha * batch + latency.beta
    sizes, times = zip(*latency.points, strict=True)
    if batch <= sizes[-1] or len(sizes) == 1:
        return float(np.interp(batch, sizes, times))
    return times[-1] + (batch - sizes[-1]) * (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])


@given(LATENCIES, SLOS)
def test_the_largest_batch(latency, limit):
    fitting = [batch for batch in range(1, latency.largest + 1) if seconds(latency, batch) <= limit]
    assert largest_batch(latency, limit) == max(fitting, default=0)


def bound_of_one(latency, slo, devices, equation="staggered"):
    """The rate that devices serve of one model."""
    one = ServedModel(name="a", slo=slo, latency=latency, arrivals=Poisson(rate=1.0))
    return bound_scale([one], [1.0], devices, equation)


def test_an_alpha_next_to_nothing_is_none():
    assert largest_batch(Latency(alpha=5e-324, beta=0.01, largest=9), 1.0) == 9


@given(LATENCIES, st.floats(1, 12), st.integers(1, 9), st.sampled_from(EQUATIONS))
@example(Latency(alpha=0.005, beta=0.0106, largest=8), 1.73, 1, "staggered")
def test_the_bound_of_one_model_is_the_best_batch_that_the_equation_allows(latency, factor, devices, equation):
    slo = max(latency.of(1) * factor, 1e-6)
    share = 2 if equation == "uncoordinated" else 1 + 1 / devices
    # Where a batch just fits, rounding decides.
    assume(all(abs(share * seconds(latency, batch) / slo - 1) > 1e-6 for batch in range(1, latency.largest + 1)))
    allowed = [
        devices * batch / seconds(latency, batch)
        for batch in range(1, latency.largest + 1)
        if seconds(latency, batch) <= slo / share
        or (batch == 1 and seconds(latency, 1) <= slo and equation == "staggered")
    ]
    assert bound_of_one(latency, slo, devices, equation) == pytest.approx(max(allowed, default=0.0), rel=1e-6)


@given(LATENCIES, SLOS, st.floats(0.01, 1e5))
def test_devices_for_a_rate(latency, slo, rate):
    assume(seconds(latency, 1) <= slo)
    # A request alone waits for no other; b of them wait b / r for each other, or for the next of N devices.
    # What serves a higher rate serves this one: batches that would fill too slowly are padded.
    needed = {}
    for equation, limit in (("staggered", slo), ("uncoordinated", slo / 2)):
        needs = [rate * seconds(latency, 1)] if seconds(latency, 1) <= limit else []
        for batch in range(1, latency.largest + 1):
            length = seconds(latency, batch)
            if length <= limit and length < slo:
                needs.append(max(rate, batch / (slo - length)) * length / batch)
        needed[equation] = devices_for(latency, slo, rate, equation)
        assert needed[equation] == pytest.approx(min(needs, default=math.inf), rel=1e-6)
        assert devices_for(latency, slo, rate * 1.01, equation) >= needed[equation]
    assert needed["uncoordinated"] >= needed["staggered"]


def test_nothing_needs_nothing_and_the_impossible_no_number():
    latency = Latency(alpha=0.001, beta=0.01)
    assert [devices_for(latency, 0.02, 0.0, equation) for equation in EQUATIONS] == [0, 0]
    assert devices_for(latency, 0.005, 1.0) == math.inf


@given(
    st.lists(st.tuples(LATENCIES, st.floats(2, 30), st.integers(1, 3)), min_size=1, max_size=3),
    st.integers(1, 20),
    st.sampled_from(EQUATIONS),
)
def test_at_the_bound_all_devices_are_needed(drawn, devices, equation):
    models = [
        ServedModel(
            name=str(place),
            slo=max(latency.of(1) * factor, 1e-6),
            latency=latency,
            arrivals=Poisson(rate=100.0 * (place + 1)),
            copies=copies,
        )
        for place, (latency, factor, copies) in enumerate(drawn)
    ]
    rates = [100.0 * (place + 1) for place in range(len(models))]
    scale = bound_scale(models, rates, devices, equation)

    def needed(by):
        return sum(
            model.copies * devices_for(model.latency, model.slo, rate * by, equation)
            for model, rate in zip(models, rates, strict=True)
        )

    assert needed(scale * (1 - 1e-9)) <= devices + 1e-6
    assert needed(scale * (1 + 1e-9)) > devices - 1e-6
    assert needed(scale) == pytest.approx(devices)
    assert bound_scale(models, [2 * rate for rate in rates], devices, equation) == pytest.approx(scale / 2)
    assert bound_scale(models, rates, devices + 1, equation) > scale


def test_nothing_can_be_multiplied_by_anything():
    model = ServedModel(name="a", slo=1, latency=Latency(alpha=0, beta=1), arrivals=Poisson(rate=0))
    assert bound_scale([model], [0.0], 1) == math.inf
    assert bound_scale([model], [1.0], 1, "uncoordinated") == 0


def test_the_published_resnet_on_eight_devices():
    """Symphony, arXiv 2308.07470, section 3.4: l(b) = 1.053 b + 5.072 ms, 25 ms, 8 devices serve 5,839 per second."""
    latency = Latency(alpha=1.053e-3, beta=5.072e-3)
    assert bound_of_one(latency, 0.025, 8) == pytest.approx(5839, abs=1)
    assert largest_batch(latency, 0.025 / (1 + 1 / 8)) == 16
    assert bound_of_one(latency, 0.025, 8, "uncoordinated") == pytest.approx(8 * 7 / (1.053e-3 * 7 + 5.072e-3))
