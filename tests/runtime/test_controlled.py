"""Policies on real workers: their guarantees, the parameters that their logs say, and decisions that repeat."""

import json

import pytest
import torch

from meshwright.program import ProgramBuilder, decided_program
from meshwright.spec import Backward, OptimizerStep, ProgramError, Receive, Send, read_document
from meshwright.spec.decision_log import DecisionLog, repeat_decisions
from tests.processes import run_ranks
from tests.runtime.controlled_worker import CASES, COUNTS, VERSIONS, loss_on, make_module, make_optimizer

pytestmark = pytest.mark.distributed
NUM_WORKERS = COUNTS["num_workers"]


def run(case, folder, *, num_ranks=NUM_WORKERS + 1):
    """What every rank found, and the log of the deciding one."""
    run_ranks("tests.runtime.controlled_worker", num_ranks, case, str(folder))
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    return found, read_document(DecisionLog, folder / "log.json") if (folder / "log.json").exists() else None


class Model:
    """One replica, stepped by hand."""

    def __init__(self):
        self.module = make_module()
        self.parameters = list(self.module.parameters())
        self.optimizer = make_optimizer(self.parameters)

    def gradient(self, microbatch):
        gradients = torch.autograd.grad(loss_on(self.module, microbatch), self.parameters)
        return torch.cat([gradient.reshape(-1) for gradient in gradients])

    def step(self, gradients):
        sizes = [parameter.numel() for parameter in self.parameters]
        mean = torch.stack(gradients).mean(0)
        for parameter, part in zip(self.parameters, mean.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        self.optimizer.step()

    def loss(self, microbatch):
        return loss_on(self.module, microbatch).item()

    def set(self, vector):
        torch.nn.utils.vector_to_parameters(torch.tensor(vector), self.parameters)

    def vector(self):
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters]).tolist()


def ends(log, kind):
    """(instruction, rank, handle) of the watched instructions of a kind, in the order of their ends."""
    for event, _, _ in log.decisions():
        if isinstance(getattr(event, "instruction", None), kind):
            yield event.instruction, event.rank, event.handle


@pytest.mark.parametrize("case", ["backup", "stopped"])
def test_updates_take_the_first_gradients_of_their_version(case, tmp_path):
    found, log = run(case, tmp_path)
    model, counts = Model(), found[0]["counts"]
    sends = [send.microbatch for send, _, _ in ends(log, Send)]
    for version in range(VERSIONS):
        first = [microbatch for microbatch in sends if microbatch // NUM_WORKERS == version][: NUM_WORKERS - 1]
        assert len(first) == NUM_WORKERS - 1
        model.step([model.gradient(microbatch) for microbatch in first])
    assert found[NUM_WORKERS]["parameters"] == pytest.approx(model.vector(), rel=1e-4, abs=1e-6)
    assert counts["applied"] == VERSIONS * (NUM_WORKERS - 1)
    # The late worker falls behind, or is stopped.
    assert counts["dropped"] > 0 if case == "backup" else counts["abandoned"] > 0


def test_workers_are_never_further_apart_than_the_bound(tmp_path):
    """A clock counts applied gradients. Pulled parameters may be newer than at the decision, so nothing is computed."""
    found, log = run("delay", tmp_path)
    clocks, updates = [0] * NUM_WORKERS, []
    for event, _, decision in log.decisions():
        if isinstance(getattr(event, "instruction", None), OptimizerStep):
            clocks[updates.pop(0)] += 1
        for issue in decision.issues:
            if isinstance(issue.instruction, Receive) and issue.rank == NUM_WORKERS:
                updates.append(issue.instruction.microbatch % NUM_WORKERS)
            if isinstance(issue.instruction, Backward):
                assert clocks[issue.rank] - min(clocks) <= CASES["delay"].max_delay
    assert clocks == [VERSIONS] * NUM_WORKERS
    before, after = Model(), Model()
    after.set(found[NUM_WORKERS]["parameters"])
    microbatches = range(1000, 1010)
    assert sum(map(after.loss, microbatches)) < sum(map(before.loss, microbatches))


def test_groups_have_the_mean_of_their_gradients(tmp_path):
    found, log = run("partial", tmp_path, num_ranks=NUM_WORKERS)
    models, done = [Model() for _ in range(NUM_WORKERS)], [0] * NUM_WORKERS
    for group in groups_of(log):
        gradients = [models[worker].gradient(done[worker] * NUM_WORKERS + worker) for worker in group]
        for worker in group:
            models[worker].step(gradients)
            done[worker] += 1
    assert done == [VERSIONS] * NUM_WORKERS
    for rank, model in enumerate(models):
        assert found[rank]["parameters"] == pytest.approx(model.vector(), rel=1e-4, abs=1e-6)


def groups_of(log):
    for _, _, decision in log.decisions():
        groups = dict.fromkeys(issue.group for issue in decision.issues if issue.group)
        yield from groups


@pytest.mark.matrix
@pytest.mark.parametrize("case", ["backup", "stopped", "delay", "partial"])
def test_decisions_repeat_and_the_log_is_a_program(case, tmp_path):
    num_ranks = NUM_WORKERS + (case != "partial")
    _, log = run(case, tmp_path, num_ranks=num_ranks)
    repeat_decisions(CASES[case], log)
    other = "stopped" if case == "backup" else "backup"
    with pytest.raises(ProgramError, match="decision 0 differs"):
        repeat_decisions(CASES[other], log)
    program = decided_program(ProgramBuilder(num_ranks).build(schedule="controlled", plan_hash=""), log)
    assert program.body.num_instructions == log.issued.num_instructions


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("silent", "The controller decided nothing at the start"),
        ("twice", "was issued twice"),
        ("wrong bytes", "Give the controller the bytes of the model."),
        ("failing", "of the controlled run failed: ValueError: this batch cannot be read"),
    ],
)
def test_a_failed_run_ends_on_all_ranks(case, message, tmp_path):
    found, log = run(case, tmp_path)
    assert log is None
    assert message in found[0]["error"]
    assert all("The controlled run failed" in item["error"] for item in found[1:])
