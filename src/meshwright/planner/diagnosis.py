"""When nothing fits: which constraint binds, and the nearest thing that would help."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

from meshwright.planner.candidates import Candidate, CandidateSearch, Space
from meshwright.planner.evaluate import RankedPlan
from meshwright.spec import NoFeasiblePlanError, NullSink, Offload, Plan, PlanError, format_bytes
from meshwright.spec.plan import name_stages

# The least memory limit under which a plan exists is found to this share: finer than any reserve people leave.
_LIMIT_PRECISION = 0.01


class NothingFitsError(NoFeasiblePlanError):
    """Memory binds: ``nearest`` is the plan that exceeds it by least."""

    def __init__(self, message: str, nearest: RankedPlan) -> None:
        super().__init__(message)
        self.nearest = nearest


def require_possible(space: Space) -> None:
    """Raise PlanError or NoFeasiblePlanError if no plan can exist, however much memory there is."""
    if not space.schedules:
        raise PlanError("No schedule was given; give at least one of gpipe, 1f1b and path/to/file.py:function.")
    if not 1 <= space.num_ranks <= space.cluster.num_ranks:
        raise PlanError(
            f"A plan for {space.num_ranks} ranks was asked for, but cluster {space.cluster.name!r} has "
            f"{space.cluster.num_ranks} devices. Give 1 to {space.cluster.num_ranks} ranks or a larger cluster."
        )
    num_layers = len(space.graph_for(space.microbatch_sizes[0]).layers)
    num_microbatches = space.workload.global_batch // space.microbatch_sizes[0]
    if space.num_stages is not None and not 1 <= space.num_stages <= min(num_layers, space.num_ranks):
        many, what = min((num_layers, "layers"), (space.num_ranks, "ranks"))
        raise NoFeasiblePlanError(
            f"{space.num_stages} stages were asked for, but there are only {many} {what}, and every stage needs at "
            f"least one layer and one rank. Ask for 1 to {many} stages."
        )
    num_stages = space.num_stages or min(num_layers, space.num_ranks)
    if space.num_ranks > num_stages * num_microbatches:
        usable = num_stages * num_microbatches
        raise NoFeasiblePlanError(
            f"{space.num_ranks} ranks cannot all have work: {num_stages} stages with at most {num_microbatches} "
            f"microbatches of {space.microbatch_sizes[0]} samples take at most {usable} replicas. "
            f"Use at most {usable} ranks, or a global batch of at least "
            f"{space.microbatch_sizes[0] * -(-space.num_ranks // num_stages)} samples."
        )


def raise_infeasible(
    space: Space,
    rejected: Sequence[RankedPlan],
    evaluate: Callable[[Plan], RankedPlan],
    has_plan: Callable[[Space], bool],
) -> NoReturn:
    """Raise NothingFitsError: memory binds, since `require_possible` has excluded all else."""
    smallest = _smallest_plan(space)
    items = [*rejected, *([evaluate(smallest.plan)] if smallest else [])]
    if not items:
        raise NoFeasiblePlanError(
            f"No plan uses exactly {space.num_ranks} ranks with microbatches of {_words(space.microbatch_sizes)} "
            "samples: a stage would have more replicas than microbatches. Allow smaller microbatches or fewer ranks."
        )
    on_devices = [item for item in items if item.excess_bytes <= 0]
    if on_devices:
        raise _no_room_on_hosts(min(on_devices, key=_fullest_share))
    item = min(items, key=lambda item: item.excess_bytes)
    rank = item.fullest_rank
    raise NothingFitsError(
        f"No plan fits into memory. The smallest one found, {item.plan.describe()}, needs "
        f"{format_bytes(item.peak_memory_bytes[rank])} on rank {rank} ({name_stages(item.plan, rank)}), which has "
        f"{format_bytes(item.memory_limit_bytes[rank])}: {format_bytes(item.excess_bytes)} too much; most of it are "
        f"{item.memory_owner}. {_relaxation(space, item, has_plan)}",
        nearest=item,
    )


def _fullest_share(item: RankedPlan) -> float:
    return max(node.share for node in item.nodes)


def _no_room_on_hosts(item: RankedPlan) -> NothingFitsError:
    fullest = max(item.nodes, key=lambda node: node.share)
    return NothingFitsError(
        f"Plans fit into the memory of the devices, but none into that of the nodes. With the smallest one found, "
        f"{item.plan.describe()}, {fullest.describe()}. Share states out (zero 1 to 3), use more nodes, or keep them "
        "on NVMe.",
        nearest=item,
    )


def _relaxation(space: Space, item: RankedPlan, has_plan: Callable[[Space], bool]) -> str:
    """The first change that makes a plan possible, the cheapest to make first."""
    everything = space.cluster.num_ranks
    changes: list[tuple[str, Space]] = []
    if "1f1b" not in space.schedules:
        changes.append(("Allow the schedule 1f1b", replace(space, schedules=(*space.schedules, "1f1b"))))
    if space.microbatch_sizes[0] > 1:
        changes.append(("Allow microbatches of 1 sample", replace(space, microbatch_sizes=(1,))))
    if space.num_stages is not None:
        changes.append(("Allow any number of stages", replace(space, num_stages=None)))
    if space.num_ranks < everything:
        changes.append((f"Use all {everything} devices of the cluster", replace(space, num_ranks=everything)))
    if space.offload.optimizer == "device" and _has_hosts(space):
        away = replace(space, offload=Offload(optimizer="host"))
        changes.append(("Keep optimizer states on the host (--offload optimizer=host)", away))
    for words, relaxed in changes:
        if _possible(relaxed) and has_plan(relaxed):
            return f"{words}: then there are plans that fit."
    needed = item.peak_memory_bytes[item.fullest_rank]
    return f"Give devices (or a memory limit) of at least {format_bytes(needed)}, more ranks, or a smaller model."


def _has_hosts(space: Space) -> bool:
    """Whether the nodes' hosts are described well enough to step there."""
    return all(node.host_memory_bandwidth_bytes_per_s > 0 for node in space.cluster.nodes)


def _possible(space: Space) -> bool:
    if space.workload.global_batch % space.microbatch_sizes[0]:
        return False
    graph = space.graph_for(space.microbatch_sizes[0])
    return graph.batch_size in (None, space.microbatch_sizes[0])


def _smallest_plan(space: Space) -> Candidate | None:
    """A plan that needs the least memory: the smallest microbatches under the least limit at which one exists."""
    lean = replace(space, microbatch_sizes=space.microbatch_sizes[:1])

    def first(limit: int) -> Candidate | None:
        found = CandidateSearch(replace(lean, memory_limit_bytes=limit), NullSink()).run()
        return found[0] if found else None

    low = space.memory_limit_bytes or min(kind.memory_bytes for kind in space.cluster.device_kinds)
    high = max(low, 1)
    found = None
    while found is None and high < 2**60:
        low, high = high, 2 * high
        found = first(high)
    while found is not None and high - low > _LIMIT_PRECISION * high:
        middle = (low + high) // 2
        better = first(middle)
        found, low, high = (better, low, middle) if better else (found, middle, high)
    return found


def _words(sizes: Sequence[int]) -> str:
    return " or ".join(str(size) for size in sizes)
