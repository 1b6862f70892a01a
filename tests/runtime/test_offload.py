"""What is kept on hosts and drives: what is refused before a run, files that vanish, threads that pass errors on."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.capture import capture_model, flatten_batch
from meshwright.host import Host
from meshwright.host.memory_limits import Drive, Memory
from meshwright.program import count_host_needs
from meshwright.runtime import open_session
from meshwright.runtime.offload import pinned_memory as room
from meshwright.runtime.offload.copy_streams import HostStreams
from meshwright.runtime.offload.pinned_memory import PAGE_BYTES, DriveFile, HostMemory
from meshwright.runtime.offload.states import use_fused
from meshwright.runtime.rank_program import HostItem
from meshwright.spec import GradientExchange, Offload, Plan, PlanError, RunError, StagePlan, Workload
from meshwright.spec.offload_instructions import CopyDown, CopyUp, SavedDown, SavedUp

LOSS = nn.functional.cross_entropy


@pytest.fixture
def one_rank():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def open_net(optimizer=torch.optim.AdamW, *, offload_folder=None, width=8, **options):
    """A session of a small net on one rank, and its batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 5))
    workload = options.pop("workload", Workload(global_batch=4))
    dtype = getattr(torch, workload.numbers.values)
    model, batch = model.to(dtype), (torch.randn(4, 4, dtype=dtype), torch.randint(5, (4,)))
    captured = capture_model(model, batch[:1], targets=batch[1:], loss=LOSS, verify=False)
    plan = Plan(
        model="own",
        graph_hash=captured.graph.content_hash,
        cluster="",
        workload=workload,
        stages=(StagePlan(start=0, stop=len(captured.graph.layers), ranks=(0,)),),
        num_microbatches=2,
        **({"offload": Offload(optimizer="nvme")} | options),
    )
    made = optimizer(model.parameters(), lr=1e-2)
    session = open_session(captured, plan, made, offload_folder=offload_folder)
    return session, made, flatten_batch(captured, batch[:1], batch[1:])


def test_a_host_without_memory_is_named_before_the_run(one_rank, monkeypatch):
    little = Memory(total_bytes=4096, available_bytes=1000, limit_bytes=None)
    monkeypatch.setattr(room, "find_memory", lambda _: little)
    # Four numbers of four bytes for each of 85 elements: gradient, parameter, two moments; AdamW's four counters.
    with pytest.raises(RunError, match=r"needs 1\.34 KiB more memory on host .*; 1000 B are available there"):
        open_net(offload=Offload(optimizer="host"))


@pytest.mark.parametrize("place", ["host", "nvme"])
@pytest.mark.parametrize("precision", ["float32", "mixed"])
@pytest.mark.parametrize("bucket_bytes", [2**12, 2**20])
def test_a_run_takes_what_was_counted(one_rank, tmp_path, place, precision, bucket_bytes):
    session, _, tensors = open_net(
        offload_folder=tmp_path,
        width=4096,
        offload=Offload(optimizer=place),
        workload=Workload(global_batch=4, precision=precision),
        exchange=GradientExchange(bucket_bytes=bucket_bytes),
    )
    for step in range(2):
        session.run_step(step, tensors)
    needs = count_host_needs(session.plan, session.graph, 0)
    assert session.count_host_bytes() == pytest.approx(needs.host_bytes, rel=0.02)
    if place == "nvme":
        assert session.updates.states._file.num_bytes == pytest.approx(needs.drive_bytes, rel=0.02)
    assert (needs.drive_bytes > 0) == (place == "nvme")
    assert needs.resident_bytes == 0
    session.close()


def test_a_host_without_memory_for_activations_is_named_before_the_run(one_rank, monkeypatch):
    little = Memory(total_bytes=4096, available_bytes=1000, limit_bytes=None)
    monkeypatch.setattr(room, "find_memory", lambda _: little)
    # What Tanh saves of two samples, 512 numbers of four bytes each.
    with pytest.raises(RunError, match=r"needs 4 KiB more memory on host .*plan with less offload"):
        open_net(offload=Offload(activations="host"), width=512)


def test_steps_with_activations_on_the_host_reuse_its_memory(one_rank):
    session, _, batch = open_net(offload=Offload(activations="host"), width=512)
    plain, _, _ = open_net(offload=Offload(), width=512)
    for step in range(3):
        made, wanted = session.run_step(step, batch), plain.run_step(step, batch)
        assert [[item.value for item in items] for items in made.values()] == [
            [item.value for item in items] for items in wanted.values()
        ]
        # One microbatch is under way at a time.
        assert session.count_host_bytes() == 4096
        assert [(type(item), item.microbatch, size) for item, size in session.hosting.moved] == [
            (kind, microbatch, 4096) for microbatch in (0, 1) for kind in (SavedDown, SavedUp)
        ]
    session.close()
    plain.close()


def test_a_full_drive_is_named_before_the_run(one_rank, monkeypatch, tmp_path):
    monkeypatch.setattr(room, "Host", partial(Host, space=lambda _: (4096, 100)))
    with pytest.raises(RunError, match=r"keeps 680 B of optimizer states on a drive of host .*, which has 100 B free"):
        open_net(offload_folder=tmp_path)


def test_files_in_memory_take_memory_of_the_host(one_rank, monkeypatch, tmp_path):
    monkeypatch.setattr(room, "find_drive", lambda *_: Drive(kind="tmpfs", free_bytes=2**30))
    session, _, _ = open_net(offload_folder=tmp_path)
    assert session.remark.startswith(f"{tmp_path} is in memory (tmpfs), not on a drive")
    session.close()
    # Gradients, parameters and two moments on the host, which are on the drive, too; AdamW's counters.
    needs = count_host_needs(session.plan, session.graph, 0)
    enough = needs.host_bytes + needs.drive_bytes
    memory = Memory(total_bytes=4096, available_bytes=enough - 1, limit_bytes=None)
    monkeypatch.setattr(room, "find_memory", lambda _: memory)
    with pytest.raises(
        RunError, match=r"680 B of them in .*, which is in memory \(tmpfs\), not on a drive; .* are available"
    ):
        open_net(offload_folder=tmp_path)


def test_a_folder_is_made(one_rank, tmp_path):
    session, _, tensors = open_net(offload_folder=tmp_path / "made" / "here")
    session.run_step(0, tensors)
    session.close()


@pytest.mark.parametrize("folder", ["file/here", "file"])
def test_a_folder_that_cannot_be_written_to_is_named(one_rank, tmp_path, folder):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RunError, match=r"folder cannot hold optimizer states .*Give a folder on a drive with enough room"
    ):
        open_net(offload_folder=tmp_path / folder)


def test_parts_of_buckets_are_refused(one_rank):
    exchange = GradientExchange(partition_bytes=100)
    with pytest.raises(PlanError, match=r"splits gradient buckets into parts .*Leave partition_bytes out"):
        open_net(exchange=exchange)


@pytest.mark.parametrize("place", ["host", "nvme"])
def test_rates_are_those_of_the_users_own_optimizer(one_rank, tmp_path, place):
    """A scheduler that knows nothing of the host moves the rate, down to nothing."""
    session, optimizer, tensors = open_net(offload_folder=tmp_path, offload=Offload(optimizer=place))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    session.run_step(0, tensors)
    weights = [item.detach().clone() for item in session.parameters.values()]
    scheduler.step()
    session.run_step(1, tensors)
    assert all(map(torch.equal, weights, session.parameters.values()))
    session.updates.set_rate(0.1)
    session.run_step(2, tensors)
    assert not any(map(torch.equal, weights, session.parameters.values()))
    session.close()


def test_nothing_of_a_file_has_a_name(one_rank, tmp_path):
    session, optimizer, tensors = open_net(offload_folder=tmp_path)
    for step in range(2):
        session.run_step(step, tensors)
    assert list(tmp_path.iterdir()) == []
    held = [item for state in optimizer.state.values() for name, item in state.items() if name != "step"]
    assert len(held) == 8
    assert all(item.numel() == 0 for item in held), "moments lie on the drive between steps"
    kept = session.updates.state()["optimizer"]["state"]
    assert all(state["exp_avg_sq"].abs().sum() > 0 for state in kept.values())
    session.close()


def test_a_drive_has_room_for_all_states_from_the_start(one_rank, tmp_path):
    """Master weights are written at once, moments in the first step: to the same place."""
    session, _, tensors = open_net(offload_folder=tmp_path, workload=Workload(global_batch=4, precision="mixed"))
    file = session.updates.states._file
    before = file.num_bytes
    for step in range(2):
        session.run_step(step, tensors)
    assert file.num_bytes == before
    session.close()


@pytest.mark.parametrize("place", ["host", "nvme"])
def test_a_step_behind_the_end_is_refused(one_rank, tmp_path, place):
    session, _, tensors = open_net(offload_folder=tmp_path, offload=Offload(optimizer=place))
    session.run_step(0, tensors)
    session.close()
    with pytest.raises(RunError, match="The session was closed"):
        session.run_step(1, tensors)


@pytest.mark.parametrize("place", ["device", "host"])
def test_optimizers_that_compute_the_loss_again_are_refused(one_rank, place):
    with pytest.raises(PlanError, match=r"LBFGS\.step needs a closure that computes the loss once more"):
        open_net(torch.optim.LBFGS, offload=Offload(optimizer=place))


def test_a_file_gives_back_what_was_written(tmp_path):
    file = DriveFile(tmp_path, 3 * PAGE_BYTES)
    memory = HostMemory(torch.device("cpu"))
    wrote, read = (memory.new(PAGE_BYTES) for _ in range(2))
    wrote.view(0, (PAGE_BYTES,), torch.uint8).copy_(torch.arange(PAGE_BYTES) % 251)
    assert [file.reserve(100), file.reserve(PAGE_BYTES)] == [0, PAGE_BYTES]
    file.write(PAGE_BYTES, memoryview(wrote.memory))
    file.read(PAGE_BYTES, memoryview(read.memory))
    values = [item.view(0, (PAGE_BYTES,), torch.uint8) for item in (wrote, read, file.map(PAGE_BYTES, PAGE_BYTES))]
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[0], values[2])
    assert file.num_bytes == 3 * PAGE_BYTES
    # An optimizer that keeps more than was said.
    assert file.reserve(5 * PAGE_BYTES) == 2 * PAGE_BYTES
    assert file.num_bytes == 7 * PAGE_BYTES
    file.close()


WRITER = """
import sys, time
from pathlib import Path
from meshwright.runtime.offload.pinned_memory import DriveFile
file = DriveFile(Path(sys.argv[1]), 2**22)
print("there", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(os.name != "posix", reason="files vanish with their process on POSIX")
def test_a_killed_run_leaves_nothing_on_the_drive(tmp_path):
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().strip() == "there"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
    assert list(tmp_path.iterdir()) == []


def item_of(index, instruction, name, awaits=()):
    return HostItem(index=index, stream=index, name=name, instruction=instruction, awaits=awaits, marks=())


def test_what_goes_wrong_in_a_thread_is_raised_by_those_who_wait():
    streams = HostStreams(torch.device("cpu"))
    down, up = CopyDown(stage=0, piece=0, num_bytes=8), CopyUp(stage=0, piece=0, num_bytes=8)

    def fail():
        raise RunError("The drive is gone.")

    works = streams.begin([(item_of(0, down, "down", (7,)), fail), (item_of(1, up, "up", (0,)), lambda: 8)], more={})
    time.sleep(0.01)
    assert not works[0].is_set, "what it waits for has not happened"
    streams.happened(7)
    with pytest.raises(RunError, match="The drive is gone"):
        works[1].wait()
    assert streams.moved == []
    streams.close()


def test_what_still_waits_is_given_up_when_a_session_ends():
    streams = HostStreams(torch.device("cpu"))
    down = CopyDown(stage=0, piece=0, num_bytes=8)
    works = streams.begin([(item_of(0, down, "down", (7,)), lambda: 8)], more={})
    streams.close()
    with pytest.raises(RunError, match="closed while copies to or from the host were in progress"):
        works[0].wait()


def test_one_pass_over_elements_unless_the_user_chose_otherwise():
    weights = [nn.Parameter(torch.ones(2))]
    chosen = [
        torch.optim.AdamW(weights),
        torch.optim.SGD(weights, lr=0.1),
        torch.optim.AdamW(weights, fused=False),
        torch.optim.Adam(weights, foreach=True),
        torch.optim.NAdam(weights),
    ]
    for item in chosen:
        use_fused(item)
    assert [item.param_groups[0].get("fused") for item in chosen] == [True, True, False, None, None]


def test_a_plan_says_where_parameters_may_lie():
    with pytest.raises(PlanError, match="keeps parameters on the host with zero = 0"):
        replace(plan_away(), exchange=GradientExchange())


def plan_away():
    return Plan(
        model="own",
        graph_hash="",
        cluster="",
        workload=Workload(global_batch=4),
        stages=(StagePlan(start=0, stop=1, ranks=(0,)),),
        num_microbatches=2,
        exchange=GradientExchange(zero=3),
        offload=Offload(optimizer="host", parameters="host"),
    )
