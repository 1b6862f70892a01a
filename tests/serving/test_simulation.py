"""The simulator against an independent one, a closed form, and what must hold for every policy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.serving import (
    POLICY_NAMES,
    compare_policies,
    draw_arrivals,
    find_capacity,
    find_goodput,
    load_policy,
    simulate_deployment,
)
from meshwright.serving.policies.adaptive import CANDIDATES, IN_TRIAL, USED, Adaptive
from meshwright.serving.policies.deferred import Deferred
from meshwright.serving.policies.pool import NUM_DROPPED, OWN
from meshwright.serving.simulation import simulate as simulating
from meshwright.serving.simulation.simulate import batch_nanoseconds
from meshwright.spec import Outage, ServingError, Straggler
from meshwright.spec.quantities import Seconds
from tests.serving.deployments import deploy, make_model
from tests.serving.oracle import serve_eagerly

pytestmark = pytest.mark.timeout(400)  # the first test of a policy compiles it

NAMES = [name for name in POLICY_NAMES if name != "deferred"]
# These know deadlines, and run nothing that is late by prediction.
AWARE = ("adaptive", "symphony", "eager", "nexus", "clockwork", "shepherd")

MODELS = st.lists(
    st.builds(
        make_model,
        alpha_ms=st.floats(0.1, 5),
        beta_ms=st.floats(0.5, 8),
        slo_ms=st.floats(14, 60),
        rate=st.floats(20, 900),
        shape=st.sampled_from([0.1, 0.5, 1]),
        largest=st.integers(1, 40),
    ),
    min_size=1,
    max_size=3,
)


def named(models):
    return tuple(make_named(model, place) for place, model in enumerate(models))


def make_named(model, place):
    return type(model)(
        name=f"model {place}", slo=model.slo, latency=model.latency, arrivals=model.arrivals, copies=model.copies
    )


@given(MODELS, st.integers(1, 4), st.integers(0, 1000))
def test_eager_batching_is_that_of_an_independent_simulator(models, devices, seed):
    deployment = deploy(models[0], devices=devices)
    result = simulate_deployment(deployment, load_policy("eager"), 1.5, seed=seed)
    arrivals, owners = draw_arrivals(deployment.models, 1.5, seed=seed)
    facts = [
        (batch_nanoseconds(model.latency, model.slo)[1:].tolist(), round(model.slo * 1e9))
        for model in deployment.models
    ]
    in_time, dropped = serve_eagerly(facts, arrivals.tolist(), owners.tolist(), devices)
    assert [model.num_in_time for model in result.models] == in_time
    assert [sum(model.dropped.values()) for model in result.models] == dropped


def test_one_device_without_batches_is_a_queue_with_a_closed_form():
    """M/D/1: the mean wait is rho / (2 (1 - rho)) services."""
    model = make_model(alpha_ms=5, beta_ms=5, slo_ms=5000, rate=60.0, largest=1)
    result = simulate_deployment(deploy(model, devices=1), load_policy("eager"), 3000.0, warm_up_s=20.0)
    (served,) = result.models
    places = (np.arange(len(served.histogram)) + 0.5) / 1024 * 5.0
    mean = float(places @ served.histogram / served.histogram.sum())
    assert served.in_time_share == 1
    assert mean == pytest.approx(0.010 * (1 + 0.6 / (2 * 0.4)), rel=0.15)
    assert result.busy_share == pytest.approx(0.6, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(models=MODELS, devices=st.integers(1, 4), seed=st.integers(0, 1000), outages=st.booleans(), data=st.data())
def test_every_request_ends_once_and_in_time_where_nothing_goes_wrong(name, models, devices, seed, outages, data):
    troubles = ()
    if outages:
        since = data.draw(st.floats(0, 0.5))
        troubles = (
            Straggler(device=0, factor=data.draw(st.floats(0.5, 3))),
            Outage(device=devices - 1, since=Seconds(since), until=Seconds(since + 0.3)),
        )
    deployment = deploy(
        *named(models),
        devices=devices,
        troubles=troubles,
        delay=Seconds(data.draw(st.sampled_from([0, 1e-4]))),
        slack=Seconds(data.draw(st.sampled_from([0, 1e-3]))),
    )
    result = simulate_deployment(deployment, load_policy(name), 1.0, seed=seed)
    for model in result.models:
        ended = model.num_in_time + model.num_late + sum(model.dropped.values())
        assert ended <= model.num_requests
        assert model.histogram.sum() == model.num_in_time + model.num_late
        if name in ("adaptive", "symphony", "eager"):
            assert ended == model.num_requests
        if name in AWARE and not outages:
            assert model.num_late == 0
    assert (result.busy_s <= result.end_s + 1e-9).all()


def test_the_same_seed_gives_the_same_and_another_another():
    deployment = deploy(make_model(rate=900.0), devices=2, jitter=0.2)
    first, again, other = (simulate_deployment(deployment, load_policy("adaptive"), 3.0, seed=s) for s in (1, 1, 2))
    assert (first.models[0].histogram == again.models[0].histogram).all()
    assert (first.models[0].histogram != other.models[0].histogram).any()


def test_stragglers_are_learned():
    """Of three devices one takes half as long again; nothing else can be late."""
    trouble = (Straggler(device=0, factor=1.5),)
    result = simulate_deployment(
        deploy(make_model(rate=500.0), devices=3, troubles=trouble), load_policy("adaptive"), 20.0, warm_up_s=2.0
    )
    assert result.models[0].num_late == 0
    assert result.in_time_share > 0.999


@pytest.fixture
def last_pool(monkeypatch):
    """The pool that the last simulation used."""
    kept = {}
    make = simulating.make_pool

    def keep(*arguments, **options):
        kept["pool"] = make(*arguments, **options)
        return kept["pool"]

    monkeypatch.setattr(simulating, "make_pool", keep)
    return kept


def test_a_quiet_server_tries_nothing(last_pool):
    simulate_deployment(deploy(make_model(rate=100.0), devices=4), Adaptive(), 20.0)
    pool = last_pool["pool"]
    assert pool[NUM_DROPPED] == 0
    assert pool[pool[OWN] + IN_TRIAL] == 0
    assert pool[pool[OWN] + USED] == 0
    assert not pool[pool[OWN] + 5 :].any()


@pytest.mark.parametrize(("shape", "rate", "alpha"), [(1, 1400.0, 1.0), (0.1, 900.0, 1.0), (1, 420.0, 5.0)])
def test_under_overload_it_is_as_good_as_the_best_of_its_candidates(shape, rate, alpha):
    deployment = deploy(make_model(rate=rate, shape=shape, alpha_ms=alpha, slo_ms=25 if alpha == 1 else 50), devices=2)
    shares = [
        simulate_deployment(deployment, policy, 20.0, warm_up_s=5.0).in_time_share
        for policy in (Adaptive(), *(Deferred(*map(int, settings)) for settings in CANDIDATES))
    ]
    assert max(shares[1:]) < 0.98
    assert shares[0] >= 0.98 * max(shares[1:])


def test_goodput_is_where_more_would_be_too_much():
    deployment = deploy(make_model(rate=500.0), devices=2)
    scale, result = find_goodput(deployment, load_policy("symphony"), 5.0)
    more = simulate_deployment(deployment, load_policy("symphony"), 5.0, scale=1.03 * scale, warm_up_s=1.0)
    assert result.in_time_share >= 0.99 > more.in_time_share


def test_capacity_is_where_one_device_less_is_too_little():
    found = find_capacity(deploy(make_model(rate=3000.0), devices=1), load_policy("symphony"), 3.0)
    assert found.staggered <= found.devices <= 1.3 * found.staggered + 1
    assert found.result.in_time_share >= 0.99 > found.fewer.in_time_share


def test_no_number_of_devices_helps_where_delay_takes_the_time():
    deployment = deploy(make_model(rate=10.0, slo_ms=8), devices=1, delay=Seconds(5e-3))
    with pytest.raises(ServingError, match="devices do not answer 99 %"):
        find_capacity(deployment, load_policy("eager"), 1.0)


def test_regret_is_measured_against_the_best_other():
    deployment = deploy(make_model(rate=1400.0), devices=2)
    results, rows = compare_policies(
        deployment, {name: load_policy(name) for name in ("symphony", "eager", "timeouts")}, 4.0
    )
    best = max(results, key=lambda name: results[name].goodput_per_s)
    for row in rows:
        others = max(result.goodput_per_s for name, result in results.items() if name != row["policy"])
        mine = results[row["policy"]].goodput_per_s
        assert row["regret_share"] == pytest.approx(max(1 - mine / others, 0))
        assert (row["ahead_share"] > 0) == (row["policy"] == best)
