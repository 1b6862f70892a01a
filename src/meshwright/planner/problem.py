"""The input of a search (`Problem`): a model, machines, a workload, and the choices of plans, such as microbatch sizes.

A **setting** is one combination of the choices that decide which graph a device computes and what it keeps: the number
of devices, the split of ops over teams (tensor-, context- and expert-parallel groups), the ZeRO stage, recompute and
offload. A setting reduces the problem to one without these choices (`Space`): its graphs are local graphs of one
device, its ranks are teams (`simulator.routes`). Stages, replicas, microbatches, schedule and ranks remain to be
chosen. `Space.whole` adds the setting to a plan of a space, which makes it a plan of the whole graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Literal, cast

from meshwright.cost import CostModel
from meshwright.cost.memory import MemoryLimit
from meshwright.planner.choices import Choices, Setting
from meshwright.planner.short import ShortGraph, shorten
from meshwright.planner.space import Space, make_space
from meshwright.spec import (
    Cluster,
    GradientExchange,
    Graph,
    GraphError,
    MeshwrightError,
    Offload,
    Plan,
    PlanError,
    Recompute,
    Workload,
    read_recompute,
)
from meshwright.spec.exchange import ZeroStage
from meshwright.spec.recompute import is_by_stage, name_recompute, word_of_first
from meshwright.spec.scenario import Scenario

# Sizes tried by default: each needs the costs of the whole graph (0.1 to 0.3 s at 6,000 ops).
MAX_MICROBATCH_SIZES = 12


def microbatch_sizes(workload: Workload, given: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the microbatch sizes to try, ascending: those in ``given``, or at most 12 divisors of the global batch.

    Raises PlanError if a given size does not divide the global batch.
    """
    batch = workload.global_batch
    if given:
        wrong = [size for size in given if size < 1 or batch % size]
        if wrong:
            size = max(wrong[0], 1)
            near = " or ".join(str(count * size) for count in (batch // size, batch // size + 1) if count)
            raise PlanError(
                f"A global batch of {batch} samples does not divide into microbatches of "
                f"{', '.join(map(str, wrong))}. Choose sizes that divide {batch} "
                f"({', '.join(map(str, divisors(batch)[:12]))}), or the nearest batch for {size}: {near}."
            )
        return tuple(sorted(set(given)))
    found = divisors(batch)
    if len(found) <= MAX_MICROBATCH_SIZES:
        return tuple(found)
    # Evenly spread on a logarithmic scale: the divisor nearest to each step of a geometric ladder.
    steps = [batch ** (k / (MAX_MICROBATCH_SIZES - 1)) for k in range(MAX_MICROBATCH_SIZES)]
    return tuple(sorted({min(found, key=lambda size: (abs(size / step - 1), size)) for step in steps}))


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending."""
    small = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})


# With more settings than this, bounds decide which ones are searched in detail.
FEW_SETTINGS = 4
# The goal that plans are ranked by.
Aim = Literal["throughput", "latency"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """The input of a search.

    ``graph_for`` returns the graph for a microbatch size (the same graph for all if its sizes are symbolic). ``cost``
    is the cost model, by default that of datasheets. ``exchange`` is the gradient exchange of all plans, except for the
    ZeRO stage and the shard size. ``memory`` limits what a plan may use of a device. ``max_latency_s`` limits the
    latency of a microbatch in inference. ``prices`` are the prices of devices. ``aim`` is "throughput" (the shortest
    step) or, in inference, "latency" (the shortest time to answer a batch that arrives at once). ``model`` and
    ``model_sizes`` are recorded in plans. ``only``: if not empty, the settings to search. ``may_idle``: plans may leave
    devices unused; always True for the aim latency. ``compiled``: torch compiles the layers (`spec.compiled_units`).
    """

    graph_for: Callable[[int], Graph]
    cluster: Cluster
    workload: Workload
    cost: CostModel = field(default=cast("CostModel", None))
    choices: Choices = field(default_factory=Choices)
    exchange: GradientExchange = field(default_factory=GradientExchange)
    memory: MemoryLimit = field(default_factory=MemoryLimit)
    max_latency_s: float | None = None
    aim: Aim = "throughput"
    prices: Scenario = field(default_factory=Scenario)
    model: str = ""
    model_sizes: tuple[tuple[str, int], ...] = ()
    only: tuple[Setting, ...] = ()
    may_idle: bool = False
    compiled: bool = False
    _spaces: dict[Setting, Space | MeshwrightError] = field(init=False, repr=False, default_factory=dict)
    _short: dict[int, tuple[Graph, ShortGraph]] = field(init=False, repr=False, default_factory=dict)
    _again: dict[tuple[Hashable, ...], tuple[Graph, Recompute]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if cast("CostModel | None", self.cost) is None:
            object.__setattr__(self, "cost", CostModel(cluster=self.cluster, precision=self.workload.precision))
        if self.aim == "latency":
            object.__setattr__(self, "may_idle", True)
        if self.compiled:
            object.__setattr__(self, "graph_for", compiled_graphs(self.graph_for))

    def short_graph(self, microbatch_size: int) -> ShortGraph:
        """Return the graph for a microbatch size with one layer for all equal ones (`shorten`), cached."""
        graph = self.graph_for(microbatch_size)
        if id(graph) not in self._short:
            self._short[id(graph)] = graph, shorten(graph)
        return self._short[id(graph)][1]

    def recomputed(self, graph: Graph, recompute: str, bounds: tuple[tuple[int, int], ...] | None = None) -> Recompute:
        """Return the ops that the setting ``recompute`` recomputes in a graph, cached (`spec.read_recompute`).

        ``bounds`` are the layers of a plan's stages, for words by stage. Without bounds, all stages use the word of the
        first stage, which usually has the most microbatches in flight, so that no plan that fits is excluded.
        """
        if not is_by_stage(recompute):
            bounds = None
        elif bounds is None:
            recompute = word_of_first(recompute)
        key = id(graph), recompute, bounds
        if key not in self._again:
            self._again[key] = graph, read_recompute(graph, recompute, bounds)
        return self._again[key][1]

    def settings(self) -> Iterator[Setting]:
        """Yield all combinations of the choices, in their order; some of them may be impossible."""
        if self.only:
            yield from self.only
            return
        chosen = self.choices
        for item in product(self.devices(), chosen.shardings, chosen.sharing(), chosen.recompute, chosen.offload):
            (idle, num_devices), sharding, (zero, shard_size), recompute, offload = item
            if zero < 3 and offload.parameters == "host" and 3 in chosen.zero:
                continue
            yield Setting(num_devices, sharding, zero, recompute, offload, shard_size, idle)

    def devices(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield pairs of a set of devices to leave out, and a number of the remaining devices to use."""
        for idle in self.choices.idle:
            left = self.cluster.num_ranks - len(idle)
            for count in self.choices.num_devices or (left,):
                if count <= left:
                    yield idle, count

    @property
    def is_wide(self) -> bool:
        """True if there are more than `FEW_SETTINGS` settings, too many to search each in detail."""
        return len(list(islice(self.settings(), FEW_SETTINGS + 1))) > FEW_SETTINGS

    @property
    def has_own_placements(self) -> bool:
        """True if a method may split ops in other ways than the sharding rules; lower bounds do not cover these."""
        return any(setting.sharding.tensor > 1 for setting in self.settings())

    def under(self, settings: Sequence[Setting]) -> Problem:
        """Return the same problem restricted to these settings; it shares the cached results."""
        other = replace(self, only=tuple(dict.fromkeys(settings)))
        other._spaces.update(self._spaces)
        other._short.update(self._short)
        other._again.update(self._again)
        return other

    def setting_of(self, plan: Plan) -> Setting | None:
        """Return the setting of a plan; None if the choices of this problem, or ``only``, exclude it."""
        chosen, exchange = self.choices, plan.exchange
        word = self._word_of(plan)
        setting = Setting(
            plan.num_devices, plan.sharding, exchange.zero, word or "", plan.offload, exchange.shard_size, plan.idle
        )
        if word is None or (self.only and setting not in self.only):
            return None
        allowed = (
            (plan.idle, plan.num_devices) in self.devices(),
            setting.sharding in chosen.shardings,
            (setting.zero, setting.shard_size) in chosen.sharing(),
            setting.offload in chosen.ways_to_offload,
        )
        return setting if self.only or all(allowed) else None

    def objection(self, plan: Plan) -> str:
        """Return the properties of a plan that this problem does not allow, joined by "and"; "" if all are allowed.

        Placements of single ops are not compared, since methods may choose them.
        """
        chosen = self.choices
        sharding = replace(plan.sharding, placements=())
        counts = [count for idle, count in self.devices() if idle == plan.idle]
        sharing = plan.exchange.zero, plan.exchange.shard_size
        exchange = replace(self.exchange, zero=sharing[0], shard_size=sharing[1]).suited_to(plan.schedule)
        wrong = {
            "workload": plan.workload != self.workload,
            "set of devices": plan.idle not in chosen.idle,
            "number of devices": plan.num_devices not in counts
            and not (self.may_idle and plan.num_devices < max(counts, default=0)),
            "sharding": sharding not in [replace(item, placements=()) for item in chosen.shardings],
            "ZeRO stage": sharing[0] not in chosen.zero,
            "shard size": sharing[0] in chosen.zero and sharing not in chosen.sharing(),
            "exchange": plan.exchange != exchange,
            "recompute": self._word_of(plan) is None,
            "offload": plan.offload not in chosen.ways_to_offload,
            "use of torch.compile": plan.compiled != self.compiled,
            "schedule": plan.schedule not in chosen.schedules,
            "number of stages": bool(chosen.num_stages)
            and not {len(plan.stages), len({stage.ranks for stage in plan.stages})} & set(chosen.num_stages),
            "microbatch size": bool(chosen.microbatch_sizes) and plan.microbatch_size not in chosen.microbatch_sizes,
        }
        return " and ".join(name for name, is_wrong in wrong.items() if is_wrong)

    def resorting(self, ways: tuple[Offload, ...] = ()) -> Problem:
        """Return the problem in which all plans offload: by one of ``ways``, by default of the last resorts.

        Last resorts (`Choices.last_resorts`) are kinds of offload that are used only if no plan fits without them. If
        all of these keep parameters on the host, the new problem has ZeRO 3 only.
        """
        chosen, ways = self.choices, ways or self.choices.last_resorts
        zero: tuple[ZeroStage, ...] = (3,) if all(away.parameters == "host" for away in ways) else chosen.zero
        return replace(self, choices=replace(chosen, offload=ways, last_resorts=(), zero=zero), only=())

    def _word_of(self, plan: Plan) -> str | None:
        """Return what a plan recomputes, as a word of the choices or for layers; None if the choices exclude it."""
        again, graph = (plan.recompute, plan.keeps), self.graph_for(plan.microbatch_size)
        words = dict.fromkeys((*self.choices.recompute, *(setting.recompute for setting in self.only)))
        for word in words:
            if self.recomputed_by(plan, graph, word) == again:
                return word
        word = name_recompute(graph, Recompute(*again))
        return word if word and self.choices.allows_recompute(word) else None

    def recomputed_by(self, plan: Plan, graph: Graph, recompute: str) -> Recompute | None:
        """Return what the setting ``recompute`` recomputes in a plan; None if it names stages that the plan lacks."""
        try:
            return self.recomputed(graph, recompute, plan.bounds)
        except PlanError:
            return None

    def microbatch_sizes(self, workload: Workload) -> tuple[int, ...]:
        """Return the microbatch sizes to try for a team's part of the workload.

        Default sizes that the graph does not support are left out. Raises PlanError if a size given in the choices does
        not divide the global batch.
        """
        sizes = microbatch_sizes(workload, self.choices.microbatch_sizes)
        graph = self.graph_for(sizes[0])
        if self.choices.microbatch_sizes or graph.batch_size is not None:
            return sizes
        return tuple(size for size in sizes if size == sizes[0] or _describes(graph, size))

    def spaces(self) -> Iterator[Space]:
        """Yield the space of each possible setting. Raises the error of the first setting if none is possible."""
        errors: list[MeshwrightError] = []
        for setting in self.settings():
            try:
                yield self.space(setting)
            except MeshwrightError as error:
                errors.append(error)
        if len(errors) == sum(1 for _ in self.settings()):
            raise errors[0]

    def space(self, setting: Setting) -> Space:
        """Return the space of a setting, cached.

        Raises PlanError if the number of devices is not a multiple of the team size, samples cannot be divided, or ops
        cannot be split like this; ClusterError if teams do not match the nodes.
        """
        if setting not in self._spaces:
            try:
                self._spaces[setting] = make_space(self, setting)
            except MeshwrightError as error:
                self._spaces[setting] = error
        found = self._spaces[setting]
        if isinstance(found, MeshwrightError):
            raise found
        return found


def _describes(graph: Graph, batch_size: int) -> bool:
    try:
        graph.check_batch_size(batch_size)
    except GraphError:
        return False
    return True


def compiled_graphs(graph_for: Callable[[int], Graph]) -> Callable[[int], Graph]:
    """Return a function like ``graph_for`` whose graphs have compiled layers; each is made once."""
    made: dict[int, tuple[Graph, Graph]] = {}

    def compiled(microbatch_size: int) -> Graph:
        graph = graph_for(microbatch_size)
        if graph.compiled:
            return graph
        return made.setdefault(id(graph), (graph, replace(graph, compiled=1)))[1]

    return compiled
