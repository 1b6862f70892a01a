"""Writes what commands print into the pages: ``python -m tests.docs.renew README.md docs/commands/plan.md``.

Without arguments, every page that is run. Only the outputs of console blocks change.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.docs.blocks import PAGES, ROOT, Block, blocks_of, is_run, run_page


def renew(page: str) -> None:
    """Run a page and write its outputs into it."""
    outputs: dict[int, list[str]] = {}
    blocks: dict[int, Block] = {}
    with tempfile.TemporaryDirectory() as folder:
        for block, command, code, output in run_page(page, Path(folder)):
            print(f"{page}: {command} -> {code}", flush=True)
            if code != block.exit_code:
                sys.exit(f"{output}\n{page} stays as it is: this ended with {code} instead of {block.exit_code}")
            if block.language == "console":
                outputs.setdefault(block.start, []).append(shown(block, output))
                blocks[block.start] = block
    text = (ROOT / page).read_text()
    assert all(block in blocks_of(text) for block in blocks.values()), f"{page} was changed meanwhile"
    for start, block in sorted(blocks.items(), reverse=True):
        written = [line for line in block.text.replace("\\\n", "\\\0").splitlines() if line.startswith("$ ")]
        pairs = zip(written, outputs[start], strict=True)
        new = "".join(f"{command}\n{output}" for command, output in pairs).replace("\0", "\n")
        text = text[:start] + new + text[block.stop :]
    (ROOT / page).write_text(text)


def shown(block: Block, output: str) -> str:
    """The part of an output that a page shows; "..." stands for what it leaves out."""
    lines = [line.rstrip() for line in output.strip("\n").splitlines()]
    while lines and not lines[0]:
        del lines[0]
    while lines and not lines[-1]:
        del lines[-1]
    if block.lines is not None:
        first, last = block.lines
        kept = lines[first - 1 : last]
        lines = [*(["..."] if first > 1 else []), *kept, *(["..."] if last < len(lines) else [])]
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    for name in sys.argv[1:] or [page for page in PAGES if is_run(page)]:
        renew(name)
