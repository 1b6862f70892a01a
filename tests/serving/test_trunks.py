"""Models with a trunk in common, against every composition of a batch and the equations of batching."""

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.serving import (
    devices_for,
    devices_shared,
    expand_deployment,
    find_capacity,
    load_policy,
    share_trunk,
)
from meshwright.serving.expansion import shared_latency
from meshwright.spec import Deployment, Head, Latency, Poisson, ServedModel, ServingError, Trunk
from tests.serving.deployments import model


def line(alpha, beta, largest=1024):
    return Latency(alpha=alpha, beta=beta, largest=largest)


def trunk_of(*heads, alpha=0.002, beta=0.008, slo=0.1, **facts):
    return Trunk(name="t", slo=slo, latency=line(alpha, beta), heads=heads, **facts)


def head(name, rate, alpha=0.0, beta=0.0, largest=1024, **facts):
    return Head(name=name, rate=rate, latency=Latency(alpha=alpha, beta=beta + 1e-7, largest=largest), **facts)


@given(
    st.lists(
        st.tuples(st.floats(1, 100), st.floats(0, 0.01), st.floats(0, 0.01)),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 5),
)
def test_a_batch_takes_what_its_compositions_take_in_the_mean(drawn, batch):
    """Each request is for head i with chance w_i; a batch without one for head i does not spend its β."""
    trunk = trunk_of(*(head(str(place), *facts) for place, facts in enumerate(drawn)))
    weights = [rate / sum(rate for rate, _, _ in drawn) for rate, _, _ in drawn]
    mean = 0.0
    for asked in product(range(len(drawn)), repeat=batch):
        seconds = trunk.latency.of(batch)
        for place in set(asked):
            seconds += trunk.heads[place].latency.of(asked.count(place))
        mean += math.prod(weights[place] for place in asked) * seconds
    unspent = sum(each.latency.beta * (1 - weight) ** batch for each, weight in zip(trunk.heads, weights, strict=True))
    assert shared_latency(trunk).of(batch) == pytest.approx(mean + unspent)
    assert shared_latency(trunk).of(batch) >= mean - 1e-12


@given(
    st.lists(st.floats(0.1, 2000), min_size=1, max_size=6),
    st.floats(1e-4, 5e-3),
    st.floats(0, 0.02),
    st.floats(1.1, 20),
)
def test_heads_that_take_nothing_save_whatever_batches_save(rates, alpha, beta, factor):
    slo = (alpha + beta) * factor
    trunk = trunk_of(*(head(str(place), rate) for place, rate in enumerate(rates)), alpha=alpha, beta=beta, slo=slo)
    together, apart = devices_shared(trunk)
    assert together == pytest.approx(devices_for(line(alpha, beta), slo, sum(rates)), rel=1e-2)
    assert apart == pytest.approx(sum(devices_for(line(alpha, beta), slo, rate) for rate in rates), rel=1e-2)
    # A tenth of a microsecond of each head is all that could be lost.
    assert together <= apart * (1 + 1e-3 * len(rates))


def test_what_is_shared():
    trunk = trunk_of(
        head("a", 300.0, alpha=0.001, beta=0.002, memory=2.0),
        head("b", 100.0, alpha=0.005, beta=0.004, largest=8, memory=3.0),
        head("idle", 0.0, alpha=1.0, beta=1.0, memory=4.0),
        memory=10.0,
    )
    shared = share_trunk(trunk)
    assert (shared.name, shared.slo, shared.arrivals.rate, shared.memory) == ("t", 0.1, 400.0, 19.0)
    # 2 + 3/4 · 1 + 1/4 · 5 ms for each request, 8 + 2 + 4 ms for each batch; a quarter of 32 is b's largest.
    assert shared.latency.alpha == pytest.approx(0.004)
    assert shared.latency.beta == pytest.approx(0.014, abs=1e-6)
    assert shared.latency.largest == 32
    assert share_trunk(trunk_of(head("a", 1.0, memory=2.0))).memory is None
    assert share_trunk(trunk_of(head("a", 0.0))).arrivals.rate == 0
    with pytest.raises(ServingError, match="longer than its SLO"):
        share_trunk(trunk_of(head("a", 1.0, beta=0.2)))
    assert devices_shared(trunk_of(head("a", 1.0), head("b", 1.0, beta=0.2)))[1] == math.inf


def test_latencies_through_points_are_summed_size_by_size():
    measured = Latency(points=((1, 0.01), (4, 0.011), (16, 0.03)), largest=16)
    heads = (head("a", 3.0, alpha=0.001), Head(name="b", rate=1.0, latency=Latency(points=((2, 0.004), (8, 0.02)))))
    trunk = Trunk(name="t", slo=1.0, latency=measured, heads=heads)
    shared = shared_latency(trunk)
    assert shared.largest == 16
    for batch in range(1, 17):
        expected = measured.of(batch) + heads[0].latency.of(0.75 * batch) + heads[1].latency.of(0.25 * batch)
        assert shared.of(batch) == pytest.approx(expected)


def test_shared_heads_are_served_by_fewer_devices():
    """Ten heads of a hundred requests a second: apart, each waits for its own."""
    trunk = trunk_of(*(head(str(place), 100.0, alpha=1e-4, beta=3e-4) for place in range(10)))
    deployment = Deployment(models=(model("other", rate=1.0),), devices=1, trunks=(trunk,))
    found = expand_deployment(deployment)
    assert [each.name for each in found.models] == ["other", "t"]
    assert (found.trunks, expand_deployment(found)) == ((), found)
    policy = load_policy("symphony")
    shared = find_capacity(Deployment(devices=1, trunks=(trunk,)), policy, 3.0)
    alone = line(0.002 + 1e-4, 0.008 + 3e-4 + 1e-7)
    models = tuple(
        ServedModel(name=each.name, slo=trunk.slo, latency=alone, arrivals=Poisson(rate=each.rate))
        for each in trunk.heads
    )
    apart = find_capacity(Deployment(devices=1, models=models), policy, 3.0)
    assert (shared.staggered, apart.staggered) == pytest.approx(devices_shared(trunk))
    assert shared.devices < apart.devices


def test_a_trunk_is_loaded_with_its_heads():
    each = line(0.001, 0.002)
    heads = tuple(Head(name=name, latency=each, rate=1.0, load=load) for name, load in (("a", 0.2), ("b", 0.3)))
    trunk = trunk_of(*heads, load=1.0)
    assert share_trunk(trunk).load == pytest.approx(1.5)
    assert share_trunk(replace(trunk, load=None)).load is None
