"""Policies on real workers: their guarantees, the parameters that their logs say, and decisions that repeat."""

import json
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from meshwright.program import ProgramBuilder, decided_program
from meshwright.runtime.controlled import Abandoned, DispatchedWork, Replica, run_controlled
from meshwright.simulator import replay_measured
from meshwright.spec import Backward, Forward, OptimizerStep, ProgramError, ReduceScatter, Send, read_document
from meshwright.spec.control import Decision, Issue
from meshwright.spec.decision_log import DecisionLog, repeat_decisions
from tests.processes import run_ranks
from tests.program.delays import follow_clocks
from tests.runtime.controlled_worker import CASES, COUNTS, DEATHS, VERSIONS, loss_on, make_module, make_optimizer

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


def test_the_deciding_rank_is_stopped_too(tmp_path):
    found, _ = run("late deciding", tmp_path)
    assert found[0]["counts"]["abandoned"] > VERSIONS / 2
    assert found[0]["num_whole"] < VERSIONS / 2, "its computations end when they are abandoned"


def test_workers_are_never_further_apart_than_the_bound(tmp_path):
    """A clock counts applied gradients. Pulled parameters may be newer than at the decision, so nothing is computed."""
    found, log = run("delay", tmp_path)
    clocks, lead = follow_clocks(log, NUM_WORKERS)
    assert lead <= CASES["delay"].max_delay
    assert clocks == [VERSIONS] * NUM_WORKERS
    before, after = Model(), Model()
    after.set(found[NUM_WORKERS]["parameters"])
    microbatches = range(1000, 1010)
    assert sum(map(after.loss, microbatches)) < sum(map(before.loss, microbatches))


@pytest.mark.parametrize("case", ["partial", "closing"])
def test_groups_have_the_mean_of_their_gradients(case, tmp_path):
    found, log = run(case, tmp_path, num_ranks=NUM_WORKERS)
    if case == "closing":
        opened = [tuple(group) for _, group in found[0]["opened"]]
        assert len(opened) > len(set(opened)), "a group that was closed is opened again"
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
def test_decisions_repeat_in_the_simulator_and_the_log_is_a_program(case, tmp_path):
    num_ranks = NUM_WORKERS + (case != "partial")
    found, log = run(case, tmp_path, num_ranks=num_ranks)
    repeat_decisions(CASES[case], log)
    simulated = replay_measured(CASES[case], log)
    assert str(simulated.state) == found[0]["state"]
    ended = [int(log.end_ps[event.handle]) for event, _, _ in log.decisions() if hasattr(event, "handle")]
    assert ended == log.now_ps[1:].tolist()
    with pytest.raises(ProgramError, match=r"ended before it could begin|Event .* of the simulation is"):
        replay_measured(CASES[case], replace(log, end_ps=log.end_ps[::-1].copy()))
    with pytest.raises(ProgramError, match="expected the log of a run on real ranks"):
        replay_measured(CASES[case], simulated.log)
    other = "stopped" if case == "backup" else "backup"
    with pytest.raises(ProgramError, match="decision 0 differs"):
        repeat_decisions(CASES[other], log)
    program = decided_program(ProgramBuilder(num_ranks).build(schedule="controlled", plan_hash=""), log)
    assert program.body.num_instructions == log.issued.num_instructions


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("failing", "of the controlled run failed: ValueError: this batch cannot be read"),
        ("silent", "The controller decided nothing at the start"),
        ("twice", "was issued twice"),
        ("stuck", "The controlled run stands still: OptimizerStep"),
        ("wrong bytes", "Give the controller the bytes of the model."),
    ],
)
def test_a_failed_run_ends_on_all_ranks(case, message, tmp_path):
    found, log = run(case, tmp_path)
    assert log is None
    assert message in found[0]["error"]
    assert all("leaves the controlled run" in item["error"] for item in found[1:])
    if case == "failing" and (rank := int(found[0]["error"].partition("Rank ")[2][0])):
        assert "ValueError: this batch cannot be read" in found[rank]["error"]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("case", "killed", "message"),
    [
        ("killed", 2, r"RunError: Rank 2 .* has died: it gave no sign of life for 2 s in Forward\(.*\) of rank 2"),
        ("deciding killed", 1, "Rank 0 leaves the controlled run: .* gave no sign of life"),
    ],
)
def test_a_rank_that_is_killed_ends_the_run(case, killed, message, tmp_path):
    run_ranks("tests.runtime.controlled_worker", NUM_WORKERS + 1, case, str(tmp_path))
    for rank in range(NUM_WORKERS + 1):
        if rank != killed:
            found = json.loads((tmp_path / f"{rank}.json").read_text())
            assert re.search(message if rank == 0 else "leaves the controlled run", found["error"])


def run_with_death(case, folder):
    """What the ranks found, by rank, and the log; its decisions repeat, also in the simulator."""
    policy, dead, _ = DEATHS[case]
    num_ranks = NUM_WORKERS + (policy != "partial")
    run_ranks("tests.runtime.controlled_worker", num_ranks, case, str(folder))
    found = {rank: folder / f"{rank}.json" for rank in range(num_ranks)}
    found = {rank: json.loads(path.read_text()) for rank, path in found.items() if path.exists()}
    assert "error" not in found[0], found[0]
    log = read_document(DecisionLog, folder / "log.json")
    assert list(log.deaths) == [dead]
    if ", hangs" in case:
        assert "the deciding rank took it for dead" in found.pop(dead)["error"]
    assert found.keys() == set(range(num_ranks)) - {dead}
    assert str(repeat_decisions(CASES[policy], log)) == found[0]["state"]
    assert str(replay_measured(CASES[policy], log).state) == found[0]["state"]
    with pytest.raises(ProgramError, match=f"Rank {dead} died in this run"):
        decided_program(ProgramBuilder(num_ranks).build(schedule="controlled", plan_hash=""), log)
    return found, log


@pytest.mark.parametrize(
    "case",
    [
        "backup, killed",
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in ("backup, killed in a send", "backup, hangs", "synchronous, killed", "stopped, killed")
        ),
    ],
)
def test_updates_go_on_without_a_worker_that_died(case, tmp_path):
    found, log = run_with_death(case, tmp_path)
    model, least = Model(), NUM_WORKERS - 1
    sends = [send.microbatch for send, _, _ in ends(log, Send)]
    for version in range(VERSIONS):
        arrived = [microbatch for microbatch in sends if microbatch // NUM_WORKERS == version]
        first = arrived if case.startswith("synchronous") else arrived[:least]
        assert first, "one that arrived too late begins with the next version, so a death may leave one gradient"
        model.step([model.gradient(microbatch) for microbatch in first])
    assert found[NUM_WORKERS]["parameters"] == pytest.approx(model.vector(), rel=1e-4, abs=1e-6)


@pytest.mark.long
def test_workers_do_not_wait_for_one_that_died(tmp_path):
    _, log = run_with_death("delay, killed", tmp_path)
    clocks, _ = follow_clocks(log, NUM_WORKERS)
    assert clocks[:2] == [VERSIONS] * 2
    assert clocks[2] < VERSIONS


@pytest.mark.parametrize(
    "case",
    [
        "partial, killed in a sum",
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in ("partial, killed", "partial, hangs", "partial, hangs in a sum")
        ),
    ],
)
def test_groups_form_without_a_worker_that_died(case, tmp_path):
    found, log = run_with_death(case, tmp_path)
    models, done, num_lost = [Model() for _ in range(NUM_WORKERS)], [0] * NUM_WORKERS, 0
    for group, is_lost in sums_of(log):
        gradients = [models[worker].gradient(done[worker] * NUM_WORKERS + worker) for worker in group]
        num_lost += is_lost
        for worker in group:
            if not is_lost:
                models[worker].step(gradients)
            done[worker] += 1
    assert num_lost == case.endswith("in a sum")
    assert done[:2] == [VERSIONS] * 2
    for rank in found:
        assert found[rank]["parameters"] == pytest.approx(models[rank].vector(), rel=1e-4, abs=1e-6)


def sums_of(log):
    """Members of each sum, and whether a death has ended it."""
    handle = 0
    for _, _, decision in log.decisions():
        sums = {}
        for issue in decision.issues:
            if issue.group:
                sums[issue.group] = int(log.end_ps[handle]) in log.deaths.values()
            handle += 1
        yield from sums.items()


@pytest.mark.long
def test_a_death_at_the_end_costs_nothing(tmp_path):
    """All is done, but the rank that dies does not answer."""
    run_ranks("tests.runtime.controlled_worker", NUM_WORKERS + 1, "synchronous, killed at the end", str(tmp_path))
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1, 3)]
    assert all("error" not in item for item in found)
    assert found[0]["counts"]["applied"] == VERSIONS * NUM_WORKERS


@pytest.mark.long
def test_nothing_goes_on_without_the_parameters(tmp_path):
    run_ranks("tests.runtime.controlled_worker", NUM_WORKERS + 1, "backup, server killed", str(tmp_path))
    found = [json.loads((tmp_path / f"{rank}.json").read_text())["error"] for rank in range(NUM_WORKERS)]
    assert "Rank 3 of the controlled run has died. It had the parameters" in found[0]
    assert all("leaves the controlled run" in error for error in found[1:])


@pytest.mark.long
def test_a_slow_sender_delays_no_update(tmp_path):
    """Its sends take long, not its computations; the others need only each other."""
    found, log = run("slow link", tmp_path)
    sends = [send.microbatch % NUM_WORKERS for send, _, _ in ends(log, Send)]
    assert sends.count(1) < VERSIONS / 2
    assert found[0]["counts"]["applied"] == VERSIONS * (NUM_WORKERS - 1)


def test_timers_ring_in_their_order(tmp_path):
    found, log = run("sleepy", tmp_path, num_ranks=1)
    assert found[0]["state"] == "(1, 2, 3, 4)"
    assert (np.diff(log.now_ps) >= 0).all()
    assert [moment >= number * 10**11 for number, moment in enumerate(log.now_ps.tolist()[:5])] == [True] * 5


def replica_of(loss=loss_on):
    return Replica(make_module(), loss, make_optimizer)


def dispatched(kind, *, is_wanted=True, arrived=(), **facts):
    return DispatchedWork(kind(stage=0, version=0, **facts), arrived, lambda: is_wanted)


def test_a_backward_is_of_its_own_forward():
    replica, model = replica_of(), Model()
    for microbatch in (0, 1):
        replica.compute(dispatched(Forward, microbatch=microbatch))
    replica.compute(dispatched(Backward, microbatch=0))
    sent = replica.outgoing(Send(stage=0, peer=1, microbatch=0, payload="gradient", num_bytes=replica.num_bytes))
    assert sent.tolist() == pytest.approx(model.gradient(0).tolist(), rel=1e-5)
    with pytest.raises(ProgramError, match="microbatch 7 was issued without its forward"):
        replica.compute(dispatched(Backward, microbatch=7))


def test_an_abandoned_forward_leaves_the_module_usable():
    replica = replica_of()
    with pytest.raises(Abandoned):
        replica.compute(dispatched(Forward, microbatch=0, is_wanted=False))
    with pytest.raises(Abandoned):
        replica.compute(dispatched(Backward, microbatch=0, is_wanted=False))
    with pytest.raises(ProgramError, match="its forward alone was abandoned"):
        replica.compute(dispatched(Backward, microbatch=0))
    assert loss_on(replica.module, 0) > 0


def test_an_update_without_a_gradient_that_was_lost_is_skipped():
    replica = replica_of()
    before = [parameter.clone() for parameter in replica.module.parameters()]
    replica.summed(None, torch.ones(replica.num_bytes // 4), 1)
    replica.compute(replace(dispatched(OptimizerStep), num_lost=1))
    assert all(map(torch.equal, before, replica.module.parameters()))
    with pytest.raises(ProgramError, match="An update was issued that waits for no gradient"):
        replica.compute(dispatched(OptimizerStep))


def test_an_update_uses_a_sum_once():
    replica = replica_of()
    replica.summed(None, torch.ones(replica.num_bytes // 4), 2)
    replica.compute(dispatched(OptimizerStep))
    with pytest.raises(ProgramError, match="waits for no gradient"):
        replica.compute(dispatched(OptimizerStep))


@pytest.mark.parametrize(("num_ranks", "deciding"), [(3, 0), (4, 4)])
def test_ranks_that_do_not_fit_the_controller_are_refused(num_ranks, deciding):
    with pytest.raises(
        ProgramError, match=f"{num_ranks} ranks take part, and rank {deciding} decides; the controller uses 4"
    ):
        run_controlled(CASES["backup"], None, rank=0, num_ranks=num_ranks, store=None, deciding=deciding)


@pytest.mark.parametrize("name", ["timeout_s", "death_after_s"])
def test_a_limit_that_is_not_above_zero_is_refused(name):
    with pytest.raises(ProgramError, match=f"{name} is 0; expected a number of seconds above 0"):
        run_controlled(CASES["backup"], None, rank=0, num_ranks=4, store=None, **{name: 0})


SCATTER = ReduceScatter(stage=0, bucket=0, num_bytes=4)
SEND = Send(stage=0, peer=1, microbatch=0, payload="gradient", num_bytes=4)


@pytest.mark.parametrize(
    ("issue", "message"),
    [
        (Issue(rank=0, stream="exchange", instruction=SCATTER, group=(0,)), "is not run under a controller"),
        (Issue(rank=0, stream="send", instruction=SEND), r"the group \(\); expected two ranks, \(sender, receiver\)"),
    ],
)
def test_issues_that_real_ranks_cannot_run_are_refused(issue, message):
    @dataclass(frozen=True)
    class Once:
        initial: int = 0

        def decide(self, state, event, now_ps):
            return state, Decision(issues=(issue,))

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(ProgramError, match=message):
        run_controlled(Once(), None, rank=0, num_ranks=1, store=store, timeout_s=10)
