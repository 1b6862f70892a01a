"""Predict what a rank's allocator holds: the bytes in whole blocks, and the bytes reserved from the driver.

Every tensor of every op is allocated and freed in the order of the rank's program (`cost.memory.trace_stage`), and a
GPU's caching allocator is simulated (`cost.memory.follow_allocator`). The peak before rounding to blocks equals that of
`simulate_plan`, except for messages that arrive early or leave late.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.cost.memory import (
    Backend,
    MemoryEvents,
    Peak,
    backend_of,
    find_peak,
    follow_allocator,
    likeness,
    trace_stage,
)
from meshwright.program import Bucket, build_program, gradient_buckets, num_active, num_bucket_copies
from meshwright.simulator.stage_bytes import compute_orders, shared_units
from meshwright.simulator.state_shards import ALONE, StateShards, find_shards
from meshwright.spec import Cluster, Graph, Opcode, Plan, StageSlice, check_plan, slice_graph
from meshwright.spec.memory import name_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.cost import CostModel

# Microbatches beyond the number in flight at once repeat what was there before; one more shows it.
_MORE_MICROBATCHES = 1
# Microbatches in flight that are followed to find what an allocator holds unused.
_FOLLOWED = 2
# Plans that need slightly too much are compared with each other; for others it is enough that they do not fit.
_FAR_BEYOND = 1.1
# Limit on op computations in a step; following this number takes about five seconds.
MAX_VISITS = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAllocation:
    """Memory of one rank, followed op by op.

    ``peak`` has the bytes by part and the moment of the peak. ``allocated_bytes`` are counted in whole allocator
    blocks; ``reserved_bytes`` are reserved from the driver, None on CPUs, whose allocator does not cache freed memory.
    """

    rank: int
    peak: Peak
    allocated_bytes: int
    reserved_bytes: int | None

    def row(self) -> dict[str, Any]:
        """Return by name ``rank``, ``allocated_bytes``, ``reserved_bytes``, and the peak's ``owner`` and ``moment``."""
        return {
            "rank": self.rank,
            "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": self.reserved_bytes,
            "owner": self.peak.owner,
            "moment": self.peak.moment,
        }

    def explain(self) -> str:
        """Return one sentence on the moment of the peak and its largest owner."""
        owner = name_part(self.peak.owner)
        return f"Op by op, rank {self.rank} is fullest in the {self.peak.moment}; the largest part: {owner}."


def allocate_rank(plan: Plan, graph: Graph, cluster: Cluster, rank: int) -> RankAllocation | None:
    """Follow the memory of one rank of a training plan op by op, over two steps. Raises as `simulate_plan` does.

    Returns None for a rank without stages or of several, for backwards in two parts, for states that are sharded over
    replicas or offloaded, for a graph without a loss or with its own backward ops, and if a step has more than
    `MAX_VISITS` ops.
    """
    check_plan(plan, graph, cluster)
    plan, stages = plan.without_policy(), plan.stages_of(rank)
    if not _can_follow(graph) or len(stages) != 1 or plan.exchange.zero or plan.offload.optimizer != "device":
        return None
    stage = slice_graph(graph, plan.bounds)[stages[0]]
    computed = compute_orders(build_program(plan, graph))[rank]
    if (computed[:, 0] == Opcode.BACKWARD_INPUT).any():
        return None
    order = repeat_free([(opcode != Opcode.FORWARD, microbatch) for opcode, _, microbatch in computed.tolist()])
    if len(order) * len(stage.ops) > MAX_VISITS:
        return None
    device = backend_of(cluster.device_kind(rank))
    events = trace_rank(plan, graph, stage, gradient_buckets(graph, plan), order, device)
    peak = find_peak(events)
    if device == "cpu":
        return RankAllocation(rank=rank, peak=peak, allocated_bytes=peak.num_bytes, reserved_bytes=None)
    seen = follow_allocator(events)
    return RankAllocation(
        rank=rank, peak=peak, allocated_bytes=seen.allocated_bytes, reserved_bytes=seen.reserved_bytes
    )


def predict_reserved(
    plan: Plan,
    graph: Graph,
    cluster: Cluster,
    peaks: Sequence[int],
    limits: Sequence[int],
    cost: CostModel | None = None,
    *,
    only_fitting: bool = False,
) -> tuple[int, ...]:
    """Return the bytes that each rank's allocator reserves, given the ``peaks`` and memory ``limits`` of all ranks.

        reserved = peak + bytes that the allocator holds beyond the peak, in a run of the rank's stages op by op

    The stages are followed as if their parameters and states were on the device, with at most 2 microbatches in flight,
    because the unused memory lies between the temporary values of an op and the gradients. The peak itself is returned
    for ranks on CPUs, for graphs that cannot be followed, for ranks that use less than half of their limit (except the
    fullest rank), and with ``only_fitting`` for ranks whose peak is more than 10 % above their limit. A ``cost`` model
    caches the results.
    """
    plan, reserved = plan.without_policy(), list(peaks)
    if not _can_follow(graph):
        return tuple(reserved)
    spare = [limit - peak for peak, limit in zip(peaks, limits, strict=True)]
    fullest, slices, buckets = spare.index(min(spare)), slice_graph(graph, plan.bounds), gradient_buckets(graph, plan)

    def unused(index: int) -> int:
        stage, shards = slices[index], find_shards(plan, index, cluster)
        order = _followed_order(plan, index, has_backward=stage.has_backward)
        if cost is None:
            return _unused_bytes(plan, graph, stage, buckets, shards, order)
        held = any(index in bucket.stages for bucket in buckets)
        alike = likeness(graph, stage), plan.microbatch_size, plan.workload, plan.offload, tuple(order), held
        key = (*alike, shards.is_cut and shards.zero, shards.states)
        return cost.remember("unused", graph, key, lambda: _unused_bytes(plan, graph, stage, buckets, shards, order))

    known: dict[tuple[int, ...], int] = {}
    for rank, (peak, limit) in enumerate(zip(peaks, limits, strict=True)):
        if backend_of(cluster.device_kind(rank)) == "cpu" or (2 * peak < limit and rank != fullest):
            continue
        if only_fitting and peak > _FAR_BEYOND * limit:
            continue
        mine = plan.stages_of(rank)
        if mine not in known:
            # A rank that only holds parameters runs no ops.
            known[mine] = max(map(unused, mine), default=0)
        reserved[rank] = peak + known[mine]
    return tuple(reserved)


def _followed_order(plan: Plan, stage: int, *, has_backward: bool) -> list[tuple[bool, int]]:
    """Return forwards and backwards of a stage with few microbatches in flight."""
    count = max(plan.stages[stage].counts(plan.num_microbatches))
    # The exact count of the schedule matters little for unused memory.
    in_flight = count if plan.schedule == "gpipe" else num_active(plan, stage)
    kept = min(in_flight, count, _FOLLOWED)
    if not has_backward:
        return [(False, 0)]
    order = [(False, i) for i in range(kept)]
    if kept < count:
        order += [(True, 0), (False, kept)]
    return [*order, *((True, i) for i in range(int(kept < count), kept + int(kept < count)))]


def _unused_bytes(
    plan: Plan,
    graph: Graph,
    stage: StageSlice,
    buckets: Sequence[Bucket],
    shards: StateShards,
    order: Sequence[tuple[bool, int]],
) -> int:
    """Return the bytes that the allocator holds beyond the peak of a stage that computes in ``order``."""
    events = trace_rank(plan, graph, stage, buckets, order, "cuda", shards)
    return max(follow_allocator(events).reserved_bytes - find_peak(events).num_bytes, 0)


def _can_follow(graph: Graph) -> bool:
    return graph.has_loss and graph.mode == "training" and not any(op.phase == "backward" for op in graph.ops)


def trace_rank(
    plan: Plan,
    graph: Graph,
    stage: StageSlice,
    buckets: Sequence[Bucket],
    order: Sequence[tuple[bool, int]],
    device: Backend,
    shards: StateShards = ALONE,
) -> MemoryEvents:
    """Return the allocations and frees of a rank's stage over two steps (`cost.memory.trace_stage`).

    ``order`` has (is a backward, microbatch) of each computation of one step.
    """
    held = [bucket for bucket in buckets if stage.index in bucket.stages]
    bucketed = frozenset(stage.parameters).intersection(i for bucket in held for i in bucket.parameters)
    return trace_stage(
        graph,
        stage,
        plan.workload,
        plan.microbatch_size,
        order,
        device=device,
        bucket_bytes=num_bucket_copies(plan) * sum(bucket.num_bytes for bucket in held),
        bucketed=bucketed,
        num_inputs=max(plan.stages[stage.index].counts(plan.num_microbatches)),
        activations_away=plan.offload.activations == "host",
        shared=shared_units(graph, plan, stage, bucketed, shards),
        state_parts=shards.states,
    )


def repeat_free(order: list[tuple[bool, int]]) -> list[tuple[bool, int]]:
    """Shorten an order to its first microbatches: the largest number that is in flight at once, and one more.

    Later microbatches only repeat the memory of these.
    """
    in_flight = most = 0
    for is_backward, _ in order:
        in_flight += -1 if is_backward else 1
        most = max(most, in_flight)
    kept = sorted({microbatch for _, microbatch in order})[: most + _MORE_MICROBATCHES]
    chosen = set(kept)
    return [item for item in order if item[1] in chosen]
