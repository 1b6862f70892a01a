"""A slow, obvious simulation to compare the engine with: one heap of events for everything.

At each moment ends and marks happen first, then a controller decides (`oracle_controlled.py`), then requests for links
are served in the order of their streams.
Sections are walked in place, nothing is unrolled, and sends, receives and collectives are found by looking for
them.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from itertools import count

from meshwright.spec import Opcode, Program

SENDS = (Opcode.SEND_ACTIVATION, Opcode.SEND_GRADIENT)
RECEIVES = (Opcode.RECEIVE_ACTIVATION, Opcode.RECEIVE_GRADIENT)
HAPPENING, CONTROL, REQUEST = 0, 1, 2


class Oracle:
    """Simulates ``num_steps`` repetitions; `ends` gives the end of every instruction, None where it never ends."""

    def __init__(self, program: Program, costs, num_steps: int) -> None:
        self.costs = costs
        self.rank = [stream.rank for stream in program.streams]
        parts = [("prologue", program.prologue), *[("body", program.body)] * num_steps, ("epilogue", program.epilogue)]
        self.queues = [[] for _ in program.streams]
        self.waits, self.marks, self.cost = {}, defaultdict(list), {}
        self.partners, self.need = {}, {}
        for k, (name, section) in enumerate(parts):
            for s in range(len(program.streams)):
                self.queues[s] += [(k, int(i)) for i in section.stream_range(s)]
            self._read_section(k, section, getattr(costs, name), num_steps)
        if program.advance:
            # A message may arrive in a later part than that in which it is sent: its number counts on.
            numbered = [(k, section, max(0, min(k, num_steps) - 1)) for k, (_, section) in enumerate(parts)]
            self._find_partners(program, [(k, section, r * program.advance) for k, section, r in numbered])
        else:
            for k, (_, section) in enumerate(parts):
                self._find_partners(program, [(k, section, 0)])
        self.stream_of = {key: s for s, queue in enumerate(self.queues) for key in queue}
        self.done, self.began = {}, {}

    def _read_section(self, k, section, costs, num_steps):
        n = section.num_instructions
        for i in range(n):
            self.cost[k, i] = (int(self.costs.duration_ps[costs.cost_class[i]]), int(costs.route[i]))
            self.waits[k, i] = [(k, int(w)) if w < n else ("mark", k, int(w) - n) for w in section.waits_of(i).tolist()]
        late = section.late_instruction, section.late_section, section.late_awaited, section.late_lag
        for i, which, awaited, lag in zip(*(column.tolist() for column in late), strict=True):
            # Part 0 is the prologue, then come the repetitions of the body.
            if (k - lag == 0 and which == 0) or (0 < k - lag <= num_steps and which == 1):
                self.waits[k, i].append((k - lag, awaited))
        for i, need in zip(section.join_instruction.tolist(), section.join_need.tolist(), strict=True):
            self.need[k, i] = need
        for m, i in enumerate(section.mark_instruction.tolist()):
            self.marks[k, i].append((int(costs.mark_offset_ps[m]), ("mark", k, m)))

    def _find_partners(self, program, numbered):
        sends, meetings, seen = defaultdict(list), defaultdict(list), defaultdict(int)
        at = lambda section, shift, i: (
            int(section.stage[i]),
            int(section.peer[i]),
            int(section.microbatch[i]) + shift,
        )
        everything = [(k, section, shift, i) for k, section, shift in numbered for i in range(section.num_instructions)]
        for k, section, shift, i in everything:
            if section.opcode[i] in SENDS:
                stage, peer, microbatch = at(section, shift, i)
                sends[stage, peer, microbatch, SENDS.index(section.opcode[i])].append((k, i))
        for k, section, shift, i in everything:
            if section.opcode[i] in RECEIVES:
                stage, peer, microbatch = at(section, shift, i)
                self.waits[k, i].append(sends[peer, stage, microbatch, RECEIVES.index(section.opcode[i])].pop(0))
            if section.opcode[i] == Opcode.ALL_REDUCE:
                s = next(s for s in range(len(program.streams)) if i in section.stream_range(s))
                what = (int(section.group[i]), int(section.peer[i]))
                nth = seen[self.rank[s], what]
                seen[self.rank[s], what] += 1
                meetings[what, nth].append((k, i))
        for members in meetings.values():
            self.partners.update(dict.fromkeys(members, members))

    def starts(self) -> list[int | None]:
        """After `ends`: when every instruction began."""
        return [self.began.get(key) for queue in self.queues for key in queue]

    def ends(self) -> list[int | None]:
        self.events, self.ticket = [], count()
        self.place = [0] * len(self.queues)
        self.requested, self.arrived = set(), set()
        self.free = defaultdict(int)
        self._look(0)
        while self.events:
            now, phase, _, _, what = heapq.heappop(self.events)
            if phase == HAPPENING:
                self._end(now, what)
            elif phase == CONTROL:
                self._decide(now, what)
            else:
                self._serve(now, what)
            self._look(now)
        return [self.done.get(key) for queue in self.queues for key in queue]

    def _end(self, now, what):
        self.done[what] = now

    def _look(self, now):
        """Everybody who can go on does."""
        for s, queue in enumerate(self.queues):
            while self.place[s] < len(queue) and queue[self.place[s]] in self.done:
                self.place[s] += 1
            if self.place[s] < len(queue):
                key = queue[self.place[s]]
                happened = sum(w in self.done for w in self.waits[key])
                if key not in self.arrived and happened >= self.need.get(key, len(self.waits[key])):
                    self.arrived.add(key)
                    self._arrive(now, key)

    def _arrive(self, now, key):
        members = self.partners.get(key, [key])
        if all(member in self.arrived for member in members):
            lowest = min(self.stream_of[member] for member in members)
            if self.cost[key][1] < 0:
                self._start(now, members)
            else:
                heapq.heappush(self.events, (now, REQUEST, lowest, next(self.ticket), tuple(members)))

    def _serve(self, now, members):
        links = self._links(members[0])
        start = max([now, *(self.free[link] for link in links)])
        for link in links:
            self.free[link] = start + self.cost[members[0]][0]
        self._start(start, members)

    def _links(self, key):
        route = self.cost[key][1]
        return self.costs.route_links[self.costs.route_offsets[route] : self.costs.route_offsets[route + 1]].tolist()

    def _start(self, start, members):
        for member in members:
            self.began[member] = start
            heapq.heappush(self.events, (start + self.cost[member][0], HAPPENING, 0, next(self.ticket), member))
            for offset, mark in self.marks[member]:
                heapq.heappush(self.events, (start + offset, HAPPENING, 0, next(self.ticket), mark))
