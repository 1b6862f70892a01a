"""`run` under exchange policies: losses, weights and decisions of real ranks, and what such runs do not have."""

import math
from dataclasses import replace

import pytest
import torch

from meshwright.program.controllers import make_controller, with_policy
from meshwright.simulator import replay_measured
from meshwright.simulator.policy_simulation import parameter_bytes
from meshwright.spec import (
    GradientExchange,
    Plan,
    PlanError,
    StagePlan,
    Timeline,
    Workload,
    load_shipped_graph,
    read_document,
    write_document,
)
from meshwright.spec.decision_log import DecisionLog
from meshwright.training import Job, check_losses, prepare, refuse_unchecked, run_plan
from meshwright.zoo import load_model
from tests.processes import run_ranks

pytestmark = pytest.mark.distributed
STEPS = 5


def plan_under(policy, devices=3):
    graph, exchange = load_shipped_graph("gpt-tiny"), with_policy(policy, devices)
    count = devices - len(exchange.servers)
    return Plan(
        model="gpt-tiny",
        graph_hash=graph.content_hash,
        cluster=f"{devices}xcpu",
        workload=Workload(global_batch=2 * count),
        stages=(StagePlan(start=0, stop=len(graph.layers), ranks=tuple(range(count))),),
        num_microbatches=count,
        exchange=exchange,
    )


def job_of(folder, policy, devices=3, **options):
    plan = write_document(plan_under(policy, devices), folder / "plan.json")
    return Job(plan=str(plan), num_steps=STEPS, num_recorded_steps=2, **options)


@pytest.mark.long
@pytest.mark.parametrize(("policy", "devices"), [("backup:0", 3), ("partial:2", 2)])
def test_with_all_gradients_a_run_has_the_losses_of_one_process(tmp_path, policy, devices, warm_ranks):
    job = job_of(tmp_path, policy, devices, save_model=str(tmp_path / "model.pt"))
    result = run_plan(job, tmp_path / "out")
    assert check_losses(job, result) < 1e-4
    saved, made = torch.load(tmp_path / "model.pt", weights_only=True), load_model("gpt-tiny").model.state_dict()
    assert saved.keys() == made.keys()
    assert any(not torch.equal(saved[name], made[name]) for name in made)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["backup:1", "delay:1"])
def test_the_decisions_of_a_run_are_those_of_the_simulator(tmp_path, policy, warm_ranks):
    result = run_plan(job_of(tmp_path, policy), tmp_path / "out")
    assert len(result.losses) == len(result.step_seconds) == STEPS
    assert all(math.isfinite(loss) for loss in result.losses)
    log, timeline = read_document(DecisionLog, result.decisions), read_document(Timeline, result.timeline)
    size = parameter_bytes(load_shipped_graph("gpt-tiny"))
    controller = make_controller(plan_under(policy).exchange, 2, STEPS, size)
    assert replay_measured(controller, log).log.issued.num_instructions == log.issued.num_instructions
    assert timeline.origin == "measured"
    assert timeline.num_ranks == 3
    # The middle of the run.
    assert result.first_recorded == 1
    assert timeline.step_seconds() == pytest.approx(result.step_seconds[1:3])
    used = 1 if policy == "backup:1" else 2
    assert result.gradients["applied"] == used * STEPS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": 1.0}, "whose runs have no --clip-norm"),
        ({"checkpoint": "kept"}, "whose runs have no --checkpoint"),
    ],
)
def test_what_such_runs_do_not_have_is_refused(tmp_path, options, message):
    with pytest.raises(PlanError, match=message):
        run_plan(job_of(tmp_path, "backup:1", **options), tmp_path / "out")


def test_losses_of_some_gradients_are_not_checked(tmp_path):
    with pytest.raises(PlanError, match="the exchange policy backup:1, under which updates take only some"):
        refuse_unchecked(job_of(tmp_path, "backup:1"))


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("backup:1", {}, "was prepared without num_steps"),
        ("backup:1", {"num_steps": 0}, "with num_steps=0"),
        ("backup:1", {"num_steps": 5, "clip_norm": 1.0}, "whose runs have no clip_norm"),
        ("", {"num_steps": 5}, "for a plan without an exchange policy"),
    ],
)
def test_arguments_that_do_not_fit_the_policy_are_refused(policy, options, message):
    plan = plan_under("backup:1")
    plan = plan if policy else replace(plan, exchange=GradientExchange())
    with pytest.raises(PlanError, match=message):
        prepare(None, None, None, None, plan=plan, **options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("few", "The run ended after 1 of 2 steps"),
        ("many", "A batch was given after 2 steps"),
        ("wrong size", "A batch with 3 samples was given; expected the plan's global batch of 4"),
        ("other batches", "read another first batch than rank 0"),
        ("failing", "this batch cannot be read"),
    ],
)
def test_wrong_batches_end_the_run_on_all_ranks(case, message, tmp_path):
    run_ranks("tests.training.policy_worker", 2, case, str(tmp_path))
    found = [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
    assert any(message in text for text in found)
    assert all(found), "every rank ends with an error"
