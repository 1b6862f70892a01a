"""The interface of a search method: a generator that yields plans and receives their predictions.

    def method(problem, state):
        result = yield Proposal(plan, estimate_s)      result: a RankedPlan; None if the plan is not valid

A method decides which plans to try. The search (`search`) simulates them, keeps the best, and ends the method at the
deadline. All methods of a search share a `SearchState`, so that a method can skip plans that are slower than the best.

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
    """A plan to simulate; ``estimate_s`` is the method's own estimate of its step time in seconds, if any.

    ``counts`` is False for an intermediate plan that must not be in the result.
    """

    plan: Plan
    estimate_s: float | None = None
    counts: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a search: at most ``max_plans`` results, within ``deadline_s`` seconds (None: no deadline).

    The same problem and ``seed`` give the same plans in the same order, unless a deadline or an interrupt ends the
    search; it then returns the plans found so far. ``events`` receives the progress. Raises PlanError for a value out
    of range.
    """

    max_plans: int = 8
    deadline_s: float | None = None
    seed: int = 0
    events: EventSink | None = None

    def __post_init__(self) -> None:
        if self.max_plans < 1:
            raise PlanError(f"max_plans={self.max_plans} was given; expected at least 1.")
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise PlanError(f"A deadline of {self.deadline_s} s was given; expected a positive number of seconds.")


@dataclass(slots=True, kw_only=True)
class SearchState:
    """The state that all methods of one search share; `search` records the results in it.

    Attributes:
        max_plans: number of requested plans; a method may propose more.
        random: the only source of random numbers.
        events: receives the progress.
        stop_at, turn_ends_at: when the search and the running method must end, in seconds of `time.monotonic`.
        best: the best plan so far that fits into memory, of any method.
        fitting: all plans so far that fit into memory.
        rejected: simulated plans that do not fit into memory.
        num_considered: number of configurations that methods covered, simulated or not.
        num_pruned: number of these configurations that were ruled out without a simulation.
        bound_s: lower bound of the step time of all plans of the problem, as reported by methods; 0 for none.
        are_bounds_void: True if a plan was proposed that the bounds do not cover.
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
        """Step time of the best plan so far in seconds; infinite before the first."""
        return math.inf if self.best is None else self.best.step_time_s

    @property
    def proven_s(self) -> float:
        """The lower bound of step times in seconds, if it holds for all proposed plans; else 0."""
        return 0.0 if self.are_bounds_void or self.bound_s > self.best_s * (1 + 1e-9) else self.bound_s

    def seconds_left(self) -> float:
        """Return the seconds until the search or the running method must end; infinite without a limit.

        The result is negative once the time is over.
        """
        return min(self.stop_at, self.turn_ends_at) - time.monotonic()

    @property
    def is_over(self) -> bool:
        """True if the deadline of the search has passed."""
        return time.monotonic() >= self.stop_at

    def count(self, *, considered: int = 0, pruned: int = 0) -> None:
        """Add to the numbers of considered and of pruned configurations."""
        self.num_considered += considered
        self.num_pruned += pruned

    def note(self, sentence: str) -> None:
        """Add a sentence to print with the result."""
        self.notes.append(sentence)

    def bound(self, seconds: float) -> None:
        """Record a lower bound, in seconds, of the step time of all plans of the problem; the highest bound is kept."""
        self.bound_s = max(self.bound_s, seconds)


Steps = Generator[Proposal, RankedPlan | None, None]
Method = Callable[[Problem, SearchState], Steps]


def own_method(reference: str) -> Method:
    """Return your own method from a reference ``path/to/file.py:function``.

    Raises PlanError if the function does not exist or cannot be called with two arguments.
    """
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
    """Return a user's function as a method that checks what it yields; the function may yield plain plans, too.

    Exceptions of the function become PlanErrors that name the line in ``path``.
    """
    name = getattr(function, "__name__", type(function).__name__)

    def method(problem: Problem, state: SearchState) -> Steps:
        with _reported(path, name):
            steps = function(problem, state)
        if not hasattr(steps, "__iter__"):
            raise PlanError(f"{name} returned {type(steps).__name__}; expected a generator that yields plans.")
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
