"""Plans that split ops train as one process does, in float64 to 1e-9 per tensor, and exchange what is predicted.

Tensor, sequence, context and expert axes, alone and with each other, pipelines and replicas; every layout with one
optimizer and some model, the whole matrix is slow.
"""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from meshwright.capture import capture_model
from meshwright.runtime.teams import Grid, local_model
from meshwright.runtime.teams.shares import Cut
from meshwright.spec import Plan, PlanError, Sharding, StagePlan, Workload
from tests.processes import run_ranks
from tests.runtime.team_cases import CASES, all_cases, main_cases
from tests.runtime.team_models import MODELS


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teams")

    def run(which, world_size):
        path = folder / f"{which}-{world_size}.json"
        if not path.exists():
            run_ranks("tests.runtime.team_worker", world_size, which, "float64", str(path), timeout_s=500)
        return json.loads(path.read_text())

    return run


def cases():
    found = []
    for world in CASES:
        for model in MODELS:
            main = [case.key for case in main_cases(model, world)]
            for case in all_cases(model, world):
                which, marks = ("main", []) if case.key in main else ("all", [pytest.mark.slow])
                name = f"{model}/{case.key}"
                found.append(pytest.param(which, world, name, id=f"{world}-{name}", marks=marks))
    return found


@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("which", "world_size", "case"), cases())
def test_state_and_losses_are_those_of_one_process(results, which, world_size, case):
    result = results(which, world_size)[case]
    assert result["moved"] > 1e-4, "training must change the model, or equality says nothing"
    assert max(result["tensors"].values()) <= 1e-9, result["tensors"]
    found, wanted = result["losses"]
    assert found == pytest.approx(wanted, rel=1e-9)


@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ["gpt/1/1f1b/tensor/sgd", "gpt/1/1f1b/sequence/adamw", "gpt/1/1f1b/context/adamw"])
def test_the_collectives_of_a_step_are_those_of_the_local_graph(results, case):
    result = results("main", 2)[case]
    assert result["exchanged"] == result["expected"]
    assert len(result["exchanged"]) > 20


@pytest.mark.parametrize("parts", [1, 3])
def test_what_is_cut_is_joined_again(parts):
    value = torch.arange(48.0).view(2, 24)
    shares = Cut(1, parts).shares(value, 4)
    assert all(share.shape == (2, 6) for share in shares)
    assert torch.equal(Cut(1, parts).join(shares), value)


class Odd(nn.Module):
    """Three hidden values, which two processes cannot share alike."""

    def __init__(self, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(4, hidden), nn.Linear(hidden, 2)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Bernoulli(Odd):
    """Random numbers otherwise than by dropout, of which processes have shares."""

    def forward(self, x):
        hidden = torch.relu(self.up(x))
        return self.down(hidden * torch.bernoulli(torch.full_like(hidden, 0.5)))


def open_local(model, **changes):
    x, y = torch.randn(4, 4), torch.randn(4, 2)
    captured = capture_model(model, (x,), targets=(y,), loss=nn.functional.mse_loss, verify=False)
    plan = Plan(
        model="odd",
        graph_hash=captured.graph.content_hash,
        cluster="",
        workload=Workload(global_batch=4),
        stages=(StagePlan(start=0, stop=len(captured.graph.layers), ranks=(0,)),),
        num_microbatches=1,
        sharding=Sharding(tensor=2, **changes),
    )
    return local_model(captured, plan, Grid(process=0, width=2))


def test_what_is_gathered_again_is_refused():
    with pytest.raises(PlanError, match="which can only be simulated"):
        open_local(Odd(4), sequence_parallel=True, regather=True)
