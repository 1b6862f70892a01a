"""Sweeps: every case is what its plan and scenario give alone, on one process or many."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost import CostModel
from meshwright.simulator.scenarios import change_case, read_parameter, read_values, simulate_scenario, sweep_cases
from meshwright.spec import MeshwrightError
from meshwright.spec.scenario import Jitter, Scenario, SlowDevice, SlowLink
from meshwright.spec.selectors import Devices, Links
from meshwright.spec.units import BytesPerSecond
from tests.simulator.plans import fast_cluster
from tests.simulator.test_scenario_machines import GRAPH, plan_on

COST = CostModel(cluster=fast_cluster("4xA100"))
PLAN = plan_on(2, 2)
SCENARIO = Scenario(
    seed=2,
    effects=(
        SlowDevice(devices=Devices("rank 1"), factor=2.0),
        SlowLink(links=Links("inside nodes"), factor=2.0),
        SlowLink(links=Links("to hosts"), factor=2.0),
    ),
)


@pytest.mark.parametrize("num_processes", [1, 2, None])
def test_each_case_is_that_plan_in_that_scenario(num_processes):
    parameters = [read_parameter(text) for text in ("slow-device.factor=1,2..4:2", "plan.num_microbatches=2,3,4")]
    sweep = sweep_cases(parameters, PLAN, GRAPH, COST, SCENARIO, num_processes=num_processes)
    assert [(row["slow-device.factor"], row["plan.num_microbatches"]) for row in sweep.rows] == [
        (factor, count) for factor in (1, 2, 4) for count in (2, 3, 4)
    ]
    for row in sweep.rows:
        factor, count = row["slow-device.factor"], row["plan.num_microbatches"]
        if count == 3:  # does not divide the batch of 8
            assert row.keys() == {"slow-device.factor", "plan.num_microbatches", "error"}
            continue
        scenario = replace(SCENARIO, effects=(replace(SCENARIO.effects[0], factor=factor), *SCENARIO.effects[1:]))
        alone = simulate_scenario(replace(PLAN, num_microbatches=count), GRAPH, COST, scenario)
        assert {key: row[key] for key in alone.row()} == alone.row()
    assert sweep.figures[-1] == "error"


def test_parts_of_lists_go_by_their_number():
    changed, _ = change_case(PLAN, SCENARIO, {"plan.stages.0.stop": 3, "plan.stages.1.start": 3})
    assert [(stage.start, stage.stop) for stage in changed.stages] == [(0, 3), (3, PLAN.stages[1].stop)]
    assert change_case(PLAN, SCENARIO, {"slow-link.2.factor": 3})[1].effects[2].factor == 3


def test_a_plan_of_another_precision_has_its_costs():
    rows = sweep_cases([read_parameter("plan.workload.precision=float32,bfloat16")], PLAN, GRAPH, COST, Scenario()).rows
    for row in rows:
        precision = row["plan.workload.precision"]
        plan = replace(PLAN, workload=replace(PLAN.workload, precision=precision))
        cost = CostModel(cluster=COST.cluster, precision=precision)
        assert row["step_time_s"] == simulate_scenario(plan, GRAPH, cost, Scenario()).simulation.step_time_s


def test_seeds_and_units_are_parameters_too():
    jitter = Scenario(effects=(Jitter(spread=0.1), SCENARIO.effects[1]))
    parameters = [read_parameter("seed=0..2"), read_parameter("slow-link.bandwidth=1..4:2log GB/s")]
    sweep = sweep_cases(parameters, PLAN, GRAPH, COST, jitter, num_seeds=2)
    assert [row["slow-link.bandwidth"] for row in sweep.rows] == ["1 GB/s", "4 GB/s"] * 3
    assert len({row["jittered_mean_s"] for row in sweep.rows}) == 6
    assert len({row["step_time_s"] for row in sweep.rows}) == 2
    _, changed = change_case(PLAN, jitter, {"seed": 7, "slow-link.bandwidth": "4 GB/s"})
    assert changed.seed == 7
    assert changed.effects[1].bandwidth == BytesPerSecond(4e9)


@given(st.integers(0, 5), st.integers(0, 20), st.integers(1, 30))
def test_ranges_are_the_numbers_between_their_ends(first, length, count):
    assert read_parameter(f"x={first}..{first + length}").values == tuple(range(first, first + length + 1))
    values = read_parameter(f"x={first}..{first + length}:{count}").values
    assert len(values) == count
    assert values[0] == first
    assert values[-1] == (first + length if count > 1 else first)


def test_values_are_read_as_in_documents():
    assert read_parameter("x=1,2.5,true,gpipe,8 h").values == (1, 2.5, True, "gpipe", "8 h")
    assert read_values("1..64:7log, 3..4") == (1, 2, 4, 8, 16, 32, 64, 3, 4)
    assert read_parameter("x=1..100:3log").values == (1, 10, 100)
    assert read_parameter("x=1000000..1000002 h").values == ("1000000 h", "1000001 h", "1000002 h")
    assert read_parameter("x=0..2.5:2 h").values == ("0 h", "2.5 h")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("plan.num_microbatch=4", "unknown key 'num_microbatch' .did you mean 'num_microbatches'"),
        ("plan.num_microbatches=many", "num_microbatches: expected int, found 'many'"),
        ("plan.exchange.buckets=1", "unknown key 'buckets'"),
        ("slow-devise.factor=2", "names no effect of the scenario .did you mean 'slow-device'"),
        ("slow-device.facto=2", "unknown key 'facto' .did you mean 'factor'"),
        ("slow-device.factor=0", "slow-device: factor is 0"),
        ("slow-link.factor=2", "the scenario has 2 such effects. Give their number: slow-link.1.factor"),
        ("slow-link.3.factor=2", "slow-link.1.FIELD to slow-link.2.FIELD"),
        ("slow-link.2.bandwidth=2", "2 has no unit"),
        ("slow-device=2", "expected slow-device.FIELD"),
        ("slow-device.².factor=2", "expected slow-device.FIELD"),
        ("slow-device." + 5000 * "9" + ".factor=2", "expected slow-device.FIELD"),
        ("plan=1", "expected plan.FIELD"),
        ("plan.cluster=8xH100", "'plan.cluster' cannot be swept. All cases are about one cluster: give --cluster"),
        ("plan.model=vgg16", "plan the other model"),
        ("plan.model.x=1", "plan the other model"),
        ("plan.model_sizes.0=1", "plan with other sizes"),
        ("plan.graph_hash=0123456789abcdef", "plan the other graph"),
        ("plan.schedule_hash=0123456789abcdef", "sweep plan.schedule"),
        ("plan.num_microbatches.x=1", "4 has no fields"),
        ("plan.stages.x.stop=4", "the name has 'x' where a number from 0 to 1 is expected"),
        ("plan.stages.2.stop=4", "the name has '2' where a number from 0 to 1 is expected"),
        ("plan.stages.0.end=4", "unknown key 'end'"),
        ("seed=-1", "seed is -1"),
        ("factor", "has no name or no values"),
        ("seed=", "has no name or no values"),
        ("seed=5..1", "are not a range"),
        ("seed=0..9:0", "are not a range"),
        ("seed=0..9:3log", "are not a range"),
        ("seed=0.." + 400 * "9", "are not a range"),
        ("seed=0.." + 400 * "9" + ":3", "are not a range"),
        ("slow-device.since=0..2.5 h", "expected 0..9 for whole numbers"),
        ("slow-device.since=0.5..2.5 h", "expected 0..9 for whole numbers"),
        ("slow-device.factor=2,3,2.0", "the value 2.0 was given more than once"),
        ("slow-device.factor=1..1:3", "the value 1 was given more than once"),
        ("slow-device.factor=inf", "factor: expected float, found 'inf'"),
        ("slow-device.factor=" + 5000 * "9", "factor: expected float, found '999"),
        ("seed=0..1000000", "are not a range|expected 1 to"),
    ],
)
def test_parameters_that_are_none_are_refused(text, words):
    with pytest.raises(MeshwrightError, match=words):
        sweep_cases([read_parameter(text)], PLAN, GRAPH, COST, SCENARIO)


def test_values_that_cannot_be_are_cases_with_their_reason():
    rows = sweep_cases([read_parameter("slow-device.factor=0,2,many,-1")], PLAN, GRAPH, COST, SCENARIO).rows
    errors = [row.get("error") for row in rows]
    assert errors[0].startswith("slow-device.factor=0: ")
    assert errors[1] is None
    assert errors[2].endswith("(slow-device).factor: expected float, found 'many'.")
    assert errors[3].startswith("slow-device.factor=-1: ")


def test_links_as_fast_as_usual_change_nothing():
    scenario = Scenario(effects=(SlowLink(links=Links("inside nodes"), factor=4.0),))
    rows = sweep_cases([read_parameter("slow-link.factor=0.5,1,2")], PLAN, GRAPH, COST, scenario).rows
    assert rows[1]["step_time_s"] == simulate_scenario(PLAN, GRAPH, COST, Scenario()).simulation.step_time_s
    assert rows[0]["step_time_s"] < rows[1]["step_time_s"] < rows[2]["step_time_s"]


def test_a_parameter_is_swept_once():
    seed = read_parameter("seed=0..2")
    with pytest.raises(MeshwrightError, match="each parameter once"):
        sweep_cases([seed, seed], PLAN, GRAPH, COST, SCENARIO)
