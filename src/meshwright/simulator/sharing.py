"""Transfers that share links: max-min fair rates (`fill`); a heap of times (`push`, `pop`); lists of waiting streams.

Rates are found by progressive filling, in whole numbers. Every link has the capacity of one transfer that is alone on
it. A transfer needs the same rate x on all links of its route, 0 < x <= 1, and the rates x_j of the running transfers
satisfy, for each link,

    Σ (x_j of the transfers on it) <= 1.

They are max-min fair: no rate can grow without lowering one that is not higher. Progressive filling finds them. In each
round every link that has transfers without a rate offers them equal shares of its remaining capacity; the links with
the least offer become full, and all their transfers without a rate get that offer (Bertsekas and Gallager, Data
Networks, 1992, section 6.5.2).

**Rounding.** Rates and remaining capacities are whole multiples of 1 / `UNITS`, an offer is rounded down, and all links
with the least offer become full together, so the result depends on no order. UNITS = lcm(1, ..., 22): equal shares of
up to 22 transfers are exact, others are low by less than 1 / UNITS = 4.3e-9.

Transfers that are not connected by a chain of common links do not influence each other. When transfers begin or end,
only those connected with their links get new rates.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled


# A binary heap of (time, stream) in two arrays that the caller owns; equal times are ordered by stream. Both functions
# return the new size. They exist because the compiled engine cannot use ``heapq`` without boxing its entries.
@compiled
def push(times: NDArray[np.int64], streams: NDArray[np.int64], size: int, time: int, stream: int) -> int:
    """Add the entry (time, stream) to the heap of ``size`` entries; return the new size."""
    child = size
    while child > 0:
        parent = (child - 1) >> 1
        if times[parent] < time or (times[parent] == time and streams[parent] <= stream):
            break
        times[child] = times[parent]
        streams[child] = streams[parent]
        child = parent
    times[child] = time
    streams[child] = stream
    return size + 1


@compiled
def pop(times: NDArray[np.int64], streams: NDArray[np.int64], size: int) -> int:
    """Remove the first entry of the heap, and return the new size; read the entry from index 0 before the call."""
    size -= 1
    time = times[size]
    stream = streams[size]
    hole = 0
    while True:
        child = 2 * hole + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            times[right] < times[child] or (times[right] == times[child] and streams[right] < streams[child])
        ):
            child = right
        if time < times[child] or (time == times[child] and stream <= streams[child]):
            break
        times[hole] = times[child]
        streams[hole] = streams[child]
        hole = child
    times[hole] = time
    streams[hole] = stream
    return size


Ids = NDArray[np.int64]
Times = NDArray[np.int64]
Column = NDArray[np.int32]

# Value of a stream's cursor instead of an index into the waits: the end of its next instruction is known.
GRANTED = -1


# Waiting streams are in linked lists, one list per instruction and per collective. ``next_waiter[stream]`` is the next
# stream of the list that a stream is in; it is in one at most. An unknown end holds -1, or -(stream + 2): the head of
# the list of streams that wait for it. Streams that can continue are pushed on a stack; all functions that push some
# return its new top.
@compiled
def join(
    collective: int, stream: int, time: int, arrived: Column, arrival: Times, members: Ids, next_waiter: Ids
) -> int:
    """Record that a member (its stream) arrived at a collective at ``time``; return the latest arrival so far."""
    arrived[collective] += 1
    arrival[collective] = max(arrival[collective], time)
    next_waiter[stream] = members[collective]
    members[collective] = stream
    return int(arrival[collective])


@compiled
def resume(
    collective: int,
    stream: int,
    end: int,
    members: Ids,
    next_waiter: Ids,
    cursor: Ids,
    ready: Times,
    stack: Ids,
    top: int,
) -> int:
    """Resume ``stream``, or all members of ``collective`` (-1: none), whose instruction ends at ``end``.

    Returns the new top of the stack.
    """
    member = stream if collective < 0 else members[collective]
    while member >= 0:
        cursor[member] = GRANTED
        ready[member] = end
        stack[top] = member
        top += 1
        member = next_waiter[member] if collective >= 0 else np.int64(-1)
    return top


@compiled
def finish(end: Times, i: int, time: int, next_waiter: Ids, stack: Ids, top: int) -> int:
    """Record that instruction ``i`` ends at ``time`` and wake the streams that wait for it.

    Returns the new top of the stack.
    """
    waiter = end[i]
    end[i] = time
    while waiter < -1:
        stream = -(waiter + 2)
        waiter = next_waiter[stream]
        stack[top] = stream
        top += 1
    return top


# Records: a field is read without passing its array around, which costs more than the work on it (`engine.py`).
Records = NDArray[np.void]
Record = np.void

UNITS = math.lcm(*range(1, 23))
NO_RATE = -1


# A running transfer, by the stream that requests it. Its work left at `since_ps` is `left_ps` and `left_parts`,
# `speed` its rate from then on, `stop_ps` when it ends or raises its mark number `next_mark` (`fair.py`). Its crossings
# are `first` to `last` (exclusive); `rate` is what the last filling, number `filling`, gave it.
TRANSFER = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("left_ps", "left_parts", "since_ps", "speed", "stop_ps", "next_mark"),
            *("first", "last", "rate", "filling"),
        )
    ]
)
# A link: its first crossing and the number of transfers on it; during a filling, the number without a rate (`open`),
# the remaining capacity (`left`), and the share that it offers.
LINK = np.dtype([(name, np.int64) for name in ("head", "present", "open", "left", "offer", "filling")])
# One link of a transfer, in the doubly linked list of its link; -1 ends the list.
CROSSING = np.dtype([(name, np.int64) for name in ("link", "stream", "after", "before")])
# Indices into `Flows.counts`.
NUM_CHANGED, FILLING = 0, 1


class Flows(NamedTuple):
    """The transfers on each link, and their rates.

    ``changed`` lists the links whose transfers changed since the rates were last computed (a *filling*). ``reached``
    and ``connected`` are scratch: the links and transfers of a filling. ``counts`` has the number of changed links and
    the number of the next filling.
    """

    transfers: Records
    links: Records
    crossings: Records
    changed: Ids
    reached: Ids
    connected: Ids
    counts: Ids


def make_flows(capacities: Ids, num_links: int) -> Flows:
    """Return flows without running transfers; a transfer of stream s can have up to ``capacities[s]`` links."""
    num_streams = len(capacities)
    transfers, links = np.zeros(num_streams, TRANSFER), np.zeros(num_links, LINK)
    crossings = np.zeros(int(capacities.sum()), CROSSING)
    transfers["first"] = transfers["last"] = np.cumsum(capacities) - capacities
    transfers["stop_ps"] = links["head"] = -1
    crossings["stream"] = np.repeat(np.arange(num_streams), capacities)
    return Flows(
        transfers=transfers,
        links=links,
        crossings=crossings,
        changed=np.zeros(num_links, np.int64),
        reached=np.zeros(num_links, np.int64),
        connected=np.zeros(num_streams, np.int64),
        counts=np.array([0, 1]),
    )


@compiled
def enter_links(
    transfers: Records,
    links: Records,
    crossings: Records,
    changed: Ids,
    counts: Ids,
    stream: int,
    route_links: Column,
    begin: int,
    stop: int,
) -> None:
    """Put the transfer of a stream on the links ``route_links[begin:stop]``."""
    place = transfers[stream]["first"]
    for q in range(begin, stop):
        link, crossing = links[route_links[q]], crossings[place]
        crossing["link"], crossing["after"], crossing["before"] = route_links[q], link["head"], -1
        if link["head"] >= 0:
            crossings[link["head"]]["before"] = place
        link["head"] = place
        link["present"] += 1
        _note_change(links, changed, counts, route_links[q])
        place += 1
    transfers[stream]["last"] = place


@compiled
def leave_links(transfers: Records, links: Records, crossings: Records, changed: Ids, counts: Ids, stream: int) -> None:
    """Remove the transfer of a stream from its links."""
    transfer = transfers[stream]
    for place in range(transfer["first"], transfer["last"]):
        crossing = crossings[place]
        link, after, before = links[crossing["link"]], crossing["after"], crossing["before"]
        if after >= 0:
            crossings[after]["before"] = before
        if before >= 0:
            crossings[before]["after"] = after
        else:
            link["head"] = after
        link["present"] -= 1
        _note_change(links, changed, counts, crossing["link"])
    transfer["last"] = transfer["first"]


@compiled
def _note_change(links: Records, changed: Ids, counts: Ids, link: int) -> None:
    """Add a link to ``changed``, once between two fillings."""
    if links[link]["filling"] != counts[FILLING]:
        links[link]["filling"] = counts[FILLING]
        changed[counts[NUM_CHANGED]] = link
        counts[NUM_CHANGED] += 1


@compiled
def fill(
    transfers: Records,
    links: Records,
    crossings: Records,
    changed: Ids,
    reached: Ids,
    connected: Ids,
    counts: Ids,
) -> int:
    """Compute new rates of all transfers that are connected with the changed links.

    Returns the number n of these transfers; they are ``connected[:n]`` (streams), with their new rates in ``rate``.
    """
    num_links, num_transfers = _collect(transfers, links, crossings, changed, reached, connected, counts)
    remaining = num_transfers
    while remaining > 0:
        least, kept = UNITS, 0
        for k in range(num_links):
            link = links[reached[k]]
            if link["open"] > 0:
                reached[kept] = reached[k]
                kept += 1
                link["offer"] = link["left"] // link["open"]
                least = min(least, int(link["offer"]))
        num_links = kept
        for k in range(num_links):
            if links[reached[k]]["offer"] == least:
                remaining -= _settle(transfers, links, crossings, reached[k], least)
    return num_transfers


@compiled
def _settle(transfers: Records, links: Records, crossings: Records, full: int, least: int) -> int:
    """Give the least offer to the transfers of a full link that have no rate yet; return their number."""
    settled, place = 0, links[full]["head"]
    while place >= 0:
        transfer = transfers[crossings[place]["stream"]]
        if transfer["rate"] == NO_RATE:
            transfer["rate"] = least
            settled += 1
            for other in range(transfer["first"], transfer["last"]):
                link = links[crossings[other]["link"]]
                link["open"] -= 1
                link["left"] -= least
        place = crossings[place]["after"]
    return settled


@compiled
def _collect(
    transfers: Records,
    links: Records,
    crossings: Records,
    changed: Ids,
    reached: Ids,
    connected: Ids,
    counts: Ids,
) -> tuple[int, int]:
    """Collect the links and transfers connected with the changed links, and reset them; return their numbers."""
    num_links, num_transfers, filling = counts[NUM_CHANGED], 0, counts[FILLING]
    for k in range(num_links):
        reached[k] = changed[k]
    k = 0
    while k < num_links:
        link = links[reached[k]]
        link["open"], link["left"] = link["present"], UNITS
        place = link["head"]
        while place >= 0:
            transfer = transfers[crossings[place]["stream"]]
            if transfer["filling"] != filling:
                transfer["filling"], transfer["rate"] = filling, NO_RATE
                connected[num_transfers] = crossings[place]["stream"]
                num_transfers += 1
                for other in range(transfer["first"], transfer["last"]):
                    number = crossings[other]["link"]
                    if links[number]["filling"] != filling:
                        links[number]["filling"] = filling
                        reached[num_links] = number
                        num_links += 1
            place = crossings[place]["after"]
        k += 1
    counts[NUM_CHANGED] = 0
    counts[FILLING] += 1
    return num_links, num_transfers
