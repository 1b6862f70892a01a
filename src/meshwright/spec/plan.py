"""Plan: which part of the graph runs on which rank and how it is split, as a JSON document; its stages (`StagePlan`).

The replicas of a stage compute its microbatches in turn, or by their shares, so stages may differ in their number of
replicas. Data parallelism is one stage with many replicas. A rank may hold several stages (virtual stages, chunks) if
the schedule interleaves them. With every plan, the loss of a step is the mean over its microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count, islice, pairwise
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from meshwright.spec.errors import GraphMismatchError, PlanError, suggest
from meshwright.spec.exchange import DEFAULT_EXCHANGE, WAVES, GradientExchange, read_policy
from meshwright.spec.html import Printer, html_table
from meshwright.spec.made_with import UNKNOWN, MadeWith
from meshwright.spec.offload import ON_DEVICE, Offload, check_offload, check_offloaded_plan
from meshwright.spec.own_code import HASH, order_file, split_reference
from meshwright.spec.precision import upgraded_precision
from meshwright.spec.recompute import Ranges, with_recompute
from meshwright.spec.schedules import ASYNCHRONOUS_SCHEDULES, NAMED_SCHEDULES, SCHEDULE_NAMES
from meshwright.spec.sharding import UNSHARDED, Sharding
from meshwright.spec.slices import check_bounds, slice_graph
from meshwright.spec.units import format_count
from meshwright.spec.used_devices import used_of
from meshwright.spec.workload import Workload

if TYPE_CHECKING:
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.graph import Graph


# Replicas compute microbatches in turn: replica m mod R computes microbatch m. If they have ``shares``, replica r
# computes ``shares[r]`` of a step's M microbatches, and its k-th comes when k + 1/2 of its share is due,
#
#     at (k + 1/2) / shares[r]  of the step; among several at one place the first replica comes first
#
# so that a replica with a larger share takes turns more often. Equal shares are the same as none if R divides M.
@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage of a plan: layers ``start:stop``, with one replica on each of ``ranks``.

    ``feeds``: indices of the stages that receive this stage's outputs, if stages form parallel branches; empty in a
    chain. ``shares``: the number of microbatches of a step that each replica computes; empty if replicas take turns.
    """

    start: int
    stop: int
    ranks: tuple[int, ...]
    feeds: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.shares and (len(self.shares) != len(self.ranks) or min(self.shares) < 1):
            raise PlanError(
                f"The shares {list(self.shares)} were given for the ranks {list(self.ranks)}; expected a number of "
                "microbatches, at least 1, for each of them."
            )

    @property
    def turns(self) -> tuple[int, ...]:
        """The replica of microbatches 0, 1, ...; the sequence repeats after its end."""
        return _deal(self.shares) if self.shares else tuple(range(len(self.ranks)))

    def rank_of(self, microbatch: int) -> int:
        """Return the rank whose replica computes this microbatch."""
        if not self.shares:
            return self.ranks[microbatch % len(self.ranks)]
        turns = self.turns
        return self.ranks[turns[microbatch % len(turns)]]

    def counts(self, num_microbatches: int) -> tuple[int, ...]:
        """Return how many of a step's microbatches each replica computes."""
        if self.shares:
            return self.shares
        count, rest = divmod(num_microbatches, len(self.ranks))
        return tuple(count + (replica < rest) for replica in range(len(self.ranks)))

    def microbatches_of(self, replica: int, num_microbatches: int) -> range | tuple[int, ...]:
        """Return the microbatches of a step that a replica computes, in order."""
        if not self.shares:
            return range(replica, num_microbatches, len(self.ranks))
        return tuple(microbatch for microbatch, own in enumerate(self.turns) if own == replica)

    def describe(self) -> str:
        """Return layers and replicas: ``0:4 ×2``, or ``0:4 ×2 (3 + 1)`` with the shares where they differ."""
        alike = len(set(self.shares)) < 2
        shares = "" if alike else f" ({' + '.join(map(str, self.shares))})"
        return f"{self.start}:{self.stop} ×{len(self.ranks)}{shares}"


@lru_cache(maxsize=256)
def _deal(shares: tuple[int, ...]) -> tuple[int, ...]:
    """The replica of each microbatch of a step."""
    replica = np.repeat(np.arange(len(shares)), shares)
    place = np.concatenate([(np.arange(share) + 0.5) / share for share in shares])
    return tuple(replica[np.lexsort((replica, place))].tolist())


def check_shares(plan: Plan, index: int) -> None:
    """Raise PlanError if the shares of stage ``index`` do not add up, or the plan's schedule or exchange excludes them.

    Shares need a synchronous schedule, and gradients that are summed in every step.
    """
    stage = plan.stages[index]
    if sum(stage.shares) != plan.num_microbatches:
        raise PlanError(
            f"The replicas of stage {index} have shares of {' + '.join(map(str, stage.shares))} microbatches; expected "
            f"{plan.num_microbatches} in all, the microbatches of a step."
        )
    if plan.is_asynchronous or plan.exchange.every_steps > 1:
        what = f"the schedule {plan.schedule}" if plan.is_asynchronous else "an exchange with every_steps > 1"
        raise PlanError(
            f"Shares of microbatches were given for stage {index} with {what}, where replicas update weights by "
            "themselves; expected no shares. Leave `shares` out, or change the schedule or `every_steps`."
        )


def takes_part_alike(num_replicas: int, num_microbatches: int, zero: int) -> bool:
    """Return whether replicas that compute microbatches in turn can use the ZeRO stage ``zero``.

    Under ZeRO 2 and 3 every microbatch has collectives in which all replicas take part, so each replica has to compute
    the same number of microbatches.
    """
    return zero < 2 or num_microbatches % num_replicas == 0


def check_counts(plan: Plan) -> None:
    """Raise PlanError if a plan with ZeRO 2 or 3 has replicas with unequal numbers of microbatches."""
    for index, stage in enumerate(plan.stages) if plan.exchange.zero >= 2 else ():
        counts = sorted(set(stage.counts(plan.num_microbatches)))
        if len(counts) > 1:
            raise PlanError(
                f"The replicas of stage {index} compute {' and '.join(map(str, counts))} microbatches; expected equal "
                f"numbers, because ZeRO {plan.exchange.zero} gathers and scatters in every microbatch. Choose a number "
                f"of microbatches that {len(stage.ranks)} divides, or plan with --zero 1 or 0."
            )


# A program lists every microbatch of every stage; beyond this number, building it takes minutes and gigabytes.
MAX_MICROBATCH_STAGES = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one graph is trained (or run for inference) on one cluster for one workload.

    ``model`` and ``cluster`` are the references that the user gave, and ``model_sizes`` the sizes given with the model
    (name and value). ``graph_hash`` identifies the graph that the plan is for.

    ``schedule`` is a name or a reference to the user's own schedule, ``path/to/file.py:function`` or
    ``path/to/orders.csv``; ``schedule_hash`` is then the hash of that file's content. With a ``sharding`` that splits
    ops, every rank is a team of ``sharding.width`` neighbouring devices (`spec.teams`). ``recompute`` lists the ranges
    of the graph's ops that run again in the backward; the results of the ops in ``keeps`` stay in memory instead
    (`spec.recompute`). ``offload`` says what is kept in host memory or on drives (`spec.offload`). ``compiled``: torch
    compiles each layer separately (`spec.compiled_units`).

    ``idle`` lists the devices of the cluster, ascending, that take no part; ranks number the remaining devices.
    ``rewritten`` is the kind of device for which the model's graph was rewritten before planning (`rewrite.planned`);
    empty for the model's own graph. ``made_with`` records the inputs of the cost estimate when the plan was written.
    Raises PlanError for a plan that cannot match any graph.
    """

    model: str
    graph_hash: str
    cluster: str
    workload: Workload
    stages: tuple[StagePlan, ...]
    num_microbatches: int
    schedule: str = "1f1b"
    schedule_hash: str = ""
    exchange: GradientExchange = DEFAULT_EXCHANGE
    sharding: Sharding = UNSHARDED
    recompute: Ranges = ()
    keeps: tuple[int, ...] = ()
    offload: Offload = ON_DEVICE
    compiled: bool = False
    idle: tuple[int, ...] = ()
    model_sizes: tuple[tuple[str, int], ...] = ()
    rewritten: str = ""
    made_with: MadeWith = UNKNOWN

    SCHEMA_VERSION: ClassVar[int] = 2
    upgraded = staticmethod(upgraded_precision)

    def __post_init__(self) -> None:
        _check_plan(self)

    def __hash__(self) -> int:
        # Plans are keys of many caches, and most of them differ in this field; hashing all stages takes longer than
        # the values looked up.
        ends = self.stages[0], self.stages[-1], len(self.stages)
        return hash((self.graph_hash, self.schedule, self.schedule_hash, self.num_microbatches, self.workload, ends))

    @property
    def microbatch_size(self) -> int:
        """Number of samples in one microbatch; under expert parallelism, of each rank of the expert axis."""
        return self.workload.global_batch // (self.num_microbatches * self.sharding.expert)

    @property
    def has_own_schedule(self) -> bool:
        """Whether the schedule is the user's own, from a file."""
        return self.schedule not in NAMED_SCHEDULES

    @property
    def is_asynchronous(self) -> bool:
        """Whether the schedule is asynchronous: weights change while microbatches are in flight."""
        return self.schedule in ASYNCHRONOUS_SCHEDULES

    @property
    def num_ranks(self) -> int:
        """Number of ranks that take part; they are numbered from 0."""
        return 1 + max(rank for stage in self.stages for rank in stage.ranks)

    @property
    def num_devices(self) -> int:
        """Number of devices that take part: those of all ranks, and of ranks that are only parameter servers."""
        return max(self.num_ranks, *(server + 1 for server in self.exchange.servers), 0) * self.sharding.width

    @property
    def num_tracks(self) -> int:
        """Number of ranks in a timeline: those with stages, and those that are only parameter servers."""
        return self.num_devices // self.sharding.width

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that take part, by their numbers in the cluster."""
        idle = frozenset(self.idle)
        return tuple(islice((device for device in count() if device not in idle), self.num_devices))

    @property
    def has_shares(self) -> bool:
        """Whether the replicas of some stage compute unequal numbers of microbatches, given by its shares."""
        return any(stage.shares for stage in self.stages)

    @property
    def has_local_graph(self) -> bool:
        """Whether ranks compute a graph other than the model's: split, recomputed or compiled (`lower_plan`)."""
        return not self.sharding.is_whole or bool(self.recompute) or self.compiled

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Layers (start, stop) of each stage."""
        return tuple((stage.start, stage.stop) for stage in self.stages)

    @property
    def has_branches(self) -> bool:
        """Whether some stages form parallel branches, which their ``feeds`` describe."""
        return any(stage.feeds for stage in self.stages)

    def feeds(self, stage: int) -> tuple[int, ...]:
        """Return the stages that receive a stage's outputs; in a chain, the next stage."""
        if self.has_branches:
            return self.stages[stage].feeds
        return (stage + 1,) if stage + 1 < len(self.stages) else ()

    @property
    def has_virtual_stages(self) -> bool:
        """Whether some rank holds more than one stage."""
        return sum(len(stage.ranks) for stage in self.stages) > self.num_ranks

    @property
    def scales_loss(self) -> bool:
        """Whether losses are scaled, so that before every update all ranks agree whether all gradients are finite."""
        return self.exchange.loss_scale or (self.workload.kind == "training" and self.workload.numbers.scales_loss)

    @property
    def is_runnable(self) -> bool:
        """Whether the runtime can execute the plan's gradient exchange (`GradientExchange.is_runnable`).

        The simulator accepts every plan.
        """
        return not self.only_simulated

    @property
    def only_simulated(self) -> str:
        """The reason, in words, why the runtime cannot execute the plan; empty for a plan that it can execute."""
        return "" if self.exchange.is_runnable else "exchanges gradients in another way than by sums of buckets"

    def without_policy(self) -> Plan:
        """Return the plan in which replicas sum their gradients instead of following an exchange policy."""
        return replace(self, exchange=DEFAULT_EXCHANGE) if self.exchange.policy else self

    @property
    def used_share(self) -> float:
        """The share of a step's samples whose gradients are used; 1 for a user's own exchange policy."""
        policy, count = read_policy(self.exchange.policy) if self.exchange.policy else None, len(self.stages[0].ranks)
        return 1.0 if policy is None else policy.num_used(count) / count

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the indices of the stages on a rank, ascending; at least one."""
        return tuple(index for index, stage in enumerate(self.stages) if rank in stage.ranks)

    def _repr_html_(self) -> str:
        rows = (
            (index, f"{stage.start}:{stage.stop}", len(stage.ranks), _first_numbers(stage.ranks))
            for index, stage in enumerate(self.stages)
        )
        return html_table(self._summary(), ("stage", "layers", "replicas", "ranks"), rows, len(self.stages))

    def _repr_pretty_(self, printer: Printer, cycle: bool) -> None:  # noqa: ARG002 - IPython's signature
        printer.text(self._summary())

    def _summary(self) -> str:
        return (
            f"Plan of {self.model} on {self.cluster}: {format_count(len(self.stages), 'stage')} on "
            f"{format_count(self.num_ranks, 'rank')}, {self.num_microbatches:,} microbatches of "
            f"{self.microbatch_size}, {self.schedule}"
        )

    def describe(self) -> str:
        """Return one line for people: ``2 stages [0:4 ×2, 4:9 ×1], 8 microbatches of 4, 1f1b``."""
        parts = ", ".join(stage.describe() for stage in self.stages)
        stages = format_count(len(self.stages), "stage")
        microbatches = format_count(self.num_microbatches, "microbatch", "microbatches")
        return f"{stages} [{parts}], {microbatches} of {self.microbatch_size}, {self.schedule}{self.describe_extras()}"

    def describe_extras(self) -> str:
        """Return the end of `describe`, after the schedule: ``, tensor 4, ZeRO 1``; empty for a plain plan."""
        policy = f", exchange {self.exchange.policy}" if self.exchange.policy else ""
        ahead = self.exchange.staleness
        waves = f" with staleness {ahead}" if ahead else ""
        split = f", {self.sharding.describe()}" if not self.sharding.is_whole else ""
        shared = f", ZeRO {self.exchange.zero}" if self.exchange.zero else ""
        if self.exchange.shard_size:
            shared += f" in groups of {self.exchange.shard_size}"
        order = (
            f", {format_count(len(self.exchange.sequence), 'part')} of gradients in order"
            if self.exchange.sequence
            else ""
        )
        kept = f" except {format_count(len(self.keeps), 'op')}" if self.keeps else ""
        again = f", {format_count(len(self.recompute), 'part')} recomputed{kept}" if self.recompute else ""
        away = f", {self.offload.describe()}" if self.offload != ON_DEVICE else ""
        compiled = ", compiled" if self.compiled else ""
        idle = f", {format_count(len(self.idle), 'device')} left out" if self.idle else ""
        return f"{waves}{split}{shared}{order}{policy}{again}{away}{compiled}{idle}"


def name_stages(plan: Plan, rank: int) -> str:
    """Return ``stage 3``, or ``stages 0 and 7``: the stages of a rank, for messages."""
    *others, last = map(str, plan.stages_of(rank))
    return f"stages {', '.join(others)} and {last}" if others else f"stage {last}"


def _first_numbers(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")


def with_branches(plan: Plan, graph: Graph) -> Plan:
    """Return the plan with ``feeds`` set in every stage, if some stages lie on parallel branches of the graph.

    The number of microbatches in flight then follows from the longest path from a stage to the last one, instead of the
    number of later stages. Other plans, and plans with several stages on a rank, are returned unchanged.
    """
    edges = _edges(plan, graph)
    is_chain = all(index + 1 in targets for index, targets in enumerate(edges[:-1]))
    if plan.has_virtual_stages or is_chain:
        return plan
    stages = zip(plan.stages, edges, strict=True)
    return replace(plan, stages=tuple(replace(stage, feeds=targets) for stage, targets in stages))


def _edges(plan: Plan, graph: Graph) -> list[tuple[int, ...]]:
    return [tuple(channel.target for channel in stage.outgoing) for stage in slice_graph(graph, plan.bounds)]


def check_plan(plan: Plan, graph: Graph, cluster: Cluster | None = None) -> None:
    """Raise PlanError unless the plan matches the graph (hash, layers, batch) and, if given, the cluster."""
    if plan.graph_hash != graph.content_hash:
        raise GraphMismatchError(
            f"The plan was made for graph {plan.graph_hash} of {plan.model!r}, but this graph is {graph.content_hash} "
            f"({graph.name!r}). "
            "The model, its shapes or the loss changed since planning; make the plan again with `meshwright plan`."
        )
    check_bounds(graph, plan.bounds)
    check_counts(plan)
    graph.check_batch_size(plan.microbatch_size)
    if plan.has_branches and (edges := _edges(plan, graph)) != [stage.feeds for stage in plan.stages]:
        raise PlanError(
            f"The plan's stages have feeds {[list(stage.feeds) for stage in plan.stages]}, but by the graph they feed "
            f"{[list(targets) for targets in edges]}. Leave out `feeds`, or plan again."
        )
    if plan.workload.kind != graph.mode:
        raise PlanError(
            f"The plan is for {plan.workload.kind}, but the graph was captured for {graph.mode}; "
            "capture it in that mode."
        )
    if plan.recompute or plan.keeps:
        with_recompute(graph, plan.recompute, plan.keeps)
    if cluster is not None:
        check_offload(plan.offload, used_of(plan, cluster), plan.num_devices)


def unknown_schedule(name: str) -> PlanError:
    """Return the error for a text that is neither the name of a schedule nor a reference to one."""
    return PlanError(
        f"There is no schedule {name!r}{suggest(name, SCHEDULE_NAMES)}. Give the name of a schedule, or your own as "
        "path/to/file.py:function or path/to/orders.csv."
    )


def _check_schedule(plan: Plan) -> None:
    if plan.exchange.staleness and plan.schedule != WAVES:
        raise PlanError(
            f"A staleness of {plan.exchange.staleness} waves was given for the schedule {plan.schedule}, which has no "
            f"waves. Leave it out, or choose {WAVES}."
        )
    if plan.is_asynchronous and plan.scales_loss:
        raise PlanError(
            f"The precision {plan.workload.precision} was given for the asynchronous schedule {plan.schedule}; with "
            "this precision losses are scaled, and all ranks have to agree in each step whether to update. Choose "
            "--precision amp, or a synchronous schedule such as 1f1b."
        )
    if plan.is_asynchronous and not plan.exchange.is_plain:
        raise PlanError(
            f"An exchange with {plan.exchange.describe_changes()} was given for the asynchronous schedule "
            f"{plan.schedule}; expected all-reduces of whole buckets. Choose a synchronous schedule such as 1f1b, or "
            "leave these options out."
        )
    if plan.sharding.expert > 1 and (plan.exchange.servers or plan.exchange.algorithm == "hierarchical"):
        raise PlanError(
            f"An exchange with {plan.exchange.describe_changes()} was given for a plan with expert parallelism, where "
            "gradients of experts are summed over other devices than the rest; expected sums of buckets. Leave it "
            "out, or leave out `expert`."
        )
    if not plan.has_own_schedule:
        if plan.schedule_hash:
            raise PlanError(
                f"schedule_hash {plan.schedule_hash!r} was given for the schedule {plan.schedule!r}, which has no "
                "file. Leave it out."
            )
        return
    if split_reference(plan.schedule) is None and order_file(plan.schedule) is None:
        raise unknown_schedule(plan.schedule)
    if not HASH.fullmatch(plan.schedule_hash):
        raise PlanError(
            f"The schedule {plan.schedule!r} has schedule_hash {plan.schedule_hash!r}; expected the 16 hexadecimal "
            "digits of its file's hash. Let `meshwright plan --schedule` or `with_schedule` write it."
        )


# With one stage and one microbatch for each replica they are the same.
_PLAIN_SCHEDULES = ("gpipe", "1f1b")


def _check_policy(plan: Plan) -> None:
    """Raise PlanError for a plan that its exchange policy cannot train."""
    policy, stage = read_policy(plan.exchange.policy), plan.stages[0]
    num_replicas = len(stage.ranks)
    extras = {
        "a kind other than training": plan.workload.kind != "training",
        f"{len(plan.stages)} stages": len(plan.stages) > 1,
        f"the schedule {plan.schedule}": plan.schedule not in _PLAIN_SCHEDULES,
        f"the precision {plan.workload.precision}": plan.workload.precision != "float32",
        plan.sharding.describe(): not plan.sharding.is_whole,
        "recomputation": bool(plan.recompute),
        "offload": plan.offload != ON_DEVICE,
        "compiled layers": plan.compiled,
        "devices left out": bool(plan.idle),
        "shares of replicas": bool(stage.shares),
        "an input pipeline (`workload.loader`)": plan.workload.loader is not None,
    }
    if found := [name for name, is_there in extras.items() if is_there]:
        raise PlanError(
            f"The exchange policy {plan.exchange.policy} was given for a plan with {' and '.join(found)}; expected "
            "training of whole replicas in float32. Leave out the policy, or plan with --exchange, which chooses such "
            "a plan."
        )
    if plan.num_microbatches != num_replicas:
        raise PlanError(
            f"The exchange policy {plan.exchange.policy} was given for {plan.num_microbatches} microbatches on "
            f"{num_replicas} replicas; expected one microbatch for each replica."
        )
    most = {"partial": num_replicas, "delay": None}.get(policy.kind, num_replicas - 1) if policy is not None else None
    if policy is not None and most is not None and policy.number > most:
        raise PlanError(
            f"The exchange policy {plan.exchange.policy} was given for {num_replicas} replicas; expected a number of "
            f"at most {most}. Give a smaller number, or more devices."
        )
    if plan.exchange.servers not in ((), (num_replicas,)):
        raise PlanError(
            f"The exchange policy {plan.exchange.policy} was given with the servers {list(plan.exchange.servers)} for "
            f"{num_replicas} replicas; expected at most one, rank {num_replicas}."
        )


def _check_plan(plan: Plan) -> None:
    _check_schedule(plan)
    check_offloaded_plan(plan)
    if not plan.stages:
        raise PlanError("The plan has no stages; expected at least one.")
    ranks = {rank for stage in plan.stages for rank in stage.ranks}
    twice = any(len(set(stage.ranks)) < len(stage.ranks) or not stage.ranks for stage in plan.stages)
    if twice or ranks != set(range(len(ranks))):
        raise PlanError(
            f"The stages use ranks {[stage.ranks for stage in plan.stages]}; expected every stage to have at least one "
            f"rank, none twice, and all of the ranks 0 to {max(len(ranks) - 1, 0)} to be used."
        )
    if plan.idle and not (plan.idle[0] >= 0 and all(one < other for one, other in pairwise(plan.idle))):
        raise PlanError(
            f"The devices to leave out (`idle`) are {list(plan.idle)}; expected numbers of devices of the cluster, "
            "ascending, without repetition. Sort them, and remove repeated ones."
        )
    for index, stage in enumerate(plan.stages):
        if any(not index < target < len(plan.stages) for target in stage.feeds):
            raise PlanError(
                f"Stage {index} feeds stages {list(stage.feeds)}; expected later ones, up to {len(plan.stages) - 1}."
            )
    batch, count = plan.workload.global_batch, plan.num_microbatches
    if count * len(plan.stages) > MAX_MICROBATCH_STAGES:
        raise PlanError(
            f"{count} microbatches in {len(plan.stages)} stages were given; programs are limited to "
            f"{MAX_MICROBATCH_STAGES} (microbatches times stages). Choose larger microbatches."
        )
    each = count * plan.sharding.expert
    if count < 1 or batch % each:
        of_each = f" for each of {plan.sharding.expert} expert ranks" if plan.sharding.expert > 1 else ""
        raise PlanError(
            f"A global batch of {batch} samples does not divide into {count} microbatches{of_each}. "
            f"Choose a number of microbatches that divides {batch // plan.sharding.expert if of_each else batch}."
        )
    for index, stage in enumerate(plan.stages):
        if stage.shares:
            check_shares(plan, index)
        plan.exchange.shard_groups(stage.ranks)
        if count < len(stage.ranks):
            raise PlanError(
                f"Stage {index} has {len(stage.ranks)} replicas for {count} microbatches, so some would have nothing "
                f"to do. Choose at least {len(stage.ranks)} microbatches."
            )
    if plan.exchange.policy:
        _check_policy(plan)
