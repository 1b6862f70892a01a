"""Every example has its place on the page that runs it, and those that promise to need no torch need none."""

import os
import re
import subprocess
import sys

import pytest

from tests.docs.blocks import ROOT

EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("[0-9]*.py"))
WITHOUT_TORCH = ["01_plan_without_gpu.py", "03_compare_clusters.py", "05_own_schedule.py"]
PATH = os.environ.get("PYTHONPATH", "")
# A module that is None in sys.modules cannot be imported.
BLOCKED = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"


def test_examples_are_numbered_without_gaps_and_named_on_their_page():
    page = (ROOT / "docs" / "examples.md").read_text()
    assert [name[:3] for name in EXAMPLES] == [f"{number:02}_" for number in range(1, len(EXAMPLES) + 1)]
    assert set(re.findall(r"\b\d\d_\w+\.py", page)) == set(EXAMPLES)


def test_the_page_says_which_examples_need_no_torch():
    rows = re.findall(r"`(\d\d_\w+\.py)`.*\| (yes|no) \|", (ROOT / "docs" / "examples.md").read_text())
    assert [name for name, torch in rows if torch == "no"] == WITHOUT_TORCH
    assert len(rows) == len(EXAMPLES)


@pytest.mark.long
@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_an_example_without_torch_runs_where_torch_cannot_be_imported(name, tmp_path):
    command = [sys.executable, "-c", BLOCKED, str(ROOT / "examples" / name)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((str(ROOT / "examples"), PATH))}
    done = subprocess.run(
        command,
        check=False,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "ms per step" in done.stdout or "s per step" in done.stdout
    assert not list(tmp_path.iterdir())
