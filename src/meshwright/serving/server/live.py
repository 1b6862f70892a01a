"""A policy on the real clock: it takes rows of events and returns rows of decisions; both can be logged.

    ARRIVE   queue, request, deadline    a request has arrived; it may include a level (`ordering`)
    AGAIN    queue, request, deadline    an earlier request is resubmitted
    FREE     device, queue, count, ns    a device has ended a batch after ``ns``; its next batch, if any, has ``count``
                                         requests of ``queue``, and starts (``count`` 0: no batch)
    CANCEL   queue, request, deadline    the client of a request has disconnected
    UP       device, batches, begin, end a device can be used; it may have one or two batches already, which take from
                                         ``begin`` to ``end``
    DOWN     device                      a device can no longer be used; further events resubmit its requests
    ADJUST   number, value               a number of the pool has a new measured value (`DELAY`, `SLACK`, `GUARD`)
    WAKE                                 a moment has come that the policy asked for
    SCALE    devices                     decide how many devices are wanted (`policies.autoscaling`); ``devices`` is
                                         their current number

Each row starts with its kind and its time (ns). Policies are the functions that the simulator calls
(`policies.pool`). A log has the events and the decisions of each call (`decision_log`). `replay` passes the logged
events to the same policy again, which must make the same decisions. When models are added or removed, the policy is
restarted in the same log, with the earlier measurements.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from meshwright.compiled import compiled, uncompiled
from meshwright.serving.policies.autoscaling import (
    DROPPED,
    MAXIMUM,
    WANTED,
    allocate_scaler,
    carry_scaler,
    note_arrival,
    wanted_devices,
)
from meshwright.serving.policies.hooks import arrive, free, next_wake, wake
from meshwright.serving.policies.named import load_policy
from meshwright.serving.policies.ordering import numbers_of
from meshwright.serving.policies.plain import PlainPolicy
from meshwright.serving.policies.pool import (
    BEGAN,
    CHOSEN,
    DEADLINE,
    DECISION,
    DELAY,
    END,
    FREE_AT,
    GUARD,
    HEAD,
    KEEPS_ENDS,
    MASK,
    MODEL,
    NEXT,
    NUM_CHOSEN,
    NUM_DECISIONS,
    NUM_DEVICES,
    NUM_MODELS,
    NUM_QUEUED,
    NUM_QUEUES,
    OWN,
    REQUEST,
    SLACK,
    START,
    TAIL,
    TYPICAL,
    WIDTH,
    Ints,
    columns,
    pool_for,
)
from meshwright.serving.policies.queues import begin_waiting, cancel, clear, come_up, end_batch, go_down, put, resize
from meshwright.serving.server.decision_log import ANEW, LOG_KIND, DecisionWriter
from meshwright.serving.server.recording import Recording

ARRIVE, FREE, CANCEL, UP, DOWN, ADJUST, WAKE, SCALE, AGAIN = range(9)
EVENT_WIDTH = 6

# Measurements that stay valid in a new pool.
_MEASURED_NUMBERS = (DELAY, SLACK, GUARD, TYPICAL)
_MEASURED_OF_DEVICES = ("slowness", "usual", "mean", "steady")
_MEASURED_OF_MODELS = ("count", "since", "rate", "target")


class Live:
    """A policy and its pool (an array with its whole state); takes events and returns decisions.

    Events and decisions are written to ``log``, if given. ``facts`` are the arguments of `allocate_pool`, with lists
    for arrays. ``numbers[i]`` is the number of the model with index i in the pool (by default i). ``scaling`` has the
    arguments of `allocate_scaler`, if the number of devices is decided, too. The measurements of ``before``, the object
    that this one replaces, are kept.
    """

    def __init__(
        self,
        reference: str,
        facts: dict[str, Any],
        log: DecisionWriter | None = None,
        *,
        numbers: list[int] | None = None,
        scaling: dict[str, Any] | None = None,
        before: Live | None = None,
    ) -> None:
        self.policy: Any = load_policy(reference)
        self.pool: Ints = pool_for(
            self.policy,
            {key: np.array(value, np.int64) if isinstance(value, list) else value for key, value in facts.items()},
        )
        # An empty scaler decides nothing.
        self._scaler: Ints = np.zeros(0, np.int64)
        if scaling is not None:
            self._scaler = allocate_scaler(len(facts["slo"]), **scaling)
        self._numbers = list(range(len(facts["slo"]))) if numbers is None else numbers
        # A frontend may still refer to a model that has left.
        highest = max(*self._numbers, 0 if before is None else len(before._places) - 1)
        self._places: Ints = np.full(highest + 1, -1, np.int64)
        self._places[self._numbers] = np.arange(len(self._numbers))
        measured = {} if before is None else before._measured(self)
        self.know(measured)
        self._take, self._next = take_events, _next_moment
        if isinstance(self.policy, PlainPolicy):
            self.policy.begin_again()
            self._take, self._next = uncompiled(globals(), "take_events"), uncompiled(globals(), "_next_moment")
        # Compile, or load, before there is anything to do.
        self._take(self.policy, self.pool, self._scaler, np.zeros((0, EVENT_WIDTH), np.int64), 0)
        self._next(self.policy, self.pool)
        clear(self.pool)
        self.recording: Recording | None = None if before is None else before.recording
        self._log = log
        if log is not None:
            if before is not None:
                log.write(ANEW)
            header = {"kind": LOG_KIND, "policy": reference, "facts": facts, "scaling": scaling, "measured": measured}
            log.write(json.dumps(header).encode() + b"\n")

    @property
    def scaler_size(self) -> int:
        """Number of cells of the scaler's array; 0 without scaling."""
        return len(self._scaler)

    def know(self, measured: dict[str, list[int]]) -> None:
        """Restore measurements, by name: ``numbers`` of the pool, the ``scaler``, and columns of the pool.

        -1 in a column stands for an unknown value, which is not restored.
        """
        for number, value in zip(_MEASURED_NUMBERS, measured.get("numbers", []), strict=False):
            self.pool[number] = value
        self._scaler[: len(measured.get("scaler", []))] = measured.get("scaler", [])
        for name, values in measured.items():
            if name not in ("numbers", "scaler"):
                column, found = columns(self.pool)[name], np.array(values, np.int64)
                column[found >= 0] = found[found >= 0]

    def _measured(self, after: Live) -> dict[str, list[int]]:
        """Return the measurements of devices and of the models of ``after``, in the form that `know` takes."""
        pool, mine = self.pool, columns(self.pool)
        found = {"numbers": [int(pool[number]) for number in _MEASURED_NUMBERS]}
        found |= {name: mine[name].tolist() for name in _MEASURED_OF_DEVICES}
        old = {number: place for place, number in enumerate(self._numbers)}
        places = [old.get(number, -1) for number in after._numbers]
        if pool[NUM_QUEUES] == pool[NUM_MODELS]:
            for name in _MEASURED_OF_MODELS:
                found[name] = [int(mine[name][place]) if place >= 0 else -1 for place in places]
        if len(self._scaler):
            scaler = after._scaler.copy()
            carry_scaler(scaler, self._scaler, places)
            # The new pool counts drops from 0.
            scaler[DROPPED] = 0
            found["scaler"] = scaler.tolist()
        return found

    def take(self, events: Ints) -> list[tuple[Ints, Ints]]:
        """Pass event rows to the policy; return pairs of decision rows and the requests that these rows choose."""
        at, pool = 0, self.pool
        taken: list[tuple[Ints, Ints]] = []
        while at < len(events):
            at = int(self._take(self.policy, pool, self._scaler, events, at))
            count, chosen = int(pool[NUM_DECISIONS]), int(pool[NUM_CHOSEN])
            row, first = int(pool[DECISION]), int(pool[CHOSEN])
            if count:
                decisions = pool[row : row + count * WIDTH].reshape(-1, WIDTH).copy()
                taken.append((decisions, numbers_of(pool[first : first + chosen])))
                clear(pool)
        if self.recording is not None:
            self.recording.rows_of_decisions(self._with_numbers(events), taken, self.number_of)
        if self._log is not None:
            decisions, requests = joined(taken)
            sizes = np.array([len(events), len(decisions), len(requests)], np.int64)
            self._log.writelines(part.tobytes() for part in (sizes, events, decisions, requests))
        return taken

    def number_of(self, queue: int) -> int:
        """Return the number of the model whose requests a queue holds."""
        return self._numbers[int(self.pool[self.pool[MODEL] + queue])]

    def place_of(self, number: int) -> int:
        """Return the index in the pool of a model, given by number."""
        return int(self._places[number])

    def places_of(self, numbers: Ints) -> Ints:
        """Return the indices in the pool of models, given by number; -1 for removed models."""
        return self._places[numbers]

    def _with_numbers(self, events: Ints) -> Ints:
        """Return events with model numbers in place of places."""
        told, is_of_model = events.copy(), np.isin(events[:, 0], (ARRIVE, AGAIN, CANCEL))
        told[is_of_model, 2] = np.array(self._numbers)[events[is_of_model, 2]]
        told[is_of_model, 3] = numbers_of(events[is_of_model, 3])
        return told

    def waiting(self) -> Iterator[tuple[int, int, int]]:
        """Yield (model number, request as submitted, deadline in ns) of all waiting requests."""
        pool = self.pool
        for queue in range(int(pool[NUM_QUEUES])):
            head, tail = int(pool[pool[HEAD] + queue]), int(pool[pool[TAIL] + queue])
            at = pool[pool[START] + queue] + (np.arange(head, tail) & pool[pool[MASK] + queue])
            requests, deadlines = pool[pool[REQUEST] + at].tolist(), pool[pool[DEADLINE] + at].tolist()
            for request, deadline in zip(requests, deadlines, strict=True):
                yield self.number_of(queue), request, deadline

    @property
    def next_moment(self) -> int:
        """Time (ns) of the policy's next wake-up; `NEVER` if it needs none."""
        return int(self._next(self.policy, self.pool))


def joined(taken: list[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    """Return all decision rows of a call of `Live.take` as one array, and all requests that they choose as another."""
    decisions = [np.zeros((0, WIDTH), np.int64), *(rows for rows, _ in taken)]
    return np.concatenate(decisions), np.concatenate([np.zeros(0, np.int64), *(chosen for _, chosen in taken)])


@compiled
def take_events(policy: Any, pool: Ints, scaler: Ints, events: Ints, at: int) -> int:
    """Pass event rows to a policy, from index ``at`` on; return the index of the first row that was not passed.

    Stops when the possible decisions of one more event may not fit into the pool; the caller then clears decisions.
    """
    while at < len(events) and _has_room(pool):
        now = events[at, 1]
        # A policy that repeatedly asks for the same moment gets at most one turn per queue and device.
        turns = pool[NUM_QUEUES] + pool[NUM_DEVICES] + 1
        while turns > 0 and next_wake(policy, pool) <= now and _has_room(pool):
            wake(policy, pool, now)
            turns -= 1
        if not _has_room(pool):
            return at
        _take_event(policy, pool, scaler, events[at])
        at += 1
    return at


@compiled
def _take_event(policy: Any, pool: Ints, scaler: Ints, event: Ints) -> None:
    kind, now, first, second, third, taken = event
    if kind in (ARRIVE, AGAIN):
        if len(scaler) > 0 and kind == ARRIVE:
            note_arrival(scaler, pool, now, first)
        arrive(policy, pool, now, first, second, third)
    elif kind == FREE:
        end_batch(pool, now, first, taken)
        if third > 0:
            begin_waiting(pool, second, third, first, now)
        free(policy, pool, now, first)
    elif kind == CANCEL:
        _cancel_of_model(pool, now, first, second, third)
    elif kind == UP:
        come_up(pool, first, now)
        if second == 0:
            free(policy, pool, now, first)
        else:
            _resume(pool, first, second, third, taken)
    elif kind == DOWN:
        go_down(pool, first)
    elif kind == ADJUST:
        pool[first] = second
    elif kind == SCALE:
        # The current number may be larger than known: devices of an earlier scheduler are not released needlessly.
        scaler[WANTED] = max(scaler[WANTED], min(first, scaler[MAXIMUM]))
        resize(pool, now, wanted_devices(scaler, pool, now))


@compiled
def _resume(pool: Ints, device: int, batches: int, begin: int, end: int) -> None:
    """Restore the batches of a device that has just come up with one or two batches."""
    pool[pool[NEXT] + device] = batches > 1
    pool[pool[BEGAN] + device] = begin
    pool[pool[FREE_AT] + device] = end
    if pool[KEEPS_ENDS]:
        put(pool, END, device, end)


@compiled
def _cancel_of_model(pool: Ints, now: int, model: int, request: int, deadline: int) -> None:
    """Take a request out of the queue that holds it."""
    for queue in range(pool[NUM_QUEUES]):
        if pool[pool[MODEL] + queue] == model and cancel(pool, now, queue, request, deadline):
            return


@compiled
def _has_room(pool: Ints) -> bool:
    """Return whether the decisions of one more event fit."""
    decisions = pool[NUM_DECISIONS] + 2 * pool[NUM_QUEUES] + 3 * pool[NUM_DEVICES] + 2
    chosen = pool[NUM_CHOSEN] + pool[NUM_QUEUED] + 2
    return bool(decisions * WIDTH <= pool[CHOSEN] - pool[DECISION] and chosen <= pool[OWN] - pool[CHOSEN])


@compiled
def _next_moment(policy: Any, pool: Ints) -> int:
    return next_wake(policy, pool)
