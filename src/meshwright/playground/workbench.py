"""From a state to its answer: graph, plan, simulation. What can be kept between requests is kept here.

    model          its graph, or one per microbatch size where the graph is not symbolic in the batch
    cost model     per cluster, scenario and precision; it keeps op prices, transfers and stage memory itself
    balanced cuts  per graph, microbatch size, device kind, precision and number of stages
    answer         the last few states, for the pinned one and for exports

No search happens here; an answer is one program, built, priced and simulated.
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
from meshwright.planner.evaluate import RankedPlan, rank_simulation
from meshwright.playground.balance import balanced_cuts, layer_seconds
from meshwright.playground.layout import check_duration, check_shape, make_plan
from meshwright.playground.scenario import base_cluster, scenario_cost, scenario_of
from meshwright.playground.state import State
from meshwright.simulator import Simulation, simulate_plan
from meshwright.spec import Cluster, Graph, Plan, PlaygroundError
from meshwright.spec.errors import suggest

T = TypeVar("T")

# Graphs of large models take some megabytes each, an answer for 64 devices about one.
_MAX_KEPT = {"model": 8, "cost": 24, "seconds": 64, "cuts": 256, "answer": 12}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model on offer.

    ``open`` reads or captures it, once, and gives its graph by microbatch size; ``sizes`` is what plans note beside
    its name.
    """

    open: Callable[[], Callable[[int], Graph]] = field(repr=False)
    sizes: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """What a state comes to: the plan, made for ``base`` and simulated on ``cluster``.

    ``layer_s`` are the seconds of each layer per microbatch on the base's first kind of device, which balanced cuts
    share out; ``balanced`` are those cuts.
    """

    state: State
    graph: Graph
    base: Cluster
    cluster: Cluster
    cost: CostModel
    plan: Plan
    simulation: Simulation
    ranked: RankedPlan
    layer_s: NDArray[np.float64]
    balanced: tuple[int, ...]


class Table(NamedTuple):
    """Measurements of devices of a kind, which states with it are priced with."""

    kind: str
    path: Path


class Workbench:
    """Answers states. One thread at a time."""

    def __init__(
        self,
        models: Mapping[str, Model],
        clusters: Mapping[str, Cluster] | None = None,
        table: Table | None = None,
    ) -> None:
        self.models = dict(models)
        self._table = table
        self.clusters = dict(clusters or {})
        self._kept: dict[str, OrderedDict[Hashable, Any]] = {name: OrderedDict() for name in _MAX_KEPT}

    def answer(self, state: State) -> Answer:
        """Build, price and simulate the plan of a state.

        Raises MeshwrightError, saying what to change, for a state that has no plan; needing too much memory is none.
        """
        return self._keep("answer", state, lambda: self._answer(state))

    def prepare(self, state: State) -> tuple[Graph, Cluster, Cluster, CostModel]:
        """Graph, base, cluster of the scenario and its cost model."""
        model = self._model(state)
        base = base_cluster(state, self.clusters)
        cost = self._cost(state, base)
        graph = self._keep("model", state.model, model.open)(state.microbatch_size)
        return graph, base, cost.cluster, cost

    def graphs_of(self, state: State) -> Callable[[int], Graph]:
        """The graph of a state's model by microbatch size."""
        return self._keep("model", state.model, self._model(state).open)

    def sizes_of(self, state: State) -> tuple[tuple[str, int], ...]:
        """The sizes that plans for a state's model note."""
        return self._model(state).sizes

    def _model(self, state: State) -> Model:
        if state.model not in self.models:
            raise PlaygroundError(
                f"There is no model {state.model[:80]!r} on this page{suggest(state.model[:80], self.models)}. "
                "Choose one of the list, or start the page with it: meshwright show --play MODEL."
            )
        return self.models[state.model]

    def _answer(self, state: State) -> Answer:
        graph, base, cluster, cost = self.prepare(state)
        check_shape(state, len(graph.layers), base.num_ranks)
        seconds, balanced = self._balance(state, graph, base)
        check_duration(state, seconds)
        plan = make_plan(state, graph, base, state.cuts or balanced, self.sizes_of(state))
        simulation = simulate_plan(plan, graph, cluster, cost=cost)
        return Answer(
            state=state,
            graph=graph,
            base=base,
            cluster=cluster,
            cost=cost,
            plan=plan,
            simulation=simulation,
            ranked=rank_simulation(simulation, plan, cluster),
            layer_s=seconds,
            balanced=balanced,
        )

    def _balance(self, state: State, graph: Graph, base: Cluster) -> tuple[NDArray[np.float64], tuple[int, ...]]:
        kind = base.device_kind(0)
        plain = replace(state, slowdown=1.0, link_slowdown=1.0, nic_slowdown=1.0, num_nics=0, memory_gib=0.0)
        key = state.model, state.microbatch_size, state.kind, state.precision
        seconds = self._keep(
            "seconds", key, lambda: layer_seconds(graph, state.microbatch_size, kind, self._cost(plain, base))
        )
        count = state.num_stages
        return seconds, self._keep("cuts", (*key, count), lambda: balanced_cuts(seconds, count))

    def _cost(self, state: State, base: Cluster) -> CostModel:
        key = state.kind, state.num_nodes, state.devices_per_node, scenario_of(state), state.precision
        return self._keep("cost", key, lambda: scenario_cost(state, self._usual(state, base)))

    def _usual(self, state: State, base: Cluster) -> CostModel:
        """Prices without a scenario."""
        if self._table is None or self._table.kind != state.kind:
            return CostModel(cluster=base, precision=state.precision)
        path, key = self._table.path, (state.kind, state.num_nodes, state.devices_per_node, state.precision)
        return self._keep("cost", key, lambda: load_cost_model(base, path, state.precision))

    def _keep(self, name: str, key: Hashable, compute: Callable[[], T]) -> T:
        kept = self._kept[name]
        if key not in kept:
            kept[key] = compute()
            while len(kept) > _MAX_KEPT[name]:
                kept.popitem(last=False)
        kept.move_to_end(key)
        return cast("T", kept[key])
