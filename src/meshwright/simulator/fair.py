"""``fair`` contention: transfers that share links run at the same time, at max-min fair rates.

The model, in whole picoseconds: a transfer that takes d alone on its links (its duration under ``queued``) has the work
d. It begins without queueing when its stream, or the last member of its collective, has arrived. At rate x (`sharing`)
it does the work x t in the time t, and it ends when its work is done. A mark at offset o into the transfer is raised
when the work o is done:

    left(t + dt) = left(t) - x dt;    end: the first whole ps with left <= 0;    mark: the first with left <= d - o.

A **moment** is a time at which a transfer on a shared link begins, ends or raises a mark. At a moment, ends and marks
come first, then everything that follows at the same time, then the transfers that begin; finally the rates are computed
once, from the set of running transfers. So events at one time need no order, and the result does not depend on the
numbering of ranks, streams and links.

Work is counted in 1 / `UNITS` ps as a pair (whole ps, parts), and rates are whole multiples of 1 / UNITS. Only rates
are rounded (down, see `sharing`), and moments (up to the next ps).

Streams run ahead through computations and waits as under ``queued`` (`engine`), and their requests wait in the same
heap. A second heap holds the *stops*: the time at which each transfer next ends or raises a mark, at the present rates.
Entries that a new rate made wrong are dropped when they reach the top. For the instructions that wait for it, mark k of
a shared transfer is an instruction of its own, with number n + k after the n instructions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.compiled import compiled
from meshwright.simulator.control import NEVER, Control, next_event
from meshwright.simulator.joins import Joins, close_join, finish_for_joins
from meshwright.simulator.network import Network, NetworkState, route_of
from meshwright.simulator.sharing import (
    NUM_CHANGED,
    UNITS,
    Flows,
    Ids,
    Record,
    Records,
    Times,
    enter_links,
    fill,
    finish,
    leave_links,
    make_flows,
    pop,
    push,
    resume,
)

# Stops of a transfer that the heap may hold on average before stale ones are removed.
_STOPS_PER_STREAM = 4
_NO_STOP = -1
# Indices into `Sharing.clock`.
NOW, NUM_STOPS = 0, 1


class Sharing(NamedTuple):
    """The running transfers and their next stops (end or mark).

    ``start_ps`` (n,) is the start of each instruction with a shared route, -1 for others. ``mark_transfer[k]`` is the
    instruction that raises mark k, ``mark_left[k]`` the work left at that time; sorted by instruction, then most work
    first. ``stops_time`` and ``stops_stream`` are the heap of stops; ``clock`` has the current moment and the size of
    that heap. Instructions wait for mark k as for instruction ``first_mark`` + k.
    """

    start_ps: Times
    mark_transfer: Ids
    mark_left: Times
    stops_time: Times
    stops_stream: Ids
    clock: Ids
    flows: Flows
    first_mark: int


def prepare_sharing(network: Network, num_links: int) -> tuple[Network, Sharing]:
    """Return the network with marks of shared transfers as instructions of their own, and a `Sharing` at time 0."""
    num_streams = len(network.stream_offsets) - 1
    capacities, leader = np.zeros(num_streams, np.int64), np.zeros(len(network.collective_size), np.int64)
    _find_transfers(network, capacities, leader)
    network, mark_transfer, mark_left = _number_marks(network, leader)
    slots = _STOPS_PER_STREAM * num_streams
    return network, Sharing(
        start_ps=np.full(len(network.cost_class), -1, np.int64),
        mark_transfer=mark_transfer,
        mark_left=mark_left,
        stops_time=np.empty(slots, np.int64),
        stops_stream=np.empty(slots, np.int64),
        clock=np.zeros(2, np.int64),
        flows=make_flows(capacities, num_links),
        first_mark=len(network.cost_class),
    )


@compiled
def _find_transfers(network: Network, capacities: Ids, leader: Ids) -> None:
    """Find the most links of a shared transfer of each stream, and the member that leads each collective."""
    offsets, num_routes = network.stream_offsets, len(network.route_offsets) - 1
    for stream in range(len(capacities)):
        for i in range(offsets[stream], offsets[stream + 1]):
            c, route = network.resource[i] - num_routes, route_of(network, i)
            if c >= 0 and network.collective_owner[c] == stream:
                leader[c] = i
            if route >= network.num_private and (c < 0 or leader[c] == i):
                num_links = network.route_offsets[route + 1] - network.route_offsets[route]
                capacities[stream] = max(capacities[stream], num_links)


def _number_marks(network: Network, leader: Ids) -> tuple[Network, Ids, Times]:
    """Number the awaited marks of shared transfers from n on. Return the transfer and the work left of each, sorted.

    The transfer of a collective is its leader's instruction.
    """
    num_routes, raiser = len(network.route_offsets) - 1, network.mark_instruction
    collective = network.resource[raiser] - num_routes
    joint = np.flatnonzero(collective >= 0)
    route, transfer = network.resource[raiser], raiser.astype(np.int64)
    route[joint], transfer[joint] = network.collective_route[collective[joint]], leader[collective[joint]]
    marked = np.flatnonzero(network.waits < 0)
    awaited = np.zeros(len(raiser), np.bool_)
    awaited[~network.waits[marked]] = True
    chosen = np.flatnonzero(awaited & (route >= network.num_private) & (network.mark_shift_ps < 0))
    keys, number = np.unique(np.stack([transfer[chosen], network.mark_shift_ps[chosen]]), axis=1, return_inverse=True)
    renamed = np.full(len(raiser), -1, np.int64)
    renamed[chosen] = len(network.cost_class) + number
    if len(chosen):
        waits = network.waits.copy()
        marked = marked[renamed[~waits[marked]] >= 0]
        waits[marked] = renamed[~waits[marked]]
        network = network._replace(waits=waits)
    return network, keys[0].copy(), -keys[1]


@compiled
def run_moments(
    network: Network,
    state: NetworkState,
    sharing: Sharing,
    joins: Joins | None,
    control: Control | None,
    num_requests: int,
) -> tuple[int, int]:
    """Advance from moment to moment until streams can continue.

    Returns the number of streams that can continue and the number of requests left. The first is 0 if no transfer runs
    any more, or if a controller has to decide at the present moment.
    """
    start_ps, mark_transfer, mark_left, stops_time, stops_stream, clock, flows, first_mark = sharing
    transfers, links, crossings, changed, reached, connected, counts = flows
    cost_class, class_ps, resource, members = network.cost_class, network.class_ps, network.resource, state.members
    route_offsets, route_links, collective_route = network.route_offsets, network.route_links, network.collective_route
    num_routes = len(route_offsets) - 1
    position, cursor, ready_ps, next_waiter, stack, heap_time, heap_stream = state[1:8]
    top = 0
    while top == 0:
        if counts[NUM_CHANGED] > 0 and not (num_requests > 0 and heap_time[0] == clock[NOW]):
            for k in range(fill(transfers, links, crossings, changed, reached, connected, counts)):
                stream = connected[k]
                if transfers[stream]["rate"] != transfers[stream]["speed"]:
                    _change_speed(transfers[stream], clock[NOW], position[stream], mark_transfer, mark_left)
                    _push_stop(transfers, stops_time, stops_stream, clock, stream)
        if not _find_moment(control, transfers, stops_time, stops_stream, clock, heap_time, num_requests):
            break
        while clock[NUM_STOPS] > 0 and stops_time[0] == clock[NOW]:
            stream = stops_stream[0]
            clock[NUM_STOPS] = pop(stops_time, stops_stream, clock[NUM_STOPS])
            if transfers[stream]["stop_ps"] != clock[NOW]:
                continue
            i, transfer = position[stream], transfers[stream]
            _work(transfer, clock[NOW])
            for k in range(transfer["next_mark"], _marks_raised(transfer, i, mark_transfer, mark_left)):
                top = _raise_mark(state, joins, first_mark + k, clock[NOW], top)
                transfer["next_mark"] = k + 1
            if _is_left(transfer):
                _find_stop(transfer, i, mark_transfer, mark_left)
                _push_stop(transfers, stops_time, stops_stream, clock, stream)
            else:
                transfer["stop_ps"] = _NO_STOP
                leave_links(transfers, links, crossings, changed, counts, stream)
                c = resource[i] - num_routes
                top = resume(c, stream, clock[NOW], members, next_waiter, cursor, ready_ps, stack, top)
        top, num_requests = _close_joins(network, state, joins, clock[NOW], num_requests, top)
        while num_requests > 0 and heap_time[0] == clock[NOW]:
            stream = heap_stream[0]
            num_requests = pop(heap_time, heap_stream, num_requests)
            i = position[stream]
            c, route = resource[i] - num_routes, np.int64(resource[i])
            if c >= 0:
                route = np.int64(collective_route[c])
            _begin(transfers[stream], i, class_ps[cost_class[i]], clock[NOW], mark_transfer)
            _note_start(start_ps, c, stream, clock[NOW], position, members, next_waiter)
            begin, stop = route_offsets[route], route_offsets[route + 1]
            enter_links(transfers, links, crossings, changed, counts, stream, route_links, begin, stop)
    return top, num_requests


@compiled
def _raise_mark(state: NetworkState, joins: Joins | None, mark: int, now: int, top: int) -> int:
    """Resume the waiters of a mark; return the new top of the stack."""
    if joins is None:
        return finish(state.end_ps, mark, now, state.next_waiter, state.stack, top)
    return finish_for_joins(joins, state.end_ps, mark, now, state.next_waiter, state.stack, top)


@compiled
def _close_joins(
    network: Network, state: NetworkState, joins: Joins | None, now: int, num_requests: int, top: int
) -> tuple[int, int]:
    """Close the joins whose time has come; they come before the requests of the same time."""
    if joins is not None:
        position, cursor, ready_ps, _, stack, heap_time, heap_stream = state[1:8]
        while num_requests > 0 and heap_time[0] == now and heap_stream[0] < 0:
            stream = heap_stream[0] + len(position)
            num_requests = pop(heap_time, heap_stream, num_requests)
            top = close_join(network, joins, stream, now, position, cursor, ready_ps, stack, top)
    return top, num_requests


@compiled
def _find_moment(
    control: Control | None,
    transfers: Records,
    stops_time: Times,
    stops_stream: Ids,
    clock: Ids,
    heap_time: Times,
    num_requests: int,
) -> bool:
    """Set the clock to the next moment, if any; return whether it is a moment of links, not a controller's event."""
    while clock[NUM_STOPS] > 0 and transfers[stops_stream[0]]["stop_ps"] != stops_time[0]:
        clock[NUM_STOPS] = pop(stops_time, stops_stream, clock[NUM_STOPS])
    moment = heap_time[0] if num_requests > 0 else NEVER
    if clock[NUM_STOPS] > 0:
        moment = min(moment, stops_time[0])
    if control is not None and next_event(control) < moment:
        clock[NOW] = next_event(control)
        return False
    if moment == NEVER:
        return False
    clock[NOW] = moment
    return True


@compiled
def _note_start(
    start_ps: Times, collective: int, stream: int, now: int, position: Ids, members: Ids, next_waiter: Ids
) -> None:
    """Record that a transfer, or all members of a collective, begin now."""
    member = stream if collective < 0 else members[collective]
    while member >= 0:
        start_ps[position[member]] = now
        member = next_waiter[member] if collective >= 0 else np.int64(-1)


@compiled
def _begin(transfer: Record, i: int, work_ps: int, now: int, mark_transfer: Ids) -> None:
    """Start a transfer with all its work left; its rate is set at the end of the moment."""
    transfer["left_ps"], transfer["left_parts"] = work_ps, 0
    transfer["since_ps"], transfer["speed"] = now, 0
    transfer["next_mark"] = np.searchsorted(mark_transfer, i) if len(mark_transfer) else 0


@compiled
def _change_speed(transfer: Record, now: int, i: int, mark_transfer: Ids, mark_left: Times) -> None:
    """Continue at the rate of the last filling."""
    _work(transfer, now)
    transfer["speed"] = transfer["rate"]
    _find_stop(transfer, i, mark_transfer, mark_left)


@compiled
def _work(transfer: Record, now: int) -> None:
    """Subtract the work done from `since_ps` until now."""
    passed, speed = now - transfer["since_ps"], transfer["speed"]
    # In two parts, so that no product exceeds 64 bits for any length of transfer.
    parts = speed * (passed % UNITS)
    left_parts = transfer["left_parts"] - parts % UNITS
    transfer["left_ps"] -= speed * (passed // UNITS) + parts // UNITS + (left_parts < 0)
    transfer["left_parts"] = left_parts % UNITS
    transfer["since_ps"] = now


@compiled
def _is_left(transfer: Record) -> bool:
    """Whether any work is left."""
    return bool(transfer["left_ps"] > 0 or (transfer["left_ps"] == 0 and transfer["left_parts"] > 0))


@compiled
def _marks_raised(transfer: Record, i: int, mark_transfer: Ids, mark_left: Times) -> int:
    """Return the index of the first mark that is not yet raised, of this transfer or the next."""
    left = transfer["left_ps"] + (transfer["left_parts"] > 0)
    k = transfer["next_mark"]
    while k < len(mark_left) and mark_transfer[k] == i and left <= mark_left[k]:
        k += 1
    return int(k)


@compiled
def _find_stop(transfer: Record, i: int, mark_transfer: Ids, mark_left: Times) -> None:
    """Compute when a transfer ends or raises its next mark at its present rate."""
    k, until = transfer["next_mark"], 0
    if k < len(mark_left) and mark_transfer[k] == i:
        until = mark_left[k]
    speed, left = transfer["speed"], transfer["left_ps"] - until
    whole = left // speed
    parts = (left - whole * speed) * UNITS + transfer["left_parts"]
    transfer["stop_ps"] = transfer["since_ps"] + whole * UNITS + -(-parts // speed)


@compiled
def _push_stop(transfers: Records, stops_time: Times, stops_stream: Ids, clock: Ids, stream: int) -> None:
    """Push the stop of a transfer onto the heap; if the heap is full, rebuild it from the valid stops."""
    if clock[NUM_STOPS] < len(stops_time):
        stop_ps = transfers[stream]["stop_ps"]
        clock[NUM_STOPS] = push(stops_time, stops_stream, clock[NUM_STOPS], stop_ps, stream)
        return
    clock[NUM_STOPS] = 0
    for other in range(len(transfers)):
        if transfers[other]["stop_ps"] != _NO_STOP:
            clock[NUM_STOPS] = push(stops_time, stops_stream, clock[NUM_STOPS], transfers[other]["stop_ps"], other)
