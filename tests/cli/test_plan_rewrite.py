"""``plan --rewrite``: the graph is rewritten before it is laid out where that makes the simulated step shorter."""

import json

import pytest

from meshwright.cli.main import invoke
from meshwright.spec import Plan, read_document

MODEL = """
import torch
from torch import nn


class Mixing(nn.Module):
    # Scores of all pairs, although nothing makes them worth it: (q kᵀ) v is q (kᵀ v).
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x):
        h = torch.relu(self.first(x))
        return self.last(h @ h.transpose(-1, -2) @ h)


def wasteful(batch_size=2):
    return Mixing(), torch.randn(batch_size, 512, 64)


def plain(batch_size=2):
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh()), torch.randn(batch_size, 16)
"""


@pytest.fixture
def model(tmp_path):
    (tmp_path / "mixing.py").write_text(MODEL)
    return f"{tmp_path}/mixing.py:wasteful"


def planned(arguments, capsys):
    assert invoke(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.long
def test_a_shorter_step_is_kept_and_the_plan_says_so(model, tmp_path, capsys):
    arguments = [model, "--cluster", "2xcpu", "--batch", "8", "-m", "2"]
    before = planned(arguments, capsys)
    document = planned([*arguments, "--rewrite", "-o", f"{tmp_path}/plan.json"], capsys)
    plan = read_document(Plan, tmp_path / "plan.json")
    assert plan.rewritten == "cpu"
    assert plan.microbatch_size == 2
    assert document["plans"][0]["step_time_s"] < 0.8 * before["plans"][0]["step_time_s"]
    # Whoever reads it rewrites the model to the very same graph.
    assert invoke(["simulate", f"{tmp_path}/plan.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"] == pytest.approx(document["plans"][0]["step_time_s"])
    assert (
        invoke(["plan", model, "--cluster", "2xcpu", "--from", f"{tmp_path}/plan.json", "-o", f"{tmp_path}/q.json"])
        == 0
    )
    assert read_document(Plan, tmp_path / "q.json").rewritten == "cpu"
    # It was found at its own size of microbatches, and is so again.
    assert invoke(["simulate", f"{tmp_path}/q.json", "--json"]) == 0


@pytest.mark.long
def test_it_runs_and_its_losses_are_those_of_one_process(model, tmp_path, capsys):
    planned([model, "--cluster", "2xcpu", "--batch", "4", "--rewrite", "-o", f"{tmp_path}/plan.json"], capsys)
    assert read_document(Plan, tmp_path / "plan.json").rewritten
    arguments = ["run", f"{tmp_path}/plan.json", "--steps", "2", "--check", "--out", f"{tmp_path}/run"]
    assert invoke(arguments) == 0
    assert "losses are those of one process" in " ".join(capsys.readouterr().out.split())


def test_without_a_gain_the_graph_stays_as_it_is(model, tmp_path, capsys):
    plain = model.replace("wasteful", "plain")
    assert invoke(["plan", plain, "--cluster", "2xcpu", "--rewrite", "-o", f"{tmp_path}/plan.json"]) == 0
    assert "No rule leads to a cheaper graph on cpu." in capsys.readouterr().out
    assert read_document(Plan, tmp_path / "plan.json").rewritten == ""


@pytest.mark.long
def test_what_cannot_be_rewritten_is_said(model, tmp_path, capsys):
    assert invoke(["capture", model, "--out", f"{tmp_path}/graph.json"]) == 0
    assert invoke(["plan", f"{tmp_path}/graph.json", "--cluster", "2xcpu", "--rewrite"]) == 1
    assert "no code that could be rewritten" in " ".join(capsys.readouterr().err.split())
    planned([model, "--cluster", "2xcpu", "--rewrite", "-o", f"{tmp_path}/plan.json"], capsys)
    assert invoke(["plan", model, "--cluster", "8xH100", "--from", f"{tmp_path}/plan.json"]) == 1
    assert "was rewritten for 'cpu'" in " ".join(capsys.readouterr().err.split())
    assert invoke(["plan", model, "--cluster", "2xcpu", "--from", f"{tmp_path}/plan.json", "--rewrite"]) == 2
