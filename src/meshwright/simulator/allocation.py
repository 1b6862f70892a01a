"""What a rank's allocator makes of its part of a plan: bytes in whole blocks, and what it reserves from the driver.

Every tensor of every op is taken and freed in the order of the rank's program (`cost.memory.trace_stage`), and a GPU's
caching allocator is followed (`cost.memory.follow_allocator`). The peak before rounding is that of the simulation, but
for messages that come early or leave late.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.cost.memory import Peak, backend_of, find_peak, follow_allocator, trace_stage
from meshwright.program import build_program, gradient_buckets, num_bucket_copies
from meshwright.simulator.buffers import compute_orders
from meshwright.spec import Opcode, check_plan, format_bytes, slice_graph

if TYPE_CHECKING:
    from meshwright.spec import Cluster, Graph, Plan

# Beyond as many as are in flight at once, microbatches repeat what was there before; one more shows it, and the last
# one is another again: it fills the buckets.
_MORE_MICROBATCHES = 2
# Computations of ops in a step; so many take about five seconds to follow.
MAX_VISITS = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAllocation:
    """Bytes of one rank: its peak by part and when, in whole blocks of its allocator, and reserved from the driver.

    ``reserved_bytes`` is None where the device's allocator keeps nothing for later.
    """

    rank: int
    peak: Peak
    allocated_bytes: int
    reserved_bytes: int | None

    def row(self) -> dict[str, Any]:
        """Plain values: ``rank``, ``allocated_bytes``, ``reserved_bytes``, ``owner`` and ``moment`` of the peak."""
        return {
            "rank": self.rank,
            "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": self.reserved_bytes,
            "owner": self.peak.owner,
            "moment": self.peak.moment,
        }

    def exceeds(self, limit_bytes: int) -> bool:
        """Whether the allocator would reserve more than there is, though what is allocated fits."""
        return self.reserved_bytes is not None and self.reserved_bytes > limit_bytes

    def explain(self) -> str:
        """One sentence."""
        moment = f"Op by op, rank {self.rank} is fullest in the {self.peak.moment}"
        if self.reserved_bytes is None:
            return f"{moment}; most of it are {self.peak.owner}."
        return (
            f"{moment}: {format_bytes(self.allocated_bytes)} in blocks of its allocator, which reserves "
            f"{format_bytes(self.reserved_bytes)}."
        )


def allocate_rank(plan: Plan, graph: Graph, cluster: Cluster, rank: int) -> RankAllocation | None:
    """Follow the memory of a rank of a plan for training over two steps. Raises as `simulate_plan` does.

    None for a rank of several stages or backwards in two parts, for states that replicas share out or that are not on
    the device, for a graph without a loss or with a backward of its own, and where more than `MAX_VISITS` ops are in
    flight.
    """
    check_plan(plan, graph, cluster)
    if not graph.has_loss or graph.mode != "training" or any(op.phase == "backward" for op in graph.ops):
        return None
    stages = plan.stages_of(rank)
    if len(stages) > 1 or plan.exchange.zero or plan.offload.optimizer != "device":
        return None
    stage = slice_graph(graph, plan.bounds)[stages[0]]
    computed = compute_orders(build_program(plan, graph))[rank]
    if (computed[:, 0] == Opcode.BACKWARD_INPUT).any():
        return None
    order = repeat_free([(opcode != Opcode.FORWARD, microbatch) for opcode, _, microbatch in computed.tolist()])
    if len(order) * len(stage.ops) > MAX_VISITS:
        return None
    held = [bucket for bucket in gradient_buckets(graph, plan) if stage.index in bucket.stages]
    device = backend_of(cluster.device_kind(rank))
    events = trace_stage(
        graph,
        stage,
        plan.workload,
        plan.microbatch_size,
        order,
        device=device,
        bucket_bytes=num_bucket_copies(plan) * sum(bucket.num_bytes for bucket in held),
        bucketed=frozenset(stage.parameters).intersection(i for bucket in held for i in bucket.parameters),
        num_inputs=max(plan.stages[stage.index].counts(plan.num_microbatches)),
    )
    peak = find_peak(events)
    if device == "cpu":
        return RankAllocation(rank=rank, peak=peak, allocated_bytes=peak.num_bytes, reserved_bytes=None)
    seen = follow_allocator(events)
    return RankAllocation(
        rank=rank, peak=peak, allocated_bytes=seen.allocated_bytes, reserved_bytes=seen.reserved_bytes
    )


def repeat_free(order: list[tuple[bool, int]]) -> list[tuple[bool, int]]:
    """The order with as many microbatches as are ever in flight at once, and two more."""
    in_flight = most = 0
    for is_backward, _ in order:
        in_flight += -1 if is_backward else 1
        most = max(most, in_flight)
    kept = sorted({microbatch for _, microbatch in order})[: most + _MORE_MICROBATCHES]
    chosen = set(kept)
    return [item for item in order if item[1] in chosen]
