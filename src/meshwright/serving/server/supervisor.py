"""The supervisor: it starts the processes of a server, restarts those that end, and shuts them down in order.

A process ends when its standard input ends, so that no process outlives its supervisor, even if that is killed.
Frontends first answer pending requests. A process that ends soon after its start is restarted after a delay, which
grows with each such end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.serving.server.children import Child, await_end
from meshwright.serving.server.decision_log import check_log
from meshwright.serving.server.place import own_folder, reserved_port
from meshwright.serving.server.reports import FATAL
from meshwright.serving.server.servable import check_served
from meshwright.serving.server.served import Served, check_names, served_models, write_models
from meshwright.serving.server.tokens import read_token
from meshwright.serving.server.totals import Totals
from meshwright.spec import Deployment, ServedModel, ServingError, write_document

# A process that lived this long was healthy; others are restarted after a pause, which doubles each time.
_WELL_S, _FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 0.05, 5.0
# Time limits for frontends to answer pending requests, and for others to end.
_DRAIN_S, _END_S = 30.0, 5.0
# Kinds of reports that describe a state until the next one; others describe an event.
_LASTING = ("scheduler", "worker", "front")
# Time limit of a change of models: loading of large ones.
_CHANGE_S = 1800.0
_STARTED_AGAIN = "The scheduler ended and is being restarted. Try again when the server is ready."

Told = Callable[[str, dict[str, Any]], None]


class Unready(ServingError):  # noqa: N818 - it is a state
    """The models cannot be changed now, but perhaps later; the message says why."""


class Supervisor:
    """A server of a deployment; `run` keeps it running until it is stopped.

    The scheduler writes its decisions to ``log``, and after a restart to ``log.2`` and so on. Requests need the token
    in ``token_file``, if given. ``told`` is called with each report of a process: the process's name (``worker-3``) and
    the report. Reports of ``kind`` "ended", "started" and "unstarted" come from the supervisor itself. `run` raises
    ServingError if a process cannot continue because of an error in the deployment.
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
        self.ended = Totals()  # of processes that have ended
        self.models: list[Served] = served_models(deployment)
        # All models so far, by number.
        self.model_names = [one.name for one in self.models]
        self.port = self.grpc_port = self.admin_port = 0
        self.folder: Path | None = None
        self._log, self._token_file, self._told = log, token_file, told
        self._stopping, self._hurrying = asyncio.Event(), asyncio.Event()
        self._changed = asyncio.Event()
        self._children: dict[str, Child] = {}
        self._fault: str | None = None
        self._was_ready = False
        self._changing = asyncio.Lock()
        self._changes = 0
        self._versions = {one.name: int(one.version) for one in self.models}
        self._change: asyncio.Future[str | None] | None = None

    def stop(self) -> None:
        """Answer pending requests, and end; a second call ends at once."""
        if self._stopping.is_set():
            self._hurrying.set()
        self._stopping.set()
        self._changed.set()

    def process_ids(self) -> dict[str, int]:
        """Return the process IDs of the running processes, by name."""
        return {
            name: child.process.pid
            for name, child in self._children.items()
            if child.process is not None and child.process.returncode is None
        }

    def starts(self, name: str) -> int:
        """Return how often a process was started; 1 for the supervisor itself."""
        return self._children[name].starts if name in self._children else 1

    def order(self, name: str, **facts: Any) -> bool:
        """Send an order to a process (`reports.Orders`); return False if it is not running."""
        child = self._children.get(name)
        if child is None or child.process is None or child.process.stdin is None:
            return False
        # A broken pipe is noticed by the task that waits for the process.
        child.process.stdin.write(json.dumps(facts).encode() + b"\n")
        return child.process.returncode is None

    async def change(self, come: Sequence[tuple[str, ServedModel]], leave: Sequence[str]) -> None:
        """Change the models: add those of ``come``, and remove those whose names are in ``leave``.

        ``come`` has pairs of name and model; a new model replaces the model of the same name. Returns when the new
        models answer requests. Raises ServingError, with everything unchanged, if a worker cannot load a model or if no
        model would be left, and Unready if the server is not ready or another change is under way.
        """
        if self._changing.locked():
            raise Unready("Another change of models is under way. Try again when it is done.")
        async with self._changing:
            names = {name for name, _ in come}
            numbers = itertools.count(len(self.model_names))
            loaded = [
                Served(next(numbers), name, model, version=str(self._versions.get(name, 0) + 1)) for name, model in come
            ]
            gone = [one for one in self.models if one.name in names or one.name in leave]
            models = [one for one in self.models if one not in gone] + loaded
            check_names(models)
            if not models:
                raise ServingError(
                    "No model would be left; a server needs at least one. Stop the server, or load another model first."
                )
            self.model_names += [one.name for one in loaded]
            await self._order_change(loaded, gone)
            self.models = models
            self._versions |= {one.name: int(one.version) for one in loaded}
            assert self.folder is not None
            write_models(models, self.folder)

    async def _order_change(self, come: list[Served], leave: list[Served]) -> None:
        """Order a change from the scheduler, and wait for it."""
        if not self.is_ready:
            raise Unready("The server is not ready. Try again when it is.")
        self._changes += 1
        self._change = asyncio.get_running_loop().create_future()
        load, numbers = [one.identity() for one in come], [one.number for one in leave]
        if not self.order("scheduler", change=self._changes, load=load, leave=numbers):
            self._end_change(_STARTED_AGAIN)
        try:
            done, _ = await asyncio.wait([self._change], timeout=_CHANGE_S)
            if not done:
                late = f"Workers have not loaded all new models within {_CHANGE_S:g} s, so nothing was changed."
                self.order("scheduler", change=self._changes, give_up=late)
            error = await self._change
        finally:
            self._change = None
        if error is not None:
            raise ServingError(error)

    def _end_change(self, error: str | None) -> None:
        if self._change is not None and not self._change.done():
            self._change.set_result(error)

    async def stopped(self) -> None:
        """Return when the server is being stopped, or cannot continue."""
        await self._stopping.wait()

    @property
    def is_ready(self) -> bool:
        """Whether requests can be answered."""
        fronts = range(self.deployment.server.fronts)
        return "scheduler" in self.facts and all(self.facts.get(f"front-{front}", {}).get("ready") for front in fronts)

    async def wait_until_ready(self) -> None:
        """Return when all frontends answer requests, or the server ends."""
        while not self.is_ready and not self._stopping.is_set():
            self._changed.clear()
            await self._changed.wait()

    async def run(self) -> None:
        """Start all processes, and keep them running until `stop` is called. Raises ServingError."""
        check_served(self.deployment)
        if self._log is not None:
            check_log(self._log)
        if self._token_file is not None:
            read_token(self._token_file)
        given = self.deployment.server
        grpc = reserved_port(given.host, given.grpc_port) if given.grpc else contextlib.nullcontext(given.grpc_port)
        with reserved_port(given.host, given.port) as self.port, grpc as self.grpc_port, own_folder() as folder:
            server = replace(given, port=self.port, grpc_port=self.grpc_port)
            write_document(replace(self.deployment, server=server), folder / "deployment.json")
            write_models(self.models, folder)
            self.folder = folder
            async with self._keeping(self._describe(folder)):
                await self._stopping.wait()
        if self._fault is not None:
            raise ServingError(self._fault)

    def _describe(self, folder: Path) -> list[Child]:
        log = [] if self._log is None else [str(self._log.absolute())]
        token = [] if self._token_file is None else [str(self._token_file.absolute())]
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        # Threads of an operator wait for each other actively: they must not share cores with other processes.
        rest = self.deployment.server.fronts + 1
        threads = str(max((cores - rest) // self.deployment.devices, 1))
        return [
            # The first touch of a huge page takes milliseconds (own measurement 2026-11-24: the first trial of
            # `adaptive` stopped a scheduler for 60 ms); most of a pool's memory is never used.
            Child("scheduler", ["scheduler_process", str(folder), *log], {"NUMPY_MADVISE_HUGEPAGE": "0"}),
            *(
                Child(
                    f"worker-{device}",
                    ["worker", str(folder), str(device)],
                    {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"},
                )
                for device in range(self.deployment.devices)
            ),
            *(
                Child(f"front-{front}", ["front_process", str(folder), *token])
                for front in range(self.deployment.server.fronts)
            ),
        ]

    @asynccontextmanager
    async def _keeping(self, children: list[Child]) -> AsyncIterator[None]:
        self._children = {child.name: child for child in children}
        for child in children:
            child.wanted.set()
        if self.deployment.scaling is not None:
            for device in range(self.deployment.scaling.minimum, self.deployment.devices):
                self._children[f"worker-{device}"].wanted.clear()
        keepers = [asyncio.create_task(self._keep(child)) for child in children]
        try:
            yield
        finally:
            self._stopping.set()
            self._changed.set()
            await self._end_all()
            await asyncio.gather(*keepers)

    async def _keep(self, child: Child) -> None:
        """Start a process, and restart it whenever it has ended."""
        pause_s = _FIRST_PAUSE_S
        while await self._is_wanted(child):
            began = time.monotonic()
            arguments = child.arguments
            if child.name == "scheduler" and self._log is not None and child.starts:
                # Keep the log of the previous scheduler.
                arguments = [*arguments[:-1], f"{arguments[-1]}.{child.starts + 1}"]
            try:
                process = await child.start(arguments)
            except OSError as error:
                # The shortage of memory or processes may be temporary.
                text = f"{child.name} could not be started ({error}); this is retried."
                self._tell(child.name, {"kind": "unstarted", "text": text})
            else:
                await self._accompany(child, process)
            if time.monotonic() - began > _WELL_S:
                pause_s = _FIRST_PAUSE_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _accompany(self, child: Child, process: asyncio.subprocess.Process) -> None:
        """Read the reports of a process until it has ended, and handle its end."""
        if self._stopping.is_set() and process.stdin is not None:
            process.stdin.close()
        self._tell(child.name, {"kind": "started", "pid": process.pid, "starts": child.starts})
        await child.listen(process, partial(self._hear, child))
        code = process.returncode
        self.ended.add(self.facts.pop(child.name, {}))
        if child.name == "scheduler":
            self._end_change("The server is ending." if self._stopping.is_set() else _STARTED_AGAIN)
        # If other workers have loaded the models before, a worker that fails to may succeed later.
        if code == FATAL and not (self._was_ready and child.name.startswith("worker-")):
            self._fault = self._fault or child.error
            self._stopping.set()
        again = child.wanted.is_set() and not self._stopping.is_set()
        facts = {"code": code, "again": again, "error": child.error, "is_released": child.is_released}
        self._tell(child.name, {"kind": "ended", **facts})
        child.error, child.is_released = None, False

    async def _is_wanted(self, child: Child) -> bool:
        """Wait until a process is wanted; return False if the server ends before."""
        if not child.wanted.is_set():
            waiting = [asyncio.create_task(event.wait()) for event in (child.wanted, self._stopping)]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
        return not self._stopping.is_set()

    def _hear(self, child: Child, facts: dict[str, Any]) -> None:
        """Handle a report of a process."""
        if self._heed(child, facts["kind"], facts):
            self._was_ready = self._was_ready or self.is_ready
            self._tell(child.name, facts)
            self._changed.set()

    def _heed(self, child: Child, kind: str, facts: dict[str, Any]) -> bool:
        """Do what a report asks for; return False if there is nothing to pass on."""
        if kind == "error":
            child.error = facts["text"]
        elif kind == "hire":
            wanted = self._children[f"worker-{facts['device']}"].wanted
            if wanted.is_set():
                return False
            wanted.set()
        elif kind == "release":
            self._release(self._children[f"worker-{facts['device']}"])
        elif kind == "broken" and not self._was_ready:
            # No worker has served yet: the model or the deployment is at fault. A worker with the same problem after
            # one was ready is restarted.
            self._fault = self._fault or facts["text"]
            self._stopping.set()
            return False
        elif kind in ("stuck", "broken"):
            self._kill(facts)
        elif kind in ("changed", "refused"):
            self._end_change(facts.get("text"))
        elif kind in _LASTING:
            self.facts[child.name] = facts
        return True

    def _release(self, child: Child) -> None:
        """End a process and do not restart it."""
        child.wanted.clear()
        child.is_released = True
        if child.process is not None and child.process.stdin is not None:
            child.process.stdin.close()

    def _kill(self, facts: dict[str, Any]) -> None:
        """Kill a worker that has computed for too long, or lacks a model; it is then restarted."""
        process = self._children[f"worker-{facts['worker']}"].process
        if process is not None and process.pid == facts["pid"] and process.returncode is None:
            process.kill()

    def _tell(self, name: str, facts: dict[str, Any]) -> None:
        if self._told is not None:
            self._told(name, facts)

    async def _end_all(self) -> None:
        """End frontends first, which answer pending requests; then all others."""
        fronts = [child for name, child in self._children.items() if name.startswith("front-")]
        others = [child for child in self._children.values() if child not in fronts]
        for child in fronts:
            if child.process is not None and child.process.returncode is None:
                child.process.send_signal(signal.SIGTERM)
        await await_end(fronts, _DRAIN_S, self._hurrying)
        for child in others:
            if child.process is not None and child.process.stdin is not None:
                child.process.stdin.close()
        await await_end(others, _END_S, self._hurrying)
