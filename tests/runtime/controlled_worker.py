"""Ranks of `test_controlled`: policies that train a small module over gloo, with workers of unequal speed."""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore

from meshwright.program.controllers import BackupWorkers, BoundedDelay, PartialReduce, StoppedBackups
from meshwright.program.controllers.iterations import SERVER
from meshwright.runtime.controlled import Replica, deciding, run_controlled
from meshwright.spec import MeshwrightError, write_document
from meshwright.spec.control import NOTHING, Decision, Issue, Rang, Started, Timer
from meshwright.spec.instructions import Forward, OptimizerStep
from tests.processes import fork_ranks

RATE, LATE_S, VERSIONS = 0.1, 0.15, 8


def make_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


NUM_BYTES = 4 * sum(parameter.numel() for parameter in make_module().parameters())


def loss_on(module: nn.Module, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(microbatch)
    inputs = torch.randn(16, 4, generator=generator)
    return ((module(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()


def make_optimizer(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.5)


class Late(nn.Module):
    """A layer that makes its worker late; it computes in small parts, so that it can be stopped."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Identity() for _ in range(15))
        self.seconds, self.num_whole = seconds, 0

    def forward(self, inputs):
        for part in self.parts:
            time.sleep(self.seconds / len(self.parts))
            inputs = part(inputs)
        self.num_whole += 1
        return inputs


class Silent:
    initial = None

    def decide(self, state, event, now_ps):
        return state, NOTHING


class Twice(BackupWorkers):
    """Decides every update twice."""

    def decide(self, state, event, now_ps):
        following, decision = super().decide(state, event, now_ps)
        if isinstance(getattr(event, "instruction", None), OptimizerStep):
            return following, type(decision)(issues=decision.issues * 2)
        return following, decision


class Stuck(BackupWorkers):
    """Waits for the gradients of all versions before the first update, which has to come first."""

    def decide(self, state, event, now_ps):
        following, decision = super().decide(state, event, now_ps)
        if not isinstance(event, Started):
            return following, decision
        *issues, update = decision.issues
        later = Issue(rank=self.num_workers, stream="compute", instruction=OptimizerStep(stage=SERVER, version=99))
        late = event.next_handle + len(decision.issues)
        return following, Decision(issues=(*issues, replace(update, waits=(late,), need=None), later))


class Sleepy:
    """Sets timers alone, out of order; the last one issues a forward."""

    num_ranks = 1
    initial = ()

    def decide(self, state, event, now_ps):
        if isinstance(event, Started):
            return state, Decision(timers=tuple(Timer(at_ps=n * 10**11, number=n) for n in (4, 1, 3, 2)))
        if not isinstance(event, Rang):
            return state, NOTHING
        rung = (*state, event.number)
        forward = Issue(rank=0, stream="compute", instruction=Forward(stage=0, microbatch=0, version=0))
        return rung, Decision(issues=(forward,)) if len(rung) == 4 else NOTHING


COUNTS = {"num_workers": 3, "num_bytes": NUM_BYTES}
CASES = {
    "backup": BackupWorkers(num_backups=1, num_versions=VERSIONS, **COUNTS),
    "stopped": StoppedBackups(num_backups=1, num_versions=VERSIONS, **COUNTS),
    "delay": BoundedDelay(max_delay=1, num_clocks=VERSIONS, **COUNTS),
    "synchronous": BackupWorkers(num_backups=0, num_versions=VERSIONS, **COUNTS),
    "partial": PartialReduce(group_size=2, num_iterations=VERSIONS, bridge_after=2, **COUNTS),
    "late deciding": StoppedBackups(num_backups=1, num_versions=VERSIONS, **COUNTS),
    "closing": PartialReduce(group_size=2, num_iterations=VERSIONS, bridge_after=2, **COUNTS),
    "silent": Silent(),
    "stuck": Stuck(num_backups=1, num_versions=VERSIONS, **COUNTS),
    "sleepy": Sleepy(),
    "slow link": BackupWorkers(num_backups=1, num_versions=VERSIONS, **COUNTS),
    "killed": BackupWorkers(num_backups=0, num_versions=1000, **COUNTS),
    "deciding killed": BackupWorkers(num_backups=0, num_versions=1000, **COUNTS),
    "twice": Twice(num_backups=1, num_versions=VERSIONS, **COUNTS),
    "wrong bytes": BackupWorkers(num_workers=3, num_backups=1, num_versions=2, num_bytes=8),
    "failing": BackupWorkers(num_backups=1, num_versions=VERSIONS, **COUNTS),
}


def failing_loss(module: nn.Module, microbatch: int) -> torch.Tensor:
    if microbatch >= COUNTS["num_workers"]:
        raise ValueError("this batch cannot be read")
    return loss_on(module, microbatch)


def deadly_loss(module: nn.Module, microbatch: int) -> torch.Tensor:
    if microbatch >= VERSIONS * COUNTS["num_workers"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return loss_on(module, microbatch)


def dying(module: nn.Module, microbatch: int) -> torch.Tensor:
    """A loss in which the rank is killed in its third iteration."""
    if microbatch >= 2 * COUNTS["num_workers"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return loss_on(module, microbatch)


def hanging(module: nn.Module, microbatch: int) -> torch.Tensor:
    """A loss in which the rank is stopped in its third iteration."""
    if microbatch // COUNTS["num_workers"] == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    return loss_on(module, microbatch)


class DyingInSum(Replica):
    """A replica that is killed in its third sum."""

    num_sums = 0

    def summand(self, instruction):
        self.num_sums += 1
        if self.num_sums == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().summand(instruction)


class DyingAtTheEnd(Replica):
    """A replica that is killed after its last send, while the server makes the last update."""

    def outgoing(self, send):
        if send.microbatch // COUNTS["num_workers"] == VERSIONS - 1:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return super().outgoing(send)


class SlowInTheEnd(Replica):
    """A server whose last update takes long."""

    num_updates = 0

    def compute(self, work):
        self.num_updates += isinstance(work.instruction, OptimizerStep)
        time.sleep(1.0 * (self.num_updates == VERSIONS))
        super().compute(work)


class StoppedInSum(Replica):
    """A replica that stops for some seconds in its third sum, until it is taken for dead."""

    num_sums = 0

    def summand(self, instruction):
        self.num_sums += 1
        if self.num_sums == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().summand(instruction)


class DyingInSend(Replica):
    """A replica that is killed in its third send."""

    num_sends = 0

    def outgoing(self, send):
        self.num_sends += 1
        if self.num_sends == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().outgoing(send)


class SlowLink(Replica):
    """A replica whose sends take long."""

    def outgoing(self, send):
        time.sleep(LATE_S)
        return super().outgoing(send)


# Ranks that die in a forward, when all connections are made and none of them is in use.
KILLED = {"killed": 2, "deciding killed": 1}
TIMEOUT_S = {"killed": 60, "deciding killed": 10}
DEATH_AFTER_S = 2
# Runs that go on without a rank: the policy, the rank, and the loss or the replica by which it ends or stops.
DEATHS = {
    "backup, killed": ("backup", 2, dying),
    "backup, killed in a send": ("backup", 2, DyingInSend),
    "backup, hangs": ("backup", 2, hanging),
    "synchronous, killed": ("synchronous", 2, dying),
    "stopped, killed": ("stopped", 2, dying),
    "delay, killed": ("delay", 2, dying),
    "partial, killed": ("partial", 2, dying),
    "partial, killed in a sum": ("partial", 2, DyingInSum),
    "partial, hangs": ("partial", 2, hanging),
    "backup, server killed": ("backup", 3, DyingInSend),
    "synchronous, killed at the end": ("synchronous", 2, DyingAtTheEnd),
    "partial, hangs in a sum": ("partial", 2, StoppedInSum),
}


def run(case: str, out: Path) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=rank == 0, wait_for_workers=False
    )
    module = make_module()
    late = Late(LATE_S)
    if rank == (case != "late deciding") and case not in ("slow link", *KILLED):
        module.insert(0, late)
    kind = SlowLink if (rank, case) == (1, "slow link") else Replica
    loss = deadly_loss if rank == KILLED.get(case) else failing_loss if case == "failing" else loss_on
    policy, dead, how = DEATHS.get(case, (case, None, None))
    if rank == dead:
        kind, loss = (how, loss) if isinstance(how, type) else (kind, how)
    if how is DyingAtTheEnd and rank == world_size - 1:
        kind = SlowInTheEnd
    replica = kind(module, loss, make_optimizer)
    found = {}
    if case == "closing":
        # Every group is closed when another one is used.
        deciding.MOST_OPEN, connect = 1, deciding.Decider._connect
        opened = found["opened"] = []

        def noted(self, group, user):
            number = connect(self, group, user)
            if number not in [other for other, _ in opened]:
                opened.append((number, group))
            return number

        deciding.Decider._connect = noted
    bury = deciding.Decider._bury

    def buried(self, rank):
        bury(self, rank)
        (out / "dead").touch()

    deciding.Decider._bury = buried
    start = time.perf_counter()
    try:
        decided = run_controlled(
            CASES[policy],
            replica,
            rank=rank,
            num_ranks=world_size,
            store=store,
            timeout_s=TIMEOUT_S.get(case, 60),
            deciding=1 if case == "deciding killed" else 0,
            death_after_s=DEATH_AFTER_S,
            survive_deaths=case not in KILLED,
        )
        if decided is not None:
            write_document(decided.log, out / "log.json")
            found["num_whole"] = late.num_whole
            found["seconds"] = time.perf_counter() - start
            counts = ("applied", "dropped", "abandoned")
            found["state"] = str(decided.state)
            found["counts"] = {name: getattr(decided.state, name, None) for name in counts}
    except MeshwrightError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    found["parameters"] = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()]).tolist()
    (out / f"{rank}.json").write_text(json.dumps(found))
    store.add("written", 1)
    # The store is that of rank 0, which stays until all have written.
    others = world_size - (case in KILLED or how not in (None, hanging, StoppedInSum))
    while rank == 0 and store.add("written", 0) < others and time.perf_counter() - start < 60:
        time.sleep(0.01)


def wake(size: int, folder: Path, case: str) -> None:
    """Continue a process that has stopped: when all others have written what they found, or when it is taken for dead.

    In a sum the others still have an old thread then, in which the sum ends.
    """
    while len(list(folder.glob("?.json"))) < size - 1 and not (
        case.endswith("in a sum") and (folder / "dead").exists()
    ):
        time.sleep(0.1)
    for child in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
        os.kill(int(child), signal.SIGCONT)


if __name__ == "__main__":
    _, size, name, folder = sys.argv
    if ", hangs" in name:
        threading.Thread(target=wake, args=(int(size), Path(folder), name), daemon=True).start()
    try:
        fork_ranks(int(size), lambda: run(name, Path(folder)))
    except SystemExit:
        if name not in (*KILLED, *DEATHS):
            raise
        # The others write what they found.
        while len(list(Path(folder).glob("?.json"))) < int(size) - 1:
            os.wait()
