"""Controllers: decisions made while a program runs, as data that an interpreter of programs can read.

A controller is a pure function of its state, the last event and the time:

    decide(state, event, now) = (state', decision)

The simulator calls it when an event occurs on the virtual clock, and appends the instructions of the decision to the
streams of their ranks; the runtime does not call controllers yet. Instructions have **handles**: those of the program's
body are their rows, 0 to n - 1, and issued instructions are numbered from n in the order of issue. Marks of the body
are numbered downwards from -1.

Events have a total order: the start is first; then by time, at equal times ends before timers, ends in the order of
handles, timers in the order in which they were set. At each time, all that follows without using a link happens before
the events, and links are assigned after them. No issued instruction starts before the time of its decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from meshwright.spec.instructions import Instruction, StreamName

State = TypeVar("State")


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """One instruction for the end of a stream of a rank.

    It continues after ``need`` of the instructions in ``waits`` have happened; None means all. ``group``
    names the ranks that take part in communication. When a ``watched`` instruction ends, the controller receives an
    event. An ``abandonable`` computation can be abandoned later.
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
    """Request an event at a time, which may be now; ``number`` is chosen by the controller."""

    at_ps: int
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The output of a controller. ``watch`` names instructions of the program's body; only in the first decision.

    ``abandon`` abandons abandonable computations of earlier decisions: one that runs ends now, one that has not started
    takes no time when its turn comes, and one that has ended stays as it is.

    All members of a collective are in one decision, and a send precedes its receive, in the same or an earlier
    decision.
    """

    issues: tuple[Issue, ...] = ()
    timers: tuple[Timer, ...] = ()
    watch: tuple[int, ...] = ()
    abandon: tuple[int, ...] = ()


NOTHING = Decision()


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The program starts, at time 0. The first instruction of the decision gets the handle ``next_handle``."""

    next_handle: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A watched instruction has ended."""

    next_handle: int
    handle: int
    rank: int
    instruction: Instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class Rang:
    """The time of a timer has come."""

    next_handle: int
    number: int


Event = Started | Ended | Rang


class Controller(Protocol[State]):
    """A policy: frozen facts, an initial state, and a pure function. States are values that are never changed."""

    @property
    def initial(self) -> State:
        """The state before the start."""
        ...

    def decide(self, state: State, event: Event, now_ps: int) -> tuple[State, Decision]:
        """Return the state after an event, and the decision."""
        ...
