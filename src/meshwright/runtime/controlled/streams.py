"""A rank of a controlled run: a thread per stream executes what the deciding rank dispatches (`run_controlled`).

A send moves data when it is executed: the receiving rank takes them in at once and keeps them for the computation that
waits for the send or its receive. Two ranks exchange data over a gloo pair of their own for each direction, members of
a collective over a group of their own. Both are made when first needed, under a prefix of the store that no other group
has. The deciding rank tells members to close groups that have been idle for long.

If a rank dies, others may hang in a transfer or a sum with it. Their stream goes on in a new thread (`_reopen`), with
all connections but those to the dead rank.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from meshwright.program.issuing import RANK_STREAMS
from meshwright.runtime.controlled.deciding import Decided, Decider
from meshwright.runtime.controlled.queues import (
    ALIVE,
    ARRIVALS,
    CONTROL,
    ENDED,
    FAILED,
    FOREVER,
    REPORTS,
    TAKEN_FOR_DEAD,
    connect,
    pop,
    queue_of,
)
from meshwright.spec import AllReduce, Instruction, ProgramError, Receive, RunError, Send
from meshwright.spec.control import Controller
from meshwright.spec.instructions import instruction_of

DECIDING_RANK_FAILED = "the deciding rank failed, which has the reason, or gave no sign of life"
_REASONS = {
    FAILED: DECIDING_RANK_FAILED,
    TAKEN_FOR_DEAD: "the deciding rank took it for dead, because it did not answer in time. If it was only slow, give "
    "a longer death_after_s",
}
# Process groups by their ranks.
_Groups = dict[tuple[int, ...], Any]
# Messages are float32.
_ELEMENT_BYTES = 4


class Abandoned(Exception):  # noqa: N818 - not an error: it ends a computation whose result is not wanted
    """Raised by `DispatchedWork.check` in an abandoned computation."""


class _ConnectionLost(Exception):  # noqa: N818 - not yet an error: a death may explain it
    """A transfer or a sum failed; the cause is torch's error."""


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise _ConnectionLost from error


@dataclass(frozen=True, slots=True)
class DispatchedWork:
    """A computation to execute.

    ``arrived``: the data of the messages for which it waited, in the order in which their sends ended.
    ``is_wanted``: whether the controller has not abandoned it. ``num_lost``: the number of messages and sums for which
    it waited and that were lost with a rank that died.
    """

    instruction: Instruction
    arrived: tuple[torch.Tensor, ...]
    is_wanted: Callable[[], bool]
    num_lost: int = 0

    def check(self) -> None:
        """Raise `Abandoned` if this computation was abandoned; called between its parts."""
        if not self.is_wanted():
            raise Abandoned


class Actor(Protocol):
    """What a rank computes, sends and sums. Each stream calls its methods in a thread of its own."""

    def compute(self, work: DispatchedWork) -> None:
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
    death_after_s: float = 30.0,
    survive_deaths: bool = True,
    on_end: Callable[[Instruction], None] | None = None,
) -> Decided | None:
    """Take part in a controlled run as one of ``num_ranks`` ranks; all ranks call this together.

    ``store`` connects the ranks, and is used by one run only; the process that holds it outlives the others, or is the
    deciding one. The rank ``deciding`` calls the controller and returns its decisions; the others return None. It calls
    ``on_end`` with each instruction that has ended.

    A rank that has joined and gives no sign of life for ``death_after_s`` is taken for dead. With ``survive_deaths``,
    this is an event for a controller that survives deaths (`spec.control.Controller`); the others go on. Else it ends
    the run. Data that a rank sent just before its death may be missing where they are used.

    Raises ProgramError for ranks that do not fit the controller, or a limit that is not above 0; RunError if a rank
    fails, if an instruction runs longer than ``timeout_s``, if the deciding rank gives no sign of life for as long, if
    a rank dies whose death ends the run, and on a rank that was taken for dead; on the deciding rank ProgramError or
    DeadlockError for decisions that break a rule.
    """
    uses = getattr(controller, "num_ranks", num_ranks)
    if uses != num_ranks or not 0 <= deciding < num_ranks:
        raise ProgramError(
            f"{num_ranks} ranks take part, and rank {deciding} decides; the controller uses {uses} ranks. Expected as "
            "many ranks, one of which decides."
        )
    for name, limit_s in (("timeout_s", timeout_s), ("death_after_s", death_after_s)):
        if not limit_s > 0:
            raise ProgramError(f"{name} is {limit_s!r}; expected a number of seconds above 0.")
    streams = _RankStreams(actor, rank, store, timeout_s)
    streams.start()
    if rank == deciding:
        survives = survive_deaths and bool(getattr(controller, "survives_deaths", False))
        decider = Decider(
            controller, rank, num_ranks, store, timeout_s, death_after_s, on_end, survives_deaths=survives
        )
        listener = threading.Thread(target=streams.listen, daemon=True)
        listener.start()
        decided = decider.run()
        listener.join()
        return decided
    streams.listen()
    streams.raise_error()
    streams.report_end()
    return None


class _RankStreams:
    """The threads of one rank: one per stream, one per sender of data, and one that listens to the deciding rank."""

    def __init__(self, actor: Actor, rank: int, store: TCPStore, timeout_s: float) -> None:
        self._actor, self._rank, self._timeout_s = actor, rank, timeout_s
        self._store = store
        self._control = connect(store)
        # Connections and thread of each stream, and how often it got a new thread.
        self._groups: dict[str, _Groups] = {name: {} for name in (*RANK_STREAMS, ARRIVALS)}
        self._threads: dict[str, threading.Thread] = {}
        self._num_reopened = dict.fromkeys(self._groups, 0)
        # Commands for the threads that take in what a rank sends.
        self._from: dict[int, queue.SimpleQueue[Any]] = {}
        self._kept: dict[int, torch.Tensor] = {}
        self._arrival = threading.Condition()
        self._abandoned: set[int] = set()
        self._dead: set[int] = set()
        self._error: BaseException | None = None
        # Why this rank leaves before the end.
        self._reason: str | None = None

    def start(self) -> None:
        for name in self._groups:
            self._open(name)

    def _open(self, name: str) -> None:
        """Start the thread of a stream."""
        number = self._num_reopened[name]
        arguments = name, number, self._groups[name], connect(self._store)
        self._threads[name] = threading.Thread(target=self._follow, args=arguments, daemon=True)
        self._threads[name].start()

    def _reopen(self, name: str, dead: int) -> None:
        """Let a stream go on in another thread. Its own may hang in a connection to a rank that died."""
        self._num_reopened[name] += 1
        # A copy: the old thread may add the group that it is making.
        groups = dict(self._groups[name])
        self._groups[name] = {ranks: group for ranks, group in groups.items() if dead not in ranks}
        self._open(name)

    def _check_thread(self, name: str, number: int) -> None:
        """Raise _ConnectionLost in the former thread of a stream that goes on in another one."""
        if number != self._num_reopened[name]:
            raise _ConnectionLost

    def listen(self) -> None:
        """Follow the deciding rank until the end, or until this rank has to leave."""
        self._control.set_timeout(timedelta(seconds=self._timeout_s))
        while True:
            try:
                command = pop(self._control, queue_of(self._rank, CONTROL))
                if command == ALIVE:
                    self._control.queue_push(REPORTS, json.dumps({"alive": self._rank}))
            except dist.DistError:
                command = FAILED
            match command:
                case str() if command == ENDED:
                    for thread in self._threads.values():
                        thread.join()
                    return
                case str() if command in (FAILED, TAKEN_FOR_DEAD):
                    # Threads that wait for other ranks end with this process.
                    self._reason = _REASONS[command]
                    return
                case int():
                    self._abandoned.add(command)
                case {"died": rank, "reopen": names}:
                    with self._arrival:
                        self._dead.add(rank)
                        self._arrival.notify_all()
                    for name in names:
                        self._reopen(name, rank)
                case _:  # a beat, which was answered
                    pass

    def raise_error(self) -> None:
        """Raise RunError if this rank had to leave before the end."""
        if self._reason is not None:
            reason = self._reason if self._error is None else _describe(self._error)
            raise RunError(f"Rank {self._rank} leaves the controlled run: {reason}") from self._error

    def report_end(self) -> None:
        """Tell the deciding rank that this rank has heard of the end; it may have left already."""
        with contextlib.suppress(dist.DistError):
            self._control.queue_push(REPORTS, json.dumps({"ended": self._rank}))

    def _follow(self, name: str, number: int, groups: _Groups, store: TCPStore) -> None:
        """Execute the commands of a stream until the deciding rank ends it, or is lost."""
        store.set_timeout(FOREVER)
        with contextlib.suppress(dist.DistError):
            while (command := pop(store, queue_of(self._rank, name, number))) is not None:
                if name == ARRIVALS:
                    self._pass_on(command)
                elif self._try(partial(self._execute, name, number, command, groups, store), command, store):
                    store.queue_push(REPORTS, json.dumps({"handle": command["handle"]}))
                else:
                    break
        for commands in self._from.values() if name == ARRIVALS else ():
            commands.put(None)

    def _try(self, action: Callable[[], None], command: dict[str, Any], store: TCPStore) -> bool:
        """Report whatever an action raises, and return whether it raised nothing."""
        try:
            action()
        except _ConnectionLost as error:
            facts = {"rank": self._rank, "broken": command["handle"], "error": _describe(error.__cause__ or error)}
            store.queue_push(REPORTS, json.dumps(facts))
            return False
        except BaseException as error:  # also an actor's SystemExit, which would end the thread without a word
            self._error = self._error or error
            store.queue_push(REPORTS, json.dumps({"rank": self._rank, "error": _describe(error)}))
            return False
        return True

    def _pass_on(self, command: dict[str, Any]) -> None:
        """Give a message to the thread of its sender: one that comes slowly does not delay those of other ranks."""
        sender = command["group"][0]
        if sender not in self._from:
            self._from[sender] = queue.SimpleQueue()
            threading.Thread(target=self._take_in, args=(self._from[sender], connect(self._store)), daemon=True).start()
        self._from[sender].put(command)

    def _take_in(self, commands: queue.SimpleQueue[Any], store: TCPStore) -> None:
        """Receive what one rank sends."""
        groups: _Groups = {}

        def receive(command: dict[str, Any]) -> None:
            instruction, handle = instruction_of(command["row"]), command["handle"]
            assert isinstance(instruction, Send)
            data = torch.empty(instruction.num_bytes // _ELEMENT_BYTES)
            with _connected():
                self._group(groups, tuple(command["group"]), "send", store).recv([data], 0, handle).wait()
            with self._arrival:
                self._kept[handle] = data
                self._arrival.notify_all()

        with contextlib.suppress(dist.DistError):
            while (command := commands.get()) is not None:
                if not self._try(partial(receive, command), command, store):
                    return

    def _execute(self, name: str, number: int, command: dict[str, Any], groups: _Groups, store: TCPStore) -> None:
        self._check_thread(name, number)
        instruction, handle, ranks = instruction_of(command["row"]), command["handle"], tuple(command["group"])
        match instruction:
            case Send():
                data = self._actor.outgoing(instruction)
                _check_bytes(instruction, data)
                with _connected():
                    self._group(groups, ranks, "send", store).send([data], 1, handle).wait()
            case Receive():
                pass  # the data are kept since they have arrived
            case AllReduce():
                total = self._actor.summand(instruction)
                _check_bytes(instruction, total)
                for closed in command["close"]:
                    groups.pop(tuple(closed), None)
                with _connected():
                    self._group(groups, ranks, f"sum {command['opened']}", store).allreduce([total]).wait()
                self._check_thread(name, number)
                self._actor.summed(instruction, total, len(ranks))
            case _ if name == "compute":
                self._take(command["dropped"])
                arrived = self._take(command["sends"])
                num_lost = command["lost"] + len(command["sends"]) - len(arrived)
                work = DispatchedWork(instruction, arrived, lambda: handle not in self._abandoned, num_lost)
                with contextlib.suppress(Abandoned):
                    self._actor.compute(work)

    def _take(self, sends: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, ...]:
        """Return the data of sends, given as (handle, sender), and forget them.

        The sender may report the end of a send before they are kept. Those that a dead rank sent may be missing.
        """

        def missing() -> list[int]:
            return [send for send, sender in sends if send not in self._kept and sender not in self._dead]

        with self._arrival:
            if not self._arrival.wait_for(lambda: not missing(), self._timeout_s):
                raise RunError(f"The data of the sends with handles {missing()} have not arrived.")
            return tuple(self._kept.pop(send) for send, _ in sends if send in self._kept)

    def _group(self, groups: _Groups, ranks: tuple[int, ...], use: str, store: TCPStore) -> Any:
        """Return the connections among ranks for one use; the first call makes them, on all these ranks together."""
        if ranks not in groups:
            place = PrefixStore(f"{use}/{'-'.join(map(str, ranks))}", store)
            timeout = timedelta(seconds=self._timeout_s)
            groups[ranks] = dist.ProcessGroupGloo(place, ranks.index(self._rank), len(ranks), timeout)
        return groups[ranks]


def _describe(error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"


def _check_bytes(instruction: Send | AllReduce, data: torch.Tensor) -> None:
    if data.numel() * _ELEMENT_BYTES != instruction.num_bytes or data.dtype != torch.float32:
        raise ProgramError(
            f"{instruction} was issued for {data.numel()} elements of {data.dtype}; expected float32 and num_bytes = "
            f"{data.numel() * _ELEMENT_BYTES}. Give the controller the bytes of the model."
        )
