"""The policy that follows: its shadows are what they shadow, it rests while nothing is lost, and it finds the best."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.serving import bound_scale, load_policy, simulate_deployment
from meshwright.serving.policies import adaptive
from meshwright.serving.policies.adaptive import (
    BEGUN,
    CANDIDATES,
    DROPPED,
    END_AT,
    IN_TRIAL,
    PROMISED,
    SCORES,
    UNTIL,
    USED,
    advance,
    shadow_of,
)
from meshwright.serving.policies.deferred import Deferred, admit_request
from meshwright.serving.policies.pool import MEAN, NEVER, NUM_DROPPED, NUM_QUEUED, OWN, PARTS, SLOWNESS, TARGET, USUAL
from meshwright.serving.policies.queues import clear, come_up, lay_heap, least_of, rest
from meshwright.serving.simulation import simulate_serving as simulate
from meshwright.spec import Deployment, Trace
from meshwright.spec.units import Seconds
from tests.marks import examples
from tests.serving.deployments import deployments, model, one_model

SECONDS, MS = 0.8, 1_000_000
_SERVED = SCORES + len(CANDIDATES)


def watched(deployment, seconds, monkeypatch, prepare=None, name="adaptive", **options):
    """The result of a simulation, and the pool at its end; ``prepare`` is called with the pool before."""
    pools = []
    make = simulate.make_pool

    def make_pool(*arguments):
        pools.append(make(*arguments))
        if prepare is not None:
            prepare(pools[-1])
        return pools[-1]

    with monkeypatch.context() as patch:
        patch.setattr(simulate, "make_pool", make_pool)
        result = simulate_deployment(deployment, load_policy(name), seconds, **options)
    return result, pools[-1]


@pytest.fixture(scope="module")
def patched():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.long
@given(deployment=deployments(troubled=False), seed=st.integers(0, 5))
@settings(max_examples=examples(25))
def test_a_shadow_serves_what_its_candidate_serves_alone(patched, deployment, seed):
    """A trial that begins with empty queues and idle devices, and lasts for all that comes."""

    def begin_trial(pool):
        start = pool[: pool[OWN]].copy()
        for device in range(deployment.devices):
            come_up(start, device, 0)
            rest(start, device)
        for candidate in range(len(CANDIDATES)):
            shadow = shadow_of(pool, candidate)
            shadow[: len(start)] = start
            lay_heap(shadow, shadow[OWN], deployment.devices)
        pool[pool[OWN] + IN_TRIAL] = 1
        pool[pool[OWN] + UNTIL] = NEVER

    _, pool = watched(deployment, SECONDS, patched, begin_trial, seed=seed)
    for candidate, (spare, window, admit) in enumerate(CANDIDATES.tolist()):
        served = pool[pool[OWN] + _SERVED + candidate] + advance(shadow_of(pool, candidate), NEVER - 1, spare, window)
        alone = simulate_deployment(deployment, Deferred(spare, window, admit), SECONDS, seed=seed)
        assert served == sum(each.num_in_time for each in alone.models)
        assert served == alone.batches @ np.arange(len(alone.batches))


@pytest.mark.parametrize(
    ("slow", "usual", "after"), [(1100, 1000, 1050), (1000, 1000, 1000), (900, 1000, 1000), (2000, 2000, 2000)]
)
@pytest.mark.parametrize("mean", [1000, 2000])
def test_virtual_devices_become_what_they_usually_are_and_take_what_real_ones_take(slow, usual, after, mean):
    """25 batches, one after the other, as each request comes when the one before it is done."""
    pool = empty_pool()
    come_up(pool, 0, 0)
    rest(pool, 0)
    pool[pool[SLOWNESS]], pool[pool[USUAL]], pool[pool[MEAN]] = slow, PARTS * usual, PARTS * mean
    shadow = shadow_of(pool, 0)
    adaptive._copy(pool, shadow, 0)
    served = 0
    for request in range(25):
        now = request * 40 * MS
        served += advance(shadow, now, 0, 0)
        admit_request(shadow, now, 0, request, now + 50 * MS, 0, 0, 98)
        served += adaptive._count(shadow)
        assert least_of(shadow, shadow[OWN], NEVER) == pytest.approx(now + 10 * MS * mean // 1000, abs=2)
    advance(shadow, NEVER - 1, 0, 0)
    assert served == 25
    assert shadow[shadow[SLOWNESS]] == after


def test_while_nothing_is_lost_there_is_no_trial(monkeypatch):
    result, pool = watched(one_model(rate=300), 30.0, monkeypatch)
    own = pool[OWN]
    assert result.in_time_share == 1
    assert pool[own + UNTIL] > 25e9  # it has watched all the time
    assert (pool[own + IN_TRIAL], pool[own + USED]) == (0, 0)
    assert not pool[own + SCORES : own + _SERVED + len(CANDIDATES)].any()
    first = simulate_deployment(one_model(rate=300), Deferred(*CANDIDATES[0].tolist()), 30.0)
    assert result.batches.tolist() == first.batches.tolist()


def test_where_requests_are_lost_there_are_trials(monkeypatch):
    _, pool = watched(one_model(rate=4000), 10.0, monkeypatch)
    scores = pool[pool[OWN] + SCORES : pool[OWN] + _SERVED]
    assert (scores > 0).all()
    assert len(set(scores.tolist())) > 1


STRONG = Deployment(models=(model(slo=0.12, alpha=0.0005, beta=0.05, largest=256, rate=1250),), devices=2)
EAGER, EARLY = (CANDIDATES.tolist().index(settings) for settings in ([0, 0, 0], [50, 100, 98]))


def test_a_trial_ends_early_where_its_outcome_is_clear(monkeypatch):
    """A whole one takes 40 SLOs, and begins after 10; eager batching, with which it begins, serves nearly nothing."""

    def use_eager(pool):
        pool[pool[OWN] + USED] = EAGER

    _, pool = watched(STRONG, 25 * 0.12, monkeypatch, use_eager)
    own = pool[OWN]
    assert CANDIDATES[pool[own + USED]].tolist() != [0, 0, 0]
    assert not pool[own + IN_TRIAL]


@pytest.mark.parametrize(("promised", "is_looked_for"), [(0, True), (1000, False)])
def test_a_rest_ends_where_more_is_lost_than_the_trial_before_it_had_lost(monkeypatch, promised, is_looked_for):
    def rest_long(pool):
        own = pool[OWN]
        pool[own + USED], pool[own + PROMISED], pool[own + END_AT] = EAGER, promised, NEVER

    _, pool = watched(STRONG, 15 * 0.12, monkeypatch, rest_long)
    assert pool[pool[OWN] + IN_TRIAL] == is_looked_for


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("seed", range(3))
def test_half_of_what_devices_can_do_at_most_is_no_trouble(devices, seed):
    """Of strong batches, small ones are a waste that two devices can afford only while both are idle."""
    strong = replace(STRONG, devices=devices)
    most = 1250 * bound_scale(strong.models, [1250.0], devices)
    result = simulate_deployment(strong, load_policy("adaptive"), 10.0, seed=seed, scale=most / 2 / 1250)
    assert result.in_time_share > 0.999


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_what_comes_alone_is_answered_at_once(devices):
    quiet = replace(STRONG, devices=devices)
    result = simulate_deployment(quiet, load_policy("adaptive"), 20.0, scale=2 / 1250)
    (found,) = result.models
    assert found.latency_s(0.5) == pytest.approx(0.0505, rel=0.02)


@pytest.mark.parametrize("silence_s", [0, 600])
def test_silence_in_a_trial_makes_the_rest_after_it_no_longer(monkeypatch, silence_s):
    """With 200 ms, a trial takes 8 s at most, and the rest twice that."""
    pool = load_policy("adaptive").prepare(
        {"latency": np.array([[0, *range(20 * MS, 84 * MS, 2 * MS)]]), "slo": np.array([200 * MS]), "num_devices": 1}
    )
    own, policy = pool[OWN], load_policy("adaptive")
    come_up(pool, 0, 0)
    rest(pool, 0)
    moment = 0
    for begun in range(2):
        while pool[own + IN_TRIAL] == begun:
            moment += MS
            policy.arrive(pool, moment, 0, moment // MS, moment + 200 * MS)
            clear(pool)
    moment = pool[own + BEGUN] + MS
    assert pool[own + IN_TRIAL] == 0
    # Begin another one, in which nothing comes for a while.
    pool[own + UNTIL] = 0
    pool[own + DROPPED] = -10
    policy.arrive(pool, moment, 0, 1, moment + 200 * MS)
    assert pool[own + IN_TRIAL] == 1
    moment = pool[own + END_AT] + silence_s * 1000 * MS
    policy.arrive(pool, moment, 0, 2, moment + 200 * MS)
    assert pool[own + IN_TRIAL] == 0
    assert pool[own + END_AT] - moment == 2 * 40 * 200 * MS


def empty_pool():
    return load_policy("adaptive").prepare(
        {"latency": np.array([[0, 10 * MS]]), "slo": np.array([50 * MS]), "num_devices": 1}
    )


def after_a_trial(used, came, served):
    """A pool at the end of a trial in which nothing waits: what each candidate has served of what came."""
    pool = empty_pool()
    own = pool[OWN]
    pool[own + USED], pool[own + adaptive.ARRIVED] = used, came
    for candidate in range(len(CANDIDATES)):
        pool[own + _SERVED + candidate] = served[candidate]
        shadow_of(pool, candidate)[NUM_DROPPED] = came - served[candidate]
    return pool


IS_EARLY = CANDIDATES[:, 2] > 0


@pytest.mark.parametrize(
    ("used", "early", "is_early"), [(0, 985, True), (0, 970, False), (EARLY, 970, True), (EARLY, 940, False)]
)
def test_what_refuses_early_is_not_left_as_easily_as_it_is_taken(used, early, is_early):
    """Two thirds are lost; the best other candidate serves a thousand."""
    pool = after_a_trial(used, 3000, np.where(IS_EARLY, early, 1000))
    adaptive._choose(pool)
    assert IS_EARLY[pool[pool[OWN] + USED]] == is_early


@pytest.mark.parametrize(
    ("used", "early", "chosen"),
    [
        *((0, [985, 990, 981], 9), (0, [970, 981, 970], 9)),
        *((10, [955, 985, 990], 10), (10, [992, 970, 990], 10), (10, [994, 955, 990], 8), (10, [960, 955, 940], 8)),
    ],
)
def test_of_those_that_refuse_early_the_best_is_used(used, early, chosen):
    """Unless the one that is in use serves nearly as much."""
    served = np.full(len(CANDIDATES), 900)
    served[1], served[8:] = 1000, early
    pool = after_a_trial(used, 3000, served)
    adaptive._choose(pool)
    assert pool[pool[OWN] + USED] == chosen


@pytest.mark.parametrize(("came", "early", "is_over"), [(3000, 985, True), (3000, 970, False), (1050, 1000, False)])
def test_a_trial_is_over_once_refusing_early_costs_little(came, early, is_over):
    """A thousand are served; fifty that are lost may be by chance."""
    assert adaptive._is_clear(after_a_trial(0, came, np.where(IS_EARLY, early, 1000))) == is_over


@pytest.mark.parametrize("waiting", [0, 500])
def test_what_waits_is_not_lost(waiting):
    """Of 1,500 requests half wait, or are lost: refusing early may lose one more only for ten of the latter."""
    pool = after_a_trial(0, 1500, np.where(IS_EARLY, 990, 1000))
    for candidate in range(len(CANDIDATES)):
        shadow = shadow_of(pool, candidate)
        shadow[NUM_DROPPED] -= waiting
        shadow[NUM_QUEUED] = waiting
    adaptive._choose(pool)
    assert IS_EARLY[pool[pool[OWN] + USED]] == (waiting == 0)


@pytest.mark.parametrize(
    ("promised", "lost", "is_worth"), [(0, 40, False), (0, 41, True), (680, 3600, False), (680, 3601, True)]
)
def test_a_rest_is_not_ended_by_chance(promised, lost, is_worth):
    """Of 5,000 requests, 25 may be lost beyond what is promised, 3,400 in the second case; give or take three roots."""
    pool = empty_pool()
    own = pool[OWN]
    pool[own + PROMISED], pool[own + adaptive.ARRIVED], pool[own + END_AT] = promised, 5000, 1
    pool[NUM_DROPPED] = lost
    assert adaptive._is_worth_a_trial(pool, 0) == is_worth


OVERLOADS = {
    "strong batches": Deployment(models=(model(slo=0.05, alpha=0.0005, beta=0.01, largest=64, rate=7000),), devices=4),
    "weak batches": Deployment(
        models=tuple(model(name, slo=0.1, alpha=0.01, beta=0.002, rate=60) for name in "abcd"), devices=2
    ),
    "bursts": Deployment(models=(model(slo=0.08, rate=2500, shape=0.05),), devices=2),
    "many models": Deployment(models=(model(slo=0.1, alpha=0.002, beta=0.02, rate=30, copies=20),), devices=3),
}


@pytest.mark.parametrize("name", OVERLOADS)
@pytest.mark.matrix
def test_in_overload_it_ends_on_what_is_nearly_best(monkeypatch, name):
    """Beside candidates alone, for the same requests; one that refuses early may serve a little less."""
    deployment = OVERLOADS[name]
    _, pool = watched(deployment, 60.0, monkeypatch)
    alone = [
        simulate_deployment(deployment, Deferred(*candidate), 60.0).in_time_share for candidate in CANDIDATES.tolist()
    ]
    assert max(alone) < 0.99
    assert alone[pool[pool[OWN] + USED]] >= (1 - adaptive._EARLY / 1000) * max(alone)
    # Else any choice would do.
    assert min(alone) < 0.98 * max(alone)


def test_in_overload_nearly_all_refusals_come_at_once_and_cost_little():
    """Though no batch takes what it should, and devices have fallen out of step."""
    deployment = replace(STRONG, jitter=0.005, delay=Seconds(0.0003), slack=Seconds(0.002), guard=Seconds(0.0005))
    result, dropping = (
        simulate_deployment(deployment, policy, 60.0, scale=4500 / 1250, warm_up_s=15.0)
        for policy in (load_policy("adaptive"), Deferred(50, 100))
    )
    dropped = result.models[0].dropped
    assert dropped["crowded"] > 0.995 * sum(dropped.values())
    assert result.in_time_share > 0.99 * dropping.in_time_share


@pytest.mark.parametrize(("deadline_ms", "is_let_in"), [(120, True), (70, True), (60, True), (49, False)])
def test_early_refusal_asks_for_no_larger_batch_than_a_short_deadline_allows(deadline_ms, is_let_in):
    """Of the target's size, a batch takes 80 ms; alone, a request takes 50.5, and a device is idle."""
    table = np.array([[0, *(50 * MS + MS // 2 * batch for batch in range(1, 257))]])
    policy = Deferred(50, 100, 98)
    pool = policy.prepare({"latency": table, "slo": np.array([120 * MS]), "num_devices": 1})
    come_up(pool, 0, 0)
    rest(pool, 0)
    pool[pool[TARGET]] = 60
    policy.arrive(pool, MS, 0, 1, MS + deadline_ms * MS)
    assert (pool[NUM_DROPPED] == 0) == is_let_in


def test_where_almost_all_can_be_answered_it_does_not_refuse_many(monkeypatch):
    """At the edge of what one device does with batches that gain little, refusing early would lose twice as many."""
    deployment = Deployment(models=(model(slo=0.5, alpha=0.0435, beta=0.0045, rate=19.5),), devices=1)
    result, pool = watched(deployment, 600.0, monkeypatch)
    eager, early = (simulate_deployment(deployment, Deferred(0, 0, admit), 600.0).in_time_share for admit in (0, 98))
    assert 1 - early > 2 * (1 - eager) > 0
    assert CANDIDATES[pool[pool[OWN] + USED], 2] == 0
    assert 1 - result.in_time_share < 1.5 * (1 - eager)


def test_it_changes_when_what_arrives_changes(tmp_path, monkeypatch):
    """First a load that all candidates meet, then one that some do not: what was used at the begin is given up."""
    calm, much = np.arange(0, 20, 1.0), np.arange(20, 40, 1 / 60)
    (tmp_path / "moments.txt").write_text("\n".join(map(str, [*calm, *much])))
    trace = Trace(file=str(tmp_path / "moments.txt"))
    deployment = OVERLOADS["weak batches"]
    deployment = replace(deployment, models=tuple(replace(each, arrivals=trace) for each in deployment.models))
    _, pool = watched(deployment, 20.0, monkeypatch)
    own = pool[OWN]
    assert pool[own + USED] == 0
    assert not pool[own + SCORES : own + _SERVED].any()
    _, pool = watched(deployment, 40.0, monkeypatch)
    assert pool[own + USED] != 0
    assert pool[own + SCORES : own + _SERVED].all()


def test_the_candidates_differ():
    assert len({tuple(candidate) for candidate in CANDIDATES.tolist()}) == len(CANDIDATES) == adaptive.NUM_CANDIDATES
