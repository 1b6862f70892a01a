"""Wheel and sdist: small, whole, and usable outside of the sources, with the core alone and with each extra."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.project import ROOT

MAX_WHEEL_BYTES = 6 * 2**20
SOURCE = ROOT / "src"
# What an extra is for, as people would try it; `plan.json` is there.
TRIED = {
    "search": "meshwright plan gpt-tiny --cluster 4xA100 --tensor 2 --method alpa --batch 8",
    "tables": 'python -c "from meshwright.records import read_records_at; import pyarrow"',
    "validate": "meshwright validate schedules --quick",
    "rewrite": 'python -c "import z3, highspy"',
    "serve": 'python -c "import uvicorn, msgspec, meshwright.serving.server.front_process"',
    "torch": "meshwright run plan.json --steps 2",
    "hf": "meshwright plan config.json --cluster 2xcpu --batch 4",
}


def run(*words, cwd, timeout=300, env=None):
    done = subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        timeout=timeout,
        env=env,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    place = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", place, cwd=ROOT)
    (wheel,), (sdist,) = place.glob("*.whl"), place.glob("*.tar.gz")
    return wheel, sdist


def data_files():
    """What is no module: tables, graphs, pages, models."""
    return {
        path.relative_to(SOURCE).as_posix()
        for path in (SOURCE / "meshwright").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc", ".nbi", ".nbc") and "__pycache__" not in path.parts
    }


@pytest.mark.long
def test_the_wheel_is_small_and_whole(built):
    wheel, sdist = built
    assert wheel.stat().st_size <= MAX_WHEEL_BYTES
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "meshwright/py.typed" in names
    assert data_files() - names == set()
    assert not [name for name in names if name.startswith("tests/") or "__pycache__" in name]
    with tarfile.open(sdist) as archive:
        kept = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in names if name.startswith("meshwright/")} <= kept


class _Machine:
    """A virtual environment outside of the sources, with its commands."""

    def __init__(self, place: Path) -> None:
        self.place = place
        venv.create(place / "venv", with_pip=True)
        (place / "work").mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MESHWRIGHT"))}
        self.env = {
            **kept,
            "PATH": f"{place / 'venv' / 'bin'}:{os.environ['PATH']}",
            "VIRTUAL_ENV": str(place / "venv"),
        }

    def install(self, what: str) -> None:
        run("python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", what, cwd=self.place, env=self.env)

    def shell(self, line: str) -> str:
        return run("sh", "-c", line, cwd=self.place / "work", env=self.env)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_wheel_works_outside_of_the_sources(built, tmp_path):
    wheel, _ = built
    machine = _Machine(tmp_path)
    machine.install(str(wheel))
    out = machine.shell("meshwright plan gpt-tiny --cluster 2xcpu --batch 8 --stages 2 --out plan.json")
    assert "plan written to plan.json" in out
    assert "predicted" in machine.shell("meshwright simulate plan.json")
    where = machine.shell('python -c "import meshwright; print(meshwright.__file__); help(meshwright)"')
    assert str(tmp_path) in where
    assert "torch" not in machine.shell("python -m pip list")
    (tmp_path / "work" / "config.json").write_text((ROOT / "tests" / "zoo" / "configs" / "gpt2.json").read_text())
    for extra, line in TRIED.items():
        machine.install(f"{wheel}[{extra}]")
        machine.shell(line)
