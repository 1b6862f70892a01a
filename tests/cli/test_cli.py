"""The verbs as a user types them: documents between them, JSON, exit codes, errors in one paragraph."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli.main import VERBS, invoke, load_verb
from meshwright.spec import Graph, Plan, Timeline, read_document

USERS_FILE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.mean()


class Branches(Net):
    def forward(self, x):
        if x.sum() > 0:
            return self.layers[0](x).mean()
        return self.layers[1](x).mean()


def build():
    return Net(), (torch.randn(4, 8),)


def branches():
    return Branches(), (torch.randn(4, 8),)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder: a model file, its graph, a plan and a timeline made by the commands themselves."""
    path = tmp_path_factory.mktemp("user")
    (path / "mine.py").write_text(USERS_FILE)
    previous = Path.cwd()
    os.chdir(path)
    try:
        assert invoke(["capture", "mine.py:build", "--out", "graph.json"]) == 0
        plan = ["plan", "mine.py:build", "--cluster", "2xcpu", "--batch", "8", "--stages", "2", "--out", "plan.json"]
        assert invoke(plan) == 0
        assert invoke(["simulate", "plan.json", "--out", "predicted.json", "--trace", "trace.json"]) == 0
    finally:
        os.chdir(previous)
    return path


@pytest.fixture
def run(run, folder, monkeypatch):
    monkeypatch.chdir(folder)
    return run


def test_documents_pass_from_verb_to_verb(folder):
    graph = read_document(Graph, folder / "graph.json")
    plan = read_document(Plan, folder / "plan.json")
    assert plan.graph_hash == graph.content_hash
    assert len(plan.stages) == 2
    timeline = read_document(Timeline, folder / "predicted.json")
    assert timeline.num_ranks == 2
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (["capture", "mine.py:build"], "graph_hash"),
        (["plan", "mine.py:build", "--cluster", "2xcpu", "--batch", "8"], "plans"),
        (["plan", "graph.json", "--cluster", "2xcpu", "--batch", "8"], "plans"),
        (["simulate", "plan.json"], "step_time_s"),
        (["simulate", "plan.json", "--graph", "graph.json"], "step_time_s"),
        (["show", "plan.json"], "stages"),
        (["show", "plan.json", "--program", "--graph", "graph.json"], "body"),
        (["show", "2x4xA100"], "nodes"),
        (["show", "graph.json"], "layers"),
    ],
)
def test_json_is_one_document_on_standard_output(run, command, key):
    assert key in json.loads(run(*command, "--json", code=0)[1])


def test_the_same_graph_from_a_file_and_from_the_model_gives_the_same_prediction(run):
    first = json.loads(run("simulate", "plan.json", "--json")[1])
    second = json.loads(run("simulate", "plan.json", "--graph", "graph.json", "--json")[1])
    assert first["step_time_s"] == second["step_time_s"]


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (["capture", "gpt2-smal"], 1, ["gpt2-small"]),
        (["capture", "nowhere.py:build"], 1, ["nowhere.py"]),
        (["capture", "mine.py:bild"], 1, ["build"]),
        (["capture", "mine.py:branches"], 1, ["mine.py:19"]),
        (["plan", "mine.py:build"], 2, ["cluster"]),
        (["plan", "mine.py:build", "--cluster", "2xH10"], 1, ["H100"]),
        (["plan", "mine.py:build", "--cluster", "2xcpu", "--stages", "9", "--batch", "32"], 3, ["stages", "ranks"]),
        (["plan", "mine.py:build", "--cluster", "64xcpu", "--batch", "1"], 3, ["64 ranks"]),
        (["plan", "mine.py:build", "--cluster", "2xcpu", "--batch", "8", "-m", "3"], 1, ["8"]),
        (["plan", "mine.py:build", "--cluster", "2xcpu", "--batch", "8", "--schedule", "1f1"], 1, ["1f1b"]),
        (["plan", "mine.py:build", "--cluster", "2xcpu", "--batch", "8", "--memory-limit", "0.000001"], 3, ["memory"]),
        (["simulate", "missing.json"], 1, ["missing.json", "Check the path"]),
        (["simulate", "graph.json"], 1, ["plan", "graph"]),
        (["simulate", "truncated.json"], 1, ["truncated"]),
        (["simulate", "other.json"], 1, ["make the plan again"]),
        (["simulate", "typo.json"], 1, ["num_microbatches"]),
        (["compare", "predicted.json", "predicted.json"], 1, ["measured"]),
        (["show", "mine.json"], 1, ["schema"]),
        (["bogus"], 2, []),
        (["plan", "--bogus"], 2, []),
    ],
)
def test_mistakes_get_one_paragraph_and_the_right_exit_code(run, folder, command, code, words):
    text = (folder / "plan.json").read_text()
    (folder / "truncated.json").write_text(text[: len(text) // 2])
    (folder / "other.json").write_text(text.replace(json.loads(text)["graph_hash"], "0" * 16))
    (folder / "typo.json").write_text(text.replace('"num_microbatches"', '"num_microbatch"'))
    (folder / "mine.json").write_text('{"schema": "somebody/else/1"}')
    before = {path.name for path in folder.iterdir()}
    found, out, err = run(*command, *(["--out", "made.json"] if command[0] in ("capture", "plan", "simulate") else []))
    assert found == code, err
    assert "Traceback" not in out + err
    for word in words:
        assert word in err
    if code in (1, 3):
        assert err.startswith("error: ")
        assert err.strip().count("\n") == 0, "one paragraph"
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == before - {"__pycache__"}


def test_help_lists_the_verbs_and_imports_none_of_them():
    code = (
        "import sys; import meshwright.cli.output; from meshwright.cli.main import invoke; invoke(['--help']); "
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'numpy') or '.spec' in name])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip().endswith("[]")
    assert all(f" {verb} " in done.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_the_line_of_a_verb_in_the_help_is_the_first_paragraph_of_its_own(verb):
    assert load_verb(verb).help.split("\n\n")[0].replace("\n", " ") == VERBS[verb][1]


def test_planning_a_stored_graph_loads_no_torch(folder):
    code = (
        "import sys; from meshwright.cli.main import invoke; "
        "code = invoke(['plan', 'graph.json', '--cluster', '2xcpu', '--batch', '8', '--json']); "
        "print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True, cwd=folder
    )
    assert done.stdout.strip().endswith("0 False")
