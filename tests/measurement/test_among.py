"""What an exchange adds to computations, on a clock that the test moves."""

import pytest

from meshwright.measurement import links as among


class Clock:
    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(among.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(among.time, "process_time", lambda: self.now / 2)
        monkeypatch.setattr(among.dist, "barrier", lambda: None)

    def takes(self, *seconds):
        """An action that takes these in turn, and the last one from then on."""
        left = list(seconds)

        def act():
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return act


def test_what_comes_on_top_of_computations_is_the_exchange(monkeypatch):
    clock = Clock(monkeypatch)
    timing = among.time_among(clock.takes(0.25), clock.takes(4.0), repeats=4)
    assert timing.seconds == pytest.approx(0.25)
    assert timing.host_s == pytest.approx(0.125)
    assert timing.spread == pytest.approx(0.0, abs=1e-9)
    assert timing.num_samples == 4 * 5


def test_the_first_sample_the_least_and_the_greatest_do_not_count(monkeypatch):
    clock = Clock(monkeypatch)
    opening, stalled = [50.0] * 5, [9.0, *[0.25] * 4]
    timing = among.time_among(clock.takes(*opening, *stalled, 0.25), clock.takes(4.0), repeats=5)
    assert timing.seconds == pytest.approx(0.25)


def test_what_computations_hide_altogether_still_takes_some_time(monkeypatch):
    clock = Clock(monkeypatch)
    # Each round of computations alone takes longer than with the exchange.
    timing = among.time_among(clock.takes(0.0), clock.takes(*([1.0] * 5 + [1.5] * 5) * 4), repeats=3)
    assert 0 < timing.seconds < 1e-9
    assert timing.host_s == 0.0
