"""A rank of a controlled run: a thread per stream executes what the deciding rank dispatches (`run_controlled`).

A send moves data when it is executed: the receiving rank takes them in at once and keeps them until the matching
receive, or an update that waited for the send, uses them. Two ranks exchange data over a gloo pair of their own for
each direction, members of a collective over a group of their own; both are made when first needed, under a prefix of
the store that no other group has.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from meshwright.runtime.controlled.deciding import (
    ARRIVALS,
    CONTROL,
    FAILED,
    REPORTS,
    STREAMS,
    Decided,
    Decider,
    connect,
    queue_of,
)
from meshwright.spec import AllReduce, Instruction, ProgramError, Receive, RunError, Send
from meshwright.spec.control import Controller
from meshwright.spec.instructions import instruction_of

# Messages are float32.
_ELEMENT_BYTES = 4
_FOREVER = timedelta(days=365)


class Abandoned(Exception):  # noqa: N818 - not an error: it ends a computation whose result is not wanted
    """Raised by `Dispatched.check` in an abandoned computation."""


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A computation to execute.

    ``arrived``: (stage of the sender, data) of the messages for which it waited, in the order of their arrival.
    ``is_wanted``: whether the controller has not abandoned it.
    """

    instruction: Instruction
    arrived: tuple[tuple[int, torch.Tensor], ...]
    is_wanted: Callable[[], bool]

    def check(self) -> None:
        """Raise `Abandoned` if this computation was abandoned; called between its parts."""
        if not self.is_wanted():
            raise Abandoned


class Actor(Protocol):
    """What a rank computes, sends and sums. Each stream calls its methods in a thread of its own."""

    def compute(self, work: Dispatched) -> None:
        """Execute a computation."""
        ...

    def outgoing(self, send: Send) -> torch.Tensor:
        """Return the data of a send: float32, shape (num_bytes / 4,)."""
        ...

    def summand(self, instruction: AllReduce) -> torch.Tensor:
        """Return the tensor that its sum over the group replaces: float32, any shape."""
        ...

    def summed(self, instruction: AllReduce, total: torch.Tensor, num_ranks: int) -> None:
        """Take the sum over a group of ``num_ranks`` ranks."""
        ...


def run_controlled(
    controller: Controller[Any],
    actor: Actor,
    *,
    rank: int,
    num_ranks: int,
    store: TCPStore,
    deciding: int = 0,
    timeout_s: float = 300.0,
) -> Decided | None:
    """Take part in a controlled run as one of ``num_ranks`` ranks; all ranks call this together.

    ``store`` connects the ranks, and is used by one run only. The rank ``deciding`` calls the controller and returns
    its decisions; the others return None. Raises RunError if a rank fails, or if no instruction ends for ``timeout_s``;
    on the deciding rank ProgramError or DeadlockError for decisions that break a rule.
    """
    streams = _RankStreams(actor, rank, store, timeout_s)
    streams.start()
    decided = Decider(controller, num_ranks, store, timeout_s).run() if rank == deciding else None
    streams.join()
    return decided


class _RankStreams:
    """The threads of one rank: one per stream, and one that hears of abandoned computations and of the end."""

    def __init__(self, actor: Actor, rank: int, store: TCPStore, timeout_s: float) -> None:
        self._actor, self._rank, self._store, self._timeout_s = actor, rank, store, timeout_s
        self._control = connect(store)
        self._threads = [
            threading.Thread(target=self._follow, args=(name, connect(store)), daemon=True)
            for name in (*STREAMS, ARRIVALS)
        ]
        self._kept: dict[int, tuple[int, torch.Tensor]] = {}
        self._arrival = threading.Condition()
        self._abandoned: set[int] = set()

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Follow the deciding rank until the end. Raises RunError if the run failed."""
        # An idle rank may wait for ever: the deciding rank watches the time.
        self._control.set_timeout(_FOREVER)
        while True:
            try:
                command = json.loads(self._control.queue_pop(queue_of(self._rank, CONTROL)))
            except dist.DistError:
                command = FAILED
            if command is None:
                for thread in self._threads:
                    thread.join()
                return
            if command == FAILED:  # threads that wait for other ranks end with this process
                raise RunError(
                    f"The controlled run failed, or rank {self._rank} lost its deciding rank, which has the reason."
                )
            self._abandoned.add(command)

    def _follow(self, name: str, store: TCPStore) -> None:
        """Execute the commands of a stream until the deciding rank ends it."""
        store.set_timeout(_FOREVER)
        groups: dict[tuple[int, ...], Any] = {}
        while (command := json.loads(store.queue_pop(queue_of(self._rank, name)))) is not None:
            try:
                self._execute(name, command, groups)
            except Exception as error:  # whatever an actor raises ends the run
                report = {"rank": self._rank, "error": f"{type(error).__name__}: {error}"}
                store.queue_push(REPORTS, json.dumps(report))
                return
            if name != ARRIVALS:
                store.queue_push(REPORTS, json.dumps({"handle": command["handle"]}))

    def _execute(self, name: str, command: dict[str, Any], groups: dict[tuple[int, ...], Any]) -> None:
        instruction, handle, ranks = instruction_of(command["row"]), command["handle"], tuple(command["group"])
        match instruction:
            case Send() if name == ARRIVALS:
                data = torch.empty(instruction.num_bytes // _ELEMENT_BYTES)
                self._group(groups, ranks, "send").recv([data], 0, handle).wait()
                with self._arrival:
                    self._kept[handle] = instruction.stage, data
                    self._arrival.notify_all()
            case Send():
                data = self._outgoing(instruction)
                self._group(groups, ranks, "send").send([data], 1, handle).wait()
            case Receive():
                pass  # the data are kept since they have arrived
            case AllReduce():
                total = self._actor.summand(instruction)
                self._group(groups, ranks, "sum").allreduce([total]).wait()
                self._actor.summed(instruction, total, len(ranks))
            case _ if name == "compute":
                self._take(command["dropped"])
                work = Dispatched(instruction, self._take(command["sends"]), lambda: handle not in self._abandoned)
                with contextlib.suppress(Abandoned):
                    self._actor.compute(work)
            case _:
                raise ProgramError(
                    f"{instruction} is not run under a controller; expected computations, sends, receives and "
                    "all-reduces."
                )

    def _outgoing(self, send: Send) -> torch.Tensor:
        data = self._actor.outgoing(send)
        if data.numel() * _ELEMENT_BYTES != send.num_bytes or data.dtype != torch.float32:
            raise ProgramError(
                f"{send} was issued for {data.numel()} elements of {data.dtype}; expected float32 and num_bytes = "
                f"{data.numel() * _ELEMENT_BYTES}. Give the controller the bytes of the model."
            )
        return data

    def _take(self, sends: Sequence[int]) -> tuple[tuple[int, torch.Tensor], ...]:
        """Return the data of sends and forget them. The sender may report the end of a send before they are kept."""
        with self._arrival:
            if not self._arrival.wait_for(lambda: self._kept.keys() >= set(sends), self._timeout_s):
                raise RunError(f"The data of sends {sorted(set(sends) - self._kept.keys())} have not arrived.")
            return tuple(self._kept.pop(send) for send in sends)

    def _group(self, groups: dict[tuple[int, ...], Any], ranks: tuple[int, ...], use: str) -> Any:
        """Return the connections among ranks for one use; the first call makes them, on all these ranks together."""
        if ranks not in groups:
            store = PrefixStore(f"{use}/{'-'.join(map(str, ranks))}", connect(self._store))
            timeout = timedelta(seconds=self._timeout_s)
            groups[ranks] = dist.ProcessGroupGloo(store, ranks.index(self._rank), len(ranks), timeout)
        return groups[ranks]
