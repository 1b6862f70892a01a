"""Ranks that differ from what was planned, or from each other: who, what was expected, what to do; all are ended."""

import pytest

from meshwright.capture import capture_model
from meshwright.spec import RunError
from meshwright.training import Job, run_plan
from meshwright.zoo import load_model
from tests.training.test_run import make_plan, worker_pids

pytestmark = [
    pytest.mark.long,
    pytest.mark.distributed,
    pytest.mark.timeout(180),
]

MODEL = """
import os, resource, torch
from torch import nn

class Wide(nn.Module):
    def __init__(self, times):
        super().__init__()
        self.last, self.times = nn.Linear(8, 1), times

    def forward(self, x):
        x = self.last(x) + x
        return x.repeat(1, self.times).exp().mean(1)

def build(batch_size=4):
    is_second = os.environ.get("RANK") == "1"
    {special}
    layers = nn.Linear(8, {width}), nn.Tanh(), nn.Linear({width}, 8), Wide({times})
    return nn.Sequential(*layers), (torch.randn(batch_size, 8),)
"""


def write_model(folder, special="", width="4", times="1"):
    path = folder / "own.py"
    path.write_text(MODEL.format(special=special, width=width, times=times))
    return f"{path}:build"


def plan_of(folder, model):
    source = load_model(model, fake=True)
    captured = capture_model(source.model, source.inputs, loss=source.loss, verify=False)
    count = len(captured.graph.layers)
    return make_plan(captured.graph, folder / "plan.json", model=model, bounds=[(0, 2), (2, count)], replicas=[1, 1])


def failure(plan, folder):
    with pytest.raises(RunError) as caught:
        run_plan(Job(plan=str(plan), num_steps=3), folder / "out")
    assert not worker_pids(rank=0)
    assert not worker_pids(rank=1)
    assert not (folder / "out").exists()
    return str(caught.value)


def test_a_model_file_that_changed_since_planning(tmp_path):
    plan = plan_of(tmp_path, write_model(tmp_path))
    write_model(tmp_path, width="6")
    assert "make the plan again with `meshwright plan`" in failure(plan, tmp_path)


def test_a_rank_with_another_file(tmp_path):
    plan = plan_of(tmp_path, write_model(tmp_path))
    write_model(tmp_path, width='(6 if os.environ.get("RANK") == "1" else 4)')
    said = failure(plan, tmp_path)
    assert said.startswith("Rank 1 failed: ")
    assert "make the plan again with `meshwright plan`" in said


def test_a_rank_with_another_torch(tmp_path):
    plan = plan_of(tmp_path, write_model(tmp_path))
    write_model(tmp_path, special='if is_second: torch.__version__ = "2.12.0"')
    said = failure(plan, tmp_path)
    assert "Rank 1 runs torch 2.12.0, meshwright " in said
    assert "Install the same versions on all hosts" in said


def test_a_rank_that_runs_out_of_memory(tmp_path):
    # 4 samples of 8 numbers, 6 million times: 768 MB, of which the second rank may have 300.
    limit = "if is_second: resource.setrlimit(resource.RLIMIT_AS, (own() + 300 * 2**20,) * 2)"
    model = write_model(tmp_path, times="6_000_000")
    plan = plan_of(tmp_path, model)
    path = tmp_path / "own.py"
    own = 'def own():\n    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()\n'
    path.write_text(own + MODEL.format(special=limit, width="4", times="6_000_000"))
    said = failure(plan, tmp_path)
    assert said.startswith("Rank 1 ran out of memory: ")
    assert "the other ranks were ended. It was predicted to use " in said
    assert "To use less memory, plan with smaller microbatches (-m), --recompute op or full" in said
