"""The paths that docs/architecture.md lists are those that calls take, file by file."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.project import ROOT

SOURCE = ROOT / "src" / "meshwright"
# Loaded by every Python process of a command: writes the stack when a function of the target module is called first.
HOOK = """
import functools, importlib.util, json, os, sys

MODULE, NAME = os.environ["TARGET"].split(":")

def noting(function):
    @functools.wraps(function)
    def call(*arguments, **named):
        path = os.path.join(os.environ["TRACES"], str(os.getpid()))
        if not os.path.exists(path):
            files, frame = [], sys._getframe(1)
            while frame is not None:
                files.append(frame.f_code.co_filename)
                frame = frame.f_back
            with open(path, "w") as out:
                json.dump([*files[::-1], function.__code__.co_filename], out)
        return function(*arguments, **named)
    return call

class Finder:
    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            for owner in (module, *(item for item in vars(module).values() if isinstance(item, type))):
                found = vars(owner).get(NAME)
                if callable(found) and getattr(found, "__module__", "") == MODULE:
                    setattr(owner, NAME, noting(found))
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def listed(title):
    """The files that a list of the page names, in its order."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = re.search(rf"^\*\*{re.escape(title)}.*?\n\n(.*?)\n\n", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^\d\. `([\w/]+\.py)`", section[1], flags=re.MULTILINE)


def traced(folder, target, *arguments):
    """Our files on the way to the first call of ``module:function`` by a command, in the process that calls it."""
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(HOOK)
    paths = os.pathsep.join([str(folder / "hook"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "TARGET": target, "TRACES": str(folder / "traces")}
    (folder / "traces").mkdir()
    command = [sys.executable, "-m", "meshwright", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    files = json.loads(next((folder / "traces").iterdir()).read_text())
    ours = [file.split("/meshwright/")[1] for file in files if "/src/meshwright/" in file]
    return list(dict.fromkeys(ours))


def test_a_plan_reaches_the_cost_of_an_op_in_eight_files(tmp_path):
    files = listed("From `plan` to the cost of an op")
    assert 3 < len(files) <= 8
    taken = traced(tmp_path, "meshwright.cost.op_estimates:estimate_op", "plan", "gpt-tiny", "--cluster", "2xA100")
    assert taken[taken.index(files[0]) :] == files


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_run_reaches_the_forward_of_a_stage_in_eight_files(tmp_path):
    files = listed("From `run` to the forward of a stage")
    assert 3 < len(files) <= 8
    plan = ["plan", "gpt-tiny", "--cluster", "2xcpu", "--batch", "8", "--stages", "2", "--out", "plan.json"]
    subprocess.run(
        [sys.executable, "-m", "meshwright", *plan], cwd=tmp_path, timeout=240, check=True, capture_output=True
    )
    taken = traced(tmp_path, "meshwright.runtime.stage_module:forward", "run", "plan.json", "--steps", "2")
    of_rank = files[files.index("training/worker.py") :]
    assert taken[taken.index(of_rank[0]) :] == of_rank
    # The verb calls what starts the ranks.
    assert "from meshwright.training import" in (SOURCE / files[0]).read_text()
    assert files[1] == "training/launch.py"
