"""What a search method is: it yields plans, and is told what they take.

    def method(problem, state):
        result = yield Proposal(plan, estimate_s)      result: the simulated plan; None if it could not be

A method decides what to look at; the search (`search`) simulates, keeps the best, watches the clock and counts. All
methods of one search share a `SearchState`, so that one stops where another has found something better.

Your own method is a function in a file, ``path/to/file.py:function``, with these two arguments. It may yield plans
alone.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshwright.planner.evaluate import RankedPlan
from meshwright.planner.problem import Problem
from meshwright.spec import EventSink, MeshwrightError, NullSink, Plan, PlanError
from meshwright.spec.own_code import first_line, load_function, reported, split_reference

_EXPECTED = "yields plans: function(problem, state)"


class Proposal(NamedTuple):
    """A plan to simulate, and the method's own closed form of its step, if it has one.

    ``counts``: False for a plan that is looked at on the way and is no answer.
    """

    plan: Plan
    estimate_s: float | None = None
    counts: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a search ends and what it returns: at most ``max_plans``, after ``deadline_s`` at the latest.

    The same problem and ``seed`` give the same plans in the same order, unless a deadline or an interrupt ends the
    search, which then returns what it has. ``events`` receives the progress. Raises PlanError for a value out of range.
    """

    max_plans: int = 8
    deadline_s: float | None = None
    seed: int = 0
    events: EventSink | None = None

    def __post_init__(self) -> None:
        if self.max_plans < 1:
            raise PlanError(f"At most {self.max_plans} plans were asked for; ask for at least 1.")
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise PlanError(f"A deadline of {self.deadline_s} s was given; expected a positive number of seconds.")


@dataclass(slots=True, kw_only=True)
class SearchState:
    """What the methods of one search share; `search` writes what was found.

    Attributes:
        max_plans: plans that were asked for; a method may propose more.
        random: the only source of random numbers.
        events: progress.
        stop_at, turn_ends_at: ends of the search and of what runs in it at the moment, on the monotonic clock.
        best: the fastest plan that fits, of any method.
        fitting: all plans that fit so far.
        rejected: plans that were simulated and do not fit.
        num_considered: configurations that methods covered, simulated or not.
        num_pruned: those of them that a bound or memory ruled out without looking at each.
        bound_s: no plan of the problem is faster, as far as methods say.
        are_bounds_void: a plan was proposed that bounds do not cover.
        refused: plans that could not be simulated, and why.
        notes: sentences for people, on what a method found out.
    """

    max_plans: int = 8
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    events: EventSink = field(default_factory=NullSink)
    stop_at: float = math.inf
    turn_ends_at: float = math.inf
    best: RankedPlan | None = None
    fitting: list[RankedPlan] = field(default_factory=list)
    rejected: list[RankedPlan] = field(default_factory=list)
    num_considered: int = 0
    num_pruned: int = 0
    bound_s: float = 0.0
    are_bounds_void: bool = False
    refused: list[tuple[Plan, MeshwrightError]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def best_s(self) -> float:
        """Seconds of the best step so far; infinite before there is one."""
        return math.inf if self.best is None else self.best.step_time_s

    @property
    def proven_s(self) -> float:
        """The lower bound of steps, if it holds for all that was proposed; else 0."""
        return 0.0 if self.are_bounds_void or self.bound_s > self.best_s * (1 + 1e-9) else self.bound_s

    def seconds_left(self) -> float:
        """Seconds until the deadline, or the end of a turn within it; infinite without one."""
        return min(self.stop_at, self.turn_ends_at) - time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.stop_at

    def count(self, *, considered: int = 0, pruned: int = 0) -> None:
        """Note configurations that were covered, and that were ruled out."""
        self.num_considered += considered
        self.num_pruned += pruned

    def note(self, sentence: str) -> None:
        """Have this told with the result."""
        self.notes.append(sentence)

    def bound(self, seconds: float) -> None:
        """Note that no plan of the problem is faster than this, by the cost model; the highest bound counts."""
        self.bound_s = max(self.bound_s, seconds)


Steps = Generator[Proposal, RankedPlan | None, None]
Method = Callable[[Problem, SearchState], Steps]


def own_method(reference: str) -> Method:
    """A method in a user's file. Raises PlanError where there is none, or it cannot be called so."""
    parts = split_reference(reference)
    if parts is None:
        raise PlanError(
            f"{reference!r} is no search method of yours; expected path/to/file.py:function, where the function "
            f"{_EXPECTED}."
        )
    path, name = parts
    function = load_function(path, name, expected=_EXPECTED, error=PlanError)
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise PlanError(
            f"{first_line(function, path)}: {name} cannot be called with two arguments ({error}). Write it as "
            f"def {name}(problem, state)."
        ) from None

    return checked(function, path)


def checked(function: Callable[[Problem, SearchState], Any], path: Path | None = None) -> Method:
    """A user's function as a method: it may yield plans alone; what it raises is told with the line of its ``path``."""
    name = getattr(function, "__name__", type(function).__name__)

    def method(problem: Problem, state: SearchState) -> Steps:
        with _reported(path, name):
            steps = function(problem, state)
        if not hasattr(steps, "__iter__"):
            raise PlanError(f"{name} returned {type(steps).__name__}; expected that it yields plans.")
        if not inspect.isgenerator(steps):
            steps = (item for item in steps)
        result: RankedPlan | None = None
        is_first = True
        while True:
            try:
                with _reported(path, name):
                    item = next(steps) if is_first else steps.send(result)
            except StopIteration:
                return
            is_first = False
            if not isinstance(item, Plan | Proposal):
                raise PlanError(
                    f"{name} yielded {type(item).__name__}; expected a Plan, or a Proposal with a plan and its "
                    "estimated seconds."
                )
            result = yield item if isinstance(item, Proposal) else Proposal(item)

    method.__name__ = name
    return method


@contextmanager
def _reported(path: Path | None, name: str) -> Iterator[None]:
    """Turn what a user's file raises into a PlanError; the end of a generator is none."""
    try:
        yield
    except (StopIteration, MeshwrightError):
        raise
    except Exception:
        if path is None:
            raise
        with reported(path, f"{name} raised", PlanError):
            raise
