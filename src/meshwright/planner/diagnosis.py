"""When nothing fits: which constraint binds, and the nearest thing that would help."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NoReturn

from meshwright.planner.evaluate import RankedPlan
from meshwright.planner.method import SearchState
from meshwright.planner.methods.slicing import Candidate, CandidateSearch
from meshwright.planner.methods.slicing.method import MAX_RANKS
from meshwright.planner.problem import Choices, Problem, Space
from meshwright.spec import NoFeasiblePlanError, Offload, Plan, PlanError, format_bytes
from meshwright.spec.memory import BUCKETS, MEMORY_PARTS
from meshwright.spec.plan import BASIC_SCHEDULES, name_stages
from meshwright.spec.sharding import Sharding

# The least memory limit under which a plan exists is found to this share: finer than any reserve people leave.
_LIMIT_PRECISION = 0.01
# Parts of memory that do not depend on the microbatches under way.
_STATES = MEMORY_PARTS[: BUCKETS + 1]
# Tensor parallelism is proposed up to the devices that common nodes have.
_TENSOR_SIZES = (2, 4, 8)


class NothingFitsError(NoFeasiblePlanError):
    """Memory binds: ``nearest`` is the plan that exceeds it by least."""

    def __init__(self, message: str, nearest: RankedPlan) -> None:
        super().__init__(message)
        self.nearest = nearest


def require_possible(problem: Problem) -> None:
    """Raise PlanError or NoFeasiblePlanError if no plan can exist, however much memory there is."""
    chosen, everything = problem.choices, problem.cluster.num_ranks
    if not chosen.schedules:
        raise PlanError("No schedule was given; give at least one of gpipe, 1f1b and path/to/file.py:function.")
    for what, values in (
        ("sharding", chosen.shardings),
        ("ZeRO stage", chosen.zero),
        ("word for recompute", chosen.recompute),
        ("way to offload", chosen.offload),
        ("number of stages on a rank", chosen.num_chunks),
    ):
        if not values:
            raise PlanError(f"No {what} was given to choose from; give at least one.")
    if problem.memory_limit_bytes is not None and problem.memory_limit_bytes < 1:
        raise PlanError(f"A limit of {problem.memory_limit_bytes} bytes was given; expected at least 1.")
    for count in chosen.num_devices:
        if not 1 <= count <= everything:
            raise PlanError(
                f"A plan for {count} devices was asked for, but cluster {problem.cluster.name!r} has {everything} "
                f"devices. Give 1 to {everything} devices or a larger cluster."
            )
    errors = [error for error in map(_impossible, problem.spaces()) if error is not None]
    if len(errors) == sum(1 for _ in problem.spaces()):
        raise errors[0]


def _impossible(space: Space) -> NoFeasiblePlanError | None:
    """Why a space has no plan, whatever the memory; None if it may have some."""
    size = space.microbatch_sizes[0]
    num_layers = len(space.problem.graph_for(size).layers)
    num_microbatches = space.workload.global_batch // size
    most = min(num_layers, space.num_ranks)
    if space.num_stages and not any(1 <= count <= most for count in space.num_stages):
        many, what = min((num_layers, "layers"), (space.num_ranks, "ranks"))
        return NoFeasiblePlanError(
            f"{' or '.join(map(str, space.num_stages))} stages were asked for, but there are only {many} {what}, and "
            f"every stage needs at least one layer and one rank. Ask for 1 to {many} stages."
        )
    num_stages = min(max(space.num_stages, default=most), most)
    if space.num_ranks > num_stages * num_microbatches:
        usable = num_stages * num_microbatches
        return NoFeasiblePlanError(
            f"{space.num_ranks} ranks cannot all have work: {num_stages} stages with at most {num_microbatches} "
            f"microbatches of {size} samples take at most {usable} replicas. "
            f"Use at most {usable} ranks, or a global batch of at least "
            f"{size * -(-space.num_ranks // num_stages)} samples."
        )
    return None


def raise_infeasible(
    problem: Problem,
    rejected: Sequence[RankedPlan],
    evaluate: Callable[[Plan], RankedPlan],
    has_plan: Callable[[Problem], bool],
) -> NoReturn:
    """Raise NothingFitsError: memory binds, since `require_possible` has excluded all else."""
    smallest = _smallest_plan(problem)
    items = [*rejected, *([evaluate(smallest.whole)] if smallest else [])]
    if not items:
        sizes = sorted({size for space in problem.spaces() for size in space.microbatch_sizes})
        counts = sorted({space.num_ranks for space in problem.spaces()})
        raise NoFeasiblePlanError(
            f"No plan uses exactly {_words(counts)} ranks with microbatches of {_words(sizes)} "
            "samples: a stage would have more replicas than microbatches. Allow smaller microbatches or fewer ranks."
        )
    on_devices = [item for item in items if item.excess_bytes <= 0 and item.nodes]
    if on_devices:
        raise _no_room_on_hosts(min(on_devices, key=_fullest_share))
    item = min(items, key=lambda item: item.excess_bytes)
    rank = item.fullest_rank
    raise NothingFitsError(
        f"No plan fits into memory. The smallest one found, {item.plan.describe()}, needs "
        f"{format_bytes(item.peak_memory_bytes[rank])} on rank {rank} ({name_stages(item.plan, rank)}), which has "
        f"{format_bytes(item.memory_limit_bytes[rank])}: {format_bytes(item.excess_bytes)} too much; most of it are "
        f"{item.memory_owner}. {_relaxation(problem, item, has_plan)}",
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


def _relaxation(problem: Problem, item: RankedPlan, has_plan: Callable[[Problem], bool]) -> str:
    """The first change that makes a plan possible, the cheapest to make first."""
    for words, choices in (*_changes(problem), *_lighter(problem, item.memory_owner)):
        relaxed = replace(problem, choices=choices)
        if has_plan(relaxed):
            return f"{words}: then there are plans that fit."
    needed = item.peak_memory_bytes[item.fullest_rank]
    return f"Give devices (or a memory limit) of at least {format_bytes(needed)}, more ranks, or a smaller model."


def _changes(problem: Problem) -> Iterator[tuple[str, Choices]]:
    """Words and choices, each with one thing more allowed."""
    chosen, everything = problem.choices, problem.cluster.num_ranks
    sizes = sorted({size for space in problem.spaces() for size in space.microbatch_sizes})
    if "1f1b" not in chosen.schedules:
        yield "Allow the schedule 1f1b", replace(chosen, schedules=(*chosen.schedules, "1f1b"))
    if sizes[0] > 1 and problem.graph_for(sizes[0]).batch_size is None:
        yield "Allow microbatches of 1 sample", replace(chosen, microbatch_sizes=(1,))
    if chosen.num_stages:
        yield "Allow any number of stages", replace(chosen, num_stages=())
    if chosen.num_devices and max(chosen.num_devices) < everything:
        yield f"Use all {everything} devices of the cluster", replace(chosen, num_devices=(everything,))


def _lighter(problem: Problem, owner: str) -> list[tuple[str, Choices]]:
    """Ways to keep less on a device, those against what takes most there first."""
    chosen = problem.choices
    states, activations = [], []
    if problem.workload.kind == "training":
        if max(chosen.zero) < 1:
            states.append(("Share optimizer states out (--zero 1)", replace(chosen, zero=(1,))))
        if all(away.optimizer == "device" for away in chosen.offload) and _has_hosts(problem):
            words = "Keep optimizer states on the host (--offload optimizer=host)"
            states.append((words, replace(chosen, offload=(Offload(optimizer="host"),))))
        if "full" not in chosen.recompute:
            activations.append(("Compute blocks again (--recompute full)", replace(chosen, recompute=("full",))))
    teams = []
    if all(sharding.is_whole for sharding in chosen.shardings):
        for size in _TENSOR_SIZES:
            words = f"Split ops over {size} devices (--tensor {size})"
            teams.append((words, replace(chosen, shardings=(Sharding(tensor=size),))))
    light = (states, activations) if owner in _STATES else (activations, states)
    return [*light[0], *light[1], *teams]


def _has_hosts(problem: Problem) -> bool:
    """Whether the nodes' hosts are described well enough to step there."""
    return all(node.host_memory_bandwidth_bytes_per_s > 0 for node in problem.cluster.nodes)


def _smallest_plan(problem: Problem) -> Candidate | None:
    """A plan that needs the least memory: the smallest microbatches under the least limit at which one exists."""
    small = (space for space in problem.spaces() if space.num_ranks <= MAX_RANKS)
    lean = [replace(space, microbatch_sizes=space.microbatch_sizes[:1]) for space in small]

    def first(limit: int) -> Candidate | None:
        for space in lean:
            found = CandidateSearch(replace(space, memory_limit_bytes=limit), _basic(space), SearchState()).run()
            if found:
                return found[0]
        return None

    low = problem.memory_limit_bytes or min(kind.memory_bytes for kind in problem.cluster.device_kinds)
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


def _basic(space: Space) -> list[str]:
    return [name for name in space.schedules if name in BASIC_SCHEDULES] or ["1f1b"]


def _words(numbers: Sequence[int]) -> str:
    return " or ".join(str(number) for number in numbers)
