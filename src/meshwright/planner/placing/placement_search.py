"""The search behind `place` (`search_placement`): simulate list schedules and other candidates, then move chains.

A stage of a placement is a run of tasks of one device without communication in between. All tasks have one order over
all devices, in which each follows the tasks that it reads. A stage ends after a task from which another device reads,
so that the output is sent at once. A stage also ends before a task that is the first of its device to read a tensor of
another device, so that no task waits longer than necessary. So a stage waits only before its first task, and other
stages wait only for its last task; stages are ordered by their first tasks.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import CostModel
from meshwright.cost.optimizers import optimizer_bytes
from meshwright.planner.placing.op_tasks import (
    GENERATOR,
    Constraints,
    Tasks,
    UnionFind,
    find_choices,
    find_tasks,
    merge_chains,
)
from meshwright.program import build_placed_program
from meshwright.simulator import estimate_program, simulate_plan, simulate_program
from meshwright.spec import (
    RNG_STATE_BYTES,
    Cluster,
    Graph,
    NoFeasiblePlanError,
    PlacedStage,
    Placement,
    Workload,
    format_bytes,
)
from meshwright.spec.memory import name_part

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskCosts:
    """The costs of tasks on devices.

    Shape (tasks, devices): ``seconds`` of one microbatch, and ``num_bytes`` that a task holds permanently.
    ``limit_bytes`` (devices,) is the memory limit. ``send_s(tensor, source, target)`` returns the seconds to send a
    tensor from one device to another and, in training, its gradient back.
    """

    seconds: Floats
    num_bytes: Floats
    limit_bytes: Floats
    send_s: Callable[[int, int, int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The device of each task and its estimated start in seconds, each of shape (tasks,)."""

    devices: tuple[int, ...]
    starts: tuple[float, ...]


# List scheduling: each task goes where it finishes earliest (HEFT).
#
#     up(t) = w(t) + max over readers r of (c(t, r) + up(r))         w, c: means over devices and pairs of them
#     finish(t, d) = max(free gap on d, max over inputs of t of their arrival on d) + w(t, d)
#
# Tasks are taken by descending up(t), an order in which each follows what it reads; a task may fill a gap between two
# others on its device. A tensor arrives on a device once, however many tasks there read it. Devices whose memory limit
# would be exceeded are skipped. Source: Topcuoglu, Hariri, Wu: Performance-effective and low-complexity task scheduling
# for heterogeneous computing, IEEE TPDS 13(3), 2002.
def schedule_tasks(
    tasks: Tasks, costs: TaskCosts, allowed: Sequence[tuple[int, ...]], together: Sequence[int]
) -> Assignment | None:
    """Assign each task to one of its ``allowed`` devices by list scheduling; None if memory does not suffice.

    Devices are indexes into the columns of ``costs``. Tasks with the same number in ``together`` share one device.
    """
    members: dict[int, list[int]] = defaultdict(list)
    for task, group in enumerate(together):
        members[group].append(task)
    chosen: dict[int, int] = {}
    free = costs.limit_bytes.copy()
    timetable = _Timetable(tasks, costs)
    for task in _by_upward_rank(tasks, costs):
        group = together[task]
        if group not in chosen:
            need = costs.num_bytes[members[group]].sum(axis=0)
            fitting = [device for device in allowed[task] if need[device] <= free[device]]
            if not fitting:
                return None
            chosen[group] = min(fitting, key=lambda device: (timetable.finish(task, device), device))
            free[chosen[group]] -= need[chosen[group]]
        timetable.put(task, chosen[group])
    return Assignment(devices=tuple(chosen[group] for group in together), starts=tuple(timetable.starts))


class _Timetable:
    """The timetable of each device, and the arrival times of tensors."""

    def __init__(self, tasks: Tasks, costs: TaskCosts) -> None:
        self._tasks, self._costs = tasks, costs
        self._device = [-1] * len(tasks.ops)
        self._finish = [0.0] * len(tasks.ops)
        self._arrived: dict[tuple[int, int, int], float] = {}
        self._busy: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self.starts = [0.0] * len(tasks.ops)

    def finish(self, task: int, device: int) -> float:
        """Return the time, in seconds, at which a task would finish on a device."""
        seconds = float(self._costs.seconds[task, device])
        return self._gap(device, self._ready(task, device), seconds) + seconds

    def put(self, task: int, device: int) -> None:
        """Schedule a task on a device."""
        seconds = float(self._costs.seconds[task, device])
        start = self._gap(device, self._ready(task, device), seconds)
        for source, tensor in self._tasks.reads[task]:
            self._arrived[source, tensor, device] = self._arrival(source, tensor, device)
        self._device[task], self._finish[task], self.starts[task] = device, start + seconds, start
        bisect.insort(self._busy[device], (start, start + seconds))

    def _ready(self, task: int, device: int) -> float:
        return max((self._arrival(source, tensor, device) for source, tensor in self._tasks.reads[task]), default=0.0)

    def _arrival(self, source: int, tensor: int, device: int) -> float:
        known = self._arrived.get((source, tensor, device))
        if known is not None:
            return known
        if self._device[source] == device:
            return self._finish[source]
        return self._finish[source] + self._costs.send_s(tensor, self._device[source], device)

    def _gap(self, device: int, ready: float, seconds: float) -> float:
        """Return the earliest start in a gap that is long enough."""
        start, busy = ready, self._busy[device]
        for begin, end in busy[bisect.bisect_right(busy, ready, key=lambda span: span[1]) :]:
            if begin - start >= seconds:
                return start
            start = max(start, end)
        return start


def _by_upward_rank(tasks: Tasks, costs: TaskCosts) -> list[int]:
    num_devices = costs.seconds.shape[1]
    pairs = [(a, b) for a in range(num_devices) for b in range(num_devices) if a != b]
    mean_send: dict[int, float] = {}

    def move_s(tensor: int) -> float:
        if tensor not in mean_send:
            total = sum(costs.send_s(tensor, *pair) for pair in pairs)
            mean_send[tensor] = total / len(pairs) if pairs else 0.0
        return mean_send[tensor]

    rank = [0.0] * len(tasks.ops)
    order = order_tasks(tasks, [0.0] * len(tasks.ops))
    place = {task: at for at, task in enumerate(order)}
    for task in reversed(order):
        rank[task] += float(costs.seconds[task].mean())
        for source, tensor in tasks.reads[task]:
            rank[source] = max(rank[source], rank[task] + move_s(tensor))
    # If ranks are equal, which happens only for tasks without work, the maker comes before the reader.
    return sorted(order, key=lambda task: (-rank[task], place[task]))


def order_tasks(tasks: Tasks, starts: Sequence[float]) -> list[int]:
    """Return the numbers of all tasks, each after the tasks that it reads, otherwise by ascending ``starts``."""
    waiting = [len({source for source, _ in reads}) for reads in tasks.reads]
    readers = tasks.readers()
    ready = sorted((starts[task], task) for task, count in enumerate(waiting) if not count)
    order: list[int] = []
    while ready:
        task = ready.pop(0)[1]
        order.append(task)
        for reader in readers[task]:
            waiting[reader] -= 1
            if not waiting[reader]:
                bisect.insort(ready, (starts[reader], reader))
    return order


# Shares of memory that list scheduling may fill, tried in order until a candidate fits: it counts what ops hold
# permanently, not what they need temporarily.
_MEMORY_SHARES = (1.0, 0.85, 0.7, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceProblem:
    """The arguments of `place`, checked; ``limits_bytes`` is the memory limit of each of the ``ranks``."""

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
        """The number of samples in one microbatch."""
        return self.workload.global_batch // self.num_microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A placement with the duration of one step from a cold start, and its fullest rank's excess bytes."""

    placement: Placement
    step_ps: int
    excess_bytes: int

    @property
    def key(self) -> tuple[int, int]:
        """Sort key (bytes beyond the memory limit, time of a step); smaller is better."""
        return self.excess_bytes, self.step_ps


def search_placement(problem: PlaceProblem, max_simulated: int) -> Placement:
    """Return the fastest placement found with at most ``max_simulated`` simulations.

    Raises NoFeasiblePlanError if no placement fits into memory, PlanError in the cases of `place`.
    """
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
        self._costs = _task_costs(problem, self._tasks)
        self._chains, self._chain_of = merge_chains(problem.graph, self._tasks, self._choices.allowed)
        self._known: dict[Placement, _Candidate] = {}

    def start(self) -> Iterator[tuple[_Candidate, Assignment]]:
        """Yield candidates with their assignments: all tasks on one device, pipelines, list schedules.

        List schedules with lower memory limits follow only if no candidate fits. Raises NoFeasiblePlanError without any
        candidate.
        """
        least: int | None = None
        for assignment in self._assignments():
            if assignment is None:
                # Another round, with a lower memory limit.
                if least == 0:
                    return
                continue
            candidate = self._simulate(assignment)
            least = candidate.excess_bytes if least is None else min(least, candidate.excess_bytes)
            yield candidate, assignment
        if least is None:
            raise NoFeasiblePlanError(
                f"The parameters of {self._problem.model} (with gradients, optimizer states and outputs in training) "
                f"do not fit: the devices {', '.join(map(str, self._problem.ranks))} have "
                f"{', '.join(map(format_bytes, self._problem.limits_bytes))}. Give more devices, or loosen constraints "
                "that put many ops on one device."
            )

    def improve(self, best: _Candidate, assignment: Assignment) -> _Candidate:
        """Return the best candidate after moving chains to other devices, the heaviest first, while that helps.

        Tasks that must share a device move together.
        """
        moves = self._moves()
        improved = True
        while improved:
            improved = False
            for tasks in moves:
                for device in self._choices.allowed[tasks[0]]:
                    if self._left <= 0 or all(assignment.devices[task] == device for task in tasks):
                        continue
                    devices = list(assignment.devices)
                    for task in tasks:
                        devices[task] = device
                    pinned = self._pin(devices)
                    candidate = self._simulate(pinned)
                    if candidate.key < best.key:
                        best, assignment, improved = candidate, pinned, True
        return best

    def _assignments(self) -> Iterator[Assignment | None]:
        for device in sorted(set.intersection(*map(set, self._choices.allowed))):
            yield self._pin([device] * len(self._tasks.ops))
        for count in range(2, len(self._problem.ranks) + 1):
            yield self._pin(self._pipeline(count))
        for share in _MEMORY_SHARES:
            yield from self._list_schedules(share)
            yield None

    def _moves(self) -> list[list[int]]:
        """Return sets of tasks that are moved together, the heaviest first: groups, joined by their chains."""
        sets = UnionFind(len(self._tasks.ops))
        first_of_chain: dict[int, int] = {}
        for task, chain in enumerate(self._chain_of):
            sets.merge((first_of_chain.setdefault(chain, task), task, self._choices.groups[task]))
        members: dict[int, list[int]] = defaultdict(list)
        for task in range(len(self._tasks.ops)):
            members[sets.find(task)].append(task)
        seconds = self._costs.seconds.mean(axis=1)
        return sorted(members.values(), key=lambda tasks: (-float(seconds[tasks].sum()), tasks))

    def _pipeline(self, count: int) -> list[int]:
        """Divide the tasks in the graph's order over the first ``count`` devices, with about equal seconds."""
        order = order_tasks(self._tasks, [float(ops[0]) for ops in self._tasks.ops])
        seconds = self._costs.seconds.mean(axis=1)
        middle = np.cumsum(seconds[order]) - seconds[order] / 2
        share = seconds.sum() / count or 1.0
        wanted = dict(zip(order, np.minimum(middle / share, count - 1).astype(int).tolist(), strict=True))
        # The first task of a group that shares a device decides for all, within its allowed devices.
        allowed, groups = self._choices.allowed, self._choices.groups
        chosen = {task: min(allowed[task], key=lambda device: abs(device - wanted[task])) for task in {*groups}}
        return [chosen[group] for group in groups]

    def _list_schedules(self, share: float) -> Iterator[Assignment]:
        """Yield list schedules of chains, and of single tasks."""
        limit_bytes = self._costs.limit_bytes * share
        of_chains = schedule_tasks(
            self._chains,
            replace(_task_costs(self._problem, self._chains), limit_bytes=limit_bytes),
            *self._choices_of_chains(),
        )
        if of_chains is not None:
            yield self._pin([of_chains.devices[chain] for chain in self._chain_of])
        choices = self._choices
        of_tasks = schedule_tasks(
            self._tasks, replace(self._costs, limit_bytes=limit_bytes), choices.allowed, choices.groups
        )
        if of_tasks is not None:
            yield of_tasks

    def _choices_of_chains(self) -> tuple[list[tuple[int, ...]], list[int]]:
        """Return the choices of chains: those of their tasks, which agree; groups joined by a chain are merged."""
        sets = UnionFind(len(self._chains.ops))
        allowed: dict[int, tuple[int, ...]] = {}
        members: dict[int, list[int]] = defaultdict(list)
        for task, chain in enumerate(self._chain_of):
            allowed[chain] = self._choices.allowed[task]
            members[self._choices.groups[task]].append(chain)
        for chains in members.values():
            sets.merge(chains)
        numbers = range(len(self._chains.ops))
        return [allowed[chain] for chain in numbers], [sets.find(chain) for chain in numbers]

    def _pin(self, devices: Sequence[int]) -> Assignment:
        """Return the assignment with the start times for given devices."""
        costs = replace(self._costs, limit_bytes=np.full(len(self._problem.ranks), np.inf))
        alone = range(len(self._tasks.ops))
        found = schedule_tasks(self._tasks, costs, [(device,) for device in devices], alone)
        assert found is not None, "memory without a limit suffices"
        return found

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
            timeline = simulate_program(program, estimate_program(program, placement, problem.graph, problem.cost))
            limit = dict(zip(problem.ranks, problem.limits_bytes, strict=True))
            over = [max(timeline.peak_memory_bytes[rank] - limit[rank], 0) for rank in sorted(set(ranks))]
            self._known[placement] = _Candidate(
                placement=placement, step_ps=int(timeline.end_ps.max(initial=0)), excess_bytes=max(over)
            )
        return self._known[placement]


def _task_costs(problem: PlaceProblem, tasks: Tasks) -> TaskCosts:
    graph, cost, size = problem.graph, problem.cost, problem.microbatch_size
    width, training = problem.workload.float_bytes, problem.workload.kind == "training"
    columns = []
    for rank in problem.ranks:
        costs = cost.estimate_ops(graph, size, problem.cluster.device_kind(rank))
        each = costs.microbatch_s(first=True)
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
    """Return the bytes that ops hold permanently.

    They are parameters with gradients and optimizer states, buffers, and, in training, the outputs of all microbatches.
    """
    graph, workload = problem.graph, problem.workload
    training, total = workload.kind == "training", 0
    for tensor in sorted({i for op in ops for i in graph.ops[op].inputs}):
        facts = graph.tensors[tensor]
        if facts.role in ("parameter", "buffer"):
            total += facts.num_bytes(0, workload.float_bytes)
            if training and facts.role == "parameter" and facts.requires_grad:
                total += workload.gradient_bytes(facts) + optimizer_bytes(facts, workload)
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
        f"No placement of {problem.model} was found that fits into memory. In the closest one, rank {rank} needs "
        f"{format_bytes(peak.total_bytes)} and has {format_bytes(limit[rank])}; the largest part: "
        f"{name_part(peak.owner)}. Give more devices, smaller microbatches (num_microbatches), or loosen constraints."
    )


def cut_stages(tasks: Tasks, ranks: Sequence[int], order: Sequence[int]) -> tuple[PlacedStage, ...]:
    """Return the stages of a placement.

    ``ranks`` has the rank of each task, shape (tasks,). In ``order``, each task must follow the tasks that it reads.
    """
    leaves = [False] * len(tasks.ops)
    for task, reads in enumerate(tasks.reads):
        for source, _ in reads:
            leaves[source] |= ranks[source] != ranks[task]
    stages: list[tuple[int, list[int]]] = []
    open_stage: dict[int, int] = {}
    there: set[tuple[int, int, int]] = set()
    for task in order:
        rank = ranks[task]
        arriving = {(source, tensor, rank) for source, tensor in tasks.reads[task] if ranks[source] != rank} - there
        there |= arriving
        if arriving or rank not in open_stage:
            open_stage[rank] = len(stages)
            stages.append((rank, []))
        stages[open_stage[rank]][1].extend(tasks.ops[task])
        if leaves[task]:
            del open_stage[rank]
    return tuple(PlacedStage(rank=rank, ops=tuple(sorted(ops))) for rank, ops in stages)
