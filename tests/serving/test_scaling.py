"""Devices that are started and handed back: what is wanted, what becomes of requests, and what it takes."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.serving import POLICY_NAMES, devices_for, find_capacity, find_goodput, load_policy, simulate_deployment
from meshwright.serving.arrivals import draw_arrivals
from meshwright.serving.policies.autoscaling import (
    DISPERSION,
    WANTED,
    allocate_scaler,
    device_to_drain,
    note_arrival,
    staggered_devices,
    wanted_devices,
)
from meshwright.serving.policies.pool import NUM_DROPPED, RUN, columns
from meshwright.serving.policies.queues import come_up, enter, rest
from meshwright.serving.server.servable import check_served
from meshwright.serving.simulation import latency_table
from meshwright.serving.simulation.simulate_serving import make_pool
from meshwright.spec import (
    Deployment,
    Diurnal,
    Gamma,
    Group,
    Outage,
    Poisson,
    Scaling,
    ServingError,
    Straggler,
    Trace,
)
from meshwright.spec.units import Seconds
from tests.marks import examples, left_to_ci
from tests.serving.deployments import deployments, model, models, one_model
from tests.serving.test_invariants import Recorder, check, patched  # noqa: F401  (a fixture)

SECOND = 10**9
EAGER, SYMPHONY = load_policy("eager"), load_policy("symphony")
SCALABLE = [name for name in POLICY_NAMES if name != "nexus"]


def scaling(start=0.2, every=0.1, calm=1.0, **facts):
    return Scaling(start=Seconds(start), every=Seconds(every), calm=Seconds(calm), **facts)


def scaled(devices=8, *, arrivals=None, how=None, **facts):
    """One model, of which a device serves about 600 requests per second."""
    served = model(slo=0.025, alpha=0.001053, beta=0.005072, **facts)
    if arrivals is not None:
        served = replace(served, arrivals=arrivals)
    return Deployment(models=(served,), devices=devices, scaling=how or scaling())


def pool_of(deployment, num_up):
    pool = make_pool(deployment, EAGER, latency_table(deployment))
    for device in range(num_up):
        come_up(pool, device, 0)
        rest(pool, device)
    return pool


def ask(deployment, moments, *, num_up=1, dropped=0, periods=1, every=SECOND, **facts):
    """The number that is wanted after these arrivals (of model 0), and the scaler."""
    pool = pool_of(deployment, num_up)
    scaler = allocate_scaler(len(columns(pool)["slo"]), **{"minimum": 1, "maximum": 10**6, **facts})
    wanted, at = 0, 0
    for period in range(1, periods + 1):
        while at < len(moments) and moments[at] < period * every:
            note_arrival(scaler, pool, moments[at], 0)
            at += 1
        pool[NUM_DROPPED] += dropped
        wanted = wanted_devices(scaler, pool, period * every)
    return wanted, scaler


def evenly(rate, seconds=1.0):
    return (np.arange(int(rate * seconds)) * SECOND / rate).astype(np.int64)


# --- what is wanted ---


@given(models("a"), st.floats(0.01, 50_000))
def test_devices_are_those_of_the_staggered_equation(served, rate):
    served = replace(served, copies=1)
    pool = pool_of(Deployment(models=(served,), devices=1), 1)
    found = staggered_devices(pool, 0, rate * 1e-9)
    assert found == pytest.approx(devices_for(served.line, served.slo, rate), rel=1e-4)
    assert staggered_devices(pool, 0, rate * 1.1e-9) >= found


@given(st.lists(st.integers(1, 20_000), min_size=2, max_size=2), st.integers(1, 5), st.integers(0, 40))
@settings(max_examples=examples(30))
def test_more_requests_want_no_fewer_devices_and_bounds_hold(rates, least, more):
    facts = {"minimum": least, "maximum": least + more}
    low, high = sorted(rates)
    few, many = (ask(one_model(), evenly(rate), **facts)[0] for rate in (low, high))
    assert least <= few <= many <= least + more


def test_what_comes_in_bursts_wants_more():
    deployment = one_model(slo=0.05)
    smooth, rough = (
        ask(deployment, draw_arrivals((model(rate=3000, shape=shape),), 30.0)[0], periods=30) for shape in (None, 0.05)
    )
    first = len(smooth[1]) - 9 + DISPERSION
    assert 1000 <= smooth[1][first] < 1300
    assert rough[1][first] > 3000
    assert rough[0] > smooth[0] >= np.ceil(devices_for(deployment.models[0].line, 0.05, 3000))


def test_a_rate_that_grows_is_not_taken_for_bursts():
    arrivals = Diurnal(low=100, high=5000, period=Seconds(60.0))
    moments, _ = draw_arrivals((replace(model(), arrivals=arrivals),), 30.0)
    _, scaler = ask(one_model(), moments, periods=30)
    assert scaler[len(scaler) - 9 + DISPERSION] < 1500


def test_drops_want_more_devices_at_once():
    """100 requests per second, which one device should serve, if it were not as slow as it is."""
    lost = [ask(scaled(), evenly(100), dropped=dropped)[0] for dropped in (0, 2, 25, 100)]
    assert lost == [1, 1, 2, 2]
    # Of a hundred that are there, as many more as the share that is lost; twice as many at most.
    facts = {"num_up": 100, "minimum": 100}
    assert ask(scaled(200), evenly(100), dropped=25, **facts)[0] == 134
    assert ask(scaled(300), evenly(100), dropped=99, **facts)[0] == 200


def test_what_waits_wants_devices_though_nothing_is_dropped():
    deployment = scaled()
    pool = pool_of(deployment, 1)
    scaler = allocate_scaler(1, minimum=1, maximum=100)
    for moment in evenly(400):
        note_arrival(scaler, pool, int(moment), 0)
    for request in range(1000):
        enter(pool, SECOND, 0, request, 2 * SECOND)
    served = deployment.models[0]
    unit = devices_for(served.line, served.slo, 400.0) / 400
    assert wanted_devices(scaler, pool, SECOND) == np.ceil(1000 * unit / served.slo)


def test_less_is_wanted_only_after_the_time_of_calm():
    moments = np.concatenate([evenly(4000, 10.0), 10 * SECOND + evenly(400, 70.0)])
    deployment = scaled()
    wanted = [ask(deployment, moments, periods=periods, calm_ns=20 * SECOND)[0] for periods in (10, 20, 29, 75)]
    assert wanted[1] == wanted[2] >= wanted[0] > 4
    assert wanted[3] <= 2
    # A copy of the scaler and the pool goes on as they do.
    _, scaler = ask(deployment, moments, periods=25, calm_ns=20 * SECOND)
    again = scaler.copy()
    pools = [pool_of(deployment, 3), pool_of(deployment, 3)]
    answers = [[wanted_devices(each, pool, at * SECOND) for at in range(26, 60)] for each, pool in
               zip((scaler, again), pools, strict=True)]  # fmt: skip
    assert answers[0] == answers[1]
    assert scaler.tobytes() == again.tobytes()


def test_a_rare_model_wants_no_more_than_its_share():
    """One request every ten seconds of each of a hundred models: not a hundred sudden rates."""
    deployment = Deployment(models=(model(copies=100, slo=0.05),), devices=1)
    pool = pool_of(deployment, 1)
    scaler = allocate_scaler(100, minimum=1, maximum=100)
    wanted = []
    for second in range(60):
        for queue in range(second % 10, 100, 10):
            note_arrival(scaler, pool, second * SECOND + queue, queue)
        wanted.append(wanted_devices(scaler, pool, (second + 1) * SECOND))
    assert set(wanted) == {1}


def test_the_last_idle_device_goes_first():
    pool = pool_of(one_model(devices=5), 4)
    assert device_to_drain(pool) == 3
    columns(pool)["device"][2:4] = 2
    assert device_to_drain(pool) == 1
    columns(pool)["device"][:2] = 2
    assert device_to_drain(pool) == 3
    columns(pool)["device"][:] = 0
    assert device_to_drain(pool) == -1


# --- simulated ---


@pytest.mark.timeout(300)  # policies are compiled once
def test_a_day_takes_far_fewer_device_seconds():
    day = scaled(10, arrivals=Diurnal(low=300, high=4500, period=Seconds(120.0)), how=scaling(0.5, 0.2, 4.0))
    for name in ("adaptive", "symphony"):
        result = simulate_deployment(day, load_policy(name), 120.0)
        assert result.in_time_share >= 0.99
        assert result.scaled.device_s < 0.65 * 10 * result.end_s
        assert result.busy_share == pytest.approx(result.busy_s.sum() / result.scaled.device_s)
        up = result.scaled.series[:, 1]
        assert up.min() == 1
        assert up.max() >= 7
        # Upwards first, then down: no back and forth. Each start is 0.5 s of a device that is not up.
        assert result.scaled.num_starts <= 12
        assert result.scaled.device_s >= result.scaled.mean_devices * result.end_s


@pytest.mark.parametrize("shape", [None, 0.1])
def test_a_constant_load_does_not_flap(shape):
    arrivals = Poisson(rate=2500) if shape is None else Gamma(rate=2500, shape=shape)
    result = simulate_deployment(scaled(12, arrivals=arrivals, how=scaling(0.2, 0.5, 10.0)), SYMPHONY, 150.0)
    changes = result.scaled.series[result.scaled.series[:, 0] > 40.0]
    assert len(changes) <= 3


def test_a_burst_is_met_after_drops(tmp_path):
    """Quiet, then five times as much within a moment: some are lost until the devices that are started are there."""
    moments = np.concatenate([np.arange(0, 5, 1 / 100), np.arange(5, 15, 1 / 3000)])
    (tmp_path / "burst.txt").write_text("\n".join(map(repr, moments.tolist())))
    deployment = scaled(arrivals=Trace(file=str(tmp_path / "burst.txt")), how=scaling(1.0, 0.1, 60.0))
    result = simulate_deployment(deployment, SYMPHONY, 15.0)
    after = simulate_deployment(deployment, SYMPHONY, 8.5, warm_up_s=6.5)
    assert result.in_time_share < 0.97
    assert after.in_time_share > 0.999
    at, up, _, wanted = result.scaled.series.T
    assert wanted[at < 5].max() == 1
    first = at[wanted > 1][0]
    assert 5 <= first <= 5.2
    assert at[up > 1][0] == pytest.approx(first + 1.0)


def test_devices_that_are_slower_than_they_are_taken_to_be_are_more():
    slow = tuple(Straggler(device=number, factor=1.6) for number in range(12))
    plain = replace(scaled(12, rate=1500.0), jitter=0.1)
    results = [simulate_deployment(replace(plain, troubles=each), EAGER, 40.0, warm_up_s=10) for each in ((), slow)]
    means = [result.scaled.mean_devices for result in results]
    assert means[1] > 1.3 * means[0]
    assert results[1].in_time_share > 0.97


@pytest.mark.parametrize("name", SCALABLE)
@pytest.mark.timeout(300)  # policies are compiled once
@pytest.mark.matrix
def test_nothing_is_lost_as_devices_come_and_go(name, patched):  # noqa: F811
    """Ten starts and as many that go within half a second, and devices that fail while they start, work and drain."""
    served = (model("a", slo=0.08, rate=900, shape=0.1), model("b", slo=0.03, alpha=0.001, beta=0.002, rate=300))
    how = scaling(0.01, 0.005, 0.01)
    outages = tuple(
        Outage(device=number % 3, since=0.05 + 0.04 * number, until=0.08 + 0.04 * number) for number in range(9)
    )
    for troubles in ((), outages):
        deployment = Deployment(models=served, devices=4, troubles=troubles, scaling=how)
        recorder = Recorder(deployment, name, patched)
        check(recorder, name)
        kinds = Counter(call for call, _ in recorder.calls)
        assert kinds["go_down"] > len(troubles)
        fast = simulate_deployment(deployment, load_policy(name), 0.6)
        assert fast.row() == recorder.result.row()
        assert fast.scaled.series.tolist() == recorder.result.scaled.series.tolist()
        assert any(row[0] == RUN for rows in recorder.decided for row in rows)


@given(deployments(), st.integers(0, 5))
@settings(max_examples=20)
@pytest.mark.long
def test_a_fleet_that_cannot_change_is_none(deployment, seed):
    deployment = replace(deployment, troubles=())
    fixed = replace(deployment, scaling=scaling(minimum=deployment.devices))
    plain, same = (simulate_deployment(each, SYMPHONY, 0.4, seed=seed) for each in (deployment, fixed))
    assert plain.row().items() <= {**same.row(), "busy_share": plain.busy_share}.items()
    assert plain.busy_s.tolist() == same.busy_s.tolist()
    assert same.scaled.num_starts == 0
    assert same.scaled.device_s == pytest.approx(deployment.devices * same.end_s)


def test_a_failed_device_is_replaced_and_comes_back_only_when_it_is_started():
    """Two of four devices are wanted. Device 0 fails for good; device 1 returns, and is not needed then."""
    outages = (Outage(device=0, since=4.1), Outage(device=1, since=8.1, until=9.0))
    how = scaling(0.5, 0.25, 60.0, minimum=2)
    result = simulate_deployment(replace(scaled(4, rate=100.0, how=how), troubles=outages), EAGER, 15.0)
    assert result.scaled.series.tolist() == [
        [0, 2, 0, 2], [4.1, 1, 0, 2], [4.25, 1, 1, 2], [4.75, 2, 0, 2],
        [8.1, 1, 0, 2], [8.25, 1, 1, 2], [8.75, 2, 0, 2],
    ]  # fmt: skip
    assert result.scaled.num_starts == 2
    assert result.in_time_share > 0.99


@pytest.mark.parametrize("name", ["symphony", *left_to_ci("clockwork", "timeouts")])
@pytest.mark.timeout(300)  # policies are compiled once
def test_the_last_requests_wait_for_a_device_that_starts(tmp_path, name):
    """The only device fails for good right after the last request; another one is started for it."""
    (tmp_path / "two.txt").write_text("0.9\n1.0")
    served = replace(model(slo=5.0), arrivals=Trace(file=str(tmp_path / "two.txt")))
    troubles = (Outage(device=0, since=1.002),)
    lost = Deployment(models=(served,), devices=2, scaling=scaling(1.0, 0.5), troubles=troubles)
    assert simulate_deployment(lost, load_policy(name), 3.0).models[0].num_in_time == 2
    # All have failed: it ends, and the last request waits for ever.
    none = replace(lost, troubles=(*troubles, Outage(device=1, since=0.5)))
    assert simulate_deployment(none, load_policy(name), 3.0).models[0].num_in_time < 2


def test_a_policy_of_plain_python_scales(tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Mine:\n"
        "    def arrive(self, pool, now, queue, request, deadline):\n"
        "        if pool.enter(queue, request, deadline): self.serve(pool)\n"
        "    def free(self, pool, now, device): self.serve(pool)\n"
        "    def serve(self, pool):\n"
        "        for device in pool.idle_devices:\n"
        "            if pool.length(0): pool.run(0, min(pool.length(0), 8), device)\n"
    )
    result = simulate_deployment(
        scaled(4, rate=1000.0, how=scaling(0.1, 0.1)), load_policy(f"{tmp_path}/mine.py:Mine"), 2.0
    )
    assert result.scaled.num_starts >= 1
    assert sum(served.num_in_time + served.num_late for served in result.models) == result.num_requests


def test_the_same_seed_is_the_same_fleet():
    deployment = replace(scaled(6, rate=1500.0, shape=0.3), jitter=0.2)
    one, other = (simulate_deployment(deployment, SYMPHONY, 5.0, seed=7) for _ in range(2))
    assert one.row() == other.row()
    assert one.scaled.series.tolist() == other.scaled.series.tolist()


# --- what is refused ---


def test_numbers_of_devices_that_cannot_be():
    for facts in ({"maximum": 5}, {"minimum": 5}, {"minimum": 0}, {"minimum": 3, "maximum": 2}):
        with pytest.raises(ServingError, match=r"Scaling: m(in|ax)imum is"):
            one_model(devices=4).__class__(models=(model(),), devices=4, scaling=scaling(**facts))
    for facts in ({"target": 1.0}, {"every": 0.0}, {"start": -1.0}, {"calm": 1e9}):
        with pytest.raises(ServingError, match="Scaling: "):
            scaling(**facts)


def test_what_does_not_go_with_scaling():
    with pytest.raises(ServingError, match="groups, each of which owns its devices"):
        replace(scaled(), groups=(Group(devices=1, models=("a",)),))
    with pytest.raises(ServingError, match="nexus plans for all devices"):
        simulate_deployment(scaled(), load_policy("nexus"), 1.0)
    for search in (find_capacity, find_goodput):
        with pytest.raises(ServingError, match="Remove the scaling"):
            search(scaled(), SYMPHONY, 1.0)
    check_served(scaled())
    with pytest.raises(ServingError, match="nexus plans for all devices"):
        check_served(replace(scaled(), policy="nexus"))


def test_a_scaler_begins_with_the_minimum():
    assert allocate_scaler(3, minimum=2, maximum=4)[WANTED] == 2
    assert simulate_deployment(scaled(rate=0.0, how=scaling(minimum=3)), EAGER, 1.0).scaled.mean_devices == 3
