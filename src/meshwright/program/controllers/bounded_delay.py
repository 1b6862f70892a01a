"""Parameter servers with bounded delay: workers run independently, but not too far ahead of each other.

A worker's clock is the number of its applied gradients. The worker begins an iteration when its clock is at most S
(``max_delay``) ahead of the slowest worker's clock. It computes on the servers' current parameters and pushes the
gradient. Each of the k servers holds an equal part of all parameters and applies pushes of that part one by one as they
arrive. A gradient is applied when all servers have applied their parts. S = 0 is synchronous. If a worker dies, the
others no longer wait for it; without a server nothing goes on. Sources: Ho et al., "More Effective Distributed ML via a
Stale Synchronous Parallel Parameter Server" (2013); Li et al., "Scaling Distributed Machine Learning with the Parameter
Server" (2014), section 3.4.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from meshwright.program.controllers.iterations import SERVER, arrival, check_counts, iteration, with_dead
from meshwright.spec import OptimizerStep, Send
from meshwright.spec.control import NOTHING, Decision, Died, Ended, Event, Issue, Started

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """State of `BoundedDelay`.

    ``clocks``: applied gradients of each worker. ``waiting``: workers that are too far ahead. ``parts``: for each
    worker, the number of servers that have applied its latest gradient. ``pushed``: for each server, the workers whose
    pushes it has not yet applied, in order of arrival. ``applied``: for each server, the number of applied pushes.
    ``dead``: workers that died.
    """

    clocks: tuple[int, ...]
    waiting: tuple[int, ...] = ()
    parts: tuple[int, ...]
    pushed: tuple[tuple[int, ...], ...]
    applied: tuple[int, ...]
    dead: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedDelay:
    """Controller of parameter servers with bounded delay, for ``num_clocks`` iterations of each worker.

    Ranks 0 to ``num_workers`` - 1 compute, the following ``num_servers`` ranks are servers. ``max_delay``: iterations
    by which a worker may be ahead of the slowest one. ``num_bytes``: bytes of all parameters together. Raises
    ProgramError for a number outside its bounds.
    """

    num_workers: int
    max_delay: int
    num_clocks: int
    num_bytes: int = 0
    num_servers: int = 1
    survives_deaths: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_counts(
            num_workers=(1, self.num_workers, None),
            max_delay=(0, self.max_delay, None),
            num_clocks=(1, self.num_clocks, None),
            num_bytes=(0, self.num_bytes, None),
            num_servers=(1, self.num_servers, None),
        )

    @property
    def num_ranks(self) -> int:
        """Number of ranks: workers and servers."""
        return self.num_workers + self.num_servers

    @property
    def initial(self) -> Clocks:
        """The state before the first event: all clocks are 0."""
        nobody, nothing = (0,) * self.num_workers, (0,) * self.num_servers
        return Clocks(clocks=nobody, parts=nobody, pushed=((),) * self.num_servers, applied=nothing)

    def decide(self, state: Clocks, event: Event, now_ps: int) -> tuple[Clocks, Decision]:  # noqa: ARG002
        """Return the next state and the instructions to issue.

        Called after the start, when a part of a gradient has arrived at its server, when a server has applied it, and
        when a rank has died. Raises RunError if it was a server or the last worker.
        """
        match event:
            case Started():
                return self._begin(state, range(self.num_workers), event.next_handle)
            case Ended(instruction=Send() as send, rank=worker):
                place = send.peer - SERVER
                version = state.applied[place] + len(state.pushed[place])
                rank = self.num_workers + place
                received = arrival(rank, worker, send)
                applied = Issue(
                    rank=rank,
                    stream="compute",
                    instruction=OptimizerStep(stage=send.peer, version=version),
                    waits=(event.next_handle,),
                    watched=True,
                )
                pushed = _changed(state.pushed, place, (*state.pushed[place], worker))
                return replace(state, pushed=pushed), Decision(issues=(received, applied))
            case Ended(instruction=OptimizerStep(stage=stage)):
                return self._apply(state, stage - SERVER, event.next_handle)
            case Died(rank=worker):
                following = replace(state, dead=with_dead(state.dead, worker, self.num_workers))
                return self._begin(following, state.waiting, event.next_handle)
            case _:
                return state, NOTHING

    def _apply(self, state: Clocks, place: int, first: int) -> tuple[Clocks, Decision]:
        """Record that a server applied its first waiting part; after a gradient's last part, let workers continue."""
        worker, rest = state.pushed[place][0], state.pushed[place][1:]
        found = replace(
            state,
            pushed=_changed(state.pushed, place, rest),
            applied=_changed(state.applied, place, state.applied[place] + 1),
            parts=_changed(state.parts, worker, state.parts[worker] + 1),
        )
        if found.parts[worker] < self.num_servers:
            return found, NOTHING
        ready = replace(
            found,
            clocks=_changed(found.clocks, worker, found.clocks[worker] + 1),
            parts=_changed(found.parts, worker, 0),
        )
        return self._begin(ready, sorted((*state.waiting, worker)), first)

    def _begin(self, state: Clocks, workers: Iterable[int], first: int) -> tuple[Clocks, Decision]:
        """Start the workers that are not too far ahead and have iterations left; the others wait."""
        alive = [worker for worker in range(self.num_workers) if worker not in state.dead]
        slowest, version = min(state.clocks[worker] for worker in alive), sum(state.clocks)
        servers = range(self.num_workers, self.num_ranks)
        issues, waiting = list[Issue](), list[int]()
        for worker in (worker for worker in workers if worker not in state.dead):
            clock = state.clocks[worker]
            if clock - slowest > self.max_delay:
                waiting.append(worker)
            elif clock < self.num_clocks:
                issues += iteration(
                    servers,
                    worker,
                    clock * self.num_workers + worker,
                    version,
                    self.num_bytes,
                    first=first + len(issues),
                    pulls=clock > 0,
                )
        return replace(state, waiting=tuple(waiting)), Decision(issues=tuple(issues))


def _changed(items: tuple[T, ...], place: int, item: T) -> tuple[T, ...]:
    return (*items[:place], item, *items[place + 1 :])
