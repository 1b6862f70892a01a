"""Synchronous training with backup workers: a version takes the first gradients; late workers continue or are stopped.

`BackupWorkers`: of n workers with b backups, the server updates version v when n - b gradients computed on v have
arrived: a k-of-n join. Workers whose gradient has arrived then get version v + 1. A late worker finishes its
computation, its gradient is dropped, and it continues with the next version that begins. So at least n - b workers
begin every version, unless workers die, and every applied gradient was computed on the version that it updates.
`StoppedBackups` stops late workers instead.

After deaths, an update takes the gradients of the workers that are left, if these are fewer than n - b. Without the
server nothing goes on. Source: Chen et al., "Revisiting Distributed Synchronous SGD" (2016), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from meshwright.program.controllers.iterations import (
    SERVER,
    arrival,
    check_counts,
    computation,
    iteration,
    pull,
    push,
    with_dead,
)
from meshwright.spec import Backward, OptimizerStep, Send
from meshwright.spec.control import NOTHING, Decision, Died, Ended, Event, Issue, Started


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """State of `BackupWorkers`: the current version of the weights and the gradients counted so far.

    ``num_arrived``: gradients of this version that arrived in time. ``waiting``: workers that wait for the next
    version. ``is_due``: this version has no workers yet, and begins with the first gradient that arrives. ``applied``
    and ``dropped``: gradients of all versions. ``dead``: workers that died.
    """

    version: int = 0
    num_arrived: int = 0
    waiting: tuple[int, ...] = ()
    is_due: bool = False
    applied: int = 0
    dropped: int = 0
    dead: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Backups:
    """Settings of synchronous training with backup workers, for ``num_versions`` updates of the weights.

    Ranks 0 to ``num_workers`` - 1 compute, rank ``num_workers`` is the server. An update takes the first
    ``num_workers`` - ``num_backups`` gradients. ``num_bytes``: bytes of all parameters together. Raises ProgramError
    for a number outside its bounds.
    """

    num_workers: int
    num_backups: int
    num_versions: int
    num_bytes: int = 0
    survives_deaths: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_counts(
            num_workers=(1, self.num_workers, None),
            num_backups=(0, self.num_backups, self.num_workers - 1),
            num_versions=(1, self.num_versions, None),
            num_bytes=(0, self.num_bytes, None),
        )

    @property
    def num_ranks(self) -> int:
        """Number of ranks: the workers and the server."""
        return self.num_workers + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupWorkers(Backups):
    """Backup workers that continue: late workers finish their computation, and its gradient is dropped."""

    initial: Versions = field(default=Versions())

    def decide(self, state: Versions, event: Event, now_ps: int) -> tuple[Versions, Decision]:  # noqa: ARG002
        """Return the next state and the instructions to issue.

        Called after the start, an arrived gradient, an update, and the death of a rank. Raises RunError if it was the
        server or the last worker.
        """
        match event:
            case Started():
                return state, self._begin(0, tuple(range(self.num_workers)), event.next_handle)
            case Ended(instruction=Send() as send, rank=worker):
                following, issue = self._arrive(state, worker, send)
                if not state.is_due:
                    return following, Decision(issues=(issue,))
                begun = replace(following, waiting=(), is_due=False)
                begin = self._begin(state.version, following.waiting, event.next_handle + 1)
                return begun, Decision(issues=(issue, *begin.issues))
            case Ended(instruction=OptimizerStep(version=version)) if version + 1 < self.num_versions:
                following = replace(state, version=version + 1, num_arrived=0, waiting=(), is_due=not state.waiting)
                begin = self._begin(version + 1, state.waiting, event.next_handle) if state.waiting else NOTHING
                return following, begin
            case Died(rank=worker):
                waiting = tuple(other for other in state.waiting if other != worker)
                return replace(state, waiting=waiting, dead=with_dead(state.dead, worker, self.num_workers)), NOTHING
            case _:
                return state, NOTHING

    def _arrive(self, state: Versions, worker: int, send: Send) -> tuple[Versions, Issue]:
        """Count a gradient that has arrived, and let the server receive it."""
        is_of_version = send.microbatch // self.num_workers == state.version
        in_time = is_of_version and state.num_arrived < self.num_workers - self.num_backups
        following = replace(
            state,
            num_arrived=state.num_arrived + in_time,
            waiting=(*state.waiting, worker),
            applied=state.applied + in_time,
            dropped=state.dropped + (not in_time),
        )
        return following, arrival(self.num_workers, worker, send)

    def _begin(self, version: int, workers: tuple[int, ...], first: int) -> Decision:
        """Issue the computations of workers on a version, and the server's join of the first gradients."""
        server, issues, pushes = self.num_workers, list[Issue](), list[int]()
        for worker in sorted(workers):
            microbatch = version * self.num_workers + worker
            issues += iteration(
                (server,),
                worker,
                microbatch,
                version,
                self.num_bytes,
                first=first + len(issues),
                pulls=version > 0,
            )
            pushes.append(first + len(issues) - 1)
        update = OptimizerStep(stage=SERVER, version=version)
        need = min(self.num_workers - self.num_backups, len(pushes))
        issues.append(
            Issue(rank=server, stream="compute", instruction=update, waits=tuple(pushes), need=need, watched=True)
        )
        return Decision(issues=tuple(issues))


# At the end of an update the late workers abandon their computations, and all n begin the next version. A gradient in
# flight at that moment still arrives and is dropped. So a version takes the (n - b)-th smallest of n times, while
# `BackupWorkers` lets late workers finish their computation and begin with the version after next.
@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """State of `StoppedBackups`: the current version of the weights and the gradients counted so far.

    ``received``: (worker, handle of the receive) of this version's gradients. ``computing``: (worker, handle of its
    forward, handle of its backward) of each worker that computes. Over all versions, ``applied`` gradients came in
    time, ``dropped`` ones came too late, and ``abandoned`` ones were never finished. ``dead``: workers that died.
    """

    version: int = 0
    received: tuple[tuple[int, int], ...] = ()
    computing: tuple[tuple[int, int, int], ...] = ()
    applied: int = 0
    dropped: int = 0
    abandoned: int = 0
    dead: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedBackups(Backups):
    """Backup workers that are stopped: late workers abandon their computation and begin the next version."""

    initial: Race = field(default=Race())

    def decide(self, state: Race, event: Event, now_ps: int) -> tuple[Race, Decision]:  # noqa: ARG002
        """Return the next state and the instructions to issue or abandon.

        Called after a start, a backward, an arrived gradient, an update, and the death of a rank. Raises RunError if it
        was the server or the last worker.
        """
        match event:
            case Started():
                return self._begin(state, event.next_handle)
            case Ended(instruction=Backward() as backward, rank=worker):
                if backward.version < state.version:
                    return state, NOTHING
                computing = tuple(item for item in state.computing if item[0] != worker)
                sent = push(self.num_workers, 0, worker, backward.microbatch, self.num_bytes, backward=event.handle)
                return replace(state, computing=computing), Decision(issues=(sent,))
            case Ended(instruction=Send() as send, rank=worker):
                return self._arrive(state, worker, send, event.next_handle)
            case Ended(instruction=OptimizerStep()):
                following = replace(state, version=state.version + 1, received=())
                return self._begin(following, event.next_handle)
            case Died(rank=worker):
                computing = tuple(item for item in state.computing if item[0] != worker)
                dead = with_dead(state.dead, worker, self.num_workers)
                following = replace(state, computing=computing, dead=dead)
                is_due = len(state.received) < self._need(state) and len(state.received) >= self._need(following)
                return following, Decision(issues=(self._update(following),)) if is_due else NOTHING
            case _:
                return state, NOTHING

    def _need(self, state: Race) -> int:
        """Return the number of gradients that the update of the state's version takes."""
        gone = len(set(state.dead) - {worker for worker, _ in state.received})
        return min(self.num_workers - self.num_backups, self.num_workers - gone)

    def _arrive(self, state: Race, worker: int, send: Send, first: int) -> tuple[Race, Decision]:
        """Receive a gradient at the server, and issue the update when it has enough."""
        need, received = self._need(state), arrival(self.num_workers, worker, send)
        if send.microbatch // self.num_workers < state.version or len(state.received) >= need:
            return replace(state, dropped=state.dropped + 1), Decision(issues=(received,))
        taken = replace(state, received=(*state.received, (worker, first)), applied=state.applied + 1)
        issues = (received,) if len(taken.received) < need else (received, self._update(taken))
        return taken, Decision(issues=issues)

    def _update(self, state: Race) -> Issue:
        update = OptimizerStep(stage=SERVER, version=state.version)
        waits = tuple(handle for _, handle in state.received)
        return Issue(rank=self.num_workers, stream="compute", instruction=update, waits=waits, watched=True)

    def _begin(self, state: Race, first: int) -> tuple[Race, Decision]:
        """Stop workers that still compute, and start all workers on the state's version, if it is to be made."""
        abandon = tuple(handle for _, *handles in state.computing for handle in handles)
        issues, computing = list[Issue](), list[tuple[int, int, int]]()
        alive = [worker for worker in range(self.num_workers) if worker not in state.dead]
        for worker in alive if state.version < self.num_versions else ():
            microbatch = state.version * self.num_workers + worker
            waits: tuple[int, ...] = ()
            if state.version:
                issues += pull(self.num_workers, 0, worker, microbatch, self.num_bytes)
                waits = (first + len(issues) - 1,)
            forward = first + len(issues)
            issues += computation(worker, microbatch, state.version, waits=waits, watched=True, abandonable=True)
            computing.append((worker, forward, forward + 1))
        following = replace(state, computing=tuple(computing), abandoned=state.abandoned + len(state.computing))
        return following, Decision(issues=tuple(issues), abandon=abandon)
