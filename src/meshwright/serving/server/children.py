"""A child process of the supervisor: start it, read its reports, and wait for its end.

Reports arrive through a separate pipe (`reports`). The child's standard output contains what its model prints; it is
redirected to standard error and never interpreted.
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
    """A child process of the supervisor, by name, through all its restarts.

    ``wanted`` is set while the process should be restarted after its end. ``starts`` is the number of starts,
    ``error`` the last error that it has reported, and ``is_released`` whether it was asked to end.
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
        """Start the process; call `listen` next. Raises OSError if the system cannot start a process.

        ``arguments``: a module of this package, and the arguments of its ``main``.
        """
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
        """Pass the reports of the process to ``heed`` until it has ended."""
        hearing = asyncio.create_task(self._hear(heed))
        ending = asyncio.create_task(process.wait())
        while process.returncode is None and not ending.done():
            await asyncio.wait([ending], timeout=_LOOK_S)
        # End the processes that it has started itself, too: they would keep its pipe open.
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
                # Written by foreign code: not a report, but no reason to stop reading reports.
                sys.stderr.write(f"{self.name}: {line.decode(errors='replace')}")


async def await_end(children: list[Child], limit_s: float, hurrying: asyncio.Event) -> None:
    """Wait for processes to end; kill processes that run after ``limit_s`` seconds, or when ``hurrying`` is set."""
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
