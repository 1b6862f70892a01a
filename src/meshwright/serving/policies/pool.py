"""A pool: the scheduler's state of queues and devices, as one array of int64.

A pool is a number of identical devices that all hold the same models. All of its state is in one array: it can be
copied, compared and stored as a whole, it can be in shared memory, and passing it to compiled functions costs next to
nothing. The array starts with numbers, its first cells (``pool[DELAY]``), and with the places of its columns:
``pool[pool[HEAD] + queue]`` is the head of a queue. `columns` returns the columns as views, by name.

Times are nanoseconds of one clock, that of the simulator or of the machine. A **queue** holds requests by deadline; a
policy may have one for each model, or for each model on each device. A request arrives for the queue with the number of
its model; a policy may use further queues.

Decisions are rows of `DECISION` that a driver reads and carries out after each event; their requests are among the
``chosen`` ones:

    RUN       device, queue, requests, when: compute them as one batch, not before ``when``
    DROP      reason, queue, requests, when: answer that they will not be computed
    PREEMPT   device, -, -, when: abort the batch that runs there; its requests are resubmitted
    RESIZE    devices, -, -, when: this number of devices is wanted (`autoscaling`); server only
    LOAD      device, queue, -, when: copy the weights of its model to the device (`residency`); simulator only
    UNLOAD    device, queue, -, when: remove its model from the device's memory
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# Later than all events, with room to add to it.
NEVER = 2**61

RUN, DROP, PREEMPT, RESIZE, LOAD, UNLOAD = range(6)
DECISION_FIELDS = ("kind", "target", "queue", "first", "count", "when")
WIDTH = len(DECISION_FIELDS)
# Why a request was dropped: its deadline cannot be met; its queue is full; the work ahead of it takes too long;
# others that can still be in time are served better; its client has gone.
LATE, FULL, CROWDED, SACRIFICED, CANCELLED = 0, 1, 2, 3, 4
REASONS = ("late", "full", "crowded", "sacrificed", "cancelled")

# Slowness of a device that takes the modelled latencies, and the fractions in which its mean is kept.
NOMINAL, PARTS = 1000, 1024

# States of devices.
DOWN, IDLE, BUSY = 0, 1, 2

# Numbers: time between a decision and its start; how long before deadlines batches are planned to end; decisions and
# chosen requests since the driver last read them; devices that are up, and idle ones; requests in queues; numbers of
# models, queues and devices; entries of ``LATENCY`` for each model; device time (ns) of all queued requests, by
# ``UNIT``; requests dropped so far; whether ``END`` is kept; typical slowness of devices, in thousandths of their
# modelled time; how late a policy may be woken.
DELAY, SLACK, NUM_DECISIONS, NUM_CHOSEN, NUM_UP, NUM_IDLE, NUM_QUEUED = range(7)
NUM_MODELS, NUM_QUEUES, NUM_DEVICES, ROW, WORK, NUM_DROPPED, KEEPS_ENDS, TYPICAL, GUARD = range(7, 16)
_FIRST_COLUMN = 16
# Levels of priority, and the bit of a request at which they start (`ordering`).
NUM_LEVELS = 8
LEVEL_BIT = 56

# Columns.
#   of models   LATENCY: ns of model m and batch b at ``m * ROW + b``, `NEVER` for a batch that is too large; MOST: the
#               largest batch; SLO: ns
#   of queues   MODEL; requests from HEAD to TAIL, by deadline, at ``START + (place & MASK)`` of DEADLINE and REQUEST;
#               COUNT, SINCE, RATE and TARGET of the meter (`meter`); UNIT: device time (ns) of a request in batches of
#               the expected size; LEVELED: `NUM_LEVELS` counts each of requests with a level (`ordering`)
#   of devices  DEVICE: the state; FREE_AT: the expected end of its batches; NEXT: 1 if it has a next batch;
#               BEGAN: the start of its batch; SLOWNESS: as TYPICAL, of each; means in `PARTS` of SLOWNESS (USUAL) and
#               of observed batch times (MEAN), both for virtual devices; STEADY: batches since one that took far
#               longer than planned (`slowness`)
#   heaps       three columns each, named by the first (`queues`): TIMER of queues by their next moment, READY of
#               queues that could run at once by urgency, REST of idle devices, fast ones first, END of busy devices
#               by the end of their batches
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
    """Allocate a pool whose devices are all down and whose queues are empty.

    Args:
        latency: ns of batches, an array (models, largest batch + 1); entry 0 is unused, too large batches are `NEVER`.
        slo: ns from arrival to deadline of each model, for the rate meters; requests bring their own deadlines.
        num_devices: devices, numbered from 0.
        model_of_queue: the model of each queue; a queue for each model by default.
        capacity: the least number of requests that each queue holds.
        num_own: cells for the policy's own state.
        keep_ends: keep the heap ``END``, for a policy that needs to know when devices will be free.
        delay_ns: time between a decision and its start on an idle device.
        slack_ns: how long before a deadline a batch must end.
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
    # The most that one event may bring: a drop and a batch of every queue, and two drops before the batch of every
    # device. The requests of a preempted batch and the next one can be chosen besides all waiting ones.
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
    """Return a pool for a policy, made by the policy's ``prepare``, or by `allocate_pool` if it has no such method.

    ``facts`` are the arguments of `allocate_pool`.
    """
    prepare = getattr(policy, "prepare", None)
    pool: Ints = prepare(facts) if prepare is not None else allocate_pool(**facts)
    return pool


def columns(pool: Ints) -> dict[str, Ints]:
    """Return the columns of a pool by name, as views: writing to them changes the pool."""
    starts = pool[_FIRST_COLUMN : _FIRST_COLUMN + len(COLUMNS) + 1].tolist()
    return {name: pool[first:end] for name, first, end in zip(COLUMNS, starts[:-1], starts[1:], strict=True)}
