"""A process of a server, as its supervisor has it: it is started, its reports are read, and its end is awaited.

Reports come through a pipe of their own (`reports`). Standard output is what a model prints: it goes where standard
error goes, and nothing in it is obeyed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from meshwright.serving.server.reports import PIPE

_LONGEST_LINE = 2**24
_LOOK_S, _END_S = 0.5, 5.0
_STANDARD_ERROR = 2


@dataclass(slots=True, eq=False)
class Child:
    """A process by name; ``wanted``: is it to be started again when it has ended?

    ``error`` is what it said of its end, and ``is_released`` whether it was told to end.
    """

    name: str
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    starts: int = 0
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    error: str | None = None
    is_released: bool = False
    reports: asyncio.StreamReader | None = None

    async def start(self, arguments: list[str]) -> asyncio.subprocess.Process:
        """Start it; `listen` has to follow. Raises OSError where the system has no room for it."""
        reading, writing = os.pipe()
        self.reports = asyncio.StreamReader(limit=_LONGEST_LINE)
        transport = None
        try:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(self.reports),  # type: ignore[arg-type]
                os.fdopen(reading, "rb"),
            )
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", f"meshwright.serving.server.{arguments[0]}", *arguments[1:]),
                stdin=asyncio.subprocess.PIPE,
                stdout=_STANDARD_ERROR,
                env={**os.environ, **self.environment, PIPE: str(writing)},
                pass_fds=(writing,),
                start_new_session=True,  # Ctrl-C is for the supervisor
            )
        except OSError:
            if transport is not None:
                transport.close()
            raise
        finally:
            os.close(writing)
        self.starts += 1
        return self.process

    async def listen(self, process: asyncio.subprocess.Process, heed: Callable[[dict[str, Any]], None]) -> None:
        """Have its reports heeded until it has ended."""
        hearing = asyncio.create_task(self._hear(heed))
        ending = asyncio.create_task(process.wait())
        while process.returncode is None and not ending.done():
            await asyncio.wait([ending], timeout=_LOOK_S)
        # What it has started itself ends with it, and holds its reports open no longer.
        if hasattr(os, "killpg") and hasattr(signal, "SIGKILL"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        await asyncio.wait([hearing, ending], timeout=_END_S)
        hearing.cancel()
        ending.cancel()

    async def _hear(self, heed: Callable[[dict[str, Any]], None]) -> None:
        assert self.reports is not None
        while True:
            try:
                line = await self.reports.readline()
            except ValueError:  # a line without end
                continue
            if not line:
                return
            try:
                heed(json.loads(line))
            except (LookupError, TypeError, ValueError, AttributeError):
                # The code of a stranger has written it: no report, and no reason to hear no more of them.
                sys.stderr.write(f"{self.name}: {line.decode(errors='replace')}")


async def await_end(children: list[Child], limit_s: float, hurrying: asyncio.Event) -> None:
    """Wait for processes to end; those that do not, or not soon enough for somebody, are killed."""
    processes = [child.process for child in children if child.process is not None]
    ending = asyncio.create_task(_all_ended(processes))
    hurry = asyncio.create_task(hurrying.wait())
    awaited: list[asyncio.Task[Any]] = [ending, hurry]
    await asyncio.wait(awaited, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    ending.cancel()
    for process in processes:
        if process.returncode is None:
            process.kill()


async def _all_ended(processes: list[asyncio.subprocess.Process]) -> None:
    for process in processes:
        await process.wait()
