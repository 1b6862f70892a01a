"""Real runs in labs: the same losses as without, and requests that cannot be met."""

from pathlib import Path

import pytest

from meshwright.cli.main import invoke
from meshwright.emulation.janitor import PREFIX
from meshwright.emulation.quotas import find_cpu_groups
from meshwright.spec import read_document
from meshwright.training import RunResult
from tests.emulation.clusters import EXAMPLES

LABS = str(EXAMPLES / "two-labs.toml")
PLAN = ["plan", "gpt-tiny", "--cluster", LABS, "--precision", "float32", "--batch", "16", "--out", "plan.json"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.root
@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_losses_are_those_without_emulation(folder, capfd):
    """Two stages with two replicas each: sends between the labs, gradient reductions inside of them."""
    assert invoke([*PLAN, "--stages", "2", "-m", "4", "--schedule", "1f1b"]) == 0
    assert invoke(["run", "plan.json", "--steps", "3", "--here", "--out", "plain"]) == 0
    assert invoke(["run", "plan.json", "--steps", "3", "--emulate", LABS, "--out", "emulated"]) == 0
    plain, emulated = (read_document(RunResult, Path(name) / "result.json") for name in ("plain", "emulated"))
    assert emulated.losses == pytest.approx(plain.losses, rel=1e-6)
    assert not list(find_cpu_groups()[0].glob(f"{PREFIX}*"))
    assert "hostname of the client socket" not in capfd.readouterr().err


@pytest.mark.root
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scenario", "jitter", "--emulate", LABS], "effects[0]: an effect of kind 'jitter' cannot be emulated"),
        (["--scenario", "jitter"], "--scenario changes an emulated cluster: give --emulate CLUSTER, too."),
        (["--emulate", "2xcpu"], "The plan uses device 3, and the emulated cluster '2xcpu' has 2 devices."),
        (["--emulate", LABS, "--dry"], "--dry trains nothing and measures no times: leave out --emulate."),
        (["--emulate", "missing.toml"], "missing.toml"),
    ],
)
def test_requests_that_cannot_be_met(folder, options, message, capsys):
    assert invoke([*PLAN, "--stages", "2", "-m", "4", "--schedule", "1f1b"]) == 0
    assert invoke(["run", "plan.json", *options]) != 0
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
