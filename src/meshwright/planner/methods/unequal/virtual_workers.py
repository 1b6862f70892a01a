"""HetPipe (`form_workers`): unequal devices form virtual workers, each a pipeline; workers train in waves, in parallel.

A **policy** decides which devices form a worker (section 5 of the paper):

    node        node partition: every node is a worker, of equal devices; workers may be unequal
    equal       equal distribution: every worker gets the same number of devices of each node and kind
    hybrid      nodes are paired, the fastest with the slowest; equal distribution within each pair

Within a worker, every device is a stage. Their order and layers are an exact mapping (`mapping`,
`make_mapping_problem`) for the bottleneck alone, since the pipeline is asynchronous. A worker updates its weights after
each minibatch, so a minibatch takes t + x and the optimizer's step o on each device. A device keeps one copy of its
weights per stage of the worker (`docs/concepts/asynchronous.md`). With bounded staleness, no worker is more than D
waves ahead of another. So in the long run, a wave of n minibatches per worker takes

    wave = n · max over workers of max over devices (t + x + o)

seconds. If D is at least 1, the gradients of a wave are reduced during the next minibatches.

A plan has the same cuts for all replicas, so only equal distribution can be expressed as a plan: stage s has the s-th
device of each worker, under the schedule `hetpipe`. The other policies would need different cuts for each replica, and
gradient reductions by parameter instead of by stage.

Source: Park et al., "HetPipe" (USENIX ATC 2020), sections 4 to 7.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.methods.slicing.assemble import make_problem
from meshwright.planner.methods.unequal.batch_shares import optimal_shares
from meshwright.planner.methods.unequal.mapping import (
    KEEPS_ALL,
    KEEPS_ONE,
    KEEPS_SOME,
    DeviceClass,
    Mapping,
    MappingProblem,
    count_states,
    find_classes,
    find_groups,
    solve_mapping,
)
from meshwright.planner.rank_layouts import Places, memory_limit
from meshwright.planner.space import Space
from meshwright.spec import Cluster, Plan, PlanError, StagePlan, format_seconds
from meshwright.spec.exchange import WAVES
from meshwright.spec.units import PICOSECONDS_PER_SECOND

# The least time that a layer counts for: the tick of the simulator.
_LEAST_S = 1.0 / PICOSECONDS_PER_SECOND


# States of devices left beyond which nodes that are alike are merged.
MAX_STATES = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClasses:
    """The devices for a mapping: classes of equal devices, groups of them, and the links between groups.

    ``groups`` are numbers of devices by class. ``set_of`` has the set of classes of each group. ``link_of[a][b]`` is
    the index in ``links`` of the slowest link from set a to set b; ``links`` has a pair of ranks for each link (the
    same rank twice: no link). ``latency_s`` and ``bucket_s`` have the seconds in which each group all-reduces one byte
    and one bucket.
    """

    classes: tuple[DeviceClass, ...]
    groups: tuple[tuple[int, ...], ...]
    set_of: tuple[int, ...]
    links: tuple[tuple[int, int], ...]
    link_of: tuple[tuple[int, ...], ...]
    latency_s: tuple[float, ...]
    bucket_s: tuple[float, ...]

    def of_sizes(self, num_ranks: int) -> DeviceClasses | None:
        """Return the same classes with only the groups of ``num_ranks`` devices.

        Returns None if some class is in none of these groups.
        """
        chosen = [index for index, group in enumerate(self.groups) if sum(group) == num_ranks]
        met = [any(self.groups[index][k] for index in chosen) for k in range(len(self.classes))]
        if not all(met):
            return None
        return replace(
            self,
            groups=tuple(self.groups[index] for index in chosen),
            set_of=tuple(self.set_of[index] for index in chosen),
            latency_s=tuple(self.latency_s[index] for index in chosen),
            bucket_s=tuple(self.bucket_s[index] for index in chosen),
        )

    def ranks(self, groups: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the ranks of each stage for stages on these groups, taking the ranks of every class in order."""
        taken = [0] * len(self.classes)
        found = []
        for group in groups:
            own: list[int] = []
            for k, count in enumerate(self.groups[group]):
                own += self.classes[k].ranks[taken[k] : taken[k] + count]
                taken[k] += count
            found.append(tuple(own))
        return found


def find_devices(space: Space, ranks: Sequence[int] | None = None) -> DeviceClasses:
    """Return the devices of a space for a mapping, or only some ``ranks``.

    With more than `MAX_STATES` states, nodes that differ only in their names are merged.
    """
    chosen = range(space.num_ranks) if ranks is None else ranks
    classes = _classes(space, chosen, merged=False)
    if count_states(classes) > MAX_STATES:
        classes = _classes(space, chosen, merged=True)
    groups = find_groups(space.cluster, classes, len(chosen))
    sets = list(dict.fromkeys(map(_support, groups)))
    links: list[tuple[int, int]] = [(0, 0)]
    link_of = [[_number(_slowest_pair(space, classes, a, b), links) for b in sets] for a in sets]
    devices = DeviceClasses(
        classes=classes,
        groups=groups,
        set_of=tuple(sets.index(_support(group)) for group in groups),
        links=tuple(links),
        link_of=tuple(map(tuple, link_of)),
        latency_s=(),
        bucket_s=(),
    )
    rings = [tuple(sorted(devices.ranks([index])[0])) for index in range(len(groups))]

    def sums(num_bytes: int) -> tuple[float, ...]:
        return tuple(
            space.cost.collective_seconds("all_reduce", ring, num_bytes) if len(ring) > 1 else 0.0 for ring in rings
        )

    return replace(devices, latency_s=sums(1), bucket_s=sums(space.exchange.bucket_bytes))


def are_equal(space: Space) -> bool:
    """Return whether all devices of a space, and all links between them, are equal."""
    cluster = space.cluster
    return (
        len(_classes(space, range(space.num_ranks), merged=True)) == 1 and cluster.racks is None and not cluster.paths
    )


def _classes(space: Space, chosen: Collection[int], *, merged: bool) -> tuple[DeviceClass, ...]:
    """The classes of some ranks."""
    found = (
        replace(item, ranks=tuple(rank for rank in item.ranks if rank in chosen))
        for item in find_classes(space.cluster, merged=merged)
    )
    return tuple(item for item in found if item.ranks)


def _support(group: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(k for k, count in enumerate(group) if count)


def _number(pair: tuple[int, int], links: list[tuple[int, int]]) -> int:
    if pair not in links:
        links.append(pair)
    return links.index(pair)


def _slowest_pair(
    space: Space, classes: Sequence[DeviceClass], source: tuple[int, ...], target: tuple[int, ...]
) -> tuple[int, int]:
    """Two ranks between which the link is the slowest from one set of classes to another."""
    pairs = [
        (classes[a].ranks[0], classes[b].ranks[-1])
        for a, b in product(source, target)
        if classes[a].ranks[0] != classes[b].ranks[-1]
    ]
    num_bytes = space.exchange.bucket_bytes
    return max(pairs, key=lambda pair: space.cluster.link_between(*pair).seconds(num_bytes), default=(0, 0))


# Bytes and seconds are those of a slicing problem (`slicing.assemble`); only the devices differ.
def make_mapping_problem(
    space: Space, size: int, schedule: str, devices: DeviceClasses, beside: NDArray[np.float64]
) -> MappingProblem:
    """Return the mapping problem of a space at one microbatch size (``size``) under a schedule.

    ``devices`` are the classes and groups on which stages may run. ``beside`` (L, L + 1): bytes of each stage that only
    simulations revealed.
    """
    tables = space.tables(size)
    kinds = tuple(dict.fromkeys(item.kind for item in devices.classes))
    nowhere = np.zeros((1, 2), np.int64)
    given = make_problem(
        tables,
        Places(
            kind_sets=tuple((kind,) for kind in kinds),
            links=devices.links,
            kind_of=nowhere,
            link_of=nowhere,
            memory_limit=nowhere.astype(np.float64),
            latency_s=nowhere.astype(np.float64),
            bucket_s=nowhere.astype(np.float64),
            shared_s=nowhere.astype(np.float64),
        ),
        in_flight=nowhere,
        beside=beside,
        exchange=space.exchange,
        workload=space.workload,
        cost=space.cost,
        offload=space.offload,
    )
    keeps = KEEPS_ONE if space.workload.kind == "inference" else KEEPS_ALL if schedule == "gpipe" else KEEPS_SOME
    shared: dict[str, Any] = given._asdict()
    limits = [memory_limit(space.cluster, item.ranks[0], space.memory) for item in devices.classes]
    own: dict[str, Any] = {
        "keeps": keeps,
        # Layers that are only looked at take no time, but shares are by speed.
        "seconds": np.maximum(given.seconds, _LEAST_S),
        "zero": int(given.zero > 0),
        "kind_of": np.array([kinds.index(item.kind) for item in devices.classes], np.int64),
        "memory_limit": np.array(limits, np.float64),
        "sizes": np.array([item.size for item in devices.classes], np.int64),
        "counts": np.array(devices.groups, np.int64),
        "set_of": np.array(devices.set_of, np.int64),
        "latency_s": np.array(devices.latency_s),
        "bucket_s": np.array(devices.bucket_s),
        "link_of": np.array(devices.link_of, np.int64),
    }
    return MappingProblem(**{name: own[name] if name in own else shared[name] for name in MappingProblem._fields})


def plan_mapping(space: Space, size: int, schedule: str, devices: DeviceClasses, mapping: Mapping) -> Plan:
    """Return the plan of a mapping, for a team's local graph; ``size`` is the microbatch size."""
    ranks = devices.ranks(mapping.groups)
    stages = tuple(
        StagePlan(start=start, stop=stop, ranks=own, shares=share_stage(space, size, (start, stop), own))
        for (start, stop), own in zip(mapping.bounds, ranks, strict=True)
    )
    return space.make_plan(stages, size, schedule)


def share_stage(space: Space, size: int, layers: tuple[int, int], ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many microbatches each replica of a stage computes, in proportion to speed.

    ``layers`` are the first layer and the end of the stage. The result is empty if equal shares are as good.
    """
    tables = space.tables(size)
    seconds = [float(tables.seconds[space.cluster.device_kind(rank).name].total[layers]) for rank in ranks]
    if len(set(seconds)) == 1 or min(seconds) <= 0:
        return ()
    shares = optimal_shares(seconds, tables.num_microbatches)
    in_turn = StagePlan(start=0, stop=1, ranks=ranks).counts(tables.num_microbatches)
    return () if shares == in_turn else shares


Policy = Literal["node", "equal", "hybrid"]
POLICIES: tuple[Policy, ...] = ("node", "equal", "hybrid")


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualWorker:
    """A pipeline of single devices: stage s has the layers ``bounds[s]`` (first, end) on rank ``ranks[s]``.

    ``minibatch_s``: seconds per minibatch in the steady state.
    """

    ranks: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    minibatch_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualWorkers:
    """All workers of a policy; each computes ``wave`` minibatches between two reductions of gradients."""

    policy: Policy
    workers: tuple[VirtualWorker, ...]
    wave: int

    @property
    def wave_s(self) -> float:
        """Seconds of a wave, which are those of the slowest worker."""
        return self.wave * max(worker.minibatch_s for worker in self.workers)

    def explain(self, cluster: Cluster) -> str:
        """Return printable lines: the time of a wave, then the devices and layers of each worker."""
        lines = [f"{len(self.workers)} virtual workers ({self.policy}), a wave of {self.wave} minibatches each takes"]
        lines[0] += f" {format_seconds(self.wave_s)}."
        for worker in self.workers:
            stages = ", ".join(
                f"{cluster.device_kind(rank).name} (rank {rank}) {start}:{stop}"
                for rank, (start, stop) in zip(worker.ranks, worker.bounds, strict=True)
            )
            lines.append(f"{format_seconds(worker.minibatch_s)} per minibatch: {stages}")
        return "\n".join(lines)


def allocate(cluster: Cluster, policy: Policy, num_workers: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each virtual worker under a policy.

    ``num_workers``: the number of workers (policy hybrid: per pair of nodes), by default the largest possible; the
    policy node ignores it. Raises PlanError if nodes or devices cannot be divided evenly.
    """
    nodes: dict[int, list[int]] = {}
    for rank in range(cluster.num_ranks):
        nodes.setdefault(cluster.node_index(rank), []).append(rank)
    if policy == "node":
        return tuple(map(tuple, nodes.values()))
    if policy == "equal":
        return _distribute(cluster, range(cluster.num_ranks), num_workers)
    if len(nodes) % 2:
        raise PlanError(
            f"The policy hybrid pairs nodes, but cluster {cluster.name!r} has {len(nodes)} nodes; expected an even "
            "number. Choose the policy node or equal."
        )
    kinds = {node: [cluster.device_kind(rank) for rank in own] for node, own in nodes.items()}
    speeds = {node: sum(max(k.peak_flops_per_s.values()) / k.slowdown for k in own) for node, own in kinds.items()}
    order = sorted(nodes, key=lambda node: (-speeds[node], node))
    pairs = zip(order, reversed(order[len(order) // 2 :]), strict=False)
    return tuple(worker for a, b in pairs for worker in _distribute(cluster, [*nodes[a], *nodes[b]], num_workers))


def _distribute(cluster: Cluster, ranks: Sequence[int], num_workers: int | None) -> tuple[tuple[int, ...], ...]:
    """As many devices of each class to each worker."""
    chosen = set(ranks)
    classes = [[rank for rank in item.ranks if rank in chosen] for item in find_classes(cluster)]
    classes = [own for own in classes if own]
    whole = gcd(*map(len, classes))
    count = num_workers or whole
    if whole % count:
        raise PlanError(
            f"{count} virtual workers cannot be formed of {', '.join(map(str, map(len, classes)))} devices of "
            f"{len(classes)} classes (nodes and kinds); expected a number of workers that divides {whole}."
        )
    return tuple(tuple(rank for own in classes for rank in own[worker::count]) for worker in range(count))


def form_workers(space: Space, size: int, policy: Policy, *, num_workers: int | None = None) -> VirtualWorkers:
    """Form the virtual workers of a policy, and cut the layers for each; all get the same number of minibatches.

    ``size`` is the minibatch size. Raises PlanError if devices or minibatches cannot be divided evenly among workers,
    or if the layers do not fit into the memory of a worker.
    """
    allocated = allocate(space.cluster, policy, num_workers)
    count = space.tables(size).num_microbatches
    if count % len(allocated):
        raise PlanError(
            f"{count} minibatches per step cannot be divided equally among {len(allocated)} virtual workers; expected "
            f"a multiple of {len(allocated)}. Choose another minibatch size."
        )
    wave = count // len(allocated)
    known: dict[tuple[tuple[int, str], ...], tuple[int, VirtualWorker]] = {}
    workers: list[VirtualWorker] = []
    for ranks in allocated:
        # Workers of devices that are alike have one mapping.
        key = tuple((space.cluster.node_index(rank), space.cluster.device_kind(rank).name) for rank in ranks)
        if key not in known:
            known[key] = len(workers), _cut(space, size, ranks, wave)
        first, worker = known[key]
        own = dict(zip(allocated[first], ranks, strict=True))
        workers.append(
            VirtualWorker(
                ranks=tuple(own[rank] for rank in worker.ranks), bounds=worker.bounds, minibatch_s=worker.minibatch_s
            )
        )
    return VirtualWorkers(policy=policy, workers=tuple(workers), wave=wave)


def _cut(space: Space, size: int, ranks: tuple[int, ...], wave: int) -> VirtualWorker:
    devices = find_devices(space, ranks).of_sizes(1)
    assert devices is not None
    num_layers = len(space.tables(size).graph.layers)
    given = make_mapping_problem(space, size, WAVES, devices, np.zeros((num_layers, num_layers + 1)))
    mapping = solve_mapping(never_flushing(given, wave, len(ranks)))
    if mapping is None:
        raise PlanError(
            f"The {num_layers} layers do not fit on a virtual worker of {len(ranks)} devices, one stage on each, with "
            f"{len(ranks)} copies of its weights. Choose another policy, fewer workers, or smaller minibatches."
        )
    return VirtualWorker(
        ranks=tuple(rank for own in devices.ranks(mapping.groups) for rank in own),
        bounds=mapping.bounds,
        minibatch_s=mapping.seconds / wave,
    )


def never_flushing(problem: MappingProblem, wave: int, num_stages: int) -> MappingProblem:
    """Return the problem for an asynchronous pipeline that updates after every minibatch and stashes weights.

    ``wave``: minibatches of a worker per wave. Only the bottleneck counts; a stage keeps ``num_stages`` weight copies.
    """
    return problem._replace(
        num_microbatches=wave,
        num_fills=0,
        seconds=problem.seconds + problem.optimizer_s,
        optimizer_s=np.zeros_like(problem.optimizer_s),
        beside_bytes=problem.beside_bytes + (num_stages - 1) * problem.exchange_bytes,
    )


def plan_workers(space: Space, size: int, workers: VirtualWorkers) -> Plan:
    """Return the plan of virtual workers under the schedule `hetpipe`; ``size`` is the minibatch size.

    Raises PlanError if the workers have different cuts.
    """
    cuts = {worker.bounds for worker in workers.workers}
    if len(cuts) > 1:
        raise PlanError(
            f"The virtual workers of the policy {workers.policy} have {len(cuts)} different cuts of the layers; a plan "
            "has the same cuts for all replicas. Choose the policy equal."
        )
    stages = tuple(
        StagePlan(start=start, stop=stop, ranks=tuple(worker.ranks[index] for worker in workers.workers))
        for index, (start, stop) in enumerate(workers.workers[0].bounds)
    )
    return space.make_plan(stages, size, WAVES)
