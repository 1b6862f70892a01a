"""What a server measures of its own lateness, from samples that tests give."""

from types import SimpleNamespace

import numpy as np

from meshwright.serving.policies.pool import DELAY, GUARD, SLACK, allocate_pool
from meshwright.serving.server import lateness as measured
from meshwright.serving.server.lateness import Lateness
from meshwright.spec import Deployment
from meshwright.spec.units import Seconds
from tests.serving.deployments import model

MS = 1_000_000


def known(lateness, **given):
    deployment = Deployment(models=(model(),), devices=1, **{name: Seconds(value) for name, value in given.items()})
    pool = allocate_pool(np.array([[0, MS]]), np.array([100 * MS]), 1)
    return dict(lateness.known_better(deployment, pool))


def pinged(most_ns=1000 * MS, count=64):
    """Messages without a batch: 0.1 ms there, and known 0.2 ms after."""
    lateness = Lateness(most_ns)
    for place in range(count):
        lateness.note(place, place + MS // 10, place + MS // 10, place + 3 * MS // 10)
    return lateness


def test_before_fronts_have_told_slack_is_twice_what_the_scheduler_sees():
    assert known(pinged()) == {DELAY: MS // 10, SLACK: 2 * (MS // 5), GUARD: MS}
    assert not pinged(count=31).is_known
    assert pinged(count=32).is_known


def test_fronts_know_better():
    lateness = pinged()
    lateness.answers.add(np.full(31, 3 * MS))
    assert known(lateness)[SLACK] == 2 * (MS // 5)
    lateness.answers.add(np.array([9 * MS]))
    # The worst one of all is left out.
    assert known(lateness)[SLACK] == 3 * MS
    # One of a thousand may be later.
    lateness.answers.add(np.full(30_000, MS))
    assert known(lateness)[SLACK] == 3 * MS
    lateness.answers.add(np.full(2700, MS))
    assert known(lateness)[SLACK] == MS


def test_few_timers_may_fire_later_than_the_guard():
    lateness = pinged()
    for _ in range(990):
        lateness.timers.add(MS)
    for _ in range(10):
        lateness.timers.add(5 * MS)
    assert known(lateness)[GUARD] == MS


def test_before_some_timers_have_fired_the_guard_is_a_millisecond_at_least():
    lateness = pinged()
    for _ in range(31):
        lateness.timers.add(MS // 10)
    assert known(lateness)[GUARD] == MS
    lateness.timers.add(MS // 10)
    assert known(lateness)[GUARD] == MS // 10


def test_nothing_is_taken_to_be_later_than_a_request_has_time_and_what_is_given_stays():
    lateness = pinged(most_ns=MS // 20)
    for _ in range(40):
        lateness.timers.add(2 * MS)
    assert known(lateness) == {DELAY: MS // 20, SLACK: MS // 20, GUARD: MS // 20}
    assert known(lateness, slack=0.001, delay=0.002) == {GUARD: MS // 20}


def test_batches_tell_how_long_they_take_and_when_they_are_known():
    lateness = pinged()
    assert lateness.facts() == {"notice_ns": MS // 5, "stretch": 1000}
    for _ in range(200):
        lateness.note(0, MS // 2, MS // 2 + 11 * MS, 12 * MS, expected_ns=10 * MS)
    assert lateness.facts() == {"notice_ns": MS // 2, "stretch": 1100}
    assert known(lateness)[DELAY] == MS // 2


def test_a_batch_that_was_there_before_the_device_was_free_has_no_delay():
    """Some policies give devices their next batch early."""
    lateness = pinged(count=0)
    for _ in range(40):
        lateness.note(10 * MS, 9 * MS, 19 * MS, 20 * MS, expected_ns=10 * MS)
    assert DELAY not in known(lateness)


def test_what_made_answers_late_once_is_forgotten_after_a_minute(monkeypatch):
    clock = SimpleNamespace(now=0, monotonic_ns=lambda: clock.now)
    monkeypatch.setattr(measured, "time", clock)
    lateness = pinged()
    lateness.answers.add(np.full(40, 9 * MS))
    for second in range(1, 70):  # a server that is hardly asked
        clock.now = second * 1000 * MS
        lateness.answers.add(MS)
        assert known(lateness)[SLACK] == (9 * MS if second < 60 else MS)
    clock.now *= 10  # it is not asked any more; better old samples than none
    assert known(lateness)[SLACK] == 9 * MS
