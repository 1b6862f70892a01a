"""The kernels that are predicted for compiled layers, against inductor's own schedule."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.compiler
@pytest.mark.long
def test_kernels_are_those_of_inductor():
    command = [sys.executable, str(ROOT / "scripts/check_fusion.py"), "gpt-tiny", "resnet-tiny", "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, timeout=110)
    found = json.loads(done.stdout)
    for name in ("gpt-tiny", "resnet-tiny"):
        assert found[name]["right"] >= 0.9 * found[name]["kernels"]
        assert found[name]["predicted_bytes"] == pytest.approx(found[name]["num_bytes"], rel=0.1)
