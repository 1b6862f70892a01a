"""The interface of a search method: a generator that yields plans and receives their evaluations.

    def method(problem, state):
        result = yield Proposal(plan, estimate_s)      result: the simulated plan; None if it is invalid

A method decides which plans to try; the search (`search`) simulates them, keeps the best, watches the deadline and
counts. All methods of a search share a `SearchState`, so that one stops where another has found something better.

Your own method is a function in a file, ``path/to/file.py:function``, with these two arguments. It may also yield plain
plans.
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
    """A plan to simulate, and the method's own closed-form estimate of its step time, if any.

    ``counts`` is False for an intermediate plan that is not an answer.
    """

    plan: Plan
    estimate_s: float | None = None
    counts: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a search: at most ``max_plans`` results, after ``deadline_s`` seconds at the latest.

    The same problem and ``seed`` give the same plans in the same order, unless a deadline or an interrupt ends the
    search, which then returns its plans so far. ``events`` receives the progress. Raises PlanError for a value out of
    range.
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
    """State shared by the methods of one search; `search` records the results in it.

    Attributes:
        max_plans: number of requested plans; a method may propose more.
        random: the only source of random numbers.
        events: receives the progress.
        stop_at, turn_ends_at: ends of the search and of the running method's turn, on the monotonic clock.
        best: the fastest plan that fits, of any method.
        fitting: all plans that fit so far.
        rejected: simulated plans that do not fit.
        num_considered: configurations that methods covered, simulated or not.
        num_pruned: those of them that a bound or memory ruled out without a closer look.
        bound_s: lower bound of the step time of all plans of the problem, as reported by methods.
        are_bounds_void: whether a plan was proposed that bounds do not cover.
        refused: plans that could not be simulated, and why.
        notes: sentences for the user about what a method found.
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
        """Seconds of the best step so far; infinite before the first."""
        return math.inf if self.best is None else self.best.step_time_s

    @property
    def proven_s(self) -> float:
        """The lower bound of step times if it holds for all proposed plans; else 0."""
        return 0.0 if self.are_bounds_void or self.bound_s > self.best_s * (1 + 1e-9) else self.bound_s

    def seconds_left(self) -> float:
        """Return the seconds until the deadline, or until an earlier end of the turn; infinite without either."""
        return min(self.stop_at, self.turn_ends_at) - time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.stop_at

    def count(self, *, considered: int = 0, pruned: int = 0) -> None:
        """Add to the numbers of considered and of pruned configurations."""
        self.num_considered += considered
        self.num_pruned += pruned

    def note(self, sentence: str) -> None:
        """Add a sentence to print with the result."""
        self.notes.append(sentence)

    def bound(self, seconds: float) -> None:
        """Note a lower bound of the step time of all plans, by the cost model; the highest bound is kept."""
        self.bound_s = max(self.bound_s, seconds)


Steps = Generator[Proposal, RankedPlan | None, None]
Method = Callable[[Problem, SearchState], Steps]


def own_method(reference: str) -> Method:
    """Return a method from a user's file. Raises PlanError if it is missing or does not take two arguments."""
    parts = split_reference(reference)
    if parts is None:
        raise PlanError(
            f"{reference!r} is not a reference to a search method; expected path/to/file.py:function, where the "
            f"function {_EXPECTED}."
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
    """Wrap a user's function as a method; it may yield plain plans. Errors are reported with the line of ``path``."""
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
    """Turn exceptions of a user's file into PlanError, except the end of a generator."""
    try:
        yield
    except (StopIteration, MeshwrightError):
        raise
    except Exception:
        if path is None:
            raise
        with reported(path, f"{name} raised", PlanError):
            raise
