"""What all tests share: profiles of hypothesis, what a marked test needs, who runs what, a fresh interpreter.

A test that needs what this machine lacks is skipped and the summary says why. Under CI=true a
missing *program* is a failure instead: `.ci/run` installs programs, so there is no excuse. Missing
hardware or rights (a GPU, root) are skipped everywhere.

`make test` shares the tests out among processes (pytest-xdist): those of one file stay together, since they share what
its fixtures make, and so do its long ones, which come behind those of all files; only pages of the documentation and
dry runs on an accelerator go one by one. Pages come first. Files that start processes of their own take longest: they
come before the other ones, so that short ones are left for the end; but their long tests run last, so that few tests
are lost if time runs out. What they start are forks of one process (`tests.warm`).

The time of CI is limited, and its machines differ in speed by a factor of four. Long tests that have not begun by
``TESTS_UNTIL``, in seconds since the epoch (set by `.ci/run`), are skipped; the summary says how many.
xdist's own ``--dist loadgroup`` does nothing here: xdist 3.8 writes the group into a field that pytest 9.2 no longer
reads.
"""

import multiprocessing.spawn
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.warm import ADDRESS, programs, start_server, wait_for_server

# No test reads or writes the user's cache folder, nor does what a test starts (`meshwright.cli.model_arguments`).
os.environ["MESHWRIGHT_CACHE"] = ""
if "PYTEST_XDIST_WORKER" in os.environ:
    # Beside each other, processes with several threads each wait more than they compute; torch reads this when loaded.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

hypothesis.settings.register_profile("default", deadline=None, max_examples=20)
hypothesis.settings.register_profile("quick", deadline=None, max_examples=20)  # `tests.marks.examples`
hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=500)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")

# The files whose tests are long and share nothing.
PAGES = "tests/docs/test_docs.py"
APART = (PAGES, "tests/runtime/test_accelerator.py")

# marker -> groups of programs; of each group one must be there
PROGRAMS = {
    "browser": (("chromium", "chromium-browser", "google-chrome"), ("chromedriver",)),
    "compiler": (("g++", "c++", "clang++"),),
    "root": (("ip",), ("tc",)),
}


def _missing_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "no CUDA device"


def _missing_root() -> str | None:
    return None if os.geteuid() == 0 else "not run as root"


HARDWARE_AND_RIGHTS: dict[str, Callable[[], str | None]] = {
    "gpu": _missing_gpu,
    "root": _missing_root,
}


def _missing_programs(marker: str) -> list[str]:
    groups = PROGRAMS.get(marker, ())
    return [" or ".join(names) for names in groups if not any(map(shutil.which, names))]


class ByFile(LoadScopeScheduling):
    """Tests of a file that are neighbours are a unit of work, and each test of `APART`, in the order of collection."""

    def _split_scope(self, nodeid: str) -> str:
        return self._units[nodeid]

    @cached_property
    def _units(self) -> dict[str, str]:
        units, last, number = dict[str, str](), "", 0
        for nodeid in self.collection:
            path, _, _ = nodeid.partition("::")
            own = nodeid if path in APART else path
            number += own != last
            units[nodeid], last = f"{number} {own}", own
        return units


def pytest_configure(config: pytest.Config) -> None:
    """Start the server of warm processes while test processes collect, if a test that they share may ask for it."""
    shares = config.getoption("numprocesses", 0) and "PYTEST_XDIST_WORKER" not in os.environ
    if shares and not config.option.collectonly and any(map(_asks_for_ranks, config.args)):
        os.environ[ADDRESS] = start_server()


def _asks_for_ranks(argument: str) -> bool:
    path = Path(argument.partition("::")[0])
    files = path.rglob("test_*.py") if path.is_dir() else [path]
    return any("distributed" in (text := file.read_text()) or "tests.docs" in text for file in files)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile | None:
    if ADDRESS in os.environ:  # no test waits for it, as its time limit would not allow for that
        wait_for_server(os.environ[ADDRESS])
    if config.getoption("dist") != "load":
        return None
    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True)  # before markers select
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of a test behind its second, of a matrix behind its first, as long; sort as the module says."""
    begun: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("long") is None:
            test = item.nodeid.partition("[")[0]
            begun[test] += 1
            if begun[test] > (1 if item.get_closest_marker("matrix") else 2):
                item.add_marker("long")
    slow = {item.path for item in items if item.get_closest_marker("distributed") or item.nodeid.startswith(APART)}

    def place(item: pytest.Item) -> tuple[bool, bool, bool]:
        is_long, is_page = item.get_closest_marker("long") is not None, item.nodeid.startswith(PAGES)
        return is_long, not is_page, (item.path in slow) == is_long

    items.sort(key=place)


def pytest_runtest_setup(item: pytest.Item) -> None:
    until = float(os.environ.get("TESTS_UNTIL", "inf"))
    if time.time() > until and item.get_closest_marker("long") is not None:
        pytest.skip("no time left for long tests on this machine")
    for marker in (*PROGRAMS, *HARDWARE_AND_RIGHTS):
        if item.get_closest_marker(marker) is None:
            continue
        lacking = HARDWARE_AND_RIGHTS.get(marker, lambda: None)()
        if lacking is not None:
            pytest.skip(f"{marker}: {lacking}")
        if programs := _missing_programs(marker):
            message = f"{marker}: not installed: {', '.join(programs)}"
            if os.environ.get("CI"):
                pytest.fail(message + " (under CI this is a failure, not a skip)", pytrace=False)
            pytest.skip(message)


@pytest.fixture
def run_fresh() -> Callable[[str], str]:
    """Run code in a fresh interpreter and return what it printed."""

    def run(code: str) -> str:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def warm_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that a test starts are forks of a process that has loaded torch, as are commands of the pages."""
    python = str(programs() / "python")
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", os.fsencode(python))
    monkeypatch.setenv("PYTHON_EXEC", python)  # what torchrun starts
