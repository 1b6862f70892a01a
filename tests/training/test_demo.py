"""`make demo` with what it installs: the core and torch, no other extra, in all processes that it starts."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.distributed, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
# Not of `validate`: torch asks for scikit-learn itself, where it is installed.
EXTRAS = ("serve", "rewrite", "search", "tables", "ray", "hf", "metrics", "tensorboard")
IMPORTED_AS = {"grpcio": "grpc", "protobuf": "google", "scikit-learn": "sklearn", "z3-solver": "z3"}
WITHOUT = """
import sys
class Without:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Without)
"""


def only_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}
    extras = {re.match(r"[\w-]+", line)[0] for name in EXTRAS for line in project["optional-dependencies"][name]}
    return {IMPORTED_AS.get(name, name) for name in extras - core - {"meshwright"}}


def test_the_demo_needs_no_extra_but_torch(tmp_path):
    names = only_extras()
    assert {"z3", "highspy", "grpc", "pyarrow"} <= names
    (tmp_path / "sitecustomize.py").write_text(WITHOUT.format(names=sorted(names)))
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py"), "--out", str(tmp_path / "out"), "--steps", "4"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert (tmp_path / "out" / "both.trace.json").stat().st_size > 0
