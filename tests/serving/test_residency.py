"""Devices that do not hold all models: what is loaded, what leaves, and what is served meanwhile."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.serving import load_policy, simulate_deployment
from meshwright.serving.policies.pool import LOAD, NEVER, RUN, UNLOAD
from meshwright.serving.policies.residency import PARTS, Weights
from meshwright.serving.simulation.weights import check_there, empty_memory, find_weights, move_weights
from meshwright.spec import Deployment, Group, Outage, Poisson, Scaling, ServingError, Trace
from meshwright.spec.units import Bytes, Seconds
from tests.marks import examples
from tests.serving.deployments import deployments, model
from tests.serving.test_engine import same
from tests.serving.test_invariants import Recorder

CLOCKWORK = load_policy("clockwork")


def loaded(deployment, *, fitting, load=0.004):
    """So many models, copies one by one, fit on a device."""
    models = tuple(replace(each, memory=Bytes(1.0), load=Seconds(load)) for each in deployment.models)
    return replace(deployment, models=models, device_memory=Bytes(float(fitting)))


def check_devices(recorder, deployment):
    """Follow all decisions: what each device holds, copies and computes. Returns how many were loads."""
    weights, fitting = find_weights(deployment, CLOCKWORK), int(deployment.device_memory)
    there_at = [{} for _ in range(deployment.devices)]
    batches = [[] for _ in range(deployment.devices)]
    copied_at, decided, loads = [0] * deployment.devices, iter(recorder.decided), 0
    for call, arguments in recorder.calls:
        if call == "come_up":
            there_at[arguments[1]], copied_at[arguments[1]] = {}, 0
        elif call == "go_down":
            batches[arguments[1]] = []
        elif call == "free":
            batches[arguments[3]] = batches[arguments[3]][1:]
        elif call == "clear":
            for kind, device, queue, _, _, when, _ in next(decided):
                if kind == RUN:
                    assert there_at[device][queue] <= when, "a device computes what it does not hold"
                    batches[device].append(queue)
                    assert len(batches[device]) <= 2
                elif kind == LOAD:
                    assert queue not in there_at[device]
                    assert copied_at[device] <= when, "a device copies two models at once"
                    copied_at[device] = there_at[device][queue] = when + weights.load[queue]
                    assert len(there_at[device]) <= fitting, "a device holds more than it has room for"
                    loads += 1
                elif kind == UNLOAD and queue in there_at[device]:
                    assert queue not in batches[device], "what is computed leaves the device"
                    assert there_at[device].pop(queue) <= when
    return loads


@settings(max_examples=examples(25))
@given(deployments(), st.data())
def test_devices_run_what_they_hold_and_hold_what_fits(deployment, data):
    count = sum(each.copies for each in deployment.models)
    fitting = data.draw(st.integers(1, max(count - 1, 1)))
    deployment = loaded(deployment, fitting=fitting, load=data.draw(st.sampled_from([0.0, 0.002, 0.05])))
    if count == 1:
        return
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(deployment, "clockwork", patch)
    assert check_devices(recorder, deployment) == recorder.result.num_loads
    for served in recorder.result.models:
        over = served.num_requests - served.num_in_time - served.num_late
        assert over == sum(served.dropped.values()), "each request is answered or dropped"
        if deployment.jitter == 0 and not deployment.troubles:
            assert served.num_late == 0


def many_models(**facts):
    """A hundred models of skewed popularity on four devices, each of which has room for ten."""
    models = tuple(
        replace(model(f"m{place}", slo=0.1, rate=100.0 / (place + 1) ** 0.8), memory=Bytes(1.0), load=Seconds(0.008))
        for place in range(100)
    )
    return Deployment(models=models, devices=4, device_memory=Bytes(10.0), **facts)


def test_loading_serves_more_than_holding_the_most_popular():
    deployment = many_models()
    result = simulate_deployment(deployment, CLOCKWORK, 10.0)
    first = tuple(each.name for each in deployment.models[:10])
    static = simulate_deployment(replace(deployment, groups=(Group(devices=4, models=first),)), CLOCKWORK, 10.0)
    # Forty different models, each on one device, is all that can be held at once.
    groups = tuple(
        Group(devices=1, models=tuple(each.name for each in deployment.models[place:40:4])) for place in range(4)
    )
    spread = simulate_deployment(replace(deployment, groups=groups), CLOCKWORK, 10.0)
    assert result.in_time_share > 2 * static.in_time_share
    assert result.in_time_share > 1.25 * spread.in_time_share
    assert result.num_loads > 40
    assert sum(each.num_late for each in result.models) == 0


def test_the_same_seed_loads_the_same():
    deployment = many_models(jitter=0.1, troubles=(Outage(device=1, since=0.5, until=1.0),))
    one, other = (simulate_deployment(deployment, CLOCKWORK, 2.0, seed=5) for _ in range(2))
    assert same(one, other)
    assert one.num_loads == other.num_loads > 40


def test_models_that_fit_are_served_as_if_memory_did_not_count():
    deployment = Deployment(models=(model("a", rate=900.0, copies=3), model("b", slo=0.2)), devices=2)
    fitting = simulate_deployment(loaded(deployment, fitting=4), CLOCKWORK, 2.0)
    assert same(simulate_deployment(deployment, CLOCKWORK, 2.0), fitting)
    assert fitting.num_loads is None
    assert "num_loads" not in fitting.row()


def at_moments(tmp_path, *moments, load, fitting, slo=0.05, devices=1):
    """Models a, b … that take 10 ms for a request each, and when their requests come."""
    models = []
    for place, times in enumerate(moments):
        path = tmp_path / f"{place}.txt"
        # What comes after the end of a simulation is not drawn.
        path.write_text("\n".join(map(repr, [*times, 50.0, 60.0])))
        served = model("abc"[place], slo=slo, alpha=0.01, beta=0.0, largest=1)
        models.append(replace(served, arrivals=Trace(file=str(path)), memory=Bytes(1.0), load=Seconds(load)))
    return Deployment(models=tuple(models), devices=devices, device_memory=Bytes(float(fitting)))


def test_a_first_request_waits_for_its_model_and_the_next_one_does_not(tmp_path):
    deployment = at_moments(tmp_path, [0.1, 0.2], [0.3], load=0.02, fitting=1)
    result = simulate_deployment(deployment, CLOCKWORK, 1.0)
    one, other = result.models
    assert one.latency_s(0.5) == pytest.approx(0.01, abs=1e-4)
    assert one.latency_s(1.0) == other.latency_s(1.0) == pytest.approx(0.03, abs=1e-4)
    assert result.num_loads == 2
    assert result.busy_s[0] == pytest.approx(0.03)


def test_a_device_computes_while_it_copies(tmp_path):
    """The second model comes while the first computes four requests; it is there when these are done."""
    deployment = at_moments(tmp_path, [0.1] * 4, [0.13], [], load=0.02, fitting=2, slo=0.08)
    result = simulate_deployment(deployment, CLOCKWORK, 1.0)
    assert [each.num_in_time for each in result.models] == [4, 1, 0]
    assert result.end_s == pytest.approx(0.1 + 0.02 + 5 * 0.01)


def test_the_least_recently_used_model_leaves(tmp_path):
    deployment = at_moments(tmp_path, [0.1, 0.3, 0.5], [0.2, 0.6], [0.4], load=0.02, fitting=2)
    result = simulate_deployment(deployment, CLOCKWORK, 1.0)
    # b leaves for c, and a is still there at 0.5; then b comes again.
    assert result.num_loads == 4
    assert result.models[0].latency_s(0.6) == pytest.approx(0.01, abs=1e-4)
    assert result.models[1].latency_s(0.4) == pytest.approx(0.03, abs=1e-4)


def test_requests_that_cannot_be_in_time_even_with_a_load_are_dropped_and_bring_it(tmp_path):
    deployment = at_moments(tmp_path, [0.1, 0.3], [], load=0.1, fitting=1)
    result = simulate_deployment(deployment, CLOCKWORK, 1.0)
    served = result.models[0]
    assert (served.num_in_time, served.dropped["late"], result.num_loads) == (1, 1, 1)


@pytest.mark.parametrize("load", [0.0, 1e-6, 0.001])
def test_a_load_serves_something_before_its_model_leaves(load):
    """Five models take turns on a device that holds three: time goes on, and each load brings a batch, or soon will."""
    models = (replace(model(slo=0.1, alpha=0.002, beta=0.008, rate=300.0, copies=5), memory=Bytes(1.0)),)
    deployment = loaded(Deployment(models=models, devices=1), fitting=3, load=load)
    result = simulate_deployment(deployment, CLOCKWORK, 5.0)
    assert result.num_requests > 6000
    assert result.models[0].dropped["unanswered"] == 0
    # Requests of a model that was loaded may all be dropped before its turn comes.
    assert result.num_loads <= result.batches.sum() + 5


def test_what_was_loaded_and_waits_for_its_turn_stays(tmp_path):
    """Both models of a busy device are wanted: b comes while a computes, and is not evicted for c before it has run."""
    deployment = at_moments(tmp_path, [0.1] * 3, [0.1], [0.1], load=0.0, fitting=2, slo=0.2)
    result = simulate_deployment(deployment, CLOCKWORK, 1.0)
    assert [each.num_in_time for each in result.models] == [3, 1, 1]
    assert result.num_loads == 3
    assert result.end_s == pytest.approx(0.15)


def test_a_device_that_returns_holds_nothing(tmp_path):
    deployment = at_moments(tmp_path, [0.1, 0.5], [], load=0.02, fitting=1)
    away = replace(deployment, troubles=(Outage(device=0, since=0.2, until=0.3),))
    assert simulate_deployment(deployment, CLOCKWORK, 1.0).num_loads == 1
    result = simulate_deployment(away, CLOCKWORK, 1.0)
    assert (result.models[0].num_in_time, result.num_loads) == (2, 2)


def test_devices_that_scale_load_what_they_need():
    deployment = replace(many_models(), scaling=Scaling(minimum=1, start=Seconds(0.5), calm=Seconds(2.0)))
    result = simulate_deployment(deployment, CLOCKWORK, 5.0)
    assert result.scaled.num_starts > 0
    assert result.in_time_share > 0.5


def test_demand_that_one_device_cannot_serve_brings_a_second_copy():
    deployment = loaded(
        Deployment(models=(model(rate=150.0, largest=1, copies=1), model("b", rate=5.0)), devices=2), fitting=1
    )
    result = simulate_deployment(deployment, CLOCKWORK, 5.0)
    calm = simulate_deployment(
        replace(deployment, models=(replace(deployment.models[0], arrivals=Poisson(rate=20.0)), deployment.models[1])),
        CLOCKWORK,
        5.0,
    )
    assert calm.num_loads == 2
    assert result.num_loads > 2
    assert result.busy_s.min() > 0.1


# --- what is refused ---


def test_how_long_a_load_takes_is_asked_for():
    deployment = many_models()
    unknown = replace(deployment, models=(replace(deployment.models[0], load=None), *deployment.models[1:]))
    with pytest.raises(ServingError, match=r"take 100 B, and a device has 10 B.*'m0' has no load.*load = \"10 ms\""):
        simulate_deployment(unknown, CLOCKWORK, 1.0)
    with pytest.raises(ServingError, match="or choose policy clockwork"):
        simulate_deployment(deployment, load_policy("eager"), 1.0)
    with pytest.raises(ServingError, match="load is -1"):
        replace(deployment.models[0], load=-1.0)


def test_devices_refuse_what_they_do_not_hold_or_have_no_room_for():
    weights = Weights(np.full(3, PARTS // 2), np.full(3, 10))
    there_at, memory = np.full((1, 3), NEVER), np.zeros((1, 2), np.int64)
    for queue in (0, 1):
        move_weights(weights, there_at, memory, LOAD, 0, queue, 5)
    # One is copied after the other.
    assert there_at[0].tolist() == [15, 25, NEVER]
    check_there(there_at, 0, 1, 25)
    with pytest.raises(RuntimeError, match="does not hold its model"):
        check_there(there_at, 0, 1, 24)
    with pytest.raises(RuntimeError, match="has too little free memory"):
        move_weights(weights, there_at, memory, LOAD, 0, 2, 30)
    move_weights(weights, there_at, memory, UNLOAD, 0, 0, 30)
    move_weights(weights, there_at, memory, LOAD, 0, 2, 30)
    with pytest.raises(RuntimeError, match="onto a device that has it"):
        move_weights(weights, there_at, memory, LOAD, 0, 2, 30)
    empty_memory(there_at, memory, 0)
    assert there_at.min() == NEVER
    assert memory.max() == 0
