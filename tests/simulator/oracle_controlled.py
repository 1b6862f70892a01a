"""The slow, obvious simulations with a controller: it is asked when nothing else happens at its moment but requests."""

from __future__ import annotations

import heapq
from collections import defaultdict

from meshwright.spec import AllReduce, Receive, Send
from meshwright.spec.control import Ended, Rang, Started
from meshwright.spec.instructions import STREAM_NAMES
from tests.simulator.oracle import CONTROL, HAPPENING, Oracle
from tests.simulator.oracle_fair import FairOracle

TIMERS = 10**9


class _Controlled:
    """`ends` of a body and all that is issued, in the order of ranks and streams; ``decided`` is what was decided."""

    def __init__(self, program, costs, controller, estimate_issue) -> None:
        super().__init__(program, costs, 1)
        self.controller, self.estimate_issue = controller, estimate_issue
        self.state, self.next_handle = controller.initial, program.body.num_instructions
        self.typed = {i: program.body.instruction(i) for i in range(self.next_handle)}
        self.watched, self.timers, self.sent, self.decided = set(), 0, {}, []
        queues = [[] for _ in range(program.num_ranks * len(STREAM_NAMES))]
        for stream, queue in zip(program.streams, self.queues, strict=True):
            queues[stream.rank * len(STREAM_NAMES) + STREAM_NAMES.index(stream.name)] = queue
        self.queues = queues
        self.stream_of = {key: s for s, queue in enumerate(queues) for key in queue}

    def _look(self, now):
        if not self.decided:
            self._decide(now, Started(next_handle=self.next_handle))
        super()._look(now)

    def _end(self, now, what):
        if what in self.done:  # It was abandoned before.
            return
        super()._end(now, what)
        if what in self.watched:
            heapq.heappush(self.events, (now, CONTROL, what[1], next(self.ticket), what[1]))

    def _decide(self, now, what):
        if isinstance(what, int):
            rank = self.stream_of[1, what] // len(STREAM_NAMES)
            event = Ended(next_handle=self.next_handle, handle=what, rank=rank, instruction=self.typed[what])
        elif isinstance(what, tuple):
            event = Rang(next_handle=self.next_handle, number=what[0])
        else:
            event = what
        self.state, decision = self.controller.decide(self.state, event, now)
        self.decided.append((event, now, decision))
        self._abandon(now, decision.abandon)
        self.watched |= {(1, handle) for handle in decision.watch}
        for timer in decision.timers:
            entry = (timer.at_ps, CONTROL, TIMERS + self.timers, next(self.ticket), (timer.number,))
            heapq.heappush(self.events, entry)
            self.timers += 1
        meetings, met = defaultdict(list), defaultdict(int)
        for issue in decision.issues:
            key = (1, self.next_handle)
            stream = issue.rank * len(STREAM_NAMES) + STREAM_NAMES.index(issue.stream)
            self.queues[stream].append(key)
            self.stream_of[key], self.typed[key[1]] = stream, issue.instruction
            self.waits[key] = [(1, handle) if handle >= 0 else ("mark", 1, -1 - handle) for handle in issue.waits]
            if issue.need is not None:
                self.need[key] = issue.need
            if issue.watched:
                self.watched.add(key)
            cost_class, route = self.estimate_issue(issue, key[1])
            self.cost[key] = int(self.costs.duration_ps[cost_class]), route
            message = issue.instruction
            if isinstance(message, Send):
                self.sent[message.stage, message.peer, message.microbatch, message.payload] = key
            if isinstance(message, Receive):
                self.waits[key].append(self.sent[message.peer, message.stage, message.microbatch, message.payload])
            if isinstance(message, AllReduce):
                what = issue.group, message.bucket
                meetings[what, met[what, issue.rank]].append(key)
                met[what, issue.rank] += 1
            self.next_handle += 1
        for members in meetings.values():
            self.partners.update(dict.fromkeys(members, members))

    def _abandon(self, now, handles):
        for key in ((1, handle) for handle in handles):
            if key not in self.began:
                self.cost[key] = 0, -1
            elif key not in self.done:
                heapq.heappush(self.events, (now, HAPPENING, 0, next(self.ticket), key))


class ControlledOracle(_Controlled, Oracle):
    """Under `queued`."""


class ControlledFairOracle(_Controlled, FairOracle):
    """Under `fair`."""
