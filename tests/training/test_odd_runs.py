"""Runs that end in odd ways, and models with odd parameters, from the command line."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshwright.cli.main import invoke
from meshwright.spec import read_document
from meshwright.training import RunResult
from tests.training.run_models import Partly

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]
MODEL = f"{Path(__file__).with_name('run_models.py')}:partly"


@pytest.fixture
def meshwright(tmp_path, capsys, monkeypatch, warm_ranks):
    monkeypatch.chdir(tmp_path)

    def call(*words):
        code = invoke([str(word) for word in words])
        said = capsys.readouterr()
        return code, " ".join((said.out + said.err).split())

    options = ("--cluster", "2xcpu", "--batch", 8, "--stages", 2, "-m", 4, "--schedule", "1f1b", "--out", "plan.json")
    assert call("plan", MODEL, *options)[0] == 0
    return call


@pytest.mark.long
def test_scales_are_clipped_and_what_nothing_reads_is_saved(meshwright):
    code, said = meshwright("run", "plan.json", "--steps", 4, "--clip-norm", 0.1, "--check", "--save-model", "m.pt")
    assert code == 0, said
    saved, fresh = torch.load("m.pt", weights_only=True), Partly()
    fresh.load_state_dict(saved)
    assert saved["never.weight"].shape == (3, 3)


@pytest.mark.long
def test_a_loss_that_is_not_finite_ends_the_run(meshwright):
    keep = ("--checkpoint", "kept", "--checkpoint-every", 1)
    code, said = meshwright("run", "plan.json", "--steps", 6, "--learning-rate", 1e30, *keep)
    assert code == 1
    step = int(re.search(r"error: The loss of step (\d), computed by rank 1, is not finite", said)[1])
    assert f"kept/step-{step - 1:08d}: continue from there" in said, "the loss of a step is known before its checkpoint"
    assert not Path("run").exists()


@pytest.mark.long
def test_the_replica_whose_samples_give_no_finite_loss_is_named(meshwright, tmp_path):
    """Sample 5 of 8 gives NaN; the second replica computes it."""
    (tmp_path / "roots.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Roots(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.scale = nn.Linear(4, 4)\n"
        "    def forward(self, x):\n"
        "        return self.scale(x).square().mean() + (2.0 - x).sqrt().mean()\n"
        "def build(batch_size=8):\n"
        "    x = 3.0 * (torch.arange(batch_size) == 5)[:, None].expand(batch_size, 4)\n"
        "    return Roots(), (x, torch.zeros(batch_size)), lambda outputs, targets: outputs + 0 * targets.mean()\n"
    )
    options = ("--cluster", "2xcpu", "--batch", 8, "--stages", 1, "-m", 4, "--out", "roots.json")
    code, said = meshwright("plan", f"{tmp_path / 'roots.py'}:build", *options)
    assert code == 0, said
    code, said = meshwright("run", "roots.json", "--steps", 3)
    assert code == 1
    assert "error: The loss of step 1, computed by rank 1, is not finite" in said


@pytest.mark.long
def test_a_loss_that_may_be_not_finite_loses_nothing(meshwright):
    code, said = meshwright("run", "plan.json", "--steps", 6, "--learning-rate", 1e30, "--allow-nan")
    assert code == 0, said
    assert "The loss is not finite since step" in said
    losses = read_document(RunResult, "run/result.json").losses
    assert len(losses) == 6
    assert losses[0] is not None
    assert losses[-1] is None


@pytest.mark.long
def test_a_checkpoint_that_was_changed_or_is_of_other_settings_is_refused(meshwright):
    keep = ("--checkpoint", "kept", "--checkpoint-every", 2)
    assert meshwright("run", "plan.json", "--steps", 4, *keep)[0] == 0
    code, said = meshwright("run", "plan.json", "--steps", 6, "--checkpoint", "kept", "--resume", "--clip-norm", 1.0)
    assert code == 1
    assert "the checkpoint has clip norm None, but the run has 1.0" in said
    file = Path("kept/step-00000004/process-1.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)
    code, said = meshwright("run", "plan.json", "--steps", 6, "--checkpoint", "kept", "--resume")
    assert code == 0, said
    assert "6 in all" in said
    assert Path("kept/damaged-step-00000004").is_dir(), "what was damaged stays, and the checkpoint before it is used"
    # The newest one gets a file that is not its own, the other one another number of steps, or the end of a file.
    newest, older = Path("kept/step-00000006"), Path("kept/step-00000002")
    shutil.copy(newest / "process-0.safetensors", newest / "process-9.safetensors")
    manifest = older / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"num_steps": 2', '"num_steps": 3'))
    code, said = meshwright("run", "plan.json", "--steps", 8, "--checkpoint", "kept", "--resume")
    assert code == 1
    assert sorted(path.name for path in Path("kept").iterdir()) == [f"damaged-step-0000000{n}" for n in (2, 4, 6)]
    Path("kept/damaged-step-00000006").rename(newest)
    (newest / "process-9.safetensors").unlink()
    (newest / "manifest.json").write_text((newest / "manifest.json").read_text()[:40])
    code, said = meshwright("run", "plan.json", "--steps", 8, "--checkpoint", "kept", "--resume")
    assert code == 1
    assert "the checkpoint cannot be read" in said
    assert "No other checkpoint is left: start without --resume, or from saved weights." in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--save-model", "folder"), "folder"),
        (("--checkpoint", "file"), "results cannot be written to this folder"),
        (("--learning-rate", "nan"), "is not a positive number"),
        (("--seed", "-1"), "greater than or equal to 0"),
    ],
)
def test_what_could_not_be_kept_is_said_before_the_first_step(meshwright, words, said):
    Path("folder").mkdir()
    Path("file").write_text("")
    code, found = meshwright("run", "plan.json", "--steps", 2, *words)
    assert code in (1, 2)
    assert said in found
    assert "Rank 0" not in found
    assert not Path("run").exists()


@pytest.mark.long
@pytest.mark.root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_a_container_may_have_it_as_its_first_process(meshwright):
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-m", "meshwright", "run", "plan.json"]
    environment = {name: value for name, value in os.environ.items() if "WARM" not in name}
    done = subprocess.run(
        [*command, "--steps", "2"], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
