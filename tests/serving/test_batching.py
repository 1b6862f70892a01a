"""The equations of batching against brute force over all sizes of batch, and a published case."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.serving import bound_rate, bound_scale, devices_for, largest_batch
from meshwright.spec import Latency
from meshwright.spec.quantities import Seconds
from tests.serving.deployments import make_model

LATENCIES = st.builds(
    lambda alpha, beta, largest: Latency(alpha=Seconds(alpha / 1e3), beta=Seconds(beta / 1e3), largest=largest),
    st.floats(0.01, 5),
    st.floats(0.1, 10),
    st.integers(1, 80),
)


def sizes(latency):
    return range(1, latency.largest + 1)


def test_resnet_50_on_eight_devices():
    """b = 16 is the largest batch with (1 + 1/8) l(b) ≤ 25 ms; 8 · 16 / l(16) (nexuslb's example)."""
    latency = Latency(alpha=Seconds(1.053e-3), beta=Seconds(5.072e-3))
    assert bound_rate(latency, 0.025, 8) == pytest.approx(5839, abs=1)
    assert bound_rate(latency, 0.025, 8, "uncoordinated") == pytest.approx(8 * 7 / 12.443e-3, rel=1e-3)


@given(LATENCIES, st.floats(1e-3, 0.2))
def test_the_largest_batch(latency, seconds):
    assert largest_batch(latency, seconds) == max((b for b in sizes(latency) if latency.of(b) <= seconds), default=0)


@given(LATENCIES, st.floats(5e-3, 0.2), st.integers(1, 30))
def test_the_staggered_rate(latency, slo, devices):
    fits = [b for b in sizes(latency) if (1 + 1 / devices) * latency.of(b) <= slo]
    expected = max((devices * b / latency.of(b) for b in fits), default=0.0)
    assert bound_rate(latency, slo, devices) == pytest.approx(expected, rel=1e-9)


@given(LATENCIES, st.floats(16e-3, 0.2), st.floats(1, 1e4))
def test_the_devices_of_a_rate(latency, slo, rate):
    def in_time(batch):
        devices = rate * latency.of(batch) / batch
        wait = latency.of(batch) / devices if devices >= 1 else batch / rate
        return batch == 1 or wait + latency.of(batch) <= slo

    needed = [rate * latency.of(b) / b for b in sizes(latency) if latency.of(b) <= slo and in_time(b)]
    # Batches that are not full, one in each cycle that the SLO allows: part of a device.
    cycles = [(latency.of(b), slo - latency.of(b)) for b in sizes(latency) if latency.of(b) < slo and not in_time(b)]
    needed += [computing / cycle for computing, cycle in cycles if computing < cycle and needed]
    assert devices_for(latency, slo, rate) == pytest.approx(min(needed, default=math.inf), rel=1e-6)


@given(st.integers(1, 4), st.floats(1, 500), st.integers(1, 16))
def test_at_the_bound_all_devices_are_needed(copies, rate, devices):
    model = make_model(rate=rate, copies=copies)
    scale = bound_scale([model], [rate], devices)
    needed = [copies * devices_for(model.latency, model.slo, rate * scale * factor) for factor in (1, 1 + 1e-6)]
    assert needed[0] <= devices < needed[1]


def test_where_nothing_arrives_nothing_is_bounded():
    assert bound_scale([make_model(rate=0.0)], [0.0], 3) == math.inf
