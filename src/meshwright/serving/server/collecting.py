"""Collect a timeline of a server: its processes record for a while, then their records are read.

At the end, each process writes its records to a file in the server's folder, in shared memory. A process that has
ended, or that does not write its file in time because of a long batch, is left out, and the timeline says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path

from meshwright.serving.server.recording import Recorded
from meshwright.serving.server.supervisor import Supervisor
from meshwright.serving.server.timeline import timeline_pieces
from meshwright.serving.server.timeline_facts import RecordedRun

LEAST_S, MOST_S = 0.1, 30.0
# The most rows that all processes of a kind record together; Perfetto becomes slow with more requests.
_MOST = {"front": 2**15, "worker": 2**16, "scheduler": 2**17}
# How long a process may take to write its records, some megabytes; a worker first ends its batch.
_PATIENCE_S, _LOOK_S = 5.0, 0.02


class Busy(Exception):  # noqa: N818 - it is an answer
    """Another timeline is being recorded; its recording ends in about ``seconds``, at least 1."""

    def __init__(self, seconds: int) -> None:
        super().__init__()
        self.seconds = seconds


class Ending(Exception):  # noqa: N818 - it is an answer
    """The server is ending, or has not started."""


class Collector:
    """Records timelines of a supervisor's processes, one at a time."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._until: float | None = None
        self._count = 0

    async def collect(self, seconds: float) -> Iterator[bytes]:
        """Record from now on for ``seconds``; return the timeline as JSON, in pieces.

        Raises Busy while another timeline is being recorded, and Ending if the server is ending or has not started.
        """
        if self._until is not None:
            raise Busy(max(math.ceil(self._until - time.monotonic()), 1))
        self._until = time.monotonic() + seconds
        try:
            return timeline_pieces(await self._record(seconds))
        finally:
            self._until = None

    async def _record(self, seconds: float) -> RecordedRun:
        supervisor, folder = self._supervisor, self._supervisor.folder
        asked = supervisor.process_ids()
        if folder is None or not asked:
            raise Ending
        for left in folder.glob("recorded-*"):  # of processes that were too slow
            left.unlink(missing_ok=True)
        kinds = [name.partition("-")[0] for name in asked]
        begin_ns = time.monotonic_ns()
        for name, kind in zip(asked, kinds, strict=True):
            supervisor.order(name, record=_MOST[kind] // kinds.count(kind))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(supervisor.stopped(), seconds)
            raise Ending
        end_ns = time.monotonic_ns()
        self._count += 1
        # A process that replaced one that ended has no records of the time before.
        there = [name for name, process in asked.items() if supervisor.process_ids().get(name) == process]
        paths = {name: folder / f"recorded-{name}-{self._count}.npz" for name in there}
        for name, path in paths.items():
            supervisor.order(name, deliver=str(path))
        end_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end_s and any(
            not path.exists() and supervisor.process_ids().get(name) == asked[name] for name, path in paths.items()
        ):
            await asyncio.sleep(_LOOK_S)
        found = await asyncio.to_thread(_read, paths)
        return RecordedRun(
            begin_ns=begin_ns,
            end_ns=end_ns,
            models=supervisor.model_names,
            processes=found,
            missing=[name for name in asked if name not in found],
        )


def _read(paths: dict[str, Path]) -> dict[str, Recorded]:
    """Read the files that were written, and remove them."""
    found = {}
    for name, path in paths.items():
        with contextlib.suppress(FileNotFoundError):
            found[name] = Recorded(path)
            path.unlink()
    return found
