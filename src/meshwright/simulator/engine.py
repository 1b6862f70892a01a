"""Compute when each instruction of ordered streams ends, with a worklist and a lazy heap; exact, in whole picoseconds.

The model, ``queued`` contention: an instruction may start when its predecessor in its stream has ended and all its
waits have happened (the end of an instruction, or a mark: a time inside an instruction's span). It then *requests* the
links of its route, all at once. Each link serves requests by (request time, stream); streams are numbered rank by rank.
The instruction starts at max(request time, all its links free) and holds its links for its duration. A collective is
one instruction per member; it requests when its last member has arrived, in the name of the lowest stream among the
members, and all members end together. A start is fixed at the request, so a link may be idle while a transfer over
several links waits for another link.

How it is computed:
1. Run each stream until it meets a wait whose time is unknown, an incomplete collective or a *shared* link.
   Compute, waits, marks and private links need no order in time.
2. A request for a shared link goes into a heap keyed (time, stream).
3. Only when the worklist is empty, the smallest request is granted, and streams continue.

Why that is exact: when the worklist is empty, every future event follows from some heap entry, so it cannot be
earlier than the smallest key. The condition: holding a link, and a mark raised meanwhile, takes at least 1 ps
(`check_costs` enforces it). A link is private when one stream takes part in every request for it (`unroll.py`), because
then its requests form a chain. Source: our own experiments with worklist, event heap and recorded link order; tests
compare with a plain event-driven simulation.

An instruction that needs only k of its waits is a *join* (`joins`); open joins are in the same heap. The ends that a
controller watches have a heap of their own (`control`): the loop returns when the first entry of both heaps is such an
end.

If hosts issue asynchronously, an instruction also ends no earlier than its host allows (`host_issue`). The times of
host and device depend only on earlier instructions of the stream, so both are known when the stream reaches the
instruction.

``fair`` contention (`fair.py`) differs only in how requests for shared links are served.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import numpy as np

from meshwright.compiled import compiled
from meshwright.simulator.control import NO_MORE, REQUESTS, RUNNABLE, Control, add_event, is_next, note_end
from meshwright.simulator.fair import Sharing, prepare_sharing, run_moments
from meshwright.simulator.host_issue import Hosts, as_run, prepare_hosts
from meshwright.simulator.joins import (
    NONE,
    Joins,
    close_join,
    drop_stale,
    finish_for_joins,
    look_at_join,
    open_join,
    prepare_joins,
)
from meshwright.simulator.network import Network, NetworkState, durations, fresh_state
from meshwright.simulator.sharing import GRANTED, Column, Ids, Times, finish, join, pop, push, resume
from meshwright.spec import ProgramError, suggest

Contention = Literal["queued", "fair"]
CONTENTIONS: tuple[Contention, ...] = get_args(Contention)


def check_contention(contention: str) -> None:
    """Raise ProgramError if the model of contention is unknown."""
    if contention not in CONTENTIONS:
        raise ProgramError(
            f"Unknown contention {contention!r}{suggest(contention, CONTENTIONS)}; expected {' or '.join(CONTENTIONS)}."
        )


class EngineRun(NamedTuple):
    """The times of a run of the engine.

    ``end_ps`` (n,) is the end of each instruction in ps, negative if it never ended. ``position`` (streams,) is the
    instruction id at which each stream stopped; a stream that stopped before its end waits for ever.
    ``shared_start_ps`` (n,) is the start of each transfer that shared its links, -1 for other instructions; None under
    ``queued``. ``network`` has the durations of the run, which include waiting for hosts.
    """

    end_ps: Times
    position: Ids
    shared_start_ps: Times | None
    network: Network

    def start_ps(self) -> Times:
        """Return when each instruction began in ps, shape (n,); meaningless for instructions that never ended."""
        start_ps = durations(self.network)
        np.subtract(self.end_ps, start_ps, out=start_ps)
        if self.shared_start_ps is None:
            return start_ps
        return np.where(self.shared_start_ps >= 0, self.shared_start_ps, start_ps)


def run_network(network: Network, num_links: int, contention: Contention = "queued") -> EngineRun:
    """Run a network until every stream has ended or stopped, and return all times."""
    hosts, given = prepare_hosts(network), network
    if hosts is not None:
        # The position of marks inside an instruction depends on its host.
        network = network._replace(mark_shift_ps=network.mark_shift_ps.copy())
    shift_ps, joins, sharing, num_marks = network.mark_shift_ps, prepare_joins(network), None, 0
    if contention == "fair":
        network, sharing = prepare_sharing(network, num_links)
        num_marks = len(sharing.mark_left)
    state = fresh_state(network, num_links, num_marks)
    run_streams(network, state, sharing, joins, None, hosts)
    end_ps = state.end_ps[: len(given.cost_class)]
    if hosts is not None:
        given = as_run(given, _start_ps(given, end_ps, hosts), end_ps, shift_ps)
    return EngineRun(end_ps, state.position, sharing.start_ps if sharing is not None else None, given)


def _start_ps(network: Network, end_ps: Times, hosts: Hosts) -> Times:
    """Return when each instruction began; one issued by a host began when the device was ready for it."""
    is_issued = network.earliest_ps[network.cost_class] > 0
    return np.where(is_issued, hosts.ready_ps, end_ps - durations(network))


@compiled
def run_streams(  # noqa: C901
    network: Network,
    state: NetworkState,
    sharing: Sharing | None,
    joins: Joins | None,
    control: Control | None,
    hosts: Hosts | None,
) -> None:
    """Run streams until all have ended or stopped, or a controller has to decide; write all times into ``state``."""
    # One loop, with arrays taken out of the tuples once: an array passed to a function in the innermost loop has its
    # references counted each time, which made the loop ten times as slow. It is compiled separately with and without
    # sharing, joins, control and hosts: a network without them does not pay for them.
    offsets, cost_class, class_ps, wait_offsets, waits, mark_instruction, mark_shift, resource, num_private = network[
        :9
    ]
    route_offsets, links, collective_route, size, owner = network[9:14]
    end, position, cursor, ready, next_waiter, stack, heap_time, heap_stream, link_free = state[:9]
    arrived, arrival, members = state[9:]
    if hosts is not None:
        issue_ps, earliest_ps, is_awaited, mark_earliest = network[16:20]
        clock, device_ready, first_mark, marks, usual_shift = hosts
    num_routes = len(route_offsets) - 1
    top, num_requests = len(position), 0
    if control is not None:
        top, num_requests = control.counts[RUNNABLE], control.counts[REQUESTS]
    while top > 0:
        top -= 1
        stream = stack[top]
        i, time, w = position[stream], ready[stream], cursor[stream]
        while i < offsets[stream + 1]:
            if w != GRANTED:
                if control is not None:
                    time = max(time, control.release_ps[i])
                if joins is not None and joins.need[i] > 0 and w < wait_offsets[i + 1]:
                    if joins.first[stream] < 0:
                        open_join(network, joins, end, stream, i)
                    num_waits = wait_offsets[i + 1] - wait_offsets[i]
                    moment, closes, enters = look_at_join(joins, stream, num_waits, time)
                    if not closes:
                        cursor[stream], ready[stream] = w, time
                        if enters:
                            if num_requests == len(heap_time):
                                num_requests = drop_stale(joins, heap_time, heap_stream, num_requests)
                            num_requests = push(heap_time, heap_stream, num_requests, moment, stream - len(position))
                        break
                    time, w = moment, np.int64(wait_offsets[i + 1])
                while w < wait_offsets[i + 1]:
                    k, shift = np.int64(waits[w]), np.int64(0)
                    if k < 0:
                        shift, k = mark_shift[~k], np.int64(mark_instruction[~k])
                    if end[k] < 0:
                        next_waiter[stream], end[k] = end[k], -(stream + 2)
                        break
                    time = max(time, end[k] + shift)
                    w += 1
                if w < wait_offsets[i + 1]:
                    cursor[stream], ready[stream] = w, time
                    break
                if resource[i] >= num_private:
                    c, route, requester = resource[i] - num_routes, np.int64(resource[i]), stream
                    if c >= 0:
                        time = join(c, stream, time, arrived, arrival, members, next_waiter)
                        route, requester = np.int64(collective_route[c]), np.int64(owner[c])
                        if arrived[c] < size[c]:
                            break
                    if route >= num_private:
                        if joins is not None and num_requests == len(heap_time):
                            num_requests = drop_stale(joins, heap_time, heap_stream, num_requests)
                        num_requests = push(heap_time, heap_stream, num_requests, time, requester)
                    else:
                        time += class_ps[cost_class[i]]
                        top = resume(c, stream, time, members, next_waiter, cursor, ready, stack, top)
                    break
                if hosts is None:
                    time += class_ps[cost_class[i]]
                else:
                    kind, begin, device_ready[i] = cost_class[i], clock[stream], time
                    if is_awaited[kind]:
                        begin = max(begin, time)
                    clock[stream] = begin + issue_ps[kind]
                    usual_end = time + class_ps[kind]
                    # A sum that overflows is found by its sign (`simulate`).
                    time = max(usual_end, begin + earliest_ps[kind]) if usual_end >= 0 else usual_end
                    for place in range(first_mark[i], first_mark[i + 1]):
                        mark = marks[place]
                        moment = max(usual_end + usual_shift[mark], begin + mark_earliest[mark])
                        mark_shift[mark] = moment - time
                if control is not None and control.is_open[i]:
                    cursor[stream], ready[stream] = GRANTED, time
                    add_event(control, time, stream - len(position))
                    break
            if joins is not None and end[i] < NONE:
                top = finish_for_joins(joins, end, i, time, next_waiter, stack, top)
            else:
                top = finish(end, i, time, next_waiter, stack, top)
            if control is None:
                i += 1
            else:
                note_end(control, i, time)
                i = control.after[i]
                if i == NO_MORE:
                    ready[stream] = time
                    break
            w = np.int64(wait_offsets[i])
        position[stream] = i
        if top == 0 and sharing is not None:
            top, num_requests = run_moments(network, state, sharing, joins, control, num_requests)
        while sharing is None and top == 0 and num_requests > 0:
            requester, time = heap_stream[0], heap_time[0]
            if control is not None and is_next(control, time, requester):
                break
            num_requests = pop(heap_time, heap_stream, num_requests)
            if joins is not None and requester < 0:
                requester += len(position)
                top = close_join(network, joins, requester, time, position, cursor, ready, stack, top)
                continue
            i = position[requester]
            c, route = resource[i] - num_routes, np.int64(resource[i])
            if c >= 0:
                route = np.int64(collective_route[c])
            time = _take_links(route_offsets, links, link_free, int(route), time, class_ps[cost_class[i]])
            top = resume(c, requester, time, members, next_waiter, cursor, ready, stack, top)
    if control is not None:
        control.counts[RUNNABLE], control.counts[REQUESTS] = top, num_requests


@compiled
def _take_links(offsets: Ids, links: Column, free: Times, route: int, time: int, duration: int) -> int:
    """Hold the links of a route for ``duration`` from the first moment at which all are free; return its end."""
    for q in range(offsets[route], offsets[route + 1]):
        time = max(time, free[links[q]])
    time += duration
    for q in range(offsets[route], offsets[route + 1]):
        free[links[q]] = time
    return time
