"""Ranks that stop, hang, lag, leave the loop or read other data: who is named, and what the others waited for."""

import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from meshwright.capture import capture_model
from meshwright.spec import DocumentError, RunError
from meshwright.training import Job, run_plan
from meshwright.training.checkpoint import find_newest, save_state
from meshwright.training.losses import digest_batch
from meshwright.training.watch import Paces, RankState
from meshwright.zoo import load_model
from tests.training.test_run import Collector, make_plan, worker_pids

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]
HERE = Path(__file__).parent
SCRIPT = HERE / "faulty_script.py"


def plan_of(folder, *, pipeline):
    source = load_model(f"{SCRIPT}:build", fake=True)
    captured = capture_model(source.model, source.inputs, targets=source.targets, loss=source.loss, verify=False)
    count = len(captured.graph.layers)
    bounds, replicas = ([(0, 1), (1, count)], [1, 1]) if pipeline else ([(0, count)], [2])
    return make_plan(captured.graph, folder / "plan.json", model=f"{SCRIPT}:build", bounds=bounds, replicas=replicas)


def run_script(plan, fault, hang_after=""):
    """Return the exit code and the output of the script; all of its processes have ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(SCRIPT), str(plan), fault, str(hang_after)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("pipeline", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize(
    ("fault", "hang_after", "said"),
    [
        ("loop", 4, "Rank 1 hangs: it is in the script after step 2, without progress for 4"),
        pytest.param(
            "stop",
            4,
            "Rank 1 has not answered for 4 s: a signal stopped its process (SIGSTOP, SIGTSTP). "
            "Meanwhile rank 0 runs step 3, waits for ",
            marks=pytest.mark.long,
        ),
        pytest.param("save", "", "Rank 1 calls `save` after step 2, but rank 0 is in step 3.", marks=pytest.mark.long),
        pytest.param("exit", "", "Rank 1 has ended after step 2, but rank 0 is in step 3.", marks=pytest.mark.long),
        ("data", "", "Rank 1 read another batch than rank 0 in step 3. Every rank must read the same global batches"),
    ],
)
def test_the_odd_rank_is_named(tmp_path, fault, hang_after, said, pipeline):
    code, shown = run_script(plan_of(tmp_path, pipeline=pipeline), fault, hang_after)
    assert code == 1
    assert said in shown, shown
    if fault in ("loop", "stop"):
        assert "faulty_script.py" in shown.partition("tack")[2], "the stack of the rank"


@pytest.mark.long
def test_who_waits_for_a_rank_that_failed_says_so(tmp_path):
    code, shown = run_script(plan_of(tmp_path, pipeline=False), "raise")
    assert code == 1
    assert "ValueError: this sample is broken" in shown
    assert "has ended after" not in shown


@pytest.mark.long
def test_an_idle_trainer_beside_another_one_does_not_hang(tmp_path):
    code, shown = run_script(plan_of(tmp_path, pipeline=False), "two", 2)
    assert code == 0, shown
    assert shown.count("both") == 2


@pytest.mark.long
def test_a_checkpoint_in_the_background_is_complete_at_the_end_of_a_script(tmp_path):
    plan = plan_of(tmp_path, pipeline=False)
    code, shown = run_script(plan, "background")
    assert code == 0, shown
    assert find_newest(Path(f"{plan}.kept")).name == "step-00000001"


@pytest.mark.long
def test_a_data_set_that_hangs_is_named_with_the_stack_of_its_reader(tmp_path):
    code, shown = run_script(plan_of(tmp_path, pipeline=False), "dataset", 4)
    assert code == 1
    assert "Rank 1 hangs: it runs step 2, waits for load 3 before F0.3, without progress for 4" in shown, shown
    assert "in __getitem__" in shown.partition("Stack of meshwright-producer")[2]


@pytest.mark.long
def test_ranks_agree_on_the_end_of_iterable_data_sets(tmp_path):
    code, shown = run_script(plan_of(tmp_path, pipeline=True), "iterable")
    assert code == 0, shown
    assert "The data set of rank 1 has ended after 2 steps, and the others have more: training ends here." in shown
    assert shown.count("steps: 2") == 2


@pytest.mark.long
def test_a_rank_that_becomes_slower_is_named_and_the_run_goes_on(tmp_path):
    code, shown = run_script(plan_of(tmp_path, pipeline=False), "lag")
    assert code == 0, shown
    assert "Rank 1 lags: it computes " in shown
    assert "Rank 0 lags" not in shown


@pytest.mark.long
def test_a_run_names_the_rank_that_was_stopped(tmp_path, monkeypatch):
    """And leaves no files of torch's agent behind."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("MESHWRIGHT_RUN_OF", str(os.getpid()))
    monkeypatch.setattr(tempfile, "tempdir", None)
    stopped = threading.Event()

    def stop_rank_1(done):
        if done == 3 and not stopped.is_set():
            stopped.set()
            (pid,) = worker_pids(rank=1)
            os.kill(pid, signal.SIGSTOP)

    began = time.monotonic()
    job = Job(plan=str(plan_of(tmp_path, pipeline=True)), num_steps=20_000, hang_after_s=5.0)
    with pytest.raises(RunError, match=r"Rank 1 has not answered for 5 s: a signal stopped its process") as caught:
        run_plan(job, tmp_path / "out", Collector(stop_rank_1))
    assert "rank 0 runs step" in str(caught.value)
    assert "Stacks of rank 1:" in str(caught.value)
    assert time.monotonic() - began < 60
    assert not worker_pids(rank=0)
    assert not worker_pids(rank=1)
    assert not list(temporary.iterdir())


def states(seconds, steps):
    return {
        rank: RankState(
            beat=1,
            phase="STEP",
            steps=steps,
            computed_s=computed,
            waits=False,
            idle_s=0.0,
            doing="",
            host="",
            process=1,
            stacks=-1,
        )
        for rank, computed in enumerate(seconds)
    }


def test_only_a_rank_that_lags_twice_is_named():
    paces = Paces()
    assert not paces.compare(states([0.1, 0.2, 0.1], 1)), "the first step is no measure"
    assert not paces.compare(states([1.0, 2.0, 1.0], 10))
    assert not paces.compare(states([2.0, 4.0, 2.0], 20)), "rank 1 has more work"
    assert not paces.compare(states([3.0, 6.0, 4.0], 30)), "once"
    assert not paces.compare(states([4.0, 8.0, 5.0], 40)), "as fast as before"
    assert not paces.compare(states([5.0, 12.0, 6.0], 50)), "once"
    said = paces.compare(states([6.0, 16.0, 7.0], 60))
    assert said.startswith(
        "Rank 1 lags: it computes 2.0 times as long per step as in its first steps, and the others 1.0"
    )
    assert not paces.compare(states([7.0, 20.0, 8.0], 70)), "it is known"


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64])
def test_a_digest_changes_with_every_sample(dtype):
    values = torch.arange(64 * 1000) % 251
    batch = (values % 2 if dtype is torch.bool else values).to(dtype).reshape(64, 1000)
    found = digest_batch([batch], 8)
    assert found == digest_batch([batch.clone()], 8)
    for row in range(64):
        changed = batch.clone()
        changed[row] = batch[(row + 1) % 64].flip(0) if dtype is not torch.bool else ~batch[row]
        assert digest_batch([changed], 8) != found, row
    assert digest_batch([batch.flip(0)], 8) != found, "the order counts"


def test_digests_can_be_squared_and_added_exactly():
    for ranks in (1, 3, 1000, 100_000):
        for seed in range(20):
            digest = int(digest_batch([torch.randn(7, generator=torch.Generator().manual_seed(seed))], ranks))
            assert digest >= 0
            assert ranks * digest**2 < 2**53


def test_weights_that_do_not_fit_are_refused(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
    try:
        with pytest.raises(DocumentError, match=r"m.pt: cannot be written \(.*Choose a folder with room for 4 MiB"):
            save_state({"w": torch.ones(1 << 20)}, tmp_path / "m.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())
