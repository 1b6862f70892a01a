"""What each choice gains: shares of the gain of the best plan over the plain one, by Shapley's value.

Players are the choices that a search left open. A coalition S of them is worth the shortest step v(S) of the uniform
plans (`methods.grid`) in which all other choices stay at their plain value. Of k choices, choice i gains

    sum over S without i of    |S|! · (k - |S| - 1)! / k! · (v(S) - v(S with i))

seconds: what it gains when it joins the others, averaged over all orders in which they may join (Shapley, A value for
n-person games, 1953). These add up to the gain of all; two choices that gain alike in every coalition have equal
shares, and one that never gains has none.

Where no plan of a coalition fits, it counts as the slowest coalition that does; what nothing fits without is said.

All coalitions are found in one pass over the configurations of the grid, the lowest bound first. A configuration
belongs to the coalitions that hold every choice in which it is not plain; it is simulated if its bound is below the
best of the smallest of these, which is the slowest of them, and then counts for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import comb
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.evaluate import RankedPlan
from meshwright.planner.method import Limits, Proposal, SearchState, Steps
from meshwright.planner.methods.grid import Configuration, bound_grid
from meshwright.planner.methods.grid.method import plans_of
from meshwright.planner.methods.grid.sheet import variants_of
from meshwright.planner.microbatches import microbatch_sizes
from meshwright.planner.plans import Plans
from meshwright.planner.problem import Problem
from meshwright.planner.search import search_plans
from meshwright.spec import EventSink, Offload, PlanError, format_count, format_percent, format_seconds
from meshwright.spec.offload import ON_DEVICE

# With more players, those that belong together are one, pair by pair in this order.
MAX_PLAYERS = 8
_PAIRS = (
    ("tensor parallelism", "sequence parallelism"),
    ("ZeRO", "shard size"),
    ("pipeline stages", "schedule"),
    ("context parallelism", "expert parallelism"),
)
NOT_UNIFORM = "plans that are not uniform"
# Steps that differ by less than this share are equal.
_EQUAL_SHARE = 1e-9


class _Values(NamedTuple):
    """What a plan has taken of each choice."""

    devices: int
    tensor: int
    sequence: bool
    context: int
    expert: int
    zero: int
    shard_size: int
    recompute: str
    offload: Offload
    schedule: tuple[str, int]
    stages: int
    microbatch_size: int


_NAMES = _Values(
    *("devices", "tensor parallelism", "sequence parallelism", "context parallelism", "expert parallelism", "ZeRO"),
    *("shard size", "recompute", "offload", "schedule", "pipeline stages", "microbatch size"),
)


class _Player(NamedTuple):
    """A choice, or several that count as one: their places in `_Values`."""

    name: str
    places: tuple[int, ...]

    def words(self, values: _Values) -> str:
        return ", ".join(_words(place, values) for place in self.places)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one choice gains.

    ``plain`` is its value in the plain plan and ``taken`` that in the best one, in words. ``gain_s`` are seconds of a
    step, ``share`` is their part of the whole gain. ``without_s`` is the step of the best uniform plan in which this
    choice alone is plain; None where none fits.
    """

    choice: str
    plain: str
    taken: str
    gain_s: float
    share: float
    without_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The shares of all choices, the largest first; they add up to ``plain_s - best_s``.

    ``plain_s`` is the step of the plain plan; where that does not fit (``plain_fits``), of the slowest coalition that
    does. ``best_s`` is the shortest step that was found. ``num_simulated`` plans were simulated.
    """

    choices: tuple[Share, ...]
    plain_s: float
    plain_fits: bool
    best_s: float
    num_simulated: int

    @property
    def gain_s(self) -> float:
        """Seconds of a step that all choices gain together."""
        return self.plain_s - self.best_s

    def row(self) -> dict[str, Any]:
        """All of it as plain values. Keys: those of `Shares`, and ``choices``, each with those of `Share`."""
        return {**asdict(self), "gain_s": self.gain_s, "choices": [asdict(item) for item in self.choices]}

    def explain(self) -> str:
        """The gain, what has its shares, and what nothing fits without, in a few sentences."""
        if not self.choices:
            return "The search left no choice open: there is nothing to share."
        counts = "" if self.plain_fits else " (it does not fit, and counts as the slowest that does)"
        lines = [
            f"The best plan takes {format_seconds(self.best_s)} per step, with all choices plain it would be "
            f"{format_seconds(self.plain_s)}{counts}."
        ]
        told = [item for item in self.choices if item.gain_s > _EQUAL_SHARE * self.plain_s]
        if told:
            parts = (f"{item.choice} {format_seconds(item.gain_s)} ({format_percent(item.share)})" for item in told)
            lines.append(f"Of {format_seconds(self.gain_s)} gained, {', '.join(parts)}.")
        needed = [item.choice for item in self.choices if item.without_s is None]
        if needed:
            lines.append(f"Nothing fits without {', nor without '.join(needed)}.")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.explain()


def find_shares(problem: Problem, found: Plans, events: EventSink | None = None) -> Shares:
    """What each open choice of a problem gains, given the plans that a search of it found.

    The same problem has the same shares: no clock and no random number decides. Raises PlanError for a problem whose
    aim is the latency, and where no uniform plan is possible or fits. Raises KeyboardInterrupt where it is interrupted.
    """
    if problem.aim == "latency":
        raise PlanError("Shares are of the time of a step, but the aim is the latency of a batch. Aim at throughput.")
    problem = _with_resorts(problem, found.best)
    if not variants_of(problem):
        raise PlanError(
            f"Shares compare uniform plans, which the schedules {', '.join(problem.choices.schedules)} have none of. "
            "Add 1f1b to them."
        )
    plain = _plain_values(problem)
    players = _open_players(problem)
    best_s = np.full(1 << len(players), math.inf)

    def coalitions(problem: Problem, state: SearchState) -> Steps:
        masks, looked_at = np.arange(len(best_s)), 0
        for bound_s, configuration in bound_grid(problem).by_bound():
            if bound_s >= best_s[0]:
                break
            for plan in plans_of(problem, configuration):
                own = _mask(players, plain, _values_of(configuration, plan.offload))
                if bound_s >= best_s[own]:
                    continue
                looked_at += 1
                state.events.progress("compare choices", looked_at, looked_at + 1)
                result = yield Proposal(plan, bound_s)
                if result is not None and result.fits:
                    holders = (masks & own) == own
                    best_s[holders] = np.minimum(best_s[holders], result.step_time_s)

    searched = search_plans(problem, coalitions, Limits(max_plans=1, events=events))
    if searched.coverage.stopped:
        raise KeyboardInterrupt
    if not np.isfinite(best_s[-1]):
        raise PlanError("No uniform plan fits, though others do: there is nothing that shares could compare.")
    steps_s = np.where(np.isfinite(best_s), best_s, best_s[np.isfinite(best_s)].max())
    fastest_s = min(float(steps_s[-1]), *(item.step_time_s for item in found.ranked))
    gained_s = float(steps_s[0]) - fastest_s
    taken = _values_of_plan(found.best)
    everyone = len(best_s) - 1
    shares = [
        Share(
            choice=player.name,
            plain=player.words(plain),
            taken=player.words(taken),
            gain_s=gain_s,
            share=gain_s / gained_s if gained_s else 0.0,
            without_s=float(without_s) if math.isfinite(without_s := best_s[everyone ^ (1 << place)]) else None,
        )
        for place, (player, gain_s) in enumerate(zip(players, shapley_values(-steps_s), strict=True))
    ]
    beyond_s = float(steps_s[-1]) - fastest_s
    if beyond_s > _EQUAL_SHARE * fastest_s:
        shares.append(
            Share(
                choice=NOT_UNIFORM,
                plain="",
                taken="",
                gain_s=beyond_s,
                share=beyond_s / gained_s,
                without_s=float(steps_s[-1]),
            )
        )
    return Shares(
        choices=tuple(sorted(shares, key=lambda item: -item.gain_s)),
        plain_s=float(steps_s[0]),
        plain_fits=bool(np.isfinite(best_s[0])),
        best_s=fastest_s,
        num_simulated=searched.coverage.num_simulated,
    )


def shapley_values(worth: NDArray[np.float64]) -> list[float]:
    """Each player's share of what all are worth together above what none are.

    ``worth`` has that of each coalition, shape (2 ** players,); player i belongs to those whose number has bit i.
    """
    count = len(worth).bit_length() - 1
    masks = np.arange(len(worth))
    sizes = np.array([int(mask).bit_count() for mask in masks])
    found = []
    for place in range(count):
        without = masks[(masks >> place) & 1 == 0]
        weights = np.array([1 / (count * comb(count - 1, size)) for size in sizes[without].tolist()])
        found.append(float((weights * (worth[without | (1 << place)] - worth[without])).sum()))
    return found


def _with_resorts(problem: Problem, best: RankedPlan) -> Problem:
    """The problem with the ways to offload that its best plan had to be chosen from."""
    chosen = problem.choices
    if best.plan.offload in chosen.offload:
        return problem
    return replace(problem, choices=replace(chosen, offload=(*chosen.offload, *chosen.last_resorts)))


def _plain_values(problem: Problem) -> _Values:
    """The value of each choice in the plain plan: nothing split, shared, computed again or kept elsewhere."""
    chosen, variants = problem.choices, variants_of(problem)
    return _Values(
        devices=max(chosen.num_devices or (problem.cluster.num_ranks,)),
        tensor=min(item.tensor for item in chosen.shardings),
        sequence=min(item.sequence_parallel for item in chosen.shardings),
        context=min(item.context for item in chosen.shardings),
        expert=min(item.expert for item in chosen.shardings),
        zero=min(chosen.zero),
        shard_size=min(chosen.shard_sizes),
        recompute="none" if "none" in chosen.recompute else chosen.recompute[0],
        offload=ON_DEVICE if ON_DEVICE in chosen.offload else chosen.offload[0],
        schedule=("1f1b", 1) if ("1f1b", 1) in variants else variants[0],
        stages=min(chosen.num_stages, default=1),
        microbatch_size=min(microbatch_sizes(problem.workload, chosen.microbatch_sizes)),
    )


def _open_players(problem: Problem) -> list[_Player]:
    """The choices with more than one value."""
    chosen = problem.choices
    values = _Values(
        devices=len(set(chosen.num_devices)),
        tensor=len({item.tensor for item in chosen.shardings}),
        sequence=len({item.sequence_parallel for item in chosen.shardings}),
        context=len({item.context for item in chosen.shardings}),
        expert=len({item.expert for item in chosen.shardings}),
        zero=len(set(chosen.zero)),
        shard_size=len(set(chosen.shard_sizes)),
        recompute=len(set(chosen.recompute)),
        offload=len(set(chosen.offload)),
        schedule=len(variants_of(problem)),
        stages=len(set(chosen.num_stages)) or problem.cluster.num_ranks,
        microbatch_size=len(microbatch_sizes(problem.workload, chosen.microbatch_sizes)),
    )
    players = {name: _Player(name, (place,)) for place, name in enumerate(_NAMES) if values[place] > 1}
    for one, other in _PAIRS:
        if len(players) > MAX_PLAYERS and one in players and other in players:
            both = players[one].places + players.pop(other).places
            players[one] = _Player(f"{one} and {other}", both)
    return list(players.values())


def _values_of(configuration: Configuration, offload: Offload) -> _Values:
    sharding = configuration.sharding
    return _Values(
        devices=configuration.num_ranks * sharding.width,
        tensor=sharding.tensor,
        sequence=sharding.sequence_parallel,
        context=sharding.context,
        expert=sharding.expert,
        zero=configuration.zero,
        shard_size=configuration.shard_size,
        recompute=configuration.recompute,
        offload=offload,
        schedule=(configuration.schedule, configuration.chunks),
        stages=configuration.positions,
        microbatch_size=configuration.microbatch_size,
    )


def _values_of_plan(item: RankedPlan) -> _Values:
    plan, sharding = item.plan, item.plan.sharding
    positions = len({stage.ranks for stage in plan.stages})
    return _Values(
        devices=plan.num_devices,
        tensor=sharding.tensor,
        sequence=sharding.sequence_parallel,
        context=sharding.context,
        expert=sharding.expert,
        zero=plan.exchange.zero,
        shard_size=plan.exchange.shard_size,
        recompute=item.recompute or ("some" if plan.recompute else "none"),
        offload=plan.offload,
        schedule=(plan.schedule, len(plan.stages) // positions),
        stages=positions,
        microbatch_size=plan.microbatch_size,
    )


def _mask(players: Sequence[_Player], plain: _Values, values: _Values) -> int:
    """The players in which a configuration is not plain, as bits."""
    if not values.zero:
        # Without ZeRO there is nothing that a shard size could say.
        values = values._replace(shard_size=plain.shard_size)
    return sum(
        1 << bit
        for bit, player in enumerate(players)
        if any(values[place] != plain[place] for place in player.places)
    )


def _words(place: int, values: _Values) -> str:
    value = values[place]
    if isinstance(value, Offload):
        return "none" if value == ON_DEVICE else value.describe()
    if isinstance(value, tuple):
        name, chunks = value
        return name if chunks == 1 else f"{name}, {format_count(chunks, 'stage')} each"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if _NAMES[place] == "shard size" and not value:
        return "all"
    return str(value)
