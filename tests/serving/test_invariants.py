"""What holds for every policy, whatever comes: checked at each decision of the event loop in plain Python."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.serving import load_policy, simulate_deployment
from meshwright.serving.arrivals import draw_arrivals
from meshwright.serving.policies.pool import DECISION_FIELDS, DROP, NUM_DECISIONS, PREEMPT, RUN, columns
from meshwright.serving.policies.sharding import policy as sharded
from meshwright.serving.policies.sharding.policy import Sharded
from meshwright.serving.simulation import simulate_serving as simulate
from meshwright.serving.simulation.serving_engine import simulate_plainly
from meshwright.spec import Deployment, Outage
from tests.marks import examples
from tests.serving.deployments import deployments, every_policy, model

SECONDS = 0.6
NEVER_LATE = {"adaptive", "symphony", "eager", "deferred", "nexus", "clockwork", "shepherd", "sharded"}
# What the loop calls, by the name that it has there; each changes a pool, and nothing else does.
CHANGES = ("arrive", "free", "wake", "come_up", "go_down", "begin_waiting", "clear")


class Recorder:
    """Runs the loop in plain Python, and remembers what happens to the pool and what is decided."""

    def __init__(self, deployment, name, monkeypatch):
        self.calls, self.decided, self.running, self.pools = [], [], {}, []
        self.deployment, self.policy = deployment, load_policy(name)
        self.scope = simulate_plainly.__globals__
        with monkeypatch.context() as patch:
            for change in CHANGES:
                patch.setitem(self.scope, change, self._recording(change, self.scope[change]))
            patch.setitem(self.scope, "put", self._begin(self.scope["put"]))
            patch.setitem(self.scope, "take_out", self._end(self.scope["take_out"]))
            patch.setattr(simulate, "simulate_events", self._run)
            self.result = simulate_deployment(deployment, self.policy, SECONDS)

    def _run(self, policy, pool, *rest):
        self.fresh, self.pool = pool.copy(), pool
        return simulate_plainly(policy, pool, *rest)

    def _recording(self, name, function):
        def record(*arguments):
            if name == "clear":
                self.decided.append(rows_of(self.pool))
            self.calls.append((name, [None if each is self.pool else each for each in arguments]))
            function(*arguments)

        return record

    def _begin(self, function):
        def begin(ends, heap, device, moment):
            assert device not in self.running, "a device runs two batches at once"
            is_draining = self.deployment.scaling is not None
            assert columns(self.pool)["device"][device] != 0 or is_draining, "a device that is down runs a batch"
            self.running[device] = moment
            function(ends, heap, device, moment)

        return begin

    def _end(self, function):
        def end(ends, heap, device):
            del self.running[device]
            function(ends, heap, device)

        return end


def rows_of(pool):
    by_name = columns(pool)
    rows = by_name["decision"].reshape(-1, len(DECISION_FIELDS))[: pool[NUM_DECISIONS]]
    return [(*row.tolist(), by_name["chosen"][row[3] :][: row[4]].tolist()) for row in rows]


def check(recorder, name):
    """Each request is let in, run and dropped as often as it may be, and counted once."""
    deployment, result = recorder.deployment, recorder.result
    moments, _ = draw_arrivals(deployment.models, SECONDS)
    came = Counter(arguments[4] for call, arguments in recorder.calls if call == "arrive")
    ended = Counter()
    for rows in recorder.decided:
        for kind, _, _, _, count, _, requests in rows:
            assert kind in (RUN, DROP, PREEMPT)
            assert len(set(requests)) == count == len(requests)
            if kind != PREEMPT:
                assert count > 0
                ended.update(requests)
    assert set(came) == set(range(len(moments)))
    assert all(ended[request] <= times for request, times in came.items())
    again = sum(served.num_again for served in result.models)
    assert sum(came.values()) == len(moments) + again
    waiting = sum(
        tail - head for head, tail in zip(columns(recorder.pool)["head"], columns(recorder.pool)["tail"], strict=True)
    )
    assert not recorder.running
    done = 0
    for served in result.models:
        done += served.num_in_time + served.num_late + sum(served.dropped.values())
        assert served.histogram.sum() == served.num_in_time + served.num_late
    assert done == len(moments)
    assert sum(served.dropped["unanswered"] for served in result.models) == waiting
    is_away = any(isinstance(trouble, Outage) and trouble.until is None for trouble in deployment.troubles)
    if not is_away:
        assert waiting == 0, name
    if name in NEVER_LATE and deployment.jitter == 0 and not deployment.troubles:
        assert all(served.num_late == 0 for served in result.models)
    assert (result.busy_s <= result.end_s + 1e-9).all()


@pytest.fixture(scope="module")
def patched():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@every_policy
@given(deployment=st.one_of(deployments(), deployments(troubled=False)))
@settings(max_examples=examples(150))
def test_every_request_ends_once(name, patched, deployment):
    check(Recorder(deployment, name, patched), name)


@every_policy
@given(deployment=deployments(), warm_up=st.sampled_from([0.0, 0.2]), fails=st.floats(0.0, 0.6))
@settings(max_examples=10)
def test_what_still_waits_at_the_end_is_counted(name, patched, deployment, warm_up, fails):
    """All devices fail for good: what is in queues then is what no other count has, of each model."""
    troubles = tuple(Outage(device=device, since=fails, until=None) for device in range(deployment.devices))
    deployment = replace(deployment, troubles=troubles)
    last = {}

    def run(policy, pool, *rest):
        moment = simulate_plainly(policy, pool, *rest)
        last["left"] = left_in(pool, rest[1], warm_up, policy)
        return moment

    with patched.context() as patch:
        patch.setattr(simulate, "simulate_events", run)
        result = simulate_deployment(deployment, load_policy(name), SECONDS, warm_up_s=warm_up)
    place = 0
    for served, model_ in zip(result.models, deployment.models, strict=True):
        left = sum(last["left"][place : place + model_.copies])
        place += model_.copies
        assert served.dropped["unanswered"] == left
        assert served.num_requests == served.num_in_time + served.num_late + sum(served.dropped.values())


def left_in(pool, arrival, warm_up, policy):
    """Requests that are in queues, by model, of those that count."""
    parts = [pool]
    if isinstance(policy, Sharded):
        at = sharded._parts(pool)
        parts = [sharded._shard(pool, number) for number in range(pool[at])]
    left = Counter()
    for number, part in enumerate(parts):
        column = columns(part)
        for queue, model_ in enumerate(column["model"]):
            start, mask = column["start"][queue], column["mask"][queue]
            places = start + (np.arange(column["head"][queue], column["tail"][queue]) & mask)
            counted = (arrival[column["request"][places]] >= warm_up * 1e9).sum()
            left[int(model_) * len(parts) + number] += int(counted)
    return [left[place] for place in range(max(left) + 1)]


@every_policy
def test_devices_that_fail_again_and_again(name, patched):
    """Small and large batches at work when devices fail, so that what a policy remembers of them is old."""
    models = (model("a", slo=0.08, rate=1500, shape=0.2), model("b", slo=0.03, alpha=0.001, beta=0.002, rate=400))
    outages = tuple(
        Outage(device=number % 3, since=0.05 + 0.03 * number, until=0.11 + 0.03 * number) for number in range(12)
    )
    check(Recorder(Deployment(models=models, devices=3, troubles=outages), name, patched), name)


@every_policy
@given(deployment=deployments())
@settings(max_examples=8)
def test_the_compiled_loop_does_what_the_plain_one_does(name, patched, deployment):
    plain = Recorder(deployment, name, patched).result
    fast = simulate_deployment(deployment, load_policy(name), SECONDS)
    for one, other in zip(plain.models, fast.models, strict=True):
        assert one.row(SECONDS) == other.row(SECONDS)
        assert (one.num_again, one.num_batches, one.dropped) == (other.num_again, other.num_batches, other.dropped)
        assert np.array_equal(one.histogram, other.histogram)
    assert (plain.end_s, plain.busy_s.tolist()) == (fast.end_s, fast.busy_s.tolist())


@every_policy
@given(deployment=deployments())
@example(deployment=replace(Deployment(models=(model(rate=1500, shape=0.1),), devices=2), jitter=0.2))
@settings(max_examples=8)
def test_replaying_the_events_gives_the_same_decisions_and_the_same_pool(name, patched, deployment):
    recorder = Recorder(deployment, name, patched)
    pool, policy, decided = recorder.fresh, load_policy(name), []
    for call, arguments in recorder.calls:
        if call == "clear":
            decided.append(rows_of(pool))
        known = {id(None): pool, id(recorder.policy): policy}
        recorder.scope[call](*(known.get(id(each), each) for each in arguments))
    assert decided == recorder.decided
    assert pool.tobytes() == recorder.pool.tobytes()


def test_the_plainest_example_is_no_vacuum(patched):
    """The recorder sees what it should: batches, drops and preemptions occur."""
    models = (model("a", slo=0.1, rate=1800, shape=0.2), model("b", slo=0.05, rate=300))
    kinds = Counter()
    for name in ("shepherd", "symphony"):
        recorder = Recorder(Deployment(models=models, devices=2), name, patched)
        kinds.update(row[0] for rows in recorder.decided for row in rows)
    assert set(kinds) == {RUN, DROP, PREEMPT}
