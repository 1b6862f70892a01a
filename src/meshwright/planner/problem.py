"""What a search is asked: a model, machines, a workload, and what plans may choose.

A **setting** is a choice that decides which graph a device computes and what it keeps of it: how many devices, how ops
are split over teams of them, the ZeRO stage, what is computed again, what is kept away from devices. Under a setting
the problem is one without any of these (`Space`): its graphs are the local ones, its ranks teams (`simulator.teams`).
What is left to choose there are stages, replicas, microbatches, schedule and ranks. A plan found in a space is that of
the whole graph but for what it says of the setting, which `Space.whole` adds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal, cast

from meshwright.cost import CostModel
from meshwright.cost.autocast import as_computed
from meshwright.cost.memory import MemoryLimit
from meshwright.planner.choices import Choices, Setting
from meshwright.planner.microbatches import microbatch_sizes
from meshwright.planner.short import ShortGraph, is_plain_chain, shorten
from meshwright.planner.stage_tables import Structure, Tables, as_kept_least, find_structure, make_tables
from meshwright.program import lower_graph, own_workload
from meshwright.spec import (
    Cluster,
    GradientExchange,
    Graph,
    MeshwrightError,
    Offload,
    Plan,
    PlanError,
    StagePlan,
    Workload,
    format_seconds,
    read_recompute,
)
from meshwright.spec.offload import check_offload
from meshwright.spec.recompute import Recompute
from meshwright.spec.recompute_words import is_by_stage, name_recompute, num_named_stages, word_of_first
from meshwright.spec.scenario import Scenario
from meshwright.spec.stage_plan import takes_part_alike

# What the best plan is best in.
Aim = Literal["throughput", "latency"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """One search. ``graph_for`` gives the graph for a microbatch size (the same one if its sizes are symbolic).

    ``cost`` is the cost model to price with, by default datasheets.
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

        ``bounds`` are the layers of a plan's stages. Before they are known, words for stages mean what the first of
        them is told, for all: it mostly has the most microbatches under way, so that what fits there is not left out.
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
        for item in product(
            chosen.num_devices or (self.cluster.num_ranks,),
            chosen.shardings,
            chosen.sharing(),
            chosen.recompute,
            chosen.offload,
        ):
            num_devices, sharding, (zero, shard_size), recompute, offload = item
            yield Setting(num_devices, sharding, zero, recompute, offload, shard_size)

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
        setting = Setting(plan.num_devices, plan.sharding, exchange.zero, word or "", plan.offload, exchange.shard_size)
        if word is None or (self.only and setting not in self.only):
            return None
        allowed = (
            setting.num_devices in (chosen.num_devices or (self.cluster.num_ranks,)),
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
        counts = chosen.num_devices or (self.cluster.num_ranks,)
        sharing = plan.exchange.zero, plan.exchange.shard_size
        exchange = replace(self.exchange, zero=sharing[0], shard_size=sharing[1]).suited_to(plan.schedule)
        wrong = {
            "workload": plan.workload != self.workload,
            "number of devices": plan.num_devices not in counts
            and not (self.may_idle and plan.num_devices < max(counts)),
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

    def resorting(self) -> Problem:
        """The same problem where what its choices leave as last resorts is taken."""
        chosen = self.choices
        return replace(self, choices=replace(chosen, offload=chosen.last_resorts, last_resorts=()), only=())

    def _word_of(self, plan: Plan) -> str | None:
        """What of a plan is computed again, in the words of the choices or for layers; None if they do not allow it."""
        again, graph = (plan.recompute, plan.keeps), self.graph_for(plan.microbatch_size)
        words = dict.fromkeys((*self.choices.recompute, *(setting.recompute for setting in self.only)))
        for word in words:
            if self._recomputed_by(plan, graph, word) == again:
                return word
        word = name_recompute(graph, Recompute(*again))
        return word if word and self.choices.allows_recompute(word) else None

    def _recomputed_by(self, plan: Plan, graph: Graph, recompute: str) -> Recompute | None:
        """What a choice means for a plan; None if it names stages that the plan lacks."""
        try:
            return self.recomputed(graph, recompute, plan.bounds)
        except PlanError:
            return None

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
                self._spaces[setting] = _make_space(self, setting)
            except MeshwrightError as error:
                self._spaces[setting] = error
        found = self._spaces[setting]
        if isinstance(found, MeshwrightError):
            raise found
        return found


def compiled_graphs(graph_for: Callable[[int], Graph]) -> Callable[[int], Graph]:
    """The same graphs with their layers compiled, each made once."""
    made: dict[int, tuple[Graph, Graph]] = {}

    def compiled(microbatch_size: int) -> Graph:
        graph = graph_for(microbatch_size)
        if graph.compiled:
            return graph
        return made.setdefault(id(graph), (graph, replace(graph, compiled=1)))[1]

    return compiled


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Space:
    """A problem under one setting: stages, replicas, microbatches, schedule and ranks are left to choose.

    ``graph_for``, ``cluster``, ``workload`` and ``cost`` are those that one team sees; ``num_ranks`` are teams.
    """

    problem: Problem
    setting: Setting
    cluster: Cluster
    workload: Workload
    cost: CostModel
    num_ranks: int
    microbatch_sizes: tuple[int, ...]
    schedules: tuple[str, ...]
    num_stages: tuple[int, ...]
    memory: MemoryLimit
    exchange: GradientExchange
    _graphs: dict[int, tuple[Graph, Graph]] = field(init=False, repr=False, default_factory=dict)
    _structures: dict[int, tuple[Graph, Structure]] = field(init=False, repr=False, default_factory=dict)
    _tables: dict[int, Tables] = field(init=False, repr=False, default_factory=dict)

    @property
    def offload(self) -> Offload:
        """What its plans keep away from devices."""
        return self.setting.offload

    def graph_for(self, microbatch_size: int) -> Graph:
        """The local graph for a microbatch size, as it is computed in the workload's precision."""
        graph, setting = self.problem.graph_for(microbatch_size), self.setting
        if setting.sharding.is_whole and setting.recompute == "none":
            return as_computed(graph, self.workload.numbers)
        if id(graph) not in self._graphs:
            local = lower_graph(graph, setting.sharding, *self.problem.recomputed(graph, setting.recompute))
            self._graphs[id(graph)] = graph, as_computed(local, self.workload.numbers)
        return self._graphs[id(graph)][1]

    def tables(self, microbatch_size: int) -> Tables:
        """Seconds and bytes of all stages at a microbatch size, made once for all methods."""
        if microbatch_size not in self._tables:
            graph = self.graph_for(microbatch_size)
            if id(graph) not in self._structures:
                kept = as_kept_least(graph, self.workload, self.cluster)
                self._structures[id(graph)] = graph, find_structure(kept)
            structure = self._structures[id(graph)][1]
            self._tables[microbatch_size] = make_tables(
                graph, structure, microbatch_size, self.cluster, self.workload, self.cost, self.offload
            )
        return self._tables[microbatch_size]

    def make_plan(self, stages: tuple[StagePlan, ...], microbatch_size: int, schedule: str) -> Plan:
        """A plan of the local graph; its ranks are teams."""
        problem = self.problem
        return Plan(
            model=problem.model,
            model_sizes=problem.model_sizes,
            graph_hash=self.graph_for(microbatch_size).content_hash,
            cluster=self.cluster.name,
            workload=self.workload,
            stages=stages,
            num_microbatches=self.workload.global_batch // microbatch_size,
            schedule=schedule,
            schedule_hash=problem.choices.schedule_hashes.get(schedule, ""),
            exchange=self.exchange.suited_to(schedule),
            offload=self.offload,
            compiled=problem.compiled,
        )

    def shareable(self, counts: Iterable[int], microbatch_size: int) -> tuple[int, ...]:
        """Numbers of replicas that the shard size divides, and one; of those that may share states so."""
        size, num_microbatches = self.exchange.shard_size, self.workload.global_batch // microbatch_size
        allowed = (count for count in counts if takes_part_alike(count, num_microbatches, self.exchange.zero))
        return tuple(count for count in allowed if count == 1 or not size or count % size == 0)

    def whole(self, plan: Plan) -> Plan:
        """A plan of the local graph, as one of the whole graph."""
        setting = self.setting
        if setting.sharding.is_whole and setting.recompute == "none":
            return plan
        graph = self.problem.graph_for(plan.microbatch_size)
        # A plan that lacks stages which are named is none of the problem's (`objection`).
        again = self.problem._recomputed_by(plan, graph, setting.recompute) or Recompute()
        return replace(
            plan,
            graph_hash=graph.content_hash,
            workload=self.problem.workload,
            sharding=setting.sharding,
            recompute=again.ranges,
            keeps=again.keeps,
        )


def _make_space(problem: Problem, setting: Setting) -> Space:
    sharding, chosen = setting.sharding, problem.choices
    workload = own_workload(problem.workload, sharding)
    cost = problem.cost.for_teams(sharding)
    if setting.num_devices % sharding.width:
        raise PlanError(
            f"{setting.num_devices} devices were to be used in teams of {sharding.width} (tensor times context times "
            "expert); expected a multiple. Choose another number of devices, or other sizes of the axes."
        )
    num_ranks = setting.num_devices // sharding.width
    sizes = microbatch_sizes(workload, chosen.microbatch_sizes)
    # What ops cannot take is found here, on the few of a short graph, not in the middle of a search. Placements may
    # name ops that the short one lacks.
    whole = problem.graph_for(sizes[0])
    lower_graph(whole if sharding.placements else problem.short_graph(sizes[0]).graph, sharding, ())
    _check_named_stages(chosen, setting.recompute)
    check_offload(setting.offload, problem.cluster, setting.num_devices)
    space = Space(
        problem=problem,
        setting=setting,
        cluster=cost.cluster if cost.devices else problem.cluster,
        workload=workload,
        cost=cost,
        num_ranks=num_ranks,
        microbatch_sizes=sizes,
        schedules=chosen.schedules,
        num_stages=chosen.num_stages,
        memory=problem.memory,
        exchange=replace(problem.exchange, zero=setting.zero, shard_size=setting.shard_size),
    )
    return space if problem.max_latency_s is None else _quick_enough(space, problem.max_latency_s)


def _check_named_stages(chosen: Choices, recompute: str) -> None:
    """Raise PlanError for words for stages unless all plans have these."""
    if is_by_stage(recompute) and (not chosen.num_stages or min(chosen.num_stages) < num_named_stages(recompute)):
        raise PlanError(
            f"Stages were named in {recompute!r}; expected a number of stages of plans that has them all. Give "
            f"--stages {num_named_stages(recompute)} or more, or one word for all stages."
        )


def _quick_enough(space: Space, max_latency_s: float) -> Space:
    """The space without microbatches that take longer than allowed to be computed alone.

    Raises PlanError if none is left. Where layers are no chain, stages may work beside each other, so that nothing is
    known before it is simulated.
    """
    if not is_plain_chain(space.problem.short_graph(space.microbatch_sizes[0]).graph):
        return space
    kinds = space.cluster.device_kinds
    least = {}
    for size in space.microbatch_sizes:
        graph = space.graph_for(size)
        least[size] = min(float(space.cost.price_ops(graph, size, kind).forward_s.sum()) for kind in kinds)
    # Simulated seconds are sums of whole picoseconds.
    sizes = tuple(size for size, seconds in least.items() if seconds <= max_latency_s * (1 + 1e-6))
    if not sizes:
        size, seconds = min(least.items(), key=lambda item: item[1])
        split = space.setting.sharding.describe() or "whole ops"
        raise PlanError(
            f"No plan with {split} answers a microbatch within {format_seconds(max_latency_s)}: to compute one of "
            f"{size} takes {format_seconds(seconds)} at least. Allow smaller microbatches, split ops over devices, or "
            "allow more time."
        )
    found = replace(space, microbatch_sizes=sizes)
    found._graphs.update(space._graphs)
    return found
