"""Small controllers at random: each decision follows from a seed, the number of decisions so far, and the event."""

from __future__ import annotations

import random
from dataclasses import dataclass

from meshwright.spec import AllReduce, Forward, Receive, Send
from meshwright.spec.control import Decision, Issue, Rang, Started, Timer


@dataclass(frozen=True, kw_only=True)
class RandomController:
    """Issues up to ``budget`` instructions on ``num_ranks`` ranks, and abandons some.

    Its state is (decisions, instructions issued, handles that may be abandoned).
    """

    seed: int
    num_ranks: int
    num_marks: int
    budget: int = 30
    timers: bool = True
    may_deadlock: bool = False
    abandons: bool = True
    initial: tuple = (0, 0, ())

    def decide(self, state, event, now_ps):
        count, issued, open_handles = state
        rng = random.Random(f"{self.seed} {count} {event} {now_ps}")
        issues, first = [], event.next_handle
        while issued + len(issues) < self.budget and rng.random() < 0.6:
            issues += self._draw(rng, first, first + len(issues))
        if self.may_deadlock and len(issues) > 1 and rng.random() < 0.2:
            issues = [_waiting(issue, first + rng.randrange(len(issues))) for issue in issues]
        wishes = rng.randint(0, 2) if self.timers and count < self.budget else 0
        timers = [Timer(at_ps=now_ps + rng.choice([0, 0, 1, 2, 5, 9]), number=rng.randint(0, 3)) for _ in range(wishes)]
        watch = sorted(rng.sample(range(first), rng.randint(0, first))) if isinstance(event, Started) else ()
        if isinstance(event, Rang) and event.number == 0:
            timers = timers[:1]
        abandon = tuple(handle for handle in open_handles if rng.random() < 0.2)
        decision = Decision(issues=tuple(issues), timers=tuple(timers), watch=tuple(watch), abandon=abandon)
        kept = (*(handle for handle in open_handles if handle not in abandon or rng.random() < 0.1),)
        new = (*(first + place for place, issue in enumerate(issues) if issue.abandonable),)
        return (count + 1, issued + len(issues), (*kept, *new)), decision

    def _draw(self, rng, first, handle):
        """A computation, a message or a collective; it may wait for all before it."""
        kind = rng.random()
        if kind < 0.4:
            rank = rng.randrange(self.num_ranks)
            may_end = self.abandons and rng.random() < 0.6
            return [
                self._issue(rng, rank, "compute", Forward(stage=rank, microbatch=handle), handle, abandonable=may_end)
            ]
        if kind < 0.75:
            source, target = rng.sample(range(self.num_ranks), 2)
            payload = rng.choice(["activation", "gradient"])
            facts = {"microbatch": 1000 + handle, "payload": payload, "num_bytes": 1}
            send = self._issue(rng, source, "send", Send(stage=source, peer=target, **facts), handle)
            receive = Receive(stage=target, peer=source, **facts)
            named = (handle,) * rng.randint(0, 1)
            watched = rng.random() < 0.4
            return [send, Issue(rank=target, stream="receive", instruction=receive, waits=named, watched=watched)]
        group = tuple(sorted(rng.sample(range(self.num_ranks), rng.randint(2, self.num_ranks))))
        issues, bucket = [], rng.choice([0, 1, handle])
        for _ in range(rng.choice([1, 1, 2])):
            # The second is another of the same bucket.
            joint = AllReduce(stage=0, bucket=bucket, num_bytes=1)
            issues += [self._issue(rng, rank, "exchange", joint, handle, group=group) for rank in group]
        return issues

    def _issue(self, rng, rank, stream, instruction, handle, **facts):
        before = range(-self.num_marks, handle)
        waits = tuple(rng.sample(before, min(len(before), rng.choice([0, 0, 1, 1, 2, 3, 4]))))
        need = rng.randint(1, len(waits)) if waits and rng.random() < 0.4 else None
        watched = rng.random() < 0.4
        return Issue(
            rank=rank, stream=stream, instruction=instruction, waits=waits, need=need, watched=watched, **facts
        )


@dataclass(frozen=True)
class RandomCosts:
    """Class and route by handle, or by bucket for the members of a collective (see `builders.random_program`)."""

    seed: int
    num_routes: int

    def __call__(self, issue, handle):
        is_joint = isinstance(issue.instruction, AllReduce)
        rng = random.Random(f"{self.seed} {issue.instruction.bucket if is_joint else handle}")
        route = (
            -1 if isinstance(issue.instruction, Receive) or issue.abandonable else rng.randrange(-1, self.num_routes)
        )
        return rng.randint(0, 2) if route < 0 else rng.randint(3, 5), route


def _waiting(issue, handle):
    if isinstance(issue.instruction, Receive) or issue.need is not None:
        return issue
    return Issue(
        rank=issue.rank,
        stream=issue.stream,
        instruction=issue.instruction,
        group=issue.group,
        waits=(*issue.waits, handle),
        watched=issue.watched,
        abandonable=issue.abandonable,
    )
