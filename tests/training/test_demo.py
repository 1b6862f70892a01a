"""`make demo` with what it installs: the core and torch, no other extra, in all processes that it starts."""

import json
import os
import subprocess
import sys

import pytest

from tests.project import CORE, EXTRAS, ROOT

pytestmark = [pytest.mark.long, pytest.mark.distributed, pytest.mark.timeout(400)]

_USED = set().union(*(EXTRAS[name] for name in EXTRAS.keys() - {"torch", "dev", "docs"}))
# Torch asks for scikit-learn itself, where it is installed.
LEFT_OUT = sorted(_USED - CORE - {"meshwright", "sklearn"})
WITHOUT = """
import sys
class Without:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Without)
"""


def test_the_demo_needs_no_extra_but_torch(tmp_path):
    assert {"z3", "highspy", "grpc", "pyarrow", "prometheus_client"} <= set(LEFT_OUT)
    (tmp_path / "sitecustomize.py").write_text(WITHOUT.format(names=LEFT_OUT))
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
