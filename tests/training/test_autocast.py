"""Runs under autocast: the losses are those of one process under autocast, through stages and shares of ops."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch

from meshwright.cli.main import invoke
from meshwright.runtime import microbatch_seed
from meshwright.spec import Plan, Sharding, StagePlan, Workload, write_document
from meshwright.spec.shipped import load_shipped_graph
from meshwright.training import Job, run_plan
from meshwright.training.job import load_source, make_batches, make_optimizer
from tests.processes import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

GRAPH = load_shipped_graph("gpt-tiny")
NUM_STEPS, NUM_MICROBATCHES, SIZE = 3, 4, 4
PLAN = Plan(
    model="gpt-tiny",
    graph_hash=GRAPH.content_hash,
    cluster="2xcpu",
    workload=Workload(global_batch=NUM_MICROBATCHES * SIZE),
    stages=(StagePlan(start=0, stop=3, ranks=(0,)), StagePlan(start=3, stop=6, ranks=(1,))),
    num_microbatches=NUM_MICROBATCHES,
)
SPLIT = replace(PLAN, stages=(StagePlan(start=0, stop=6, ranks=(0,)),), sharding=Sharding(tensor=2))


def train_serially(autocast):
    source = load_source(PLAN, 0)
    optimizer = make_optimizer(list(source.model.parameters()), PLAN.workload.optimizer, None)
    losses = []
    for step, ((inputs,), (targets,)) in enumerate(islice(make_batches(source, 16, 0), NUM_STEPS)):
        total = 0.0
        for m in range(NUM_MICROBATCHES):
            rows = slice(m * SIZE, (m + 1) * SIZE)
            torch.manual_seed(microbatch_seed(0, step, m))
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = source.loss(source.model(inputs[rows]), targets[rows])
            (loss / NUM_MICROBATCHES).backward()
            total += loss.item() / NUM_MICROBATCHES
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.fixture(scope="module")
def wanted():
    return train_serially(True), train_serially(False)


@pytest.mark.long
@pytest.mark.parametrize("plan", [PLAN, SPLIT], ids=["stages", "shares"])
def test_losses_are_those_of_one_process_under_autocast(plan, wanted, tmp_path, warm_ranks, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = write_document(plan, tmp_path / "plan.json")
    found = run_plan(Job(plan=str(path), num_steps=NUM_STEPS, autocast="bfloat16"), tmp_path / "run").losses
    half, full = wanted
    # Shares of products are rounded each by itself; Adam amplifies what gradients of nearly nothing differ by.
    assert found == pytest.approx(half, rel=1e-5 if plan is PLAN else 2e-4)
    assert abs(found[1] - full[1]) > 1e-4, "autocast must show, or equality says nothing"
    assert found[-1] < found[0]


@pytest.mark.long
def test_the_command_line_has_it(tmp_path, warm_ranks, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = write_document(PLAN, tmp_path / "plan.json")
    assert invoke(["run", str(path), "--steps", "2", "--autocast"]) == 0
    assert "in 2 steps" in capsys.readouterr().out
