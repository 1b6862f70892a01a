"""Plans under exchange policies: closed forms of their steps, the same luck as under sums, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from meshwright.cost import CostModel
from meshwright.program import build_program
from meshwright.program.controllers import make_controller, with_policy
from meshwright.simulator import check_policy, simulate_plan
from meshwright.simulator.policy_simulation import number_steps, parameter_bytes, run_policy
from meshwright.simulator.scenarios import apply_scenario, simulate_scenario, steps_under_jitter
from meshwright.spec import GradientExchange, Opcode, Optimizer, Plan, PlanError, ProgramError, StagePlan, Workload
from meshwright.spec.exchange import ExchangePolicy, read_policy
from meshwright.spec.scenario import Jitter, Scenario, SlowDevice, SlowLink
from meshwright.spec.selectors import Devices, Links
from meshwright.spec.units import BytesPerSecond, Seconds
from tests.graphs import chain_graph
from tests.simulator.plans import FixedCost, small_cluster

GRAPH = chain_graph(6, width=32)
SEND, UPDATE = 7e-6, 2e-6
COST = FixedCost(send=SEND, optimizer=UPDATE, all_reduce=11e-6)
PER_STEP = Jitter(spread=0.1, straggler_probability=0.05, straggler_factor=3.0, per="step")


def plan_under(policy, devices=5, **changes):
    exchange = with_policy(policy, devices) if policy else GradientExchange(overlap=False, bucket_bytes=2**40)
    count = devices - len(exchange.servers)
    stage = StagePlan(start=0, stop=6, ranks=tuple(range(count)))
    plan = Plan(
        model="chain",
        graph_hash=GRAPH.content_hash,
        cluster="small",
        workload=Workload(global_batch=2 * count, optimizer=Optimizer(kind="sgd")),
        stages=(stage,),
        num_microbatches=count,
        exchange=exchange,
    )
    return replace(plan, **changes)


def step_of(policy, devices=5, cost=COST):
    return simulate_plan(plan_under(policy, devices), GRAPH, cost.cluster, cost=cost).step_time_s


ALONE = simulate_plan(plan_under("", 1), GRAPH, COST.cluster, cost=COST).step_time_s


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        # The server sends parameters to one replica after the other; the first gradients come from the first of them.
        ("backup:0", ALONE + (1 + 4) * SEND),
        ("backup:2", ALONE + (1 + 2) * SEND),
        ("stopped-backup:1", ALONE + (1 + 3) * SEND),
        # All ranks are equal, so all of them form one group after another, with a sum of their gradients.
        ("partial:5", ALONE + COST.all_reduce),
    ],
)
def test_equal_replicas_take_a_step_and_its_messages(policy, expected):
    assert step_of(policy) == pytest.approx(expected, rel=1e-9)


def test_a_sum_of_all_ready_replicas_is_the_step_without_a_policy():
    assert step_of("partial:5") == pytest.approx(step_of(""), rel=1e-9)


def test_bounded_delay_is_bound_by_the_updates_of_its_server_or_by_a_replica():
    updates = replace(COST, optimizer=1e-3)
    # Four gradients a step, each with an update of its own.
    assert step_of("delay:8", cost=updates) == pytest.approx(4e-3, rel=0.02)
    assert step_of("delay:8") == pytest.approx(ALONE + 2 * SEND, rel=0.1)


def test_samples_count_whose_gradients_are_used():
    found = simulate_plan(plan_under("backup:1"), GRAPH, COST.cluster, cost=COST)
    assert found.samples_per_s == pytest.approx(8 * 3 / 4 / found.step_time_s)
    found = simulate_plan(plan_under("delay:1"), GRAPH, COST.cluster, cost=COST)
    assert found.samples_per_s == pytest.approx(8 / found.step_time_s)


def test_a_slow_device_is_waited_for_unless_there_is_a_backup():
    usual = CostModel(cluster=small_cluster(devices=5))
    slow = apply_scenario(usual, Scenario(effects=(SlowDevice(devices=Devices("rank 0"), factor=10),)))
    assert step_of("backup:0", cost=slow) > 4 * step_of("backup:0", cost=usual)
    assert step_of("backup:1", cost=slow) == pytest.approx(step_of("backup:1", cost=usual), rel=0.05)


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("per", ["step", "instruction"])
def test_policies_have_the_random_draws_of_sums(seed, per):
    """The mean of all replicas takes as long as the step without a policy."""
    scenario = Scenario(effects=(replace(PER_STEP, per=per),), seed=seed)
    both = [
        steps_under_jitter(plan_under(policy), GRAPH, COST, scenario).timeline(20).step_seconds()
        for policy in ("", "partial:5")
    ]
    assert np.allclose(*both, rtol=1e-6)
    assert both[0].std() > 0


def test_backups_gain_under_stragglers_as_in_the_experiment():
    """16 replicas, lognormal of 0.1, one in twenty takes three times as long: gains of 1.43 and 1.65 (2026-11-20)."""
    free = SlowLink(links=Links("inside nodes"), bandwidth=BytesPerSecond(1e18), latency=Seconds(0))
    cost = FixedCost(cluster=small_cluster(devices=17), forward=1e-3, backward=0.0)
    cost = apply_scenario(cost, Scenario(effects=(free,)))
    scenario = Scenario(effects=(PER_STEP,))

    def rate(policy):
        found = simulate_scenario(plan_under(policy, 17), GRAPH, cost, scenario, num_seeds=3)
        return read_policy(policy).num_used(16) / found.steps.rows()["mean_s"]

    assert rate("stopped-backup:1") / rate("backup:0") == pytest.approx(1.43, rel=0.05)
    assert rate("stopped-backup:2") / rate("backup:0") == pytest.approx(1.65, rel=0.05)


def test_a_seed_decides_the_steps():
    plan, scenario = plan_under("delay:2"), Scenario(effects=(PER_STEP,), seed=5)
    steps = steps_under_jitter(plan, GRAPH, COST, scenario).time_steps(20, 2).seconds
    again = steps_under_jitter(plan, GRAPH, COST, replace(scenario, seed=6)).time_steps(20, 1).seconds
    assert steps.shape == (2, 20)
    assert (steps[1] == again[0]).all()
    assert (steps[0] != steps[1]).any()


@pytest.mark.parametrize(
    ("policy", "updates"), [("backup:1", 1), ("stopped-backup:1", 1), ("delay:3", 4), ("partial:2", 5)]
)
def test_steps_end_with_their_updates(policy, updates):
    plan = plan_under(policy)
    assert check_policy(plan, 12) == updates
    run, timeline = run_policy(plan, GRAPH, COST, 12)
    ends = np.cumsum(timeline.step_seconds()) * 1e12
    done = np.sort(run.timeline.end_ps[run.timeline.opcode == Opcode.OPTIMIZER_STEP])
    # Late gradients may arrive after the last update.
    assert np.allclose(ends[:-1], done[updates - 1 :: updates][:-1])
    assert ends[-1] == pytest.approx(run.timeline.end_ps.max())
    assert set(timeline.step.tolist()) == set(range(12))
    part = timeline.between(4, 8)
    assert np.allclose(part.step_seconds(), timeline.step_seconds()[4:8])
    with pytest.raises(ProgramError, match="expected the same number of updates in every step"):
        number_steps(run.timeline, 7)


def test_memory_counts_the_states_where_they_are():
    """Replicas hold no optimizer states; the rank for the parameters does, and the gradients of an update."""
    work = Workload(global_batch=8, optimizer=Optimizer(kind="adamw"))
    found = simulate_plan(plan_under("backup:1", workload=work), GRAPH, COST.cluster, cost=COST)
    held = [dict(use.parts) for use in found.memory]
    size = parameter_bytes(GRAPH)
    assert [parts["optimizer states"] for parts in held[:4]] == [0] * 4
    assert held[4]["optimizer states"] == pytest.approx(2 * size, rel=0.01)
    assert held[4]["received"] >= 3 * size
    assert len(found.ranks) == 5


def test_texts_are_read():
    assert read_policy("partial:4:20") == ExchangePolicy(kind="partial", number=4, bridge_after=20)
    assert read_policy("delay:0").num_used(8) == 8
    assert read_policy("some/file.py:Mine") is None
    assert with_policy("backup:1", 4).servers == (3,)
    assert with_policy("partial:2", 4).servers == ()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("dealy:2", "did you mean 'delay'"),
        ("backup", r"expected backup:B, .* with whole numbers"),
        ("backup:1:2", r"expected backup:B, .* with whole numbers"),
        ("backup:-1", r"expected backup:B, .* with whole numbers"),
        ("backup:²", r"expected backup:B, .* with whole numbers"),
        ("partial:1", "P of 2 or more"),
        ("partial:2:0", "T of 1 or more"),
        ("backup:4", r"for 4 replicas; expected a number of at most 3"),
        ("partial:6", r"for 5 replicas; expected a number of at most 5"),
    ],
)
def test_invalid_texts_are_refused(policy, message):
    with pytest.raises(PlanError, match=message):
        plan_under(policy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_microbatches": 8}, "expected one microbatch for each replica"),
        ({"schedule": "pipedream"}, "an exchange with|given for a plan with the schedule pipedream"),
        ({"exchange": GradientExchange(policy="backup:1", servers=(0,))}, "at most one, rank 4"),
        ({"exchange": GradientExchange(policy="backup:1", servers=(7,))}, "at most one, rank 4"),
        ({"recompute": ((0, 2),)}, "given for a plan with recomputation"),
        ({"compiled": True}, "given for a plan with compiled layers"),
        ({"workload": Workload(global_batch=8, kind="inference")}, "a kind other than training"),
    ],
)
def test_plans_that_policies_cannot_train_are_refused(changes, message):
    with pytest.raises(PlanError, match=f"(?i){message}"):
        plan_under("backup:1", **changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "backup:1"}, "with 0 servers; expected 1"),
        ({"policy": "partial:2", "servers": (3,)}, "with 1 servers; expected 0"),
        ({"policy": "partial:2", "zero": 1}, r"given with zero = 1"),
        ({"policy": "mine.py:Mine"}, "expected the 16 hexadecimal digits"),
        ({"policy": "partial:2", "policy_hash": "0" * 16}, "and none for a named policy"),
        ({"policy_hash": "0" * 16}, "without a policy"),
    ],
)
def test_exchanges_that_contradict_a_policy_are_refused(options, message):
    with pytest.raises(PlanError, match=message):
        GradientExchange(**options)


def test_groups_without_number_are_refused():
    with pytest.raises(ProgramError, match="which may be 735,471 groups; at most 20,000 are simulated"):
        step_of("partial:8", 24, FixedCost(cluster=small_cluster(devices=24)))


def test_a_plan_under_a_policy_has_no_fixed_program():
    with pytest.raises(PlanError, match="decides in the run which instructions follow"):
        build_program(plan_under("backup:1"), GRAPH)


def test_the_controller_has_the_numbers_of_the_plan():
    controller = make_controller(plan_under("partial:2:9").exchange, 5, 7, 48)
    assert (controller.group_size, controller.bridge_after, controller.num_iterations) == (2, 9, 7)
    assert controller.num_bytes == 48


BACKWARDS = """
from dataclasses import replace
from meshwright.program.controllers import BackupWorkers
from meshwright.spec import Backward, Forward

class Backwards(BackupWorkers):
    def __init__(self, num_workers, num_steps, num_bytes):
        super().__init__(num_workers=num_workers, num_backups=0, num_versions=num_steps, num_bytes=num_bytes)

    def decide(self, state, event, now_ps):
        state, decision = super().decide(state, event, now_ps)
        last = self.num_versions - 1
        def turned(issue):
            if not isinstance(issue.instruction, (Forward, Backward)):
                return issue
            at = issue.instruction.microbatch
            at = (last - at // self.num_workers) * self.num_workers + at % self.num_workers
            return replace(issue, instruction=replace(issue.instruction, microbatch=at))
        return state, replace(decision, issues=tuple(map(turned, decision.issues)))
"""


def test_replicas_that_compute_steps_out_of_order_are_refused(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(BACKWARDS)
    plan = replace(plan_under("backup:0"), exchange=with_policy(f"{file}:Backwards", 5))
    with pytest.raises(ProgramError, match="Batches are read once"):
        check_policy(plan, 12)
