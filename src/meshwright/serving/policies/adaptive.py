"""Meshwright's own policy: deferred batches whose settings adapt to the arrivals.

No setting of `deferred` is best everywhere: waiting pays where batches are efficient and devices many, and costs where
bursts come or many models share few devices; dropping first requests in favour of large batches is the only help under
overload, and wasteful elsewhere. This policy needs only the arrivals. While requests are lost, it evaluates every
candidate of `CANDIDATES` for a while, in a **trial**: starting from the current queues and devices, how many of the
requests since then would it have served? Each candidate has a **shadow**, a copy of the pool whose devices are virtual:
their batches take the mean times of the real devices. The candidate that serves most is used afterwards. A trial ends
early if another candidate has served significantly more than the one in use, or if many requests are lost under every
candidate and one that refuses requests on arrival (``admit``) can be used instead. The next trial starts after a rest,
or earlier if significantly more requests are lost than the chosen candidate lost in the trial: some settings do well
only until the devices are no longer staggered. While no requests are lost, no trial starts, so that a lightly loaded
server has no extra cost.

Scores are sums over trials; each trial multiplies the earlier sum by `_MEMORY`. A candidate that refuses requests on
arrival is preferred to others that serve about the same number, since a client that is refused early can ask elsewhere.
But it may lose only slightly more than the others, so that a server which can answer almost all requests does so.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from meshwright.compiled import compiled
from meshwright.serving.policies.deferred import admit_request, settle, use_device
from meshwright.serving.policies.ordering import observe, observe_virtual, virtual_end
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
from meshwright.serving.policies.queues import cells_of_heap, clear, first_of, is_in, lay_heap, least_of, put, take_out

# Settings (spare, window, admit) of `Deferred`; the policy starts with the first. Those that refuse early admit by 98 %
# of the work: with 100 %, 1 % fewer are served under three times the load of two devices, and with 95 % the
# number of late refusals nearly triples (benchmarks/serving.py --only refusing).
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

# Own cells: the candidate in use; whether this is a trial, when to check it next, when it started, and when it, or the
# rest after it, ends; the requests that the chosen candidate lost in it, per thousand; requests that arrived in this
# span, and those dropped before it; requests lost in trials under every candidate, discounted like scores; then the
# score of each candidate, what each has served in this trial, and the shadows.
USED, IN_TRIAL, UNTIL, BEGUN, END_AT, PROMISED, ARRIVED, DROPPED, LOST, SCORES = range(10)
_SERVED = SCORES + NUM_CANDIDATES
_SHADOWS = _SERVED + NUM_CANDIDATES

# Requests lost per thousand at which a trial starts; in the rest after a trial, requests lost per thousand beyond what
# the chosen candidate lost in it (and beyond chance) that start the next one.
_SOME_LOST, _BROKEN = 1, 5
_MEMORY = 0.5
# Standard deviations (of a Poisson number) that count as significant.
_CLEAR = 3
# Thresholds, in requests per thousand: a candidate in use is replaced only if another one serves _LOYAL more; one that
# refuses early may serve _EARLY fewer, or _STILL_EARLY while one that does so is in use, and may lose one more for each
# _LOST_ANYWAY requests lost under every candidate. In a trial that starts when a device is late, refusing early
# serves up to 5 % less (own simulation 2026-11-25; strong batches).
_LOYAL, _EARLY, _STILL_EARLY, _LOST_ANYWAY = 3, 20, 50, 10


class Adaptive(NamedTuple):
    """The adaptive policy. ``trial``: the longest time of a trial, in multiples of the longest SLO of all models.

    The rest after a trial is twice as long as the trial.
    """

    trial: int = 40

    def prepare(self, facts: dict[str, Any]) -> Ints:
        """Return a pool with cells for scores and for a shadow of each candidate."""
        size = len(allocate_pool(**facts)) + cells_of_heap(facts["num_devices"])
        return allocate_pool(**facts, num_own=_SHADOWS + NUM_CANDIDATES * size, keep_ends=True)

    def arrive(self, pool: Ints, now: int, queue: int, request: int, deadline: int) -> None:
        """Enqueue the request as `Deferred` with the settings in use; in a trial, every shadow receives it, too."""
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
        """Run a queue on the idle device as `Deferred` with the settings in use."""
        spare, window, _ = CANDIDATES[pool[pool[OWN] + USED]]
        observe(pool, now, device)
        use_device(pool, now, device, spare, window)

    def wake(self, pool: Ints, now: int) -> None:
        """Handle the start of a window, or a request that is lost, as `Deferred`."""
        if least_of(pool, TIMER, NEVER) <= now:
            spare, window, _ = CANDIDATES[pool[pool[OWN] + USED]]
            settle(pool, now, first_of(pool, TIMER), spare, window)

    def next_wake(self, pool: Ints) -> int:
        """Return when (ns) the next window starts, or the next request is lost."""
        return least_of(pool, TIMER, NEVER)


@compiled
def shadow_of(pool: Ints, candidate: int) -> Ints:
    """Return the shadow of a candidate: a pool within the policy's own cells.

    The shadow's own cells hold a heap of the ends of virtual batches.
    """
    size = pool[OWN] + cells_of_heap(pool[NUM_DEVICES])
    first = pool[OWN] + _SHADOWS + candidate * size
    return pool[first : first + size]


@compiled
def advance(shadow: Ints, now: int, spare: int, window: int) -> int:
    """Process all events of a shadow's virtual devices until ``now``; return how many requests their batches have."""
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
    """Start the batches decided last on the virtual devices; return their number of requests, which are all in time."""
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
    """End a span of watching, rest or trial, and start the next one."""
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
        # Nothing is checked while nothing arrives: time after the planned end is not part of the trial.
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
    """Return whether requests are lost after the rest, or during it clearly more than in the trial before."""
    own = pool[OWN]
    came, lost = pool[own + ARRIVED], pool[NUM_DROPPED] - pool[own + DROPPED]
    if now >= pool[own + END_AT]:
        return bool(1000 * lost > _SOME_LOST * came)
    expected = (pool[own + PROMISED] + _BROKEN) * came / 1000
    return bool(lost > expected + _CLEAR * np.sqrt(expected))


@compiled
def _copy(pool: Ints, shadow: Ints, now: int) -> None:
    """Make a shadow a copy of the pool; of the queues' cells, copy only those in use, as most are not."""
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
    """Return whether another candidate has served more than the one in use could have, had it served all its queues.

    Also true if many are lost under every candidate, and one that refuses early could replace one that does not.
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
    """Return the requests that a candidate has lost in this trial."""
    return int(shadow_of(pool, candidate)[NUM_DROPPED] - pool[pool[OWN] + DROPPED])


@compiled
def _lost_anyway(pool: Ints) -> int:
    """Return the requests of this trial that are lost under every candidate."""
    least = _lost_by(pool, 0)
    for candidate in range(1, NUM_CANDIDATES):
        least = min(least, _lost_by(pool, candidate))
    return least


@compiled
def _choose(pool: Ints) -> None:
    """Add the trial to the scores, and use the best candidate by them."""
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
    """Return the candidate to use in place of ``used``, by scores, if ``lost`` requests are lost under every one."""
    most = scores.max()
    less = most - scores
    allowed = (_EARLY if CANDIDATES[used, 2] == 0 else _STILL_EARLY) * most
    among = (CANDIDATES[:, 2] > 0) & (1000 * less <= allowed) & (_LOST_ANYWAY * less <= lost)
    if not among.any():
        among[:] = True
    best = int(np.where(among, scores, -1).argmax())
    return used if among[used] and 1000 * scores[used] >= (1000 - _LOYAL) * scores[best] else best
