"""A parameter server with bounded delay: workers go on without each other, but not too far.

A worker's clock is the number of its gradients that the server has applied. It begins an iteration when its clock is at
most S ahead of the slowest, computes on the version that the server has then, and pushes the gradient; the server
applies pushes one by one as they arrive. S = 0 is synchronous, and without a bound nobody waits. Sources: Ho et al.,
"More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server" (2013); Li et al., "Scaling
Distributed Machine Learning with the Parameter Server" (2014), section 3.4.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from meshwright.program.controllers.iterations import SERVER, arrival, check_counts, iteration
from meshwright.spec.control import NOTHING, Decision, Ended, Event, Issue, Started
from meshwright.spec.instructions import OptimizerStep, Send


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """The clock of each worker, who waits for the slowest, and whose pushes the server has, in order of arrival."""

    clocks: tuple[int, ...]
    waiting: tuple[int, ...] = ()
    pushed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedDelay:
    """Ranks 0 to ``num_workers`` - 1 compute, the last is the server; ``num_bytes`` are those of all parameters."""

    num_workers: int
    max_delay: int
    num_clocks: int
    num_bytes: int = 0

    def __post_init__(self) -> None:
        check_counts(
            num_workers=(1, self.num_workers, None),
            max_delay=(0, self.max_delay, None),
            num_clocks=(1, self.num_clocks, None),
            num_bytes=(0, self.num_bytes, None),
        )

    @property
    def num_ranks(self) -> int:
        """The workers and the server."""
        return self.num_workers + 1

    @property
    def initial(self) -> Clocks:
        """Nobody has computed anything."""
        return Clocks(clocks=(0,) * self.num_workers)

    def decide(self, state: Clocks, event: Event, now_ps: int) -> tuple[Clocks, Decision]:  # noqa: ARG002
        """A gradient has arrived, or was applied."""
        match event:
            case Started():
                return self._begin(state, range(self.num_workers), event.next_handle)
            case Ended(instruction=Send() as send, rank=worker):
                version = sum(state.clocks) + len(state.pushed)
                update = OptimizerStep(stage=SERVER, version=version)
                received = arrival(self.num_workers, worker, send)
                applied = Issue(
                    rank=self.num_workers,
                    stream="compute",
                    instruction=update,
                    waits=(event.next_handle,),
                    watched=True,
                )
                pushed = (*state.pushed, worker)
                return replace(state, pushed=pushed), Decision(issues=(received, applied))
            case Ended(instruction=OptimizerStep()):
                worker, pushed = state.pushed[0], state.pushed[1:]
                clocks = tuple(clock + (other == worker) for other, clock in enumerate(state.clocks))
                ready = replace(state, clocks=clocks, pushed=pushed)
                return self._begin(ready, sorted((*state.waiting, worker)), event.next_handle)
            case _:
                return state, NOTHING

    def _begin(self, state: Clocks, workers: Iterable[int], first: int) -> tuple[Clocks, Decision]:
        """Let those begin that are not too far ahead, if they have not done all; the others wait."""
        slowest, version = min(state.clocks), sum(state.clocks)
        issues, waiting = list[Issue](), list[int]()
        for worker in workers:
            clock = state.clocks[worker]
            if clock - slowest > self.max_delay:
                waiting.append(worker)
            elif clock < self.num_clocks:
                issues += iteration(
                    self.num_workers,
                    worker,
                    clock * self.num_workers + worker,
                    version,
                    self.num_bytes,
                    first=first + len(issues),
                    pulls=clock > 0,
                )
        return replace(state, waiting=tuple(waiting)), Decision(issues=tuple(issues))
