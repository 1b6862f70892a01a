"""Real runs on this host: the ready job, the user's own script, and what happens when a rank dies."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.capture import capture_model
from meshwright.cli.main import invoke
from meshwright.program.controllers import with_policy
from meshwright.spec import (
    DocumentError,
    Graph,
    Plan,
    RunError,
    StagePlan,
    Timeline,
    Workload,
    read_document,
    write_document,
)
from meshwright.training import Job, run_plan
from meshwright.zoo import load_model
from tests.processes import free_port

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]
HERE = Path(__file__).parent


def make_plan(graph: Graph, path: Path, *, model: str, bounds, replicas, global_batch=16, num_microbatches=4) -> Path:
    stages, rank = [], 0
    for (start, stop), count in zip(bounds, replicas, strict=True):
        stages.append(StagePlan(start=start, stop=stop, ranks=tuple(range(rank, rank + count))))
        rank += count
    plan = Plan(
        model=model,
        graph_hash=graph.content_hash,
        cluster="2xcpu",
        workload=Workload(global_batch=global_batch),
        stages=tuple(stages),
        num_microbatches=num_microbatches,
    )
    return write_document(plan, path)


@pytest.fixture(scope="module")
def gpt_plan(tmp_path_factory):
    source = load_model("gpt-tiny", fake=True)
    captured = capture_model(
        source.model, source.inputs, targets=source.targets, loss=source.loss, name="gpt-tiny", verify=False
    )
    folder = tmp_path_factory.mktemp("plan")
    return make_plan(captured.graph, folder / "plan.json", model="gpt-tiny", bounds=[(0, 3), (3, 6)], replicas=[1, 1])


class Collector:
    def __init__(self, on_progress=None):
        self.losses, self.on_progress = [], on_progress

    def progress(self, task, done, total):
        if self.on_progress is not None:
            self.on_progress(done)

    def metric(self, name, value, step):
        if name == "loss":
            self.losses.append(value)


def test_the_ready_job_learns_and_leaves_timeline_losses_and_weights(gpt_plan, tmp_path, warm_ranks):
    events = Collector()
    weights = tmp_path / "model.pt"
    job = Job(plan=str(gpt_plan), num_steps=12, num_recorded_steps=3, save_model=str(weights))
    result = run_plan(job, tmp_path / "out", events)
    assert len(result.losses) == 12
    assert events.losses == list(result.losses)
    assert result.losses[-1] < result.losses[0] - 1.0
    timeline = read_document(Timeline, result.timeline)
    assert len(timeline.step_seconds()) == 3
    assert timeline.num_ranks == 2
    state = torch.load(weights, weights_only=True)
    model = load_model("gpt-tiny").model
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(state)
    assert all(not torch.equal(before[key], value) for key, value in state.items() if value.is_floating_point())


def test_ranks_see_only_the_devices_that_the_plan_uses(gpt_plan, tmp_path, monkeypatch):
    model = tmp_path / "tells.py"
    model.write_text(
        "import os\n"
        "from meshwright.zoo import load_model\n"
        "def build():\n"
        f"    with open('{tmp_path}/' + os.environ.get('RANK', 'none'), 'w') as file:\n"
        "        file.write(os.environ.get('CUDA_VISIBLE_DEVICES', ''))\n"
        "    source = load_model('gpt-tiny')\n"
        "    return source.model, (source.inputs, source.targets), source.loss\n"
    )
    plan = replace(read_document(Plan, gpt_plan), model=f"{model}:build", cluster="4xA100", idle=(0, 2))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    run_plan(Job(plan=str(write_document(plan, tmp_path / "plan.json")), num_steps=2, device="cpu"), tmp_path / "out")
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["1,3", "1,3"]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize(
    ("start", "number"),
    [
        ("warm", signal.SIGKILL),
        pytest.param("cold", signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("cold", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_a_killed_rank_ends_the_run_and_is_named(gpt_plan, tmp_path, start, number, request):
    if start == "warm":
        request.getfixturevalue("warm_ranks")
    killed_at = []

    def kill_rank_1(done):
        if done == 3 and not killed_at:
            killed_at.append(time.monotonic())
            (pid,) = worker_pids(rank=1)
            os.kill(pid, number)

    with pytest.raises(RunError, match=f"Rank 1 was killed by {number.name}"):
        run_plan(Job(plan=str(gpt_plan), num_steps=100_000), tmp_path / "out", Collector(kill_rank_1))
    assert killed_at
    assert not worker_pids(rank=0)
    assert not worker_pids(rank=1)
    assert not (tmp_path / "out").exists(), "an ended run leaves no half-written result"


@pytest.mark.long
def test_a_run_with_restarts_is_as_one_that_did_not_stop(gpt_plan, tmp_path, warm_ranks, capsys):
    """Rank 1 is killed, then rank 0; losses are equal bit by bit, each step once."""
    left = {9: 1, 17: 0}

    def kill(done):
        if done in left:
            (pid,) = worker_pids(rank=left.pop(done))
            os.kill(pid, signal.SIGKILL)

    job = Job(plan=str(gpt_plan), num_steps=24, checkpoint=str(tmp_path / "kept"), checkpoint_every=4, restarts=2)
    found = run_plan(job, tmp_path / "out", Collector(kill))
    assert not left
    whole = run_plan(Job(plan=str(gpt_plan), num_steps=24), tmp_path / "whole")
    assert found.losses == whole.losses
    assert len(found.step_seconds) == 24
    assert found.num_before == 0
    assert [item.why for item in found.restarts] == ["Rank 1 was killed by SIGKILL", "Rank 0 was killed by SIGKILL"]
    assert all(item.step >= 9 and item.lost_s > 0 for item in found.restarts)
    said = capsys.readouterr().err
    assert re.search(r"Rank 1 was killed by SIGKILL; starting again from .*step-0000000[48], 1 of 2 restarts", said)


@pytest.mark.long
def test_errors_of_the_job_are_not_restarted(gpt_plan, tmp_path, warm_ranks, capsys):
    job = Job(plan=str(gpt_plan), num_steps=8, learning_rate=1e30, restarts=3)
    with pytest.raises(RunError, match="is not finite"):
        run_plan(job, tmp_path / "out")
    assert "starting again" not in capsys.readouterr().err


def test_a_rank_that_fails_shows_its_own_error(tmp_path, warm_ranks):
    model = tmp_path / "breaks.py"
    model.write_text(
        "import os, torch\nfrom torch import nn\n"
        "def build(batch_size=4):\n"
        "    if os.environ.get('RANK') == '1':\n"
        "        raise RuntimeError('the disk of this rank is gone')\n"
        "    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), (torch.randn(batch_size, 4),)\n"
    )
    source = load_model(f"{model}:build", fake=True)
    captured = capture_model(source.model, source.inputs, loss=source.loss, verify=False)
    bounds = [(0, 1), (1, len(captured.graph.layers))]
    path = tmp_path / "plan.json"
    plan = make_plan(captured.graph, path, model=f"{model}:build", bounds=bounds, replicas=[1, 1])
    with pytest.raises(RunError, match=r"Rank 1 failed: .*the disk of this rank is gone"):
        run_plan(Job(plan=str(plan), num_steps=2), tmp_path / "out")


def test_a_plan_for_another_model_is_refused_by_its_hash(gpt_plan, tmp_path, warm_ranks):
    data = json.loads(gpt_plan.read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**data, "graph_hash": "0" * 16}))
    with pytest.raises(RunError, match="make the plan again with `meshwright plan`"):
        run_plan(Job(plan=str(other), num_steps=2), tmp_path / "out")


def start_script(
    plan: Path, out: Path, data_seed: str, *options: str, num_ranks: int = 2
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return subprocess.run(
        [*command, str(HERE / "four_lines.py"), str(plan), str(out), data_seed, *options],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.fixture(scope="module")
def script_plan(tmp_path_factory):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    captured = capture_model(
        model,
        torch.randn(16, 8),
        targets=torch.zeros(16, dtype=torch.long),
        loss=nn.functional.cross_entropy,
        verify=False,
    )
    count = len(captured.graph.layers)
    path = tmp_path_factory.mktemp("script") / "plan.json"
    return make_plan(
        captured.graph, path, model="script", bounds=[(0, count // 2), (count // 2, count)], replicas=[1, 1]
    )


@pytest.mark.long
def test_four_lines_in_a_users_script_equal_plain_training(script_plan, tmp_path):
    done = start_script(script_plan, tmp_path / "model.pt", "1")
    assert done.returncode == 0, done.stderr
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    wanted = plain_training()
    assert state.keys() == wanted.keys()
    for key in wanted:
        assert (state[key] - wanted[key]).norm() <= 1e-4 * wanted[key].norm()


@pytest.mark.long
@pytest.mark.parametrize(("policy", "num_ranks"), [("partial:2", 2), ("backup:0", 3)])
def test_four_lines_under_a_policy_with_all_gradients_equal_plain_training(policy, num_ranks, script_plan, tmp_path):
    plan = read_document(Plan, script_plan)
    replicas = StagePlan(start=0, stop=plan.stages[-1].stop, ranks=(0, 1))
    cluster, exchange = f"{num_ranks}xcpu", with_policy(policy, num_ranks)
    plan = replace(plan, cluster=cluster, stages=(replicas,), num_microbatches=2, schedule="gpipe", exchange=exchange)
    path = write_document(plan, tmp_path / "policy.json")
    done = start_script(path, tmp_path / "model.pt", "1", "--policy", num_ranks=num_ranks)
    assert done.returncode == 0, done.stderr
    assert "last loss" in done.stdout
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    for key, wanted in plain_training(0.8).items():
        assert (state[key] - wanted).norm() <= 1e-4 * wanted.norm()


LEAVING = """
import atexit
import torch.distributed as dist
from meshwright.runtime import join_group
atexit.register(lambda: print("joined" if dist.is_initialized() else "left"))  # runs after those registered later
join_group()
"""


def test_a_script_leaves_the_process_group_before_python_ends():
    group = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", LEAVING],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **group, "MASTER_PORT": str(free_port())},
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "left\n"), done.stderr


def plain_training(rate_factor: float = 1.0):
    """What the script does, without Meshwright."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 8, generator=generator)
    dataset = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    loader = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, rate_factor)
    next(iter(loader))
    for _ in range(5):
        for inputs, targets in loader:
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return model.state_dict()


def worker_pids(rank: int) -> list[int]:
    """Processes of our own runs that work as a rank."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            command = (folder / "cmdline").read_bytes()
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ours = f"MESHWRIGHT_RUN_OF={os.getpid()}".encode() in environment
        if b"meshwright.training" in command and f"RANK={rank}".encode() in environment and ours:
            found.append(int(folder.name))
    return found


@pytest.fixture(autouse=True)
def _mark_own_runs(monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_RUN_OF", str(os.getpid()))


@pytest.mark.long
def test_a_model_that_bakes_its_batch_size_in_is_captured_at_the_microbatch_size(tmp_path, warm_ranks):
    """Planned for microbatches of 2 although its example has 4 samples, and trained so."""
    model = tmp_path / "baked.py"
    model.write_text(
        "import torch\nfrom torch import nn\n"
        "class Baked(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 1)\n"
        "    def forward(self, x):\n"
        "        rows = int(x.shape[0])\n"
        "        if rows not in (2, 4):\n"
        "            raise ValueError('two or four')\n"
        "        return self.second(torch.tanh(self.first(x).view(rows, 6))).square().mean()\n"
        "def build(batch_size=4):\n"
        "    return Baked(), (torch.randn(batch_size, 6),)\n"
    )
    plan = tmp_path / "plan.json"
    command = ["plan", f"{model}:build", "--cluster", "2xcpu", "--batch", "8", "-m", "2", "--out", str(plan)]
    assert invoke(command) == 0
    assert read_document(Plan, plan).microbatch_size == 2
    result = run_plan(Job(plan=str(plan), num_steps=4), tmp_path / "out")
    assert result.losses[-1] < result.losses[0]


@pytest.fixture
def subreaper():
    """Orphans become children of this process, as they do under a login session or the init of a container."""
    prctl, set_subreaper = ctypes.CDLL(None).prctl, 36
    prctl(set_subreaper, 1)
    yield
    prctl(set_subreaper, 0)


@pytest.mark.parametrize(
    ("number", "delay_s"),
    [
        pytest.param(signal.SIGINT, 0.0, marks=pytest.mark.long),  # while the ranks' interpreters start
        pytest.param(signal.SIGINT, 0.5, marks=pytest.mark.long),  # while they import torch
        (signal.SIGINT, 5.0),  # while they train
        pytest.param(signal.SIGTERM, 0.5, marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, 0.0, marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, 2.0, marks=pytest.mark.long),
    ],
)
def test_however_the_launcher_ends_no_rank_stays_and_no_trace_is_shown(
    gpt_plan, tmp_path, number, delay_s, request, subreaper
):
    if delay_s >= 5.0:  # nothing of it is about a start, which forks do not have
        request.getfixturevalue("warm_ranks")
    command = [
        sys.executable,
        "-m",
        "meshwright",
        "run",
        str(gpt_plan),
        "--steps",
        "100000",
        "--out",
        str(tmp_path / "o"),
    ]
    with (tmp_path / "err.txt").open("w") as errors:
        # Jobs that a shell starts in the background ignore SIGINT, and so would the tests' children.
        launcher = subprocess.Popen(["env", "--default-signal=INT", *command], stdout=errors, stderr=errors)
        try:
            deadline = time.monotonic() + 60
            while len(worker_pids(0)) + len(worker_pids(1)) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(delay_s)
            launcher.send_signal(number)
            code = launcher.wait(timeout=40)
        finally:
            launcher.kill()
            launcher.wait(timeout=10)
    deadline = time.monotonic() + 60  # a busy machine takes long to load what sees that its parent has gone
    while (worker_pids(0) or worker_pids(1)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not worker_pids(0)
    assert not worker_pids(1)
    text = (tmp_path / "err.txt").read_text()
    assert "Traceback" not in text
    if number is not signal.SIGKILL:
        assert code == 1
        assert text == (
            f"error: The run was stopped by {number.name}; all ranks were ended and no results were written. "
            "Start the run again with the same command.\n"
        )
        assert not (tmp_path / "o").exists()


def test_results_that_cannot_be_written_are_refused_before_the_first_step(gpt_plan, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="results cannot be written to this folder"):
        run_plan(Job(plan=str(gpt_plan), num_steps=1), tmp_path / "file" / "out")
    job = Job(plan=str(gpt_plan), num_steps=1, save_model=str(tmp_path / "file" / "model.pt"))
    with pytest.raises(RunError, match="results cannot be written to this folder"):
        run_plan(job, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["timeline.json", "result.json"])
def test_a_pipe_in_the_place_of_a_result_is_refused_before_the_first_step(gpt_plan, tmp_path, name):
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out" / name)
    events = Collector()
    with pytest.raises(DocumentError, match="cannot be written: it is a named pipe"):
        run_plan(Job(plan=str(gpt_plan), num_steps=1), tmp_path / "out", events)
    assert not events.losses
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]
