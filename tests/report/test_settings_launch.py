"""Launch scripts: valid bash, paths that may hold anything, every node its ranks, clear errors."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace

import pytest

from meshwright.report.settings import launch_lines, launch_script, ranks_per_node, slurm_script
from meshwright.spec import Cluster, Plan, PlanError, StagePlan, Workload, load_cluster

HOSTILE = 'it\'s a $(touch owned) `x` "q" \\ folder'


def plan_of(num_ranks: int, model: str = "gpt-tiny") -> Plan:
    return Plan(
        model=model,
        graph_hash="0" * 16,
        cluster="c",
        workload=Workload(global_batch=8 * num_ranks),
        stages=(StagePlan(start=0, stop=2, ranks=tuple(range(num_ranks))),),
        num_microbatches=num_ranks,
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with an awful name, and a torchrun that writes down what it was asked for."""
    work = tmp_path / HOSTILE
    work.mkdir()
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("torchrun", "scontrol", "srun"):
        path = programs / name
        path.write_text({"torchrun": FAKE_TORCHRUN, "scontrol": FAKE_SCONTROL, "srun": FAKE_SRUN}[name])
        path.chmod(0o755)
    monkeypatch.chdir(work)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return work


FAKE_TORCHRUN = """#!/bin/bash
pwd
printf '%s\\n' "$@"
"""
FAKE_SCONTROL = """#!/bin/bash
printf 'first\\nsecond\\n'
"""
# One task per node, as `--ntasks-per-node=1` asks for.
FAKE_SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do SLURM_NODEID=$node "$@" || exit 1; done
"""


def start(script, *arguments, cwd=None, **environment):
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True, check=False).returncode == 0
    return subprocess.run(
        ["bash", str(script), *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


def test_one_node_from_anywhere_with_any_name(folder, tmp_path):
    script = folder / "sub folder" / "launch it.sh"
    script.parent.mkdir()
    text = launch_script(plan_of(4), load_cluster("4xA100"), script=script, plan_file=folder / "my plan's file.json")
    script.write_text(text)
    done = start(script, "--steps", "3", "--out", "a b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        str(folder),
        *("--standalone", "--nproc-per-node=4", "--module", "meshwright", "run", "my plan's file.json"),
        *("--steps", "3", "--out", "a b"),
    ]
    assert not list(tmp_path.rglob("owned"))
    assert str(tmp_path) not in text, "no path of this machine"


def test_every_node_starts_its_own_ranks(folder):
    script = folder / "launch.sh"
    plan, cluster = plan_of(11), load_cluster("2x8xH100")
    assert ranks_per_node(plan, cluster) == (8, 3)
    script.write_text(launch_script(plan, cluster, script=script, plan_file=folder / "plan.json"))
    for node, count in enumerate((8, 3)):
        done = start(script, NODE_RANK=str(node), MASTER_ADDR="node0")
        assert done.returncode == 0, done.stderr
        assert f"--node-rank={node}" in done.stdout
        assert f"--nproc-per-node={count}" in done.stdout
        assert "--nnodes=2" in done.stdout
        assert "--master-addr=node0" in done.stdout
        assert "--master-port=29500" in done.stdout
    assert "--master-port=4711" in start(script, NODE_RANK="0", MASTER_ADDR="n", MASTER_PORT="4711").stdout


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "set NODE_RANK (0 to 1) and MASTER_ADDR"),
        ({"NODE_RANK": "0"}, "set NODE_RANK (0 to 1) and MASTER_ADDR"),
        ({"MASTER_ADDR": "a"}, "set NODE_RANK (0 to 1) and MASTER_ADDR"),
        ({"NODE_RANK": "2", "MASTER_ADDR": "a"}, "NODE_RANK is 2; expected 0 to 1"),
        ({"NODE_RANK": "one", "MASTER_ADDR": "a"}, "NODE_RANK is one; expected 0 to 1"),
        ({"NODE_RANK": "0", "MASTER_ADDR": "a", "PATH": "/usr/bin:/bin"}, "torchrun is not in PATH"),
    ],
)
def test_what_is_missing_is_said(folder, environment, words):
    script = folder / "launch.sh"
    script.write_text(
        launch_script(plan_of(16), load_cluster("2x8xH100"), script=script, plan_file=folder / "plan.json")
    )
    done = start(script, **environment)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stdout == ""


def test_slurm_starts_one_agent_per_node(folder):
    script = folder / "launch.sbatch"
    plan = folder / "the plan.json"
    plan.write_text("{}")
    text = slurm_script(plan_of(11, "my models/net.py:build"), load_cluster("2x8xH100"), script=script, plan_file=plan)
    script.write_text(text)
    head = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert head == [
        "#SBATCH --job-name=net.py-build",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --cpus-per-task=112",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --output=%x-%j.out",
    ]
    # sbatch reads its options up to the first command.
    assert text.splitlines()[1 : 1 + len(head)] == head
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "4"}
    done = start(script, "--steps", "3 4", **job)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    first, second = lines[: len(lines) // 2], lines[len(lines) // 2 :]
    for node, (count, found) in enumerate([("8", first), ("3", second)]):
        assert found == [
            str(folder),
            *("--nnodes=2", f"--node-rank={node}", f"--nproc-per-node={count}"),
            *("--master-addr=first", "--master-port=20007"),
            *("--module", "meshwright", "run", "the plan.json", "--steps", "3 4"),
        ]
    assert "start it with sbatch" in start(script).stderr
    assert start(script, cwd=folder.parent, **job).returncode == 2


def test_slurm_asks_for_no_gpus_where_there_are_none(folder):
    text = slurm_script(plan_of(2), load_cluster("2xcpu"), script=folder / "a", plan_file=folder / "b")
    assert "--gpus-per-node" not in text
    assert "#SBATCH --cpus-per-task=2\n" in text


def test_devices_that_are_left_out_are_hidden(folder):
    script = folder / "launch.sh"
    show = FAKE_TORCHRUN + "echo visible=$CUDA_VISIBLE_DEVICES\n"
    (folder.parent / "programs" / "torchrun").write_text(show)

    def text(plan, cluster):
        return launch_script(plan, load_cluster(cluster), script=script, plan_file=folder / "plan.json")

    one = replace(plan_of(2), idle=(0, 2))
    script.write_text(text(one, "4xA100"))
    done = start(script)
    assert "--nproc-per-node=2" in done.stdout
    assert done.stdout.splitlines()[-1] == "visible=1,3"
    both = replace(plan_of(3), idle=(0,))
    script.write_text(text(both, "2x2xA100"))
    shown = [start(script, NODE_RANK=str(node), MASTER_ADDR="a").stdout.splitlines()[-1] for node in range(2)]
    assert shown == ["visible=1", "visible=0,1"]
    assert "CUDA_VISIBLE_DEVICES of each node: 1 and 0,1." in launch_lines(both, load_cluster("2x2xA100"), script)
    with pytest.raises(PlanError, match="leaves out devices of a node that it uses"):
        slurm_script(both, load_cluster("2x2xA100"), script=script, plan_file=folder / "plan.json")
    # A whole node that is left out hides nothing on the others, nor does a CPU.
    whole = replace(plan_of(2), idle=(0, 1))
    assert ranks_per_node(whole, load_cluster("2x2xA100")) == (2,)
    assert "CUDA_VISIBLE_DEVICES" not in text(whole, "2x2xA100") + text(one, "4xcpu")


def test_slurm_refuses_nodes_that_differ(folder):
    big, small = load_cluster("8xH100"), load_cluster("4xA100")
    mixed = Cluster(name="mixed", device_kinds=(*big.device_kinds, *small.device_kinds), nodes=big.nodes + small.nodes)
    with pytest.raises(PlanError, match="NODE_RANK"):
        slurm_script(plan_of(12), mixed, script=folder / "a", plan_file=folder / "b")
    assert ranks_per_node(plan_of(12), mixed) == (8, 4)
    # Nodes that the plan leaves out may be of any kind.
    assert "--nodes=1" in slurm_script(plan_of(8), mixed, script=folder / "a", plan_file=folder / "b")


def test_a_plan_larger_than_its_cluster_is_refused():
    with pytest.raises(PlanError, match="uses 3 devices"):
        ranks_per_node(plan_of(3), load_cluster("2xcpu"))
