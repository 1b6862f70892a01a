"""HetPipe: unequal devices in virtual workers, each a pipeline; workers train in waves, side by side.

Which devices form a worker is a **policy** (section 5 of the paper):

    node        node partition: every node is a worker, of equal devices; workers may be unequal
    equal       equal distribution: every worker gets as many devices of each node and kind; workers are alike
    hybrid      nodes are paired, the fastest with the slowest, and what a pair has is distributed equally in it

Within a worker every device is a stage: which, and with how many layers, is an exact mapping (`mapping`) for the
bottleneck alone, since the pipeline never flushes. A minibatch takes t + x and the optimizer's step on each device,
for a worker updates its weights after each; a device keeps as many copies of its weights as the worker has
stages (`docs/concepts/asynchronous.md`). With bounded staleness no worker is more than D waves ahead of another, so in
the long run a wave takes all workers as long as the slowest

    wave = n · max over workers of max over devices (t + x + o)           n minibatches of each worker

and the sums of the wave run beside the next minibatches, if D is at least 1.

A plan has the same cuts for all replicas, so only equal distribution is one: stage s has the s-th device of each
worker, under the schedule `hetpipe`. For the others a plan would need cuts for each replica, and sums of
gradients over replicas by parameter instead of by stage.

Source: Park et al., "HetPipe" (USENIX ATC 2020), sections 4 to 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Literal

import numpy as np

from meshwright.planner.methods.unequal.assemble import find_devices, make_mapping_problem
from meshwright.planner.methods.unequal.groups import find_classes
from meshwright.planner.methods.unequal.mapping import solve_mapping
from meshwright.planner.methods.unequal.stage_table import MappingProblem
from meshwright.planner.space import Space
from meshwright.spec import Cluster, Plan, PlanError, StagePlan, format_seconds
from meshwright.spec.exchange import WAVES

Policy = Literal["node", "equal", "hybrid"]
POLICIES: tuple[Policy, ...] = ("node", "equal", "hybrid")


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualWorker:
    """A pipeline: stage s has the layers ``bounds[s]`` on rank ``ranks[s]``; seconds from minibatch to minibatch."""

    ranks: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    minibatch_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualWorkers:
    """All workers of a policy, with ``wave`` minibatches each from sum to sum."""

    policy: Policy
    workers: tuple[VirtualWorker, ...]
    wave: int

    @property
    def wave_s(self) -> float:
        """Seconds of a wave: those of the slowest worker, for which all others wait in the end."""
        return self.wave * max(worker.minibatch_s for worker in self.workers)

    def explain(self, cluster: Cluster) -> str:
        """For people: each worker with its devices and layers, and what a wave takes."""
        lines = [f"{len(self.workers)} virtual workers ({self.policy}), a wave of {self.wave} minibatches each takes"]
        lines[0] += f" {format_seconds(self.wave_s)}."
        for worker in self.workers:
            stages = ", ".join(
                f"{cluster.device_kind(rank).name} (rank {rank}) {start}:{stop}"
                for rank, (start, stop) in zip(worker.ranks, worker.bounds, strict=True)
            )
            lines.append(f"{format_seconds(worker.minibatch_s)} for a minibatch: {stages}")
        return "\n".join(lines)


def allocate(cluster: Cluster, policy: Policy, num_workers: int | None = None) -> tuple[tuple[int, ...], ...]:
    """The ranks of each virtual worker; ``num_workers`` (of a pair of nodes, in hybrid) is as many as can be alike.

    Raises PlanError for nodes or numbers of workers that cannot be shared out so.
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
            f"The policy hybrid pairs nodes, but cluster {cluster.name!r} has {len(nodes)}; expected an even number. "
            "Choose node or equal."
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
            f"{count} virtual workers were to be formed of {', '.join(map(str, map(len, classes)))} devices of "
            f"{len(classes)} classes; expected a number that divides {whole}."
        )
    return tuple(tuple(rank for own in classes for rank in own[worker::count]) for worker in range(count))


def form_workers(space: Space, size: int, policy: Policy, *, num_workers: int | None = None) -> VirtualWorkers:
    """Cut the layers for each worker of a policy; the space's minibatches are shared equally among the workers.

    Raises PlanError for devices that cannot be shared out so, minibatches that do not divide, and workers on which the
    layers do not fit.
    """
    allocated = allocate(space.cluster, policy, num_workers)
    count = space.tables(size).num_microbatches
    if count % len(allocated):
        raise PlanError(
            f"{count} minibatches of a step do not divide among {len(allocated)} virtual workers; expected a multiple. "
            "Choose another size of minibatches."
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
    """A problem for the bottleneck of a pipeline that updates after every minibatch and stashes its weights."""
    return problem._replace(
        num_microbatches=wave,
        num_fills=0,
        seconds=problem.seconds + problem.optimizer_s,
        optimizer_s=np.zeros_like(problem.optimizer_s),
        beside_bytes=problem.beside_bytes + (num_stages - 1) * problem.exchange_bytes,
    )


def plan_workers(space: Space, size: int, workers: VirtualWorkers) -> Plan:
    """The plan of workers that are alike, under the schedule `hetpipe`. Raises PlanError for others."""
    cuts = {worker.bounds for worker in workers.workers}
    if len(cuts) > 1:
        raise PlanError(
            f"The virtual workers of the policy {workers.policy} are cut in {len(cuts)} ways; a plan has the same cuts "
            "for all replicas. Choose the policy equal."
        )
    stages = tuple(
        StagePlan(start=start, stop=stop, ranks=tuple(worker.ranks[index] for worker in workers.workers))
        for index, (start, stop) in enumerate(workers.workers[0].bounds)
    )
    return space.make_plan(stages, size, WAVES)
