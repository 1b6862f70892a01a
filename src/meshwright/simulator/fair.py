"""``fair`` contention: transfers that share links are under way together, at max-min fair rates.

The model, in whole picoseconds. A transfer that takes d alone (its duration under ``queued``) has the work d. It begins
at its request, when its stream, or the last member of its collective, has arrived: nobody queues. At rate x
(`sharing.py`) it does the work x t in the time t, and it ends when the work is done; a mark with the offset o into it
is raised when the work o is done:

    left(t + dt) = left(t) - x dt;    end: the first whole ps with left <= 0;    mark: the first with left <= d - o.

A **moment** is a time at which something happens to a shared link. In it, ends and marks come first, then all that
follows at the same time, then the transfers that begin; at last the rates, once, from the set of those under way. So
what happens at one time needs no order, and the result is the same for any numbering of ranks, streams and links.

Work is counted in 1 / `UNITS` ps as a pair (whole ps, parts), rates are whole multiples of 1 / UNITS: nothing is
rounded but rates (down, see `sharing.py`) and moments (up to the next ps).

What is computed when: streams run ahead through computations and waits like under ``queued`` (`engine.py`); their
requests wait in the same heap. A second heap holds when each transfer next ends or raises a mark, at the present rates;
entries that a new rate made wrong are dropped when they come up. A mark of a shared transfer is an instruction of its
own for those who wait, number n + k behind the n instructions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.compiled import compiled
from meshwright.simulator.heap import pop, push
from meshwright.simulator.network import Network, State
from meshwright.simulator.sharing import UNITS, Crossings, enter_links, fill, leave_links, make_crossings
from meshwright.simulator.waiters import Ids, Times, finish, resume

# Stops of a transfer that the heap may hold on average before stale ones are thrown out.
_STOPS_PER_STREAM = 4
_NEVER = -1


class Sharing(NamedTuple):
    """What is under way; a transfer goes by the stream that requests it. Columns per stream, unless said.

    ``start_ps`` (n,) is when an instruction with a shared route began, else -1. ``mark_transfer`` and ``mark_left`` say
    of which instruction mark k is, and how much work is left when it is raised; ordered by both, most work first.
    ``next_mark`` is the first that was not raised. ``left_ps`` and ``left_parts`` are the work left at ``since_ps``,
    ``speed`` the rate from then on, ``stop_ps`` when it ends or raises its next mark. ``clock`` holds the moment and
    the size of the heap of stops.
    """

    start_ps: Times
    mark_transfer: Ids
    mark_left: Times
    next_mark: Ids
    left_ps: Times
    left_parts: Times
    since_ps: Times
    speed: Ids
    stop_ps: Times
    stops_time: Times
    stops_stream: Ids
    clock: Ids
    crossings: Crossings


def prepare_sharing(network: Network, num_links: int) -> tuple[Network, Sharing]:
    """The network with marks of shared transfers as instructions of their own, and nothing under way yet."""
    num_streams, num_instructions = len(network.stream_offsets) - 1, len(network.duration_ps)
    requester = np.repeat(np.arange(num_streams), np.diff(network.stream_offsets))
    joint = np.flatnonzero(network.collective >= 0)
    requester[joint] = network.collective_owner[network.collective[joint]]
    shared = np.flatnonzero(_is_shared(network))
    capacities = np.zeros(num_streams, np.int64)
    np.maximum.at(capacities, requester[shared], np.diff(network.route_offsets)[network.route[shared]])
    network, mark_transfer, mark_left = _number_marks(network, requester)
    slots = _STOPS_PER_STREAM * num_streams
    columns = ("next_mark", "left_ps", "left_parts", "since_ps", "speed")
    return network, Sharing(
        start_ps=np.full(num_instructions, -1, np.int64),
        mark_transfer=mark_transfer,
        mark_left=mark_left,
        **{name: np.zeros(num_streams, np.int64) for name in columns},
        stop_ps=np.full(num_streams, _NEVER, np.int64),
        stops_time=np.empty(slots, np.int64),
        stops_stream=np.empty(slots, np.int64),
        clock=np.zeros(2, np.int64),
        crossings=make_crossings(capacities, num_links),
    )


def _is_shared(network: Network) -> NDArray[np.bool_]:
    """Which instructions hold shared links, shape (n,)."""
    return np.append(network.route_shared, False)[network.route]


def _number_marks(network: Network, requester: Ids) -> tuple[Network, Ids, Times]:
    """Marks of shared transfers that are awaited get numbers from n on; of which transfer, and work left, in order.

    A collective is known by the instruction of its owner.
    """
    awaited = np.flatnonzero(_is_shared(network)[network.waits] & (network.wait_shift_ps < 0))
    raiser, left = network.waits[awaited], -network.wait_shift_ps[awaited]
    leader = np.arange(len(network.duration_ps))
    owners = np.flatnonzero((network.collective >= 0) & (requester == _streams(network)))
    led = np.zeros(len(network.collective_size), np.int64)
    led[network.collective[owners]] = owners
    joint = np.flatnonzero(network.collective >= 0)
    leader[joint] = led[network.collective[joint]]
    keys, number = np.unique(np.stack([leader[raiser], -left]), axis=1, return_inverse=True)
    renamed = network.awaited.copy()
    renamed[awaited] = len(leader) + number
    return network._replace(awaited=renamed), keys[0].copy(), -keys[1]


def _streams(network: Network) -> Ids:
    return np.repeat(np.arange(len(network.stream_offsets) - 1), np.diff(network.stream_offsets))


@compiled
def run_moments(network: Network, state: State, sharing: Sharing, num_requests: int) -> tuple[int, int]:
    """Go from moment to moment until streams can run on; return their number and that of the requests left.

    No streams: nothing is under way any more.
    """
    top, clock, stops_time, stops_stream = 0, sharing.clock, sharing.stops_time, sharing.stops_stream
    changed, stop_ps = sharing.crossings.num_changed, sharing.stop_ps
    while top == 0:
        if changed[0] > 0 and not (num_requests > 0 and state.heap_time[0] == clock[0]):
            _set_rates(state, sharing)
        while clock[1] > 0 and stop_ps[stops_stream[0]] != stops_time[0]:
            clock[1] = pop(stops_time, stops_stream, clock[1])
        if clock[1] == 0 and num_requests == 0:
            break
        now = state.heap_time[0] if num_requests > 0 else stops_time[0]
        if clock[1] > 0:
            now = min(now, stops_time[0])
        clock[0] = now
        while clock[1] > 0 and stops_time[0] == now:
            stream = stops_stream[0]
            clock[1] = pop(stops_time, stops_stream, clock[1])
            if stop_ps[stream] == now:
                top = _stop(network, state, sharing, stream, top)
        while num_requests > 0 and state.heap_time[0] == now:
            stream = state.heap_stream[0]
            num_requests = pop(state.heap_time, state.heap_stream, num_requests)
            _begin(network, state, sharing, stream)
    return top, num_requests


@compiled
def _begin(network: Network, state: State, sharing: Sharing, stream: int) -> None:
    """The transfer that a stream stands before begins now; it gets its rate at the end of the moment."""
    i = state.position[stream]
    c, r = network.collective[i], network.route[i]
    member = stream if c < 0 else state.members[c]
    while member >= 0:
        sharing.start_ps[state.position[member]] = sharing.clock[0]
        member = state.next_waiter[member] if c >= 0 else np.int64(-1)
    sharing.left_ps[stream], sharing.left_parts[stream] = network.duration_ps[i], 0
    sharing.speed[stream], sharing.since_ps[stream] = 0, sharing.clock[0]
    sharing.next_mark[stream] = np.searchsorted(sharing.mark_transfer, i)
    enter_links(sharing.crossings, stream, network.route_links[network.route_offsets[r] : network.route_offsets[r + 1]])


@compiled
def _stop(network: Network, state: State, sharing: Sharing, stream: int, top: int) -> int:
    """A transfer ends, or raises marks; return the top of the stack."""
    i, now = state.position[stream], sharing.clock[0]
    _work(sharing, stream)
    left = sharing.left_ps[stream] + (sharing.left_parts[stream] > 0)
    k = sharing.next_mark[stream]
    while k < len(sharing.mark_left) and sharing.mark_transfer[k] == i and left <= sharing.mark_left[k]:
        top = finish(state.end_ps, len(network.duration_ps) + k, now, state.next_waiter, state.stack, top)
        k += 1
    sharing.next_mark[stream] = k
    if left > 0:
        _plan_stop(state, sharing, stream)
        return top
    sharing.stop_ps[stream] = _NEVER
    leave_links(sharing.crossings, stream)
    c, ready = network.collective[i], state.ready_ps
    return resume(c, stream, now, state.members, state.next_waiter, state.cursor, ready, state.stack, top)


@compiled
def _set_rates(state: State, sharing: Sharing) -> None:
    """Give all whose rate may have changed the one for the transfers that are under way now."""
    crossings = sharing.crossings
    for k in range(fill(crossings)):
        stream = crossings.streams[k]
        if crossings.rate[stream] != sharing.speed[stream]:
            _work(sharing, stream)
            sharing.speed[stream] = crossings.rate[stream]
            _plan_stop(state, sharing, stream)


@compiled
def _work(sharing: Sharing, stream: int) -> None:
    """Do the work from `since_ps` to the present moment."""
    passed, speed = sharing.clock[0] - sharing.since_ps[stream], sharing.speed[stream]
    # In two parts, so that no product leaves 64 bits however long a transfer is.
    parts = speed * (passed % UNITS)
    left_parts = sharing.left_parts[stream] - parts % UNITS
    sharing.left_ps[stream] -= speed * (passed // UNITS) + parts // UNITS + (left_parts < 0)
    sharing.left_parts[stream] = left_parts % UNITS
    sharing.since_ps[stream] = sharing.clock[0]


@compiled
def _plan_stop(state: State, sharing: Sharing, stream: int) -> None:
    """Find when a transfer ends or raises its next mark at its present rate."""
    k, until = sharing.next_mark[stream], np.int64(0)
    if k < len(sharing.mark_left) and sharing.mark_transfer[k] == state.position[stream]:
        until = sharing.mark_left[k]
    speed = sharing.speed[stream]
    whole, rest = divmod(sharing.left_ps[stream] - until, speed)
    parts = rest * UNITS + sharing.left_parts[stream]
    stop = sharing.since_ps[stream] + whole * UNITS + -(-parts // speed)
    sharing.stop_ps[stream] = stop
    if sharing.clock[1] == len(sharing.stops_time):
        _drop_stale(sharing)
    sharing.clock[1] = push(sharing.stops_time, sharing.stops_stream, sharing.clock[1], stop, stream)


@compiled
def _drop_stale(sharing: Sharing) -> None:
    """Build the heap of stops anew from those that hold."""
    sharing.clock[1] = 0
    for stream in range(len(sharing.stop_ps)):
        if sharing.stop_ps[stream] != _NEVER:
            sharing.clock[1] = push(
                sharing.stops_time, sharing.stops_stream, sharing.clock[1], sharing.stop_ps[stream], stream
            )
