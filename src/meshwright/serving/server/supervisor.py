"""The supervisor: it starts the processes of a server, starts again those that end, and ends them all in order.

A process is told to end by the end of its standard input, so that none outlives its supervisor, whatever becomes of
that; fronts first answer what they have. A process that ends soon after its start is started again later each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.serving.server.reports import FATAL
from meshwright.serving.server.served import check_served
from meshwright.spec import Deployment, ServingError
from meshwright.spec.codec import write_document

try:
    import fcntl
except ImportError:  # elsewhere than on Linux and macOS nobody serves
    fcntl = None  # type: ignore[assignment]

# Shared memory; a folder elsewhere does, too, where the system has none.
_MEMORY = Path("/dev/shm")
_PREFIX = "meshwright-serve-"
# A process that lived so long was well; one that did not is started again after a pause, twice as long each time.
_WELL_S, _FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 0.05, 5.0
# What fronts have to answer what is under way, and others to end.
_DRAIN_S, _END_S = 30.0, 5.0
_LONGEST_LINE = 2**24
_LOOK_S = 0.5
# Kinds of reports that hold until the next one; others tell of a moment.
_LASTING = ("scheduler", "worker", "front")

Told = Callable[[str, dict[str, Any]], None]


@dataclass(slots=True, eq=False)
class _Child:
    name: str
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    starts: int = 0


class Supervisor:
    """A server of a deployment; `run` keeps it up until it is stopped.

    Decisions are written to ``log``, those of a scheduler that was started again to ``log.2`` and so on; requests need
    the token of ``token_file``. ``told`` hears what processes report: the name of one (``worker-3``) and its facts;
    ``kind`` "ended" and "started" are the supervisor's own. Raises ServingError where a process cannot go on by a fault
    of the deployment.
    """

    def __init__(
        self,
        deployment: Deployment,
        *,
        log: Path | None = None,
        token_file: Path | None = None,
        told: Told | None = None,
    ) -> None:
        self.deployment = deployment
        self.facts: dict[str, dict[str, Any]] = {}
        self.port = self.grpc_port = self.admin_port = 0
        self._log, self._token_file, self._told = log, token_file, told
        self._stopping, self._hurrying = asyncio.Event(), asyncio.Event()
        self._changed = asyncio.Event()
        self._children: dict[str, _Child] = {}
        self._fault: str | None = None

    def stop(self) -> None:
        """Answer what is under way, and end; asked again, end at once."""
        if self._stopping.is_set():
            self._hurrying.set()
        self._stopping.set()
        self._changed.set()

    def process_ids(self) -> dict[str, int]:
        """The processes that there are, by name."""
        return {
            name: child.process.pid
            for name, child in self._children.items()
            if child.process is not None and child.process.returncode is None
        }

    def starts(self, name: str) -> int:
        """How often a process was started; the supervisor itself once."""
        return self._children[name].starts if name in self._children else 1

    def order(self, name: str, **facts: Any) -> None:
        """Send a process an order (`reports.Orders`); one that is not there misses it."""
        child = self._children.get(name)
        if child is not None and child.process is not None and child.process.stdin is not None:
            # A pipe that nobody reads any more is seen where the process is listened to.
            child.process.stdin.write(json.dumps(facts).encode() + b"\n")

    async def stopped(self) -> None:
        """Return when it was told to stop, or cannot go on."""
        await self._stopping.wait()

    @property
    def is_ready(self) -> bool:
        """Can requests be answered?"""
        fronts = range(self.deployment.server.fronts)
        return all(self.facts.get(f"front-{front}", {}).get("ready") for front in fronts)

    async def wait_until_ready(self) -> None:
        """Return when all fronts answer requests, or the server ends."""
        while not self.is_ready and not self._stopping.is_set():
            self._changed.clear()
            await self._changed.wait()

    async def run(self) -> None:
        """Start all, and keep them up until `stop`."""
        check_served(self.deployment)
        given = self.deployment.server
        grpc = _reserved_port(given.host, given.grpc_port) if given.grpc else contextlib.nullcontext(given.grpc_port)
        with _reserved_port(given.host, given.port) as self.port, grpc as self.grpc_port, _own_folder() as folder:
            server = replace(given, port=self.port, grpc_port=self.grpc_port)
            write_document(replace(self.deployment, server=server), folder / "deployment.json")
            async with self._keeping(self._describe(folder)):
                await self._stopping.wait()
        if self._fault is not None:
            raise ServingError(self._fault)

    def _describe(self, folder: Path) -> list[_Child]:
        log = [] if self._log is None else [str(self._log.absolute())]
        token = [] if self._token_file is None else [str(self._token_file.absolute())]
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        # Threads of an operator wait for each other by turning: they must not have to share cores with the rest.
        rest = self.deployment.server.fronts + 1
        threads = str(max((cores - rest) // self.deployment.devices, 1))
        return [
            _Child("scheduler", ["scheduler", str(folder), *log]),
            *(
                _Child(
                    f"worker-{device}",
                    ["worker", str(folder), str(device)],
                    {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"},
                )
                for device in range(self.deployment.devices)
            ),
            *(
                _Child(f"front-{front}", ["front_process", str(folder), *token])
                for front in range(self.deployment.server.fronts)
            ),
        ]

    @asynccontextmanager
    async def _keeping(self, children: list[_Child]) -> AsyncIterator[None]:
        self._children = {child.name: child for child in children}
        keepers = [asyncio.create_task(self._keep(child)) for child in children]
        try:
            yield
        finally:
            self._stopping.set()
            self._changed.set()
            await self._end_all()
            await asyncio.gather(*keepers)

    async def _keep(self, child: _Child) -> None:
        """Start a process, and start it again when it has ended."""
        pause_s = _FIRST_PAUSE_S
        while not self._stopping.is_set():
            began = time.monotonic()
            arguments = child.arguments
            if child.name == "scheduler" and self._log is not None and child.starts:
                # What the one before has written stays.
                arguments = [*arguments[:-1], f"{arguments[-1]}.{child.starts + 1}"]
            child.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", f"meshwright.serving.server.{arguments[0]}", *arguments[1:]),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, **child.environment},
                limit=_LONGEST_LINE,
                start_new_session=True,  # Ctrl-C is for the supervisor
            )
            if self._stopping.is_set() and child.process.stdin is not None:
                child.process.stdin.close()
            child.starts += 1
            self._tell(child.name, {"kind": "started", "pid": child.process.pid, "starts": child.starts})
            await self._listen(child, child.process)
            code = child.process.returncode
            self.facts.pop(child.name, None)
            if code == FATAL:
                self._stopping.set()
            self._tell(child.name, {"kind": "ended", "code": code, "again": not self._stopping.is_set()})
            if time.monotonic() - began > _WELL_S:
                pause_s = _FIRST_PAUSE_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _listen(self, child: _Child, process: asyncio.subprocess.Process) -> None:
        """Hear a process until it has ended."""
        hearing = asyncio.create_task(self._hear(child, process))
        ending = asyncio.create_task(process.wait())
        # asyncio waits for the end of output, too, which others may hold open.
        while process.returncode is None and not ending.done():
            await asyncio.wait([ending], timeout=_LOOK_S)
        # What it has started itself ends with it, and holds its output open no longer.
        if hasattr(os, "killpg") and hasattr(signal, "SIGKILL"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        await asyncio.wait([hearing, ending], timeout=_END_S)
        hearing.cancel()
        ending.cancel()

    async def _hear(self, child: _Child, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # a line without end
                continue
            if not line:
                return
            if line == b"\n":
                continue
            try:
                facts = json.loads(line)
                kind = facts["kind"]
            except (ValueError, KeyError, TypeError):
                sys.stderr.buffer.write(line)  # what a model prints
                continue
            if kind == "error":
                self._fault = self._fault or facts["text"]
            elif kind == "stuck":
                self._kill_stuck(facts)
            elif kind in _LASTING:
                self.facts[child.name] = facts
            self._tell(child.name, facts)
            self._changed.set()

    def _kill_stuck(self, facts: dict[str, Any]) -> None:
        """A worker has computed for too long: it will not look at its input, so it is killed, and started again."""
        process = self._children[f"worker-{facts['worker']}"].process
        if process is not None and process.pid == facts["pid"] and process.returncode is None:
            process.kill()

    def _tell(self, name: str, facts: dict[str, Any]) -> None:
        if self._told is not None:
            self._told(name, facts)

    async def _end_all(self) -> None:
        """First fronts, which answer what they have; then all others."""
        fronts = [child for name, child in self._children.items() if name.startswith("front-")]
        others = [child for child in self._children.values() if child not in fronts]
        for child in fronts:
            if child.process is not None and child.process.returncode is None:
                child.process.send_signal(signal.SIGTERM)
        await _await_end(fronts, _DRAIN_S, self._hurrying)
        for child in others:
            if child.process is not None and child.process.stdin is not None:
                child.process.stdin.close()
        await _await_end(others, _END_S, self._hurrying)


async def _await_end(children: list[_Child], limit_s: float, hurrying: asyncio.Event) -> None:
    """Wait for processes to end; those that do not, or not soon enough for somebody, are killed."""
    processes = [child.process for child in children if child.process is not None]
    ending = asyncio.gather(*(process.wait() for process in processes))
    hurry = asyncio.create_task(hurrying.wait())
    awaited: list[asyncio.Future[Any]] = [ending, hurry]
    await asyncio.wait(awaited, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    ending.cancel()
    for process in processes:
        if process.returncode is None:
            process.kill()


@contextlib.contextmanager
def _reserved_port(host: str, port: int) -> Any:
    """A port, or a free one for 0; fronts share it, and nobody else gets it meanwhile."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as reserved:
        try:
            # Without sharing first: what listens there already is found.
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            with socket.socket(reserved.family) as alone:
                alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                alone.bind((host, port))
            reserved.bind((host, port))
        except OSError as error:
            raise ServingError(
                f"Nothing can listen at {host} port {port}: {error.strerror}. Choose another port, or 0 for a free one."
            ) from None
        yield reserved.getsockname()[1]


@contextlib.contextmanager
def _own_folder() -> Any:
    """A folder in shared memory for sockets and slabs; what servers left behind that were killed is removed."""
    memory = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    for left in memory.glob(f"{_PREFIX}*"):
        owner = left.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            # A server in another container has the memory in common with this one, and not its processes.
            with contextlib.suppress(OSError), _locked(left):
                shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=memory))
    try:
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Any:
    """A folder that no living server has. Raises OSError if one has it, or it is somebody else's."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        if hasattr(os, "getuid") and os.fstat(opened).st_uid != os.getuid():
            raise PermissionError
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(opened)
