"""Simulate a program that a controller extends: predict its Timeline and log the decisions.

The streams of the program run until an event occurs (`control`); the controller decides, and the instructions that it
issues are appended to the streams (`growing`). This repeats until no instruction is left. The timeline equals that of
the decided program (`meshwright.program.decided`), which can be simulated with the returned costs and without the
controller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from meshwright.program.decided import check_fit, read_answer, static_order, write_decided
from meshwright.program.issuing import PLACES, Filed, IssueBook
from meshwright.simulator.control import FIRST_TIMER
from meshwright.simulator.deadlock import describe, raise_deadlock
from meshwright.simulator.engine import Contention, check_contention
from meshwright.simulator.growing import GrowingNetwork, IssueCost
from meshwright.simulator.message_matching import rank_of_streams
from meshwright.simulator.network import Network
from meshwright.simulator.program_costs import ProgramCosts, SectionCosts, check_costs
from meshwright.simulator.simulate import MAX_UNROLLED, SimulatedRun, begin_receives, record_run
from meshwright.simulator.unroll import Unrolled, routes_of_collectives, unroll
from meshwright.spec import DeadlockError, Instruction, Program, ProgramError, Timeline, to_seconds
from meshwright.spec.control import Controller, Decision, Ended, Event, Issue, Rang, Started
from meshwright.spec.decision_log import DecisionLog, Replay, make_log
from meshwright.spec.instructions import STREAM_NAMES
from meshwright.spec.units import MOST_PICOSECONDS

# Cost of an issue: from the issue and its handle to its cost class and route (-1: none) in the costs.
EstimateIssue = Callable[[Issue, int], tuple[int, int]]
# Factor on the duration of an issue, such as jitter.
ScaleIssue = Callable[[Issue], float]
# Most instructions that a message names.
_MOST_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlledRun:
    """The result of `simulate_controlled`.

    ``state`` is the controller's last state; ``costs`` are those of the decided program (`program.decided`).
    ``peak_parts_bytes``: the parts of each rank's peak memory, shape (ranks, parts), as in `ProgramCosts.memory_parts`.
    """

    timeline: Timeline
    log: DecisionLog
    state: Any
    costs: ProgramCosts
    peak_parts_bytes: NDArray[np.int64]


def simulate_controlled(
    program: Program,
    costs: ProgramCosts,
    controller: Controller[Any] | DecisionLog,
    estimate_issue: EstimateIssue,
    *,
    scale_issue: ScaleIssue | None = None,
    contention: Contention = "queued",
) -> ControlledRun:
    """Simulate a program that a controller extends while it runs, or replay the log of such a run.

    The program must have only a body, which runs once; `ProgramBuilder(num_ranks).build(...)` makes an empty program.
    ``estimate_issue`` returns the cost class and the route of each issue, as indices into ``costs`` (route -1: no
    links); all members of a collective must get the same two. ``scale_issue``: the factor on the duration of each issue
    (default: 1); a collective takes that of the member issued first.

    Raises DeadlockError if the decided program can never finish; ProgramError if a decision breaks the rules of
    `spec.control`, if the costs do not match the program, or if an event or its time differs from the log.
    """
    check_contention(contention)
    check_costs(program, costs)
    if costs.host_ps.any():
        raise ProgramError(
            "`costs.host_ps` is above zero: processor time of transfers, which a controlled run does not support. Give "
            "costs whose `host_ps` is zero."
        )
    if costs.issue is not None:
        raise ProgramError(
            "The costs have asynchronous hosts, which a controlled run does not support, because decisions depend on "
            "how far ahead hosts are. Give `costs.with_hosts_ahead()`."
        )
    if isinstance(controller, DecisionLog):
        check_fit(program, controller)
        controller = Replay(log=controller)
    book = IssueBook(program)
    network = GrowingNetwork(_body_network(program, costs), costs.num_links, contention)
    issued = _IssuedCosts(costs, estimate_issue, scale_issue)
    decided, state = _decide_all(program, controller, book, issued, network)
    if isinstance(controller, Replay):
        controller.check_end(len(decided))
    if network.has_overflown:
        _refuse_length()
    if network.is_done:
        book.check_end()
    else:
        # The run may have stopped before receives were issued; add them, so that it can be examined as a program.
        missing = book.unreceived()
        decided.append((Rang(next_handle=book.next_handle, number=0), decided[-1][1], missing))
        issued.given += [(0, -1)] * len(missing.issues)
    log = make_log(program.num_ranks, program.body.num_instructions, decided)
    return _finish(program, costs, log, state, issued.given, network)


def _decide_all(
    program: Program, controller: Controller[Any], book: IssueBook, costs: _IssuedCosts, network: GrowingNetwork
) -> tuple[list[tuple[Event, int, Decision]], Any]:
    """Run from event to event. Return events, their times in ps, the decisions, and the last state."""
    state, now_ps = controller.initial, 0
    event: Event = Started(next_handle=book.next_handle)
    ranks = rank_of_streams(program)
    watched: dict[int, tuple[int, Instruction]] = {}
    timers: list[int] = []
    decided: list[tuple[Event, int, Decision]] = []
    while True:
        state, decision = read_answer(controller.decide(state, event, now_ps))
        decided.append((event, now_ps, decision))
        filed = book.file(decision, now_ps)
        if max(len(decided), book.next_handle) > MAX_UNROLLED:
            raise ProgramError(
                f"The controller was called {len(decided)} times, and there are {book.next_handle} instructions, "
                f"including the program's own; at most {MAX_UNROLLED} calls and instructions are simulated. Make the "
                "controller stop earlier."
            )
        for handle in decision.watch:
            stream = int(np.searchsorted(program.body.stream_offsets, handle, side="right")) - 1
            watched[handle] = int(ranks[stream]), program.body.instruction(handle)
        for item in filed:
            if item.issue.watched:
                watched[item.handle] = item.issue.rank, item.issue.instruction
        timers += [timer.number for timer in decision.timers]
        network.extend([costs.estimate(item) for item in filed], decision, now_ps)
        network.run()
        following = network.next_event()
        if following is None:
            return decided, state
        before_ps, (now_ps, number) = now_ps, following
        if now_ps < before_ps:
            _refuse_length()
        if number >= FIRST_TIMER:
            event = Rang(next_handle=book.next_handle, number=timers[number - FIRST_TIMER])
        else:
            rank, instruction = watched.pop(number)
            event = Ended(next_handle=book.next_handle, handle=number, rank=rank, instruction=instruction)


def _refuse_length() -> NoReturn:
    raise ProgramError(
        "The controlled run takes more than 2^63 - 1 ps, about 106 days, which the clock cannot count. Give shorter "
        "durations and earlier timers."
    )


class _IssuedCosts:
    """Requests the costs of issued instructions, checks and records them."""

    def __init__(self, costs: ProgramCosts, estimate_issue: EstimateIssue, scale_issue: ScaleIssue | None) -> None:
        self._durations, self._num_routes = costs.duration_ps.tolist(), len(costs.route_offsets) - 1
        self._estimate_issue, self._has_links = estimate_issue, _have_links(costs)
        self._scale_issue, self._scaled = scale_issue, dict[int, int]()
        self._collectives: dict[int, tuple[int, int]] = {}
        self.given: list[tuple[int, int]] = []

    def estimate(self, filed: Filed) -> IssueCost:
        """Return class and route. Raises ProgramError if the costs lack them, or members of a collective differ."""
        given: Any = self._estimate_issue(filed.issue, filed.handle)
        if not (isinstance(given, tuple) and len(given) == 2 and all(isinstance(part, int) for part in given)):
            raise ProgramError(
                f"The cost of {filed.issue.instruction} is {given!r}; expected two ints, a cost class and a route "
                "(-1: none)."
            )
        cost_class, route = given
        if not (0 <= cost_class < len(self._durations) and -1 <= route < self._num_routes):
            raise ProgramError(
                f"{filed.issue.instruction} got class {cost_class} and route {route}; the costs have classes 0 to "
                f"{len(self._durations) - 1}, and routes from -1 (none) to {self._num_routes - 1}."
            )
        if route >= 0 and self._durations[cost_class] < 1:
            raise ProgramError(
                f"{filed.issue.instruction} got class {cost_class} of 0 ps and route {route}; on a route it must take "
                "at least 1 ps. Give another class, or route -1 (no links)."
            )
        if filed.collective >= 0 and self._collectives.setdefault(filed.collective, given) != given:
            raise ProgramError(
                f"{filed.issue.instruction} got class {cost_class} and route {route}, but another member of the same "
                f"collective got (class, route) = {self._collectives[filed.collective]}; expected the same for all."
            )
        if filed.issue.abandonable and self._has_links[route]:
            raise ProgramError(
                f"{filed.issue.instruction} is abandonable and got route {route}; expected -1, because a transfer that "
                "holds links cannot be abandoned."
            )
        self.given.append(given)
        own_ps = None
        if self._scale_issue is not None and self._durations[cost_class]:
            own_ps = self._scale(filed, self._durations[cost_class], self._scale_issue)
        return IssueCost(
            filed=filed, cost_class=cost_class, route=route if self._has_links[route] else -1, own_ps=own_ps
        )

    def _scale(self, filed: Filed, usual_ps: int, scale_issue: ScaleIssue) -> int:
        if filed.collective in self._scaled:
            return self._scaled[filed.collective]
        # A link is held for at least 1 ps.
        own_ps = max(round(usual_ps * scale_issue(filed.issue)), 1)
        if own_ps > MOST_PICOSECONDS:
            raise ProgramError(
                f"{filed.issue.instruction} takes {to_seconds(own_ps):.3g} s, more than a simulation can hold "
                f"({to_seconds(MOST_PICOSECONDS):.0f} s). Give smaller factors."
            )
        if filed.collective >= 0:
            self._scaled[filed.collective] = own_ps
        return own_ps


def _have_links(costs: ProgramCosts) -> NDArray[np.bool_]:
    """Mark the routes that have links, with False appended for route -1; the engine treats others as no route."""
    return np.append(np.diff(costs.route_offsets) > 0, False)


def _body_network(program: Program, costs: ProgramCosts) -> Network:
    """The body as a network in which every rank has all streams, and the controller has one; routes as in the costs."""
    unrolled, num_routes = unroll(program, costs, 1), len(costs.route_offsets) - 1
    network, part = unrolled.network, unrolled.layout.made[1]
    keys = np.array([stream.rank * len(STREAM_NAMES) + PLACES[stream.name] for stream in program.streams], np.int64)
    counts = np.zeros(program.num_ranks * len(STREAM_NAMES) + 1, np.int64)
    counts[keys] = np.diff(network.stream_offsets)
    linked, collective_route = _have_links(costs), routes_of_collectives(part)
    resource = np.where(linked[part.costs.route], part.costs.route, -1).astype(np.int32)
    resource[part.matches.members] = num_routes + part.matches.numbers
    return network._replace(
        stream_offsets=np.concatenate([[0], np.cumsum(counts)]),
        resource=resource,
        route_offsets=costs.route_offsets.astype(np.int64),
        route_links=costs.route_links.astype(np.int32),
        collective_route=np.where(linked[collective_route], collective_route, -1).astype(collective_route.dtype),
        collective_owner=keys[network.collective_owner].astype(np.int32),
    )


def _finish(
    program: Program,
    costs: ProgramCosts,
    log: DecisionLog,
    state: Any,
    given: list[tuple[int, int]],
    network: GrowingNetwork,
) -> ControlledRun:
    """Return the result in the order of the decided program. Raises DeadlockError if the run did not finish."""
    order = static_order(program, log)
    made = write_decided(program, log, np.full(log.issued.num_instructions, -1))
    cost_class, route = np.array(given, np.int32).reshape(-1, 2).T
    costs, cost_class = _with_own(costs, cost_class, network.durations(), program.body.num_instructions)
    body = SectionCosts(
        cost_class=np.concatenate([costs.body.cost_class, cost_class])[order],
        route=np.concatenate([costs.body.route, route])[order],
        mark_offset_ps=costs.body.mark_offset_ps,
    )
    made_costs = ProgramCosts(
        **{name: getattr(costs, name) for name in ProgramCosts.__dataclass_fields__} | {"body": body}
    )
    unrolled = unroll(made, made_costs, 1)
    if not network.is_done:
        end_ps = np.full(len(order), -1)
        end_ps[: len(network.ends())] = network.ends()
        _raise_deadlock(made, unrolled, end_ps[order], np.isin(order, log.watched))
    start_ps, end_ps = network.starts()[order], network.ends()[order]
    begin_receives(unrolled, start_ps, end_ps)
    run = SimulatedRun(unrolled=unrolled, network=unrolled.network, start_ps=start_ps, end_ps=end_ps)
    timeline, memory = record_run(made, made_costs, run)
    return ControlledRun(
        timeline=timeline, log=log, state=state, costs=made_costs, peak_parts_bytes=memory.peak_parts_bytes
    )


def _with_own(
    costs: ProgramCosts, cost_class: NDArray[np.int32], took_ps: dict[int, int], num_body: int
) -> tuple[ProgramCosts, NDArray[np.int32]]:
    """Add a class of its own for each instruction with a duration of its own, by handle."""
    if not took_ps:
        return costs, cost_class
    rows = np.array(list(took_ps)) - num_body
    usual, own = cost_class[rows], cost_class.copy()
    own[rows] = len(costs.duration_ps) + np.arange(len(rows))
    return (
        replace(
            costs,
            duration_ps=np.append(costs.duration_ps, list(took_ps.values())),
            host_ps=np.append(costs.host_ps, costs.host_ps[usual]),
            exchanged_ps=None,
            allocate_bytes=np.concatenate([costs.allocate_bytes, costs.allocate_bytes[usual]]),
            free_bytes=np.concatenate([costs.free_bytes, costs.free_bytes[usual]]),
        ),
        own,
    )


def _raise_deadlock(
    program: Program, unrolled: Unrolled, end_ps: NDArray[np.int64], watched: NDArray[np.bool_]
) -> None:
    """Raise DeadlockError that names what the controller waits for, and the streams that wait for the controller."""
    offsets = unrolled.network.stream_offsets
    ended = np.bincount(unrolled.stream[end_ps >= 0], minlength=len(offsets) - 1)
    try:
        raise_deadlock(program, unrolled, end_ps, offsets[:-1] + ended)
    except DeadlockError as error:
        missing = np.flatnonzero(watched & (end_ps < 0)).tolist()
        if not missing:
            raise
        idle = [stream for stream, left in zip(program.streams, np.diff(offsets) - ended, strict=True) if not left]
        streams = [f"rank {stream.rank}, {stream.name}" for stream in idle]
        raise DeadlockError(
            f"{error} The controller waits for {_list([describe(program, unrolled, i) for i in missing])}"
            + (f", and these ended streams wait for the controller: {_list(streams)}." if idle else ".")
        ) from None


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return "; ".join(names[:_MOST_NAMED]) + more
