"""Scenarios of plans that split ops: a team is as slow as its slowest device, and all of its devices cost."""

from dataclasses import replace

import pytest

from meshwright.cost import CostModel
from meshwright.program import build_program
from meshwright.simulator import estimate_program, simulate_plan
from meshwright.simulator.scenarios import JitteredSteps, apply_scenario, price_per_hour
from meshwright.spec import PlanError, Sharding, load_shipped_graph, read_recompute
from meshwright.spec.scenario import Jitter, Price, Scenario, SlowDevice
from meshwright.spec.selectors import Devices
from tests.graphs import make_plan
from tests.simulator.plans import fast_cluster
from tests.simulator.test_scenario_jitter import largest_factor

GPT = load_shipped_graph("gpt-tiny")
COST = CostModel(cluster=fast_cluster("8xA100"))


def plan_of(replicas, **settings):
    return replace(make_plan(GPT, [(0, len(GPT.layers))], [replicas], 2 * replicas), **settings)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_one_slow_device_slows_the_ops_of_its_team_and_not_what_they_exchange(rank):
    plan = plan_of(1, sharding=Sharding(tensor=4))
    usual = simulate_plan(plan, GPT, COST.cluster, cost=COST).step_time_s
    slow = apply_scenario(COST, Scenario(effects=(SlowDevice(devices=Devices(f"rank {rank}"), factor=3.0),)))
    found = simulate_plan(plan, GPT, slow.cluster, cost=slow).step_time_s
    assert usual < found < 3 * usual
    all_slow = apply_scenario(COST, Scenario(effects=(SlowDevice(devices=Devices("all"), factor=3.0),)))
    assert found == simulate_plan(plan, GPT, all_slow.cluster, cost=all_slow).step_time_s


def test_a_team_straggles_as_often_as_any_of_its_devices():
    late = Jitter(spread=0.1, straggler_probability=0.05, straggler_factor=3.0, per="step", of="computations")
    plan = plan_of(1, sharding=Sharding(tensor=4))
    usual = simulate_plan(plan, GPT, COST.cluster, cost=COST).step_time_s
    times = JitteredSteps(plan, GPT, COST, Scenario(effects=(late,))).time_steps(500, 8)
    # sd of the largest of four is 0.8 of a step: 4000 steps know their mean by 1.3 %.
    assert times.rows()["mean_s"] / usual == pytest.approx(largest_factor(late, 4), rel=0.04)


def test_every_device_of_a_team_is_paid():
    scenario = Scenario(effects=(Price(per_hour=2.0, of="device"),))
    assert price_per_hour(plan_of(2, sharding=Sharding(tensor=4)).num_devices, COST.cluster, scenario)[0] == 16.0
    assert price_per_hour(plan_of(2).num_devices, COST.cluster, scenario)[0] == 4.0


@pytest.mark.parametrize(
    "settings", [{"sharding": Sharding(tensor=2)}, {"recompute": read_recompute(GPT, "full").ranges}]
)
def test_costs_of_a_whole_graph_are_refused_for_a_plan_that_is_to_be_lowered(settings):
    plan = plan_of(2, **settings)
    with pytest.raises(PlanError, match="form_teams"):
        estimate_program(build_program(plan, GPT), plan, GPT, COST)
