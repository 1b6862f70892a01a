"""`Workbench`: make, estimate and simulate the plan of a state.

No search happens here. Results are cached:

    model          its graph, or one per microbatch size if the graph is not symbolic in the batch
    cost model     per cluster, scenario and precision; it caches op costs, transfers and stage memory itself
    balanced cuts  per graph, microbatch size, device kind, precision, sharding, recompute and number of stages
    answer         the results of the last few states, for the pinned state and for saved files
    plans          opened plans, for their properties without a control

Balanced cuts (`balanced_cuts`) make the slowest stage as fast as possible, and the other stages as even as possible:

    θ* = min over slicings of max_s t_s        t_s = seconds of forward and backward of the layers of stage s
    then, among slicings with t_s <= θ* for all s, the least Σ t_s²

They are found by two dynamic programs over (stages, layers), in O(stages x layers²). Memory, transfers and replicas are
not considered here, but in the planner's search.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import CostModel, load_cost_model
from meshwright.planner import RankedPlan, rank_simulation
from meshwright.playground.controls import Controls, base_cluster, scenario_cost, scenario_of
from meshwright.playground.opened_plans import plan_key, state_of_plan
from meshwright.playground.page_layout import (
    again_of,
    check_duration,
    check_shape,
    make_plan,
    sharding_of,
)
from meshwright.program import lower_graph
from meshwright.simulator import Simulation, Teams, form_teams, simulate_plan
from meshwright.spec import Cluster, Graph, Plan, PlaygroundError, suggest

T = TypeVar("T")

# Graphs of large models take some megabytes each, an answer for 64 devices about one.
_MAX_KEPT = {"model": 8, "cost": 24, "seconds": 64, "cuts": 256, "answer": 12, "unused": 64, "usual": 8}
# After this number of answers a cost model is replaced: every requested speed of a device adds a kind to it.
_MAX_LEARNED = 200
# Plans found by searches that are kept, besides the one that was opened first.
_MAX_PLANS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedModel:
    """A model that the page offers.

    ``open``: reads or captures the model; returns a function from a microbatch size to its graph. ``sizes``: the
    (name, value) sizes of the model that plans store. ``rewritten``: the kind of device for which the graph was
    rewritten, or "".
    """

    open: Callable[[], Callable[[int], Graph]] = field(repr=False)
    sizes: tuple[tuple[str, int], ...] = ()
    rewritten: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateResult:
    """The plan of a state and its simulation.

    ``base``: the cluster for which the plan was made; ``cluster``: the same cluster under the scenario, on which it was
    simulated. ``given``: the opened plan that the state names, or None. ``seen``: plan, graph and cluster as they were
    simulated, with one rank per team of devices. ``layer_s``: seconds of each layer per microbatch on the first kind of
    device of ``base``. ``balanced``: the balanced cuts, found from ``layer_s``.
    """

    state: Controls
    graph: Graph
    base: Cluster
    cluster: Cluster
    cost: CostModel
    plan: Plan
    given: Plan | None
    seen: Teams
    simulation: Simulation
    ranked: RankedPlan
    layer_s: NDArray[np.float64]
    balanced: tuple[int, ...]


def _machines(state: Controls) -> Hashable:
    return state.kind, state.num_nodes, state.devices_per_node


class MeasuredTable(NamedTuple):
    """A file of measurements, and the kind of device on which states are estimated with it."""

    kind: str
    path: Path


class Workbench:
    """Makes and simulates the plans of states, with cached results. Not thread-safe.

    ``models``: the offered models by name. ``clusters``: clusters from files, by name. ``table``: measurements.
    """

    def __init__(
        self,
        models: Mapping[str, OfferedModel],
        clusters: Mapping[str, Cluster] | None = None,
        table: MeasuredTable | None = None,
    ) -> None:
        self.models = dict(models)
        self._table = table
        self.clusters = dict(clusters or {})
        self._opened_on: dict[str, Hashable] = {}
        self._num_learned = 0
        self._plans: OrderedDict[str, Plan] = OrderedDict()
        self._kept: dict[str, OrderedDict[Hashable, Any]] = {name: OrderedDict() for name in _MAX_KEPT}

    def open_plan(self, plan: Plan, state: Controls, graph: Graph | None = None) -> Controls:
        """Keep a plan, and return the state that shows it on the cluster and under the scenario of ``state``.

        ``graph``: the plan's graph, with which the plan's recompute gets the name that the control shows.
        """
        key = plan_key(plan)
        self._plans[key] = plan
        self._opened_on[key] = _machines(state)
        while len(self._plans) > _MAX_PLANS:
            # The first plan is the one that the page was started with.
            self._plans.pop(list(self._plans)[1])
        return replace(state_of_plan(plan, state, graph), given=key)

    def given_of(self, state: Controls) -> Plan | None:
        """Return the opened plan that a state names; None if there is no such plan.

        Raises PlaygroundError if the state takes values from a plan that was not opened here or is of another model.
        """
        found = self._plans.get(state.given)
        if found is None and state.needs_plan:
            raise PlaygroundError(
                "The link takes some values from a plan that was not opened on this page. Start the page with that "
                "plan (meshwright show --play PLAN.json), or choose other values where a control shows 'as in the "
                "plan'."
            )
        if found is not None and state.needs_plan and found.model != state.model:
            raise PlaygroundError(
                f"Some values are as in the opened plan, which is of {found.model[:80]!r}; they mean nothing for "
                f"{state.model[:80]!r}. Choose other values where a control shows 'as in the plan', or choose "
                f"{found.model[:80]!r}."
            )
        return found

    def answer(self, state: Controls) -> StateResult:
        """Make, estimate and simulate the plan of a state; the results of the last states are cached.

        Raises MeshwrightError, with a remedy, for a state that no plan has. A plan that needs too much memory is not an
        error.
        """
        return self._keep("answer", state, lambda: self._answer(state))

    def prepare(self, state: Controls) -> tuple[Graph, Cluster, Cluster, CostModel]:
        """Return (graph, cluster, cluster under the scenario, cost model under the scenario) of a state."""
        model = self._model(state)
        base = base_cluster(state, self.clusters)
        cost = self._cost(state, base)
        graph = self._keep("model", state.model, model.open)(state.microbatch_size)
        return graph, base, cost.cluster, cost

    def graphs_of(self, state: Controls) -> Callable[[int], Graph]:
        """Return a function from a microbatch size to the graph of the state's model."""
        return self._keep("model", state.model, self._model(state).open)

    def sizes_of(self, state: Controls) -> tuple[tuple[str, int], ...]:
        """Return the (name, value) sizes of the state's model that plans store."""
        return self._model(state).sizes

    def _model(self, state: Controls) -> OfferedModel:
        if state.model not in self.models:
            raise PlaygroundError(
                f"There is no model {state.model[:80]!r} on this page{suggest(state.model[:80], self.models)}. "
                "Choose one of the list, or start the page with it: meshwright show --play MODEL."
            )
        return self.models[state.model]

    def _answer(self, state: Controls) -> StateResult:
        graph, base, cluster, cost = self.prepare(state)
        given = self.given_of(state)
        check_shape(state, len(graph.layers), base.num_ranks, given)
        seconds, balanced = self._balance(state, graph, base, given)
        check_duration(state, seconds)
        rewritten = self._model(state).rewritten
        cuts = state.cuts or balanced
        plan = make_plan(state, graph, base, cuts, self.sizes_of(state), given, rewritten=rewritten)
        if given is not None and self._opened_on[state.given] == _machines(state):
            # The same plan on the same machines keeps the given name of the cluster and what it was made with.
            same = replace(given, cluster=plan.cluster, made_with=plan.made_with)
            plan = given if plan == same else plan
        seen = form_teams(plan, graph, cluster, cost)
        simulation = simulate_plan(seen.plan, seen.graph, seen.cluster, cost=seen.cost)
        # The memory that allocators leave unused is the same in every scenario.
        remembers = self._keep("unused", (state.model, replace(plan, cluster="")), lambda: replace(seen.cost))
        ranked = rank_simulation(simulation, seen.plan, seen.graph, seen.cluster, cost=remembers)
        self._learn(state, base, cost)
        return StateResult(
            state=state,
            graph=graph,
            base=base,
            cluster=cluster,
            cost=cost,
            plan=plan,
            given=given,
            seen=seen,
            simulation=simulation,
            ranked=replace(ranked, plan=plan, sequence_length=graph.sequence_length),
            layer_s=seconds,
            balanced=balanced,
        )

    def _balance(
        self, state: Controls, graph: Graph, base: Cluster, given: Plan | None
    ) -> tuple[NDArray[np.float64], tuple[int, ...]]:
        kind = base.device_kind(0)
        plain = replace(state, slowdown=1.0, link_slowdown=1.0, nic_slowdown=1.0, num_nics=0, memory_gib=0.0)
        sharding, again = sharding_of(state, given), again_of(state, graph, given)
        key = state.model, state.microbatch_size, state.kind, state.precision, sharding, again

        def weigh() -> NDArray[np.float64]:
            local = graph if sharding.is_whole and not again.ranges else lower_graph(graph, sharding, *again)
            cost = self._cost(plain, base).for_teams(sharding)
            return cost.estimate_ops(local, state.microbatch_size, kind).layers_s(local, first=True)

        seconds = self._keep("seconds", key, weigh)
        count = state.num_stages
        return seconds, self._keep("cuts", (*key, count), lambda: balanced_cuts(seconds, count))

    def _cost(self, state: Controls, base: Cluster) -> CostModel:
        key = state.kind, state.num_nodes, state.devices_per_node, scenario_of(state), state.precision
        return self._keep("cost", key, lambda: scenario_cost(state, self._usual(state, base)))

    def _usual(self, state: Controls, base: Cluster) -> CostModel:
        """Costs without a scenario."""
        path = None if self._table is None or self._table.kind != state.kind else self._table.path
        return self._keep(
            "usual", (_machines(state), state.precision), lambda: load_cost_model(base, path, state.precision)
        )

    def _learn(self, state: Controls, base: Cluster, cost: CostModel) -> None:
        """Give the next scenario the results about stages and kinds of devices of this one."""
        machines, links = (_machines(state), state.precision), self._usual(state, base).usual_links
        self._kept["usual"][machines] = cost.on_machines(base, links)
        self._num_learned += 1
        if self._num_learned % _MAX_LEARNED == 0:
            del self._kept["usual"][machines]

    def _keep(self, name: str, key: Hashable, compute: Callable[[], T]) -> T:
        kept = self._kept[name]
        if key not in kept:
            kept[key] = compute()
            while len(kept) > _MAX_KEPT[name]:
                kept.popitem(last=False)
        kept.move_to_end(key)
        return cast("T", kept[key])


# Sums of the same layers in another order differ by rounding; θ* must not exclude the slicing that attains it.
_TOLERANCE = 1e-9


def balanced_cuts(seconds: NDArray[np.float64], num_stages: int) -> tuple[int, ...]:
    """Return the balanced cuts: the first layer of each stage but the first.

    ``seconds``: seconds of each layer. Requires 1 <= num_stages <= number of layers.
    """
    edges = np.concatenate([[0.0], np.cumsum(seconds)])
    # weight[i, j] = seconds of layers i:j; infinite where i >= j, for every stage has a layer.
    weight = np.where(np.tri(len(edges), dtype=bool).T, edges[None, :] - edges[:, None], np.inf)
    np.fill_diagonal(weight, np.inf)
    slowest = _solve(weight, num_stages, np.maximum)[0]
    within = np.where(weight <= slowest * (1 + _TOLERANCE), weight**2, np.inf)
    return _solve(within, num_stages, np.add)[1]


def _solve(weight: NDArray[np.float64], num_stages: int, join: np.ufunc) -> tuple[float, tuple[int, ...]]:
    """The least joined weight of ``num_stages`` intervals that cover all layers, and their cuts."""
    best, choices = weight[0], []
    for _ in range(num_stages - 1):
        joined = join(best[:, None], weight)
        choices.append(joined.argmin(axis=0))
        best = joined.min(axis=0)
    cuts, stop = [], len(weight) - 1
    for choice in reversed(choices):
        stop = int(choice[stop])
        cuts.append(stop)
    return float(best[-1]), tuple(reversed(cuts))
