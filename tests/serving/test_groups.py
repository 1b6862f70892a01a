"""Devices that hold only some models: each request goes to one group, and each group is a pool of its own."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.serving import draw_arrivals, load_policy, simulate_deployment
from meshwright.serving.simulation.simulate_serving import split_groups
from meshwright.spec import Deployment, Group, Outage, ServingError, Straggler, Trace
from tests.marks import left_to_ci
from tests.serving.deployments import deployments, model, models
from tests.serving.oracle import serve_eagerly

EAGER, NEXUS = load_policy("eager"), load_policy("nexus")


def grouped(*groups, **facts):
    served = tuple(model(name, rate=300.0 + 100 * place) for place, name in enumerate("abc"))
    return Deployment(models=served, devices=6, groups=groups, **facts)


@st.composite
def with_groups(draw):
    served = tuple(draw(models(name)) for name in "abc"[: draw(st.integers(1, 3))])
    groups = []
    for _ in range(draw(st.integers(1, 4))):
        held = draw(st.lists(st.sampled_from([each.name for each in served]), unique=True))
        weights = draw(st.just(()) | st.tuples(*[st.floats(0.01, 10)] * len(held)))
        groups.append(Group(devices=draw(st.integers(1, 2)), models=tuple(held), weights=weights))
    return Deployment(models=served, devices=9, groups=tuple(groups))


@given(with_groups(), st.integers(0, 5))
def test_each_request_goes_to_one_group_that_holds_its_model(deployment, seed):
    _, whose = draw_arrivals(deployment.models, 0.5, seed=seed)
    names = [each.name for each in deployment.models for _ in range(each.copies)]
    parts = list(split_groups(deployment, whose, seed))
    filled = [group for group in deployment.groups if group.models]
    assert len(parts) == len(filled)
    for part, group in zip(parts, filled, strict=True):
        assert part.deployment.devices == group.devices
        own = [each.name for each in part.deployment.models for _ in range(each.copies)]
        assert set(own) == set(group.models)
        assert [names[number] for number in part.numbers] == own
        assert (part.numbers[part.queue] == whose[part.chosen]).all()
    held = {name for group in deployment.groups for name in group.models}
    dealt = np.concatenate([np.zeros(0, np.int64), *(part.chosen for part in parts)])
    expected = [request for request, number in enumerate(whose) if names[number] in held]
    assert sorted(dealt.tolist()) == expected


def test_groups_get_shares_by_their_weights():
    deployment = grouped(
        Group(devices=1, models=("a", "b"), weights=(1.0, 3.0)),
        Group(devices=3, models=("a",)),
        Group(devices=2, models=("c", "b"), weights=(5.0, 1.0)),
    )
    _, whose = draw_arrivals(deployment.models, 50.0)
    parts = list(split_groups(deployment, whose, 0))
    total = np.bincount(whose)
    for place, name, share in ((0, 0, 0.25), (1, 0, 0.75), (0, 1, 0.75), (2, 1, 0.25), (2, 2, 1.0)):
        count = int((whose[parts[place].chosen] == name).sum())
        spread = math.sqrt(total[name] * share * (1 - share))
        assert abs(count - share * total[name]) <= 5 * spread
    # Shares are drawn, not counted off: whether one request comes says nothing about the next one.
    came = np.isin(np.flatnonzero(whose == 0), parts[0].chosen)
    assert came[:-1][came[1:]].mean() == pytest.approx(0.25, abs=0.03)


def facts_of(result):
    return [
        (each.num_requests, each.num_in_time, each.num_late, each.num_batches, each.dropped, each.histogram.tolist())
        for each in result.models
    ]


@pytest.mark.parametrize("name", ["eager", *left_to_ci("nexus")])
@given(deployment=deployments(), seed=st.integers(0, 5))
def test_one_group_with_all_models_is_no_group(name, deployment, seed):
    steady = replace(deployment, jitter=0.0)
    names = tuple(each.name for each in steady.models)
    one = replace(steady, groups=(Group(devices=steady.devices, models=names),))
    alone, found = (simulate_deployment(each, load_policy(name), 0.2, seed=seed) for each in (steady, one))
    assert facts_of(found) == facts_of(alone)
    assert found.busy_s.tolist() == alone.busy_s.tolist()
    assert found.end_s == alone.end_s
    assert found.batches.tolist() == alone.batches.tolist()


def test_groups_are_what_an_independent_simulation_says_of_each():
    deployment = grouped(Group(devices=1, models=("b",)), Group(devices=2, models=("a", "c")))
    arrival, whose = draw_arrivals(deployment.models, 2.0, seed=3)
    found = simulate_deployment(deployment, EAGER, 2.0, seed=3)
    batches = np.zeros(len(found.batches), np.int64)
    for names, devices in (("b", 1), ("ac", 2)):
        held = tuple(each for each in deployment.models if each.name in names)
        numbers = ["abc".index(name) for name in names]
        own = np.isin(whose, numbers)
        owners = np.searchsorted(numbers, whose[own])
        counts, sizes = serve_eagerly(Deployment(models=held, devices=devices), arrival[own], owners)
        batches += np.bincount(sizes, minlength=len(batches))
        for number, expected in zip(numbers, counts, strict=True):
            served = found.models[number]
            assert [served.num_requests, served.num_in_time, served.num_batches, served.dropped["late"]] == expected
    assert found.batches.tolist() == batches.tolist()
    # Three of six devices are in no group.
    assert (found.busy_s[:3] > 0).all()
    assert not found.busy_s[3:].any()


def test_what_no_group_holds_is_not_served():
    found = simulate_deployment(grouped(Group(devices=2, models=("b",))), EAGER, 2.0, warm_up_s=1.0)
    _, whose = draw_arrivals(grouped().models, 3.0)
    for served, number in ((found.models[0], 0), (found.models[2], 2)):
        assert served.num_in_time == 0
        assert served.dropped["unplaced"] == served.num_requests > 0
        assert served.num_requests < (whose == number).sum()
        assert served.row(2.0)["num_dropped_unplaced"] == served.num_requests
    assert "unplaced" not in found.models[1].dropped
    assert found.models[1].in_time_share > 0.9
    nothing = simulate_deployment(grouped(Group(devices=2, models=())), EAGER, 1.0)
    assert (nothing.in_time_share, nothing.busy_share, nothing.end_s) == (0, 0, 0)


def test_troubles_are_those_of_the_group_with_the_device():
    groups = (Group(devices=2, models=("a",)), Group(devices=1, models=("b",)), Group(devices=3, models=("c",)))
    usual = simulate_deployment(grouped(*groups), EAGER, 3.0)
    away = simulate_deployment(grouped(*groups, troubles=(Outage(device=2, since=0.5),)), EAGER, 3.0)
    assert facts_of(away)[0] == facts_of(usual)[0]
    assert facts_of(away)[2] == facts_of(usual)[2]
    assert away.models[1].in_time_share < 0.3 < usual.models[1].in_time_share
    slow = simulate_deployment(grouped(*groups, troubles=(Straggler(device=4, factor=3.0),)), EAGER, 3.0)
    assert facts_of(slow)[:2] == facts_of(usual)[:2]
    assert facts_of(slow)[2] != facts_of(usual)[2]


def test_jitter_of_groups_is_their_own(tmp_path):
    """Two models with the same requests on a device each: alike, but for how long their batches really take."""
    (tmp_path / "moments.txt").write_text("\n".join(f"{0.01 * number}" for number in range(1, 100)))
    moments = Trace(file=str(tmp_path / "moments.txt"))
    held = tuple(replace(model(name), arrivals=moments) for name in "ab")
    groups = (Group(devices=1, models=("a",)), Group(devices=1, models=("b",)))
    steady = Deployment(models=held, devices=2, groups=groups)
    usual = simulate_deployment(steady, EAGER, 2.0)
    assert facts_of(usual)[0] == facts_of(usual)[1]
    first, again = (simulate_deployment(replace(steady, jitter=0.5), EAGER, 2.0, seed=7) for _ in range(2))
    assert facts_of(first) == facts_of(again)
    assert first.busy_s[0] != first.busy_s[1]


def test_models_that_do_not_fit_are_refused_where_no_groups_are():
    held = tuple(replace(each, memory=2.0) for each in grouped().models)
    small = Deployment(models=held, devices=2, device_memory=5.0)
    with pytest.raises(ServingError, match=r"take 6 B, and a device has 5 B.*--place best"):
        simulate_deployment(small, EAGER, 1.0)
    assert simulate_deployment(replace(small, device_memory=6.0), EAGER, 1.0).num_requests > 0
    fitting = replace(small, groups=(Group(devices=2, models=("a", "b")),))
    assert simulate_deployment(fitting, EAGER, 1.0).models[0].num_in_time > 0
