"""Policies in plain Python from a user's file: as good as ours when written alike, and clear words otherwise."""

import re
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.serving import load_policy, simulate_deployment
from meshwright.spec import Deployment, Outage, ServingError
from tests.serving.deployments import model, one_model

# Eager batches of one model: drop what cannot be met alone, run the largest batch that is in time.
EAGER = """
class Eager:
    def arrive(self, pool, now, queue, request, deadline):
        if deadline - pool.slack < now + pool.delay + pool.latency(queue, 1):
            pool.refuse(queue, request)
        elif pool.enter(queue, request, deadline):
            self._use(pool, now)

    def free(self, pool, now, device):
        self._use(pool, now)

    def wake(self, pool, now):
        for queue in range(pool.num_queues):
            self._drop(pool, now, queue)

    def next_wake(self, pool):
        moments = [
            pool.deadline(queue) - pool.delay - pool.latency(queue, 1) + 1
            for queue in range(pool.num_queues) if pool.length(queue)
        ]
        return min(moments, default=None)

    def _drop(self, pool, now, queue):
        late = 0
        begin = now + pool.delay
        while late < pool.length(queue) and pool.deadline(queue, late) < begin + pool.latency(queue, 1):
            late += 1
        pool.drop(queue, late)

    def _use(self, pool, now):
        for device in pool.idle_devices:
            self._drop(pool, now, 0)
            if not pool.length(0):
                return
            room = pool.deadline(0) - now - pool.delay
            batch = 1
            limit = min(pool.length(0), pool.largest(0))
            while batch < limit and pool.latency(0, batch + 1) <= room:
                batch += 1
            pool.run(0, batch, device)
"""


@pytest.fixture
def write(tmp_path):
    """A policy of some text, by which it is named."""

    def make(text, name="Mine"):
        path = tmp_path / "mine.py"
        path.write_text(textwrap.dedent(text))
        return f"{path}:{name}"

    return make


def serve(reference, deployment=None, seconds=0.5):
    return simulate_deployment(deployment or one_model(), load_policy(reference), seconds)


def of(**methods):
    """A class with these methods (the body of each), and those that a policy needs."""
    usual = {
        "arrive": ("pool, now, queue, request, deadline", "pool.enter(queue, request, deadline)"),
        "free": ("pool, now, device", "pass"),
        "wake": ("pool, now", None),
        "next_wake": ("pool", None),
    }
    text = "class Mine:\n"
    for name, (arguments, body) in usual.items():
        if methods.get(name, body) is not None:
            text += f"    def {name}(self, {arguments}):\n        {methods.get(name, body)}\n"
    return text


@pytest.mark.parametrize(
    "deployment",
    [
        one_model(rate=300),
        one_model(rate=2500, shape=0.2),
        replace(one_model(rate=1500, shape=0.2), delay=0.002, slack=0.003),
        replace(one_model(rate=900), troubles=(Outage(device=1, since=0.1, until=0.3),)),
    ],
)
def test_a_plain_policy_serves_as_the_compiled_one_of_the_same_rules(write, deployment):
    plain = serve(write(EAGER, "Eager"), deployment)
    ours = serve("eager", deployment)
    for one, other in zip(plain.models, ours.models, strict=True):
        assert (one.num_requests, one.num_in_time, one.num_late, one.num_batches, one.num_again) == (
            other.num_requests, other.num_in_time, other.num_late, other.num_batches, other.num_again,
        )  # fmt: skip
        # Its own drops are told as crowded: it does not say why.
        assert one.dropped["crowded"] == other.dropped["late"]
    assert plain.busy_s.tolist() == ours.busy_s.tolist()
    assert plain.models[0].num_requests > 0


def test_each_simulation_begins_with_a_new_instance(write):
    policy = load_policy(
        write(
            """
            class Mine:
                def __init__(self):
                    self.seen = 0
                def arrive(self, pool, now, queue, request, deadline):
                    self.seen += 1
                    if self.seen <= 3:
                        pool.enter(queue, request, deadline)
                        pool.run(queue, 1, pool.idle_devices[0])
                    else:
                        pool.refuse(queue, request)
                def free(self, pool, now, device):
                    pass
            """
        )
    )
    deployment = one_model(devices=3, rate=100)
    for _ in range(2):
        served = simulate_deployment(deployment, policy, 1.0).models[0]
        assert (served.num_in_time, served.dropped["crowded"]) == (3, served.num_requests - 3)


def test_what_a_view_says(write):
    reference = write(
        """
        class Mine:
            def arrive(self, pool, now, queue, request, deadline):
                assert pool.num_queues == 3 and pool.num_devices == 2 and pool.now == now
                assert deadline - now == pool.slo(queue) == (50_000_000, 50_000_000, 90_000_000)[queue]
                assert pool.latency(queue, 3) == 8_000_000 and pool.latency(queue, 0) == 0
                assert pool.latency(queue, 10**6) > 10**15
                assert pool.largest(queue) == 32
                assert pool.slack == 1_000_000 and pool.delay == 2_000_000
                before = pool.length(queue)
                assert pool.enter(queue, request, deadline)
                assert pool.length(queue) == before + 1
                assert pool.deadline(queue, before) == deadline - pool.slack
                assert pool.idle_devices == [0, 1]
            def free(self, pool, now, device):
                assert pool.is_idle(device)
        """
    )
    models = (model("a", rate=30, copies=2), model("b", rate=30, slo=0.09))
    result = serve(reference, Deployment(models=models, devices=2, delay=0.002, slack=0.001), 1.0)
    assert result.num_requests > 0
    assert result.in_time_share == 0  # they wait for ever


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ({"arrive": None}, "has no method 'arrive'"),
        ({"free": None}, "has no method 'free'"),
        ({"free": "raise ValueError('too bad')"}, r"free raised ValueError: too bad .*mine.py:5"),
        ({"free": "import sys; sys.exit(3)"}, "free raised SystemExit: 3"),
        ({"arrive": "pool.nothing()"}, r"arrive raised AttributeError.*mine.py:3: pool.nothing"),
        ({"next_wake": "return 0.5"}, "next_wake returned 0.5; expected nanoseconds"),
        ({"next_wake": "return 'soon'"}, "next_wake returned 'soon'; expected nanoseconds"),
        ({"next_wake": "return 5"}, "next_wake returned .* wake decided nothing"),
        ({"next_wake": "return -1", "wake": "pass"}, "next_wake returned .* wake decided nothing"),
        (
            {"arrive": "pool.run(queue, 1, 0)"},
            "gave 1 as size of a batch of queue 0; expected no such call while the queue is empty.*mine.py:3: pool.run",
        ),
        ({"arrive": "pool.enter(queue, request, deadline); pool.run(queue, 2, 0)"}, "gave 2 as size .* from 1 to 1"),
        ({"arrive": "pool.enter(queue, request, deadline); pool.run(queue, 0, 0)"}, "gave 0 as size .* from 1 to 1"),
        (
            {"arrive": "pool.enter(queue, request, deadline); pool.run(queue, 1, 2)"},
            "gave 2 as device; expected .* 0 to 1",
        ),
        (
            {"arrive": "pool.enter(queue, request, deadline); pool.run(queue, 1, 1.0)"},
            "gave 1.0 as device; expected a whole",
        ),
        (
            {"arrive": "pool.enter(queue, request, deadline); pool.run(queue, 1, 0)"},
            "Device 0 was given a batch but is",
        ),
        (
            {"arrive": "pool.enter(queue, request, deadline); pool.drop(queue, 9)"},
            "gave 9 as number of requests of queue 0 to drop; expected a whole",
        ),
        (
            {"arrive": "pool.enter(queue, request + 1, deadline)"},
            "request 1 of queue 0; expected a request that has",
        ),
        (
            {"arrive": "pool.enter(queue + 1, request, deadline)"},
            "request 0 of queue 1; expected a request that has",
        ),
        ({"arrive": "pool.enter(queue, request, deadline / 2)"}, "as deadline; expected nanoseconds"),
        ({"arrive": "pool.enter(queue, request, 2**63)"}, "as deadline; expected nanoseconds"),
        ({"arrive": "pool.enter(queue, request, 0); pool.refuse(queue, request)"}, "each request once"),
        ({"arrive": "pool.length(-1)"}, "gave -1 as queue; expected a whole number from 0 to 0"),
        (
            {"arrive": "pool.deadline(queue)"},
            "gave 0 as place in queue 0; expected no such call while the queue is empty",
        ),
        ({"arrive": "pool.latency(queue, -2)"}, "gave -2 as size of a batch; expected"),
        ({"arrive": "pool.is_idle(77)"}, "gave 77 as device; expected"),
    ],
)
def test_what_a_policy_must_not_do(write, methods, words):
    with pytest.raises(ServingError, match=words):
        serve(write(of(**methods)), one_model(rate=400))


@pytest.mark.parametrize(
    "methods",
    [
        {"arrive": "pool.run(queue, 1, 0)"},
        {"arrive": "pool.enter(queue, request, deadline); pool.run(queue, 1, 0)"},
        {"arrive": "pool.enter(queue, request, 'soon')"},
        {"arrive": "pool.refuse(queue, 9999)"},
        {"next_wake": "return 0.5"},
    ],
)
def test_what_was_wrong_is_said_with_its_place(write, methods):
    """The line of the file, with its source; where no line of it took part, that of the method."""
    reference = write(of(**methods))
    name, body = next(iter(methods.items()))
    lines = Path(reference.partition(":")[0]).read_text().splitlines()
    if name == "next_wake":
        body = next(line for line in lines if "def next_wake" in line).strip()
    line = next(place for place, text in enumerate(lines, 1) if text.strip() == body)
    with pytest.raises(ServingError) as caught:
        serve(reference, one_model(rate=400))
    assert str(caught.value).endswith(f"mine.py:{line}: {body})")


NUMPY = """
import numpy as np

class Mine:
    def arrive(self, pool, now, queue, request, deadline):
        whole = np.int64
        assert pool.latency(np.uint8(queue), np.int32(2)) == pool.latency(queue, 2)
        pool.enter(whole(queue), whole(request), whole(deadline))
        assert pool.deadline(whole(queue), whole(0)) == pool.deadline(queue)
        for device in np.array(pool.idle_devices):
            count = np.uint8(min(pool.length(whole(queue)), pool.largest(whole(queue))))
            if count:
                pool.run(np.uint8(queue), count, device)
        pool.drop(whole(queue), whole(pool.length(queue)))

    def free(self, pool, now, device):
        assert pool.is_idle(np.int16(device))

    def next_wake(self, pool):
        return np.int64(2**62)
"""


def test_whole_numbers_may_be_numpys(write):
    """They do what Python's do."""
    plain = serve(
        write(
            re.sub(r"np\.(u?int\d+|array)\(", "type_(", NUMPY)
            .replace("import numpy as np", "type_ = lambda value: value")
            .replace("np.int64", "int")
        )
    )
    found = serve(write(NUMPY))
    assert found.num_requests > found.models[0].num_in_time > 0
    assert found.row() == plain.row()


@pytest.mark.parametrize(("body", "times"), [("pool.drop(place % 2, 1)", 1990), ("pool.refuse(*kept.pop())", 3900)])
def test_more_decisions_in_one_call_than_a_pool_holds(write, body, times):
    """Drops of two queues by turns: each is a decision of its own."""
    text = f"""
        class Mine:
            def __init__(self):
                self.kept, self.count = [], 0
            def arrive(self, pool, now, queue, request, deadline):
                self.count += 1
                kept = self.kept
                if {"drop" in body}:
                    pool.enter(queue, request, deadline)
                else:
                    kept.append((queue, request))
                if self.count == 4000:
                    kept.sort(key=lambda each: each[1])
                    for place in range({times}):
                        {body}
            def free(self, pool, now, device):
                pass
        """
    models = (model("a", rate=4000), model("b", rate=4000))
    deployment = Deployment(models=models, devices=1)
    with pytest.raises(ServingError, match=rf"1031 decisions.*mine.py:\d+: {re.escape(body)}"):
        serve(write(text), deployment)


def test_drops_one_by_one_of_one_queue_are_few_decisions(write):
    """As in the policy that the documentation shows, after thousands have waited for a device that was away."""
    text = """
        class Mine:
            def arrive(self, pool, now, queue, request, deadline):
                pool.enter(queue, request, deadline)
            def free(self, pool, now, device):
                while pool.length(0):
                    pool.drop(0, 1)
        """
    deployment = replace(one_model(rate=6000, devices=1), troubles=(Outage(device=0, since=0.0, until=0.4),))
    served = serve(write(text), deployment).models[0]
    assert served.dropped["crowded"] > 2000
    assert served.dropped["crowded"] + served.dropped["full"] + served.dropped["unanswered"] == served.num_requests


def test_a_policy_that_keeps_requests_to_itself_serves_none(write):
    result = serve(write(of(arrive="pass")))
    assert result.num_requests > 0
    assert (result.in_time_share, result.batches.sum()) == (0, 0)
    assert result.models[0].dropped["unanswered"] == result.num_requests


def test_requests_may_be_let_in_later(write):
    reference = write(
        """
        class Mine:
            def __init__(self):
                self.kept = []
            def arrive(self, pool, now, queue, request, deadline):
                self.kept.append((queue, request, deadline))
            def free(self, pool, now, device):
                pass
            def wake(self, pool, now):
                for each in self.kept:
                    pool.enter(*each)
                self.kept = []
                while pool.length(0) and pool.idle_devices:
                    pool.run(0, min(pool.length(0), pool.largest(0)), pool.idle_devices[0])
                pool.drop(0, pool.length(0))
            def next_wake(self, pool):
                return self.kept[0][2] - 40_000_000 if self.kept else None
        """
    )
    served = serve(reference, one_model(rate=100, slo=0.1)).models[0]
    assert served.num_in_time == served.num_requests - served.dropped["crowded"] > 0
    assert served.latency_s(1.0) > 0.06


def test_files_that_make_no_policy(write, tmp_path):
    for text, name, words in (
        ("x = 1", "Mine", "has no function 'Mine'"),
        ("class Mime: pass", "Mine", "has no function 'Mine'"),
        ("class Mine:\n    def __init__(self, x): pass", "Mine", "Making the policy raised TypeError"),
        ("def Mine(): return None", "Mine", "has no method 'arrive'"),
        ("class Mine(", "Mine", "SyntaxError"),
    ):
        with pytest.raises(ServingError, match=words):
            load_policy(write(text, name))
    with pytest.raises(ServingError, match="There is no file"):
        load_policy(f"{tmp_path}/absent.py:Mine")


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("symphny", "There is no policy 'symphny' .did you mean 'symphony'"),
        ("", "There is no policy ''"),
        ("timeouts:wat=3", "has no setting 'wat' .did you mean 'wait'"),
        ("timeouts:wait", "is not a setting; expected wait=NUMBER"),
        ("timeouts:wait=-3", "is not a setting; expected wait=NUMBER"),
        ("timeouts:wait=1.5", "is not a setting; expected wait=NUMBER"),
        ("timeouts:wait=1,wait=2", "has 'wait' twice"),
        ("timeouts:wait=" + "9" * 5000, "is not a setting; expected wait=NUMBER"),
        ("timeouts:wait=1000000001", "is not a setting; expected wait=NUMBER"),
        ("symphony:trial=1", "has no setting 'trial'.* Its settings are spare, window, admit"),
    ],
)
def test_names_and_settings_that_are_none(reference, words):
    with pytest.raises(ServingError, match=words):
        load_policy(reference)


def test_settings_reach_the_policy():
    assert load_policy("timeouts:wait=10,preferred=4,most=8") == (4, 10, 8)
    assert load_policy("eager") == load_policy("symphony:spare=0,window=0") == load_policy("deferred:spare=0,window=0")
    assert load_policy("eager:").spare == 0


@pytest.mark.parametrize("factor", [0, 100])
def test_batches_that_would_preempt_each_other_for_ever(factor):
    with pytest.raises(ServingError, match="expected a factor of more than 100"):
        serve(f"shepherd:factor={factor}")


@pytest.mark.long
def test_batches_that_may_preempt_each_other():
    assert serve("shepherd:factor=101", one_model(rate=2000)).num_requests > 0
