"""Host memory and drives of a rank, as predicted, and as a run allocates them.

For each trained element of the rank's shard (all of them, if replicas do not shard states):

    host     its gradient, and its parameter, which is copied up from the same place where there is a master weight;
             states where they are on the host, else those of `PIECES_AT_HAND` pieces; AdamW's counters
    drives   states

With parameters on the host, all of them, even frozen ones, are there before a run begins, except those that stages
share, which are summed in buckets and stay on the devices. With activations on the host, the values that layers save
for each microbatch in flight are there (`cost.memory.away`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from meshwright.cost.memory import Backend, as_kept, find_away
from meshwright.cost.optimizers import STEP_COUNTER_BYTES, state_bytes
from meshwright.program.buckets import gradient_buckets
from meshwright.program.offload import PIECES_AT_HAND, host_pieces
from meshwright.program.orders import max_in_flight
from meshwright.spec.graph import Graph
from meshwright.spec.plan import Plan
from meshwright.spec.slices import slice_graph


@dataclass(frozen=True, slots=True)
class HostNeeds:
    """Bytes of one rank on its host and on drives; ``resident_bytes`` of the host's are there before a run begins."""

    host_bytes: int
    drive_bytes: int
    resident_bytes: int = 0


def count_host_needs(plan: Plan, graph: Graph, rank: int, device: Backend = "cpu") -> HostNeeds:
    """Return what a rank keeps in host memory and on drives; parameters shared by its stages count once.

    ``device``: the backend whose libraries compute, which decides what is kept for backwards.
    """
    stages, offload = plan.stages_of(rank), plan.offload
    needs = HostNeeds(0, 0) if offload.optimizer == "device" else _count(plan, graph, stages)
    if offload.activations == "device":
        return needs
    return replace(needs, host_bytes=needs.host_bytes + _count_saved(plan, graph, stages, device))


@lru_cache(maxsize=256)
def _count_saved(plan: Plan, graph: Graph, stages: tuple[int, ...], device: Backend) -> int:
    workload, slices = plan.workload, slice_graph(graph, plan.bounds)
    kept = as_kept(graph, workload.numbers, device)
    away = (find_away(kept, slices[i], plan.microbatch_size, workload.float_bytes, device) for i in stages)
    return sum(max_in_flight(plan, i) * item.num_bytes for i, item in zip(stages, away, strict=True))


@lru_cache(maxsize=256)
def _count(plan: Plan, graph: Graph, stages: tuple[int, ...]) -> HostNeeds:
    workload, offload = plan.workload, plan.offload
    numbers, states = workload.numbers, state_bytes(workload.optimizer, workload.precision)
    counter = STEP_COUNTER_BYTES if workload.optimizer.kind == "adamw" else 0
    buckets = gradient_buckets(graph, plan)
    summed = {i: bucket for bucket in buckets for i in bucket.parameters}
    slices = slice_graph(graph, plan.bounds)
    held = {i: stage for stage in reversed(stages) for i in slices[stage].parameters}

    def parts_of(stage: int) -> int:
        return plan.exchange.num_parts(len(plan.stages[stage].ranks))

    # Bytes by the number of ranks among which they are sharded.
    host, drives, resident = Counter[int](), Counter[int](), Counter[int]()
    for i, stage in held.items():
        tensor = graph.tensors[i]
        parts = plan.exchange.num_parts(len(summed[i].ranks)) if i in summed else parts_of(stage)
        value_bytes = tensor.num_bytes(0, numbers.value_bytes)
        is_resident = offload.parameters == "host" and i not in summed
        resident[parts] += value_bytes if is_resident else 0
        if tensor.requires_grad:
            host[parts] += workload.gradient_bytes(tensor) + counter
            host[parts] += 0 if is_resident or numbers.master_bytes else value_bytes
            drives[parts] += tensor.num_elements(0) * states
    kept = _divide(drives)
    if offload.optimizer == "host":
        host += drives
        drives.clear()
    needed = _divide(host) + _divide(resident)
    if offload.optimizer == "nvme":
        # The pieces in the order of the program (`append_host_steps`), which use the buffers in turn.
        pieces = [item for item in host_pieces(graph, plan, buckets) if item.stage in stages]
        shared = [item for item in buckets if not held.keys().isdisjoint(item.parameters)]
        sizes = [-(-item.num_bytes // (numbers.gradient_bytes * parts_of(item.stage))) for item in pieces]
        sizes += [-(-item.num_elements // plan.exchange.num_parts(len(item.ranks))) for item in shared]
        largest = sum(max(sizes[place::PIECES_AT_HAND], default=0) for place in range(PIECES_AT_HAND))
        needed += min(largest * states, kept)
    return HostNeeds(needed, _divide(drives), _divide(resident))


def _divide(num_bytes: Counter[int]) -> int:
    return sum(-(-each // parts) for parts, each in num_bytes.items())
