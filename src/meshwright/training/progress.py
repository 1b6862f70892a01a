"""Follow the progress of a run (`Progress`), also over restarts: steps, losses, and the time that each restart lost."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.spec import EventSink
from meshwright.training.job import PROGRESS_FILE, Restart, RunResult

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

_POLL_S = 0.1
_PREFIX, _LOCK = "meshwright-run-", "lock"


@contextlib.contextmanager
def scratch_folder() -> Iterator[str]:
    """Yield a folder for the files of a run's processes, removed after the block.

    It is locked meanwhile; folders that nothing locks, because their launcher was killed, are removed, too.
    """
    if fcntl is not None:
        for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
            with contextlib.suppress(OSError), left.open("a") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left.parent, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as scratch, (Path(scratch) / "unlocked").open("a") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Only now can another run see the lock.
            Path(file.name).rename(Path(scratch) / _LOCK)
        yield scratch


class Progress:
    """Turns rank 0's progress lines into events, and keeps what is known of each step."""

    def __init__(self, num_steps: int, events: EventSink) -> None:
        self._num_steps, self._events = num_steps, events
        self._position, self._first = 0, -1
        self._losses: dict[int, float] = {}
        self._seconds: dict[int, float] = {}
        # The last step that was reached, and when; a restart repeats the steps since a checkpoint.
        self._reached, self._reached_s = 0, time.monotonic()
        self._restarts: list[Restart] = []
        self._fell_s: float | None = None

    @contextlib.contextmanager
    def followed(self, scratch: Path) -> Iterator[None]:
        """Follow the progress during the block."""
        done = threading.Event()
        thread = threading.Thread(target=self._follow, args=(scratch / PROGRESS_FILE, done), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(timeout=5)

    def failed(self, why: str) -> None:
        """Note that the run failed, and is started again."""
        if self._fell_s is None:
            self._fell_s = self._reached_s
        self._restarts.append(Restart(step=self._reached, why=why, lost_s=0.0))

    def complete(self, result: RunResult) -> RunResult:
        """Return the result of the last attempt with what the attempts before it have done."""
        if not self._restarts:
            return result
        first = result.num_before if self._first < 0 else min(self._first, result.num_before)
        before = range(first, result.num_before)
        losses = [self._losses[step] for step in before if step in self._losses]
        return replace(
            result,
            losses=(*(loss if math.isfinite(loss) else None for loss in losses), *result.losses),
            step_seconds=(*(self._seconds[step] for step in before if step in self._seconds), *result.step_seconds),
            num_before=first,
            restarts=tuple(self._restarts),
        )

    def _follow(self, path: Path, done: threading.Event) -> None:
        while True:
            is_over = done.is_set()
            if path.exists():
                with path.open() as file:
                    file.seek(self._position)
                    while (line := file.readline()).endswith("\n"):
                        self._position = file.tell()
                        self._take(json.loads(line))
            if is_over:
                return
            time.sleep(_POLL_S)

    def _take(self, row: dict[str, Any]) -> None:
        if "task" in row:
            if row["task"] == "steps" and self._first < 0:
                self._first = row["done"]
            self._events.progress(row["task"], row["done"], row["total"])
            return
        first_loss = row["last_loss"] - len(row["losses"])
        for place, loss in enumerate(row["losses"], first_loss):
            self._losses[place] = loss
            self._events.metric("loss", loss, place + 1)
        self._seconds[row["step"] - 1] = row["seconds"]
        self._events.metric("samples_per_s", row["samples_per_s"], row["step"])
        self._events.progress("steps", row["step"], self._num_steps)
        if row["step"] > self._reached:
            self._reached, self._reached_s = row["step"], time.monotonic()
            if self._fell_s is not None:
                self._restarts[-1] = replace(self._restarts[-1], lost_s=self._reached_s - self._fell_s)
                self._fell_s = None
