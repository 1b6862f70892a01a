"""Do the tests notice small faults? Draws single-token changes of the sources, and finds a test that fails with each.

    .venv/bin/python scripts/mutants.py draw --seed 29          # writes scripts/mutants.json
    .venv/bin/python scripts/mutants.py run --out killed.json   # by `make test`'s selection, then by CI's

Every mutant is tried in a copy of the checkout. Tests are asked in this order, until one fails: the file that failed
for it before (``--known``) and those named after the mutated module, in the selection of `make test` and then that of
CI; all of its package in `make test`; and with ``--everywhere`` the package in CI and all others. A test that hangs
counts as failed. A mutant is found by the text of its line, so that the list outlives changes elsewhere.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MUTANTS = ROOT / "scripts" / "mutants.json"
PACKAGES = ("spec", "capture", "program", "simulator", "planner", "cost", "runtime", "rewrite", "serving")
# What pytest is given by the Makefile.
SELECTIONS = {
    "make test": ["-m", "not slow and not long and not lint", "--hypothesis-profile=quick"],
    "CI": ["-m", "not slow and not lint", "--hypothesis-profile=ci"],
}
OPERATORS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "+"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
# A test that does not end is ended after 120 s (pytest-timeout), one that hangs in a compiled loop by this.
LIMIT_S = 400.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    draw = verbs.add_parser("draw", help="draw mutants and write their list")
    draw.add_argument("--seed", type=int, required=True)
    draw.add_argument("--count", type=int, default=80)
    run = verbs.add_parser("run", help="find a test that fails with each mutant")
    run.add_argument("--out", type=Path, required=True, help="results; those that are there are kept")
    run.add_argument("--known", type=Path, help="results of another run, whose failing files are asked first")
    run.add_argument("--only", type=int, nargs="*", help="numbers of mutants")
    run.add_argument("--everywhere", action="store_true", help="ask the tests of other packages, too")
    given = parser.parse_args()
    if given.verb == "draw":
        mutants = draw_mutants(random.Random(given.seed), given.count)
        MUTANTS.write_text(json.dumps({"seed": given.seed, "mutants": mutants}, indent=1) + "\n")
    else:
        known = json.loads(given.known.read_text()) if given.known else {}
        run_mutants(given.out, known, given.only, given.everywhere)


def draw_mutants(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Equally many of each package, of different modules as far as there are enough."""
    drawn: list[dict[str, Any]] = []
    for index, package in enumerate(PACKAGES):
        modules = sorted((ROOT / "src" / "meshwright" / package).rglob("*.py"))
        rng.shuffle(modules)
        wanted = count // len(PACKAGES) + (index < count % len(PACKAGES))
        for module in modules:
            sites = list(find_sites(module))
            if sites and wanted:
                drawn.append({"package": package, **rng.choice(sites)})
                wanted -= 1
    return drawn


def find_sites(module: Path) -> Iterator[dict[str, Any]]:
    """Every change of a token of a module's functions."""
    source = module.read_text()
    lines = source.splitlines()
    name = str(module.relative_to(ROOT))
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                for node in ast.walk(statement):
                    for line, start, stop, new in _changes(node, lines):
                        text = lines[line - 1]
                        mutated = text[:start] + new + text[stop:]
                        yield {"path": name, "line": line, "text": text, "mutated": mutated}


def _changes(node: ast.AST, lines: list[str]) -> Iterator[tuple[int, int, int, str]]:
    """``(line, first column, column behind the last, new text)`` of all changes of one node."""
    pairs: list[tuple[ast.AST, ast.AST, ast.AST]] = []
    if isinstance(node, ast.Compare):
        pairs = list(zip([node.left, *node.comparators], node.ops, node.comparators, strict=False))
    elif isinstance(node, ast.BinOp):
        pairs = [(node.left, node.op, node.right)]
    elif isinstance(node, ast.BoolOp):
        pairs = [(left, node.op, right) for left, right in zip(node.values, node.values[1:], strict=False)]
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        new = str(node.value + 1) if type(node.value) is int else str(not node.value)
        if lines[node.lineno - 1].isascii():
            yield node.lineno, node.col_offset, node.end_col_offset or 0, new
    for left, operator, right in pairs:
        if type(operator) in OPERATORS and left.end_lineno == right.lineno and lines[right.lineno - 1].isascii():
            old, new = OPERATORS[type(operator)]
            between = lines[right.lineno - 1][left.end_col_offset : right.col_offset]
            found = re.search(re.escape(old), between)
            if found:
                yield right.lineno, left.end_col_offset + found.start(), left.end_col_offset + found.end(), new


def run_mutants(out: Path, known: dict[str, Any], only: list[int] | None, everywhere: bool) -> None:
    mutants = json.loads(MUTANTS.read_text())["mutants"]
    results: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        checkout = Path(name) / "checkout"
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        for file in filter(None, files.decode().split("\0")):
            (checkout / file).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / file).exists():
                shutil.copy2(ROOT / file, checkout / file)
        for number, mutant in enumerate(mutants):
            if str(number) in results or (only is not None and number not in only):
                continue
            started = time.monotonic()
            found = try_mutant(checkout, mutant, (known.get(str(number)) or {}).get("killed by"), everywhere)
            results[str(number)] = {**found, "seconds": round(time.monotonic() - started, 1)}
            print(number, mutant["path"], mutant["line"], results[str(number)], flush=True)
            out.write_text(json.dumps(results, indent=1) + "\n")


def try_mutant(checkout: Path, mutant: dict[str, Any], known: str | None, everywhere: bool) -> dict[str, Any]:
    """Which test of which selection fails with the mutant; ``killed by`` is None if none does."""
    path = checkout / mutant["path"]
    source = path.read_text()
    lines = source.split("\n")
    places = [at for at, text in enumerate(lines) if text == mutant["text"]]
    if not places:
        return {"killed by": None, "gone": True}
    lines[min(places, key=lambda at: abs(at - mutant["line"] + 1))] = mutant["mutated"]
    path.write_text("\n".join(lines))
    try:
        for group, selection in _groups(checkout, mutant, known, everywhere):
            failed = _failing(checkout, group, SELECTIONS[selection])
            if failed and not _fails_without(path, source, checkout, failed):
                return {"killed by": failed, "selection": selection}
        return {"killed by": None}
    finally:
        path.write_text(source)


def _fails_without(path: Path, source: str, checkout: Path, failed: str) -> bool:
    """Whether a test fails without the mutant too, and so says nothing of it."""
    mutated = path.read_text()
    path.write_text(source)
    try:
        test, _, what = failed.partition("::")
        whole = what.startswith(("hangs", "crashes"))
        return _failing(checkout, [test if whole or not what else failed], ["-m", "not slow"]) is not None
    finally:
        path.write_text(mutated)


def _groups(
    checkout: Path, mutant: dict[str, Any], known: str | None, everywhere: bool
) -> Iterator[tuple[list[str], str]]:
    """Files or folders of tests and a selection, in the order in which they are asked."""
    tests, package = checkout / "tests", checkout / "tests" / mutant["package"]
    folder = [str(package.relative_to(checkout))]
    named = sorted(str(path.relative_to(checkout)) for path in package.rglob(f"test_{Path(mutant['path']).stem}*.py"))
    if known and (checkout / known.partition("::")[0]).exists():
        named = list(dict.fromkeys([known.partition("::")[0], *named]))
    if named:
        yield from ((named, selection) for selection in SELECTIONS)
    yield folder, "make test"
    if everywhere:
        others = [path for path in sorted(tests.iterdir()) if path.is_dir() or path.name.startswith("test_")]
        rest = [str(path.relative_to(checkout)) for path in others if path != package]
        yield from ((folder, "CI"), (rest, "make test"), (rest, "CI"))


def _failing(checkout: Path, tests: list[str], selection: list[str]) -> str | None:
    """The first test that fails, or ``hangs`` or ``crashes``."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, *selection, *tests],
        cwd=checkout,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"{tests[0]}::hangs"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode in (0, 5):  # 5: no test is selected
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    return failed[1] if failed else f"{tests[0]}::crashes with {process.returncode}"


if __name__ == "__main__":
    main()
