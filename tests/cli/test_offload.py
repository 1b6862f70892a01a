"""Optimizers on the host, from the command line: planned, simulated, shown, refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from meshwright.host.memory_limits import Drive, Memory
from meshwright.runtime.offload import pinned_memory as room
from meshwright.spec import Cluster, Nvme, Offload, Plan, load_cluster, read_document, write_document
from meshwright.training import launch

PLAN = ["plan", "gpt-tiny", "--batch", "16", "--precision", "mixed", "--grad-dtype", "bfloat16"]


@pytest.fixture
def described(tmp_path):
    """Writes a cluster of two A100 with drives, and hosts that have so much memory, as a file."""

    def write(host_memory_bytes: int = 2**40, **changes: int) -> str:
        cluster = load_cluster("2xA100")
        drives = Nvme(capacity_bytes=2**40, read_bytes_per_s=20e9, write_bytes_per_s=10e9)
        kind = replace(cluster.device_kinds[0], **changes)
        if changes:
            # Without float16 no GPU by its description: its memory may be used to the byte.
            rates = {name: rate for name, rate in kind.peak_flops_per_s.items() if name != "float16"}
            kind = replace(kind, peak_flops_per_s=rates)
        node = replace(cluster.nodes[0], nvme=drives, host_memory_bytes=host_memory_bytes)
        path = tmp_path / "cluster.json"
        write_document(replace(cluster, device_kinds=(kind,), nodes=(node,)), path)
        assert read_document(Cluster, path).nodes[0].nvme == drives
        return str(path)

    return write


@pytest.mark.parametrize("place", ["host", "nvme"])
@pytest.mark.matrix
def test_an_offloaded_plan_is_simulated_as_it_was_planned(run, described, place, tmp_path):
    path = tmp_path / "plan.json"
    options = ("--cluster", described(), "--zero", 1, "--offload", f"optimizer={place}")
    planned = json.loads(run(*PLAN, *options, "--json", "--out", path, code=0)[1])
    assert read_document(Plan, path).offload == Offload(optimizer=place)
    assert planned["plans"][0]["offload_s"] > 0
    assert all(row["parts_bytes"]["optimizer states"] == 0 for row in planned["ranks"])
    (node,) = planned["nodes"]
    assert (node["nvme_bytes"] > 0) == (place == "nvme")
    found = json.loads(run("simulate", path, "--json", code=0)[1])
    assert found["steady"]["step_time_s"] == pytest.approx(planned["plans"][0]["step_time_s"], rel=1e-9)
    assert found["nodes"] == planned["nodes"]
    kept, used = f"optimizer states {'on the host' if place == 'host' else 'on NVMe'}", "The host of node0 keeps"
    for words, told in ((("show", path), kept), (("simulate", path), used), ((*PLAN, *options), kept)):
        _, out, _ = run(*words, code=0)
        assert told in " ".join(out.split())


def test_a_model_that_only_fits_without_its_states_is_told_so(run, described):
    # Exact slicing keeps nothing away from devices unless it is told to.
    options = ("--cluster", described(memory_bytes=8 * 2**20), "-m", 1, "--method", "slicing")
    assert "Keep optimizer states on the host (--offload optimizer=host)" in run(*PLAN, *options, code=3)[2]
    assert run(*PLAN, *options, "--offload", "optimizer=host")[0] == 0


def test_what_only_fits_without_its_states_keeps_them_on_the_host(run, described, tmp_path):
    path = tmp_path / "plan.json"
    options = ("-m", 1, "--ranks", 1, "--zero", 0, "--recompute", "none", "--out", path)
    for memory_bytes, away in ((8 * 2**20, Offload(optimizer="host")), (2**30, Offload())):
        _, out, _ = run(*PLAN, *options, "--cluster", described(memory_bytes=memory_bytes), code=0)
        assert read_document(Plan, path).offload == away
        assert ("optimizer states on the host" in " ".join(out.split())) == (away != Offload())


def test_a_model_that_only_fits_without_its_activations_is_told_so(run, described):
    options, away = ("--ranks", 1, "--microbatch-size", 8, "--recompute", "full"), ("--offload", "activations=host")
    peaks = []
    for more in ((), away):
        _, out, _ = run(*PLAN, "--cluster", described(memory_bytes=2**30), *options, *more, "--json", code=0)
        peaks += [row["peak_bytes"] for row in json.loads(out)["ranks"]]
    assert peaks[1] < peaks[0]
    cluster = described(memory_bytes=sum(peaks) // 2)
    _, _, error = run(*PLAN, "--cluster", cluster, *options, "--method", "slicing", code=3)
    assert "Keep activations on the host (--offload activations=host)" in error
    assert run(*PLAN, "--cluster", cluster, *options, *away)[0] == 0


@pytest.mark.long
def test_a_model_of_which_two_units_fit_is_planned_with_its_parameters_on_the_host(run, described, tmp_path):
    options = (
        "--cluster",
        described(memory_bytes=5 * 2**19),
        "--ranks",
        1,
        "-m",
        1,
        "--recompute",
        "full",
        "--zero",
        3,
    )
    assert run(*PLAN, *options, "--offload", "optimizer=host")[0] == 3
    path = tmp_path / "plan.json"
    _, out, _ = run(*PLAN, *options, "--offload", "optimizer=host,parameters=host", "--out", path, code=0)
    assert "parameters and optimizer states on the host" in " ".join(out.split())
    assert read_document(Plan, path).offload == Offload(optimizer="host", parameters="host")
    assert run("simulate", path)[0] == 0


def test_hosts_without_room_are_named(run, described):
    _, out, error = run(*PLAN, "--cluster", described(2**20), "--offload", "optimizer=host", code=3)
    assert "not into the nodes' host memory or drives" in error
    assert "of 1 MiB" in error
    assert "Nearest plan" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cluster", "2xA100", "--offload", "optimizer=nvme"], "node 'node0' of cluster '2xA100' has no drives"),
        (["--cluster", "2xL40S", "--offload", "optimizer=host"], "Write host_memory_bandwidth_bytes_per_s = 400e9"),
        (["--cluster", "2xA100", "--offload", "weights=host"], "expected WHAT=WHERE"),
        (["--cluster", "2xA100", "--zero", "1", "--offload", "optimizer=host,parameters=host"], "expected zero = 3"),
        (["--cluster", "2xA100", "--offload", "optimizer=host", "--schedule", "pipedream"], "asynchronous schedule"),
        (["--cluster", "2xA100", "--offload", "optimizer=host", "--method", "place"], "--offload"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(run, options, message):
    code, _, error = run(*PLAN, *options)
    assert code != 0
    assert message in error


def test_an_offloaded_plan_is_run_but_not_compared_nor_said_where_others_cannot(run, tmp_path):
    path = tmp_path / "layout"
    _, out, _ = run(*PLAN, "--cluster", "2xA100", "--offload", "optimizer=host", "--out", path, code=0)
    assert "start it with: bash" in " ".join(out.split())
    code, _, error = run("run", path / "plan.json", "--device", "cpu", "--offload-folder", tmp_path)
    assert code != 0
    assert "keeps no states on drives, but --offload-folder" in error
    code, _, error = run("show", path / "plan.json", "--as", "megatron")
    assert code != 0
    assert "keeps states on the host with its distributed optimizer (ZeRO 1)" in error
    code, _, error = run("simulate", path / "plan.json", "--exchange", "all")
    assert code != 0
    assert "expected everything on the devices" in error


def test_room_for_states_is_looked_for_before_ranks_start(run, described, monkeypatch, tmp_path):
    path = tmp_path / "plan.json"
    assert run(*PLAN, "--cluster", described(), "--offload", "optimizer=nvme", "--out", path)[0] == 0

    def start(**options):
        return run("run", path, "--device", "cpu", "--out", tmp_path / "out", "--offload-folder", options["folder"])

    def begun(*_):
        raise AssertionError("no rank may start")

    monkeypatch.setattr(launch, "elastic_launch", begun)
    (tmp_path / "file").write_text("")
    code, _, error = start(folder=tmp_path / "file" / "states")
    assert code != 0
    assert "this folder cannot hold optimizer states (Not a directory)" in error
    monkeypatch.setattr(room, "find_drive", lambda *_: Drive(kind="ext4", free_bytes=10**5))
    code, _, error = start(folder=tmp_path / "states")
    assert code != 0
    assert "of optimizer states on a drive of host" in error
    assert "which has 97.7 KiB free" in error
    assert not (tmp_path / "states").exists()
    memory = Memory(total_bytes=2**20, available_bytes=2**20, limit_bytes=None)
    monkeypatch.setattr(room, "find_memory", lambda _: memory)
    monkeypatch.setattr(room, "find_drive", lambda *_: Drive(kind="tmpfs", free_bytes=2**40))
    code, _, error = start(folder=tmp_path / "states")
    assert code != 0
    assert "which is in memory (tmpfs), not on a drive; 1 MiB are available there" in error
