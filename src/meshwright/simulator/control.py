"""Data for a network that a controller extends: the successor of each instruction, and the heap of pending events.

The engine computes streams ahead of virtual time, so it knows a watched end before that time has come. The end waits in
a heap of (time, number), where number is that of the instruction, or `FIRST_TIMER` + k for the k-th timer. The compiled
loop returns for a decision when no stream can continue and the first event is not later than the first request for
links and earlier than any open join: then nothing can come before the event. So at one time joins close first, then the
controller decides about ends and timers, then links are granted; everything that follows from a decision at the same
time comes before further requests.

A computation that may be abandoned is not finished when a stream reaches it: the stream stops, and the computation's
end becomes an event with the negative number stream - streams, about which no controller decides. It comes before other
events of its time, and is dropped if the end has become earlier since.

Issued instructions are numbered in the order of issue, so a stream is a chain: ``after`` leads from each instruction to
the next. Arrays are longer than the part in use; between runs of the loop they are replaced by longer ones
(`growing.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.simulator.sharing import Ids, Times, push

# Later than any moment, and the successor of the last instruction of a stream.
NEVER = NO_MORE = np.iinfo(np.int64).max
FIRST_TIMER = 2**62
# Indices into `Control.counts`.
RUNNABLE, REQUESTS, EVENTS = 0, 1, 2


class Control(NamedTuple):
    """Columns that the engine needs in addition if a controller extends the network.

    Per instruction: ``after``, its successor in the stream, or NO_MORE; ``release_ps``, its earliest start;
    ``watched``, whether its end is an event for the controller; ``is_open``, whether it may be abandoned.
    ``event_ps`` and ``event_number`` are the heap of events. ``counts`` has the numbers of streams on the stack, of
    requests that wait for links, and of known events.
    """

    after: Ids
    release_ps: Times
    watched: NDArray[np.bool_]
    is_open: NDArray[np.bool_]
    event_ps: Times
    event_number: Ids
    counts: Ids


@compiled
def note_end(control: Control, i: int, time: int) -> None:
    """Add an event at ``time``, which may be in the future, for the end of instruction ``i`` if it is watched."""
    if control.watched[i]:
        add_event(control, time, i)


@compiled
def add_event(control: Control, time: int, number: int) -> None:
    """Push an event onto the heap; ``number`` is an instruction, or `FIRST_TIMER` + k for timer k."""
    control.counts[EVENTS] = push(control.event_ps, control.event_number, control.counts[EVENTS], time, number)


@compiled
def next_event(control: Control) -> int:
    """Return the time of the first event in ps, or NEVER if there is no event."""
    return int(control.event_ps[0]) if control.counts[EVENTS] > 0 else NEVER


@compiled
def is_next(control: Control, time: int, requester: int) -> bool:
    """Return whether the first event comes before the first entry (``time``, ``requester``) of the heap of requests.

    A negative ``requester`` is an open join, which comes before an event at the same time.
    """
    event_ps = next_event(control)
    return event_ps < time or (event_ps == time and requester >= 0)
