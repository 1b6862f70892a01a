"""The method `grid`: compute lower bounds of all uniform configurations, and simulate them in the order of the bounds.

The search ends when no remaining bound is below the best simulated step: the result is then proven to be the fastest
uniform configuration. If time ends earlier, the lowest remaining bound limits how far the result may be from that.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Hashable, Iterator
from itertools import islice
from typing import cast

from meshwright.planner.choices import Setting
from meshwright.planner.evaluate import RankedPlan, share_of_hosts
from meshwright.planner.methods.grid.cover import FLIGHTS, IN_TURN, ONE_EACH, SPLIT
from meshwright.planner.methods.grid.sheet import Configuration, ConfigurationGrid, bound_grid
from meshwright.planner.problem import Problem
from meshwright.planner.rank_layouts import Layout, LayoutName
from meshwright.planner.search_method import Proposal, SearchState, Steps
from meshwright.spec import Offload, Plan, StagePlan, format_count, format_percent, format_seconds
from meshwright.spec.exchange import ZeroStage

# A plan within this share of a bound counts as optimal: costs are not more precise.
_CLOSE = 1e-4
# If no memory bound is within the limit, the number of configurations with the least memory that are simulated.
_LEANEST = 3
# The most simulated plans in search of the best one (one plan of a model with 70 B parameters took 0.2 s); and, per
# requested plan, the most simulated alternatives, and the highest bound of an alternative relative to the best step.
MOST_SIMULATED, _OTHERS, _MUCH_SLOWER = 256, 2, 1.5
# The most configurations that are ruled out one by one, in some milliseconds each.
MOST_RULED_OUT = 5_000


def grid(problem: Problem, state: SearchState) -> Steps:
    """Propose the uniform configurations that may be the fastest, the lowest bound first.

    If no configuration can fit into memory, propose those that need the least memory.
    """
    found = bound_grid(problem, state.seconds_left)
    num_fitting = found.num_fitting
    state.count(considered=found.num_configurations, pruned=found.num_configurations - num_fitting)
    # If nothing can fit, the configurations closest to fitting are reported.
    by_bound = bool(num_fitting or state.fitting or state.rejected)
    run = _Run(problem, state, found, counts_pruned=by_bound)
    # Plans on fewer devices are slower but cheaper.
    alike = len(set(problem.choices.num_devices)) < 2
    rows = found.by_bound() if by_bound else found.leanest(_LEANEST)
    for bound_s, configuration in rows:
        if not run.is_settled and bound_s >= state.best_s * (1 - _CLOSE):
            run.prove(bound_s)
        if run.is_settled:
            # The best one is found; one alternative of each other kind of layout is simulated for the user.
            if len(run.kinds) >= state.max_plans or run.num_others >= _OTHERS * state.max_plans:
                break
            if _kind(configuration) in run.kinds or (alike and bound_s > _MUCH_SLOWER * state.best_s):
                continue
        if run.num_seen and state.seconds_left() <= 0:
            break
        yield from run.simulate(bound_s, configuration)
    else:
        if not run.is_settled and found.is_complete:
            run.prove(math.inf)
    if run.num_simulated < _LEANEST and not state.fitting:
        yield from run.simulate_leanest()
    if run.num_simulated:
        state.note(_summary(found, run, state.best_s))


class _Run:
    """The results of the configurations that were simulated so far."""

    def __init__(self, problem: Problem, state: SearchState, found: ConfigurationGrid, *, counts_pruned: bool) -> None:
        # Configurations excluded by the bound of their sheet were counted before.
        self._counts_pruned = counts_pruned
        self._problem, self._state, self._misfits, self._found = problem, state, _Misfits(), found
        # Configurations that cannot fit and were not simulated, with the least share of the limit that they need.
        self._ruled_out: list[tuple[float, float, Configuration]] = []
        self.kinds: set[Hashable] = set()
        self.num_simulated = self.num_others = 0
        self.left_s = math.inf
        self.is_proven = False

    @property
    def is_settled(self) -> bool:
        """True if the search for the fastest plan is over: it is proven, or the number of simulations is used up."""
        is_over = self.num_simulated - self.num_others >= MOST_SIMULATED or len(self._ruled_out) >= MOST_RULED_OUT
        return self.is_proven or is_over

    def prove(self, bound_s: float) -> None:
        """Record that the best step is proven: ``bound_s`` is the lowest bound of all remaining configurations."""
        self.is_proven, self.left_s = True, bound_s

    def simulate(self, bound_s: float, configuration: Configuration) -> Steps:
        """Propose the plans of a configuration, unless it cannot fit into memory.

        That is so if its memory bound exceeds the limit, or if a configuration that needs no more memory did not fit.
        """
        if self._misfits.need_less_than(configuration):
            self._count_out()
            return
        self._state.events.progress("simulate the grid", self.num_simulated, MOST_SIMULATED)
        share, problem = self._found.share_needed(configuration), self._problem
        if share > 1:
            self._count_out()
            self._misfits.add(configuration)
            self._ruled_out.append((share, bound_s, configuration))
            return
        lacking: set[Offload] = set()
        for plan in plans_of(problem, configuration):
            # Other layouts with the same offload need the same memory.
            if plan.offload in lacking:
                continue
            share = share_of_hosts(plan, problem.graph_for(plan.microbatch_size), problem.cluster, problem.cost)
            if share > 1:
                lacking.add(plan.offload)
                self._ruled_out.append((share, bound_s, configuration))
                continue
            result = yield from self._propose(bound_s, plan)
            if result is not None and result.fits:
                self.kinds.add(_kind(configuration))
            elif result is not None:
                lacking.add(plan.offload)
        if lacking.issuperset(problem.choices.offload):
            self._misfits.add(configuration)

    def _count_out(self) -> None:
        """Count a configuration that is ruled out without a simulation."""
        self._state.count(pruned=int(self._counts_pruned))

    def simulate_leanest(self) -> Steps:
        """Propose plans of the settings closest to fitting into memory, so that the report shows what is missing."""
        seen: set[Hashable] = set()
        for _, bound_s, configuration in sorted(self._ruled_out, key=lambda item: item[0]):
            setting = configuration.sharding, configuration.zero, configuration.recompute, configuration.num_ranks
            if setting not in seen and len(seen) < _LEANEST:
                seen.add(setting)
                for plan in islice(plans_of(self._problem, configuration), 1):
                    yield from self._propose(bound_s, plan)

    @property
    def num_seen(self) -> int:
        """The number of simulated plans plus that of configurations that were ruled out one by one."""
        return self.num_simulated + len(self._ruled_out)

    def _propose(self, bound_s: float, plan: Plan) -> Generator[Proposal, RankedPlan | None, RankedPlan | None]:
        settled = self.is_settled
        if not settled:
            self.left_s = bound_s
        self.num_simulated += 1
        self.num_others += settled
        return (yield Proposal(plan, bound_s))


def _kind(configuration: Configuration) -> Hashable:
    """Return the properties that distinguish kinds of layouts for a user."""
    wanted = configuration
    return wanted.idle, wanted.num_ranks, wanted.sharding, wanted.positions, wanted.zero, wanted.shard_size


class _Misfits:
    """Configurations that did not fit: others that need at least the same in every respect are not simulated."""

    def __init__(self) -> None:
        self._known: dict[Hashable, list[Configuration]] = {}

    def add(self, configuration: Configuration) -> None:
        """Add a configuration that did not fit into memory."""
        self._known.setdefault(_likeness(configuration), []).append(configuration)

    def need_less_than(self, configuration: Configuration) -> bool:
        """Return whether a configuration that did not fit needs no more memory than ``configuration``."""
        return any(needs_no_more(one, configuration) for one in self._known.get(_likeness(configuration), ()))


def _likeness(wanted: Configuration) -> Hashable:
    return (
        wanted.idle,
        wanted.num_ranks,
        wanted.sharding,
        wanted.positions,
        wanted.schedule,
        wanted.chunks,
        wanted.bounds,
    )


def needs_no_more(one: Configuration, other: Configuration) -> bool:
    """Return whether no rank needs more memory under ``one`` than under ``other``.

    Both must have the same stages, ranks and schedule. False for different ZeRO stages, since ZeRO 2 and 3 may gather
    more than they save.
    """
    ranks = one.num_ranks
    # A multiple of the microbatch size keeps at least the same number of samples in flight; not if all microbatches are
    # in flight, which have additional memory each.
    sizes = other.microbatch_size, one.microbatch_size
    larger = sizes[0] == sizes[1] or (sizes[0] % sizes[1] == 0 and FLIGHTS[one.schedule] in (ONE_EACH, SPLIT, IN_TURN))
    return (
        larger
        and one.zero == other.zero
        and (one.shard_size or ranks) >= (other.shard_size or ranks)
        and (one.recompute == other.recompute or other.recompute == "none")
    )


def plans_of(problem: Problem, configuration: Configuration) -> Iterator[Plan]:
    """Yield the plans of a configuration, one for each layout of its ranks and each allowed kind of offload."""
    wanted, positions = configuration, configuration.positions
    num_devices = wanted.num_ranks * wanted.sharding.width
    for away in problem.choices.offload:
        if away.parameters == "host" and wanted.zero < 3 and 3 in problem.choices.zero:
            continue
        zero = cast("ZeroStage", wanted.zero)
        setting = Setting(num_devices, wanted.sharding, zero, wanted.recompute, away, wanted.shard_size, wanted.idle)
        space = problem.space(setting)
        replicas, alike = space.num_ranks // positions, len(space.cluster.device_kinds) == 1
        several = len(space.cluster.nodes) > 1 and positions > 1 and replicas > 1 and alike
        names: tuple[LayoutName, ...] = ("stage-major", "replica-major") if several else ("stage-major",)
        for name in names:
            layout = Layout(name=name, num_ranks=space.num_ranks, num_stages=positions)
            ranks = [layout.ranks(position * replicas, replicas) for position in range(positions)] * wanted.chunks
            stages = tuple(
                StagePlan(start=start, stop=stop, ranks=own)
                for (start, stop), own in zip(wanted.bounds, ranks, strict=True)
            )
            yield space.make_whole(stages, wanted.microbatch_size, wanted.schedule)


def _summary(found: ConfigurationGrid, run: _Run, best_s: float) -> str:
    text = (
        f"Uniform grid: {format_count(found.num_configurations, 'configuration')} bounded, of which "
        f"{found.num_fitting:,} may fit; {format_count(run.num_simulated, 'plan')} simulated."
    )
    if not found.is_complete:
        return f"{text} The time ended before all configurations were bounded."
    if best_s == math.inf:
        return text
    if run.left_s >= best_s * (1 - _CLOSE):
        return f"{text} No other uniform configuration is faster than the best of them."
    return (
        f"{text} No uniform configuration takes less than {format_seconds(run.left_s)}; the best of them takes "
        f"{format_percent(best_s / run.left_s - 1)} more."
    )
