"""The search behind `place`: candidates, their simulated steps, and moves of chains that make the best one faster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.cost import CostModel
from meshwright.cost.optimizers import state_bytes
from meshwright.planner.earliest_finish import Assignment, TaskCosts, order_tasks, schedule_tasks
from meshwright.planner.op_tasks import GENERATOR, Tasks, UnionFind, find_tasks, merge_chains
from meshwright.planner.place_constraints import Choices, Constraints, find_choices
from meshwright.planner.segments import cut_stages
from meshwright.program import build_placed_program
from meshwright.simulator import price_program, simulate_plan, simulate_program
from meshwright.spec import (
    RNG_STATE_BYTES,
    Cluster,
    Graph,
    NoFeasiblePlanError,
    Placement,
    Workload,
    format_bytes,
)

# Shares of the memory that list scheduling may fill, one after the other until a candidate fits: it knows what ops hold
# for good, not what they need meanwhile.
_MEMORY_SHARES = (1.0, 0.85, 0.7, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceProblem:
    """What `place` was asked; ``limits_bytes`` has one entry for each of ``ranks``."""

    graph: Graph
    cluster: Cluster
    workload: Workload
    ranks: tuple[int, ...]
    constraints: Constraints
    num_microbatches: int
    cost: CostModel
    limits_bytes: tuple[int, ...]
    model: str
    model_sizes: tuple[tuple[str, int], ...]

    @property
    def microbatch_size(self) -> int:
        """Samples in one microbatch."""
        return self.workload.global_batch // self.num_microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A placement with the duration of one step from a cold start, and by how many bytes its fullest rank is over."""

    placement: Placement
    step_ps: int
    excess_bytes: int

    @property
    def key(self) -> tuple[int, int]:
        """Smaller is better: first what fits, or lacks less, then what is faster."""
        return self.excess_bytes, self.step_ps


def search_placement(problem: PlaceProblem, max_simulated: int) -> Placement:
    """The fastest placement that was found. Raises NoFeasiblePlanError if none fits, PlanError as `place` does."""
    search = _Search(problem, max_simulated)
    best = min(search.start(), key=lambda item: item[0].key)
    candidate = search.improve(*best)
    if candidate.excess_bytes:
        raise _does_not_fit(problem, candidate.placement)
    return candidate.placement


class _Search:
    def __init__(self, problem: PlaceProblem, max_simulated: int) -> None:
        self._problem, self._left = problem, max_simulated
        self._tasks = find_tasks(problem.graph)
        self._choices = find_choices(problem.graph, self._tasks, problem.ranks, problem.constraints)
        self._chains, self._chain_of = merge_chains(problem.graph, self._tasks, self._choices.allowed)
        self._chain_choices = _merge_choices(self._choices, self._chain_of)
        self._known: dict[Placement, _Candidate] = {}

    def start(self) -> Iterator[tuple[_Candidate, Assignment]]:
        """Everything on one device, then list schedules; of these the ones that memory makes necessary.

        Each with the assignment of chains that comes nearest to it.
        """
        best_excess: int | None = None
        common = set.intersection(*map(set, self._chain_choices.allowed))
        for device in sorted(common):
            pinned = self._pin([device] * len(self._chains.ops))
            candidate = self._simulate(self._spread(pinned))
            yield candidate, pinned
            best_excess = min(candidate.excess_bytes, best_excess or candidate.excess_bytes)
        for share in _MEMORY_SHARES:
            for candidate, assignment in self._list_schedules(share):
                yield candidate, assignment
                best_excess = min(candidate.excess_bytes, best_excess or candidate.excess_bytes)
            if best_excess == 0:
                return
        if best_excess is None:
            raise NoFeasiblePlanError(
                f"The parameters of {self._problem.model} with what training keeps for them do not fit: the devices "
                f"{', '.join(map(str, self._problem.ranks))} have "
                f"{', '.join(map(format_bytes, self._problem.limits_bytes))}. Give more devices, or loosen constraints "
                "that put much on one."
            )

    def improve(self, best: _Candidate, assignment: Assignment) -> _Candidate:
        """Move groups of chains to other devices, the heaviest first, while that helps."""
        costs = _task_costs(self._problem, self._chains)
        members: dict[int, list[int]] = defaultdict(list)
        for chain, group in enumerate(self._chain_choices.groups):
            members[group].append(chain)
        weight = {group: float(costs.seconds[chains].mean(axis=1).sum()) for group, chains in members.items()}
        groups = sorted(members, key=lambda group: (-weight[group], group))
        improved = True
        while improved:
            improved = False
            for group in groups:
                for device in self._chain_choices.allowed[group]:
                    if device == assignment.devices[group] or self._left <= 0:
                        continue
                    moved = list(assignment.devices)
                    for chain in members[group]:
                        moved[chain] = device
                    pinned = self._pin(moved)
                    candidate = self._simulate(self._spread(pinned))
                    if candidate.key < best.key:
                        best, assignment, improved = candidate, pinned, True
        return best

    def _list_schedules(self, share: float) -> Iterator[tuple[_Candidate, Assignment]]:
        """Of chains, and of single tasks; the latter are improved from the device that most of a chain is on."""
        for tasks, choices in ((self._chains, self._chain_choices), (self._tasks, self._choices)):
            costs = _task_costs(self._problem, tasks)
            costs = replace(costs, limit_bytes=costs.limit_bytes * share)
            found = schedule_tasks(tasks, costs, choices.allowed, choices.groups)
            if found is None:
                continue
            if tasks is self._chains:
                yield self._simulate(self._spread(found)), found
            else:
                yield self._simulate(found), self._pin(self._gather(found))

    def _pin(self, devices: Sequence[int]) -> Assignment:
        """When chains start if their devices are given."""
        costs = _task_costs(self._problem, self._chains)
        costs = replace(costs, limit_bytes=np.full(len(self._problem.ranks), np.inf))
        alone = range(len(self._chains.ops))
        found = schedule_tasks(self._chains, costs, [(device,) for device in devices], alone)
        assert found is not None, "memory without a limit suffices"
        return found

    def _spread(self, of_chains: Assignment) -> Assignment:
        """The assignment of the tasks of all chains."""
        return Assignment(
            devices=tuple(of_chains.devices[chain] for chain in self._chain_of),
            starts=tuple(of_chains.starts[chain] for chain in self._chain_of),
        )

    def _gather(self, of_tasks: Assignment) -> list[int]:
        """Of each group of chains the device of its first task."""
        first: dict[int, int] = {}
        for task, chain in enumerate(self._chain_of):
            first.setdefault(self._chain_choices.groups[chain], of_tasks.devices[task])
        return [first[group] for group in self._chain_choices.groups]

    def _simulate(self, assignment: Assignment) -> _Candidate:
        problem = self._problem
        ranks = [problem.ranks[device] for device in assignment.devices]
        placement = Placement(
            model=problem.model,
            graph_hash=problem.graph.content_hash,
            cluster=problem.cluster.name,
            workload=problem.workload,
            stages=cut_stages(self._tasks, ranks, order_tasks(self._tasks, assignment.starts)),
            num_microbatches=problem.num_microbatches,
            model_sizes=problem.model_sizes,
        )
        if placement not in self._known:
            self._left -= 1
            program = build_placed_program(placement, problem.graph)
            timeline = simulate_program(program, price_program(program, placement, problem.graph, problem.cost))
            limit = dict(zip(problem.ranks, problem.limits_bytes, strict=True))
            over = [max(timeline.peak_memory_bytes[rank] - limit[rank], 0) for rank in sorted(set(ranks))]
            self._known[placement] = _Candidate(
                placement=placement, step_ps=int(timeline.end_ps.max(initial=0)), excess_bytes=max(over)
            )
        return self._known[placement]


def _merge_choices(choices: Choices, chain_of: Sequence[int]) -> Choices:
    """The choices of chains: those of their tasks, which agree; groups that a chain joins are one."""
    sets = UnionFind(max(chain_of) + 1)
    allowed: dict[int, tuple[int, ...]] = {}
    members: dict[int, list[int]] = defaultdict(list)
    for task, chain in enumerate(chain_of):
        allowed[chain] = choices.allowed[task]
        members[choices.groups[task]].append(chain)
    for chains in members.values():
        sets.merge(chains)
    count = max(chain_of) + 1
    return Choices(
        allowed=tuple(allowed[chain] for chain in range(count)),
        groups=tuple(sets.find(chain) for chain in range(count)),
    )


def _task_costs(problem: PlaceProblem, tasks: Tasks) -> TaskCosts:
    graph, cost, size = problem.graph, problem.cost, problem.microbatch_size
    width, training = problem.workload.float_bytes, problem.workload.kind == "training"
    columns = []
    for rank in problem.ranks:
        prices = cost.price_ops(graph, size, problem.cluster.device_kind(rank))
        each = prices.forward_s + prices.backward_s
        columns.append([float(each[list(ops)].sum()) for ops in tasks.ops])
    held = np.array([_held_bytes(problem, ops) for ops in tasks.ops], np.float64)

    def send_s(tensor: int, source: int, target: int) -> float:
        pair = problem.ranks[source], problem.ranks[target]
        facts = graph.tensors[tensor]
        num_bytes = RNG_STATE_BYTES if tensor == GENERATOR else facts.num_bytes(size, width)
        there = cost.collective_seconds("send", pair, num_bytes)
        returns = training and tensor != GENERATOR and facts.requires_grad
        return there + (cost.collective_seconds("send", pair[::-1], num_bytes) if returns else 0.0)

    return TaskCosts(
        seconds=np.array(columns, np.float64).T.reshape(len(tasks.ops), len(problem.ranks)),
        num_bytes=np.repeat(held[:, None], len(problem.ranks), axis=1),
        limit_bytes=np.array(problem.limits_bytes, np.float64),
        send_s=send_s,
    )


def _held_bytes(problem: PlaceProblem, ops: Sequence[int]) -> int:
    """Parameters with gradients and states of the optimizer, buffers, and in training what the ops make."""
    graph, workload = problem.graph, problem.workload
    training, total = workload.kind == "training", 0
    for tensor in sorted({i for op in ops for i in graph.ops[op].inputs}):
        facts = graph.tensors[tensor]
        if facts.role in ("parameter", "buffer"):
            num_bytes = facts.num_bytes(0, workload.float_bytes)
            trained = training and facts.role == "parameter" and facts.requires_grad
            states = facts.num_elements(0) * state_bytes(workload.optimizer, workload.precision) if trained else 0
            total += num_bytes * (1 + trained) + states
    for tensor in (i for op in ops for i in graph.ops[op].outputs if training):
        if graph.tensors[tensor].storage == tensor:
            kept = graph.tensors[tensor].num_bytes(problem.microbatch_size, workload.float_bytes)
            total += problem.num_microbatches * kept
    return total


def _does_not_fit(problem: PlaceProblem, placement: Placement) -> NoFeasiblePlanError:
    simulation = simulate_plan(placement, problem.graph, problem.cluster, cost=problem.cost)
    limit = dict(zip(problem.ranks, problem.limits_bytes, strict=True))
    used = [rank for rank in problem.ranks if placement.stages_of(rank)]
    rank = max(used, key=lambda item: simulation.memory[item].total_bytes - limit[item])
    peak = simulation.memory[rank]
    return NoFeasiblePlanError(
        f"No placement of {problem.model} was found that fits: at best rank {rank} needs "
        f"{format_bytes(peak.total_bytes)} of {format_bytes(limit[rank])}, most of it {peak.owner}. Give more devices, "
        "smaller microbatches (num_microbatches), or loosen constraints."
    )
