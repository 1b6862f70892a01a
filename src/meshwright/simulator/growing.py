"""A network that a controller extends: instructions are appended to its streams between runs of the engine.

Instruction ids are handles (`spec.control`); under ``fair`` contention, ids of marks lie between those of the body and
those of issued instructions. Every column has spare entries, and is copied into a column of twice the length when it is
full. All routes count as shared, because later issues may use any of them; this changes no time. The last stream
belongs to the controller and is always empty: it runs whenever the loop continues, so that links are granted even if
no instruction was issued.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import le
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshwright.program.issuing import Filed
from meshwright.simulator.control import EVENTS, FIRST_TIMER, NO_MORE, RUNNABLE, Control, add_event
from meshwright.simulator.engine import Contention, run_streams
from meshwright.simulator.fair import Sharing, prepare_sharing
from meshwright.simulator.joins import Joins, make_joins
from meshwright.simulator.network import Network, fresh_state
from meshwright.simulator.sharing import GRANTED, Column, Times, make_flows, pop
from meshwright.spec.control import Decision

Number = TypeVar("Number", bound=np.generic)
# A named tuple of array columns.
Columns = TypeVar("Columns", bound=Any)


@dataclass(frozen=True, slots=True, kw_only=True)
class IssueCost:
    """An instruction that a controller issued, after its checks (`Filed`), with its cost.

    ``cost_class`` and ``route`` are indices into the costs of the run (`ProgramCosts`); route -1: it uses no links.
    ``own_ps``: its duration if that is not its class's.
    """

    filed: Filed
    cost_class: int
    route: int
    own_ps: int | None = None


class _Sizes(NamedTuple):
    """Number of entries used or reserved of each kind; ``need`` is the most waits that a join needs."""

    instructions: int
    waits: int
    slots: int
    events: int
    collectives: int
    need: int


class GrowingNetwork:
    """A network whose streams run until the next event, when they can be extended.

    The last stream of ``network`` must be the controller's, which is empty.
    """

    def __init__(self, network: Network, num_links: int, contention: Contention) -> None:
        num_body, num_waits = len(network.cost_class), len(network.waits)
        num_marks, num_streams = len(network.mark_instruction), len(network.stream_offsets) - 1
        # Waits without a waiter for every mark: under `fair` marks get numbers by which issued instructions await them.
        every_mark = ~np.arange(num_marks, dtype=np.int32)
        network = network._replace(waits=np.concatenate([network.waits, every_mark]), num_private=0)
        self._joins = make_joins(network)
        self._sharing: Sharing | None = None
        if contention == "fair":
            network, self._sharing = _share_all(network, num_links)
        self._mark_waits = network.waits[num_waits:].tolist()
        self._num_body = num_body
        self._first_issued = self._count = num_body + (len(self._sharing.mark_left) if self._sharing else 0)
        self._num_waits, self._num_timers = num_waits, 0
        self._stream_of: dict[int, int] = {}
        # Instructions whose class is theirs alone: scaled and abandoned ones.
        self._own: set[int] = set()
        self._num_classes = len(network.class_ps)
        self._num_body_collectives = self._num_collectives = len(network.collective_size)
        slots, events = len(self._joins.slot_after), 0
        self._used = _Sizes(self._count, num_waits, slots, events, self._num_collectives, 0)
        self._room = _Sizes(0, 0, 0, 0, 0, 0)
        last, is_empty = network.stream_offsets[1:] - 1, np.diff(network.stream_offsets) == 0
        after = np.arange(1, num_body + 1)
        after[last[~is_empty]] = NO_MORE
        self._last = np.where(is_empty, -1, last).tolist()
        state = fresh_state(network, num_links, self._count - num_body)
        state.position[is_empty] = NO_MORE
        # A stream has one request or open join; joins may be there several times, with times that have changed since.
        heap_time, heap_stream = np.empty((2, 2 * num_streams), np.int64)
        self._state = state._replace(heap_time=heap_time, heap_stream=heap_stream)
        self._network = network._replace(stream_offsets=np.full(num_streams + 1, NO_MORE))
        self._control = Control(
            after=after,
            release_ps=np.zeros(num_body, np.int64),
            watched=np.zeros(num_body, np.bool_),
            is_open=np.zeros(num_body, np.bool_),
            event_ps=np.empty(1, np.int64),
            event_number=np.empty(1, np.int64),
            counts=np.zeros(3, np.int64),
        )
        self._reserve(self._used)
        self._network.wait_offsets[num_body : self._count + 1] = num_waits
        self._runnable = np.flatnonzero(~is_empty)[::-1].tolist()

    def extend(self, estimated: Sequence[IssueCost], decision: Decision, now_ps: int) -> None:
        """Carry out a decision made at ``now_ps``: watch and abandon instructions, set timers, append issues.

        ``estimated``: the issues of the decision with their costs.
        """
        if decision.watch or decision.timers or decision.abandon:
            more = len(decision.watch) + len(decision.timers) + len(decision.abandon)
            self._reserve(self._used._replace(events=self._used.events + more))
            self._control.watched[list(decision.watch)] = True
        for handle in decision.abandon:
            self._abandon(self._awaited(handle), now_ps)
        for timer in decision.timers:
            add_event(self._control, timer.at_ps, FIRST_TIMER + self._num_timers)
            self._num_timers += 1
        if estimated:
            self._issue(estimated, now_ps)

    def run(self) -> None:
        """Continue until the next event, or until every stream has ended or stopped."""
        controllers_own = len(self._last) - 1
        runnable = [controllers_own, *self._runnable]
        self._state.stack[: len(runnable)] = runnable
        self._control.counts[RUNNABLE] = len(runnable)
        self._runnable = []
        run_streams(self._network, self._state, self._sharing, self._joins, self._control, None)

    def next_event(self) -> tuple[int, int] | None:
        """Remove and return the next event for the controller; None if there is no event left.

        An event is (time in ps, number): the handle of the instruction that ended, or ``FIRST_TIMER`` + k for timer k.
        Ends that the controller does not watch are skipped; their streams continue.
        """
        control, state = self._control, self._state
        while control.counts[EVENTS]:
            time, number = int(control.event_ps[0]), int(control.event_number[0])
            control.counts[EVENTS] = pop(control.event_ps, control.event_number, int(control.counts[EVENTS]))
            if number >= 0:
                return time, number if number >= FIRST_TIMER else self._handle(number)
            stream = number + len(state.position)
            if self._is_computing(stream) and state.ready_ps[stream] == time:
                self._runnable.append(stream)
            # An end that was brought forward has stopped the loop, too.
            self.run()
        return None

    def durations(self) -> dict[int, int]:
        """Return the durations in ps of instructions that do not take that of their class, by handle."""
        class_ps, cost_class = self._network.class_ps, self._network.cost_class
        return {self._handle(i): int(class_ps[cost_class[i]]) for i in self._own}

    def ends(self) -> Times:
        """Return when each instruction ended in ps, by handle; negative if it never ended."""
        return self._by_handle(self._state.end_ps)

    def cost_classes(self) -> Column:
        """Return the cost class of each instruction, by handle."""
        return self._by_handle(self._network.cost_class)

    def starts(self) -> Times:
        """Return when each instruction began in ps, by handle; meaningless if it never ended."""
        start_ps: Times = self.ends() - self._network.class_ps[self.cost_classes()]
        if self._sharing is None:
            return start_ps
        shared_ps = self._by_handle(self._sharing.start_ps)
        return np.where(shared_ps >= 0, shared_ps, start_ps)

    @property
    def is_done(self) -> bool:
        """Whether every stream has reached its end."""
        return bool((self._state.position == NO_MORE).all())

    @property
    def has_overflown(self) -> bool:
        """Whether a time exceeded 64 bits, or stopped streams may have waited for such a time.

        While streams are unfinished, overflows cannot be seen in the ends, where negative numbers also encode waiting
        streams. Then the sum of all durations is compared with the limit.
        """
        if self.is_done:
            return bool((self.ends() < 0).any())
        whole_ps = sum(self._network.class_ps[self.cost_classes()].tolist())
        return bool(whole_ps + int(self._control.release_ps.max(initial=0)) > NO_MORE)

    def _handle(self, number: int) -> int:
        return number if number < self._num_body else number - self._first_issued + self._num_body

    def _by_handle(self, column: NDArray[Number]) -> NDArray[Number]:
        return np.concatenate([column[: self._num_body], column[self._first_issued : self._count]])

    def _awaited(self, handle: int) -> int:
        if handle < 0:
            return int(self._mark_waits[-1 - handle])
        return handle if handle < self._num_body else handle - self._num_body + self._first_issued

    def _is_computing(self, stream: int) -> bool:
        """Whether a stream has stopped at a computation whose end may be brought forward."""
        i, state = int(self._state.position[stream]), self._state
        return i != NO_MORE and bool(self._control.is_open[i]) and state.cursor[stream] == GRANTED

    def _abandon(self, i: int, now_ps: int) -> None:
        """End a computation now, or let it take no time when its turn comes."""
        state, network, stream = self._state, self._network, self._stream_of[i]
        if state.end_ps[i] >= 0:
            return
        took_ps = 0
        if state.position[stream] == i and self._is_computing(stream):
            end_ps = int(state.ready_ps[stream])
            begin_ps = end_ps - int(network.class_ps[network.cost_class[i]])
            if (earlier_ps := max(now_ps, begin_ps)) == end_ps:
                return
            took_ps = earlier_ps - begin_ps
            state.ready_ps[stream] = earlier_ps
            add_event(self._control, earlier_ps, stream - len(state.position))
        self._give_class(i, took_ps)

    def _give_class(self, i: int, own_ps: int) -> None:
        self._num_classes += 1
        if self._num_classes > len(self._network.class_ps):
            self._network = _longer(self._network, 2 * self._num_classes, "class_ps")
        self._network.class_ps[self._num_classes - 1] = own_ps
        self._network.cost_class[i] = self._num_classes - 1
        self._own.add(i)

    def _issue(self, estimated: Sequence[IssueCost], release_ps: int) -> None:
        """Append instructions to their streams; they begin at ``release_ps`` or later."""
        instructions, waits, slots, events, collectives, need = self._used
        for item in estimated:
            issue = item.filed.issue
            waits, events = waits + len(item.filed.waits), events + issue.watched + issue.abandonable
            collectives = max(collectives, self._num_body_collectives + item.filed.collective + 1)
            if issue.need is not None:
                slots, need = slots + len(issue.waits), max(need, issue.need)
        self._reserve(_Sizes(instructions + len(estimated), waits, slots, events, collectives, need))
        for item in estimated:
            self._append(item, release_ps)

    def _append(self, item: IssueCost, release_ps: int) -> None:
        network, control, state = self._network, self._control, self._state
        filed, i, begin = item.filed, self._count, self._num_waits
        network.cost_class[i] = item.cost_class
        if item.own_ps is not None:
            self._give_class(i, item.own_ps)
        network.resource[i] = item.route if filed.collective < 0 else self._join_collective(item)
        network.waits[begin : begin + len(filed.waits)] = [self._awaited(handle) for handle in filed.waits]
        self._count, self._num_waits = i + 1, begin + len(filed.waits)
        network.wait_offsets[i + 1] = self._num_waits
        control.release_ps[i], control.after[i] = release_ps, NO_MORE
        if filed.issue.need is not None:
            self._joins.need[i] = filed.issue.need
        control.watched[i], control.is_open[i] = filed.issue.watched, filed.issue.abandonable
        if filed.issue.abandonable:
            self._stream_of[i] = filed.stream
        if state.position[filed.stream] == NO_MORE:
            state.position[filed.stream], state.cursor[filed.stream] = i, begin
            self._runnable.append(filed.stream)
        else:
            control.after[self._last[filed.stream]] = i
        self._last[filed.stream] = i

    def _join_collective(self, item: IssueCost) -> int:
        """Add a member; the lowest gives the collective its route. Return the resource number of the collective."""
        number = self._num_body_collectives + item.filed.collective
        network = self._network
        if number >= self._num_collectives:
            self._num_collectives = number + 1
            network.collective_owner[number] = item.filed.stream
            network.collective_route[number] = item.route
        network.collective_size[number] += 1
        network.collective_owner[number] = min(network.collective_owner[number], item.filed.stream)
        return len(network.route_offsets) - 1 + number

    def _reserve(self, used: _Sizes) -> None:
        """Grow the columns, if necessary, to hold ``used`` entries."""
        self._used = used
        if all(map(le, used, self._room)):
            return
        self._room = room = _Sizes(*(2 * size + 1 for size in used))
        network = _longer(self._network, room.instructions, "cost_class", "resource")
        network = _longer(network, room.instructions + 1, "wait_offsets")
        network = _longer(network, room.waits, "waits")
        self._network = _longer(network, room.collectives, "collective_route", "collective_size", "collective_owner")
        state = _longer(self._state, room.instructions, "end_ps", fill=-1)
        state = _longer(state, room.collectives, "arrived", "arrival_ps")
        self._state = _longer(state, room.collectives, "members", fill=-1)
        joins = _longer(self._joins, room.instructions, "need")
        joins = _longer(joins, room.slots, "slot_after", "slot_stream")
        if len(network.mark_instruction):
            joins = _longer(joins, room.slots, "slot_wait")
        self._joins = _with_needs(joins, room.need)
        control = _longer(self._control, room.instructions, "after", "release_ps", "watched", "is_open")
        self._control = _longer(control, room.events, "event_ps", "event_number")
        if self._sharing is not None:
            self._sharing = _longer(self._sharing, room.instructions, "start_ps", fill=-1)


def _longer(columns: Columns, size: int, *names: str, fill: int = 0) -> Columns:
    """Return the tuple with at least ``size`` entries in the named columns; new entries hold ``fill``."""
    grown = {}
    for name in names:
        column = getattr(columns, name)
        if len(column) < size:
            grown[name] = np.full(size, fill, column.dtype)
            grown[name][: len(column)] = column
    longer: Columns = columns._replace(**grown)
    return longer


def _with_needs(joins: Joins, need: int) -> Joins:
    """Return the joins with room for the ``need`` smallest moments of the open join of each stream."""
    sizes = np.diff(joins.smallest_offsets, append=len(joins.smallest_ps))
    need = max(need, int(sizes.max()))
    smallest_ps = np.empty((len(sizes), need), np.int64)
    for stream, (begin, length) in enumerate(zip(joins.smallest_offsets, sizes, strict=True)):
        smallest_ps[stream, :length] = joins.smallest_ps[begin : begin + length]
    return joins._replace(smallest_offsets=np.arange(len(sizes)) * need, smallest_ps=smallest_ps.reshape(-1))


def _share_all(network: Network, num_links: int) -> tuple[Network, Sharing]:
    """Like `prepare_sharing`, for streams to which a transfer over any route may be appended."""
    longest = int(np.diff(network.route_offsets).max(initial=0))
    network, sharing = prepare_sharing(network, num_links)
    return network, sharing._replace(flows=make_flows(np.full(len(sharing.flows.transfers), longest), num_links))
