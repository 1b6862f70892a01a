"""The fenced blocks of README and docs that can be run, and how a page is run.

    ```console                  lines that start with "$ " are commands; the rest is what they print
    ```python                   a program of its own
    ```python title="NAME"      a file of that name, in the page's folder; so for toml and every other language

A comment before a block says what differs: ``<!-- run: exit 3, slow, lines 1-12 -->``. ``exit`` is the exit code that
is expected, ``slow`` sends the whole page to the slow tests, ``not`` leaves the block alone, ``lines`` are those of the
output that the page shows. Blocks of a page share a temporary folder, which has a copy of ``examples/``. A page can
start a server: `tests.docs.background`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs.background import END, Background, is_background
from tests.warm import write_programs

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
_BLOCK = re.compile(
    r"(?:<!-- run: (?P<run>[^>]*?) -->\n+)?^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
COLUMNS = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block; ``start:stop`` is the place of its text in the page."""

    language: str
    title: str | None
    text: str
    start: int
    stop: int
    exit_code: int
    slow: bool
    skipped: bool
    lines: tuple[int, int] | None

    @property
    def commands(self) -> list[str]:
        """The commands of a console block; a line that ends with a backslash goes on in the next."""
        joined = self.text.replace("\\\n", "\\\n\0")
        found = re.findall(r"^\$ ((?:[^\n]*\\\n\0)*[^\n]*)$", joined, re.MULTILINE)
        return [re.sub(r"\\\n\0\s*", "", command) for command in found]


def blocks_of(text: str) -> list[Block]:
    """The blocks of a page, in order."""
    return [_block(match) for match in _BLOCK.finditer(text)]


def _block(match: re.Match[str]) -> Block:
    words = [word.strip() for word in (match["run"] or "").split(",") if word.strip()]
    known = {"exit_code": 0, "slow": False, "skipped": False, "lines": None}
    for word in words:
        if word in ("slow", "not"):
            known["slow" if word == "slow" else "skipped"] = True
        elif number := re.fullmatch(r"exit (\d)", word):
            known["exit_code"] = int(number[1])
        elif span := re.fullmatch(r"lines (\d+)-(\d+)", word):
            known["lines"] = (int(span[1]), int(span[2]))
        else:
            raise ValueError(f"{word!r} in a comment before a block is none of exit N, slow, not, lines A-B")
    start, stop = match.span("text")
    return Block(language=match["language"], title=match["title"], text=match["text"], start=start, stop=stop, **known)


def is_slow(page: str) -> bool:
    """Whether a page has a block that is marked slow."""
    return any(block.slow for block in blocks_of((ROOT / page).read_text()))


def is_run(page: str) -> bool:
    """Whether a page has something to run."""
    return any(
        (block.language == "console" or block.language == "python") and not block.skipped
        for block in blocks_of((ROOT / page).read_text())
    )


def run_page(page: str, folder: Path) -> Iterator[tuple[Block, str, int, str]]:
    """Run the blocks of a page in a folder; yields block, command, exit code and output of everything that was run."""
    environment = _environment(folder)
    work = folder / "work"
    work.mkdir()
    shutil.copytree(ROOT / "examples", work / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    blocks = [block for block in blocks_of((ROOT / page).read_text()) if not block.skipped]
    server = Background(work, folder / "server.txt", environment)
    if not any(is_background(command) for block in blocks for command in block.commands):
        server.ports = {}

    def run(command: str) -> tuple[int, str]:
        if is_background(command):
            return server.start(command)
        if command == END:
            return server.end()
        code, output = _run(server.typed(command), work, environment)
        return code, server.shown(output)

    try:
        for block in blocks:
            if block.title is not None:
                path = work / block.title
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text)
            elif block.language == "python":
                path = work / "block.py"
                path.write_text(server.typed(block.text))
                yield block, "python block.py", *run("python block.py")
            elif block.language == "console":
                for command in block.commands:
                    yield block, command, *run(command)
    finally:
        server.end()


def _environment(folder: Path) -> dict[str, str]:
    """The programs that pages name are those of this Python, wherever else there are some."""
    folder /= "programs"
    folder.mkdir()
    write_programs(folder, torchrun=f'#!/bin/sh\nexec "{folder}/python" -m torch.distributed.run "$@"\n')
    paths = os.pathsep.join((str(folder), os.environ.get("PATH", "")))
    return {**os.environ, "PATH": paths, "COLUMNS": str(COLUMNS), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def _run(command: str, folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout.replace(f"{folder}/", "")
