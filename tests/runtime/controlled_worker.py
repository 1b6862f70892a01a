"""Ranks of `test_controlled`: policies that train a small module over gloo, with workers of unequal speed."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore

from meshwright.program.controllers import BackupWorkers, BoundedDelay, PartialReduce, StoppedBackups
from meshwright.runtime.controlled import Replica, run_controlled
from meshwright.spec import MeshwrightError, write_document
from meshwright.spec.control import NOTHING
from meshwright.spec.instructions import OptimizerStep
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
        self.seconds = seconds

    def forward(self, inputs):
        for part in self.parts:
            time.sleep(self.seconds / len(self.parts))
            inputs = part(inputs)
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
    """Waits for more gradients than the workers send."""

    def decide(self, state, event, now_ps):
        following, decision = super().decide(state, event, now_ps)
        needless = [issue for issue in decision.issues if not isinstance(issue.instruction, OptimizerStep)]
        if len(needless) < len(decision.issues) and getattr(event, "instruction", None) is not None:
            return following, type(decision)(issues=())
        return following, decision


COUNTS = {"num_workers": 3, "num_bytes": NUM_BYTES}
CASES = {
    "backup": BackupWorkers(num_backups=1, num_versions=VERSIONS, **COUNTS),
    "stopped": StoppedBackups(num_backups=1, num_versions=VERSIONS, **COUNTS),
    "delay": BoundedDelay(max_delay=1, num_clocks=VERSIONS, **COUNTS),
    "partial": PartialReduce(group_size=2, num_iterations=VERSIONS, bridge_after=2, **COUNTS),
    "silent": Silent(),
    "twice": Twice(num_backups=1, num_versions=VERSIONS, **COUNTS),
    "wrong bytes": BackupWorkers(num_workers=3, num_backups=1, num_versions=2, num_bytes=8),
    "failing": BackupWorkers(num_backups=1, num_versions=VERSIONS, **COUNTS),
}


def failing_loss(module: nn.Module, microbatch: int) -> torch.Tensor:
    if microbatch >= COUNTS["num_workers"]:
        raise ValueError("this batch cannot be read")
    return loss_on(module, microbatch)


def run(case: str, out: Path) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=rank == 0, wait_for_workers=False
    )
    module = make_module()
    if rank == 1:
        module.insert(0, Late(LATE_S))
    replica = Replica(module, failing_loss if case == "failing" else loss_on, make_optimizer)
    found = {}
    start = time.perf_counter()
    try:
        decided = run_controlled(CASES[case], replica, rank=rank, num_ranks=world_size, store=store, timeout_s=60)
        if decided is not None:
            write_document(decided.log, out / "log.json")
            found["seconds"] = time.perf_counter() - start
            counts = ("applied", "dropped", "abandoned")
            found["counts"] = {name: getattr(decided.state, name, None) for name in counts}
    except MeshwrightError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    found["parameters"] = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()]).tolist()
    (out / f"{rank}.json").write_text(json.dumps(found))
    store.add("written", 1)
    # The store is that of rank 0, which stays until all have written.
    while rank == 0 and store.add("written", 0) < world_size and time.perf_counter() - start < 60:
        time.sleep(0.01)


if __name__ == "__main__":
    _, size, name, folder = sys.argv
    fork_ranks(int(size), lambda: run(name, Path(folder)))
