"""The scripts that `plan` writes run it with real processes: on one node, on two, and under a stand-in for Slurm.

torchrun and its ranks are forks of a process that has loaded torch (tests/warm.py).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli.main import invoke
from meshwright.spec import Timeline, read_document
from meshwright.training import RunResult
from tests.processes import free_port
from tests.warm import write_programs

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

MODEL = """
import torch
from torch import nn


def build(batch_size=2):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers), (torch.randn(batch_size, 8),)
"""
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" & pids[node]=$!; done
for node in 0 1; do wait "${pids[node]}" || failed=1; done
exit "${failed:-0}"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A project with a space in its name: model, plan, and the three scripts, written by `meshwright plan`."""
    path = tmp_path_factory.mktemp("scripts") / "my project"
    path.mkdir()
    (path / "mine.py").write_text(MODEL)
    programs = path.parent / "programs"
    programs.mkdir()
    torchrun = f'#!/bin/sh\nexec "{programs}/python" -m torch.distributed.run "$@"\n'
    write_programs(programs, torchrun=torchrun, srun=SRUN, scontrol="#!/bin/sh\necho 127.0.0.1\n")
    previous = Path.cwd()
    os.chdir(path)
    try:
        command = ["plan", "mine.py:build", "--batch", "8", "--stages", "2", "-m", "2", "--schedule", "1f1b"]
        assert invoke([*command, "--cluster", "2xcpu", "--out", "here"]) == 0
        assert invoke([*command, "--cluster", "2x1xcpu", "--out", "two"]) == 0
        assert invoke([*command, "--cluster", "2x1xcpu", "--out", "two", "--slurm"]) == 0
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sys, "executable", str(programs / "python"))
            assert invoke(["run", "here/plan.json", "--steps", "4", "--out", "reference"]) == 0
    finally:
        os.chdir(previous)
    return path


def environment(folder, **more):
    path = f"{folder.parent / 'programs'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **more}


def start(folder, script, *arguments, cwd=None, **more):
    return subprocess.Popen(
        ["bash", str(folder / script), "--steps", "4", *arguments],
        cwd=cwd or folder,
        env=environment(folder, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(*processes):
    try:
        texts = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=30)
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(texts)
    return texts


def losses(folder, name):
    return read_document(RunResult, folder / name / "result.json").losses


@pytest.mark.long
def test_one_node_from_another_folder(folder, tmp_path):
    (text,) = end(start(folder, "here/launch.sh", "--out", "from here", cwd=tmp_path))
    assert losses(folder, "from here") == losses(folder, "reference")
    assert read_document(Timeline, folder / "from here" / "timeline.json").num_ranks == 2
    assert text.count("loss ") == 1, "rank 0 alone prints"


@pytest.mark.long
def test_two_nodes_with_one_agent_each(folder):
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    end(*(start(folder, "two/launch.sh", "--out", "by hand", NODE_RANK=str(node), **rendezvous) for node in (1, 0)))
    assert losses(folder, "by hand") == losses(folder, "reference")


@pytest.mark.long
def test_two_nodes_under_slurm(folder):
    job = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_CPUS_PER_TASK": "1",
        "MASTER_PORT": str(free_port()),
    }
    end(start(folder, "two/launch.sbatch", "--out", "by slurm", **job))
    assert losses(folder, "by slurm") == losses(folder, "reference")


@pytest.mark.long
def test_a_plan_for_other_ranks_is_one_paragraph(folder):
    command = [str(folder.parent / "programs" / "torchrun"), "--standalone", "--nproc-per-node=1", "--module"]
    done = subprocess.run(
        [*command, "meshwright", "run", "here/plan.json", "--out", "never"],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert "error: The plan is for 2 ranks, but 1 processes were started" in done.stderr
    assert "meshwright/cli" not in done.stderr, "no traceback of ours"
    assert not (folder / "never").exists()
