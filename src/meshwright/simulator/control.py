"""Data for a network that a controller extends: the next instruction of each stream, and the heap of events to decide.

Streams run ahead of time, so a watched end is known before its moment has come. It waits in a heap of (time, number):
the number of an ended instruction, or `FIRST_TIMER` + k for the k-th timer. When no stream can continue and the
smallest event is not later than the smallest request for links (and earlier than any open join), nothing can come
before it, and the compiled loop returns. So at one moment joins close first, then the controller decides about ends and
timers, then links are granted; and everything that follows from a decision at that moment comes before them again.

A computation that may be abandoned is not finished when a stream reaches it: the stream stops, and its end is an
event with the negative number stream - streams, for which no controller is asked. It comes before others of its
moment, and is dropped if the end has been brought forward since.

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
    """Per instruction: its successor in the stream or NO_MORE, its release time, whether its end is watched or open.

    An end is open if the instruction may be abandoned.

    ``event_ps`` and ``event_number`` are the heap of events; ``counts`` holds the number of streams on the stack, of
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
    """Record that an instruction ends at a time, possibly in the future; if it is watched, add an event."""
    if control.watched[i]:
        add_event(control, time, i)


@compiled
def add_event(control: Control, time: int, number: int) -> None:
    """Push an event onto the heap."""
    control.counts[EVENTS] = push(control.event_ps, control.event_number, control.counts[EVENTS], time, number)


@compiled
def next_event(control: Control) -> int:
    """Return the time of the first event, or NEVER."""
    return int(control.event_ps[0]) if control.counts[EVENTS] > 0 else NEVER


@compiled
def is_next(control: Control, time: int, requester: int) -> bool:
    """Return whether an event comes before the first entry of the heap of requests, where joins are negative."""
    event_ps = next_event(control)
    return event_ps < time or (event_ps == time and requester >= 0)
