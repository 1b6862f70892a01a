"""Partial reduce: the first ready workers average their gradients and continue without waiting for the slowest.

A worker is ready when its backward has ended. The first P ready workers form a group: they sum their gradients, update,
and begin their next iteration. If fewer than P workers have iterations left, all of them form the group. One decision
is made for all members, so all ranks have their sums in the same order.

Workers of similar speed may meet only each other, so that their models drift apart. Groups connect their members. If
the workers are not all connected after ``bridge_after`` groups, the next group has to connect two parts: its ready
workers wait for one of another part. When all workers are connected, the count begins again. Not covered are weights of
gradients by staleness.

If a worker dies, the others form groups without it. A sum that it does not end is lost, and so are the gradients in it.
Source: Miao et al., "Heterogeneity-Aware Distributed Machine Learning Training via Partial Reduce" (SIGMOD 2021),
section 3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar

from meshwright.program.controllers.iterations import WORKER, check_counts, computation
from meshwright.spec import AllReduce, OptimizerStep
from meshwright.spec.control import NOTHING, Decision, Died, Ended, Event, Issue, Started


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """State of `PartialReduce`.

    ``left``: for each worker, the iterations whose gradients are not yet averaged. ``ready``: (worker, handle of its
    backward) of each worker that waits for a group, in order of readiness. ``part``: for each worker, the lowest worker
    with which the last ``num_groups`` groups connect it.
    """

    left: tuple[int, ...]
    part: tuple[int, ...]
    num_groups: int = 0
    ready: tuple[tuple[int, int], ...] = ()

    @property
    def is_connected(self) -> bool:
        """Whether the groups connect all workers that have iterations left."""
        return len({part for part, left in zip(self.part, self.left, strict=True) if left}) <= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialReduce:
    """Controller of partial reduce, for ``num_iterations`` iterations of each worker.

    Ranks 0 to ``num_workers`` - 1 compute; the first ``group_size`` ready workers form a group. ``bridge_after``: the
    number of groups after which parts of the workers are connected by force (see the module); None for never.
    ``num_bytes``: bytes of all gradients of a worker together. Raises ProgramError for a number outside its bounds.
    """

    num_workers: int
    group_size: int
    num_iterations: int
    num_bytes: int = 0
    bridge_after: int | None = None
    survives_deaths: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_counts(
            num_workers=(1, self.num_workers, None),
            group_size=(1, self.group_size, self.num_workers),
            num_iterations=(1, self.num_iterations, None),
            num_bytes=(0, self.num_bytes, None),
        )
        if self.bridge_after is not None:
            check_counts(bridge_after=(1, self.bridge_after, None))
            check_counts(group_size=(2, self.group_size, self.num_workers))  # a group of one connects nothing

    @property
    def num_ranks(self) -> int:
        """Number of ranks; every rank is a worker."""
        return self.num_workers

    @property
    def initial(self) -> Ready:
        """The state before any worker has begun."""
        return Ready(left=(self.num_iterations,) * self.num_workers, part=tuple(range(self.num_workers)))

    def decide(self, state: Ready, event: Event, now_ps: int) -> tuple[Ready, Decision]:  # noqa: ARG002
        """Return the next state and the instructions to issue after the start, a worker's backward or its death."""
        match event:
            case Started():
                every = [self._compute(state, worker) for worker in range(self.num_workers)]
                return state, Decision(issues=tuple(chain.from_iterable(every)))
            case Ended(rank=worker, handle=backward):
                return self._form(replace(state, ready=(*state.ready, (worker, backward))), event.next_handle)
            case Died(rank=worker):
                left = tuple(0 if other == worker else count for other, count in enumerate(state.left))
                ready = tuple(item for item in state.ready if item[0] != worker)
                return self._form(replace(state, left=left, ready=ready), event.next_handle)
            case _:
                return state, NOTHING

    def _form(self, state: Ready, first: int) -> tuple[Ready, Decision]:
        """Form the groups that are ready, and issue what they do."""
        issues = list[Issue]()
        while group := self._choose(state):
            state = _formed(state, group)
            issues += self._reduce(state, group, first + len(issues))
        return state, Decision(issues=tuple(issues)) if issues else NOTHING

    def _choose(self, state: Ready) -> dict[int, int]:
        """Return the next group, workers ascending with the handles of their backwards; empty if it has to wait."""
        size = min(self.group_size, sum(left > 0 for left in state.left))
        if not size or len(state.ready) < size:
            return {}
        group = state.ready[:size]
        is_due = self.bridge_after is not None and state.num_groups >= self.bridge_after and not state.is_connected
        if is_due and len({state.part[worker] for worker, _ in group}) == 1:
            own = state.part[group[0][0]]
            others = [item for item in state.ready[size:] if state.part[item[0]] != own]
            if not others:
                return {}
            group = (*group[:-1], others[0])
        return dict(sorted(group))

    def _reduce(self, state: Ready, backwards: dict[int, int], first: int) -> list[Issue]:
        """Return the sum, updates and next iterations of the members, each after its own sum."""
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
        return issues

    def _compute(self, state: Ready, worker: int) -> list[Issue]:
        """Return the next iteration of a worker; empty if none is left."""
        done = self.num_iterations - state.left[worker]
        if not state.left[worker]:
            return []
        return computation(worker, done * self.num_workers + worker, done, waits=(), watched=True)


def _formed(state: Ready, group: dict[int, int]) -> Ready:
    """Return the state after a group: its members have an iteration less, and are connected."""
    left = tuple(count - (worker in group) for worker, count in enumerate(state.left))
    parts = {state.part[worker] for worker in group}
    part = tuple(min(parts) if own in parts else own for own in state.part)
    ready = tuple(item for item in state.ready if item[0] not in group)
    found = Ready(left=left, part=part, num_groups=state.num_groups + 1, ready=ready)
    return replace(found, part=tuple(range(len(left))), num_groups=0) if found.is_connected else found
