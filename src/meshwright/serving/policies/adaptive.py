"""Meshwright's own policy: deferred batches whose settings follow what arrives.

No setting of `deferred` is best everywhere: waiting pays where batches are strong and devices many, and costs where
bursts come or many models share few devices; dropping first requests for the sake of large batches is all that helps
under overload, and wasteful elsewhere. This policy sees nothing but arrivals. While requests are lost, it asks every
candidate of `CANDIDATES` the same question for a while, a **trial**: starting from the queues and devices as they are,
what would it have done with the requests that have come since? Each has a **shadow**, a copy of the pool whose devices
are virtual and take what real ones take in the mean. The candidate that serves most is used from then on. A trial ends
early if another one has served so many more than the one in use that this is not by chance, or if many are lost in any
case and one that refuses early can be used instead. After a trial, the next one begins later, unless clearly more is
lost than its choice lost in it: some settings do well only until devices have fallen out of step once. While nothing is
lost, there is no trial, so that a quiet server pays nothing for it.

Scores are sums over trials, older ones counting `_MEMORY` times less each. A candidate that refuses early is preferred
to others that serve about as much, since whoever is refused early can ask elsewhere; but only a little more may be lost
than the others lose, so that a server which can answer almost all requests does so.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from meshwright.compiled import compiled
from meshwright.serving.policies.deferred import admit_request, settle, use_device
from meshwright.serving.policies.heaps import cells_of_heap, first_of, is_in, lay_heap, least_of, put, take_out
from meshwright.serving.policies.pool import (
    DEADLINE,
    DECISION,
    END,
    HEAD,
    MASK,
    NEVER,
    NUM_DECISIONS,
    NUM_DEVICES,
    NUM_DROPPED,
    NUM_MODELS,
    NUM_QUEUED,
    NUM_QUEUES,
    OWN,
    REQUEST,
    RUN,
    SLO,
    START,
    TAIL,
    TIMER,
    WIDTH,
    Ints,
    allocate_pool,
)
from meshwright.serving.policies.queues import clear
from meshwright.serving.policies.slowness import observe, observe_virtual, virtual_end

# Settings (spare, window, admit) of `Deferred`; the first one is where the policy begins. Those that refuse early admit
# by 98 % of the work: with 100 %, 1 % fewer are served under three times the load of two devices, and with 95 % nearly
# three times as many refusals come late (benchmarks/serving.py --only refusing).
CANDIDATES = np.array(
    [
        (50, 100, 0),
        (50, 75, 0),
        (50, 50, 0),
        (0, 100, 0),
        (0, 75, 0),
        (0, 50, 0),
        (0, 0, 0),
        (101, 100, 0),
        (50, 100, 98),
        (0, 100, 98),
        (101, 100, 98),
    ],
    np.int64,
)
NUM_CANDIDATES = len(CANDIDATES)

# Own cells: what is used; is this a trial, when is it looked at next, when did it begin, and does it, or the rest after
# it, end; of a thousand requests, how many its choice lost in it; requests that came in this span, and were dropped
# before it; those that were lost in trials whatever was used, summed as scores are; from here on the score of each
# candidate, then what it has served in this trial, then the shadows.
USED, IN_TRIAL, UNTIL, BEGUN, END_AT, PROMISED, ARRIVED, DROPPED, LOST, SCORES = range(10)
_SERVED = SCORES + NUM_CANDIDATES
_SHADOWS = _SERVED + NUM_CANDIDATES

# A trial begins if so many of a thousand requests are lost; in the rest after another one, if so many more are than its
# choice had lost, and not by chance.
_SOME_LOST, _BROKEN = 1, 5
_MEMORY = 0.5
# How many standard deviations (of a Poisson number) are not by chance.
_CLEAR = 3
# What is used stays in use unless another serves so many of a thousand more; what refuses early may serve so many less,
# or so many while such a one is in use, and lose one more for so many that are lost in any case. In a trial
# that begins when a device is late, refusing early serves up to 5 % less (own simulation 2026-11-25; strong batches).
_LOYAL, _EARLY, _STILL_EARLY, _LOST_ANYWAY = 3, 20, 50, 10


class Adaptive(NamedTuple):
    """Settings: a ``trial`` takes up to so many SLOs of the slowest model, and the rest after it twice its time."""

    trial: int = 40

    def prepare(self, facts: dict[str, Any]) -> Ints:
        """A pool with cells for scores and for a shadow of each candidate."""
        size = len(allocate_pool(**facts)) + cells_of_heap(facts["num_devices"])
        return allocate_pool(**facts, num_own=_SHADOWS + NUM_CANDIDATES * size, keep_ends=True)

    def arrive(self, pool: Ints, now: int, queue: int, request: int, deadline: int) -> None:
        """As `Deferred` with the settings in use; in a trial, all shadows get the request, too."""
        own = pool[OWN]
        if now >= pool[own + UNTIL]:
            _turn(pool, now, self.trial)
        pool[own + ARRIVED] += 1
        if pool[own + IN_TRIAL]:
            for candidate in range(NUM_CANDIDATES):
                shadow = shadow_of(pool, candidate)
                spare, window, admit = CANDIDATES[candidate]
                served = advance(shadow, now, spare, window)
                admit_request(shadow, now, queue, request, deadline, spare, window, admit)
                pool[own + _SERVED + candidate] += served + _count(shadow)
        spare, window, admit = CANDIDATES[pool[own + USED]]
        admit_request(pool, now, queue, request, deadline, spare, window, admit)

    def free(self, pool: Ints, now: int, device: int) -> None:
        """As `Deferred`."""
        spare, window, _ = CANDIDATES[pool[pool[OWN] + USED]]
        observe(pool, now, device)
        use_device(pool, now, device, spare, window)

    def wake(self, pool: Ints, now: int) -> None:
        """As `Deferred`."""
        if least_of(pool, TIMER, NEVER) <= now:
            spare, window, _ = CANDIDATES[pool[pool[OWN] + USED]]
            settle(pool, now, first_of(pool, TIMER), spare, window)

    def next_wake(self, pool: Ints) -> int:
        """As `Deferred`."""
        return least_of(pool, TIMER, NEVER)


@compiled
def shadow_of(pool: Ints, candidate: int) -> Ints:
    """The shadow of a candidate: a pool in this one's own cells; its own are a heap of the ends of virtual batches."""
    size = pool[OWN] + cells_of_heap(pool[NUM_DEVICES])
    first = pool[OWN] + _SHADOWS + candidate * size
    return pool[first : first + size]


@compiled
def advance(shadow: Ints, now: int, spare: int, window: int) -> int:
    """Let all happen on virtual devices that happens until now; how many requests were put to work."""
    served = 0
    while True:
        ends = shadow[OWN]
        end, timer = least_of(shadow, ends, NEVER), least_of(shadow, TIMER, NEVER)
        moment = min(end, timer)
        if moment > now:
            return served
        if end <= timer:
            device = first_of(shadow, ends)
            take_out(shadow, ends, device)
            observe_virtual(shadow, end, device)
            use_device(shadow, end, device, spare, window)
        else:
            settle(shadow, timer, first_of(shadow, TIMER), spare, window)
        served += _count(shadow)


@compiled
def _count(shadow: Ints) -> int:
    """Requests that the last decisions put to work, which are all in time; virtual devices have them now."""
    served = 0
    for decision in range(shadow[NUM_DECISIONS]):
        row = shadow[DECISION] + decision * WIDTH
        if shadow[row] == RUN:
            put(shadow, shadow[OWN], shadow[row + 1], virtual_end(shadow, shadow[row + 1]))
            served += shadow[row + 4]
    clear(shadow)
    return served


@compiled
def _turn(pool: Ints, now: int, trial: int) -> None:
    """A span of watching, resting or trial is over: what comes next?"""
    own, longest = pool[OWN], 0
    for model in range(pool[NUM_MODELS]):
        longest = max(longest, pool[pool[SLO] + model])
    trial = min(trial, NEVER // (4 * longest))
    if pool[own + IN_TRIAL]:
        if now < pool[own + END_AT] and not _is_clear(pool):
            pool[own + UNTIL] = min(now + trial * longest // 4, pool[own + END_AT])
            return
        _choose(pool)
        pool[own + IN_TRIAL] = 0
        # Nobody looks while nothing comes: what passes after the end belongs to no trial.
        rest = 2 * (min(now, pool[own + END_AT]) - pool[own + BEGUN])
        pool[own + END_AT], pool[own + UNTIL] = now + rest, now + trial * longest // 4
    elif _is_worth_a_trial(pool, now):
        for candidate in range(NUM_CANDIDATES):
            _copy(pool, shadow_of(pool, candidate), now)
            pool[own + _SERVED + candidate] = 0
        pool[own + IN_TRIAL], pool[own + BEGUN] = 1, now
        pool[own + UNTIL], pool[own + END_AT] = now + trial * longest // 4, now + trial * longest
    else:
        pool[own + UNTIL] = now + trial * longest // 4
    pool[own + ARRIVED] = 0
    pool[own + DROPPED] = pool[NUM_DROPPED]


@compiled
def _is_worth_a_trial(pool: Ints, now: int) -> bool:
    """Are requests lost, and is there no rest, or what the last trial has promised not kept?"""
    own = pool[OWN]
    came, lost = pool[own + ARRIVED], pool[NUM_DROPPED] - pool[own + DROPPED]
    if now >= pool[own + END_AT]:
        return bool(1000 * lost > _SOME_LOST * came)
    expected = (pool[own + PROMISED] + _BROKEN) * came / 1000
    return bool(lost > expected + _CLEAR * np.sqrt(expected))


@compiled
def _copy(pool: Ints, shadow: Ints, now: int) -> None:
    """Make a shadow what the pool is; of the room for requests, what is in use, as most of it never is."""
    shadow[: pool[DEADLINE]] = pool[: pool[DEADLINE]]
    for queue in range(pool[NUM_QUEUES]):
        start, mask = pool[pool[START] + queue], pool[pool[MASK] + queue]
        for place in range(pool[pool[HEAD] + queue], pool[pool[TAIL] + queue]):
            at = start + (place & mask)
            shadow[pool[DEADLINE] + at] = pool[pool[DEADLINE] + at]
            shadow[pool[REQUEST] + at] = pool[pool[REQUEST] + at]
    lay_heap(shadow, shadow[OWN], shadow[NUM_DEVICES])
    for device in range(shadow[NUM_DEVICES]):
        if is_in(shadow, END, device):
            put(shadow, shadow[OWN], device, max(virtual_end(shadow, device), now))
    clear(shadow)


@compiled
def _is_clear(pool: Ints) -> bool:
    """Has another candidate served more than the one in use could have, even had it served all that waits?

    Or are many lost in any case, and could a candidate that refuses early take the place of one that does not?
    """
    own = pool[OWN]
    used, served = pool[own + USED], pool[own + _SERVED : own + _SERVED + NUM_CANDIDATES]
    by_chance = int(_CLEAR * np.sqrt(pool[own + ARRIVED]))
    if served.max() > served[used] + shadow_of(pool, used)[NUM_QUEUED] + by_chance:
        return True
    lost = _lost_anyway(pool)
    return bool(lost > by_chance and CANDIDATES[_best_of(served, lost, used), 2] > CANDIDATES[used, 2])


@compiled
def _lost_by(pool: Ints, candidate: int) -> int:
    """Requests that a candidate has lost in this trial."""
    return int(shadow_of(pool, candidate)[NUM_DROPPED] - pool[pool[OWN] + DROPPED])


@compiled
def _lost_anyway(pool: Ints) -> int:
    """Requests of this trial that are lost whatever is used."""
    least = _lost_by(pool, 0)
    for candidate in range(1, NUM_CANDIDATES):
        least = min(least, _lost_by(pool, candidate))
    return least


@compiled
def _choose(pool: Ints) -> None:
    """Add the trial to the scores, and use the candidate that is best by them."""
    own = pool[OWN]
    pool[own + LOST] = int(_MEMORY * pool[own + LOST]) + _lost_anyway(pool)
    for candidate in range(NUM_CANDIDATES):
        score = own + SCORES + candidate
        pool[score] = int(_MEMORY * pool[score]) + pool[own + _SERVED + candidate]
    scores = pool[own + SCORES : own + SCORES + NUM_CANDIDATES]
    pool[own + USED] = _best_of(scores, pool[own + LOST], pool[own + USED])
    pool[own + PROMISED] = 1000 * _lost_by(pool, pool[own + USED]) // max(pool[own + ARRIVED], 1)


@compiled
def _best_of(scores: Ints, lost: int, used: int) -> int:
    """The candidate to use in the place of one, by what each has served while so many were lost in any case."""
    most = scores.max()
    less = most - scores
    allowed = (_EARLY if CANDIDATES[used, 2] == 0 else _STILL_EARLY) * most
    among = (CANDIDATES[:, 2] > 0) & (1000 * less <= allowed) & (_LOST_ANYWAY * less <= lost)
    if not among.any():
        among[:] = True
    best = int(np.where(among, scores, -1).argmax())
    return used if among[used] and 1000 * scores[used] >= (1000 - _LOYAL) * scores[best] else best
