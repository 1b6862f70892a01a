"""At what rates do transfers move that share links? Max-min fairness by progressive filling, in whole numbers.

Every link has the capacity of one transfer that is alone on it. A transfer needs the same rate x on all links of its
route, 0 < x <= 1, and the rates x_j of those under way satisfy, for each link,

    Σ (x_j of the transfers on it) <= 1.

They are max-min fair: no rate can grow without lowering one that is not higher. Progressive filling finds them. In
each round every link with transfers whose rate is open offers them equal shares of what is left; the links with the
least offer are full, and all their transfers with an open rate get it (Bertsekas and Gallager, Data Networks, 1992,
section 6.5.2).

**Rounding.** Rates and what is left are whole multiples of 1 / `UNITS`, an offer is rounded down, and all links with
the least offer count as full together, so the result depends on no order. UNITS = lcm(1, ..., 22): equal shares of up
to 22 transfers are exact, others are low by less than 1 / UNITS = 4.3e-9.

Transfers that are connected by no chain of common links do not influence each other. When transfers come or go, only
those connected with their links get new rates.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from meshwright.cost.compiled import compiled
from meshwright.simulator.waiters import Column, Ids

UNITS = math.lcm(*range(1, 23))
NO_RATE = -1


class Crossings(NamedTuple):
    """Which transfers are on which link, and scratch for filling; a transfer goes by the stream that requests it.

    A **crossing** is one link of a transfer; those of stream s are ``first[s]`` to ``last[s]`` (exclusive), in linked
    lists per link (``head``, ``after``, ``before``; -1 ends). ``present[l]`` transfers are on link l. ``changed`` lists
    the links whose transfers changed, ``num_changed[0]`` of them. ``links`` and ``streams`` collect what is connected;
    ``link_seen`` and ``stream_seen`` say in which filling, numbered by ``num_changed[1]``.
    """

    first: Ids
    last: Ids
    link: Column
    stream: Column
    after: Ids
    before: Ids
    head: Ids
    present: Ids
    changed: Ids
    num_changed: Ids
    links: Ids
    streams: Ids
    link_seen: Ids
    stream_seen: Ids
    open: Ids
    left: Ids
    offer: Ids
    rate: Ids


def make_crossings(capacities: Ids, num_links: int) -> Crossings:
    """Room for ``capacities[s]`` crossings of each stream; nothing is under way."""
    ends = np.cumsum(capacities)
    total, num_streams = int(capacities.sum()), len(capacities)
    per_link = {
        name: np.zeros(num_links, np.int64) for name in ("changed", "links", "link_seen", "open", "left", "offer")
    }
    return Crossings(
        first=ends - capacities,
        last=ends - capacities,
        link=np.zeros(total, np.int32),
        stream=np.repeat(np.arange(num_streams, dtype=np.int32), capacities),
        after=np.zeros(total, np.int64),
        before=np.zeros(total, np.int64),
        head=np.full(num_links, -1, np.int64),
        present=np.zeros(num_links, np.int64),
        num_changed=np.array([0, 1], np.int64),
        streams=np.zeros(num_streams, np.int64),
        stream_seen=np.zeros(num_streams, np.int64),
        rate=np.zeros(num_streams, np.int64),
        **per_link,
    )


@compiled
def enter_links(crossings: Crossings, stream: int, links: Column) -> None:
    """Put the transfer of a stream on its links."""
    crossing = crossings.first[stream]
    for link in links:
        head = crossings.head[link]
        crossings.link[crossing] = link
        crossings.after[crossing] = head
        crossings.before[crossing] = -1
        if head >= 0:
            crossings.before[head] = crossing
        crossings.head[link] = crossing
        crossings.present[link] += 1
        _note_change(crossings, link)
        crossing += 1
    crossings.last[stream] = crossing


@compiled
def leave_links(crossings: Crossings, stream: int) -> None:
    """Take the transfer of a stream off its links."""
    for crossing in range(crossings.first[stream], crossings.last[stream]):
        link, after, before = crossings.link[crossing], crossings.after[crossing], crossings.before[crossing]
        if after >= 0:
            crossings.before[after] = before
        if before >= 0:
            crossings.after[before] = after
        else:
            crossings.head[link] = after
        crossings.present[link] -= 1
        _note_change(crossings, link)
    crossings.last[stream] = crossings.first[stream]


@compiled
def _note_change(crossings: Crossings, link: int) -> None:
    """A link is listed once between two fillings."""
    filling = crossings.num_changed[1]
    if crossings.link_seen[link] != filling:
        crossings.link_seen[link] = filling
        crossings.changed[crossings.num_changed[0]] = link
        crossings.num_changed[0] += 1


@compiled
def fill(crossings: Crossings) -> int:
    """Fill the links that changed and all that is connected with them.

    Returns how many transfers that are: ``streams[:n]``, with their rates in ``rate``.
    """
    num_links, num_streams = _collect(crossings)
    links, offer, opened, left = crossings.links, crossings.offer, crossings.open, crossings.left
    remaining = num_streams
    while remaining > 0:
        least, kept = UNITS, 0
        for k in range(num_links):
            link = links[k]
            if opened[link] > 0:
                links[kept] = link
                kept += 1
                offer[link] = left[link] // opened[link]
                least = min(least, int(offer[link]))
        num_links = kept
        for k in range(num_links):
            if offer[links[k]] == least:
                remaining -= _settle(crossings, links[k], least)
    return num_streams


@compiled
def _settle(crossings: Crossings, link: int, least: int) -> int:
    """Give the open transfers of a full link their rate; return how many they were."""
    settled, crossing = 0, crossings.head[link]
    while crossing >= 0:
        stream = crossings.stream[crossing]
        if crossings.rate[stream] == NO_RATE:
            crossings.rate[stream] = least
            settled += 1
            for other in range(crossings.first[stream], crossings.last[stream]):
                crossings.open[crossings.link[other]] -= 1
                crossings.left[crossings.link[other]] -= least
        crossing = crossings.after[crossing]
    return settled


@compiled
def _collect(crossings: Crossings) -> tuple[int, int]:
    """Links and transfers connected with what changed, all empty and without rates; return their numbers."""
    num_links, num_streams = crossings.num_changed[0], 0
    filling = crossings.num_changed[1]
    for k in range(num_links):
        crossings.links[k] = crossings.changed[k]
    k = 0
    while k < num_links:
        link = crossings.links[k]
        crossings.open[link], crossings.left[link] = crossings.present[link], UNITS
        crossing = crossings.head[link]
        while crossing >= 0:
            stream = crossings.stream[crossing]
            if crossings.stream_seen[stream] != filling:
                crossings.stream_seen[stream] = filling
                crossings.rate[stream] = NO_RATE
                crossings.streams[num_streams] = stream
                num_streams += 1
                for other in range(crossings.first[stream], crossings.last[stream]):
                    reached = crossings.link[other]
                    if crossings.link_seen[reached] != filling:
                        crossings.link_seen[reached] = filling
                        crossings.links[num_links] = reached
                        num_links += 1
            crossing = crossings.after[crossing]
        k += 1
    crossings.num_changed[0] = 0
    crossings.num_changed[1] += 1
    return num_links, num_streams
