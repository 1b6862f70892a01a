"""What the GPU check runs, and the file that keeps what it found: one JSON object a line, appended as it comes.

    done        a job that ended well, with what it found; of a case: the predicted step, facts of plain PyTorch
    repeat      the alternated pairs of one repeat of a case, in seconds
    predicted   the step of a case by the measured table
    failed      a job that did not, and the reason
    state       what the driver says of the GPU

Every row says where it was taken: device, torch, a digest of the sources, pairs. Only rows of the same place count; the
others stay in the file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REPEATS = 3
PAIRS, QUICK_PAIRS = 40, 4
PRECISIONS = ("amp", "bfloat16", "mixed")
# Models and their microbatches. Of the first the device is the slower side on an H100, of the others the host that
# issues the kernels; the report goes by what was measured.
LARGE = {"gpt2-small": 8, "resnet50": 128, "bert-base": 32}
SMALL = (("gpt2-small", 1), ("t5-small", 8), ("mixtral-tiny", 64))
QUICK = {"gpt-tiny": 4, "resnet-tiny": 4}
# Models whose ops are measured.
MEASURED = (*LARGE, "gpt-tiny")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One process: a model's steps in one precision, ours beside those of plain PyTorch."""

    model: str
    batch: int
    precision: str
    compiled: bool = False

    @property
    def name(self) -> str:
        return "-".join((self.model, str(self.batch), self.precision, *["compiled"] * self.compiled))

    @property
    def measuring(self) -> str:
        """The job that measures the model's ops, in all precisions; empty where none does."""
        is_measured = self.model in MEASURED and self.batch in (LARGE.get(self.model), QUICK.get(self.model))
        return f"measure-{self.model}-{self.batch}" if is_measured else ""


def choose_cases(quick: bool) -> list[Case]:
    """All cases; the first ones matter most."""
    large, small = (QUICK, ()) if quick else (LARGE, SMALL)
    compiled = dict(list(large.items())[:1]) if quick else large
    groups = [(compiled.items(), "amp", True), (large.items(), "amp", False), (small, "amp", False)]
    groups += [(models, precision, False) for models in (large.items(), small) for precision in PRECISIONS[1:]]
    return [
        Case(model=model, batch=batch, precision=precision, compiled=compiled)
        for models, precision, compiled in groups
        for model, batch in models
    ]


def source_digest() -> str:
    """Of the sources that decide what is measured; it finds changes that are not committed, and needs no git."""
    digest = hashlib.sha256()
    for folder in ("src/meshwright", "benchmarks/gpu"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


class RowFile:
    """The rows of a folder that were taken ``here``."""

    def __init__(self, folder: Path, here: dict[str, object]) -> None:
        self.path, self.here = folder / "rows.jsonl", here

    def mend(self) -> None:
        """End a last line that was cut off, so that the next one begins on its own; it counts as none."""
        if self.path.exists() and (held := self.path.read_bytes()) and not held.endswith(b"\n"):
            self._append(b"\n")

    def add(self, kind: str, job: str, **facts: object) -> None:
        """Append a row; it is on the disk when this returns."""
        self._append(json.dumps({"kind": kind, "job": job, **facts, **self.here}).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        with self.path.open("ab", buffering=0) as file:
            file.write(line)
            os.fsync(file.fileno())

    def read(self, *kinds: str) -> list[dict]:
        """All rows of some kinds; what is no row is passed over."""
        found = []
        for line in self.path.read_bytes().splitlines() if self.path.exists() else ():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            is_row = isinstance(row, dict) and isinstance(row.get("job"), str)
            if is_row and row.get("kind") in kinds and self.here.items() <= row.items():
                found.append(row)
        return found

    def of_job(self, kind: str, job: str) -> list[dict]:
        return [row for row in self.read(kind) if row["job"] == job]

    def is_done(self, job: str) -> bool:
        return bool(self.of_job("done", job))


class DeviceLock:
    """Whose turn on the device it is: those that are timed have it alone, what is not timed shares it."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "device.lock").open("w")

    def share(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_SH)

    def take(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def give_back(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)
