"""Checkpoints: training goes on as if it had not stopped, under every kind of plan; what does not fit is refused."""

import signal
import subprocess
import sys
import time

import pytest
import torch

from meshwright.spec import Plan, StagePlan, Workload, load_shipped_graph, write_document
from meshwright.training.checkpoint import find_newest
from tests.rank_results import read_results
from tests.training.checkpoint_worker import CASES


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return read_results("tests.training.checkpoint_worker", 2, tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_what_goes_on_is_what_did_not_stop(results, case):
    """To the last bit: weights, statistics and losses, with dropout and a shuffled data set."""
    found = results[case]
    assert found["moved"] > 1e-3
    assert (found["done"], found["differing"], found["same"]) == (4, [], True)
    assert found["losses"] == 2


@pytest.mark.long
@pytest.mark.distributed
def test_what_does_not_fit_is_refused(results):
    said = results["said"]
    assert "the checkpoint has seed 0, but the run has 5" in said["seed"]
    assert "this folder has no checkpoint" in said["nothing"]
    assert "holds a checkpoint of 4 steps, but this run has done 0" in said["other run"]
    assert said["interrupted"] == 4
    assert "`resume` was called after 4 steps" in said["late"]


def meshwright(*words, folder, **options):
    command = [sys.executable, "-m", "meshwright", *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def said(process):
    text = process.communicate(timeout=200)[0]
    return process.returncode, " ".join(text.split())


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_a_killed_run_goes_on(tmp_path, request):
    graph = load_shipped_graph("gpt-tiny")
    plan = Plan(
        model="gpt-tiny",
        graph_hash=graph.content_hash,
        cluster="2xcpu",
        workload=Workload(global_batch=2),
        stages=(StagePlan(start=0, stop=3, ranks=(0,)), StagePlan(start=3, stop=len(graph.layers), ranks=(1,))),
        num_microbatches=2,
    )
    write_document(plan, tmp_path / "plan.json")
    run = ("run", "plan.json", "--checkpoint", "kept", "--checkpoint-every", "2")
    killed = meshwright(*run, "--steps", "2000", folder=tmp_path)
    deadline = time.monotonic() + 120
    while find_newest(tmp_path / "kept") is None and time.monotonic() < deadline:
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    said(killed)
    request.getfixturevalue("warm_ranks")  # not before: a fork does not end when its launcher is killed
    done = int(find_newest(tmp_path / "kept").name.partition("-")[2])
    code, text = said(meshwright(*run, "--steps", str(done + 3), "--resume", "--save-model", "on.pt", folder=tmp_path))
    assert code == 0, text
    assert f"in 3 steps, {done + 3} in all" in text
    whole = ("run", "plan.json", "--steps", str(done + 3), "--save-model", "whole.pt", "--out", "other")
    code, text = said(meshwright(*whole, folder=tmp_path))
    assert code == 0, text
    ours, theirs = (torch.load(tmp_path / name, weights_only=True) for name in ("on.pt", "whole.pt"))
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())
    assert sorted(path.name for path in (tmp_path / "kept").iterdir())[-1] == f"step-{done + 3:08d}"
    code, text = said(meshwright(*run, "--steps", "2", "--resume", folder=tmp_path))
    assert code == 1
    assert f"The checkpoint has {done + 3} steps already, but --steps 2 was given" in text
