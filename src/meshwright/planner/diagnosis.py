"""Explain why no plan fits: which constraint binds, and the smallest change that would help."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NoReturn

from meshwright.cost.memory import MemoryLimit
from meshwright.planner.choices import Choices
from meshwright.planner.evaluate import RankedPlan
from meshwright.planner.methods.slicing import CandidateSearch, PlanCandidate
from meshwright.planner.methods.slicing.slicing_method import MAX_RANKS
from meshwright.planner.problem import Problem
from meshwright.planner.search_method import SearchState
from meshwright.planner.space import Space
from meshwright.spec import NoFeasiblePlanError, Offload, Plan, PlanError, Sharding, format_bytes, format_seconds
from meshwright.spec.exchange import WAVES, ZeroStage
from meshwright.spec.memory import BUCKETS, MEMORY_PARTS, name_part
from meshwright.spec.plan import name_stages
from meshwright.spec.schedules import BASIC_SCHEDULES

# The smallest memory limit under which a plan exists is found to this share: finer than any usual reserve.
_LIMIT_PRECISION = 0.01
# Parts of memory that do not depend on the number of microbatches in flight.
_STATES = MEMORY_PARTS[: BUCKETS + 1]
_ZERO: dict[ZeroStage, str] = {
    1: "Shard optimizer states (--zero 1)",
    2: "Shard optimizer states and gradients (--zero 2)",
    3: "Shard all states, as FSDP (--zero 3)",
}
# Tensor parallelism is proposed up to the usual number of devices of a node.
_TENSOR_SIZES = (2, 4, 8)
# If no other change helps, clusters with these multiples of the nodes are tried.
_MORE_NODES = (2, 4, 8, 16)


class NothingFitsError(NoFeasiblePlanError):
    """No plan fits into memory; ``nearest`` is the plan that exceeds the limit by the fewest bytes."""

    def __init__(self, message: str, nearest: RankedPlan) -> None:
        super().__init__(message)
        self.nearest = nearest


def require_possible(problem: Problem) -> None:
    """Raise PlanError or NoFeasiblePlanError if no plan could exist even with unlimited memory."""
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
    if problem.aim == "latency" and problem.workload.kind != "inference":
        raise PlanError(
            f"The aim latency was given for {problem.workload.kind}; expected inference, since only its batches have "
            "a latency. Add --inference, or leave --aim out."
        )
    if problem.max_latency_s is not None and (problem.workload.kind != "inference" or not problem.max_latency_s > 0):
        raise PlanError(
            f"A largest latency of {problem.max_latency_s} s was given for {problem.workload.kind}; expected a "
            "positive number of seconds, and inference. Correct or leave out --max-latency, or add --inference."
        )
    if problem.exchange.staleness and WAVES not in chosen.schedules:
        raise PlanError(
            f"A staleness of {problem.exchange.staleness} waves was given for {' and '.join(chosen.schedules)}; only "
            f"{WAVES} has waves of minibatches. Leave --staleness out, or add --schedule {WAVES}."
        )
    if problem.memory.num_bytes is not None and problem.memory.num_bytes < 1:
        raise PlanError(f"A memory limit of {problem.memory.num_bytes} bytes was given; expected at least 1.")
    for count in chosen.num_devices:
        if not 1 <= count <= everything:
            raise PlanError(
                f"A plan for {count} devices was asked for, but cluster {problem.cluster.name!r} has {everything} "
                f"devices. Give 1 to {everything} devices or a larger cluster."
            )
    errors: list[NoFeasiblePlanError] = []
    for space in problem.spaces():
        error = _impossible(space)
        if error is None:
            return
        errors.append(error)
    raise errors[0]


def _impossible(space: Space) -> NoFeasiblePlanError | None:
    """Return why a space has no plan, whatever the memory; None if it may have some."""
    size = space.microbatch_sizes[0]
    num_layers = len(space.problem.graph_for(size).layers)
    num_microbatches = space.workload.global_batch // size
    most = min(num_layers, space.num_ranks)
    if space.num_stages and not any(1 <= count <= most for count in space.num_stages):
        width = space.setting.sharding.width
        teams = f"teams of {width} devices (tensor times context times expert)"
        many, what = min((num_layers, "layers"), (space.num_ranks, teams if width > 1 else "ranks"))
        what = what.replace("s", "", 1) if many == 1 else what
        return NoFeasiblePlanError(
            f"{' or '.join(map(str, space.num_stages))} stages were asked for, but there are only {many} {what}, and "
            f"every stage needs at least one layer and one {'team' if width > 1 else 'rank'}. Ask for "
            f"{'1' if many == 1 else f'1 to {many}'} stages"
            f"{', or smaller tensor, context or expert axes' * (width > 1)}."
        )
    size_of_group, possible = space.exchange.shard_size, _stages_of_groups(space)
    if not possible.intersection(space.num_stages or range(1, most + 1)):
        stages = f"{_words(space.num_stages)} stages" if space.num_stages else "any number of stages"
        stages = "one stage" if space.num_stages == (1,) else stages
        return NoFeasiblePlanError(
            f"A shard size of {size_of_group} was given for {space.num_ranks} ranks in {stages}; expected a "
            "divisor of the number of replicas of every stage that has more than one. Choose another --shard, or other "
            "numbers of stages or ranks."
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


def _stages_of_groups(space: Space) -> set[int]:
    """Return the possible numbers of stages if each has one replica or whole groups of replicas that shard states.

    All ranks are used. At least one stage has a group; otherwise nothing would be sharded.
    """
    size, count = space.exchange.shard_size, space.num_ranks
    if not size or count == 1:
        return set(range(1, count + 1))
    alone = ((count - size * groups, groups) for groups in range(1, count // size + 1))
    return {ones + several for ones, groups in alone for several in range(1, groups + 1)}


def raise_infeasible(
    problem: Problem,
    rejected: Sequence[RankedPlan],
    evaluate: Callable[[Plan], RankedPlan],
    best_of: Callable[[Problem], RankedPlan | None],
) -> NoReturn:
    """Raise NothingFitsError: no plan fits into memory, since `require_possible` has excluded all other causes.

    ``rejected`` are simulated plans that do not fit. ``evaluate`` simulates a plan. ``best_of`` searches a changed
    problem and returns its best plan, None if no plan fits. Raises NoFeasiblePlanError if no plan could be made at all.
    """
    items = list(rejected)
    # The grid method has already considered the plans with the least memory of many settings.
    if not items or not problem.is_wide:
        smallest = _smallest_plan(problem)
        items += [evaluate(smallest.whole)] if smallest else []
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
    item = evaluate(min(items, key=lambda item: item.excess_bytes).plan)
    rank = item.fullest_rank
    raise NothingFitsError(
        f"No plan fits into memory. The smallest one found, {item.plan.describe()}, needs "
        f"{format_bytes(item.reserved_bytes[rank])} on rank {rank} ({name_stages(item.plan, rank)}), which may reserve "
        f"{format_bytes(item.memory_limit_bytes[rank])}: {format_bytes(item.excess_bytes)} too much; the largest part: "
        f"{name_part(item.memory_owner)}. {_relaxation(problem, item, best_of)}{_sequence_hint(item)}",
        nearest=item,
    )


def _sequence_hint(item: RankedPlan) -> str:
    """Return the hint to shorten sequences, if memory that grows with them is the largest part."""
    if item.sequence_length is None or item.memory_owner in _STATES:
        return ""
    return f" A sample has {item.sequence_length:,} tokens; shorter sequences need less (--sequence-length)."


def _fullest_share(item: RankedPlan) -> float:
    return max(node.share for node in item.nodes)


def _no_room_on_hosts(item: RankedPlan) -> NothingFitsError:
    fullest = max(item.nodes, key=lambda node: node.share)
    offload = item.plan.offload
    ways = ["Use more nodes"]
    ways += ["shard states (--zero 1 to 3)", "keep optimizer states on NVMe"] if offload.optimizer == "host" else []
    ways += ["leave activations on the devices"] if offload.activations == "host" else []
    return NothingFitsError(
        f"Plans fit into the devices' memory, but not into the nodes' host memory or drives. With the smallest plan, "
        f"{item.plan.describe()}, {fullest.describe()}. {', or '.join(ways)}.",
        nearest=item,
    )


def _relaxation(problem: Problem, item: RankedPlan, best_of: Callable[[Problem], RankedPlan | None]) -> str:
    """Return the change that makes a plan fit at the least device seconds per step.

    All single changes are tried first, then pairs.
    """
    single = [*_changes(problem), *_lighter(problem, item.memory_owner)]
    found = _fitting(problem, single, best_of) or _fitting(problem, _together(problem), best_of)
    found = found or _on_more_devices(problem, best_of)
    if not found:
        needed = format_bytes(item.reserved_bytes[item.fullest_rank])
        return f"Give devices (or a memory limit) with at least {needed} for a plan, more ranks, or a smaller model."
    words, best = min(found, key=lambda pair: pair[1].device_seconds)
    others = [other for other, _ in found if other != words]
    beside = f" Other changes that make a plan fit: {'; '.join(others)}." if others else ""
    rank = best.fullest_rank
    return (
        f"{words}: then the best plan takes {format_seconds(best.step_time_s)} per step and reserves "
        f"{format_bytes(best.reserved_bytes[rank])}.{beside}"
    )


def _fitting(
    problem: Problem, changes: Iterable[tuple[str, Choices]], best_of: Callable[[Problem], RankedPlan | None]
) -> list[tuple[str, RankedPlan]]:
    """Return the changes under which a plan fits, each with its best plan."""
    tried = ((words, best_of(replace(problem, choices=choices))) for words, choices in changes)
    return [(words, best) for words, best in tried if best is not None]


def _together(problem: Problem) -> Iterator[tuple[str, Choices]]:
    """Yield combinations of changes, for when no single change helps."""
    chosen = problem.choices
    if problem.workload.kind != "training":
        return
    lean = replace(chosen, schedules=tuple(dict.fromkeys((*chosen.schedules, "1f1b"))), microbatch_sizes=(), zero=(3,))
    again = replace(lean, recompute=("full",))
    yield "Shard all states and recompute blocks (--zero 3 --recompute full)", again
    if _has_hosts(problem):
        away = replace(again, zero=(2,), offload=(Offload(optimizer="host"),))
        yield (
            "Keep optimizer states on the host, shard them and recompute blocks (--offload optimizer=host --zero 2 "
            "--recompute full)",
            away,
        )
    for size in _TENSOR_SIZES:
        if all(sharding.is_whole for sharding in chosen.shardings):
            yield (
                f"Split ops, shard optimizer states and recompute blocks (--tensor {size} --zero 1 --recompute full)",
                replace(again, zero=(1,), shardings=(Sharding(tensor=size),)),
            )


def _on_more_devices(problem: Problem, best_of: Callable[[Problem], RankedPlan | None]) -> list[tuple[str, RankedPlan]]:
    """Return the smallest multiple of the cluster's nodes on which a plan fits, with the problem's own choices."""
    cluster = problem.cluster
    if cluster.racks is not None or cluster.paths or problem.choices.num_devices:
        return []
    for times in _MORE_NODES:
        if cluster.num_ranks * times > MAX_RANKS:
            break
        nodes = tuple(replace(node, name=f"{node.name}-{k}") for k in range(times) for node in cluster.nodes)
        wider = replace(cluster, name=f"{times}x{cluster.name}", nodes=nodes)
        other = replace(problem, cluster=wider, cost=problem.cost.on_machines(wider))
        if (best := best_of(other)) is not None:
            return [(f"Use {wider.num_ranks} devices", best)]
    return []


def _changes(problem: Problem) -> Iterator[tuple[str, Choices]]:
    """Yield words and choices, each with one more thing allowed."""
    chosen, everything = problem.choices, problem.cluster.num_ranks
    sizes = sorted({size for space in problem.spaces() for size in space.microbatch_sizes})
    if "1f1b" not in chosen.schedules:
        yield "Allow the schedule 1f1b (--schedule 1f1b)", replace(chosen, schedules=(*chosen.schedules, "1f1b"))
    if sizes[0] > 1 and problem.graph_for(sizes[0]).batch_size is None:
        yield "Allow microbatches of 1 sample (--microbatch-size 1)", replace(chosen, microbatch_sizes=(1,))
    if chosen.num_stages:
        yield "Allow any number of stages (leave out --stages)", replace(chosen, num_stages=())
    if chosen.num_devices and max(chosen.num_devices) < everything:
        words = f"Use all {everything} devices of the cluster (leave out --ranks)"
        yield words, replace(chosen, num_devices=(everything,))


def _lighter(problem: Problem, owner: str) -> list[tuple[str, Choices]]:
    """Return ways to keep less on a device; those against the largest part of memory come first."""
    chosen = problem.choices
    states, activations = [], []
    if problem.workload.kind == "training":
        if any(chosen.shard_sizes):
            words = "Shard states over all replicas (leave out --shard)"
            states.append((words, replace(chosen, shard_sizes=(0,))))
        further = (stage for stage in _ZERO if stage > max(chosen.zero))
        states += [(_ZERO[stage], replace(chosen, zero=(stage,))) for stage in further]
        if all(away.optimizer == "device" for away in chosen.offload) and _has_hosts(problem):
            words = "Keep optimizer states on the host (--offload optimizer=host)"
            states.append((words, replace(chosen, offload=(Offload(optimizer="host"),))))
        if not {"op", "full"} & {*chosen.recompute} and not problem.compiled:
            words = "Recompute blocks except products and attention (--recompute op)"
            activations.append((words, replace(chosen, recompute=("op",))))
        if "full" not in chosen.recompute:
            activations.append(("Recompute blocks (--recompute full)", replace(chosen, recompute=("full",))))
        if all(away.activations == "device" for away in chosen.offload) and not problem.compiled:
            words = "Keep activations on the host (--offload activations=host)"
            away = tuple(replace(item, activations="host") for item in chosen.offload)
            activations.append((words, replace(chosen, offload=away)))
    teams = []
    if all(sharding.is_whole for sharding in chosen.shardings):
        for size in _TENSOR_SIZES:
            words = f"Split ops over {size} devices (--tensor {size})"
            teams.append((words, replace(chosen, shardings=(Sharding(tensor=size),))))
    light = (states, activations) if owner in _STATES else (activations, states)
    return [*light[0], *light[1], *teams]


def _has_hosts(problem: Problem) -> bool:
    """Return whether the hosts of the nodes are described well enough to run the optimizer there."""
    return all(node.host_memory_bandwidth_bytes_per_s > 0 for node in problem.cluster.nodes)


def _smallest_plan(problem: Problem) -> PlanCandidate | None:
    """Return a plan that needs the least memory: the smallest microbatches under the smallest feasible limit."""
    small = (space for space in problem.spaces() if space.num_ranks <= MAX_RANKS)
    lean = [replace(space, microbatch_sizes=space.microbatch_sizes[:1]) for space in small]

    def first(limit: int) -> PlanCandidate | None:
        for space in lean:
            found = CandidateSearch(
                replace(space, memory=MemoryLimit(num_bytes=limit)), _basic(space), SearchState()
            ).run()
            if found:
                return found[0]
        return None

    low = min(map(problem.memory.usable_bytes, problem.cluster.device_kinds))
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
