"""What works without torch: in a fresh interpreter where importing it fails, as after `pip install meshwright`."""

import json
import os
import subprocess
import sys

import pytest

from meshwright.spec import load_shipped_graph, shipped_graphs

WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None  # importing it raises ModuleNotFoundError
from meshwright.cli.main import invoke
for command in json.loads(sys.argv[1]):
    print("code", invoke(command), flush=True)
"""


@pytest.fixture
def run(tmp_path):
    def run_commands(*commands, **environment):
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH, json.dumps(commands)],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "120", **environment},
            capture_output=True,
            timeout=100,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    return run_commands


def codes(out):
    return [int(line.split()[1]) for line in out.splitlines() if line.startswith(b"code ")]


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_every_small_model_is_planned(run, part):
    graphs = {name: load_shipped_graph(name) for name in shipped_graphs()}
    small = [name for name, graph in graphs.items() if len(graph.ops) <= 300 and graph.num_parameters() < 10**9]
    plans = [
        ["plan", name, "--cluster", "2xcpu", "--precision", "float32", "--batch", "8", "--top", "1"] for name in small
    ]
    assert len(plans) >= 20
    plans = plans[part::4]
    done, out, err = run(*plans)
    assert (done, codes(out)) == (0, [0] * len(plans)), err.decode()


def test_from_a_name_to_a_timeline(run, tmp_path):
    done, out, err = run(
        ["plan", "gpt2-small", "--cluster", "4xA100", "--out", "plan.json"],
        ["simulate", "plan.json", "--out", "timeline.json", "--trace", "trace.json"],
        ["show", "plan.json"],
        ["show", "plan.json", "--program"],
        ["show", "timeline.json"],
        ["capture", "gpt2-small", "--out", "graph.json"],
        ["simulate", "plan.json", "--graph", "graph.json"],
    )
    assert (done, codes(out)) == (0, [0] * 7), err.decode()
    plan = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert plan["graph_hash"] == load_shipped_graph("gpt2-small").content_hash


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["plan", "gpt2-small", "--cluster", "2xcpu", "--sequence-length", "512"], "sequence_length=512 was asked for"),
        (["capture", "gpt-tiny", "--inference"], "inference was asked for"),
        (["plan", "mine.py:build", "--cluster", "2xcpu"], "'mine.py:build' has to be captured"),
        (["plan", "mine.toml", "--cluster", "2xcpu"], "'mine.toml' has to be captured"),
        (["run", "plan.json"], "needs torch"),
    ],
)
@pytest.mark.matrix
def test_what_needs_torch_says_how_to_get_it(run, command, message):
    _, out, err = run(command)
    assert codes(out) == [1]
    assert message in err.decode()
    assert "pip install 'meshwright[torch]'" in err.decode()


@pytest.mark.long
def test_a_misspelt_name_is_told_the_nearest(run):
    _, out, err = run(["plan", "gpt2-smal", "--cluster", "2xcpu"])
    assert codes(out) == [1]
    assert "did you mean 'gpt2-small'" in err.decode()
