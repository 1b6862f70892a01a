"""Divide the gain of the best plan over the plain plan among the choices (`find_shares`), by the Shapley value.

The plain plan splits, shards, recomputes and offloads nothing (`plain_values`). The players are the choices (`Values`)
that a search left open and that the best plan uses: several stages, tensor parallelism, ZeRO, recompute and so on. For
a coalition S of players, v(S) is the shortest step of all uniform plans (`methods.grid`) in which all choices outside S
have their plain value. With k players, player i gains

    sum over S without i of    |S|! · (k - |S| - 1)! / k! · (v(S) - v(S with i))

seconds: its gain when it joins the others, averaged over all orders of joining (Shapley, A value for n-person games,
1953). The gains add up to the gain of all players. Two choices that gain the same in every coalition have equal shares;
a choice that never gains has a share of 0. Choices that the best plan leaves at their plain value gain nothing.

If no plan of a coalition fits into memory, the coalition gets the step of the slowest coalition that fits. Choices
without which no plan fits are reported.

All coalitions are searched in one pass over the configurations of the grid, the lowest bound first. A configuration
belongs to all coalitions that contain every choice in which it is not plain. It is simulated if its bound is below the
best step of the smallest of these coalitions (the slowest of them), and then counts for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from math import comb
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.choices import Choices
from meshwright.planner.evaluate import RankedPlan
from meshwright.planner.methods.grid import Configuration, bound_grid
from meshwright.planner.methods.grid.grid_method import plans_of
from meshwright.planner.methods.grid.sheet import variants_of
from meshwright.planner.plans import Plans
from meshwright.planner.problem import Problem
from meshwright.planner.search import search_plans
from meshwright.planner.search_method import Limits, Proposal, SearchState, Steps
from meshwright.spec import EventSink, Offload, PlanError, format_count, format_percent, format_seconds
from meshwright.spec.offload import ON_DEVICE


class Values(NamedTuple):
    """The value of each choice in a plan, in the order of `NAMES`; ``schedule`` is a name and the stages per rank."""

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


NAMES = (
    "devices",
    "tensor parallelism",
    "sequence parallelism",
    "context parallelism",
    "expert parallelism",
    "ZeRO",
    "shard size",
    "recompute",
    "offload",
    "schedule",
    "pipeline stages",
    "microbatch size",
)


# The plain plan has one stage on all devices, splits no op, shards no state, recomputes nothing and keeps everything on
# its devices, one sample per microbatch under 1F1B; or comes as close to this as the choices allow.
def plain_values(problem: Problem) -> Values:
    """Return the values of the plain plan: nothing split, sharded, recomputed or offloaded, as far as allowed."""
    chosen, variants = problem.choices, variants_of(problem)
    return Values(
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
        microbatch_size=min(problem.microbatch_sizes(problem.workload)),
    )


def open_choices(problem: Problem) -> list[bool]:
    """Return, for each choice in the order of `Values`, whether the problem allows more than one value."""
    chosen = problem.choices
    counts = (
        max(len(set(chosen.num_devices)), len(chosen.idle)),
        len({item.tensor for item in chosen.shardings}),
        len({item.sequence_parallel for item in chosen.shardings}),
        len({item.context for item in chosen.shardings}),
        len({item.expert for item in chosen.shardings}),
        len(set(chosen.zero)),
        len(set(chosen.shard_sizes)),
        len(set(chosen.recompute)),
        len(set(chosen.offload)),
        len(variants_of(problem)),
        len(set(chosen.num_stages)) or problem.cluster.num_ranks,
        len(problem.microbatch_sizes(problem.workload)),
    )
    return [count > 1 for count in counts]


def restricted(chosen: Choices, free: Collection[int], plain: Values) -> Choices:
    """Return the choices with every choice fixed at its plain value, except those at the positions ``free``."""
    fixed = {name: value for place, (name, value) in enumerate(plain._asdict().items()) if place not in free}
    axes = {"tensor": "tensor", "sequence": "sequence_parallel", "context": "context", "expert": "expert"}
    kept = [
        item
        for item in chosen.shardings
        if all(getattr(item, field) == fixed[name] for name, field in axes.items() if name in fixed)
    ]
    changes: dict[str, Any] = {"shardings": tuple(kept)}
    for name, field in (
        ("devices", "num_devices"),
        ("zero", "zero"),
        ("shard_size", "shard_sizes"),
        ("recompute", "recompute"),
        ("offload", "offload"),
        ("stages", "num_stages"),
        ("microbatch_size", "microbatch_sizes"),
    ):
        if name in fixed:
            changes[field] = (fixed[name],)
    if "devices" in fixed:
        changes["idle"] = chosen.idle[:1]
    if fixed.get("zero") == 0:
        changes["shard_sizes"] = (0,)
    if "schedule" in fixed:
        schedule, chunks = fixed["schedule"]
        changes["schedules"] = (schedule,)
        changes["num_chunks"] = (chunks,) if chunks > 1 else chosen.num_chunks
    return replace(chosen, **changes)


def values_of(configuration: Configuration, offload: Offload) -> Values:
    """Return the values of the plans of a uniform configuration with the given offload."""
    sharding = configuration.sharding
    return Values(
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


def values_of_plan(item: RankedPlan) -> Values:
    """Return the values of a simulated plan, which need not be uniform."""
    plan, sharding = item.plan, item.plan.sharding
    positions = len({stage.ranks for stage in plan.stages})
    return Values(
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


def differing(plain: Values, values: Values) -> list[int]:
    """Return the positions in `Values` at which a plan differs from the plain plan.

    Without ZeRO, the shard size is ignored.
    """
    says = values if values.zero else values._replace(shard_size=plain.shard_size)
    return [place for place in range(len(values)) if says[place] != plain[place]]


def words_of(place: int, values: Values) -> str:
    """Return the printable value of the choice at position ``place`` of `Values`."""
    value = values[place]
    if isinstance(value, Offload):
        return "none" if value == ON_DEVICE else value.describe()
    if isinstance(value, tuple):
        name, chunks = value
        return name if chunks == 1 else f"{name}, {format_count(chunks, 'stage')} each"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if NAMES[place] == "shard size" and not value:
        return "all"
    return str(value)


# With more players, related ones are merged, pair by pair in this order.
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


class _Player(NamedTuple):
    """A choice, or several that count as one: their places in `Values`."""

    name: str
    places: tuple[int, ...]

    def words(self, values: Values) -> str:
        return ", ".join(words_of(place, values) for place in self.places)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The gain of one choice.

    ``plain`` and ``taken`` are its printable values in the plain plan and in the best plan. ``gain_s`` is in seconds
    per step, ``share`` the part of the whole gain (0..1; negative if the choice costs time). ``without_s`` is the step
    time of the best uniform plan in which this choice is plain and the others are free; None if no such plan fits.
    """

    choice: str
    plain: str
    taken: str
    gain_s: float
    share: float
    without_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The result of `find_shares`: what each choice of the best plan gains; the gains add up to ``gain_s``.

    ``choices``: the largest gain first. ``left_plain``: names of open choices that the best plan leaves at their plain
    value. ``plain_s``: the step time of the plain plan; if that does not fit (``plain_fits`` is False), of the slowest
    coalition of choices that fits. ``best_s``: the step time of the best plan, or of the best uniform plan if that is
    faster. ``num_simulated`` plans were simulated.
    """

    choices: tuple[Share, ...]
    left_plain: tuple[str, ...]
    plain_s: float
    plain_fits: bool
    best_s: float
    num_simulated: int

    @property
    def gain_s(self) -> float:
        """Seconds per step that all choices gain together: ``plain_s - best_s``."""
        return self.plain_s - self.best_s

    def row(self) -> dict[str, Any]:
        """Return a dict for JSON with the fields of `Shares` and ``gain_s``; ``choices`` has dicts of `Share`."""
        return {**asdict(self), "gain_s": self.gain_s}

    def explain(self, *, with_parts: bool = True) -> str:
        """Return printable sentences: the gain, optionally its parts, and the choices without which no plan fits."""
        if not self.choices:
            return "The best plan is the plain one: no choice gains anything."
        counts = "takes" if self.plain_fits else "does not fit into memory and counts as the slowest plan that fits,"
        parts = ", ".join(
            f"{item.choice} {format_seconds(item.gain_s)} ({format_percent(item.share)})" for item in self.choices
        )
        lines = [
            f"The plain plan {counts} {format_seconds(self.plain_s)} per step; the best plan gains "
            f"{format_seconds(self.gain_s)}{f': {parts}' if with_parts else ''}."
        ]
        needed = [item.choice for item in self.choices if item.without_s is None]
        if needed:
            lines.append(f"Without {' or without '.join(needed)}, no plan with the other choices fits.")
        if self.left_plain:
            lines.append(f"Choices that the best plan leaves plain gain nothing: {', '.join(self.left_plain)}.")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.explain()


def find_shares(problem: Problem, found: Plans, events: EventSink | None = None) -> Shares:
    """Return what each choice of the best plan of a search gains; ``found`` is the result of searching ``problem``.

    The result is deterministic. Raises PlanError for a problem with the aim latency, and if no uniform plan is possible
    or fits into memory. Raises KeyboardInterrupt if interrupted.
    """
    if problem.aim == "latency":
        raise PlanError("Shares divide the gain in step time, but the aim is latency. Plan with --aim throughput.")
    problem = _with_resorts(problem, found.best)
    if not variants_of(problem):
        raise PlanError(
            f"Shares compare uniform plans, which do not exist for the schedules "
            f"{', '.join(problem.choices.schedules)}. Add --schedule 1f1b."
        )
    plain, taken, is_open = plain_values(problem), values_of_plan(found.best), open_choices(problem)
    players = _players([place for place in differing(plain, taken) if is_open[place]])
    seen = {place for player in players for place in player.places}
    coalitions = _Coalitions(players, plain)
    problem = replace(problem, choices=restricted(problem.choices, seen, plain))
    try:
        searched = search_plans(problem, coalitions.search, Limits(max_plans=1, events=events))
    except PlanError as error:
        raise PlanError(
            "Shares compare uniform plans, but no uniform plan with the best plan's choices fits or is possible. "
            f"({error})"
        ) from error
    if searched.coverage.stopped:
        raise KeyboardInterrupt
    return Shares(
        choices=coalitions.shares(taken, found.best.step_time_s),
        left_plain=tuple(name for place, name in enumerate(NAMES) if is_open[place] and place not in seen),
        plain_s=float(coalitions.steps_s[0]),
        plain_fits=math.isfinite(coalitions.best_s[0]),
        best_s=min(float(coalitions.steps_s[-1]), found.best.step_time_s),
        num_simulated=searched.coverage.num_simulated,
    )


class _Coalitions:
    """The shortest step of each coalition, ``best_s``, shape (2 ** players,); infinite if nothing fits.

    Coalition n has player i if n has bit i.
    """

    def __init__(self, players: Sequence[_Player], plain: Values) -> None:
        self._players, self._plain = players, plain
        self.best_s = np.full(1 << len(players), math.inf)

    def search(self, problem: Problem, state: SearchState) -> Steps:
        """Propose the configurations of the grid that may be the best of a coalition; this is a search method."""
        numbers, looked_at = np.arange(len(self.best_s)), 0
        for bound_s, configuration in bound_grid(problem).by_bound():
            if bound_s >= self.best_s[0]:
                break
            own = {away: self._smallest(configuration, away) for away in problem.choices.offload}
            if all(bound_s >= self.best_s[number] for number in own.values()):
                continue
            for plan in plans_of(problem, configuration):
                number = own[plan.offload]
                if bound_s >= self.best_s[number]:
                    continue
                looked_at += 1
                state.events.progress("compare choices", looked_at, looked_at + 1)
                result = yield Proposal(plan, bound_s)
                if result is not None and result.fits:
                    holders = (numbers & number) == number
                    self.best_s[holders] = np.minimum(self.best_s[holders], result.step_time_s)

    def _smallest(self, configuration: Configuration, offload: Offload) -> int:
        """Return the coalition of the players in which a configuration is not plain."""
        own = set(differing(self._plain, values_of(configuration, offload)))
        return sum(1 << bit for bit, player in enumerate(self._players) if own.intersection(player.places))

    @property
    def steps_s(self) -> NDArray[np.float64]:
        """``best_s``, with the step of the slowest fitting coalition in place of infinity."""
        fits = np.isfinite(self.best_s)
        return np.where(fits, self.best_s, self.best_s[fits].max())

    def shares(self, taken: Values, found_s: float) -> tuple[Share, ...]:
        """Return the shares of all players, the largest first.

        ``found_s`` is the best step of the search in seconds. If it is shorter than that of the best uniform plan, the
        difference is a further share (`NOT_UNIFORM`).
        """
        steps_s, everyone = self.steps_s, len(self.best_s) - 1
        uniform_s = float(steps_s[-1])
        gained_s = float(steps_s[0]) - min(uniform_s, found_s)
        shares = []
        for bit, (player, gain_s) in enumerate(zip(self._players, shapley_values(-steps_s), strict=True)):
            without_s = float(self.best_s[everyone - (1 << bit)])
            shares.append(
                Share(
                    choice=player.name,
                    plain=player.words(self._plain),
                    taken=player.words(taken),
                    gain_s=gain_s,
                    share=gain_s / gained_s if gained_s > 0 else 0.0,
                    without_s=without_s if math.isfinite(without_s) else None,
                )
            )
        beyond_s = uniform_s - found_s
        if beyond_s > _EQUAL_SHARE * found_s:
            shares.append(
                Share(
                    choice=NOT_UNIFORM,
                    plain="no",
                    taken="yes",
                    gain_s=beyond_s,
                    share=beyond_s / gained_s,
                    without_s=uniform_s,
                )
            )
        return tuple(sorted(shares, key=lambda item: -item.gain_s))


def shapley_values(worth: NDArray[np.float64]) -> list[float]:
    """Return the Shapley value of each player; the values add up to the worth of all players less that of no player.

    ``worth`` has one entry per coalition, shape (2 ** players,); player i belongs to coalition n if n has bit i.
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


def _players(places: Sequence[int]) -> list[_Player]:
    """Return a player for each choice; with more than `MAX_PLAYERS`, some pairs count as one."""
    players = {NAMES[place]: _Player(NAMES[place], (place,)) for place in places}
    for one, other in _PAIRS:
        if len(players) > MAX_PLAYERS and one in players and other in players:
            both = players[one].places + players.pop(other).places
            players[one] = _Player(f"{one} and {other}", both)
    return list(players.values())


def _with_resorts(problem: Problem, best: RankedPlan) -> Problem:
    """Return the problem; if its best plan uses one of the last resorts to offload, with these as ordinary choices."""
    chosen = problem.choices
    if best.plan.offload in chosen.offload:
        return problem
    return replace(problem, choices=replace(chosen, offload=(*chosen.offload, *chosen.last_resorts)))
