"""What torch says, asked in processes of its own: that two meet, that one fails, hangs, dies or talks nonsense."""

import os
import signal
import sys
import time

import pytest
import torch

from meshwright.host import Host, TorchFacts, ask_torch
from meshwright.host.host import Ran, run_program
from meshwright.host.torch_probe import check_pair, check_torch, read_probe
from tests.host.machines import make_host

BUILD = '{"build": {"torch": "2.13.0", "cuda": "13.0", "nccl": "2.28.9"}}\n'
DEVICE = '{"device": {"name": "NVIDIA H200", "memory_bytes": 150109880320, "capability": [9, 0], "uuid": "1234"}}\n'


@pytest.mark.distributed
@pytest.mark.long
def test_two_processes_meet_on_this_machine(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    facts = ask_torch(Host(name="localhost"))
    assert facts.build["torch"] == torch.__version__
    assert facts.pairs["127.0.0.1"] == {"pair": "127.0.0.1"}
    assert [finding.status for finding in check_pair(Host(), facts)] == ["ok"]


@pytest.mark.long
@pytest.mark.distributed
def test_an_interface_that_is_not_there_keeps_them_apart(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    facts = ask_torch(Host(name="localhost"))
    assert facts.build, "what was found before the failure is kept"
    (finding,) = check_pair(Host(), facts)
    assert finding.status == "problem"
    assert "nope0" in finding.found


def test_a_program_that_hangs_is_ended():
    start = time.monotonic()
    ran = run_program([sys.executable, "-c", "import time; print('first', flush=True); time.sleep(60)"], 1.5)
    assert time.monotonic() - start < 10
    assert (ran.code, ran.output) == (None, "first\n")


def test_a_driver_that_hangs_is_a_problem_and_the_versions_are_kept(tmp_path):
    facts = read_probe(Ran(code=None, output=BUILD), 30)
    findings = {finding.name: finding for finding in check_torch(make_host(tmp_path), facts)}
    assert findings["torch"].status == "problem"
    assert "30 s" in findings["torch"].found
    assert findings["CUDA of torch"].found == "13.0"


@pytest.mark.skipif(sys.platform == "win32", reason="no signals on Windows")
def test_a_process_that_dies_is_told_with_its_signal(tmp_path):
    ran = run_program([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"], 20)
    facts = read_probe(ran, 30)
    (finding,) = check_torch(make_host(tmp_path), facts)
    assert finding.status == "problem"
    assert f"signal {int(signal.SIGSEGV)}" in finding.found


def test_a_torch_that_cannot_be_imported_is_told_with_its_error(tmp_path):
    error = "Traceback ...\nImportError: libcudart.so.13: cannot open shared object file\n"
    (finding,) = check_torch(make_host(tmp_path), read_probe(Ran(code=1, error=error), 30))
    assert "libcudart.so.13" in finding.found


@pytest.mark.parametrize("output", ["", "nonsense", "[1, 2]", '{"build": 3}', '{"device": {}}', "[" * 100_000])
def test_nonsense_is_no_fact(tmp_path, output):
    facts = read_probe(Ran(code=0, output=output), 30)
    assert facts.build == {}
    list(check_torch(make_host(tmp_path), facts))


def test_devices_are_told(tmp_path):
    facts = read_probe(Ran(code=0, output=BUILD + DEVICE), 30)
    told = {finding.name: finding.found for finding in check_torch(make_host(tmp_path), facts)}
    assert told["GPU of torch"] == "NVIDIA H200, 140 GiB"
    assert told["NCCL of torch"] == "2.28.9"


def test_a_driver_without_a_device_for_torch_is_a_problem_unless_it_was_asked_for(tmp_path):
    driver = {"/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15\n"}
    facts = read_probe(Ran(code=0, output=BUILD), 30)

    def judge(**environment):
        host = make_host(tmp_path, driver, environment=environment)
        return {finding.name: finding.status for finding in check_torch(host, facts)}["GPU of torch"]

    assert judge() == "problem"
    assert judge(CUDA_VISIBLE_DEVICES="") == "note"


def test_without_torch_it_is_said_how_to_install_it():
    facts = TorchFacts(installed=False, build={}, devices=(), pairs={})
    assert list(check_torch(Host(), facts)) == []
    (finding,) = check_pair(Host(), facts)
    assert "pip install 'meshwright[torch]'" in finding.remedy


@pytest.mark.long
def test_no_program_is_left_behind():
    ran = run_program([sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"], 1.5)
    with pytest.raises(ProcessLookupError):
        os.kill(int(ran.output), 0)
