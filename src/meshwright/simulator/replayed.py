"""Replay the log of a run on real ranks in the simulator (`replay_measured`): each end at the time of the real one.

The simulator starts an instruction when the instruction before it in its stream has ended, its waits are satisfied and
it was issued; all of these times are in the log. So an instruction gets the duration from there to its real end, which
includes all delays of dispatching and reporting. A computation that was abandoned ended when its rank noticed. Ranks of
a collective report its end one after the other; in the simulation it ends with the first report.

A death is a timer of the simulation. Nothing waits for instructions that it lost. They end at its moment, or take no
time if their turn comes later.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.program import ProgramBuilder
from meshwright.program.issuing import Filed, IssueBook
from meshwright.simulator.controlled import ControlledRun, simulate_controlled
from meshwright.simulator.program_costs import bare_costs
from meshwright.spec import ProgramError
from meshwright.spec.control import (
    NOTHING,
    Controller,
    Decision,
    Died,
    Ended,
    Event,
    Rang,
    Started,
    Timer,
)
from meshwright.spec.decision_log import DecisionLog, check_decision


def replay_measured(controller: Controller[Any], log: DecisionLog) -> ControlledRun:
    """Let a controller decide on simulated events at the times of a real run; return the simulated run.

    ``log`` is that of `runtime.controlled.Decided`. Raises ProgramError if an event, its time or a decision differs
    from the log, and for the log of a simulated run.
    """
    program = ProgramBuilder(log.num_ranks).build(schedule="controlled", plan_hash="")
    duration_ps, class_of, unreceived = _durations(log)
    # Receives of lost sends take no time; they are behind the log's instructions.
    costs = bare_costs(program, np.append(duration_ps, 0))
    class_of += [len(duration_ps)] * len(unreceived.issues)
    following = _AsLogged(controller, log, unreceived)
    run = simulate_controlled(program, costs, following, lambda _, handle: (class_of[handle], -1))
    if run.state[0] < log.num_decisions:
        raise ProgramError(
            f"The simulation of the log ended after {run.state[0]} of {log.num_decisions} decisions. Give the log and "
            "the controller of one run."
        )
    return replace(run, state=run.state[1])


class _AsLogged:
    """A controller that is checked against a log; its state is (number of decisions, the controller's state).

    The last decision also issues ``last``.
    """

    def __init__(self, controller: Controller[Any], log: DecisionLog, last: Decision) -> None:
        self._controller, self._log, self._last, self._lost = controller, log, last, _lost(log)
        self.initial = (0, controller.initial)
        # Numbers of the timers that stand for deaths.
        self._deaths = dict(enumerate(log.deaths.items(), int(log.timer_number.max(initial=-1)) + 1))
        self._rung = defaultdict[int, deque[int]](deque)
        for event, now_ps, _ in log.decisions():
            if (number := getattr(event, "number", None)) is not None:
                self._rung[number].append(now_ps)

    def decide(self, state: tuple[int, Any], event: Event, now_ps: int) -> tuple[tuple[int, Any], Decision]:
        """Return what the controller decides, as it happened: timers ring late, abandoned computations end late."""
        index, own = state
        if isinstance(event, Ended) and event.handle in self._lost:
            return state, NOTHING
        if isinstance(event, Rang) and event.number in self._deaths:
            event = Died(next_handle=event.next_handle, rank=self._deaths[event.number][0])
        logged = None
        if index < self._log.num_decisions:
            logged = self._log.event(index), int(self._log.now_ps[index])
        if logged != (event, now_ps):
            raise ProgramError(
                f"Event {index} of the simulation is {event} at {now_ps} ps; the log has "
                f"{'no more events' if logged is None else f'{logged[0]} at {logged[1]} ps'}. Give the log of a "
                "run on real ranks as it was written."
            )
        own, decision = self._controller.decide(own, event, now_ps)
        check_decision(index, event, decision, self._log.decision(index))
        timers = tuple(
            Timer(
                at_ps=self._rung[timer.number].popleft() if self._rung[timer.number] else timer.at_ps,
                number=timer.number,
            )
            for timer in decision.timers
        )
        if isinstance(event, Started):
            timers += tuple(Timer(at_ps=at_ps, number=number) for number, (_, at_ps) in self._deaths.items())
        issues = _without(self._lost, decision).issues
        if index + 1 == self._log.num_decisions:
            issues += self._last.issues
        return (index + 1, own), replace(decision, issues=issues, timers=timers, abandon=())


def _lost(log: DecisionLog) -> set[int]:
    """Return the handles that were lost by deaths."""
    return set(np.flatnonzero(np.isin(log.end_ps, list(log.deaths.values()))).tolist())


def _without(lost: set[int], decision: Decision) -> Decision:
    """Return a decision whose issues do not wait for lost instructions, and need at most as many as are left."""
    issues = []
    for issue in decision.issues:
        rest = tuple(handle for handle in issue.waits if handle not in lost)
        need = issue.need if issue.need is not None and issue.need <= len(rest) else None
        issues.append(replace(issue, waits=rest, need=need))
    return replace(decision, issues=tuple(issues))


def _durations(log: DecisionLog) -> tuple[NDArray[np.int64], list[int], Decision]:
    """Return the durations of a run in ps, and the receives of sends that were lost before these were issued.

    The durations are by handle, with the handle whose duration an instruction takes: that of its collective's first.
    Raises ProgramError if the ends are not those of the log.
    """
    if len(log.end_ps) != log.issued.num_instructions or log.num_instructions:
        raise ProgramError(
            f"The log has ends of {len(log.end_ps)} of {log.issued.num_instructions} issued instructions, and "
            f"{log.num_instructions} instructions of a program's body; expected the log of a run on real ranks, with "
            "all ends and no body. Simulate other logs with `simulate_controlled`."
        )
    book = IssueBook(ProgramBuilder(log.num_ranks).build(schedule="controlled", plan_hash=""))
    filed, issued_ps, lost = list[Filed](), list[int](), _lost(log)
    for _, now_ps, decision in log.decisions():
        filed += book.file(_without(lost, decision), now_ps)
        issued_ps += [now_ps] * len(decision.issues)
    # When the simulation ends an instruction: all ranks of a collective end with the first.
    ends: list[int] = log.end_ps.tolist()
    members = defaultdict[int, list[int]](list)
    for item in filed:
        if item.collective >= 0:
            members[item.collective].append(item.handle)
    for handles in members.values():
        if watched := [handle for handle in handles if filed[handle].issue.watched]:
            raise ProgramError(
                f"The controller watches {filed[watched[0]].issue.instruction} on rank {filed[watched[0]].issue.rank}. "
                "Its ranks report its end at different times, which a simulation does not have, so the run cannot be "
                "replayed. Watch what follows the all-reduce instead."
            )
        first_ps = min(ends[handle] for handle in handles)
        for handle in handles:
            ends[handle] = first_ps
    start_ps = _starts(filed, issued_ps, ends, members.values(), lost)
    class_of = [item.handle for item in filed]
    for handles in members.values():
        for handle in handles:
            class_of[handle] = handles[0]
    duration_ps = np.array(ends, np.int64) - np.array(start_ps, np.int64)
    if (duration_ps < 0).any():
        place = int(duration_ps.argmin())
        raise ProgramError(
            f"{filed[place].issue.instruction} of rank {filed[place].issue.rank} ended before it could begin. Give the "
            "log of a run on real ranks as it was written."
        )
    return duration_ps, class_of, book.unreceived()


def _starts(
    filed: Sequence[Filed],
    issued_ps: Sequence[int],
    ends: list[int],
    collectives: Iterable[Sequence[int]],
    lost: set[int],
) -> list[int]:
    """Return when the simulation starts each instruction in ps, by handle, if they end at ``ends``.

    Ends of lost instructions that would start later are moved to their start.
    """
    free_ps, start_ps = defaultdict[int, int](int), list[int]()
    for item, from_ps in zip(filed, issued_ps, strict=True):
        waited = sorted(ends[handle] for handle in item.waits)
        need = len(waited) if item.issue.need is None else item.issue.need
        start_ps.append(max(from_ps, free_ps[item.stream], waited[need - 1] if need else 0))
        if item.handle in lost:
            ends[item.handle] = max(ends[item.handle], start_ps[-1])
        free_ps[item.stream] = ends[item.handle]
    for handles in collectives:
        latest_ps = max(start_ps[handle] for handle in handles)
        for handle in handles:
            start_ps[handle] = latest_ps
    late = [handle for handle in lost if ends[handle] < start_ps[handle]]
    for handle in late:
        ends[handle] = start_ps[handle]
    return _starts(filed, issued_ps, ends, collectives, lost) if late else start_ps
