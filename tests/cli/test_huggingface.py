"""A stranger's ``config.json`` through the verbs: plan, simulate, run, and the errors in one paragraph."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli.main import invoke
from meshwright.spec import Graph, Plan, Timeline, read_document
from tests.marks import left_to_ci

pytest.importorskip("transformers")

CONFIGS = Path(__file__).parents[1] / "zoo" / "configs"


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A folder ``model`` with a tiny GPT-2's config.json, in the current folder."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text((CONFIGS / "gpt2.json").read_text())
    monkeypatch.chdir(tmp_path)
    return "model/config.json"


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_a_configuration_is_planned_simulated_and_run(model, tmp_path, capsys, warm_ranks):
    plan = ["plan", model, "--cluster", "2xcpu", "--stages", "2", "--batch", "8", "--out", "plan.json", "--json"]
    assert invoke([*plan, "--sequence-length", "16"]) == 0
    written = read_document(Plan, tmp_path / "plan.json")
    assert (written.model, written.num_ranks, len(written.stages)) == (model, 2, 2)
    assert written.model_sizes == (("sequence_length", 16),)
    assert invoke(["simulate", "plan.json", "--json"]) == 0
    assert invoke(["run", "plan.json", "--steps", "4", "--out", "ran"]) == 0
    losses = json.loads((tmp_path / "ran" / "result.json").read_text())["losses"]
    assert losses[-1] < losses[0]
    assert read_document(Timeline, tmp_path / "ran" / "timeline.json").num_ranks == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.long
def test_the_folder_and_the_file_are_the_same_model(model, capsys):
    assert invoke(["capture", model, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert invoke(["capture", "model", "--json", "--out", "graph.json"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert first["num_parameters"] == second["num_parameters"] == 53_952
    assert first["layers"] == second["layers"]
    # A stored graph has the same suffix; its content tells it apart.
    assert invoke(["capture", "graph.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["graph_hash"] == second["graph_hash"]
    assert read_document(Graph, "graph.json").content_hash == second["graph_hash"]


@pytest.mark.long
def test_a_plan_from_a_stored_graph_is_not_run(model, capsys):
    assert invoke(["capture", "model", "--out", "graph.json"]) == 0
    assert invoke(["plan", "graph.json", "--cluster", "2xcpu", "--out", "plan.json"]) == 0
    assert invoke(["run", "plan.json"]) == 1
    assert "made from the stored graph 'graph.json'" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "gpt3"}', "has no model type 'gpt3'"),
        ('{"name": 1}', "neither a stored graph"),
        ('{"schema": "meshwright/plan/1"}', "expected schema 'meshwright/graph/1'"),
        ('{"model_type": "gpt2", "auto_map": {"AutoModel": "x.y"}}', "never loaded"),
    ],
)
def test_errors_are_one_paragraph(model, text, message, capsys):
    Path(model).write_text(text)
    assert invoke(["plan", model, "--cluster", "2xcpu"]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert error.startswith("error: ")
    assert message in error


@pytest.mark.parametrize(
    ("absent", "remedy"),
    [("torch", "pip install 'meshwright[torch,hf]'"), *left_to_ci(("transformers", "pip install 'meshwright[hf]'"))],
)
@pytest.mark.matrix
def test_what_is_not_installed_is_named(model, absent, remedy, tmp_path):
    code = f"import sys; sys.modules[{absent!r}] = None\nfrom meshwright.cli.main import run\nrun()"
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", "model", "--cluster", "2xcpu"],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert remedy in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
