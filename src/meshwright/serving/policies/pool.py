"""A pool: what a scheduler knows of its queues and devices, as one array of int64.

A pool is a number of like devices that all hold the same models. All of its state lies in one array: it can be copied,
compared and stored as a whole, it can lie in shared memory, and handing it to compiled functions costs next to nothing.
The array begins with numbers, which are its first cells (``pool[DELAY]``), and with the places of its columns, so that
``pool[pool[HEAD] + queue]`` is the head of a queue. `columns` gives the columns as views, by name.

Times are nanoseconds of one clock, that of the simulator or of the machine. A **queue** holds requests by deadline; a
policy may have one for each model, or for each model on each device. Requests come for the queue that has their model's
number; a policy may use further ones.

Decisions are rows of `DECISION` that a driver reads and carries out after each event, with the requests that they are
about among the ``chosen``:

    RUN       device, queue, requests, when: compute them as one batch, not before ``when``
    DROP      reason, queue, requests, when: answer that they will not be computed
    PREEMPT   device, -, -, when: give up what runs there; its requests come again
    RESIZE    devices, -, -, when: so many devices are wanted (`scaling`), of a server
    LOAD      device, queue, -, when: copy the weights of its model to the device (`residency`), of the simulator
    UNLOAD    device, queue, -, when: its model leaves the device's memory
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# Later than all that happens, with room to add to it.
NEVER = 2**61

RUN, DROP, PREEMPT, RESIZE, LOAD, UNLOAD = range(6)
DECISION_FIELDS = ("kind", "target", "queue", "first", "count", "when")
WIDTH = len(DECISION_FIELDS)
# Why a request was dropped: its deadline cannot be met; its queue is full; what is ahead of it takes too long;
# others that can still be met are better served; whoever sent it has gone.
LATE, FULL, CROWDED, SACRIFICED, CANCELLED = 0, 1, 2, 3, 4
REASONS = ("late", "full", "crowded", "sacrificed", "cancelled")

# Slowness of a device that takes what its model is taken to, and the parts in which a mean of it is kept.
NOMINAL, PARTS = 1000, 1024

# States of devices.
DOWN, IDLE, BUSY = 0, 1, 2

# Numbers: what is spent between a decision and its begin; how long before deadlines batches are planned to end;
# decisions, and chosen requests, that were written since the driver read them; devices that are there, and idle ones;
# requests in queues; how many there are of models, queues and devices; entries of ``LATENCY`` for each model; device
# time (ns) that what is in queues takes, by ``UNIT``; requests that were dropped since the beginning; is ``END`` kept;
# how slow devices typically are, in thousandths of what they are taken to be; how late a policy may be woken.
DELAY, SLACK, NUM_DECISIONS, NUM_CHOSEN, NUM_UP, NUM_IDLE, NUM_QUEUED = range(7)
NUM_MODELS, NUM_QUEUES, NUM_DEVICES, ROW, WORK, NUM_DROPPED, KEEPS_ENDS, TYPICAL, GUARD = range(7, 16)
_FIRST_COLUMN = 16
# Levels of importance, and the bit of a request at which they begin (`ordering`).
NUM_LEVELS = 8
LEVEL_BIT = 56

# Columns.
#   of models   LATENCY: ns of model m and batch b at ``m * ROW + b``, `NEVER` for a batch that is too large; MOST: the
#               largest batch; SLO: ns
#   of queues   MODEL; requests from HEAD to TAIL, by deadline, at ``START + (place & MASK)`` of
#               DEADLINE and REQUEST; COUNT, SINCE, RATE and TARGET, which belong to the meter (`meter`); UNIT: ns of a
#               device that a request takes, in batches as they are expected; LEVELED: `NUM_LEVELS` numbers each,
#               of requests in it that say how important they are (`ordering`)
#   of devices  DEVICE: the state; FREE_AT: the end of what it has; NEXT: 1 if it has its next batch already;
#               BEGAN: the begin of its batch; SLOWNESS, as TYPICAL, of each; means for some time, in `PARTS`, of that
#               (USUAL) and of what its batches took (MEAN), both for virtual devices; STEADY: how many
#               batches there were since one that took far longer than planned (`slowness`)
#   heaps       three columns each, called by the first (`heaps`): TIMER of queues by their next moment, READY of
#               queues that could run at once by urgency, REST of idle devices, fast ones first, END of devices at work
#               by the end of what they have
#   OWN         the policy's
COLUMNS = (
    *("latency", "most", "slo"),
    *("model", "start", "mask", "head", "tail", "count", "since", "rate", "target", "unit", "leveled"),
    *("timer_key", "timer_item", "timer_place", "ready_key", "ready_item", "ready_place"),
    *(
        "device",
        "free_at",
        "next",
        "slowness",
        "usual",
        "mean",
        "steady",
        "began",
        "rest_key",
        "rest_item",
        "rest_place",
        "end_key",
        "end_item",
        "end_place",
    ),
    *("deadline", "request", "decision", "chosen", "own"),
)
LATENCY, MOST, SLO = range(_FIRST_COLUMN, _FIRST_COLUMN + 3)
MODEL, START, MASK, HEAD, TAIL, COUNT, SINCE, RATE, TARGET, UNIT, LEVELED = range(LATENCY + 3, LATENCY + 14)
TIMER, READY = LATENCY + 14, LATENCY + 17
DEVICE, FREE_AT, NEXT, SLOWNESS, USUAL, MEAN, STEADY, BEGAN, REST, END = (
    *range(LATENCY + 20, LATENCY + 29),
    LATENCY + 31,
)
DEADLINE, REQUEST, DECISION, CHOSEN, OWN = range(LATENCY + 34, LATENCY + 39)

_SOME_DECISIONS = 1024


def allocate_pool(
    latency: Ints,
    slo: Ints,
    num_devices: int,
    *,
    model_of_queue: Ints | None = None,
    capacity: Ints | int = 1024,
    num_own: int = 0,
    keep_ends: bool = False,
    delay_ns: int = 0,
    slack_ns: int = 0,
    guard_ns: int = 0,
) -> Ints:
    """A pool whose devices are all down and whose queues are empty.

    Args:
        latency: ns of batches, models × (largest batch + 1); entry 0 is unused, too large batches take `NEVER`.
        slo: ns from arrival to deadline of each model, which meters of rates use; requests bring their own deadlines.
        num_devices: devices, numbered from 0.
        model_of_queue: the model of each queue; a queue for each model by default.
        capacity: the least number of requests that each queue holds.
        num_own: numbers that the policy keeps for itself.
        keep_ends: keep the heap ``END``, for a policy that asks when devices will be free.
        delay_ns: what passes between a decision and its begin on an idle device.
        slack_ns: how long before a deadline a batch has to end.
        guard_ns: how much earlier than needed a policy asks to be woken.
    """
    num_models, row = latency.shape
    model = np.arange(num_models) if model_of_queue is None else np.asarray(model_of_queue, np.int64)
    num_queues = len(model)
    size = 2 ** np.ceil(np.log2(np.maximum(np.broadcast_to(capacity, num_queues), 2))).astype(np.int64)
    room = int(size.sum())
    by_queue = ("model", "start", "mask", "head", "tail", "count", "since", "rate", "target", "unit", "leveled")
    by_device = ("device", "free_at", "next", "slowness", "usual", "mean", "steady", "began")
    sizes = {"latency": latency.size, "most": num_models, "slo": num_models}
    sizes |= dict.fromkeys((*by_queue, "timer_key", "timer_place", "ready_key", "ready_place"), num_queues)
    sizes |= dict.fromkeys(("timer_item", "ready_item"), num_queues + 1)
    sizes |= dict.fromkeys((*by_device, "rest_key", "rest_place", "end_key", "end_place"), num_devices)
    sizes["leveled"] = NUM_LEVELS * num_queues
    sizes |= {"rest_item": num_devices + 1, "end_item": num_devices + 1, "deadline": room, "request": room}
    # What one event may bring: a drop and a batch of every queue, and two drops before the batch of every device. What
    # a device gave up, its batch and the next one, can be chosen beside all that waits.
    num_decisions = _SOME_DECISIONS + 2 * num_queues + 3 * num_devices
    sizes |= {"decision": num_decisions * WIDTH, "chosen": room + 2 * int(size.max()), "own": num_own}
    ends = _FIRST_COLUMN + len(COLUMNS) + 1 + np.cumsum([0, *(sizes[name] for name in COLUMNS)])
    pool = np.zeros(int(ends[-1]), np.int64)
    pool[_FIRST_COLUMN : _FIRST_COLUMN + len(ends)] = ends
    pool[[DELAY, SLACK, GUARD, NUM_MODELS, NUM_QUEUES, NUM_DEVICES, ROW]] = (
        delay_ns, slack_ns, guard_ns, num_models, num_queues, num_devices, row,
    )  # fmt: skip
    pool[KEEPS_ENDS] = keep_ends
    column = columns(pool)
    column["latency"][:] = np.minimum(latency, NEVER).ravel()
    column["most"][:] = (latency[:, 1:] < NEVER).sum(axis=1)
    column["slo"][:] = slo
    column["model"][:] = model
    column["unit"][:] = latency[model, 1]
    column["slowness"][:] = pool[TYPICAL] = NOMINAL
    column["usual"][:] = column["mean"][:] = NOMINAL * PARTS
    column["start"][:] = np.cumsum(size) - size
    column["mask"][:] = size - 1
    for name in ("timer_place", "ready_place", "rest_place", "end_place"):
        column[name][:] = -1
    return pool


def pool_for(policy: Any, facts: dict[str, Any]) -> Ints:
    """The pool of a policy: what its ``prepare`` makes of the arguments of `allocate_pool`, if it has one."""
    prepare = getattr(policy, "prepare", None)
    pool: Ints = prepare(facts) if prepare is not None else allocate_pool(**facts)
    return pool


def columns(pool: Ints) -> dict[str, Ints]:
    """The columns of a pool by name, as views: writing to them changes it."""
    starts = pool[_FIRST_COLUMN : _FIRST_COLUMN + len(COLUMNS) + 1].tolist()
    return {name: pool[first:end] for name, first, end in zip(COLUMNS, starts[:-1], starts[1:], strict=True)}
