"""The split of a query's time, against brute force over all splits and published equations."""

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.serving import (
    devices_for,
    devices_of,
    expand_deployment,
    find_capacity,
    load_policy,
    scale_bound,
    simulate_deployment,
    split_evenly,
    split_time,
    throughput,
)
from meshwright.serving.expansion import call_rates
from meshwright.spec import Deployment, Latency, ModelCall, Poisson, Query, ServingError
from tests.marks import examples
from tests.serving.deployments import model


def call(name, after=None, *, alpha=0.001, beta=0.005, largest=64, fan_out=1.0):
    return ModelCall(name=name, after=after, fan_out=fan_out, latency=Latency(alpha=alpha, beta=beta, largest=largest))


@st.composite
def queries(draw):
    names = "abcd"[: draw(st.integers(1, 4))]
    calls = [
        call(
            name,
            draw(st.sampled_from(names[:place])) if place else None,
            alpha=draw(st.floats(1e-4, 5e-3)),
            beta=draw(st.floats(0, 0.02)),
            largest=draw(st.sampled_from([1, 8, 64])),
            fan_out=draw(st.sampled_from([0.0, 0.3, 1.0, 5.0])) if place else 1.0,
        )
        for place, name in enumerate(names)
    ]
    return Query(name="q", slo=draw(st.floats(0.05, 0.6)), rate=draw(st.floats(0, 500)), calls=tuple(calls))


def ways_down(query):
    """The calls from the root to each leaf."""
    parent = {each.name: each.after for each in query.calls}
    for name in parent.keys() - set(parent.values()):
        way = [name]
        while parent[way[-1]] is not None:
            way.append(parent[way[-1]])
        yield way


def need(query, name, seconds, equation):
    (found,) = (each for each in query.calls if each.name == name)
    if found.latency.of(1) > seconds:
        return math.inf
    rate, at = query.rate, found
    while at.after is not None:
        rate *= at.fan_out
        (at,) = (each for each in query.calls if each.name == at.after)
    return devices_for(found.latency, seconds, rate, equation)


@given(queries(), st.integers(3, 7), st.sampled_from(["staggered", "uncoordinated"]))
@settings(max_examples=examples(60))
def test_no_other_split_needs_fewer_devices(query, segments, equation):
    names = [each.name for each in query.calls]
    best = math.inf
    for counts in product(range(1, segments + 1), repeat=len(names)):
        parts = dict(zip(names, counts, strict=True))
        if all(sum(parts[name] for name in way) <= segments for way in ways_down(query)):
            needs = [need(query, name, query.slo * parts[name] / segments, equation) for name in names]
            best = min(best, math.fsum(needs))
    if math.isinf(best):
        with pytest.raises(ServingError, match="no split of"):
            split_time(query, segments=segments, equation=equation)
        return
    times = split_time(query, segments=segments, equation=equation)
    assert devices_of(query, times, equation) == pytest.approx(best)
    assert all(sum(times[name] for name in way) <= query.slo * (1 + 1e-9) for way in ways_down(query))


@given(queries())
@settings(max_examples=examples(40))
def test_an_even_split_fills_the_longest_way_and_no_way_exceeds_the_time(query):
    times = split_evenly(query)
    sums = [sum(times[name] for name in way) for way in ways_down(query)]
    assert all(total == pytest.approx(query.slo) for total in sums)
    longest = max(len(way) for way in ways_down(query))
    assert times["a"] == pytest.approx(query.slo / longest)


def test_a_chain_is_split_evenly_into_equal_parts():
    query = Query(name="q", slo=0.3, rate=10.0, calls=(call("a"), call("b", "a"), call("c", "b"), call("d", "a")))
    assert split_evenly(query) == pytest.approx({"a": 0.1, "b": 0.1, "c": 0.1, "d": 0.2})
    assert call_rates(query) == {"a": 10.0, "b": 10.0, "c": 10.0, "d": 10.0}


def test_at_high_rates_devices_are_rates_over_throughputs():
    """Nexus, section 6.2: rate / maxThroughput(k), of the largest batch of which two fit."""
    query = Query(name="q", slo=0.2, rate=1e5, calls=(call("a"), call("b", "a", alpha=0.002, fan_out=3.0)))
    times = {"a": 0.08, "b": 0.12}
    expected = 0.0
    for each, rate in zip(query.calls, (1e5, 3e5), strict=True):
        fitting = [b for b in range(1, 65) if 2 * each.latency.of(b) <= times[each.name] + 1e-12]
        expected += rate / max(throughput(each.latency, b) for b in fitting)
    assert devices_of(query, times, "uncoordinated") == pytest.approx(expected, rel=1e-3)


def test_models_of_calls_are_simulated_beside_others():
    query = Query(name="cars", slo=0.3, rate=60.0, calls=(call("find", beta=0.02), call("name", "find", fan_out=2.5)))
    deployment = Deployment(models=(model("other", rate=10.0),), queries=(query,), devices=3)
    found = expand_deployment(deployment)
    times = split_time(query)
    assert [each.name for each in found.models] == ["other", "cars.find", "cars.name"]
    assert [each.slo for each in found.models[1:]] == [times["find"], times["name"]]
    assert [each.arrivals for each in found.models[1:]] == [Poisson(rate=60.0), Poisson(rate=150.0)]
    assert (found.queries, expand_deployment(found)) == ((), found)
    one, other = (simulate_deployment(each, load_policy("eager"), 2.0) for each in (deployment, found))
    assert [each.row(2.0) for each in one.models] == [each.row(2.0) for each in other.models]
    alone = find_capacity(Deployment(queries=(query,), devices=1), load_policy("eager"), 2.0)
    assert alone.staggered == pytest.approx(devices_of(query, times))
    assert alone.devices >= alone.staggered


def test_delay_and_slack_are_taken_off_each_call():
    """In what is left of 160 ms beside twice 30 ms, batches of one take 47 and 6 ms."""
    query = Query(name="q", slo=0.16, rate=300.0, calls=(call("x", alpha=0.012, beta=0.035), call("y", "x")))
    times = split_time(query, overhead_s=0.03)
    assert times["x"] >= 0.077
    assert times["y"] >= 0.036
    assert math.isinf(devices_of(query, {"x": 0.14, "y": 0.02}, overhead_s=0.03))
    assert devices_of(query, times, overhead_s=0.03) == pytest.approx(
        devices_of(query, {name: seconds - 0.03 for name, seconds in times.items()})
    )
    served = Deployment(queries=(query,), devices=80, slack=0.02, delay=0.01)
    assert [each.slo for each in expand_deployment(served).models] == [times["x"], times["y"]]
    with pytest.raises(ServingError, match=r"besides 0\.06 s of delay and slack for each"):
        split_time(query, overhead_s=0.06)


@given(queries())
@settings(max_examples=examples(40))
def test_time_that_nobody_needs_is_spread(query):
    try:
        times = split_time(query, segments=50)
    except ServingError:
        return
    # All of it is given to somebody on every way down, and no call has less than the time of a batch of one.
    assert all(sum(times[name] for name in way) == pytest.approx(query.slo) for way in ways_down(query))
    assert all(times[each.name] >= each.latency.of(1) for each in query.calls)


def test_equal_calls_of_which_none_needs_more_get_equal_parts():
    calls = (call("a", largest=1), call("b", "a", largest=1))
    assert split_time(Query(name="q", slo=0.4, rate=0.0, calls=calls)) == pytest.approx({"a": 0.2, "b": 0.2})


def test_time_is_split_for_the_rates_at_a_scale():
    calls = (call("find", beta=0.02), call("name", "find", fan_out=2.5))
    query = Query(name="cars", slo=0.3, rate=600.0, calls=calls)
    slow = Query(name="cars", slo=0.3, rate=6.0, calls=calls)
    assert split_time(query, scale=0.01) == split_time(slow) != split_time(query)
    assert devices_of(query, split_time(slow), scale=0.01) == devices_of(slow, split_time(slow))
    deployment = Deployment(queries=(query,), devices=4)
    found = expand_deployment(deployment, 0.01)
    assert [each.slo for each in found.models] == list(split_time(slow).values())
    # Rates are multiplied when requests are drawn.
    assert [each.arrivals for each in found.models] == [Poisson(rate=600.0), Poisson(rate=1500.0)]
    result = simulate_deployment(deployment, load_policy("eager"), 2.0, scale=0.01)
    assert [each.slo_s for each in result.models] == list(split_time(slow).values())


def test_the_bound_is_where_the_best_split_needs_all_devices():
    calls = (call("find", beta=0.02), call("name", "find", fan_out=2.5))
    query = Query(name="cars", slo=0.3, rate=60.0, calls=calls)
    bound = scale_bound(Deployment(queries=(query,), devices=4), 1.0)
    needed = [devices_of(query, split_time(query, scale=each), scale=each) for each in (bound * 0.999, bound * 1.001)]
    assert needed[0] < 4 < needed[1]


@pytest.mark.long
def test_calls_can_be_loaded():
    query = Query(
        name="q",
        slo=0.4,
        rate=10.0,
        calls=tuple(replace(each, memory=0.8 * 2**30) for each in (call("x"), call("y", "x"))),
    )
    deployment = Deployment(queries=(query,), devices=1, device_memory=2.0**30)
    with pytest.raises(ServingError, match="has no load"):
        simulate_deployment(deployment, load_policy("clockwork"), 1.0)
    loaded = replace(query, calls=tuple(replace(each, load=0.01) for each in query.calls))
    assert simulate_deployment(replace(deployment, queries=(loaded,)), load_policy("clockwork"), 1.0).num_loads > 1
