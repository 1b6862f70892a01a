"""How many devices requests need, and what is learned of slow ones."""

from dataclasses import replace

import numpy as np
import pytest

from meshwright.serving import find_capacity, load_policy, simulate_deployment
from meshwright.serving.policies import pool, queues
from meshwright.serving.policies.ordering import observe, trust
from meshwright.spec import Deployment, ServingError, Straggler, Trace
from tests.marks import left_to_ci
from tests.serving.deployments import model, one_model

pytestmark = pytest.mark.timeout(400)  # the first test of a policy compiles it


def test_capacity_is_where_one_device_less_is_too_little():
    found = find_capacity(one_model(devices=1, slo=0.025, rate=3000.0), load_policy("symphony"), 3.0)
    assert found.staggered <= found.devices <= 1.3 * found.staggered + 1
    assert found.result.in_time_share >= 0.99 > found.fewer.in_time_share


def test_no_number_of_devices_helps_where_delay_takes_the_time():
    deployment = replace(one_model(devices=1, slo=0.008, rate=10.0), delay=0.005)
    with pytest.raises(ServingError, match="devices do not answer 99 %"):
        find_capacity(deployment, load_policy("eager"), 1.0)


@pytest.mark.long
def test_stragglers_are_learned():
    """Of three devices one takes half as long again; nothing else can be late."""
    deployment = replace(one_model(devices=3, slo=0.025), troubles=(Straggler(device=0, factor=1.5),))
    result = simulate_deployment(deployment, load_policy("adaptive"), 20.0, warm_up_s=2.0)
    assert result.models[0].num_late == 0
    assert result.in_time_share > 0.999


@pytest.mark.parametrize("policy", ["eager", "symphony", "adaptive", *left_to_ci("sharded:shards=2")])
def test_where_all_devices_are_slow_none_waits_for_a_faster_one(policy):
    """All take twice as long as they are taken to: once that is known, nothing is late, and overload is no standstill.

    Eager batching falls back on batches of one, of which devices can do 22 ms each.
    """
    deployment = replace(
        one_model(devices=4, slo=0.1, alpha=0.001, beta=0.01, largest=64, rate=1500),
        troubles=tuple(Straggler(device=device, factor=2.0) for device in range(4)),
    )
    (found,) = simulate_deployment(deployment, load_policy(policy), 20.0, seed=4, warm_up_s=10.0).models
    assert found.num_late < 0.01 * found.num_in_time
    assert found.num_in_time > (0.9 * 4 / 0.022 if policy == "eager" else 0.9 * 1500) * 10.0


@pytest.mark.parametrize("policy", ["symphony", "adaptive", *left_to_ci("sharded")])
def test_on_quiet_devices_that_are_slow_none_waits_too_long(policy):
    """Requests have nearly twice the time that they take alone, and come far apart; batches are few to learn from."""
    deployment = replace(
        one_model(devices=1, slo=0.12, alpha=0.0005, beta=0.05, largest=256, rate=2),
        troubles=(Straggler(device=0, factor=1.3),),
    )
    result = simulate_deployment(deployment, load_policy(policy), 120.0, seed=1, warm_up_s=20.0)
    assert result.in_time_share > 0.97


@pytest.mark.parametrize(("idle", "is_tried"), [(0, False), (19, False), (20, True)])
def test_a_device_that_was_slow_is_tried_again_only_after_it_was_idle_for_long(idle, is_tried):
    found = pool.allocate_pool(np.array([[0, 10]]), np.array([100]), 1)
    queues.come_up(found, 0, 0)
    queues.rest(found, 0)
    queues.enter(found, 0, 0, 1, 10**9)
    queues.run(found, 0, 0, 1, 0)
    observe(found, 20, 0)
    queues.rest(found, 0)
    slowness = pool.columns(found)["slowness"]
    assert slowness[0] == 1100
    trust(found, 20 + idle, 0)
    assert (slowness[0] < 1100) == is_tried


@pytest.mark.parametrize(
    ("before", "taken", "slowness"),
    [
        *((32, [30], 1000), (32, [12], 1100), (32, [12.5], 1100), (32, [12.51], 1000), (32, [12, 30], 1100)),
        *((31, [30], 1100), (0, [30], 1100), (32, [30, 30], 1100), (32, [30, 30, 10], 1098)),
        *((32, [30, *[10] * 31, 30], 1100), (32, [30, *[10] * 32, 30], 1000), (32, [10, 20] * 40, 2000)),
    ],
)
def test_one_batch_alone_that_takes_far_too_long_says_nothing(before, taken, slowness):
    """Each is planned to take what it is known to take: ten, at first."""
    found = pool.allocate_pool(np.array([[0, 10_000]]), np.array([100_000]), 1)
    queues.come_up(found, 0, 0)
    queues.rest(found, 0)
    now = 0
    for request, each in enumerate([10] * before + taken):
        queues.enter(found, now, 0, request, 10**9)
        queues.run(found, now, 0, 1, 0)
        now += round(1000 * each)
        observe(found, now, 0)
        queues.rest(found, 0)
        queues.clear(found)
    assert pool.columns(found)["slowness"][0] == slowness


def test_a_device_that_is_slow_is_planned_so_and_used_last():
    found = pool.allocate_pool(np.array([[0, 10]]), np.array([100]), 2)
    now = 0
    for device in (0, 1):
        queues.come_up(found, device, now)
        queues.rest(found, device)
    for request in range(40):
        queues.enter(found, now, 0, request, 10**9)
        device = queues.idle_device(found)
        queues.run(found, now, 0, 1, device)
        now += 15 if device == 0 else 10
        observe(found, now, device)
        queues.rest(found, device)
        queues.clear(found)
    slowness = pool.columns(found)["slowness"]
    assert 1250 <= slowness[0] <= 1500
    assert slowness[1] == pool.NOMINAL
    assert queues.idle_device(found) == 1
    assert queues.latency_on(found, 0, 1, 0) == 10 * slowness[0] // 1000


def test_a_crowd_gets_as_many_devices_as_it_needs(tmp_path):
    """200 requests at one moment, with time for one batch of one: a device for each, far beyond the mean rate."""
    trace = tmp_path / "crowd.txt"
    trace.write_text("1.5\n" * 200 + "9\n")
    crowd = replace(model(slo=0.01, alpha=0.001, beta=0.008, largest=1), arrivals=Trace(file=str(trace)))
    found = find_capacity(Deployment(models=(crowd,), devices=1), load_policy("eager"), 10.0)
    # 99 % of 201 are at least 199: the last one, and 198 at once.
    assert found.devices == 198
    assert found.staggered < 1


def test_where_no_device_helps_what_was_tried_is_said():
    deployment = replace(one_model(devices=1, slo=0.008, rate=10.0), delay=0.005)
    with pytest.raises(
        ServingError, match=r"64 devices .* some of them never got a batch: more devices would not help"
    ):
        find_capacity(deployment, load_policy("eager"), 1.0)
