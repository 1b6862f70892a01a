"""The method `slicing`: solve exactly, simulate the most promising plans, then try further schedules for the best."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Protocol, TypeVar

from meshwright.planner.adoption import adopt_schedule
from meshwright.planner.evaluate import RankedPlan, share_of_hosts
from meshwright.planner.methods.slicing.slicing_candidates import CandidateSearch, PlanCandidate
from meshwright.planner.problem import Problem
from meshwright.planner.search_method import Proposal, SearchState, Steps
from meshwright.planner.step_bounds import bound_space
from meshwright.program import unlower_plan
from meshwright.simulator import form_teams
from meshwright.spec import DeadlockError, MeshwrightError, Plan, PlanError, ScheduleError
from meshwright.spec.own_code import order_file
from meshwright.spec.schedules import BASIC_SCHEDULES, SCHEDULE_NAMES

# The most simulated instructions in all, without the first plan: building and simulating 100,000 takes about a second
# (own measurement, one Xeon core), and a plan for a large cluster has some hundred thousand.
MAX_INSTRUCTIONS = 600_000
# Places of stages are tables of ranks by ranks, six with 8 bytes per entry: a gigabyte at this number.
MAX_RANKS = 4096
# The most plans that a user's schedule may fail on before the search stops trying.
MAX_REFUSED = 64
# The fewest simulated plans, even if fewer are requested: estimates are incomplete.
LEAST_SIMULATED = 8


def slicing(problem: Problem, state: SearchState) -> Steps:
    """Propose the plans of exact slicing, the most promising first; the simulation decides whether they fit.

    Slicings are computed for gpipe, 1f1b and your own functions. For all other schedules, the plans found are changed
    (those for 1f1b if only other schedules are allowed); their layers are cut again if a rank gets several stages.
    """
    adopted = [name for name in problem.choices.schedules if _is_adopted(name)]
    searched = [name for name in problem.choices.schedules if name not in adopted]
    candidates = find_candidates(problem, searched or ["1f1b"], state)
    wanted = max(state.max_plans, LEAST_SIMULATED)
    fitting = yield from _simulate(candidates, wanted, state, counts=bool(searched))
    if adopted and fitting:
        errors: list[MeshwrightError] = []
        # On one stage, all synchronous schedules are the same.
        followers = [item for item in fitting if len(item.plan.stages) > 1 or not searched]
        followed = yield from _adopt_all(problem, followers, adopted, errors)
        if not searched and not followed:
            raise _nothing_adopted(adopted, [*errors, *(error for _, error in state.refused)])


def find_candidates(problem: Problem, schedules: Sequence[str], state: SearchState) -> list[PlanCandidate]:
    """Return the best slicings of all settings, the shortest estimate first; set the search's lower bound.

    A setting is skipped if its lower bound exceeds the best known step on the same number of devices. Raises PlanError
    if all settings have more than `MAX_RANKS` ranks.
    """
    bounds = [(bound_space(space), index, space) for index, space in enumerate(problem.spaces())]
    small = [item for item in sorted(bounds) if item[2].num_ranks <= MAX_RANKS]
    if not small:
        raise PlanError(
            f"Exact slicing supports up to {MAX_RANKS:,} ranks, because its tables grow with their square, but the "
            f"plans need {min(space.num_ranks for _, _, space in bounds):,}. Use --method grid, fewer devices, or a "
            "larger --tensor, --context or --expert."
        )
    found: list[PlanCandidate] = []
    best_s: dict[int, float] = {}
    for bound_s, _, space in small:
        search, count = CandidateSearch(space, schedules, state), space.setting.num_devices
        known_s = min(best_s.get(count, math.inf), _known_s(state, count))
        if bound_s < known_s and (not found or state.seconds_left() > 0):
            mine = search.run(known_s)
            found += mine
            best_s[count] = min([known_s, *(candidate.estimate_s for candidate in mine)])
        else:
            state.count(pruned=search.num_covered)
        state.count(considered=search.num_covered)
    if not problem.only:
        state.bound(min(bound_s for bound_s, _, _ in bounds))
    return sorted(found, key=lambda candidate: candidate.estimate_s)


def _known_s(state: SearchState, num_devices: int) -> float:
    """Return the best step time that other methods found on a number of devices."""
    found = (item.step_time_s for item in state.fitting if item.plan.num_devices == num_devices)
    return min(found, default=math.inf)


def _simulate(
    candidates: Sequence[PlanCandidate], wanted: int, state: SearchState, *, counts: bool
) -> Generator[Proposal, RankedPlan | None, list[RankedPlan]]:
    """Simulate candidates until ``wanted`` fit; after one that needs too much memory, the next best of its problem."""
    fitting: list[RankedPlan] = []
    num_rejected = num_refused = num_done = num_skipped = 0
    seen: set[Plan] = set()
    for first in choose(candidates, wanted):
        candidate: PlanCandidate | None = first
        while candidate is not None:
            if len(fitting) == wanted or (fitting and num_rejected > wanted) or num_refused == MAX_REFUSED:
                return fitting
            plan = candidate.whole
            if plan in seen or (fitting and num_done + num_instructions(plan) > MAX_INSTRUCTIONS):
                break
            seen.add(plan)
            # Plans that exceed host memory are simulated only if an error may have to report what is missing.
            if state.fitting and _lacks_hosts(candidate, plan):
                num_skipped += 1
                if num_skipped == MAX_REFUSED or state.seconds_left() <= 0:
                    return fitting
                break
            num_done += num_instructions(plan)
            state.events.progress("simulate plans", len(fitting), wanted)
            item = yield Proposal(plan, candidate.estimate_s, counts)
            if item is None:
                num_refused += 1
                break
            if item.fits:
                fitting.append(item)
                break
            num_rejected += 1
            # If devices have room but hosts have not, another slicing of the layers helps little.
            if item.excess_bytes <= 0:
                break
            candidate = candidate.search.next_best(candidate, item.reserved_bytes)
    state.events.progress("simulate plans", wanted, wanted)
    return fitting


def _lacks_hosts(candidate: PlanCandidate, plan: Plan) -> bool:
    problem = candidate.search.space.problem
    return share_of_hosts(plan, problem.graph_for(plan.microbatch_size), problem.cluster, problem.cost) > 1


class Shaped(Protocol):
    """Interface: a candidate with a ``shape``, which tells different kinds of layouts apart."""

    @property
    def shape(self) -> tuple[int, ...]:
        """A tuple such as the number of devices of each stage."""


Shape = TypeVar("Shape", bound=Shaped)


def choose(candidates: Sequence[Shape], max_plans: int) -> Iterator[Shape]:
    """Yield candidates, which are given fastest first, in the order in which to simulate them.

    The first half of ``max_plans`` are the fastest. Then follow the fastest of every further shape (replicas per
    stage), and then the others.
    """
    first = list(candidates[: (max_plans + 1) // 2])
    yield from first
    taken = {candidate.shape for candidate in first}
    later: list[Shape] = []
    for candidate in candidates[len(first) :]:
        if candidate.shape in taken:
            later.append(candidate)
        else:
            taken.add(candidate.shape)
            yield candidate
    yield from later


def num_instructions(plan: Plan) -> int:
    """Return the approximate number of instructions of a step.

    Per microbatch: a forward and a backward of each stage, and four sends and receives between neighbouring stages.
    """
    return plan.num_microbatches * (6 * len(plan.stages) - 4)


def _adopt_all(
    problem: Problem, items: Sequence[RankedPlan], schedules: Sequence[str], errors: list[MeshwrightError]
) -> Generator[Proposal, RankedPlan | None, int]:
    """Propose the plans under each schedule that they can follow (else ``errors``); return the number that fit."""
    num_fitting = 0
    for item, schedule, num_chunks in product(items, schedules, problem.choices.num_chunks):
        try:
            plan = adopt_whole(problem, item.plan, schedule, num_chunks)
        except (PlanError, ScheduleError, DeadlockError) as error:
            errors.append(error)
            continue
        result = yield Proposal(plan)
        num_fitting += result is not None and result.fits
    return num_fitting


def adopt_whole(problem: Problem, plan: Plan, schedule: str, num_chunks: int) -> Plan:
    """Return a plan of the whole graph under another schedule. Raises the errors of `adopt_schedule`."""
    graph = problem.graph_for(plan.microbatch_size)
    seen = form_teams(plan, graph, problem.cluster, problem.cost)
    local = adopt_schedule(seen.plan, schedule, seen.graph, seen.cost, num_chunks=num_chunks)
    shared = plan.exchange.zero, plan.exchange.shard_size
    exchange = replace(problem.exchange, zero=shared[0], shard_size=shared[1]).suited_to(schedule)
    return unlower_plan(replace(local, exchange=exchange), plan)


def _is_adopted(schedule: str) -> bool:
    """Return whether plans are found for other schedules first: for several stages on a rank, and for order files."""
    return order_file(schedule) is not None or (schedule in SCHEDULE_NAMES and schedule not in BASIC_SCHEDULES)


def _nothing_adopted(schedules: Sequence[str], errors: Sequence[MeshwrightError]) -> MeshwrightError:
    if errors and not isinstance(errors[0], PlanError):
        return errors[0]
    return PlanError(
        f"No plan that was found can follow the schedule {' or '.join(schedules)} or fits into memory under it. "
        f"{' '.join(str(error) for error in errors[:1])}".rstrip()
    )
