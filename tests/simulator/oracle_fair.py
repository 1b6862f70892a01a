"""The slow, obvious simulation under fair sharing: at every moment all rates anew, all links alike, in whole numbers.

From the definition alone: a transfer that takes d alone has the work d, links have the capacity 1 = `UNITS` parts,
rates are whole parts by progressive filling with offers rounded down, and everything is looked at at every moment.
"""

from __future__ import annotations

import heapq
import math
from itertools import count

from tests.simulator.oracle import CONTROL, HAPPENING, Oracle

UNITS = math.lcm(*range(1, 23))


class FairOracle(Oracle):
    """`ends` under fair sharing."""

    def ends(self) -> list[int | None]:
        self.events, self.ticket = [], count()
        self.place = [0] * len(self.queues)
        self.arrived = set()
        self.left, self.rate, self.open_marks = {}, {}, {}
        now = 0
        self._settle(now)
        while self.events or self.left:
            then = min([*(event[0] for event in self.events[:1]), *self._stops(now)])
            for members, rate in self.rate.items():
                self.left[members] -= rate * (then - now)
            now = then
            self._settle(now)
        return [self.done.get(key) for queue in self.queues for key in queue]

    def _settle(self, now):
        """All that happens at one moment, then the rates."""
        self._look(now)
        while self._happen(now):
            self._look(now)
        self.rate = fill_links({members: self._links(members[0]) for members in self.left})

    def _happen(self, now) -> bool:
        """One thing that happens now, if any is left."""
        if self.events and self.events[0][0] == now and self.events[0][1] != CONTROL:
            _, phase, _, _, what = heapq.heappop(self.events)
            if phase == HAPPENING:
                self._end(now, what)
            else:
                self.left[what] = self.cost[what[0]][0] * UNITS
                self.began.update(dict.fromkeys(what, now))
                self.open_marks[what] = [(offset, mark) for member in what for offset, mark in self.marks[member]]
            return True
        for members, left in self.left.items():
            for offset, mark in self.open_marks[members]:
                if left <= (self.cost[members[0]][0] - offset) * UNITS:
                    self.open_marks[members].remove((offset, mark))
                    self._end(now, mark)
                    return True
            if left <= 0:
                for member in members:
                    self._end(now, member)
                del self.left[members]
                return True
        if self.events and self.events[0][0] == now:
            self._decide(now, heapq.heappop(self.events)[-1])
            return True
        return False

    def _stops(self, now):
        """When each transfer ends or raises a mark if nothing else happens."""
        for members, left in self.left.items():
            for offset in [self.cost[members[0]][0], *(offset for offset, _ in self.open_marks[members])]:
                until = (self.cost[members[0]][0] - offset) * UNITS
                yield now + -(-(left - until) // self.rate[members])


def fill_links(routes: dict) -> dict:
    """Max-min fair rates in parts of `UNITS`: transfer → its links in, transfer → its rate out."""
    rates = {}
    while len(rates) < len(routes):
        offers = {}
        for link in {link for links in routes.values() for link in links}:
            users = [transfer for transfer, links in routes.items() if link in links]
            waiting = [transfer for transfer in users if transfer not in rates]
            if waiting:
                offers[link] = (UNITS - sum(rates.get(transfer, 0) for transfer in users)) // len(waiting)
        least = min(offers.values())
        full = {link for link, offer in offers.items() if offer == least}
        rates.update({t: least for t, links in routes.items() if t not in rates and full.intersection(links)})
    return rates
