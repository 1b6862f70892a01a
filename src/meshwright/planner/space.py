"""A problem under one setting (`Space`), and the combinations of axis sizes (`list_shardings`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING

from meshwright.cost import CostModel
from meshwright.cost.autocast import as_computed
from meshwright.cost.memory import MemoryLimit
from meshwright.cost.without import without_devices
from meshwright.planner.choices import Choices, Setting
from meshwright.planner.short import is_plain_chain
from meshwright.planner.stage_tables import Structure, Tables, as_kept_least, find_structure, make_tables
from meshwright.program import lower_graph, own_workload
from meshwright.spec import (
    Cluster,
    GradientExchange,
    Graph,
    Offload,
    OpPlacement,
    Plan,
    PlanError,
    Recompute,
    Sharding,
    StagePlan,
    Workload,
    format_count,
    format_seconds,
)
from meshwright.spec.offload import check_offload
from meshwright.spec.plan import takes_part_alike
from meshwright.spec.recompute import is_by_stage, num_named_stages
from meshwright.spec.sharding import AXES

if TYPE_CHECKING:
    from meshwright.planner.problem import Problem


def list_shardings(
    *,
    tensor: Sequence[int] = (1,),
    context: Sequence[int] = (1,),
    expert: Sequence[int] = (1,),
    sequence_parallel: bool = False,
    placements: tuple[OpPlacement, ...] = (),
) -> tuple[Sharding, ...]:
    """Return the shardings of all combinations of axis sizes.

    If there are several combinations, ``sequence_parallel`` and ``placements`` are dropped from those in which their
    axis has size 1. Raises PlanError if there is only one combination, and it does not allow a requested option.
    """
    sizes = list(product(dict.fromkeys(tensor), dict.fromkeys(context), dict.fromkeys(expert)))
    found = []
    for each in sizes:
        of_axis = dict(zip(AXES, each, strict=True))
        kept = tuple(item for item in placements if len(sizes) == 1 or of_axis[item.axis] > 1)
        apart = sequence_parallel and (len(sizes) == 1 or of_axis["tensor"] > 1)
        found.append(
            Sharding(tensor=each[0], context=each[1], expert=each[2], sequence_parallel=apart, placements=kept)
        )
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Space:
    """A problem under one setting; stages, replicas, microbatches, schedule and ranks remain to be chosen.

    A rank is a team of devices: ``num_ranks`` counts teams, ``cluster`` and ``cost`` are of teams, and ``workload`` and
    ``graph_for`` are those of one team.
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
        """The offload of all plans of this space."""
        return self.setting.offload

    def graph_for(self, microbatch_size: int) -> Graph:
        """Return the graph that one device computes for a microbatch size, in the workload's precision."""
        graph, setting = self.problem.graph_for(microbatch_size), self.setting
        if setting.sharding.is_whole and setting.recompute == "none":
            return as_computed(graph, self.workload.numbers)
        if id(graph) not in self._graphs:
            local = lower_graph(graph, setting.sharding, *self.problem.recomputed(graph, setting.recompute))
            self._graphs[id(graph)] = graph, as_computed(local, self.workload.numbers)
        return self._graphs[id(graph)][1]

    def tables(self, microbatch_size: int) -> Tables:
        """Return the seconds and bytes of all stages at a microbatch size, cached for all methods."""
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
        """Return the plan with these stages for the local graph; its ranks are teams."""
        graph = self.graph_for(microbatch_size)
        return self._make_plan(stages, microbatch_size, schedule, graph.content_hash)

    def make_whole(self, stages: tuple[StagePlan, ...], microbatch_size: int, schedule: str) -> Plan:
        """Return the plan with these stages for the whole graph; the local graph is not built."""
        graph = self.problem.graph_for(microbatch_size)
        return self.whole(self._make_plan(stages, microbatch_size, schedule, graph.content_hash))

    def _make_plan(self, stages: tuple[StagePlan, ...], microbatch_size: int, schedule: str, graph_hash: str) -> Plan:
        problem = self.problem
        return Plan(
            model=problem.model,
            model_sizes=problem.model_sizes,
            graph_hash=graph_hash,
            cluster=self.cluster.name,
            workload=self.workload,
            stages=stages,
            num_microbatches=self.workload.global_batch // microbatch_size,
            schedule=schedule,
            schedule_hash=problem.choices.schedule_hashes.get(schedule, ""),
            exchange=self.exchange.suited_to(schedule),
            offload=self.offload,
            idle=self.setting.idle,
            compiled=problem.compiled,
        )

    def shareable(self, counts: Iterable[int], microbatch_size: int) -> tuple[int, ...]:
        """Return the numbers of replicas in ``counts`` that a stage may have.

        Each is 1 or divisible by the shard size; with ZeRO 2 and 3 it must also divide the number of microbatches.
        """
        size, num_microbatches = self.exchange.shard_size, self.workload.global_batch // microbatch_size
        allowed = (count for count in counts if takes_part_alike(count, num_microbatches, self.exchange.zero))
        return tuple(count for count in allowed if count == 1 or not size or count % size == 0)

    def whole(self, plan: Plan) -> Plan:
        """Return the plan of the whole graph for a plan of the local graph: with sharding and recompute added."""
        setting = self.setting
        if setting.sharding.is_whole and setting.recompute == "none":
            return plan
        graph = self.problem.graph_for(plan.microbatch_size)
        # A plan that lacks named stages is not allowed by the problem (`objection`).
        again = self.problem.recomputed_by(plan, graph, setting.recompute) or Recompute()
        return replace(
            plan,
            graph_hash=graph.content_hash,
            workload=self.problem.workload,
            sharding=setting.sharding,
            recompute=again.ranges,
            keeps=again.keeps,
            idle=setting.idle,
        )


def make_space(problem: Problem, setting: Setting) -> Space:
    """Return the space of a setting. Raises the errors of `Problem.space`."""
    sharding, chosen = setting.sharding, problem.choices
    workload = own_workload(problem.workload, sharding)
    cluster = problem.cluster.without(setting.idle) if setting.idle else problem.cluster
    cost = without_devices(problem.cost, setting.idle).for_teams(sharding)
    if setting.num_devices % sharding.width:
        raise PlanError(
            f"{setting.num_devices} devices cannot be used in teams of {sharding.width} (tensor times context times "
            f"expert); expected a multiple of {sharding.width}. Choose another number of devices, or other axis sizes."
        )
    num_ranks = setting.num_devices // sharding.width
    sizes = problem.microbatch_sizes(workload)
    # Ops that cannot be split are found here, on the few ops of a short graph, instead of during a search. Placements
    # may name ops that the short graph lacks.
    whole = problem.graph_for(sizes[0])
    lower_graph(whole if sharding.placements else problem.short_graph(sizes[0]).graph, sharding, ())
    _check_named_stages(chosen, setting.recompute)
    check_offload(setting.offload, cluster, setting.num_devices)
    space = Space(
        problem=problem,
        setting=setting,
        cluster=cost.cluster if cost.devices else cluster,
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
    """Raise PlanError for words per stage unless all plans have these stages."""
    if is_by_stage(recompute) and (not chosen.num_stages or min(chosen.num_stages) < num_named_stages(recompute)):
        raise PlanError(
            f"The recompute setting {recompute!r} names stages; expected plans that have all of them. Give "
            f"--stages {num_named_stages(recompute)} or more, or one word for all stages."
        )


def _quick_enough(space: Space, max_latency_s: float) -> Space:
    """Return the space without microbatch sizes whose computation alone exceeds the allowed latency.

    Raises PlanError if none is left. If layers are not a chain, stages may work in parallel, so nothing is known before
    the simulation.
    """
    if not is_plain_chain(space.problem.short_graph(space.microbatch_sizes[0]).graph):
        return space
    kinds = space.cluster.device_kinds
    least = {}
    for size in space.microbatch_sizes:
        graph = space.graph_for(size)
        least[size] = min(float(space.cost.estimate_ops(graph, size, kind).forward_s.sum()) for kind in kinds)
    # Simulated seconds are sums of whole picoseconds.
    sizes = tuple(size for size, seconds in least.items() if seconds <= max_latency_s * (1 + 1e-6))
    if not sizes:
        size, seconds = min(least.items(), key=lambda item: item[1])
        split = space.setting.sharding.describe() or "whole ops"
        raise PlanError(
            f"No plan with {split} answers a microbatch within {format_seconds(max_latency_s)}: a microbatch of "
            f"{format_count(size, 'sample')} takes at least {format_seconds(seconds)} to compute. Allow smaller "
            "microbatches, split ops over devices (--tensor), or allow a longer --max-latency."
        )
    found = replace(space, microbatch_sizes=sizes)
    found._graphs.update(space._graphs)
    return found
