"""The deciding rank of a controlled run: events in, decisions out.

One rank calls the controller, so that all ranks issue collectives in the same order. An instruction is dispatched to
its rank when the instruction before it in its stream has ended and its waits are satisfied; of a join, the first
``need`` that ended satisfy it. So ranks know nothing of waits. Events are delivered in the order in which ends were
reported. The other rules are those of the simulator (`meshwright.program.issuing`).

Messages go through queues of a TCPStore: one per stream of each rank, and one of reports.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from meshwright.program import ProgramBuilder
from meshwright.program.decided import read_answer
from meshwright.program.issuing import Filed, IssueBook
from meshwright.spec import DeadlockError, OptimizerStep, ProgramError, Receive, RunError, Send
from meshwright.spec.control import Controller, Decision, Ended, Event, Rang, Started
from meshwright.spec.decision_log import DecisionLog, make_log
from meshwright.spec.instructions import instruction_row

REPORTS = "reports"
# The streams of a rank; data that others send to it arrive in one more; abandoned handles and the end come in another.
STREAMS = ("compute", "send", "receive", "exchange")
ARRIVALS, CONTROL = "arrivals", "control"
FAILED = "failed"
_Key = tuple[int, str]
_MOST_NAMED = 4
_PS_PER_NS = 1000


def queue_of(rank: int, stream: str) -> str:
    """Return the name of the queue of a rank's stream."""
    return f"{rank}/{stream}"


def connect(store: TCPStore) -> TCPStore:
    """Return a client of the same store with a connection of its own: a client that waits blocks its other users."""
    return store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The decisions of a controlled run, and the controller's last state."""

    log: DecisionLog
    state: Any


class Decider:
    """Calls a controller on the events of ``num_ranks`` ranks until no instruction runs and no timer is left."""

    def __init__(self, controller: Controller[Any], num_ranks: int, store: TCPStore, timeout_s: float) -> None:
        self._controller, self._num_ranks, self._timeout_s = controller, num_ranks, timeout_s
        self._store = connect(store)
        self._store.set_timeout(timedelta(seconds=timeout_s))
        self._book = IssueBook(ProgramBuilder(num_ranks).build(schedule="controlled", plan_hash=""))
        self._state: Any = controller.initial
        self._decided: list[tuple[Event, int, Decision]] = []
        self._filed: list[Filed] = []
        self._queues: defaultdict[_Key, deque[Filed]] = defaultdict(deque)
        # Streams with instructions that wait for a handle, one entry per instruction; those dispatched are removed.
        self._waiting: defaultdict[int, list[_Key]] = defaultdict(list)
        self._running: dict[_Key, Filed] = {}
        # Handle -> its place among the ends.
        self._ended: dict[int, int] = {}
        self._abandoned: set[int] = set()
        # Sends whose data were used, and received ones that nothing has used yet, by rank.
        self._used: set[int] = set()
        self._unused: defaultdict[int, set[int]] = defaultdict(set)
        self._receives: dict[int, int] = {}
        self._timers: list[threading.Timer] = []
        self._num_timers = 0
        self._start_ns = time.perf_counter_ns()

    def run(self) -> Decided:
        """Decide until the end. Raises ProgramError, DeadlockError, or RunError if a rank fails or does not report."""
        end: str | None = FAILED
        try:
            self._decide(Started(next_handle=0))
            if not self._filed and not self._num_timers:
                raise ProgramError(
                    "The controller decided nothing at the start, after which nothing can happen. Expected a first "
                    "decision with instructions or timers."
                )
            while self._running or self._num_timers:
                self._take(self._next_report())
            if any(self._queues.values()):
                self._raise_deadlock()
            self._book.check_end()
            end = None
        finally:
            for timer in self._timers:
                timer.cancel()
            for rank in range(self._num_ranks):
                for stream in (*STREAMS, ARRIVALS):
                    self._push(rank, stream, None)
                self._push(rank, CONTROL, end)
        return Decided(log=make_log(self._num_ranks, 0, self._decided), state=self._state)

    def _now_ps(self) -> int:
        return (time.perf_counter_ns() - self._start_ns) * _PS_PER_NS

    def _next_report(self) -> dict[str, Any]:
        try:
            return json.loads(self._store.queue_pop(REPORTS))
        except dist.DistStoreError:
            rank, stream = next(iter(self._running), (-1, ""))
            running = "" if rank < 0 else f" The first that runs: {self._describe(self._running[rank, stream])}."
            raise RunError(
                f"No instruction of the controlled run has ended in {self._timeout_s:g} s.{running} A rank has died or "
                "is stuck; allow more time if it needs it."
            ) from None

    def _take(self, report: dict[str, Any]) -> None:
        """Follow a report of a rank or a timer."""
        if "error" in report:
            raise RunError(f"Rank {report['rank']} of the controlled run failed: {report['error']}")
        if "timer" in report:
            self._num_timers -= 1
            self._decide(Rang(next_handle=self._book.next_handle, number=report["timer"]))
            return
        filed = self._filed[report["handle"]]
        del self._running[_key(filed)]
        self._end(filed)

    def _end(self, filed: Filed) -> None:
        """Record an end, let the controller decide, and dispatch what waited for it."""
        self._ended[filed.handle] = len(self._ended)
        if isinstance(filed.issue.instruction, Receive) and (send := self._send_of(filed.handle)) not in self._used:
            self._unused[filed.issue.rank].add(send)
            self._receives[send] = filed.handle
        if filed.issue.watched:
            rank, instruction = filed.issue.rank, filed.issue.instruction
            event = Ended(next_handle=self._book.next_handle, handle=filed.handle, rank=rank, instruction=instruction)
            self._decide(event)
        for key in {_key(filed), *self._waiting[filed.handle]}:
            self._advance(key)

    def _decide(self, event: Event) -> None:
        now_ps = self._now_ps()
        self._state, decision = read_answer(self._controller.decide(self._state, event, now_ps))
        if decision.watch:
            raise ProgramError("A controlled run has no body to watch; leave `watch` out, and watch issues instead.")
        filed = self._book.file(decision, now_ps)
        self._decided.append((event, now_ps, decision))
        for item in filed:
            if item.issue.stream not in STREAMS:
                raise ProgramError(
                    f"{item.issue.instruction} was issued to the stream {item.issue.stream!r}; expected one of "
                    f"{', '.join(STREAMS)}, the streams that are run."
                )
            if isinstance(item.issue.instruction, Send) and (len(item.issue.group), *item.issue.group[:1]) != (
                2,
                item.issue.rank,
            ):
                raise ProgramError(
                    f"{item.issue.instruction} was issued to rank {item.issue.rank} with the group {item.issue.group}; "
                    "expected (rank of the sender, rank of the receiver)."
                )
            self._filed.append(item)
            self._queues[_key(item)].append(item)
            for handle in item.waits:
                self._waiting[handle].append(_key(item))
        for handle in decision.abandon:
            self._abandoned.add(handle)
            self._push(self._filed[handle].issue.rank, CONTROL, handle)
        for timer in decision.timers:
            self._set_timer((timer.at_ps - now_ps) / 1e12, timer.number)
        for key in dict.fromkeys(_key(item) for item in filed):
            self._advance(key)

    def _set_timer(self, seconds: float, number: int) -> None:
        store = connect(self._store)
        report = json.dumps({"timer": number})
        timer = threading.Timer(seconds, lambda: store.queue_push(REPORTS, report))
        timer.daemon = True
        timer.start()
        self._timers.append(timer)
        self._num_timers += 1

    def _advance(self, key: _Key) -> None:
        """Dispatch the next instruction of a stream if it may start; an abandoned one ends at once."""
        queue = self._queues[key]
        while queue and key not in self._running:
            filed = queue[0]
            ended = sorted((handle for handle in filed.waits if handle in self._ended), key=self._ended.__getitem__)
            need = len(filed.waits) if filed.issue.need is None else filed.issue.need
            if len(ended) < need:
                return
            queue.popleft()
            for handle in filed.waits:
                self._waiting[handle].remove(key)
            if filed.handle in self._abandoned:
                self._end(filed)
                continue
            self._running[key] = filed
            self._dispatch(filed, ended[:need])

    def _dispatch(self, filed: Filed, satisfied: list[int]) -> None:
        """Send an instruction to its rank, and to the receiver of its data."""
        issue, instruction = filed.issue, filed.issue.instruction
        sends = [self._send_of(handle) for handle in satisfied if self._moves(handle)]
        # A computation uses the data of the sends for which it waited, or of their receives.
        uses = [send for send in sends if self._filed[send].issue.group[1] == issue.rank]
        command: dict[str, Any] = {"handle": filed.handle, "row": instruction_row(instruction)}
        command |= {"group": issue.group, "sends": uses}
        if issue.stream == "compute":
            self._used.update(uses)
            self._unused[issue.rank] -= self._used
            dropped = {send for send in self._unused[issue.rank] if not self._is_awaited(send)}
            command["dropped"] = sorted(dropped) if isinstance(instruction, OptimizerStep) else []
            self._unused[issue.rank] -= set(command["dropped"])
        if isinstance(instruction, Send):
            self._push(issue.group[1], ARRIVALS, command)
        self._push(issue.rank, issue.stream, command)

    def _moves(self, handle: int) -> bool:
        return isinstance(self._filed[handle].issue.instruction, Send | Receive)

    def _send_of(self, handle: int) -> int:
        """Return the handle of the send of a message; `IssueBook` has added it to the waits of its receive."""
        sends = (handle, *self._filed[handle].waits)
        return next(send for send in sends if isinstance(self._filed[send].issue.instruction, Send))

    def _is_awaited(self, send: int) -> bool:
        """Whether an instruction that is not dispatched waits for a send, or for its receive."""
        return bool(self._waiting[send] or self._waiting[self._receives[send]])

    def _push(self, rank: int, stream: str, content: Any) -> None:
        self._store.queue_push(queue_of(rank, stream), json.dumps(content))

    def _raise_deadlock(self) -> NoReturn:
        heads = [queue[0] for queue in self._queues.values() if queue]
        lines = [
            f"{self._describe(filed)} waits for {', '.join(self._missing(filed))}" for filed in heads[:_MOST_NAMED]
        ]
        more = f"; and {len(heads) - _MOST_NAMED} more" if len(heads) > _MOST_NAMED else ""
        raise DeadlockError(
            f"The controlled run stands still: {'; '.join(lines)}{more}. No instruction runs and no timer is set. "
            "Correct the waits, or issue what they name."
        )

    def _missing(self, filed: Filed) -> list[str]:
        return [self._describe(self._filed[handle]) for handle in filed.waits if handle not in self._ended]

    def _describe(self, filed: Filed) -> str:
        return f"{filed.issue.instruction} of rank {filed.issue.rank} (handle {filed.handle})"


def _key(filed: Filed) -> _Key:
    return filed.issue.rank, filed.issue.stream
