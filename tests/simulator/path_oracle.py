"""Longest chains by definition: every instruction with all that it needs, links in the order in which they were held.

What is one collective is one thing. Imports the slow simulation beside it and `spec` only.
"""

from functools import cached_property
from itertools import pairwise

from tests.simulator.oracle import Oracle

STREAM, WAIT, MARK, LINK = 1, 2, 3, 4


class PathOracle(Oracle):
    """After `ends`: what each instruction needs, longest chains, and the chain that the order of ties picks."""

    @cached_property
    def order(self):
        return [key for queue in self.queues for key in queue]

    @cached_property
    def number(self):
        return {key: n for n, key in enumerate(self.order)}

    def start(self, key):
        return self.done[key] - self.cost[key][0]

    def links(self, key):
        route = self.cost[key][1]
        if route < 0:
            return []
        return self.costs.route_links[self.costs.route_offsets[route] : self.costs.route_offsets[route + 1]].tolist()

    @cached_property
    def raiser(self):
        return {mark: (key, offset) for key, marks in self.marks.items() for offset, mark in marks}

    def moments(self, key):
        """(instruction, how far into it, kind) of each of its waits."""
        for what in self.waits[key]:
            if what[0] == "mark":
                other, offset = self.raiser[what]
                # One that is raised at the very end is a wait for the end.
                yield other, offset, MARK if offset < self.cost[other][0] else WAIT
            else:
                yield what, self.cost[what][0], WAIT

    @cached_property
    def before(self):
        """Per instruction: (what it needs, after how much of that, kind), links as the holder before it.

        Of the waits of a join those that came as the k-th or at the same moment.
        """
        users = {}
        for key in self.order:
            for link in self.links(key):
                users.setdefault(link, []).append(key)
        found = {key: [] for key in self.order}
        for queue in self.queues:
            for first, second in pairwise(queue):
                found[second].append((first, self.cost[first][0], STREAM))
        for key in self.waits:
            needs = sorted(self.moments(key), key=lambda need: self.start(need[0]) + need[1])
            if key in self.need:
                last = needs[self.need[key] - 1]
                needs = [need for need in needs if self.start(need[0]) + need[1] == self.start(last[0]) + last[1]]
            found[key] += needs
        for keys in users.values():
            for key in keys:
                earlier = [other for other in keys if self.done[other] <= self.start(key)]
                latest = max((self.done[other] for other in earlier), default=0)
                found[key] += [(other, self.cost[other][0], LINK) for other in earlier if self.done[other] == latest]
        return found

    def members(self, key):
        return sorted(self.partners.get(key, [key]), key=self.number.__getitem__)

    def longest(self, known, key):
        """Length of the longest chain of instructions and parts of them that ends where ``key`` begins."""
        for member in self.members(key):
            if member not in known:
                needs = [need for each in self.members(member) for need in self.before[each]]
                known[member] = max([0, *(self.longest(known, other) + part for other, part, _ in needs)])
        return known[key]

    def chain(self, begin, stop):
        """(instruction, start, end, kind of what it waited for) between two moments, by the order of ties."""
        at = min(n for n, key in enumerate(self.order) if self.done[key] == stop)
        segments, until = [], stop
        while True:
            key = self.order[at]
            start = self.start(key)
            tight = [
                (kind == LINK, self.number[member], kind != STREAM, self.number[other], kind)
                for member in self.members(key)
                for other, part, kind in self.before[member]
                if self.start(other) + part == start
            ]
            if start <= begin:
                return [(at, begin, until, 0), *reversed(segments)]
            # Only at the beginning of everything there is nothing; the shortest wait is named by its instruction.
            by_link, member, _, other, kind = min(tight)
            segments.append((at if by_link else member, start, until, kind))
            at, until = other, start
