"""The deciding rank of a controlled run: events in, decisions out.

One rank calls the controller, so that all ranks issue collectives in the same order. An instruction is dispatched to
its rank when the instruction before it in its stream has ended and its waits are satisfied; of a join, the first
``need`` that ended satisfy it. So ranks know nothing of waits. Events are delivered in the order in which ends were
reported. The other rules are those of the simulator (`meshwright.program.issuing`).

Messages go through queues of a TCPStore: one per stream of each rank, and one of reports.

The deciding rank sends beats, and each rank answers. A rank that misses more than `MISSED_BEATS` in a row is taken for
dead. What only it could end is lost (`spec.control`). Streams of other ranks that execute something lost may hang in
it; they go on in a new thread, which follows a new queue.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch._C._distributed_c10d import TCPStore

from meshwright.program import ProgramBuilder
from meshwright.program.decided import read_answer
from meshwright.program.issuing import RANK_STREAMS, Filed, IssueBook, check_for_ranks
from meshwright.runtime.controlled.queues import (
    ARRIVALS,
    CONTROL,
    ENDED,
    FAILED,
    FOREVER,
    LEAST_S,
    MISSED_BEATS,
    REPORTS,
    TAKEN_FOR_DEAD,
    Clock,
    connect,
    pop,
    queue_of,
)
from meshwright.spec import (
    AllReduce,
    DeadlockError,
    Instruction,
    ProgramError,
    Receive,
    RunError,
    Send,
    Stream,
    Timeline,
)
from meshwright.spec.control import Controller, Decision, Died, Ended, Event, Rang, Started
from meshwright.spec.decision_log import DecisionLog, make_log
from meshwright.spec.instructions import STREAM_NAMES, instruction_row

# Beats after which a lost connection is an error of its own, because no death explains it.
_UNEXPLAINED_BEATS = 2 * MISSED_BEATS
_Key = tuple[int, str]
_MOST_NAMED = 4
# Groups of sums whose connections stay open. A policy that forms groups in the run may use thousands, and each costs
# every member a thread and a connection to every other member.
MOST_OPEN = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decided:
    """The decisions of a controlled run, and the controller's last state.

    ``start_ps``: when each issued instruction was dispatched, by handle (one that was lost before: at the death);
    ``log.end_ps``: when its end was reported.
    """

    log: DecisionLog
    state: Any
    start_ps: NDArray[np.int64]

    def timeline(self) -> Timeline:
        """Return the measured timeline, in which all spans are of step 0."""
        issued, none = self.log.issued, np.zeros(0, np.int64)
        keys = self.log.rank.astype(np.int64) * len(STREAM_NAMES) + self.log.stream
        tracks, track = np.unique(keys, return_inverse=True)
        order = np.argsort(keys, kind="stable")
        names = ("opcode", "stage", "microbatch", "peer", "num_bytes")
        return Timeline(
            origin="measured",
            num_ranks=self.log.num_ranks,
            tracks=tuple(
                Stream(rank=rank, name=STREAM_NAMES[place])
                for rank, place in (divmod(key, len(STREAM_NAMES)) for key in tracks.tolist())
            ),
            track=track[order].astype(np.int32),
            **{name: getattr(issued, name)[order] for name in names},
            step=np.zeros(len(order), np.int32),
            start_ps=self.start_ps[order],
            end_ps=self.log.end_ps[order],
            memory_rank=none.astype(np.int32),
            memory_time_ps=none,
            memory_bytes=none,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Connections:
    """The connections of a group: the number in their store's prefix, and the streams that have made them."""

    number: int
    users: set[_Key] = field(default_factory=set)


class Decider:
    """Calls a controller on the events of ``num_ranks`` ranks until no instruction runs and no timer is left.

    ``rank`` is the deciding rank, ``death_after_s`` the time without a sign of life after which a rank is dead.
    ``survives_deaths``: whether deaths are events, or end the run.
    """

    def __init__(
        self,
        controller: Controller[Any],
        rank: int,
        num_ranks: int,
        store: TCPStore,
        timeout_s: float,
        death_after_s: float,
        on_end: Callable[[Instruction], None] | None = None,
        *,
        survives_deaths: bool = False,
    ) -> None:
        self._controller, self._rank, self._num_ranks, self._timeout_s = controller, rank, num_ranks, timeout_s
        self._on_end, self._survives_deaths = on_end, survives_deaths
        self._death_after_s = min(timeout_s, death_after_s)
        # When each instruction was dispatched, and when its end was reported, by handle.
        self._start_ps, self._end_ps = list[int](), list[int]()
        self._store, self._clock = connect(store), Clock(connect(store), num_ranks, self._death_after_s)
        self._book = IssueBook(ProgramBuilder(num_ranks).build(schedule="controlled", plan_hash=""))
        self._state: Any = None
        self._decided: list[tuple[Event, int, Decision]] = []
        self._filed: list[Filed] = []
        self._queues: defaultdict[_Key, deque[Filed]] = defaultdict(deque)
        # Streams with instructions that wait for a handle, one entry per instruction; those dispatched are removed.
        self._waiting: defaultdict[int, list[_Key]] = defaultdict(list)
        # What runs in each stream, the longest running first, and since when (of `time.monotonic`).
        self._running: dict[_Key, tuple[Filed, float]] = {}
        # Ended instructions to be followed, and handle -> place among the ends.
        self._done: deque[Filed] = deque()
        self._ended: dict[int, int] = {}
        self._abandoned: set[int] = set()
        # Handles of sends whose data were used or dropped, and of received ones that nothing has used, by rank.
        self._used: set[int] = set()
        self._dropped: set[int] = set()
        self._unused: defaultdict[int, set[int]] = defaultdict(set)
        self._receives: dict[int, int] = {}
        # Groups of sums, the least recently used first; how many sums of a group have not ended; groups to be closed.
        self._groups: dict[tuple[int, ...], _Connections] = {}
        self._sums = Counter[tuple[int, ...]]()
        self._closing: defaultdict[_Key, list[tuple[int, ...]]] = defaultdict(list)
        self._num_opened = 0
        self._num_timers = self._last_ps = 0
        # Beats that each other living rank has missed, once it has answered one; dead ranks; handles lost with them.
        self._missed: dict[int, int] = {}
        self._dead: set[int] = set()
        self._lost: set[int] = set()
        # Handles whose connection was lost: the rank that noticed, its error, and the beats since.
        self._broken: dict[int, tuple[int, str, int]] = {}
        # How often each stream got a new queue.
        self._num_reopened = Counter[_Key]()

    def run(self) -> Decided:
        """Decide until the end, and wait until the other ranks have heard of it.

        Raises ProgramError or DeadlockError for decisions, RunError if a rank fails, does not report, or is lost.
        """
        end = FAILED
        try:
            self._clock.start()
            self._state = self._controller.initial
            self._decide(Started(next_handle=0), 0)
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
            end = ENDED
            self._push_end(ENDED)
            self._wait_for_ranks()
        except dist.DistError as error:
            raise RunError(f"The store that connects the ranks was lost: {error}") from error
        finally:
            if end == FAILED:
                with contextlib.suppress(dist.DistError):
                    self._push_end(FAILED)
            self._clock.stop()
        return Decided(
            log=make_log(self._num_ranks, 0, self._decided, self._end_ps),
            state=self._state,
            start_ps=np.array(self._start_ps, np.int64),
        )

    def _push_end(self, end: str) -> None:
        """Tell all ranks how the run has ended."""
        for rank in range(self._num_ranks):
            for stream in (*RANK_STREAMS, ARRIVALS):
                self._push(rank, stream, None)
            self._push(rank, CONTROL, end)

    def _wait_for_ranks(self) -> None:
        """Wait until the living ranks have heard of the end. Raises RunError as `_bury`, and if one does not answer."""
        waiting = set(range(self._num_ranks)) - self._dead - {self._rank}
        self._store.set_timeout(timedelta(seconds=self._timeout_s))
        while waiting:
            try:
                report = pop(self._store, REPORTS)
            except dist.DistStoreError:
                raise RunError(
                    f"At the end of the controlled run ranks {sorted(waiting)} did not answer in {self._timeout_s:g} s."
                ) from None
            match report:
                case {"ended": rank}:
                    waiting.discard(rank)
                    self._missed.pop(rank, None)
                case {"alive": rank} if rank in self._missed:
                    self._missed[rank] = 0
                case {"beat": _}:
                    for rank in self._miss_beat():
                        self._check_survival(rank)
                        waiting.discard(rank)
                case _:  # of something that was lost
                    pass

    def _next_report(self) -> dict[str, Any]:
        """Wait for a report. Raises RunError if an instruction runs longer than the limit."""
        limit = FOREVER
        if self._running:
            filed, since = next(iter(self._running.values()))
            left_s = since + self._timeout_s - time.monotonic()
            if left_s <= 0:
                if filed.issue.rank not in {self._rank, *self._missed}:
                    raise RunError(f"Rank {filed.issue.rank} did not join the controlled run in {self._timeout_s:g} s.")
                raise RunError(
                    f"{self._describe(filed)} has not ended in {self._timeout_s:g} s. The rank, or one with which it "
                    "exchanges data, is stuck; give a longer timeout_s if it needs more time."
                )
            limit = timedelta(seconds=max(left_s, LEAST_S))
        self._store.set_timeout(limit)
        try:
            report: dict[str, Any] = pop(self._store, REPORTS)
        except dist.DistStoreError:  # the limit has passed
            return {}
        return report

    def _take(self, report: dict[str, Any]) -> None:
        """Follow a report of a rank or of the clock."""
        match report:
            case {"rank": rank, "broken": handle, "error": error}:
                if not self._dead.intersection(self._filed[handle].issue.group):
                    self._broken.setdefault(handle, (rank, error, 0))
            case {"rank": rank, "error": error}:
                raise RunError(f"Rank {rank} of the controlled run failed: {error}")
            case {"timer": number}:
                self._num_timers -= 1
                self._decide(Rang(next_handle=self._book.next_handle, number=number), self._moment_ps())
            case {"alive": rank}:
                if rank not in self._dead and rank != self._rank:
                    self._missed[rank] = 0
            case {"beat": _}:
                self._count_beat()
            case {"handle": handle} if handle not in self._lost:
                filed = self._filed[handle]
                del self._running[_key(filed)]
                self._done.append(filed)
        self._end_all()

    def _end_all(self) -> None:
        """Follow the instructions that have ended, and those that end with them."""
        while self._done:
            self._end(self._done.popleft())

    def _miss_beat(self) -> list[int]:
        """Count a beat that ranks have not answered yet; return the ranks that have missed too many.

        One beat is on its way at a time. So however late this rank or the store is, answers are between the beats.
        """
        for rank in self._missed:
            self._missed[rank] += 1
        self._clock.expect_beat()
        return [rank for rank, missed in self._missed.items() if missed > MISSED_BEATS]

    def _count_beat(self) -> None:
        """Follow the deaths of ranks, and refuse lost connections that no death has explained."""
        for handle, (rank, error, beats) in self._broken.items():
            self._broken[handle] = rank, error, beats + 1
            if beats >= _UNEXPLAINED_BEATS:
                raise RunError(
                    f"Rank {rank} of the controlled run failed in {self._describe(self._filed[handle])}: {error}"
                )
        for rank in self._miss_beat():
            self._bury(rank)
            self._end_all()

    def _check_survival(self, rank: int) -> None:
        """Raise RunError if the death of a rank ends the run."""
        if not self._survives_deaths:
            busy = [self._describe(filed) for (other, _), (filed, _) in self._running.items() if other == rank]
            raise RunError(
                f"Rank {rank} of the controlled run has died: it gave no sign of life for {self._death_after_s:g} s"
                f"{' in ' + ' and '.join(busy) if busy else ''}."
            )

    def _bury(self, rank: int) -> None:
        """Follow the death of a rank. Raises RunError as `_check_survival`."""
        self._check_survival(rank)
        now_ps = self._moment_ps()
        self._dead.add(rank)
        del self._missed[rank]
        self._clock.forget(rank)
        self._push(rank, CONTROL, TAKEN_FOR_DEAD)
        lost = [filed for filed in self._filed if self._is_lost_with(rank, filed)]
        self._lost.update(filed.handle for filed in lost)
        reopened = defaultdict[int, list[str]](list)
        for filed in lost:
            key = _key(filed)
            self._end_ps[filed.handle] = now_ps
            self._sums[filed.issue.group] -= isinstance(filed.issue.instruction, AllReduce)
            if self._running.get(key, (None, 0.0))[0] is filed:
                del self._running[key]
                if key[0] != rank:
                    self._push(*key, None)
                    self._num_reopened[key] += 1
                    reopened[key[0]].append(key[1])
            else:
                self._start_ps[filed.handle] = now_ps
                self._queues[key].remove(filed)
                for handle in filed.waits:
                    self._waiting[handle].remove(key)
        for handle in [handle for handle in self._broken if rank in self._filed[handle].issue.group]:
            del self._broken[handle]
        for other in set(range(self._num_ranks)) - self._dead:
            self._push(other, CONTROL, {"died": rank, "reopen": reopened[other]})
        self._book.lose(self._lost)
        self._decide(Died(next_handle=self._book.next_handle, rank=rank), now_ps)
        for key in list(self._queues):
            self._advance(key)

    def _is_lost_with(self, rank: int, filed: Filed) -> bool:
        """Return whether an instruction that has not ended never will, because a rank has died."""
        if filed.handle in self._ended or filed.handle in self._lost:
            return False
        if isinstance(filed.issue.instruction, Receive) and self._send_of(filed.handle) in self._ended:
            return filed.issue.rank == rank
        return rank in (filed.issue.rank, *filed.issue.group)

    def _end(self, filed: Filed) -> None:
        """Record an end, let the controller decide, and dispatch what waited for it."""
        self._ended[filed.handle] = len(self._ended)
        self._end_ps[filed.handle] = now_ps = self._moment_ps()
        if self._on_end is not None:
            self._on_end(filed.issue.instruction)
        self._sums[filed.issue.group] -= isinstance(filed.issue.instruction, AllReduce)
        if isinstance(filed.issue.instruction, Receive) and (send := self._send_of(filed.handle)) not in self._used:
            self._unused[filed.issue.rank].add(send)
            self._receives[send] = filed.handle
        if filed.issue.watched:
            rank, instruction = filed.issue.rank, filed.issue.instruction
            event = Ended(next_handle=self._book.next_handle, handle=filed.handle, rank=rank, instruction=instruction)
            self._decide(event, now_ps)
        for key in dict.fromkeys((_key(filed), *self._waiting[filed.handle])):
            self._advance(key)

    def _moment_ps(self) -> int:
        """Return the time, later than that of the event before, so that the order of events is that of their times."""
        self._last_ps = max(self._clock.now_ps(), self._last_ps + 1)
        return self._last_ps

    def _decide(self, event: Event, now_ps: int) -> None:
        self._state, decision = read_answer(self._controller.decide(self._state, event, now_ps))
        filed = self._book.file(decision, now_ps)
        self._decided.append((event, now_ps, decision))
        for item in filed:
            self._filed.append(item)
            self._start_ps.append(0)
            self._end_ps.append(0)
            self._check(item)
            self._sums[item.issue.group] += isinstance(item.issue.instruction, AllReduce)
            self._queues[_key(item)].append(item)
            for handle in item.waits:
                self._waiting[handle].append(_key(item))
        for handle in decision.abandon:
            self._abandoned.add(handle)
            self._push(self._filed[handle].issue.rank, CONTROL, handle)
        for timer in decision.timers:
            self._num_timers += 1
            self._clock.set(timer.at_ps, timer.number)
        for key in dict.fromkeys(_key(item) for item in filed):
            self._advance(key)

    def _check(self, filed: Filed) -> None:
        """Raise ProgramError for an issue that the simulator takes and real ranks cannot run."""
        check_for_ranks(filed.issue)
        if dead := self._dead.intersection((filed.issue.rank, *filed.issue.group)):
            raise ProgramError(
                f"{filed.issue.instruction} was issued to rank {filed.issue.rank} with the group {filed.issue.group}, "
                f"but rank {min(dead)} has died. Issue nothing that involves it after its `Died`."
            )
        if isinstance(filed.issue.instruction, Receive):
            group = self._filed[self._send_of(filed.handle)].issue.group
            if filed.issue.group != group:
                raise ProgramError(
                    f"{filed.issue.instruction} was issued with the group {filed.issue.group}; expected {group}, that "
                    "of its send."
                )

    def _advance(self, key: _Key) -> None:
        """Dispatch the next instruction of a stream if it may start; an abandoned one ends at once."""
        queue = self._queues[key]
        if not queue or key in self._running or any(_key(done) == key for done in self._done):
            return
        filed = queue[0]
        waits = [handle for handle in filed.waits if handle not in self._lost]
        ended = sorted((handle for handle in waits if handle in self._ended), key=self._ended.__getitem__)
        need = len(waits) if filed.issue.need is None else min(filed.issue.need, len(waits))
        if len(ended) < need:
            return
        queue.popleft()
        for handle in filed.waits:
            self._waiting[handle].remove(key)
        self._start_ps[filed.handle] = self._clock.now_ps()
        if filed.handle in self._abandoned:
            self._done.append(filed)
            return
        self._running[key] = filed, time.monotonic()
        self._dispatch(filed, ended[:need])

    def _dispatch(self, filed: Filed, satisfied: list[int]) -> None:
        """Send an instruction to its rank, and to the receiver of its data."""
        issue, instruction = filed.issue, filed.issue.instruction
        command: dict[str, Any] = {"handle": filed.handle, "row": instruction_row(instruction), "group": issue.group}
        if issue.stream == "compute":
            # A computation uses the data of sends to its rank for which it waited, or of their receives.
            sends = dict.fromkeys(self._send_of(handle) for handle in satisfied if self._moves(handle))
            uses = [send for send in sends if self._filed[send].issue.group[1] == issue.rank]
            if late := self._dropped.intersection(uses):
                raise ProgramError(
                    f"{self._describe(filed)} waits for data of {self._describe(self._filed[min(late)])}, which were "
                    "dropped: nothing waited for them when the rank computed next. Issue it before the rank computes."
                )
            command["sends"] = self._with_senders(send for send in uses if send not in self._used)
            command["lost"] = sum(self._carries_data(handle) for handle in self._lost.intersection(filed.waits))
            self._used.update(uses)
            self._unused[issue.rank] -= self._used
            dropped = {send for send in self._unused[issue.rank] if not self._is_awaited(send)}
            command["dropped"] = self._with_senders(sorted(dropped))
            self._unused[issue.rank] -= dropped
            self._dropped.update(dropped)
        if isinstance(instruction, Send):
            self._push(issue.group[1], ARRIVALS, command)
        if isinstance(instruction, AllReduce):
            command["opened"] = self._connect(issue.group, _key(filed))
            command["close"] = self._closing.pop(_key(filed), [])
        self._push(issue.rank, issue.stream, command)

    def _connect(self, group: tuple[int, ...], user: _Key) -> int:
        """Return the number under which a group's members connect.

        If more than `MOST_OPEN` groups are open, those that have been idle for longest are closed. A closed group gets
        a new number when it is used again. Its members close it with their next sum.
        """
        found = self._groups.pop(group, None)
        if found is None:
            self._num_opened += 1
            found = _Connections(number=self._num_opened)
        found.users.add(user)
        self._groups[group] = found
        idle = [other for other in self._groups if not self._sums[other]]
        for other in idle[: max(len(self._groups) - MOST_OPEN, 0)]:
            for each in self._groups.pop(other).users:
                self._closing[each].append(other)
        return found.number

    def _carries_data(self, handle: int) -> bool:
        return self._moves(handle) or isinstance(self._filed[handle].issue.instruction, AllReduce)

    def _moves(self, handle: int) -> bool:
        return isinstance(self._filed[handle].issue.instruction, Send | Receive)

    def _send_of(self, handle: int) -> int:
        """Return the handle of the send of a message; `IssueBook` has added it to the waits of its receive."""
        sends = (handle, *self._filed[handle].waits)
        return next(send for send in sends if isinstance(self._filed[send].issue.instruction, Send))

    def _with_senders(self, sends: Iterable[int]) -> list[tuple[int, int]]:
        """Return (handle, rank) of each send."""
        return [(send, self._filed[send].issue.rank) for send in sends]

    def _is_awaited(self, send: int) -> bool:
        """Return whether an instruction that is not dispatched waits for a received send, or for its receive."""
        return bool(self._waiting[send] or self._waiting[self._receives[send]])

    def _push(self, rank: int, stream: str, content: Any) -> None:
        name = queue_of(rank, stream, self._num_reopened[rank, stream])
        self._store.queue_push(name, json.dumps(content))

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
        settled = self._ended.keys() | self._lost
        return [self._describe(self._filed[handle]) for handle in filed.waits if handle not in settled]

    def _describe(self, filed: Filed) -> str:
        return f"{filed.issue.instruction} of rank {filed.issue.rank} (handle {filed.handle})"


def _key(filed: Filed) -> _Key:
    return filed.issue.rank, filed.issue.stream
