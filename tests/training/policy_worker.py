"""Ranks of `test_policy_run`: scripts that hand wrong batches to a trainer under an exchange policy."""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

from meshwright.capture import capture_model
from meshwright.program.controllers import with_policy
from meshwright.spec import MeshwrightError, Plan, StagePlan, Workload
from meshwright.training import prepare
from tests.processes import fork_ranks

NUM_BATCHES = {"few": 1, "many": 3}


def fail_later(model: nn.Module) -> None:
    """Let the second forward from now on fail."""
    calls = []

    def count(*_: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("this batch cannot be read")

    model.register_forward_pre_hook(count)


def run(case: str, out: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    inputs = torch.randn(4, 3) + (rank if case == "other batches" else 0)
    batch = inputs[:3] if case == "wrong size" else inputs
    loss = lambda outputs: outputs.square().mean()
    graph = capture_model(model, inputs, loss=loss, verify=False).graph
    plan = Plan(
        model="script",
        graph_hash=graph.content_hash,
        cluster="2xcpu",
        workload=Workload(global_batch=4),
        stages=(StagePlan(start=0, stop=len(graph.layers), ranks=(0, 1)),),
        num_microbatches=2,
        exchange=with_policy("partial:2", 2),
    )
    error = ""
    try:
        trainer = prepare(
            model, loss, lambda items: torch.optim.SGD(items, lr=0.1), (inputs, ()), plan=plan, num_steps=2
        )
        if case == "failing" and rank == 1:
            fail_later(model)
        for _ in range(NUM_BATCHES.get(case, 2)):
            trainer.step(batch)
        trainer.finish()
    except MeshwrightError as raised:
        error = f"{type(raised).__name__}: {raised}"
    (out / f"{rank}.txt").write_text(error)
    # The store is that of rank 0, which stays until all have written.
    while len(list(out.glob("?.txt"))) < 2:
        time.sleep(0.01)


if __name__ == "__main__":
    _, size, name, folder = sys.argv
    fork_ranks(int(size), lambda: run(name, Path(folder)))
