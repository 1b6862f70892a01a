"""Placements against brute force, closed forms and a linear program; each of them within memory."""

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from meshwright.serving import (
    PLACE_METHODS,
    bound_placed,
    bound_share,
    find_capacity,
    load_policy,
    place_models,
    simulate_deployment,
)
from meshwright.serving.placement.model_placement import pack_models, replicate_models
from meshwright.spec import Deployment, Diurnal, Group, Poisson, ServingError, Straggler
from tests.marks import examples
from tests.serving.deployments import model, models

pytestmark = pytest.mark.timeout(300)

EAGER, SYMPHONY = load_policy("eager"), load_policy("symphony")
# What a placement is chosen by has another seed than what is simulated afterwards.
PLANNED = 2**31 + 1


def served(*rates, memory=1.0, **facts):
    return tuple(
        replace(model(name, rate=rate, **facts), memory=memory) for name, rate in zip("abcdef", rates, strict=False)
    )


@st.composite
def small(draw):
    names = "abc"[: draw(st.integers(1, 3))]
    limit = draw(st.sampled_from([None, 1.0, 2.0]))
    held = tuple(replace(draw(models(name)), memory=draw(st.floats(0.05, 1.0))) for name in names)
    return Deployment(models=held, devices=draw(st.integers(1, 3)), device_memory=limit)


@given(small(), st.sampled_from([*PLACE_METHODS, "simulated:beam=2"]))
@settings(max_examples=examples(40))
def test_every_method_keeps_requests_copies_and_memory(deployment, method):
    found = place_models(deployment, EAGER, 0.1, method=method)
    placed = found.deployment
    assert 1 <= sum(group.devices for group in placed.groups) <= deployment.devices
    # What comes is the same, whatever became models of their own.
    assert sum(each.copies for each in placed.models) == sum(each.copies for each in deployment.models)
    for each in deployment.models:
        own = [other for other in placed.models if other.name == each.name or other.name.startswith(f"{each.name}-")]
        assert sum(other.copies for other in own) == each.copies
        assert {replace(other, name=each.name, copies=each.copies) for other in own} == {each}
    if not method.startswith(("simulated", "best")):
        # No two groups hold the same, or they would be one.
        assert len({frozenset(group.models) for group in placed.groups}) == len(placed.groups)
    assert all(placed.has_room(group.models) for group in placed.groups)
    result = simulate_deployment(placed, EAGER, 0.1)
    assert 0 <= result.in_time_share <= 1


def best_by_brute_force(deployment, seconds):
    """The highest share in time over everything that single devices, or all as one group, can hold."""
    names = [each.name for each in deployment.models]
    fitting = [
        held
        for count in range(len(names) + 1)
        for held in combinations(names, count)
        if count * deployment.models[0].memory <= deployment.device_memory
    ]
    single = [
        tuple(Group(devices=1, models=held) for held in chosen)
        for chosen in product(fitting, repeat=deployment.devices)
    ]
    whole = [(Group(devices=deployment.devices, models=held),) for held in fitting]
    return max(
        simulate_deployment(replace(deployment, groups=groups), EAGER, seconds, seed=PLANNED).in_time_share
        for groups in [*single, *whole]
    )


@pytest.mark.parametrize("rates", [(900.0, 300.0, 100.0), (700.0, 700.0, 20.0), (2500.0, 100.0, 100.0)])
def test_a_wide_beam_finds_what_brute_force_finds(rates):
    deployment = Deployment(models=served(*rates), devices=2, device_memory=2.0)
    best = best_by_brute_force(deployment, 1.0)
    wide = place_models(deployment, EAGER, 1.0, method="simulated:beam=1000")
    assert wide.planned_share >= best
    chain = place_models(deployment, EAGER, 1.0, method="simulated")
    # "At least 98 % of the original algorithm's" (AlpaServe, section 4.2).
    assert chain.planned_share >= 0.98 * best
    anything = place_models(deployment, EAGER, 1.0)
    assert anything.planned_share >= max(
        place_models(deployment, EAGER, 1.0, method=method).planned_share for method in PLACE_METHODS[1:]
    )


def test_the_method_that_is_best_is_named():
    deployment = Deployment(models=served(900.0, 300.0, 100.0), devices=2, device_memory=2.0)
    shares = {method: place_models(deployment, EAGER, 1.0, method=method).planned_share for method in PLACE_METHODS[1:]}
    best = place_models(deployment, EAGER, 1.0)
    assert best.planned_share == shares[best.method] == max(shares.values())


def test_copies_follow_loads():
    """Loads of 3 to 1 (long SLOs: devices are proportional to rates), room for one model: copies of 3 to 1."""
    deployment = Deployment(
        models=served(3000.0, 1000.0, slo=10.0, largest=8), devices=8, device_memory=1.5, policy="eager"
    )
    assert {group.models: group.devices for group in replicate_models(deployment)} == {("a",): 6, ("b",): 2}


def test_without_a_limit_of_memory_copies_are_everywhere():
    deployment = Deployment(models=served(300.0, 100.0, 10.0), devices=5)
    (group,) = replicate_models(deployment)
    assert (group.devices, set(group.models), group.weights) == (5, set("abc"), ())


def test_a_packing_is_what_nexus_would_run():
    """One model of 2.5 devices: two full ones and a half; shares are what each serves of the requests."""
    # l(b) = b + 5 ms, 50 ms: batches of 20 in 25 ms, 800 per second.
    alone = Deployment(models=served(2000.0), devices=3)
    (group,) = pack_models(alone)
    assert group.devices == 3
    # With another one, the half device is shared, and the model's weights are those of its devices.
    both = Deployment(models=served(2000.0, 20.0), devices=3)
    found = {group.models: group for group in pack_models(both)}
    ((names, shared),) = ((names, group) for names, group in found.items() if len(names) == 2)
    full = found[("a",)]
    assert set(names) == {"a", "b"}
    assert (full.devices, shared.devices) == (2, 1)
    assert full.weight_of("a") == pytest.approx(1600.0)
    assert 0.2 < shared.weight_of("a") / full.weight_of("a") < 0.5


def test_what_takes_most_memory_for_a_request_is_left_out_where_not_all_fit():
    heavy = replace(model("heavy", rate=50.0), memory=1.0)
    deployment = Deployment(models=(*served(300.0, 100.0, memory=1.0), heavy), devices=1, device_memory=2.0)
    (group,) = pack_models(deployment)
    assert set(group.models) == {"a", "b"}
    placed = place_models(deployment, EAGER, 0.5, method="packing").deployment
    assert [each.dropped.get("unplaced", 0) > 0 for each in simulate_deployment(placed, EAGER, 0.5).models] == [
        False, False, True,
    ]  # fmt: skip
    # What never comes takes no place; and where nothing comes, nothing is held.
    idle = replace(deployment, models=tuple(replace(each, arrivals=Poisson(rate=0.0)) for each in deployment.models))
    assert pack_models(idle) == (Group(devices=1, models=()),)
    assert place_models(idle, EAGER, 0.5).planned_share == 1


def test_copies_that_go_to_different_devices_become_models():
    deployment = Deployment(
        models=(replace(model("a", rate=200.0, copies=3), memory=1.0),), devices=3, device_memory=1.0
    )
    placed = place_models(deployment, EAGER, 0.5, method="replication").deployment
    assert [each.name for each in placed.models] == ["a-1", "a-2", "a-3"]
    assert sorted(group.models for group in placed.groups) == [("a-1",), ("a-2",), ("a-3",)]
    roomy = place_models(replace(deployment, device_memory=3.0), EAGER, 0.5, method="replication").deployment
    assert roomy.models == deployment.models
    assert roomy.groups == (Group(devices=3, models=("a",)),)


@given(
    st.lists(st.tuples(models("a"), st.just(0.0) | st.floats(0.01, 3000)), min_size=1, max_size=4),
    st.integers(1, 4),
)
def test_the_bound_is_that_of_a_linear_program(drawn, devices):
    """Most requests in time, where each takes its share of the best batch and devices have a second each second."""
    kinds, rates = [each for each, _ in drawn], [rate for _, rate in drawn]
    cost, total = [], []
    for kind, rate in drawn:
        lengths = [kind.latency.alpha * b + kind.latency.beta for b in range(1, kind.latency.largest + 1)]
        cost.append(min(length / b for b, length in enumerate(lengths, 1) if length <= kind.slo))
        total.append(rate * kind.copies)
    found = bound_share(kinds, rates, devices)
    if not sum(total):
        assert found == 1
        return
    best = linprog(-np.ones(len(cost)), A_ub=[cost], b_ub=[devices], bounds=[(0, rate) for rate in total])
    assert found == pytest.approx(-best.fun / sum(total), rel=1e-6)


@pytest.mark.parametrize("method", PLACE_METHODS[1:])
def test_no_placement_exceeds_the_bound_under_overload(method):
    deployment = Deployment(models=served(3000.0, 2000.0, 500.0), devices=2, device_memory=2.0)
    placed = place_models(deployment, SYMPHONY, 3.0, method=method).deployment
    bound = bound_share(deployment.models, [3000.0, 2000.0, 500.0], 2)
    share = simulate_deployment(placed, SYMPHONY, 3.0).in_time_share
    # Requests come as they are drawn: one in a hundred more or less.
    assert 0.3 * bound < share <= bound * 1.02 < 0.7


def test_the_fewest_devices_are_those_that_memory_asks_for():
    """Three slow trickles with room for one model each need three devices, though a part of one could serve them."""
    deployment = Deployment(models=served(20.0, 20.0, 20.0), devices=1, device_memory=1.0)

    def place(devices):
        return place_models(devices, EAGER, 2.0, method="simulated", warm_up_s=1.0).deployment

    found = find_capacity(deployment, EAGER, 2.0, place=place)
    assert found.devices == 3
    assert found.staggered < 1
    assert found.fewer.in_time_share < 0.8
    roomy = find_capacity(replace(deployment, device_memory=3.0), EAGER, 2.0, place=place)
    assert roomy.devices == 1
    with pytest.raises(ServingError, match="has groups"):
        find_capacity(replace(deployment, groups=(Group(devices=1, models=("a",)),)), EAGER, 1.0)


@pytest.mark.parametrize("method", ["simulatd", "simulated:beam=0", "packing:beam=2", ""])
def test_methods_that_there_are_not(method):
    with pytest.raises(ServingError, match="Give one of best, packing, replication, simulated"):
        place_models(Deployment(models=served(1.0), devices=1), EAGER, 0.1, method=method)


def test_names_of_copies_are_those_of_nobody_else():
    held = (replace(model("a", rate=200.0, copies=2), memory=1.0), replace(model("a-1", rate=200.0), memory=1.0))
    deployment = Deployment(models=held, devices=3, device_memory=1.0)
    placed = place_models(deployment, EAGER, 0.5, method="replication").deployment
    assert sorted(each.name for each in placed.models) == ["a-1", "a-2", "a-3"]
    assert sum(each.copies for each in placed.models) == 3


def test_the_bound_of_a_simulation_counts_what_came_and_fast_devices():
    """Of a wave's valley all is answered; a device five times as fast answers what five would."""
    wave = replace(model("a", slo=0.05), arrivals=Diurnal(low=100, high=20_000, period=100.0))
    valley = Deployment(models=(wave,), devices=1)
    result = simulate_deployment(valley, EAGER, 2.0)
    assert result.in_time_share == bound_placed(valley, result) == 1
    crowd = Deployment(models=(model("a", rate=8000.0, largest=32),), devices=1)
    fast = replace(crowd, troubles=(Straggler(device=0, factor=0.2),))
    result = simulate_deployment(fast, EAGER, 3.0)
    bound = bound_placed(fast, result)
    # Batches of 32 take 37 ms: five devices' worth of them, until 50 ms behind the last request.
    assert bound == pytest.approx(5 * 32 / 0.037 * 3.05 / result.num_requests)
    assert bound_placed(crowd, result) < result.in_time_share <= bound < 1
