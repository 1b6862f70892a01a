"""What a search is asked: a model, machines, a workload, and what plans may choose.

A **setting** is a choice that decides which graph a device computes and what it keeps of it: how many devices, how ops
are split over teams of them, the ZeRO stage, what is computed again, what is kept away from devices. Under a setting
the problem is one without any of these (`Space`): its graphs are the local ones, its ranks teams (`simulator.teams`).
What is left to choose there are stages, replicas, microbatches, schedule and ranks. A plan found in a space is that of
the whole graph but for what it says of the setting, which `Space.whole` adds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Literal, cast

from meshwright.cost import CostModel
from meshwright.cost.memory import MemoryLimit
from meshwright.planner.choices import Choices, Setting
from meshwright.planner.microbatches import microbatch_sizes
from meshwright.planner.short import ShortGraph, shorten
from meshwright.planner.space import Space, make_space
from meshwright.spec import (
    Cluster,
    GradientExchange,
    Graph,
    GraphError,
    MeshwrightError,
    Plan,
    PlanError,
    Workload,
    read_recompute,
)
from meshwright.spec.exchange import ZeroStage
from meshwright.spec.offload import Offload
from meshwright.spec.recompute import Recompute
from meshwright.spec.recompute_words import is_by_stage, name_recompute, word_of_first
from meshwright.spec.scenario import Scenario

# Of more settings than this, bounds choose which ones get a close look.
FEW_SETTINGS = 4
# What the best plan is best in.
Aim = Literal["throughput", "latency"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """One search. ``graph_for`` gives the graph for a microbatch size (the same one if its sizes are symbolic).

    ``cost`` is the cost model, by default that of datasheets.
    ``exchange`` is that of all plans, but for what replicas share. ``memory`` says how much of a device plans may use.
    ``max_latency_s``: in inference, what a microbatch may take from end to end. ``prices``: what devices cost.
    ``aim``: the shortest step; or, in inference, the least time until a batch that arrives at once is answered.
    ``only``: the settings that are looked at, if not all that the choices allow. ``may_idle``: plans may leave devices
    out, as they always may for the least latency. ``compiled``: torch compiles the layers (`spec.compiled_units`).
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
        """The graph for a microbatch size with its repeated layers shortened, made once."""
        graph = self.graph_for(microbatch_size)
        if id(graph) not in self._short:
            self._short[id(graph)] = graph, shorten(graph)
        return self._short[id(graph)][1]

    def recomputed(self, graph: Graph, recompute: str, bounds: tuple[tuple[int, int], ...] | None = None) -> Recompute:
        """What the recompute of a setting means for a graph of this problem, read once (`spec.read_recompute`).

        ``bounds`` are the layers of a plan's stages. Before they are known, all stages take the word of the first: it
        mostly has the most microbatches under way, so that what fits there is not left out.
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
        """All combinations of the choices, in their order; some of them may be impossible."""
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
        """The devices that plans may leave out, each time with how many they may use of the others."""
        for idle in self.choices.idle:
            left = self.cluster.num_ranks - len(idle)
            for count in self.choices.num_devices or (left,):
                if count <= left:
                    yield idle, count

    @property
    def is_wide(self) -> bool:
        """Whether there are too many settings for a close look at each."""
        return len(list(islice(self.settings(), FEW_SETTINGS + 1))) > FEW_SETTINGS

    @property
    def has_own_placements(self) -> bool:
        """Whether a method may place ops in other ways than the rules of sharding do, which no bound covers."""
        return any(setting.sharding.tensor > 1 for setting in self.settings())

    def under(self, settings: Sequence[Setting]) -> Problem:
        """The same problem with these settings alone; what was found out about them is kept."""
        other = replace(self, only=tuple(dict.fromkeys(settings)))
        other._spaces.update(self._spaces)
        other._short.update(self._short)
        other._again.update(self._again)
        return other

    def setting_of(self, plan: Plan) -> Setting | None:
        """The setting that a plan of this problem has; None if the choices, or ``only``, lack it."""
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
        """What of a plan this problem does not allow, in words; nothing of one that it does.

        Placements of ops may be a method's own.
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
        """The same problem where what its choices leave as last resorts is taken, or some ``ways`` of these."""
        chosen, ways = self.choices, ways or self.choices.last_resorts
        zero: tuple[ZeroStage, ...] = (3,) if all(away.parameters == "host" for away in ways) else chosen.zero
        return replace(self, choices=replace(chosen, offload=ways, last_resorts=(), zero=zero), only=())

    def _word_of(self, plan: Plan) -> str | None:
        """What of a plan is computed again, in the words of the choices or for layers; None if they do not allow it."""
        again, graph = (plan.recompute, plan.keeps), self.graph_for(plan.microbatch_size)
        words = dict.fromkeys((*self.choices.recompute, *(setting.recompute for setting in self.only)))
        for word in words:
            if self.recomputed_by(plan, graph, word) == again:
                return word
        word = name_recompute(graph, Recompute(*again))
        return word if word and self.choices.allows_recompute(word) else None

    def recomputed_by(self, plan: Plan, graph: Graph, recompute: str) -> Recompute | None:
        """What a choice means for a plan; None if it names stages that the plan lacks."""
        try:
            return self.recomputed(graph, recompute, plan.bounds)
        except PlanError:
            return None

    def microbatch_sizes(self, workload: Workload) -> tuple[int, ...]:
        """Sizes to try for what one team has of the workload, less those that are too large to be described.

        Raises PlanError for a given size that does not divide the batch.
        """
        sizes = microbatch_sizes(workload, self.choices.microbatch_sizes)
        graph = self.graph_for(sizes[0])
        if self.choices.microbatch_sizes or graph.batch_size is not None:
            return sizes
        return tuple(size for size in sizes if size == sizes[0] or _describes(graph, size))

    def spaces(self) -> Iterator[Space]:
        """What each possible setting leaves to choose. Raises what is wrong with the first one if none is possible."""
        errors: list[MeshwrightError] = []
        for setting in self.settings():
            try:
                yield self.space(setting)
            except MeshwrightError as error:
                errors.append(error)
        if len(errors) == sum(1 for _ in self.settings()):
            raise errors[0]

    def space(self, setting: Setting) -> Space:
        """What a setting leaves to choose.

        Raises PlanError for devices that are no whole number of teams, samples that do not divide, ops that cannot be
        split so; ClusterError for teams that do not fit the nodes.
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
    """The same graphs with their layers compiled, each made once."""
    made: dict[int, tuple[Graph, Graph]] = {}

    def compiled(microbatch_size: int) -> Graph:
        graph = graph_for(microbatch_size)
        if graph.compiled:
            return graph
        return made.setdefault(id(graph), (graph, replace(graph, compiled=1)))[1]

    return compiled
