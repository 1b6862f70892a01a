"""Long runs: second by second as an oracle says, in the mean as Daly says, saved as often as brute force says."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost import CostModel
from meshwright.simulator.scenarios import simulate_scenario
from meshwright.simulator.scenarios.forecast import (
    best_interval,
    daly_interval,
    expected_seconds,
    saved_bytes,
    young_interval,
)
from meshwright.simulator.scenarios.long_run import (
    Failure,
    Saving,
    StepStretch,
    failures_of,
    follow_run,
    mean_time_to_failure,
)
from meshwright.spec import ScenarioError, load_shipped_graph
from meshwright.spec.scenario import Checkpoints, Failures, LostDevice, Price, Scenario, SlowDevice
from meshwright.spec.selectors import Devices
from meshwright.spec.units import BytesPerSecond, Seconds
from tests.marks import examples
from tests.simulator.oracle_runs import RunBySeconds
from tests.simulator.plans import fast_cluster
from tests.simulator.test_scenario_machines import GRAPH, plan_on

COST = CostModel(cluster=fast_cluster("2x2xA100"))
PLAN = plan_on(2, 2)
STEP_S = simulate_scenario(PLAN, GRAPH, COST, Scenario()).simulation.step_time_s


@st.composite
def some_stretches(draw):
    """Times in which steps take one or two seconds or the run stands still, but at last it does not."""
    stretches, begin = [StepStretch(begin_s=0.0, step_s=draw(st.sampled_from([1.0, 2.0, math.inf])))], 0
    for length in draw(st.lists(st.integers(1, 30), max_size=5)):
        begin += length
        step, change = draw(st.sampled_from([1.0, 2.0, math.inf])), draw(st.sampled_from(["", "lost", "back"]))
        if math.isinf(step) != math.isinf(stretches[-1].step_s):
            change = "lost" if math.isinf(step) else draw(st.sampled_from(["back", "lost"]))
        stretches.append(StepStretch(begin_s=begin, step_s=step, change=change))
    if math.isinf(stretches[-1].step_s):
        stretches.append(StepStretch(begin_s=begin + 7, step_s=1.0, change="back"))
    return stretches


@settings(max_examples=examples(300))
@given(
    st.integers(1, 40),
    some_stretches(),
    st.dictionaries(st.integers(0, 120), st.integers(0, 9), max_size=8),
    st.builds(
        Saving,
        interval_s=st.integers(1, 12),
        save_s=st.integers(0, 3),
        detection_s=st.integers(0, 3),
        restart_s=st.integers(0, 4),
    ),
)
def test_a_run_is_that_of_an_oracle_second_by_second(num_steps, stretches, failures, saving):
    expected = RunBySeconds(num_steps, stretches, failures, saving)
    moments = (Failure(float(at), float(repair)) for at, repair in sorted(failures.items()))
    times = follow_run(num_steps, stretches, moments, saving)
    found = {name: getattr(times, f"{name}_s") for name in expected.counted}
    assert found == pytest.approx(expected.counted, abs=1e-6)
    assert times.num_saves == expected.num_saves
    assert times.num_failures == expected.num_failures


def test_a_billion_intervals_without_failures_go_by_at_once():
    saving = Saving(interval_s=1e-3, save_s=1e-4)
    times = follow_run(1e6, [StepStretch(begin_s=0.0, step_s=1.0)], iter(()), saving)
    assert times.num_saves == 999_999_999
    assert times.wall_s == pytest.approx(1e6 + 999_999_999 * 1e-4)


@pytest.mark.parametrize(("save", "restart", "mttf"), [(60, 300, 7200), (5, 0, 1000), (300, 600, 3600)])
def test_runs_take_the_expected_time(save, restart, mttf):
    interval = young_interval(save, mttf)
    scenario = Scenario(effects=(Failures(mttf=Seconds(mttf * 8), of="device"),))
    saving = Saving(interval_s=interval, save_s=save, restart_s=restart)
    work = 400 * mttf
    walls = [
        follow_run(work, [StepStretch(begin_s=0.0, step_s=1.0)], failures_of(scenario, 8, 1, seed), saving).wall_s
        for seed in range(60)
    ]
    assert np.mean(walls) == pytest.approx(expected_seconds(work, interval, save, restart, mttf), rel=0.01)


def run_row(*effects, num_seeds=40, steps=1_000_000):
    scenario = Scenario(effects=effects)
    return simulate_scenario(PLAN, GRAPH, COST, scenario, run_steps=steps, num_seeds=num_seeds).run.row()


def test_the_expected_time_that_is_told_is_that_of_the_runs():
    """With repairs of several lengths, of which some are as long as the time between failures."""
    save = Checkpoints(cost=Seconds(30 * STEP_S), restart=Seconds(100 * STEP_S), interval=Seconds(400 * STEP_S))
    often = Failures(mttf=Seconds(12_000 * STEP_S), repair=Seconds(300 * STEP_S))
    long = Failures(mttf=Seconds(8_000 * STEP_S), repair=Seconds(3000 * STEP_S), of="node")
    for effects in ((often, save), (long, save), (often, long, save)):
        row = run_row(*effects)
        error = row["run_seed_spread_s"] / math.sqrt(40)
        assert error < 0.01 * row["run_s"]
        assert row["expected_run_s"] == pytest.approx(row["run_s"], abs=3 * error)


@pytest.mark.parametrize(
    "effects",
    [
        (Failures(mttf=Seconds(9000 * STEP_S), shape=0.8),),
        (Failures(times=(Seconds(9000 * STEP_S),)), Failures(mttf=Seconds(9000 * STEP_S))),
        (
            Failures(mttf=Seconds(9000 * STEP_S)),
            SlowDevice(devices=Devices("all"), factor=2.0, since=Seconds(100 * STEP_S)),
        ),
    ],
)
def test_no_time_is_expected_where_the_closed_form_does_not_hold(effects):
    save = Checkpoints(cost=Seconds(STEP_S), interval=Seconds(100 * STEP_S))
    row = run_row(*effects, save, num_seeds=1, steps=1000)
    assert "young_interval_s" in row
    assert "expected_run_s" not in row


@given(st.floats(1e-4, 3), st.floats(1, 1e6))
def test_the_best_interval_is_that_of_brute_force(ratio, mttf):
    save = ratio * mttf
    best = best_interval(save, mttf)
    grid = best * np.geomspace(0.2, 5, 2001)
    walls = [expected_seconds(1.0, interval, save, 0.0, mttf) for interval in grid]
    brute = grid[int(np.argmin(walls))]
    assert best == pytest.approx(brute, rel=2e-3)
    assert expected_seconds(1.0, best, save, 0.0, mttf) <= min(walls) * (1 + 1e-12)


@given(st.floats(1e-5, 0.02), st.floats(1, 1e6))
def test_young_and_daly_are_within_5_percent_of_brute_force_where_saving_is_short(ratio, mttf):
    save = ratio * mttf
    best = best_interval(save, mttf)
    assert young_interval(save, mttf) == pytest.approx(best, rel=0.075)
    assert daly_interval(save, mttf) == pytest.approx(best, rel=0.005)
    for interval in (young_interval(save, mttf), daly_interval(save, mttf)):
        assert expected_seconds(1, interval, save, 0, mttf) <= 1.002 * expected_seconds(1, best, save, 0, mttf)


@pytest.mark.long
@pytest.mark.parametrize(("save", "mttf"), [(30, 3600), (300, 3600), (60, 86400)])
def test_simulated_runs_are_shortest_within_5_percent_of_these_intervals(save, mttf):
    """Brute force over simulated runs, under the same failures for all intervals."""
    scenario = Scenario(effects=(Failures(mttf=Seconds(mttf)),))
    grid = best_interval(save, mttf) * np.geomspace(0.5, 2, 29)

    def wall(interval):
        saving = Saving(interval_s=interval, save_s=save, restart_s=120)
        runs = (
            follow_run(1500 * mttf, [StepStretch(begin_s=0.0, step_s=1.0)], failures_of(scenario, 1, 1, seed), saving)
            for seed in range(4)
        )
        return sum(run.wall_s for run in runs)

    walls = [wall(interval) for interval in grid]
    # The curve is flat at its lowest point; a parabola through it tells where that is.
    second, first, _ = np.polyfit(np.log(grid / grid[14]), walls, 4)[-3:]
    brute = grid[14] * math.exp(-first / (2 * second))
    assert daly_interval(save, mttf) == pytest.approx(brute, rel=0.05)
    assert wall(daly_interval(save, mttf)) <= 1.005 * min(walls)


@given(st.floats(1e-12, 1e6), st.floats(1e-3, 1e12))
def test_a_best_interval_is_where_no_other_is_better(ratio, mttf):
    """The derivative of the expected time is zero there; where saving takes long, a failure is between all others."""
    best = best_interval(ratio * mttf, mttf) / mttf
    assert 0 < best <= 1
    if best < 1:
        rounding = 1e-15 / (1 - best)
        assert math.log1p(-best) + best + ratio == pytest.approx(0, abs=1e-9 * ratio + rounding)
    else:
        assert ratio > 25


def test_a_daly_interval_is_the_mean_time_where_saving_takes_longer():
    assert daly_interval(200.0, 100.0) == 100.0


def test_failures_of_many_parts_come_as_often_as_all_of_them():
    scenario = Scenario(
        effects=(Failures(mttf=Seconds(1000)), Failures(mttf=Seconds(500), of="node", repair=Seconds(7)))
    )
    found = list(itertools.islice(failures_of(scenario, 20, 5, 1), 20_000))
    moments = [failure.at_s for failure in found]
    assert moments == sorted(moments)
    rate = 20 / 1000 + 5 / 500
    assert len(found) / moments[-1] == pytest.approx(rate, rel=0.03)
    assert sum(failure.repair_s == 7 for failure in found) / len(found) == pytest.approx(1 / 3, rel=0.05)
    assert mean_time_to_failure(scenario, 20, 5) == pytest.approx(1 / rate)


@pytest.mark.parametrize("shape", [0.6, 2.0])
def test_weibull_failures_have_their_mean_and_their_spread(shape):
    scenario = Scenario(effects=(Failures(mttf=Seconds(100), shape=shape),))
    gaps = np.diff([failure.at_s for failure in itertools.islice(failures_of(scenario, 1, 1, 0), 20_000)])
    assert gaps.mean() == pytest.approx(100, rel=0.04)
    second = math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(second - 1, rel=0.1)


def test_a_slow_time_makes_a_run_longer_by_what_it_slows():
    slow = SlowDevice(devices=Devices("all"), factor=1e3, since=Seconds(100 * STEP_S), until=Seconds(200 * STEP_S))
    outcome = simulate_scenario(PLAN, GRAPH, COST, Scenario(effects=(slow,)), run_steps=1000, num_seeds=1)
    slow_step = simulate_scenario(
        PLAN, GRAPH, COST, Scenario(effects=(SlowDevice(devices=Devices("all"), factor=1e3),))
    ).simulation.step_time_s
    assert outcome.simulation.step_time_s == STEP_S
    expected = 1000 * STEP_S + 100 * STEP_S * (1 - STEP_S / slow_step)
    assert outcome.run.wall_s == pytest.approx(expected, rel=1e-9)


def test_a_run_without_events_takes_its_steps():
    outcome = simulate_scenario(PLAN, GRAPH, COST, Scenario(), run_steps=12345, num_seeds=2)
    assert outcome.run.wall_s == pytest.approx(12345 * STEP_S)
    assert outcome.run.row()["run_computing_share"] == 1
    assert outcome.run.row()["run_failures"] == 0


def test_the_best_interval_of_failures_with_a_memory_is_no_worse_than_others():
    effects = (Failures(mttf=Seconds(2000 * STEP_S), shape=0.6), Checkpoints(cost=Seconds(5 * STEP_S)))
    best = simulate_scenario(PLAN, GRAPH, COST, Scenario(effects=effects), run_steps=100_000, num_seeds=3).run
    for factor in (0.5, 0.8, 1.3, 2.0):
        given = Checkpoints(cost=Seconds(5 * STEP_S), interval=Seconds(best.saving.interval_s * factor))
        other = simulate_scenario(
            PLAN, GRAPH, COST, Scenario(effects=(effects[0], given)), run_steps=100_000, num_seeds=3
        ).run
        assert other.wall_s > best.wall_s


def test_given_moments_fail_then():
    effects = (Failures(times=(Seconds(150 * STEP_S),)), Checkpoints(cost=Seconds(0), interval=Seconds(100 * STEP_S)))
    row = simulate_scenario(PLAN, GRAPH, COST, Scenario(effects=effects), run_steps=1000, num_seeds=1).run.row()
    assert row["run_failures"] == 1
    assert row["run_lost_share"] == pytest.approx(50 / 1050)
    assert row["run_s"] == pytest.approx(1050 * STEP_S)


def test_state_over_a_bandwidth_is_what_saving_takes():
    # gpt2-small has 124.4 million parameters; in float32 under SGD without momentum 4 bytes of each are saved.
    graph = load_shipped_graph("gpt2-small")
    plan = plan_on(2, 2)
    assert saved_bytes(plan, graph) == 4 * 124_439_808
    scenario = Scenario(effects=(Checkpoints(bandwidth=BytesPerSecond(1e6), interval=Seconds(1)),))
    saving = simulate_scenario(plan, GRAPH, COST, scenario, run_steps=10).run.saving
    assert saving.save_s == saved_bytes(plan, GRAPH) / 1e6


def test_costs_are_paid_for_devices_nodes_and_the_time_that_is_lost():
    devices, nodes = Price(per_hour=3.0), Price(per_hour=5.0, of="node")
    outcome = simulate_scenario(PLAN, GRAPH, COST, Scenario(effects=(devices, nodes)), run_steps=3600)
    assert outcome.price["price_per_hour"] == 4 * 3 + 2 * 5
    assert outcome.price["price_per_step"] == pytest.approx(22 * STEP_S / 3600)
    assert outcome.price["price_of_run"] == pytest.approx(22 * STEP_S)
    assert outcome.price["price_per_million_samples"] == pytest.approx(22 * STEP_S / 3600 / 8 * 1e6)
    failing = Scenario(
        effects=(devices, Failures(times=(Seconds(STEP_S * 50),)), Checkpoints(cost=Seconds(1), interval=Seconds(1e9)))
    )
    lossy = simulate_scenario(PLAN, GRAPH, COST, failing, run_steps=100)
    assert lossy.price["price_of_run"] == pytest.approx(12 * 150 * STEP_S / 3600)
    assert lossy.price["price_per_step"] == pytest.approx(12 * 1.5 * STEP_S / 3600)


@pytest.mark.parametrize(
    ("effects", "words"),
    [
        (
            (Price(per_hour=1.0, device="H100"),),
            r"effects.0. .price..device: the cluster has no devices of kind 'H100'",
        ),
        (
            (Price(per_hour=1.0), Price(per_hour=1.0, of="node", currency="EUR")),
            r"effects.1. .price..currency: prices in EUR, USD were given",
        ),
        ((LostDevice(devices=Devices("rank 4")),), r"effects.0. .lost-device..devices: 'rank 4' was selected"),
        ((Failures(mttf=Seconds(1)), Checkpoints(cost=Seconds(0))), "saving takes no time"),
        ((Failures(mttf=Seconds(0.01)), Checkpoints(cost=Seconds(60), interval=Seconds(60))), "fails 100000 times"),
    ],
)
def test_runs_that_cannot_be_are_refused(effects, words):
    with pytest.raises(ScenarioError, match=words):
        simulate_scenario(PLAN, GRAPH, COST, Scenario(effects=effects), run_steps=10**9)
