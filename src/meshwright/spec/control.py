"""Controllers: what is decided while a program runs, as data that an interpreter of programs can read.

A controller is a pure function of what it knows, what has happened and when, to what it knows now and what is to be
done:

    decide(state, event, now) = (state', decision)

The simulator calls it when an event comes up on the virtual clock, and appends the instructions of the decision to the
streams of their ranks; the runtime calls no controllers yet. Instructions have **handles**: those of the program's body
are their rows, 0 to n - 1, and issued ones count on from n in the order in which they are issued. Marks of the body
count down from -1.

Events come in a total order: the start is first; then by moment, at equal moments ends before timers, ends in the order
of handles, timers in the order in which they were asked for. All that follows at a moment without a link happens before
its events, and links are given after them. No issued instruction begins before the moment of its decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from meshwright.spec.instructions import Instruction, StreamName

State = TypeVar("State")


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """One instruction for the end of a stream of a rank.

    It goes on when ``need`` of the handles in ``waits`` have happened, or all of them if that is None. ``group`` names
    the ranks that take part in communication. When a ``watched`` instruction ends, the controller is told. An
    ``abandonable`` computation can be given up later.
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
    """Ask for an event at a moment, which may be now; ``number`` is the controller's own."""

    at_ps: int
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is to be done. ``watch`` names instructions of the program's body; only the first decision may have some.

    ``abandon`` gives up abandonable computations of earlier decisions: one that runs ends now, one that has not begun
    takes no time when its turn comes, and one that has ended stays as it is.

    All members of a collective stand in one decision, and a send stands before its receive, in the same or an earlier
    one.
    """

    issues: tuple[Issue, ...] = ()
    timers: tuple[Timer, ...] = ()
    watch: tuple[int, ...] = ()
    abandon: tuple[int, ...] = ()


NOTHING = Decision()


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The program begins, at time 0. The first instruction of the decision gets the handle ``next_handle``."""

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
    """A moment has come that a timer was set for."""

    next_handle: int
    number: int


Event = Started | Ended | Rang


class Controller(Protocol[State]):
    """A policy: frozen facts, a first state, and the pure function. States are values that are never changed."""

    @property
    def initial(self) -> State:
        """What is known before the start."""
        ...

    def decide(self, state: State, event: Event, now_ps: int) -> tuple[State, Decision]:
        """What is known after an event, and what is to be done."""
        ...
