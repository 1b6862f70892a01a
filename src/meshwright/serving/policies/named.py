"""Load a policy by a user's reference (`load_policy`); the policies that batch without deadlines: `Timeouts`, `Aimd`.

A reference is ``symphony``, ``timeouts:wait=10``, or ``mine.py:Class``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from meshwright.compiled import compiled
from meshwright.serving.policies.adaptive import Adaptive
from meshwright.serving.policies.clockwork import Clockwork
from meshwright.serving.policies.deferred import Deferred
from meshwright.serving.policies.hooks import Policy
from meshwright.serving.policies.nexus import Nexus
from meshwright.serving.policies.plain import PlainPolicy
from meshwright.serving.policies.pool import (
    DELAY,
    FREE_AT,
    HEAD,
    LATE,
    MODEL,
    MOST,
    NEVER,
    NUM_QUEUES,
    OWN,
    READY,
    REST,
    SLACK,
    SLO,
    TAIL,
    TIMER,
    Ints,
    allocate_pool,
)
from meshwright.serving.policies.queues import (
    deadline_at,
    drop,
    enter,
    first_of,
    idle_device,
    is_in,
    latency_of,
    least_of,
    length_of,
    put,
    rest,
    run,
    size_of,
    take_out,
)
from meshwright.serving.policies.sharding.policy import Sharded
from meshwright.serving.policies.shepherd import Shepherd
from meshwright.spec import ServingError, suggest
from meshwright.spec.own_code import load_function, split_reference


# Batching without deadlines, as in most servers. Requests are answered first come, first served; those whose deadline
# has passed are dropped when it is their turn. `Timeouts` (Triton, MLServer, Ray Serve) waits until ``preferred``
# requests wait, or the first one has waited for ``wait`` percent of its SLO; it then runs all waiting requests, up to
# ``most``. In Triton the two sizes are separate settings (preferred_batch_size and max_batch_size); in MLServer,
# LitServe and Ray Serve the size that triggers is also the largest: set ``most`` to ``preferred``. `Aimd` (Clipper,
# NSDI 2017, section 4.3.1) runs waiting requests up to a limit for each queue: a batch of that limit that took less
# than the SLO raises it by one, one that took longer lowers it by a tenth.
class Timeouts(NamedTuple):
    """A batch starts when it is large enough, or when its first request has waited long enough.

    ``preferred``: requests in a batch (0: the number that takes half the SLO). ``wait``: percent of the SLO.
    ``most``: the largest batch (0: the model's).
    """

    preferred: int = 0
    wait: int = 25
    most: int = 0

    def arrive(self, pool: Ints, now: int, queue: int, request: int, deadline: int) -> None:
        """Enqueue the request; run its queue if that has enough requests now."""
        if enter(pool, now, queue, request, deadline):
            _see_to(pool, now, queue, self.preferred, self.wait, self.most)

    def free(self, pool: Ints, now: int, device: int) -> None:
        """Run the queue that has waited longest, among those that need not wait any more."""
        rest(pool, device)
        while size_of(pool, READY) > 0 and size_of(pool, REST) > 0:
            _see_to(pool, now, first_of(pool, READY), self.preferred, self.wait, self.most)

    def wake(self, pool: Ints, now: int) -> None:
        """Run a queue whose first request has waited long enough."""
        if least_of(pool, TIMER, NEVER) <= now:
            _see_to(pool, now, first_of(pool, TIMER), self.preferred, self.wait, self.most)

    def next_wake(self, pool: Ints) -> int:
        """Return when (ns) the first request of any queue has waited long enough."""
        return least_of(pool, TIMER, NEVER)


class Aimd(NamedTuple):
    """Batches up to a learned limit: additive increase, multiplicative decrease (Clipper).

    ``start``: the limit of every queue at the start.
    """

    start: int = 1

    def prepare(self, facts: dict[str, Any]) -> Ints:
        """Return a pool with a limit for each queue, in thousandths, and for each device its queue, batch and start."""
        num_queues = len(facts["latency"])
        pool = allocate_pool(**facts, num_own=num_queues + 3 * facts["num_devices"])
        pool[pool[OWN] : pool[OWN] + num_queues] = 1000 * self.start
        return pool

    def arrive(self, pool: Ints, now: int, queue: int, request: int, deadline: int) -> None:
        """Enqueue the request; an idle device runs it at once."""
        if enter(pool, now, queue, request, deadline):
            put(pool, READY, queue, deadline_at(pool, queue, pool[pool[HEAD] + queue]))
            _run_limited(pool, now)

    def free(self, pool: Ints, now: int, device: int) -> None:
        """Adapt the limit to the time of the batch that has ended; run the queue that has waited longest."""
        _learn(pool, now, device)
        rest(pool, device)
        _run_limited(pool, now)

    def wake(self, pool: Ints, now: int) -> None:
        """Do nothing: no timer is used."""

    def next_wake(self, pool: Ints) -> int:
        """Return `NEVER`: no timer is used."""
        return NEVER


@compiled
def _drop_passed(pool: Ints, now: int, queue: int) -> None:
    head, tail = pool[pool[HEAD] + queue], pool[pool[TAIL] + queue]
    at = head
    while at < tail and deadline_at(pool, queue, at) + pool[SLACK] < now:
        at += 1
    drop(pool, now, queue, at - head, LATE)


@compiled
def _see_to(pool: Ints, now: int, queue: int, preferred: int, wait: int, largest: int) -> None:
    while True:
        _drop_passed(pool, now, queue)
        length = length_of(pool, queue)
        if length == 0:
            take_out(pool, TIMER, queue)
            take_out(pool, READY, queue)
            return
        model = pool[pool[MODEL] + queue]
        slo, most = pool[pool[SLO] + model], pool[pool[MOST] + model]
        if largest > 0:
            most = min(most, largest)
        enough = min(preferred, most)
        if enough == 0:
            enough = most
            while enough > 1 and 2 * latency_of(pool, queue, enough) > slo:
                enough -= 1
        deadline = deadline_at(pool, queue, pool[pool[HEAD] + queue]) + pool[SLACK]
        waited = deadline - slo + min(wait, NEVER // slo) * slo // 100
        if not (is_in(pool, READY, queue) or length >= enough or waited <= now):
            put(pool, TIMER, queue, waited)
            return
        take_out(pool, TIMER, queue)
        if size_of(pool, REST) == 0:
            put(pool, READY, queue, deadline)
            return
        take_out(pool, READY, queue)
        run(pool, now, queue, min(length, most), idle_device(pool))


@compiled
def _run_limited(pool: Ints, now: int) -> None:
    while size_of(pool, READY) > 0 and size_of(pool, REST) > 0:
        queue = first_of(pool, READY)
        _drop_passed(pool, now, queue)
        length = length_of(pool, queue)
        if length > 0:
            limit = max(pool[pool[OWN] + queue] // 1000, 1)
            batch = min(length, limit, pool[pool[MOST] + pool[pool[MODEL] + queue]])
            device = idle_device(pool)
            own = pool[OWN] + pool[NUM_QUEUES] + 3 * device
            pool[own], pool[own + 1], pool[own + 2] = queue, batch, now
            run(pool, now, queue, batch, device)
        if length_of(pool, queue) > 0:
            put(pool, READY, queue, deadline_at(pool, queue, pool[pool[HEAD] + queue]))
        else:
            take_out(pool, READY, queue)


@compiled
def _learn(pool: Ints, now: int, device: int) -> None:
    own = pool[OWN] + pool[NUM_QUEUES] + 3 * device
    queue, batch, begin = pool[own], pool[own + 1], pool[own + 2]
    pool[own + 1] = 0
    # The end differs if the device has failed or slowed down since: its batch says nothing about the limit.
    if pool[pool[FREE_AT] + device] != begin + pool[DELAY] + latency_of(pool, queue, batch):
        return
    limit = pool[OWN] + queue
    if batch > 0 and now - begin > pool[pool[SLO] + pool[pool[MODEL] + queue]]:
        pool[limit] = max(pool[limit] * 9 // 10, 1000)
    elif batch >= pool[limit] // 1000 and batch > 0:
        pool[limit] += 1000


_POLICIES: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "adaptive": (Adaptive, {}),
    "symphony": (Deferred, {"spare": 101, "window": 100}),
    "sharded": (Sharded, {}),
    "eager": (Deferred, {"spare": 0, "window": 0}),
    "deferred": (Deferred, {}),
    "nexus": (Nexus, {}),
    "clockwork": (Clockwork, {}),
    "shepherd": (Shepherd, {}),
    "timeouts": (Timeouts, {}),
    "aimd": (Aimd, {}),
}
POLICY_NAMES = tuple(_POLICIES)
_LARGEST_SETTING = 10**9


def load_policy(reference: str) -> Policy:
    """Return a policy by reference: NAME, NAME:SETTING=NUMBER,… or path/to/file.py:CLASS. Raises ServingError."""
    own = split_reference(reference)
    if own is not None:
        path, name = own
        made = load_function(path, name, expected="makes a policy", error=ServingError)
        return PlainPolicy(made, path)
    name, _, text = reference.partition(":")
    if name not in _POLICIES:
        raise ServingError(
            f"There is no policy {name!r}{suggest(name, _POLICIES)}. Give one of {', '.join(_POLICIES)}, or your own: "
            "path/to/file.py:Class."
        )
    kind, settings = _POLICIES[name]
    policy: Policy = kind(**settings | _read_settings(reference, kind, text))
    return policy


def _read_settings(reference: str, kind: Callable[..., Any], text: str) -> dict[str, int]:
    known = list(inspect.signature(kind).parameters)
    settings: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        key, separator, value = part.partition("=")
        if key not in known:
            raise ServingError(
                f"Policy {reference!r} has no setting {key!r}{suggest(key, known)}. Its settings are "
                f"{', '.join(known)}."
            )
        if key in settings:
            raise ServingError(f"Policy {reference!r} has {key!r} twice. Give it once.")
        # Python refuses to parse integers of several thousand digits.
        if not separator or not value.isdecimal() or len(value) > 100 or int(value) > _LARGEST_SETTING:
            raise ServingError(
                f"Policy {reference!r}: {part!r} is not a setting; expected {key}=NUMBER, an integer from 0 to 10^9."
            )
        settings[key] = int(value)
    return settings
