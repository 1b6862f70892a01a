"""The supervisor: it starts the processes of a server, starts again those that end, and ends them all in order.

A process is told to end by the end of its standard input, so that none outlives its supervisor, whatever becomes of
that; fronts first answer what they have. A process that ends soon after its start is started again later each time.
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
from meshwright.spec import Deployment, ServedModel, ServingError
from meshwright.spec.codec import write_document

# A process that lived so long was well; one that did not is started again after a pause, twice as long each time.
_WELL_S, _FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 0.05, 5.0
# What fronts have to answer what is under way, and others to end.
_DRAIN_S, _END_S = 30.0, 5.0
# Kinds of reports that hold until the next one; others tell of a moment.
_LASTING = ("scheduler", "worker", "front")
# What a change of models may take: the loading of large ones.
_CHANGE_S = 1800.0
_STARTED_AGAIN = "The scheduler ended, and is started again. Ask again when the server is ready."

Told = Callable[[str, dict[str, Any]], None]


class Unready(ServingError):  # noqa: N818 - it is a state
    """What was asked for may be possible in a moment."""


class Supervisor:
    """A server of a deployment; `run` keeps it up until it is stopped.

    Decisions are written to ``log``, those of a scheduler that was started again to ``log.2`` and so on; requests need
    the token of ``token_file``. ``told`` hears what processes report: the name of one (``worker-3``) and its facts;
    ``kind`` "ended", "started" and "unstarted" are the supervisor's own. Raises ServingError where a process cannot
    go on by a fault of the deployment.
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
        self.ended = Totals()  # of processes that have
        self.models: list[Served] = served_models(deployment)
        # Of all models that there were, by their numbers.
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

    def order(self, name: str, **facts: Any) -> bool:
        """Send a process an order (`reports.Orders`); False if it is not there."""
        child = self._children.get(name)
        if child is None or child.process is None or child.process.stdin is None:
            return False
        # A pipe that nobody reads any more is seen where the process is listened to.
        child.process.stdin.write(json.dumps(facts).encode() + b"\n")
        return child.process.returncode is None

    async def change(self, come: Sequence[tuple[str, ServedModel]], leave: Sequence[str]) -> None:
        """Serve other models: some come, by name, in the place of those that had the name; others leave.

        Returns when requests are answered by the new ones. Raises ServingError, and then all is as it was: where not
        all can be loaded by all workers, and where no model would be left.
        """
        if self._changing.locked():
            raise Unready("Another change of models is under way. Ask again when it is done.")
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
                raise ServingError("No model would be left; a server has at least one. Stop it, or load another first.")
            self.model_names += [one.name for one in loaded]
            await self._order_change(loaded, gone)
            self.models = models
            self._versions |= {one.name: int(one.version) for one in loaded}
            assert self.folder is not None
            write_models(models, self.folder)

    async def _order_change(self, come: list[Served], leave: list[Served]) -> None:
        """Have the scheduler make a change."""
        if not self.is_ready:
            raise Unready("The server is not ready. Ask again when it is.")
        self._changes += 1
        self._change = asyncio.get_running_loop().create_future()
        load, numbers = [one.identity() for one in come], [one.number for one in leave]
        if not self.order("scheduler", change=self._changes, load=load, leave=numbers):
            self._end_change(_STARTED_AGAIN)
        try:
            done, _ = await asyncio.wait([self._change], timeout=_CHANGE_S)
            if not done:
                late = f"Workers have not loaded all models within {_CHANGE_S:g} s."
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
        """Return when it was told to stop, or cannot go on."""
        await self._stopping.wait()

    @property
    def is_ready(self) -> bool:
        """Can requests be answered?"""
        fronts = range(self.deployment.server.fronts)
        return "scheduler" in self.facts and all(self.facts.get(f"front-{front}", {}).get("ready") for front in fronts)

    async def wait_until_ready(self) -> None:
        """Return when all fronts answer requests, or the server ends."""
        while not self.is_ready and not self._stopping.is_set():
            self._changed.clear()
            await self._changed.wait()

    async def run(self) -> None:
        """Start all, and keep them up until `stop`."""
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
        # Threads of an operator wait for each other by turning: they must not have to share cores with the rest.
        rest = self.deployment.server.fronts + 1
        threads = str(max((cores - rest) // self.deployment.devices, 1))
        return [
            # The first touch of a huge page takes milliseconds (own measurement 2026-11-24: the first trial of
            # `adaptive` stopped a scheduler for 60 ms); most of a pool's room is never used.
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
        """Start a process, and start it again when it has ended."""
        pause_s = _FIRST_PAUSE_S
        while await self._is_wanted(child):
            began = time.monotonic()
            arguments = child.arguments
            if child.name == "scheduler" and self._log is not None and child.starts:
                # What the one before has written stays.
                arguments = [*arguments[:-1], f"{arguments[-1]}.{child.starts + 1}"]
            try:
                process = await child.start(arguments)
            except OSError as error:
                # Whatever took the memory, or the room for processes, may end.
                text = f"{child.name} could not be started ({error}); it is tried again."
                self._tell(child.name, {"kind": "unstarted", "text": text})
            else:
                await self._accompany(child, process)
            if time.monotonic() - began > _WELL_S:
                pause_s = _FIRST_PAUSE_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _accompany(self, child: Child, process: asyncio.subprocess.Process) -> None:
        """Listen to a process until it has ended, and do what follows from its end."""
        if self._stopping.is_set() and process.stdin is not None:
            process.stdin.close()
        self._tell(child.name, {"kind": "started", "pid": process.pid, "starts": child.starts})
        await child.listen(process, partial(self._hear, child))
        code = process.returncode
        self.ended.add(self.facts.pop(child.name, {}))
        if child.name == "scheduler":
            self._end_change("The server ends." if self._stopping.is_set() else _STARTED_AGAIN)
        # A worker that cannot load what others have loaded before may do so later.
        if code == FATAL and not (self._was_ready and child.name.startswith("worker-")):
            self._fault = self._fault or child.error
            self._stopping.set()
        again = child.wanted.is_set() and not self._stopping.is_set()
        facts = {"code": code, "again": again, "error": child.error, "is_released": child.is_released}
        self._tell(child.name, {"kind": "ended", **facts})
        child.error, child.is_released = None, False

    async def _is_wanted(self, child: Child) -> bool:
        """Wait until a process is wanted; False if the server ends before."""
        if not child.wanted.is_set():
            waiting = [asyncio.create_task(event.wait()) for event in (child.wanted, self._stopping)]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
        return not self._stopping.is_set()

    def _hear(self, child: Child, facts: dict[str, Any]) -> None:
        """A process has reported something."""
        if self._heed(child, facts["kind"], facts):
            self._was_ready = self._was_ready or self.is_ready
            self._tell(child.name, facts)
            self._changed.set()

    def _heed(self, child: Child, kind: str, facts: dict[str, Any]) -> bool:
        """Do what a report asks for; False if there is nothing to it."""
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
            # None has served it yet: what it says is wrong with the model, or with the deployment. Another worker that
            # finds the same after one was ready is started again.
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
        """A process is not wanted any more: it ends, and is not started again."""
        child.wanted.clear()
        child.is_released = True
        if child.process is not None and child.process.stdin is not None:
            child.process.stdin.close()

    def _kill(self, facts: dict[str, Any]) -> None:
        """A worker is of no use: it has computed for too long, or lacks a model. It is killed, and started again."""
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
        await await_end(fronts, _DRAIN_S, self._hurrying)
        for child in others:
            if child.process is not None and child.process.stdin is not None:
                child.process.stdin.close()
        await await_end(others, _END_S, self._hurrying)
