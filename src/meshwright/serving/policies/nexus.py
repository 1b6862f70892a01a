"""Nexus (SOSP 2019): a plan for each epoch assigns models to devices; requests and batches follow the plan.

Every ``epoch`` the measured rates are packed (`packing`). Until the next epoch, requests are distributed over the
devices of their model by the shares of the plan, and each device serves its models in turn: it drops first requests
until a batch of the planned size (or all waiting requests) is in time, and runs this batch. An epoch ends early, though
not before a third of it, if the rate of a model is outside 0.8 to 1.1 times the rate of the plan. The first plan
assumes equal rates, as rates are not known yet, and lasts a fifth of a second; each later epoch is five times as long
as the one before, up to ``epoch``.

Not implemented from the published system: pre- and post-processing; releasing devices, as all devices are used
(`packing.pack_all`); moving only the surplus of an overloaded device (by more than 1.05) to others, as each epoch packs
all models again; and backup models, which serve requests that a device of the plan cannot. If no packing exists even
for very low rates, models are assigned to devices in turn (`packing.spread`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.serving.policies.decisions import rows_left
from meshwright.serving.policies.meter import PER_NS, measure_rate
from meshwright.serving.policies.ordering import forget_levels
from meshwright.serving.policies.packing import BATCH, DEVICE_OF, MODEL_OF, SHARE, pack_all, spread
from meshwright.serving.policies.pool import (
    DEADLINE,
    DEVICE,
    DOWN,
    FULL,
    HEAD,
    IDLE,
    LATE,
    LATENCY,
    MASK,
    MODEL,
    MOST,
    NEVER,
    NUM_DEVICES,
    NUM_MODELS,
    NUM_QUEUED,
    NUM_QUEUES,
    OWN,
    RATE,
    REQUEST,
    ROW,
    SACRIFICED,
    SLO,
    START,
    TAIL,
    WORK,
    Ints,
    allocate_pool,
)
from meshwright.serving.policies.queues import (
    begin_on,
    drop,
    drop_late,
    enter,
    largest_batch,
    length_of,
    refuse,
    rest,
    run,
    skip_for,
)

# Own cells: end of the epoch, its earliest end, its length. Then columns: of models, their first place among all slots
# sorted by model, number of slots and planned rate; of devices, their first slot, number of slots and next slot; of
# slots (a model on a device, sorted by both) device, batch, share (per 2^40), credit, and all slots sorted by model.
# The queue of a slot is the number of models + its number.
_UNTIL, _EARLIEST, _LENGTH = range(3)
_FIRST = 3
_ONE = 2**40
# Rates, relative to the plan's, between which an epoch continues (Nexus's code).
_LEAST, _MOST = 0.8, 1.1
_SECOND = 1_000_000_000


class Nexus(NamedTuple):
    """The policy Nexus: devices and batch sizes are planned for an epoch. ``epoch``: its length in seconds."""

    epoch: int = 30

    def prepare(self, facts: dict[str, Any]) -> Ints:
        """Return a pool with cells for a plan, and a queue for each of its slots.

        A slot is a model on a device; a plan has at most as many as models and devices together.
        """
        num_models, num_devices = len(facts["latency"]), facts["num_devices"]
        num_slots = num_devices + num_models
        most = int(np.max(facts["capacity"]))
        of_queue = np.concatenate([np.arange(num_models), np.zeros(num_slots, np.int64)])
        capacity = np.concatenate([np.full(num_models, 2), np.full(num_slots, most)])
        own = _FIRST + 3 * num_models + 3 * num_devices + 5 * num_slots
        return allocate_pool(**{**facts, "capacity": capacity}, model_of_queue=of_queue, num_own=own)

    def arrive(self, pool: Ints, now: int, queue: int, request: int, deadline: int) -> None:
        """Assign the request to a device of its model, which runs it at once if it is idle."""
        measure_rate(pool, now, queue)
        own = pool[OWN]
        if now >= pool[own + _UNTIL] or (now >= pool[own + _EARLIEST] and _has_changed(pool, queue)):
            _begin_epoch(pool, now, self.epoch * _SECOND)
        _deal_out(pool, now, queue, request, deadline)

    def free(self, pool: Ints, now: int, device: int) -> None:
        """Run a batch of the device's next model."""
        rest(pool, device)
        _run_next(pool, now, device)

    def wake(self, pool: Ints, now: int) -> None:
        """Do nothing: no timer is used."""

    def next_wake(self, pool: Ints) -> int:
        """Return `NEVER`: epochs end at arrivals."""
        return NEVER


@compiled
def _models(pool: Ints, column: int) -> int:
    return pool[OWN] + _FIRST + column * pool[NUM_MODELS]


@compiled
def _devices(pool: Ints, column: int) -> int:
    return _models(pool, 3) + column * pool[NUM_DEVICES]


@compiled
def _slots(pool: Ints, column: int) -> int:
    return _devices(pool, 3) + column * (pool[NUM_MODELS] + pool[NUM_DEVICES])


@compiled
def _has_changed(pool: Ints, queue: int) -> bool:
    planned, measured = pool[_models(pool, 2) + queue], pool[pool[RATE] + queue]
    return measured < _LEAST * planned or measured > _MOST * planned


@compiled
def _deal_out(pool: Ints, now: int, model: int, request: int, deadline: int) -> None:
    """Choose a device by smooth weighted round robin over the devices of the model that are up."""
    first, best, most, total = pool[_models(pool, 0) + model], -1, 0, 0
    for place in range(first, first + pool[_models(pool, 1) + model]):
        slot = pool[_slots(pool, 4) + place]
        if pool[pool[DEVICE] + pool[_slots(pool, 0) + slot]] != DOWN:
            share = pool[_slots(pool, 2) + slot]
            total += share
            pool[_slots(pool, 3) + slot] += share
            if best < 0 or pool[_slots(pool, 3) + slot] > most:
                best, most = slot, pool[_slots(pool, 3) + slot]
    if best < 0:
        refuse(pool, now, model, request, LATE)
        return
    pool[_slots(pool, 3) + best] -= total
    if enter(pool, now, pool[NUM_MODELS] + best, request, deadline):
        device = pool[_slots(pool, 0) + best]
        if pool[pool[DEVICE] + device] == IDLE:
            _run_next(pool, now, device)


@compiled
def _run_next(pool: Ints, now: int, device: int) -> None:
    """Run the next of a device's models that has waiting requests."""
    first, count = pool[_devices(pool, 0) + device], pool[_devices(pool, 1) + device]
    begin = begin_on(pool, device, now)
    for turn in range(count):
        slot = first + (pool[_devices(pool, 2) + device] + turn) % count
        queue = pool[NUM_MODELS] + slot
        drop_late(pool, now, queue, begin)
        if length_of(pool, queue) > 0:
            batch = pool[_slots(pool, 1) + slot]
            drop(pool, now, queue, skip_for(pool, queue, begin, batch), SACRIFICED)
            run(pool, now, queue, min(largest_batch(pool, queue, begin), batch), device)
            pool[_devices(pool, 2) + device] = slot - first + 1
            return


@compiled
def _begin_epoch(pool: Ints, now: int, epoch: int) -> None:
    """Plan for the measured rates, and distribute waiting requests again."""
    own, num_models, num_devices = pool[OWN], pool[NUM_MODELS], pool[NUM_DEVICES]
    rates = np.zeros(num_models)
    for model in range(num_models):
        rates[model] = pool[pool[RATE] + model] * PER_NS
    is_first = pool[own + _UNTIL] == 0
    if is_first or rates.sum() <= 0.0:
        rates[:] = 1e-9
    table = np.zeros((num_models + num_devices, 6))
    latency = pool[pool[LATENCY] : pool[LATENCY] + num_models * pool[ROW]]
    most, slo = pool[pool[MOST] : pool[MOST] + num_models], pool[pool[SLO] : pool[SLO] + num_models]
    num_slots = pack_all(latency, pool[ROW], most, slo, rates, np.zeros(num_models), num_devices, table)
    if num_slots == 0:
        num_slots = spread(latency, pool[ROW], most, slo, num_devices, table)
    waiting = _take_all(pool)
    _lay_out(pool, table[:num_slots])
    for model in range(num_models):
        pool[_models(pool, 2) + model] = pool[pool[RATE] + model]
    pool[own + _LENGTH] = min(_SECOND // 5 if is_first else 5 * pool[own + _LENGTH], epoch)
    pool[own + _UNTIL] = now + pool[own + _LENGTH]
    pool[own + _EARLIEST] = now + pool[own + _LENGTH] // 3
    for place in range(len(waiting)):
        if rows_left(pool) > pool[NUM_QUEUES] + num_models + 2:
            _deal_out(pool, now, waiting[place, 0], waiting[place, 1], waiting[place, 2])
        else:
            # Requests are sorted by queue, so that these are at most one decision for each queue that they were in.
            refuse(pool, now, waiting[place, 0], waiting[place, 1], FULL)


@compiled
def _take_all(pool: Ints) -> Ints:
    """Take all waiting requests out of their queues; return rows of model, request, deadline."""
    found = np.zeros((pool[NUM_QUEUED], 3), np.int64)
    count, num_models = 0, pool[NUM_MODELS]
    for queue in range(num_models, 2 * num_models + pool[NUM_DEVICES]):
        start, mask = pool[pool[START] + queue], pool[pool[MASK] + queue]
        for place in range(pool[pool[HEAD] + queue], pool[pool[TAIL] + queue]):
            found[count, 0] = pool[pool[MODEL] + queue]
            found[count, 1] = pool[pool[REQUEST] + start + (place & mask)]
            found[count, 2] = pool[pool[DEADLINE] + start + (place & mask)]
            count += 1
        pool[pool[HEAD] + queue] = pool[pool[TAIL] + queue]
        forget_levels(pool, queue)
    pool[NUM_QUEUED] = 0
    pool[WORK] = 0
    return found


@compiled
def _lay_out(pool: Ints, table: NDArray[np.float64]) -> None:
    """Write a packing's rows into the policy's own cells."""
    num_models, num_devices, num_slots = pool[NUM_MODELS], pool[NUM_DEVICES], len(table)
    order = np.argsort(table[:, DEVICE_OF] * num_models + table[:, MODEL_OF], kind="mergesort")
    by_model = np.argsort(table[order, MODEL_OF], kind="mergesort")
    for column in range(2):
        pool[_models(pool, column) : _models(pool, column) + num_models] = 0
    for column in range(3):
        pool[_devices(pool, column) : _devices(pool, column) + num_devices] = 0
    most = max(table[:, SHARE].max(), 1e-300) if num_slots > 0 else 1.0
    for slot in range(num_slots):
        device, model = int(table[order[slot], DEVICE_OF]), int(table[order[slot], MODEL_OF])
        pool[_slots(pool, 0) + slot] = device
        pool[_slots(pool, 1) + slot] = int(table[order[slot], BATCH])
        pool[_slots(pool, 2) + slot] = int(table[order[slot], SHARE] / most * _ONE)
        pool[_slots(pool, 3) + slot] = 0
        pool[_slots(pool, 4) + slot] = by_model[slot]
        pool[pool[MODEL] + num_models + slot] = model
        if pool[_devices(pool, 1) + device] == 0:
            pool[_devices(pool, 0) + device] = slot
        pool[_devices(pool, 1) + device] += 1
        pool[_models(pool, 1) + model] += 1
    place = 0
    for model in range(num_models):
        pool[_models(pool, 0) + model] = place
        place += pool[_models(pool, 1) + model]
