"""The event loop and what stands around it, against an independent simulation, closed forms and hand counts."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.serving import POLICY_NAMES, compare_policies, find_goodput, load_policy, simulate_deployment
from meshwright.serving.arrivals import draw_arrivals
from meshwright.spec import Deployment, Outage, Poisson, ServingError, Straggler, Trace
from tests.marks import left_to_ci
from tests.serving.deployments import deployments, every_policy, model, one_model
from tests.serving.oracle import serve_eagerly

EAGER, SYMPHONY, ADAPTIVE = map(load_policy, ("eager", "symphony", "adaptive"))


def traced(tmp_path, moments, **facts):
    """One model whose requests come at these moments."""
    path = tmp_path / "moments.txt"
    path.write_text("\n".join(map(repr, moments)))
    devices = facts.pop("devices", 1)
    troubles = facts.pop("troubles", ())
    served = replace(model(**facts), arrivals=Trace(file=str(path)))
    return Deployment(models=(served,), devices=devices, troubles=troubles)


def same(one, other):
    counted = [
        (m.num_requests, m.num_in_time, m.num_late, m.num_batches, m.num_again, m.dropped, m.histogram.tolist())
        for result in (one, other)
        for m in result.models
    ]
    half = len(counted) // 2
    return (
        counted[:half] == counted[half:]
        and one.end_s == other.end_s
        and one.busy_s.tolist() == other.busy_s.tolist()
        and one.batches.tolist() == other.batches.tolist()
    )


@given(deployments(troubled=False), st.integers(0, 9))
def test_eager_batches_are_those_of_an_independent_simulation(deployment, seed):
    result = simulate_deployment(deployment, EAGER, 0.3, seed=seed)
    expected, sizes = serve_eagerly(deployment, *draw_arrivals(deployment.models, 0.3, seed=seed))
    first = 0
    for served, model_ in zip(result.models, deployment.models, strict=True):
        counts = [sum(each) for each in zip(*expected[first : first + model_.copies], strict=True)]
        first += model_.copies
        found = [served.num_requests, served.num_in_time, served.num_batches, served.dropped["late"]]
        assert found == counts
        assert served.num_late == served.num_again == 0
        assert sum(served.dropped.values()) == served.dropped["late"]
        assert served.histogram.sum() == served.num_in_time
    assert np.bincount(sizes, minlength=len(result.batches)).tolist() == result.batches.tolist()


def test_one_device_and_batches_of_one_are_a_queue_of_fixed_service():
    """M/D/1 at a load of 0.6: waiting is ρ s / (2 (1 − ρ)) in the mean (Pollaczek and Khinchine), busy is ρ."""
    # Just less than ten places of the histogram.
    service, load = 0.00999999, 0.6
    deployment = one_model(devices=1, slo=1.024, alpha=service, beta=0, largest=1, rate=load / service)
    result = simulate_deployment(deployment, EAGER, 3000.0)
    histogram = result.models[0].histogram
    mean = float((histogram * (np.arange(len(histogram)) + 0.5)).sum() / histogram.sum() / 1000)
    assert result.in_time_share == 1
    assert mean - service == pytest.approx(load * service / (2 * (1 - load)), rel=0.05)
    assert result.busy_share == pytest.approx(load, rel=0.01)
    # Who finds it idle waits for nobody.
    assert histogram[:10].sum() / histogram.sum() == pytest.approx(1 - load, rel=0.02)
    assert result.models[0].latency_s(0.3) == pytest.approx(service, abs=1e-3)


def test_a_straggler_takes_its_factor_and_is_late():
    deployment = one_model(devices=1, slo=0.02, alpha=0.001, beta=0.005, largest=1, rate=5)
    plain = simulate_deployment(deployment, EAGER, 50.0)
    slow = simulate_deployment(replace(deployment, troubles=(Straggler(device=0, factor=5.0),)), EAGER, 50.0)
    assert plain.models[0].num_late == 0
    assert slow.models[0].num_in_time == 0
    assert slow.models[0].num_late > 0
    assert slow.busy_s.sum() / slow.batches.sum() == pytest.approx(5 * plain.busy_s.sum() / plain.batches.sum())


def test_the_slowest_straggler_ends_after_all_else(tmp_path):
    deployment = traced(tmp_path, [0.1, 0.2], slo=80_000.0, alpha=70_000.0, beta=0.0)
    slow = tuple(Straggler(device=0, factor=1e6) for _ in range(2))
    result = simulate_deployment(replace(deployment, troubles=slow), EAGER, 1.0)
    assert result.models[0].num_late == 1
    assert result.end_s > 1e9


def test_jitter_has_the_mean_that_was_predicted():
    deployment = replace(one_model(devices=1, slo=5.0, alpha=0, beta=0.01, largest=1, rate=20), jitter=0.5)
    result = simulate_deployment(deployment, EAGER, 500.0)
    lengths = result.busy_s.sum() / result.batches.sum()
    spread = 0.01 * math.sqrt(math.exp(0.25) - 1)
    assert lengths == pytest.approx(0.01, abs=5 * spread / math.sqrt(result.batches.sum()))


# --- devices that fail ---


def test_what_a_failed_device_computed_comes_again(tmp_path):
    """Two requests of 10 ms; the device is away from the middle of the first to 0.2 s."""
    troubles = (Outage(device=0, since=0.105, until=0.2),)
    deployment = traced(tmp_path, [0.1, 0.102], slo=1.0, alpha=0.01, beta=0.0, largest=1, troubles=troubles)
    result = simulate_deployment(deployment, EAGER, 1.0)
    served = result.models[0]
    assert (served.num_in_time, served.num_again, served.num_batches) == (2, 1, 2)
    assert result.end_s == 0.22
    assert result.busy_s[0] == pytest.approx(0.025)
    assert served.latency_s(1.0) == pytest.approx(0.22 - 0.102, abs=1e-3)


@pytest.mark.parametrize(
    ("outages", "back"),
    [
        ([(0.05, 0.2), (0.1, 0.3)], 0.3),
        ([(0.05, 0.2), (0.2, 0.3)], 0.3),
        ([(0.05, 0.4), (0.1, 0.2)], 0.4),
        ([(0.05, None), (0.1, 0.2)], None),
        ([(0.0, 0.3)], 0.3),
    ],
)
def test_outages_that_overlap_or_touch_are_one(tmp_path, outages, back):
    troubles = tuple(Outage(device=0, since=since, until=until) for since, until in outages)
    deployment = traced(tmp_path, [0.15, 0.15], slo=1.0, alpha=0.01, beta=0.0, troubles=troubles)
    result = simulate_deployment(deployment, EAGER, 1.0)
    served = result.models[0]
    assert served.num_in_time == (0 if back is None else 2)
    if back is not None:
        assert result.end_s == pytest.approx(back + 0.02)


@pytest.mark.parametrize("name", ["adaptive", *left_to_ci("clockwork", "nexus", "aimd", "timeouts", "shepherd")])
def test_what_waits_for_a_device_to_return_is_not_forgotten(tmp_path, name):
    """All devices are away when the last request comes, and return in time for it."""
    troubles = (Outage(device=0, since=0.0, until=0.5),)
    deployment = traced(tmp_path, [0.1, 0.2], slo=1.0, alpha=0.01, beta=0.0, troubles=troubles)
    served = simulate_deployment(deployment, load_policy(name), 1.0).models[0]
    # Nexus refuses at once what no device of its plan can take.
    assert served.num_in_time + sum(served.dropped.values()) == 2
    assert served.num_in_time == (0 if name == "nexus" else 2)


@pytest.mark.long
def test_thousands_of_lost_requests_are_refused_in_one_event(tmp_path):
    """A batch of 5,000 fails shortly before its end, too late to begin again: each of them is dropped."""
    deployment = traced(
        tmp_path,
        [0.1] * 5000 + [0.3] * 5000,
        slo=1.0,
        alpha=0.0,
        beta=0.9,
        largest=6000,
        devices=2,
        troubles=(Outage(device=0, since=1.0),),
    )
    for name in POLICY_NAMES:
        result = simulate_deployment(deployment, load_policy(name), 2.0)
        served = result.models[0]
        assert served.num_in_time + served.num_late + sum(served.dropped.values()) == 10_000
        assert served.num_again == 0 or served.dropped["late"] >= served.num_again


@every_policy
def test_a_lost_batch_that_is_late_already_fits_into_the_table(tmp_path, name):
    """A slow device loses thousands of requests whose deadlines have passed, while others wait for another model."""
    moments = np.sort(np.random.default_rng(1).random(30_000) * 0.4)
    deployment = traced(tmp_path, moments.tolist(), slo=0.1, alpha=1e-6, beta=0.001, largest=8192)
    late = replace(deployment, troubles=(Straggler(device=0, factor=100.0), Outage(device=0, since=0.4, until=None)))
    served = simulate_deployment(late, load_policy(name), 0.5).models[0]
    # Those that learn how slow it is give it little.
    assert served.num_again > 2000 or name not in ("timeouts", "symphony", "sharded")
    assert served.num_in_time + served.num_late + sum(served.dropped.values()) == served.num_requests == 30_000


@pytest.mark.long
def test_a_plan_that_deals_out_thousands_that_are_late_fits_into_the_table(tmp_path):
    """Requests wait for a device that is away when Nexus plans anew: they go by turns to devices that are idle."""
    moments = [*np.linspace(0.001, 0.19, 60_000).tolist(), 3.0]
    outages = tuple(Outage(device=device, since=0.1, until=2.9) for device in range(8))
    deployment = traced(tmp_path, moments, slo=0.5, alpha=1e-6, beta=0.2, largest=8192, devices=16, troubles=outages)
    served = simulate_deployment(deployment, load_policy("nexus"), 4.0).models[0]
    assert served.num_in_time + served.num_late + sum(served.dropped.values()) == served.num_requests == 60_001


@pytest.mark.parametrize("name", ["symphony", *left_to_ci("nexus")])
@pytest.mark.parametrize("burst", [63, 64, 1000])
def test_a_burst_at_one_moment_is_no_rate(tmp_path, burst, name):
    """Before all else so many requests come at once; what comes after them, half of what a device does, is served."""
    after = (0.5 + np.cumsum(np.random.default_rng(4).exponential(1 / 200, 2000))).tolist()
    deployment = traced(tmp_path, [0.4] * burst + after, slo=0.1, alpha=0.002, beta=0.008, devices=2)
    served = simulate_deployment(deployment, load_policy(name), 20.0).models[0]
    assert served.num_requests == burst + 2000
    assert served.num_in_time > 1950


@pytest.mark.long
def test_devices_that_suffice_for_no_plan_serve_what_they_can():
    """Each of three models takes more than half its SLO for a request, and there is one device."""
    models = (model("a", slo=0.012, alpha=0.01, beta=0.0, rate=10.0, copies=3),)
    served = simulate_deployment(Deployment(models=models, devices=1), load_policy("nexus"), 10.0).models[0]
    assert served.num_in_time > served.num_requests // 2


@pytest.mark.parametrize(("settings_", "largest"), [("preferred=7", 19), ("preferred=7,most=7", 7), ("most=3", 3)])
@pytest.mark.long
def test_the_largest_batch_of_timeouts(settings_, largest):
    """More come than devices can serve: all that wait run together, up to the cap, or to what takes the whole SLO."""
    deployment = one_model(devices=2, slo=0.025, alpha=1.053e-3, beta=5.072e-3, rate=4000.0)
    result = simulate_deployment(deployment, load_policy(f"timeouts:{settings_}"), 1.0)
    # 1.053 b + 5.072 ms take 25 ms for 18.9 requests.
    assert int(np.flatnonzero(result.batches).max()) == min(largest, 18)
    if "most" in settings_:
        assert result.models[0].mean_batch > largest - 0.5


@pytest.mark.long
def test_an_outage_teaches_aimd_nothing(tmp_path):
    """It knows a limit of 3 when the outage takes a batch, which is then no batch that was too long."""
    moments = [0.0, *[0.1] * 3, *[0.2] * 4, *[0.9] * 5]
    deployment = traced(tmp_path, moments, slo=0.3, alpha=0.001, beta=0.01)
    troubles = (Outage(device=0, since=0.215, until=0.8),)
    aimd = load_policy("aimd")
    plain = simulate_deployment(deployment, aimd, 2.0)
    failed = simulate_deployment(replace(deployment, troubles=troubles), aimd, 2.0)
    # The first request of each burst runs alone; behind it as many as the limit allows: 1, 1+2, 1+3, 1+4 and
    # 1, 1+2, 1+(3 that are lost), 1+3+1.
    assert plain.batches[:5].tolist() == [0, 4, 1, 1, 1]
    assert failed.batches[:5].tolist() == [0, 5, 1, 1, 0]


# --- same and other ---


@pytest.mark.parametrize("name", ["symphony", "clockwork", "nexus", "shepherd", "adaptive", "timeouts", "aimd"])
@pytest.mark.matrix
def test_the_same_seed_is_the_same_result(name):
    deployment = replace(one_model(rate=700, shape=0.3), jitter=0.2, troubles=(Outage(device=1, since=0.5, until=0.8),))
    policy = load_policy(name)
    one, other, again = (simulate_deployment(deployment, policy, 2.0, seed=seed) for seed in (3, 4, 3))
    assert same(one, again)
    assert not same(one, other)


def test_a_warm_up_does_not_count():
    deployment = one_model(rate=400)
    whole = simulate_deployment(deployment, SYMPHONY, 4.0)
    rest = simulate_deployment(deployment, SYMPHONY, 3.0, warm_up_s=1.0)
    moments, _ = draw_arrivals(deployment.models, 4.0)
    assert whole.num_requests == len(moments)
    assert rest.num_requests == (moments >= 10**9).sum()
    # Batches of the warm-up are none of those that the mean is about.
    served = rest.models[0]
    sizes = np.arange(len(rest.batches))
    assert served.num_batches == rest.batches.sum()
    assert served.mean_batch == pytest.approx((rest.batches * sizes).sum() / rest.batches.sum(), rel=0.01)
    assert served.mean_batch > 1.05 * served.num_in_time / whole.models[0].num_batches


@pytest.mark.long
def test_answers_of_a_model_are_its_own_when_a_plan_changes_under_a_batch():
    """Nexus plans anew while batches run; answers then still belong to the models of their requests."""
    models = (model("a", slo=0.05, rate=900, shape=0.3), model("b", slo=0.02, alpha=0.002, beta=0.001, rate=300))
    result = simulate_deployment(Deployment(models=models, devices=2), load_policy("nexus:epoch=1"), 6.0)
    for served in result.models:
        assert served.num_late == 0
        assert served.num_in_time + sum(served.dropped.values()) == served.num_requests


# --- sums and searches ---


def test_rows_are_sums():
    deployment = Deployment(models=(model("a", copies=2), model("b", rate=100)), devices=2)
    result = simulate_deployment(deployment, SYMPHONY, 5.0)
    row, rows = result.row(), [each.row(5.0) for each in result.models]
    assert row["goodput_per_s"] == pytest.approx(sum(each["goodput_per_s"] for each in rows))
    assert row["requests_per_s"] == pytest.approx(result.num_requests / 5)
    assert row["worst_p99_s"] == max(each["p99_s"] for each in rows)
    assert [each.model for each in result.models] == ["a", "b"]
    assert row["mean_batch"] == pytest.approx(
        (result.batches * np.arange(len(result.batches))).sum() / result.batches.sum()
    )


def test_rows_tell_answers_that_are_late_from_requests_that_are_dropped_late(tmp_path):
    result = simulate_deployment(traced(tmp_path, [0.0, 0.001, 0.002, 0.5], slo=0.01), EAGER, 1.0)
    (served,) = result.models
    row = served.row(1.0)
    assert (row["num_answered_late"], row["num_dropped_late"]) == (served.num_late, served.dropped["late"])
    assert served.dropped["late"] > 0
    assert not {"num_late", "num_full"} & row.keys()


def test_latencies_that_are_longer_than_is_told_say_so(tmp_path):
    """Of two requests, one finds a device that takes 300 ms for its 6, and the other one that takes 6."""
    slow = (Straggler(device=0, factor=50.0),)
    result = simulate_deployment(traced(tmp_path, [0.5, 0.5], largest=1, devices=2, troubles=slow), EAGER, 1.0)
    (served,), row = result.models, result.models[0].row(1.0)
    assert served.num_requests == 2
    assert row["p50_s"] == pytest.approx(0.006, rel=1e-2)
    assert (row["p99_s"], result.row()["worst_p99_s"], served.latency_s(0.99)) == (None, None, math.inf)
    assert row["p99_over_s"] == result.row()["worst_p99_over_s"] == pytest.approx(0.2, rel=1e-3)
    assert "p50_over_s" not in row


@pytest.mark.parametrize("at", [1.0, 0.0])
def test_queues_have_room_for_a_crowd_that_comes_at_once(tmp_path, at):
    """5000 requests within one SLO, though the mean rate is low, are all answered in time."""
    crowd = traced(tmp_path, [at] * 5000 + [9000.0], slo=60.0)
    (served,) = simulate_deployment(crowd, EAGER, 10.0).models
    assert served.dropped["full"] == 0
    assert served.num_in_time == served.num_requests == 5000


def test_nothing_arrives():
    deployment = one_model(rate=0)
    result = simulate_deployment(deployment, SYMPHONY, 5.0)
    assert (result.num_requests, result.in_time_share, result.busy_share, result.end_s) == (0, 1.0, 0.0, 0.0)
    assert result.row()["worst_p99_s"] is None
    assert result.models[0].mean_batch == 0
    with pytest.raises(ServingError, match="No requests arrive"):
        find_goodput(deployment, SYMPHONY, 1.0)


def test_goodput_is_where_a_little_more_is_too_much():
    deployment = one_model(rate=300)
    scale, result = find_goodput(deployment, SYMPHONY, 5.0)
    assert result.in_time_share >= 0.99
    more = simulate_deployment(deployment, SYMPHONY, 5.0, scale=scale * 1.02, warm_up_s=1.0)
    assert more.in_time_share < 0.99
    # A rate that is thousands of times too high only makes the scale so many times smaller.
    small, _ = find_goodput(replace(deployment, models=(model(rate=3e6),)), SYMPHONY, 5.0)
    assert small == pytest.approx(scale / 10_000, rel=0.02)


def test_goodput_that_nothing_reaches_is_none():
    late = replace(one_model(devices=1, rate=10), troubles=(Outage(device=0, since=0.0),))
    scale, result = find_goodput(late, SYMPHONY, 2.0)
    assert scale == 0
    assert (result.num_requests, result.goodput_per_s, result.row()["worst_p99_s"]) == (0, 0, None)


def test_regret_is_what_lacks_of_the_best_other():
    deployment = one_model(rate=1500, devices=2)
    results, rows = compare_policies(deployment, {"symphony": SYMPHONY, "eager": EAGER, "adaptive": ADAPTIVE}, 3.0)
    best = {name: max(o.goodput_per_s for key, o in results.items() if key != name) for name in results}
    for row in rows:
        mine = results[row["policy"]].goodput_per_s
        assert row["regret_share"] == pytest.approx(max(0, 1 - mine / best[row["policy"]]))
        assert row["ahead_share"] == pytest.approx(max(0, mine / best[row["policy"]] - 1))
    assert sum(row["regret_share"] == 0 for row in rows) >= 1
    _, alone = compare_policies(deployment, {"eager": EAGER}, 1.0)
    assert (alone[0]["regret_share"], alone[0]["ahead_share"]) == (0, 0)


@pytest.mark.parametrize(("seconds", "scale"), [(0, 1), (-1, 1), (math.nan, 1), (math.inf, 1), (1, -1), (1, math.nan)])
def test_no_time_and_no_scale(seconds, scale):
    with pytest.raises(ServingError, match="expected more than 0 s"):
        simulate_deployment(one_model(), EAGER, seconds, scale=scale)


@pytest.mark.parametrize("slo", [1e-6, 1e-5, 80_000.0])
@pytest.mark.parametrize(
    "name",
    ["symphony", "eager", "adaptive:trial=1000000000", *left_to_ci("timeouts", "aimd", "timeouts:wait=1000000000")],
)
def test_the_shortest_and_the_longest_deadlines(name, slo):
    deployment = one_model(devices=1, slo=slo, alpha=0.0, beta=slo / 2, rate=200)
    served = simulate_deployment(deployment, load_policy(name), 1.0).models[0]
    assert served.num_in_time + served.num_late + sum(served.dropped.values()) == served.num_requests > 0


@pytest.mark.parametrize("name", ["symphony", "eager", "adaptive", *left_to_ci("clockwork", "nexus", "shepherd")])
def test_more_delay_and_slack_than_time_refuses_all(name):
    deployment = replace(one_model(slo=0.02), delay=0.01, slack=0.01)
    served = simulate_deployment(deployment, load_policy(name), 1.0).models[0]
    assert served.num_requests == served.dropped["late"] > 0


def test_a_year_between_two_requests(tmp_path):
    """The measured rate is less than a millionth of a request per second then."""
    deployment = traced(tmp_path, [1.0, 2.0, 3e7, 3.1e7, 6e7], slo=0.1)
    result = simulate_deployment(deployment, SYMPHONY, 7e7)
    assert result.models[0].num_in_time == 5


@pytest.mark.parametrize(
    ("since", "until", "words"),
    [
        (-1.0, None, "An outage: since"),
        (0.0, 1e20, "An outage: until"),
        (1.0, 1.0, "expected an end after the start"),
    ],
)
def test_outages_come_at_moments_of_the_simulation(since, until, words):
    with pytest.raises(ServingError, match=words):
        Outage(device=0, since=since, until=until)


def test_a_rate_may_be_zero():
    assert Poisson(rate=0.0).rate == 0
