"""A network that a controller extends: instructions are appended to its streams between runs of the engine.

Instruction ids are handles (`spec.control`); under ``fair``, ids of marks stand between those of the body and of what
is issued. Every column has room for more than is there, and is copied into one of twice the length when it is full.
All routes count as shared, for nobody knows what will want them; that changes no time. The last stream is the
controller's own and always empty: it runs first whenever the loop goes on, so that links are given where nothing was
issued.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from meshwright.program.issuing import Filed
from meshwright.simulator.control import EVENTS, FIRST_TIMER, NO_MORE, RUNNABLE, Control, add_event
from meshwright.simulator.engine import Contention, run_streams
from meshwright.simulator.fair import Sharing, prepare_sharing
from meshwright.simulator.heap import pop
from meshwright.simulator.joins import Joins, make_joins
from meshwright.simulator.network import Network, fresh_state
from meshwright.simulator.sharing import make_flows
from meshwright.simulator.waiters import Column, Times

Number = TypeVar("Number", bound=np.generic)
# A named tuple of columns.
Columns = TypeVar("Columns", bound=Any)


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """What was filed, with its cost class and route."""

    filed: Filed
    cost_class: int
    route: int


class GrowingNetwork:
    """Streams that run until the next event, and can be extended then. ``network`` has room for the controller's."""

    def __init__(self, network: Network, num_links: int, contention: Contention) -> None:
        num_body, num_waits = len(network.cost_class), len(network.waits)
        num_marks, num_streams = len(network.mark_instruction), len(network.stream_offsets) - 1
        # Waits of nobody for every mark: under `fair` they get numbers, by which what is issued waits for them.
        every_mark = ~np.arange(num_marks, dtype=np.int32)
        network = network._replace(waits=np.concatenate([network.waits, every_mark]), num_private=0)
        self._joins = make_joins(network)
        self._sharing: Sharing | None = None
        if contention == "fair":
            network, self._sharing = _share_all(network, num_links)
        self._mark_waits = network.waits[num_waits:].tolist()
        self._num_body = num_body
        self._first_issued = self._count = num_body + (len(self._sharing.mark_left) if self._sharing else 0)
        self._num_waits, self._num_slots = num_waits, len(self._joins.slot_after)
        self._num_events = self._num_timers = self._room = 0
        self._num_body_collectives = self._num_collectives = len(network.collective_size)
        last, is_empty = network.stream_offsets[1:] - 1, np.diff(network.stream_offsets) == 0
        after = np.arange(1, num_body + 1)
        after[last[~is_empty]] = NO_MORE
        self._last = np.where(is_empty, -1, last).tolist()
        state = fresh_state(network, num_links, self._count - num_body)
        state.position[is_empty] = NO_MORE
        # A stream has one request or open join; joins may stand there with times that have changed since.
        heap_time, heap_stream = np.empty((2, 2 * num_streams), np.int64)
        self._state = state._replace(heap_time=heap_time, heap_stream=heap_stream)
        self._network = network._replace(stream_offsets=np.full(num_streams + 1, NO_MORE))
        self._control = Control(
            after=after,
            release_ps=np.zeros(num_body, np.int64),
            watched=np.zeros(num_body, np.bool_),
            event_ps=np.empty(1, np.int64),
            event_number=np.empty(1, np.int64),
            counts=np.zeros(3, np.int64),
        )
        self._reserve()
        self._network.wait_offsets[num_body : self._count + 1] = num_waits
        self._wake(np.flatnonzero(~is_empty)[::-1].tolist())

    def watch(self, handles: Sequence[int]) -> None:
        """Let the ends of instructions of the body be events."""
        self._reserve(events=len(handles))
        self._control.watched[list(handles)] = True

    def set_timers(self, moments_ps: Sequence[int]) -> None:
        """Let moments be events; timer k is the k-th that was asked for."""
        self._reserve(events=len(moments_ps))
        for at_ps in moments_ps:
            add_event(self._control, at_ps, FIRST_TIMER + self._num_timers)
            self._num_timers += 1

    def issue(self, priced: Sequence[Priced], release_ps: int) -> None:
        """Append instructions to their streams; they begin at ``release_ps`` or later."""
        issues = [item.filed.issue for item in priced]
        self._reserve(
            instructions=len(priced),
            waits=sum(len(item.filed.waits) for item in priced),
            slots=sum(len(issue.waits) for issue in issues if issue.need is not None),
            events=sum(issue.watched for issue in issues),
            collectives=max((item.filed.collective + 1 for item in priced), default=0),
            need=max((issue.need or 0 for issue in issues), default=0),
        )
        for item in priced:
            self._append(item, release_ps)

    def run(self) -> None:
        """Go on until the next event has come, or nothing happens any more."""
        controllers_own = len(self._last) - 1
        self._wake([controllers_own])
        run_streams(self._network, self._state, self._sharing, self._joins, self._control)

    def next_event(self) -> tuple[int, int] | None:
        """Take the event that has come: its moment, and the handle that ended, or ``FIRST_TIMER`` + k for timer k."""
        control = self._control
        if not control.counts[EVENTS]:
            return None
        time, number = int(control.event_ps[0]), int(control.event_number[0])
        control.counts[EVENTS] = pop(control.event_ps, control.event_number, int(control.counts[EVENTS]))
        return time, number if number >= FIRST_TIMER else self._handle(number)

    def ends(self) -> Times:
        """When each instruction ended, by handle; negative for what never did."""
        return self._by_handle(self._state.end_ps)

    def cost_classes(self) -> Column:
        """By handle."""
        return self._by_handle(self._network.cost_class)

    def starts(self) -> Times:
        """When each instruction began, by handle; it means nothing for those that never end."""
        start_ps: Times = self.ends() - self._network.class_ps[self.cost_classes()]
        if self._sharing is None:
            return start_ps
        shared_ps = self._by_handle(self._sharing.start_ps)
        return np.where(shared_ps >= 0, shared_ps, start_ps)

    @property
    def is_done(self) -> bool:
        """Whether every stream has come to its end."""
        return bool((self._state.position == NO_MORE).all())

    def _handle(self, number: int) -> int:
        return number if number < self._num_body else number - self._first_issued + self._num_body

    def _by_handle(self, column: NDArray[Number]) -> NDArray[Number]:
        return np.concatenate([column[: self._num_body], column[self._first_issued : self._count]])

    def _awaited(self, handle: int) -> int:
        if handle < 0:
            return int(self._mark_waits[-1 - handle])
        return handle if handle < self._num_body else handle - self._num_body + self._first_issued

    def _wake(self, streams: Sequence[int]) -> None:
        top = int(self._control.counts[RUNNABLE])
        self._state.stack[top : top + len(streams)] = streams
        self._control.counts[RUNNABLE] = top + len(streams)

    def _append(self, item: Priced, release_ps: int) -> None:
        network, control, state = self._network, self._control, self._state
        filed, i, begin = item.filed, self._count, self._num_waits
        network.cost_class[i] = item.cost_class
        network.resource[i] = item.route if filed.collective < 0 else self._join_collective(item)
        network.waits[begin : begin + len(filed.waits)] = [self._awaited(handle) for handle in filed.waits]
        self._count, self._num_waits = i + 1, begin + len(filed.waits)
        network.wait_offsets[i + 1] = self._num_waits
        control.release_ps[i], control.after[i] = release_ps, NO_MORE
        if filed.issue.need is not None:
            self._joins.need[i] = filed.issue.need
        if filed.issue.watched:
            control.watched[i] = True
        if state.position[filed.stream] == NO_MORE:
            state.position[filed.stream], state.cursor[filed.stream] = i, begin
            self._wake([filed.stream])
        else:
            control.after[self._last[filed.stream]] = i
        self._last[filed.stream] = i

    def _join_collective(self, item: Priced) -> int:
        """Count a member in; the lowest gives the collective its route. Returns what stands for it as a resource."""
        number = self._num_body_collectives + item.filed.collective
        network = self._network
        if number >= self._num_collectives:
            self._num_collectives = number + 1
            network.collective_owner[number] = item.filed.stream
            network.collective_route[number] = item.route
        network.collective_size[number] += 1
        network.collective_owner[number] = min(network.collective_owner[number], item.filed.stream)
        return len(network.route_offsets) - 1 + number

    def _reserve(
        self,
        *,
        instructions: int = 0,
        waits: int = 0,
        slots: int = 0,
        events: int = 0,
        collectives: int = 0,
        need: int = 0,
    ) -> None:
        """Make room for so many more, for collectives up to a number, and for joins that need so many waits."""
        network, state, joins, control = self._network, self._state, self._joins, self._control
        if self._count + instructions > self._room:
            size = self._room = 2 * (self._count + instructions)
            network = _longer(network, size, "cost_class", "resource")
            network = _longer(network, size + 1, "wait_offsets")
            state = _longer(state, size, "end_ps", fill=-1)
            joins = _longer(joins, size, "need")
            control = _longer(control, size, "after", "release_ps", "watched")
            if self._sharing is not None:
                self._sharing = _longer(self._sharing, size, "start_ps", fill=-1)
        network = _longer(network, self._num_waits + waits, "waits")
        self._num_slots, self._num_events = self._num_slots + slots, self._num_events + events
        joins = _longer(joins, self._num_slots, "slot_after", "slot_stream")
        if len(network.mark_instruction):
            joins = _longer(joins, self._num_slots, "slot_shift_ps")
        control = _longer(control, self._num_events, "event_ps", "event_number")
        size = self._num_body_collectives + collectives
        network = _longer(network, size, "collective_route", "collective_size", "collective_owner")
        state = _longer(_longer(state, size, "arrived", "arrival_ps"), size, "members", fill=-1)
        self._network, self._state, self._joins, self._control = network, state, _with_room(joins, need), control


def _longer(columns: Columns, size: int, *names: str, fill: int = 0) -> Columns:
    """The same with room for ``size`` entries in some columns; what is new holds ``fill``."""
    short = [name for name in names if len(getattr(columns, name)) < size]
    if not short:
        return columns
    grown = {}
    for name in short:
        column = getattr(columns, name)
        grown[name] = np.full(max(size, 2 * len(column)), fill, column.dtype)
        grown[name][: len(column)] = column
    longer: Columns = columns._replace(**grown)
    return longer


def _with_room(joins: Joins, need: int) -> Joins:
    """The same with room for the ``need`` smallest moments of the open join of each stream."""
    sizes = np.diff(joins.smallest_offsets, append=len(joins.smallest_ps))
    if need <= sizes.min():
        return joins
    size = max(need, 2 * int(sizes.max()))
    smallest_ps = np.empty((len(sizes), size), np.int64)
    for stream, (begin, length) in enumerate(zip(joins.smallest_offsets, sizes, strict=True)):
        smallest_ps[stream, :length] = joins.smallest_ps[begin : begin + length]
    return joins._replace(smallest_offsets=np.arange(len(sizes)) * size, smallest_ps=smallest_ps.reshape(-1))


def _share_all(network: Network, num_links: int) -> tuple[Network, Sharing]:
    """As `prepare_sharing`, for streams to which a transfer over any route may be appended."""
    longest = int(np.diff(network.route_offsets).max(initial=0))
    network, sharing = prepare_sharing(network, num_links)
    return network, sharing._replace(flows=make_flows(np.full(len(sharing.flows.transfers), longest), num_links))
