"""Where the time of the tests goes: ``make test PYTEST_ARGS="-p tests.times"`` ends with a table by folder and file.

Seconds of the processes that run tests: `wall` in tests and their fixtures; of these `cpu` of their own, `compiling`
(numba), and `children`, the processor time of processes that they waited for: programs and servers, not forks of the
warm process. What is left is `waiting`: for forks, for sleeping servers, for a loop that another process compiles.
`collecting` is the import of the file and the listing of its tests, in each process.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

FOLDER = "MESHWRIGHT_TESTS_TIMES"
_COLUMNS = ("wall", "cpu", "compiling", "children", "waiting", "collecting")
_SHOWN = 40


def _listener(times: _Times) -> Any:
    from numba.core import event

    class Listener(event.Listener):
        depth, since = 0, 0.0

        def on_start(self, _: Any) -> None:
            self.since = time.perf_counter() if not self.depth else self.since
            self.depth += 1

        def on_end(self, _: Any) -> None:
            self.depth -= 1
            times.compiling += 0.0 if self.depth else time.perf_counter() - self.since

    return Listener()


class _Times:
    """Of this process."""

    def __init__(self) -> None:
        self.compiling, self._is_listening = 0.0, False
        self.spent: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(_COLUMNS))

    def now(self) -> tuple[float, ...]:
        if not self._is_listening and "numba.core.event" in sys.modules:
            sys.modules["numba.core.event"].register("numba:compile", _listener(self))
            self._is_listening = True
        own, theirs = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return (
            time.perf_counter(),
            own.ru_utime + own.ru_stime,
            self.compiling,
            theirs.ru_utime + theirs.ru_stime,
        )


TIMES = _Times()


def pytest_configure() -> None:
    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="times")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    before = TIMES.now()
    try:
        return (yield)
    finally:
        row = TIMES.spent[item.nodeid.partition("::")[0]]
        for place, (start, end) in enumerate(zip(before, TIMES.now(), strict=True)):
            row[place] += end - start


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    before = time.perf_counter()
    try:
        return (yield)
    finally:
        if isinstance(collector, pytest.Module):
            TIMES.spent[collector.nodeid][-1] += time.perf_counter() - before


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    Path(os.environ[FOLDER], f"{os.getpid()}.json").write_text(json.dumps(TIMES.spent))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    rows: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(_COLUMNS))
    for path in Path(os.environ[FOLDER]).glob("*.json"):
        for name, spent in json.loads(path.read_text()).items():
            rows[name] = [a + b for a, b in zip(rows[name], spent, strict=True)]
    for row in rows.values():
        row[4] = max(row[0] - max(row[1], row[2]) - row[3], 0.0)
    groups: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(_COLUMNS))
    for name, row in rows.items():
        for group in ("all", "/".join(name.split("/")[:-1][:2])):
            groups[group] = [a + b for a, b in zip(groups[group], row, strict=True)]
    terminalreporter.section("seconds by folder and by file, of all processes together")
    terminalreporter.write_line("".join(f"{name:>11}" for name in _COLUMNS))
    for shown in (groups, rows):
        for name, row in sorted(shown.items(), key=lambda item: -item[1][0])[:_SHOWN]:
            terminalreporter.write_line("".join(f"{value:11.1f}" for value in row) + f"  {name}")


def pytest_unconfigure() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ.pop(FOLDER), ignore_errors=True)
