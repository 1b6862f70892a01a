"""Partial reduce: the first ready workers average their gradients and continue without waiting for the slowest.

A worker is ready when its backward has ended. The first P ready workers form a group: they sum their gradients, update,
and begin their next iteration. If fewer than P workers have iterations left, all of them form the group. One decision
is made for all members, so all ranks have their sums in the same order. Two parts of the method are not covered:
weights of gradients by staleness, and groups that connect workers which would otherwise never meet. Source: Miao et
al., "Heterogeneity-Aware Distributed Machine Learning Training via Partial Reduce" (SIGMOD 2021), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

from meshwright.program.controllers.iterations import WORKER, check_counts, computation
from meshwright.spec import AllReduce, OptimizerStep
from meshwright.spec.control import NOTHING, Decision, Ended, Event, Issue, Started


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """State of `PartialReduce`.

    ``left``: for each worker, the iterations whose gradients are not yet averaged. ``ready``: (worker, handle of its
    backward) of each worker that waits for a group, in order of readiness.
    """

    left: tuple[int, ...]
    ready: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialReduce:
    """Controller of partial reduce, for ``num_iterations`` iterations of each worker.

    Ranks 0 to ``num_workers`` - 1 compute; the first ``group_size`` ready workers form a group. ``num_bytes``: bytes
    of all gradients of a worker together. Raises ProgramError for a number outside its bounds.
    """

    num_workers: int
    group_size: int
    num_iterations: int
    num_bytes: int = 0

    def __post_init__(self) -> None:
        check_counts(
            num_workers=(1, self.num_workers, None),
            group_size=(1, self.group_size, self.num_workers),
            num_iterations=(1, self.num_iterations, None),
            num_bytes=(0, self.num_bytes, None),
        )

    @property
    def num_ranks(self) -> int:
        """Number of ranks; every rank is a worker."""
        return self.num_workers

    @property
    def initial(self) -> Ready:
        """The state before any worker has begun."""
        return Ready(left=(self.num_iterations,) * self.num_workers)

    def decide(self, state: Ready, event: Event, now_ps: int) -> tuple[Ready, Decision]:  # noqa: ARG002
        """Return the next state and the instructions to issue after the start or after a worker's backward."""
        match event:
            case Started():
                every = [self._compute(state, worker) for worker in range(self.num_workers)]
                return state, Decision(issues=tuple(chain.from_iterable(every)))
            case Ended(rank=worker, handle=backward):
                ready = (*state.ready, (worker, backward))
                if len(ready) < min(self.group_size, sum(left > 0 for left in state.left)):
                    return replace(state, ready=ready), NOTHING
                members = {member for member, _ in ready}
                left = tuple(count - (worker in members) for worker, count in enumerate(state.left))
                following = Ready(left=left)
                return following, self._reduce(following, dict(sorted(ready)), event.next_handle)
            case _:
                return state, NOTHING

    def _reduce(self, state: Ready, backwards: dict[int, int], first: int) -> Decision:
        """Issue the sum, updates and next iterations of the members, each after its own sum."""
        reduction = AllReduce(stage=WORKER, bucket=0, num_bytes=self.num_bytes)
        group = tuple(backwards)
        issues = [
            Issue(rank=worker, stream="exchange", instruction=reduction, group=group, waits=(backward,))
            for worker, backward in backwards.items()
        ]
        for place, worker in enumerate(group):
            done = self.num_iterations - state.left[worker]
            update = OptimizerStep(stage=WORKER, version=done - 1)
            issues.append(Issue(rank=worker, stream="compute", instruction=update, waits=(first + place,)))
            issues += self._compute(state, worker)
        return Decision(issues=tuple(issues))

    def _compute(self, state: Ready, worker: int) -> list[Issue]:
        """Return the next iteration of a worker; empty if none is left."""
        done = self.num_iterations - state.left[worker]
        if not state.left[worker]:
            return []
        return computation(worker, done * self.num_workers + worker, done, waits=(), watched=True)
