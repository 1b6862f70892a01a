"""Jitter: what is drawn does not depend on who asks, and steps of replicas have the moments of a largest lognormal."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost import CostModel
from meshwright.simulator import estimate_program, simulate_plan
from meshwright.simulator.plan_simulation import program_of
from meshwright.simulator.scenarios import JitteredSteps, apply_scenario, has_jitter
from meshwright.simulator.scenarios.long_run import draw_factors, jitter_factors
from meshwright.simulator.unroll import unroll
from meshwright.spec import MeshwrightError, Opcode, ProgramError
from meshwright.spec.scenario import Jitter, Scenario, SlowDevice, SlowLink
from meshwright.spec.selectors import Devices, Links
from meshwright.spec.units import BytesPerSecond, Seconds
from tests.simulator.plans import fast_cluster, small_cluster
from tests.simulator.test_scenario_machines import GRAPH, plan_on

COST = CostModel(cluster=fast_cluster("4xA100"))
LATE = Jitter(spread=0.1, straggler_probability=0.05, straggler_factor=3.0, per="step")


def instant_cost(devices):
    """Links that take no time worth telling."""
    free = SlowLink(links=Links("inside nodes"), bandwidth=BytesPerSecond(1e18), latency=Seconds(0))
    return apply_scenario(CostModel(cluster=small_cluster(devices=devices)), Scenario(effects=(free,)))


def largest_factor(effect, count):
    """The mean of the largest of so many factors, by numeric integration of its distribution."""
    x = np.exp(np.linspace(np.log(0.4), np.log(8), 200_001))
    normal = lambda z: 0.5 * (1 + np.vectorize(__import__("math").erf)(z / np.sqrt(2)))
    p, f, s = effect.straggler_probability, effect.straggler_factor, effect.spread
    one = (1 - p) * normal(np.log(x) / s) + p * normal(np.log(x / f) / s)
    below = one**count
    return float(x[0] + np.sum((1 - (below[1:] + below[:-1]) / 2) * np.diff(x)))


@pytest.mark.parametrize("count", [2, 4, 16])
def test_a_step_of_replicas_takes_the_largest_of_their_factors(count):
    cost, plan = (
        instant_cost(count),
        plan_on(1, count, microbatches=count, batch=2**16),
    )  # so many that the optimizer's time is nothing beside
    usual = simulate_plan(plan, GRAPH, cost.cluster, cost=cost).step_time_s
    times = JitteredSteps(plan, GRAPH, cost, Scenario(effects=(LATE,))).time_steps(1000, 8)
    # sd of the largest of 16 is 0.95 of a step: 8000 steps know their mean by 1 %.
    assert times.rows()["mean_s"] / usual == pytest.approx(largest_factor(LATE, count), rel=0.025)


def test_the_mean_of_the_largest_of_16_is_that_of_the_experiment():
    # Our own experiment of 2026-11-20: 16 workers, lognormal of 0.1, 5 % take 3 times as long: a mean step of 2.27.
    assert largest_factor(LATE, 16) == pytest.approx(2.27, rel=0.02)


def test_factors_have_the_moments_of_their_law():
    keys = [np.arange(200_000), np.zeros(200_000, np.int64)]
    drawn = np.log(draw_factors(Jitter(spread=0.3), (1, 0), keys))
    assert drawn.mean() == pytest.approx(0, abs=0.003)
    assert drawn.std() == pytest.approx(0.3, rel=0.01)
    assert (drawn**4).mean() / drawn.std() ** 4 == pytest.approx(3, rel=0.05)
    assert np.corrcoef(drawn[1:], drawn[:-1])[0, 1] == pytest.approx(0, abs=0.01)
    late = draw_factors(replace(LATE, spread=0.0), (1, 0), keys)
    assert set(late.tolist()) == {1.0, 3.0}
    assert (late == 3).mean() == pytest.approx(0.05, rel=0.03)


@settings(max_examples=20)
@given(
    st.sampled_from([(1, 4), (2, 2), (4, 1)]),
    st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    st.integers(1, 3),
    st.integers(0, 5),
    st.sampled_from(["instruction", "step"]),
)
def test_draws_depend_on_the_instruction_alone(shape, schedule, num_steps, seed, per):
    """The first steps of a longer run are those of a shorter one, and schedules share the luck of their work."""
    scenario = Scenario(effects=(Jitter(spread=0.2, per=per, of="all"),))

    def drawn(schedule, num_steps):
        plan = plan_on(*shape, schedule=schedule)
        program = program_of(plan, GRAPH, COST.cluster)
        unrolled = unroll(program, estimate_program(program, plan, GRAPH, COST), num_steps)
        factor = jitter_factors(program, unrolled, scenario, COST.cluster, seed)
        from meshwright.simulator.simulate import instruction_columns

        columns = instruction_columns(program, unrolled)
        ranks = np.array([stream.rank for stream in program.streams])[columns["track"]]
        keys = zip(
            ranks, *(columns[name] for name in ("step", "opcode", "stage", "microbatch", "num_bytes")), strict=True
        )
        return {tuple(map(int, key)): value for key, value in zip(keys, factor.tolist(), strict=True)}

    short, long, other = drawn(schedule, num_steps), drawn(schedule, num_steps + 2), drawn("gpipe", num_steps)
    assert short.items() <= long.items()
    forwards = lambda table: {key: value for key, value in table.items() if key[2] == Opcode.FORWARD}
    assert forwards(short) == forwards(other)
    if per == "step":
        assert len({(key[0], key[1], value) for key, value in short.items()}) == len(set(short.values()))


def test_devices_and_work_that_are_not_named_take_their_usual_time():
    plan = plan_on(2, 2)
    program = program_of(plan, GRAPH, COST.cluster)
    unrolled = unroll(program, estimate_program(program, plan, GRAPH, COST), 2)
    rank = np.array([stream.rank for stream in program.streams])[unrolled.stream]
    computes = np.array([stream.name == "compute" for stream in program.streams])[unrolled.stream]
    for of, changed in (("computations", computes), ("transfers", ~computes), ("all", np.ones_like(computes))):
        effect = Jitter(devices=Devices("rank 1"), spread=0.2, of=of)
        factor = jitter_factors(program, unrolled, Scenario(effects=(effect,)), COST.cluster, 0)
        assert ((factor != 1) == (changed & (rank == 1))).all()


def test_members_of_a_sum_take_the_time_of_the_lowest_rank():
    plan, effect = plan_on(1, 4), Jitter(spread=0.5, of="transfers")
    usual = simulate_plan(plan, GRAPH, COST.cluster, cost=COST).timeline
    timeline = JitteredSteps(plan, GRAPH, COST, Scenario(effects=(effect,))).timeline(1)
    sums = {}
    for which in (usual, timeline):
        rows = np.flatnonzero(which.opcode == Opcode.ALL_REDUCE)
        rank = np.array([stream.rank for stream in which.tracks])[which.track[rows]]
        took = which.end_ps[rows] - which.start_ps[rows]
        sums[which is timeline] = dict(zip(rank.tolist(), took.tolist(), strict=True))
        numbers = [getattr(which, name)[rows[:1]] for name in ("step", "opcode", "stage", "microbatch", "num_bytes")]
    assert len(set(sums[True].values())) == 1
    factor = draw_factors(effect, (0, 0), [np.zeros(1, np.int64), *numbers])
    assert sums[True][0] == round(sums[False][0] * float(factor[0]))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "pipedream"])
@pytest.mark.parametrize("contention", ["queued", "fair"])
def test_jitter_of_nothing_is_a_run_without_it(schedule, contention):
    plan = plan_on(2, 1 if schedule == "pipedream" else 2, schedule=schedule)
    usual = simulate_plan(plan, GRAPH, COST.cluster, cost=COST, num_steps=4, contention=contention)
    same = JitteredSteps(plan, GRAPH, COST, Scenario(effects=(Jitter(),)), contention=contention)
    assert same.timeline(4) == usual.timeline
    times = same.time_steps(10, 2)
    assert times.seconds == pytest.approx(np.full((2, 10), usual.step_time_s), rel=1e-6)
    assert times.rows()["seed_spread_s"] == 0


def test_seeds_repeat_themselves_and_differ_from_each_other():
    plan = plan_on(2, 2)
    of = lambda seed: JitteredSteps(plan, GRAPH, COST, Scenario(seed=seed, effects=(LATE,))).time_steps(20, 3).seconds
    assert (of(3) == of(3)).all()
    assert (of(3)[1:] == of(4)[:2]).all()
    assert len({tuple(row) for row in of(3).tolist()}) == 3


def test_only_what_is_random_is_jitter():
    assert not has_jitter(Scenario(effects=(Jitter(), Jitter(straggler_probability=0.5))))
    assert has_jitter(Scenario(effects=(Jitter(spread=0.1),)))


@pytest.mark.parametrize("counts", [(3, 1), (20, 0)])
def test_too_few_steps_or_seeds_are_refused(counts):
    with pytest.raises(ProgramError, match="expected one seed or more, and 5 to"):
        JitteredSteps(plan_on(2, 2), GRAPH, COST, Scenario(effects=(LATE,))).time_steps(*counts)


@pytest.mark.parametrize("longest_s", [1e-3, 1e4, 3e5, 1e6, 1e8])
@pytest.mark.parametrize("contention", ["queued", "fair"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (4, 1)])
def test_steps_longer_than_the_clock_can_tell_are_refused(shape, contention, longest_s):
    """2^63 ps are 107 days: 100 steps of 1e4 s can be told, of 3e5 s they cannot."""
    plan = plan_on(*shape)
    usual = simulate_plan(plan, GRAPH, COST.cluster, cost=COST, contention=contention).step_time_s
    slow = SlowDevice(devices=Devices("all"), factor=min(1e6, longest_s / usual))
    cost = apply_scenario(COST, Scenario(effects=(slow,)))
    late = Jitter(straggler_probability=1.0, straggler_factor=max(1.0, longest_s / usual / 1e6), per="step")
    steps = JitteredSteps(plan, GRAPH, cost, Scenario(effects=(late,)), contention=contention)
    if longest_s < 3e5:
        assert steps.time_steps(num_seeds=1).rows()["mean_s"] == pytest.approx(longest_s, rel=0.9)
        return
    with pytest.raises(MeshwrightError, match=r"longer than 2.63 ps|more than a simulation can hold"):
        steps.time_steps(num_seeds=1)
