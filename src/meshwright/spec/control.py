"""Controllers: pure functions that decide while a program runs, and their decisions as data.

A controller is a pure function of its state, the last event and the time:

    decide(state, event, now) = (state', decision)

The simulator calls it when an event occurs on the virtual clock, and appends the instructions of the decision to the
streams of their ranks. The runtime calls it on the events of real ranks (`meshwright.runtime.controlled`). A **handle**
is the number of an instruction: the row number, 0 to n - 1, for the n instructions of the program's body, and n, n + 1,
... for issued instructions in the order of issue. Marks of the body are numbered -1, -2, ...

The order of events is fixed: the start is first, then events are ordered by time. At equal times, ends of instructions
come before timers; ends are in the order of handles, timers in the order in which they were set. At each time,
everything that needs no link (ends, marks, joins, work that takes no time) happens before the events, and links are
assigned to waiting transfers after the events. No issued instruction starts before the time of its decision.

A real rank may die (`Died`). Then its instructions that have not ended are **lost**, and so are messages and
collectives with it that have not ended. Waits ignore lost instructions: what waits for all waits for the others, and
what needs k needs at most as many as are left. Later decisions must not involve the rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from meshwright.spec.instructions import Instruction, StreamName

State = TypeVar("State")


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """One instruction that a controller appends to a stream of a rank.

    ``waits`` are the handles (or negative numbers of marks) for which the instruction waits; ``need`` of them suffice,
    all of them if it is None. ``group`` lists the ranks that take part in communication. When a ``watched`` instruction
    ends, the controller receives an `Ended` event. A later decision can abandon an ``abandonable`` computation.
    """

    rank: int
    stream: StreamName
    instruction: Instruction
    group: tuple[int, ...] = ()
    waits: tuple[int, ...] = ()
    need: int | None = None
    watched: bool = False
    abandonable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Timer:
    """A request for a `Rang` event at the time ``at_ps`` (in ps, now or later) with the controller's own ``number``."""

    at_ps: int
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The output of a controller: instructions to issue, timers to set, and instructions to watch or to abandon.

    ``watch`` lists handles of the program's body; only the first decision may have it. ``abandon`` lists handles of
    abandonable computations of earlier decisions: a running one ends now, and one that has not started takes no time
    when its turn comes. Computations that have ended are not affected.

    One decision issues all members of a collective. A send is issued before its receive, in the same or an earlier
    decision.
    """

    issues: tuple[Issue, ...] = ()
    timers: tuple[Timer, ...] = ()
    watch: tuple[int, ...] = ()
    abandon: tuple[int, ...] = ()


NOTHING = Decision()


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Event: the program starts, at time 0. The first instruction of the decision gets the handle ``next_handle``."""

    next_handle: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Event: a watched instruction of ``rank`` with this ``handle`` has ended; ``next_handle`` as in `Started`."""

    next_handle: int
    handle: int
    rank: int
    instruction: Instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class Rang:
    """Event: the time of the `Timer` with this ``number`` has come; ``next_handle`` as in `Started`."""

    next_handle: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """Event: ``rank`` has died; ``next_handle`` as in `Started`. Only for controllers that survive deaths."""

    next_handle: int
    rank: int


Event = Started | Ended | Rang | Died


class Controller(Protocol[State]):
    """A decision policy: an initial state and a pure function from events to decisions. States are immutable values.

    A controller with a true attribute ``survives_deaths`` decides on `Died`. Without it, a death ends the run.
    """

    @property
    def initial(self) -> State:
        """The controller's state before the first event."""
        ...

    def decide(self, state: State, event: Event, now_ps: int) -> tuple[State, Decision]:
        """Return the state after ``event``, which occurs at the time ``now_ps`` (ps), and the decision."""
        ...
