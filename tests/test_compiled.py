"""Compiled loops work where nothing can be cached."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import numba
import pytest

import meshwright.compiled as compiled_module
from meshwright.compiled import compiled


def test_compiles_without_a_place_for_the_cache():
    """A function without a source file has no cache folder, like an installation that cannot be written to."""
    scope: dict = {}
    exec("def add(a, b):\n    return a + b", scope)
    with pytest.raises(RuntimeError, match="cannot cache"):
        numba.njit(cache=True)(scope["add"])
    assert compiled(scope["add"])(2, 3) == 5


SOURCE = """
from typing import NamedTuple

import meshwright.compiled as compiled_module
from meshwright.compiled import compiled


class {name}(NamedTuple):
    first: int


@compiled
def twice(pair):
    return 2 * pair.first


print(twice({name}(21)), sum(twice.stats.cache_hits.values()))
"""


@pytest.mark.long
def test_a_cache_that_an_older_version_left_behind_counts_as_empty(tmp_path):
    """Its index names a class that its module no longer has; numba alone raises AttributeError."""
    (tmp_path / "loops.py").write_text(SOURCE.format(name="Pair").partition("print")[0])

    def run(name: str) -> str:
        (tmp_path / "pairs.py").write_text(
            f"from typing import NamedTuple\nclass {name}(NamedTuple):\n    first: int\n"
        )
        code = f"import loops, pairs; print(loops.twice(pairs.{name}(21)), sum(loops.twice.stats.cache_hits.values()))"
        command = [sys.executable, "-B", "-c", code]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True).stdout

    assert run("Old") == "42 0\n"
    assert list(tmp_path.rglob("*.nbi"))
    assert run("Old") == "42 1\n"
    assert run("New") == "42 0\n"
    assert run("New") == "42 1\n"
    assert len(list(tmp_path.rglob("*.nbi"))) == 1


COLLECTED = """
import gc
import loops_of_pairs

gc.{state}()
before = sum(each["collections"] for each in gc.get_stats())
assert loops_of_pairs.twice(loops_of_pairs.Pair(4)) == 8
print(gc.isenabled(), sum(each["collections"] for each in gc.get_stats()) - before)
"""


@pytest.mark.long
def test_nothing_is_collected_while_machine_code_is_loaded(tmp_path):
    """Loading makes enough objects for more than a hundred collections; afterwards the collector is as it was."""
    (tmp_path / "loops_of_pairs.py").write_text(SOURCE.format(name="Pair").rsplit("\n\n\n", 1)[0])

    def run(state: str) -> list[str]:
        command = [sys.executable, "-B", "-c", COLLECTED.format(state=state)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout.split()

    run("enable")
    enabled, collections = run("enable")
    assert (enabled, int(collections) < 30) == ("True", True)
    assert run("disable") == ["False", "0"]


PRODUCTS = """
import sys
from pathlib import Path
import numba
import numpy as np
import loops_of_pairs

assert loops_of_pairs.twice(loops_of_pairs.Pair(4)) == 8
loaded = "scipy.linalg" in sys.modules
print(loaded, numba.njit(lambda a: np.dot(a, a))(2 * np.eye(2))[1, 1])
"""


@pytest.mark.long
def test_linear_algebra_is_imported_by_what_needs_it(tmp_path):
    """Loading our loops does not import it, which takes as long as all of them; products work all the same."""
    (tmp_path / "loops_of_pairs.py").write_text(SOURCE.format(name="Pair").rsplit("\n\n\n", 1)[0])
    command = [sys.executable, "-B", "-c", PRODUCTS]
    for _ in range(2):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "4.0"]


@pytest.mark.long
def test_machine_code_is_stale_when_a_module_that_it_imports_has_changed(tmp_path):
    """A loop holds the code of what it calls; numba alone looks at the loop's own file."""
    package = tmp_path / "meshwright_copy" / "loops" / "inner"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text("")
    source = Path(compiled_module.__file__).read_text()
    (package.parent.parent / "compiled.py").write_text(source)
    head = "from meshwright_copy.compiled import compiled\n"
    (package / "outer.py").write_text(
        head
        + "from meshwright_copy.loops import (\n    between,\n)\n\n\n"
        + "@compiled\ndef outer(x):\n    return between.called.called(x) + 1\n"
    )

    count = itertools.count()

    def run(factor: int) -> str:
        text = f"{head}\n\n@compiled\ndef called(x):\n    return {factor} * x\n"
        (package.parent / "called.py").write_text(text)
        (package.parent / "between.py").write_text("from meshwright_copy.loops import called\n")
        (package.parent / "beside.py").write_text(f"# {next(count)}")
        code = (
            "from meshwright_copy.loops.inner.outer import outer as f; print(f(10), sum(f.stats.cache_hits.values()))"
        )
        command = [sys.executable, "-B", "-c", code]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True).stdout

    assert run(2) == "21 0\n"
    assert run(30) == "301 0\n"
    assert run(30) == "301 1\n"
    (package.parent / "called.py").touch()
    assert run(30) == "301 1\n", "the contents count, not the time"
    assert run(2) == "21 1\n", "the code of an earlier state is kept"
    for factor in (4, 5, 6):
        run(factor)
    assert run(2) == "21 0\n"
    assert len(list(package.rglob("outer*.nbi"))) == 3


def test_machine_code_is_stale_when_what_it_takes_from_another_package_has_changed(tmp_path):
    """A loop and a constant, which the loop of a third module uses through one of its own package."""
    house = tmp_path / "meshwright_copy"
    for folder in (house, house / "below", house / "above"):
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    (house / "compiled.py").write_text(Path(compiled_module.__file__).read_text())
    head = "from meshwright_copy.compiled import compiled\n"
    (house / "above" / "between.py").write_text(
        f"{head}from meshwright_copy.below.called import MORE, called\n\n"
        "\n@compiled\ndef between(x):\n    return called(x) + MORE\n"
    )
    (house / "above" / "outer.py").write_text(
        f"{head}from meshwright_copy.above.between import between\n\n"
        "\n@compiled\ndef outer(x):\n    return between(x)\n"
    )

    def run(factor: int, more: int) -> str:
        text = f"{head}\nMORE = {more}\n\n\n@compiled\ndef called(x):\n    return {factor} * x\n"
        (house / "below" / "called.py").write_text(text)
        code = "from meshwright_copy.above.outer import outer; print(outer(10))"
        command = [sys.executable, "-B", "-c", code]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True).stdout

    assert run(2, 1) == "21\n"
    assert run(3, 1) == "31\n"
    assert run(3, 5) == "35\n"


def test_machine_code_is_stale_when_a_method_of_an_argument_has_changed(tmp_path):
    """The loop's module does not import the class's."""
    house = tmp_path / "meshwright_copy"
    house.mkdir()
    (house / "__init__.py").write_text("")
    (house / "compiled.py").write_text(Path(compiled_module.__file__).read_text())
    (house / "loops.py").write_text(
        "from numba.extending import overload\nfrom meshwright_copy.compiled import compiled\n\n\n"
        "def scale(self, x):\n    return self.scale(x)\n\n\n"
        "@overload(scale, strict=False)\ndef _scale(self, x):\n    return self.instance_class.scale\n\n\n"
        "@compiled\ndef outer(rule, x):\n    return scale(rule, x)\n"
    )
    code = (
        "from meshwright_copy.loops import outer as f\nfrom meshwright_copy.rules import Rule\n"
        "print(f(Rule(1), 10), sum(f.stats.cache_hits.values()))"
    )

    def run(factor: int) -> str:
        (house / "rules.py").write_text(
            "from typing import NamedTuple\n\n\n"
            "class Rule(NamedTuple):\n    more: int\n\n"
            f"    def scale(self, x):\n        return {factor} * x + self.more\n"
        )
        command = [sys.executable, "-B", "-c", code]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True).stdout

    assert run(2) == "21 0\n"
    assert run(3) == "31 0\n"
    assert run(3) == "31 1\n"
    assert run(2) == "21 1\n"
    for factor in (4, 5, 6):
        run(factor)
    assert run(2) == "21 0\n"
    assert len(list(house.rglob("loops.outer*.nbc"))) == 3


AT_ONCE = """
import sys
import time
from pathlib import Path

from meshwright.compiled import compiled


@compiled
def inner(x):
    return x * 2


@compiled
def outer(x, y):
    return inner(x) + inner(y)


number, kinds = int(sys.argv[1]), [1, 1.0, True, 1j]
Path(f"ready{number}").touch()
while len(list(Path().glob("ready*"))) < 4:
    time.sleep(0.001)
for place in range(number, number + 4):
    assert outer(kinds[place % 4], 1) == inner(kinds[place % 4]) + 2
print(sum(f.stats.cache_misses[s] for f in (inner, outer) for s in f.stats.cache_misses))
"""


def test_processes_that_need_the_same_loops_at_once_compile_them_once(tmp_path):
    """Four processes, four signatures in another order each: eight of inner and outer, and no code is taken for
    another's.
    """
    (tmp_path / "loops.py").write_text(AT_ONCE)

    def start() -> list[int]:
        for path in tmp_path.glob("ready*"):
            path.unlink()
        command = [sys.executable, "-B", "loops.py"]
        started = [
            subprocess.Popen([*command, str(n)], cwd=tmp_path, stdout=subprocess.PIPE, text=True) for n in range(4)
        ]
        printed = [process.communicate(timeout=120)[0] for process in started]
        assert [process.returncode for process in started] == [0] * 4
        return [int(text) for text in printed]

    assert sum(start()) == 8
    assert sum(start()) == 0


def test_a_process_that_was_killed_while_it_compiled_leaves_no_lock(tmp_path):
    code = "from meshwright import compiled as c; import os, time\nwith c._locked('.', 'loop'): {}"
    command = [sys.executable, "-B", "-c"]
    killed = subprocess.run([*command, code.format("os.kill(os.getpid(), 9)")], cwd=tmp_path, timeout=60, check=False)
    assert killed.returncode == -9
    # Who waits for a lock waits for longer than this.
    subprocess.run([*command, code.format("pass")], cwd=tmp_path, timeout=60, check=True)
