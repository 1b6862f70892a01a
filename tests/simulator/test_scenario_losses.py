"""Devices that are lost and come back: the run waits or goes on with another plan, and loses what was not saved."""

from dataclasses import replace

import pytest

from meshwright.cost import CostModel
from meshwright.cost.without import without_devices
from meshwright.planner import replan_seconds
from meshwright.simulator.scenarios import apply_scenario, simulate_scenario
from meshwright.spec import ScenarioError
from meshwright.spec.scenario import Checkpoints, Jitter, LostDevice, OtherDevice, Scenario, SlowDevice, SlowLink
from meshwright.spec.selectors import Devices, Links
from meshwright.spec.units import Seconds
from tests.planner.searching import search_plans
from tests.simulator.plans import fast_cluster
from tests.simulator.test_scenario_machines import GRAPH, plan_on

COST = CostModel(cluster=fast_cluster("2x2xA100"))
PLAN = plan_on(2, 2)
STEP_S = simulate_scenario(PLAN, GRAPH, COST, Scenario()).simulation.step_time_s


def run_of(*effects, replan=None, steps=1000):
    scenario = Scenario(effects=effects)
    return simulate_scenario(PLAN, GRAPH, COST, scenario, run_steps=steps, num_seeds=1, replan=replan).run.runs[0]


def lost(devices="rank 1", since=250, until=400, then="wait"):
    end = None if until is None else Seconds(until * STEP_S)
    return LostDevice(devices=Devices(devices), since=Seconds(since * STEP_S), until=end, then=then)


def saved(interval=100, cost=2, restart=5, detection=3):
    steps = {"interval": interval, "cost": cost, "restart": restart, "detection": detection}
    return Checkpoints(**{name: Seconds(count * STEP_S) for name, count in steps.items()})


def test_a_run_waits_for_what_is_lost_and_repeats_what_was_not_saved():
    times = run_of(lost(), saved())
    # Saved at 100 and 202 to 204; lost at 250 with 46 steps; waits to 400 and restarts; saved each 100 of the last 800.
    assert times.lost_s == pytest.approx(46 * STEP_S)
    assert times.waiting_s == pytest.approx(150 * STEP_S)
    assert times.restarting_s == pytest.approx(5 * STEP_S)
    assert times.computing_s == pytest.approx(1000 * STEP_S)
    assert times.num_saves == 2 + 7
    assert times.num_failures == 0


def test_a_run_goes_on_with_the_plan_for_the_rest():
    seen = []

    def replan(rest):
        seen.append(rest.cluster.num_ranks)
        return 2 * STEP_S

    times = run_of(lost(then="replan"), saved(interval=1e9), replan=replan)
    # 250 steps are lost, noticed and restarted to 258; 71 steps in 142 seconds; then saved and restarted.
    assert seen == [3]
    assert times.waiting_s == 0
    assert times.lost_s == pytest.approx(250 * STEP_S)
    assert times.restarting_s == pytest.approx((8 + 5) * STEP_S)
    assert times.computing_s == pytest.approx((142 + 1000 - 71) * STEP_S)
    assert times.num_saves == 1


def test_where_no_plan_fits_the_rest_the_run_waits():
    assert run_of(lost(then="replan"), saved(), replan=lambda _: None) == run_of(lost(), saved())


def test_without_any_device_the_run_waits():
    assert run_of(lost("all", then="replan"), saved(), replan=lambda _: STEP_S) == run_of(lost("all"), saved())


def test_a_new_plan_has_the_jitter_of_the_old_one():
    """Both are slower by as much: a run of the new plan alone takes as many times as long."""
    late, away = Jitter(straggler_probability=0.3, straggler_factor=3.0), lost(since=0, until=None, then="replan")

    def run(*effects):
        scenario = Scenario(effects=effects, seed=1)
        return simulate_scenario(PLAN, GRAPH, COST, scenario, run_steps=1000, num_seeds=2, replan=lambda _: 7 * STEP_S)

    jittered = run(late)
    factor = jittered.steps.rows()["mean_s"] / STEP_S
    assert factor > 1.2
    assert jittered.run.wall_s == pytest.approx(1000 * factor * STEP_S)
    assert run(late, away).run.wall_s == pytest.approx(7 * jittered.run.wall_s)


def test_devices_that_a_plan_does_not_use_are_not_missed():
    cost = CostModel(cluster=fast_cluster("3x2xA100"))
    scenario = Scenario(effects=(lost("node 2", until=None),))
    run = simulate_scenario(PLAN, GRAPH, cost, scenario, run_steps=1000, num_seeds=1).run
    assert run.wall_s == pytest.approx(1000 * run.step_time_s)


def test_a_slow_time_interrupts_nothing():
    slow = SlowDevice(devices=Devices("rank 1"), factor=2.0, since=Seconds(50 * STEP_S), until=Seconds(90 * STEP_S))
    times = run_of(slow, saved(interval=1e9))
    assert (times.restarting_s, times.saving_s, times.lost_s) == (0, 0, 0)
    assert times.computing_s > 1000 * STEP_S


def test_a_slow_link_for_a_while_takes_its_steps_longer():
    links = Links("between nodes")
    slow = SlowLink(links=links, factor=100.0, since=Seconds(50 * STEP_S), until=Seconds(90 * STEP_S))
    times = run_of(slow)
    always = simulate_scenario(PLAN, GRAPH, COST, Scenario(effects=(SlowLink(links=links, factor=100.0),)))
    slow_steps = 40 * STEP_S / always.simulation.step_time_s
    assert slow_steps < 39
    assert times.computing_s == pytest.approx((1000 - slow_steps + 40) * STEP_S, rel=1e-3)


@pytest.mark.parametrize(
    ("effect", "words"),
    [(lost(until=None), "it has no end"), (lost(then="replan"), "needs a planner, but none is available here")],
)
def test_a_run_without_an_end_is_refused(effect, words):
    with pytest.raises(ScenarioError, match=words):
        run_of(effect)


def test_the_rest_of_a_cluster_is_the_other_devices_on_their_nodes():
    cost = apply_scenario(
        COST,
        Scenario(
            effects=(
                OtherDevice(devices=Devices("rank 3"), device="V100"),
                SlowDevice(devices=Devices("rank 2"), factor=2.0),
                SlowLink(links=Links("between nodes"), factor=2.0),
            )
        ),
    )
    rest = without_devices(cost, (0, 1)).cluster
    assert [rest.device_kind(rank).usual_name for rank in range(rest.num_ranks)] == ["A100", "V100"]
    assert [rest.device_kind(rank).slowdown for rank in range(rest.num_ranks)] == [2, 1]
    assert [rest.node_index(rank) for rank in range(rest.num_ranks)] == [1, 1]
    fewer = without_devices(cost, (2,))
    assert fewer.collective_seconds("send", (0, 2), 1e8) == cost.collective_seconds("send", (0, 3), 1e8)


def test_a_new_plan_is_the_best_for_the_rest():
    rest = without_devices(COST, (3,))
    found = search_plans(
        lambda _: GRAPH, rest.cluster, PLAN.workload, cost=rest, max_plans=1, schedules=("1f1b",), method="slicing"
    )
    assert replan_seconds(PLAN, GRAPH, rest) == found.best.step_time_s
    assert found.best.step_time_s >= STEP_S / 2
    tiny = without_devices(COST, (1, 2, 3))
    assert replan_seconds(PLAN, GRAPH, tiny) > 0


def test_a_device_that_is_left_out_is_not_missed():
    cost = CostModel(cluster=fast_cluster("2x3xA100"))
    plan = replace(PLAN, idle=(0, 4))
    usual = simulate_scenario(plan, GRAPH, cost, Scenario())
    assert (
        usual.simulation.step_time_s
        == simulate_scenario(PLAN, GRAPH, without_devices(cost, (0, 4)), Scenario()).simulation.step_time_s
    )
    for device, restarts in ((0, 0), (1, 1), (4, 0), (5, 1)):
        effects = (lost(f"rank {device}"), saved())
        run = simulate_scenario(plan, GRAPH, cost, Scenario(effects=effects), run_steps=1000, num_seeds=1).run.runs[0]
        assert (run.lost_s > 0) == bool(restarts)
    slow = Scenario(effects=(SlowDevice(devices=Devices("rank 0"), factor=2.0),))
    assert simulate_scenario(plan, GRAPH, cost, slow).simulation.step_time_s == usual.simulation.step_time_s
    slow = Scenario(effects=(SlowDevice(devices=Devices("rank 1"), factor=2.0),))
    assert simulate_scenario(plan, GRAPH, cost, slow).simulation.step_time_s > usual.simulation.step_time_s
