"""Estimate the costs of a plan's program with a cost model (`estimate_program`).

Every instruction gets a cost class and a route, every mark an offset. Instructions of equal cost are estimated once:
computations by (stage, device kind and speed of the host, first or last backward of its rank, opcode), messages and
collectives by (group, opcode, bytes), marks by computation and bucket. `PlacedRanks` counts memory and optimizer steps
that the stages of a placement share.

Asynchronous hosts (`host_issue`) wait for the device only before the first update of a step whose loss is scaled,
because the host reads there whether all gradients are finite (`runtime.optimizer_steps`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import CostModel
from meshwright.cost.autocast import as_computed
from meshwright.cost.collectives import CollectiveOp
from meshwright.cost.collectives.algorithms import Algorithm
from meshwright.cost.host_costs import HostCosts
from meshwright.cost.memory import backend_of, library_workspaces
from meshwright.cost.optimizers import optimizer_bytes
from meshwright.cost.team_costs import REPLICATING, Axes
from meshwright.program import (
    Bucket,
    Fold,
    folded_buckets,
    gradient_buckets,
    graph_of_program,
    host_pieces,
    trained_stages,
)
from meshwright.program.buckets import cut_parts
from meshwright.simulator.alike import FIRST, LAST, find_distinct, first_updates, mark_backwards
from meshwright.simulator.message_matching import rank_of_streams
from meshwright.simulator.program_costs import IssueCosts, ProgramCosts, SectionCosts
from meshwright.simulator.routes import Routes
from meshwright.simulator.saved_waits import EstimatedCopies
from meshwright.simulator.span_parts import IssuedParts, SpanParts, issue_parts, list_parts
from meshwright.simulator.stage_bytes import (
    Bytes,
    StageBytes,
    by_part,
    compute_orders,
    receive_buffer_bytes,
    sent_gradient_bytes,
    served_bytes,
    stage_bytes,
    transfer_bytes,
)
from meshwright.simulator.stage_costs import StageCosts, StepIssue, stage_costs, step_issue, steps_on_host
from meshwright.simulator.state_shards import find_shards
from meshwright.spec import (
    Graph,
    Opcode,
    Placement,
    Plan,
    PlanError,
    Program,
    ProgramError,
    Section,
    StageSlice,
    slice_stages,
    to_picoseconds,
)
from meshwright.spec.instructions import (
    COLLECTIVES,
    COMPUTATIONS,
    INSTRUCTIONS,
    OFFLOADING,
    RECEIVES,
    STASHING,
    UPDATES,
)
from meshwright.spec.memory import BUCKETS, BUFFERS, INPUTS, MEMORY_PARTS, OPTIMIZER, PARAMETERS, RECEIVED, SENT


# Memory and work that the stages of a placement share on their rank are counted once:
#
# - Parameters, buffers and inputs that several stages of a rank read exist once.
# - A value that a stage passes to later stages of its rank stays until the last of them has read it. If there is a
#   backward, its producer keeps it until then anyway.
# - A bucket of gradients that several stages of a rank fill exists once.
# - The optimizer steps once over all parameters of a rank.
class PlacedRanks:
    """Memory and optimizer steps that stages of one rank share, for all ranks of a placement.

    ``stages`` are the slices of the placement.
    """

    def __init__(self, placement: Placement, graph: Graph, stages: tuple[StageSlice, ...]) -> None:
        self._placement, self._graph, self._stages = placement, graph, stages
        self._size, self._width = placement.microbatch_size, placement.workload.float_bytes
        self._kept = [by_part({}) for _ in stages]
        self._released = [by_part({}) for _ in stages]
        for stage in stages:
            if not stage.has_backward:
                self._hold(stage)

    def shared_bytes(self, rank: int) -> Bytes:
        """Return the bytes, by part, that a sum over the stages of a rank counts more than once."""
        seen: set[int] = set()
        total = by_part({})
        for index in self._placement.stages_of(rank):
            stage = self._stages[index]
            for part, tensors in ((PARAMETERS, stage.parameters), (BUFFERS, stage.buffers), (INPUTS, stage.inputs)):
                count = self._placement.num_microbatches if part == INPUTS else 1
                again = [tensor for tensor in tensors if tensor in seen]
                total += by_part({part: count * sum(map(self._bytes, again))})
                if part == PARAMETERS:
                    total += by_part({OPTIMIZER: sum(map(self._state_bytes, again))})
                seen.update(tensors)
        mine = set(self._placement.stages_of(rank))
        for bucket in gradient_buckets(self._graph, self._placement):
            total += by_part({BUCKETS: max(len(mine.intersection(bucket.stages)) - 1, 0) * bucket.num_bytes})
        return total

    def keep_handed_on(self, stage: int, forward: tuple[Bytes, Bytes]) -> tuple[Bytes, Bytes]:
        """Return the bytes (allocated, freed) of a stage's forward, adjusted for values that later stages read.

        A value that a later stage of the rank reads is freed by that stage.
        """
        takes, frees = forward
        return takes, frees - self._kept[stage] + self._released[stage]

    def optimizer_step(self, stage: int, cost: CostModel) -> tuple[float, float, tuple[int, ...]]:
        """Return the optimizer step of the rank that holds ``stage``.

        The result is (seconds on the device, seconds in which an asynchronous host issues the step, the rank's trained
        stages).
        """
        rank = self._placement.stages[stage].rank
        stages = trained_stages(self._placement, self._graph, rank)
        parameters = sorted({tensor for index in stages for tensor in self._stages[index].parameters})
        kind = cost.cluster.device_kind(rank)
        seconds = cost.optimizer_seconds(self._graph, parameters, self._placement.workload.optimizer, kind)
        issue = step_issue(self._graph, self._placement, parameters, cost, 1)
        return seconds + cost.serial_overhead_s(kind), issue.optimizer_s, stages

    def _hold(self, stage: StageSlice) -> None:
        """Keep values that later stages of the rank read until the last of them, each storage once."""
        rank = self._placement.stages[stage.index].rank
        received = {self._graph.tensors[i].storage for channel in stage.incoming for i in channel.tensors}
        last: dict[int, int] = {}
        for channel in stage.outgoing:
            if self._placement.stages[channel.target].rank == rank:
                for storage in (self._graph.tensors[tensor].storage for tensor in channel.tensors):
                    if self._graph.tensors[storage].role == "activation":
                        last[storage] = max(last.get(storage, 0), channel.target)
        for storage, target in last.items():
            held = by_part({RECEIVED if storage in received else SENT: self._bytes(storage)})
            self._kept[stage.index] += held
            self._released[target] += held

    def _bytes(self, tensor: int) -> int:
        return self._graph.tensors[tensor].num_bytes(self._size, self._width)

    def _state_bytes(self, parameter: int) -> int:
        workload, tensor = self._placement.workload, self._graph.tensors[parameter]
        if workload.kind != "training" or not tensor.requires_grad:
            return 0
        return optimizer_bytes(tensor, workload)


# Whether an opcode occupies the device, by opcode.
_IS_COMPUTE = np.isin(list(Opcode), (*COMPUTATIONS, *UPDATES, *STASHING))
_COLLECTIVE_OPS: dict[Opcode, CollectiveOp] = {
    Opcode.ALL_REDUCE: "all_reduce",
    Opcode.REDUCE_SCATTER: "reduce_scatter",
    Opcode.ALL_GATHER: "all_gather",
}
_ACCESSES_PER_SUM = 3
# The engine needs time to pass while a link is held.
SHORTEST_S = 1e-12


def estimate_program(
    program: Program, plan: Plan | Placement, graph: Graph, cost: CostModel, *, fold: Fold | None = None
) -> ProgramCosts:
    """Return the costs of a plan's program on the cost model's cluster; rank r is device r of the cluster.

    With a ``fold``, program and plan are those of ``fold.plan``, and rank r is on the device ``fold.ranks[r]``; a
    gradient sum is estimated for all members of the whole plan, on all their links.

    Raises PlanError if the plan splits ops or recomputes: pass the plan and graph that `form_teams` returns instead.
    """
    if isinstance(plan, Plan) and (plan.recompute or not plan.sharding.is_whole):
        raise PlanError(
            "The plan splits ops or recomputes, but its costs were requested for the whole graph. Estimate the plan "
            "and graph that `form_teams` returns for it."
        )
    graph = graph_of_program(graph, program)
    estimator = _Estimator(program, plan, graph, cost, fold)
    sections = {name: estimator.estimate_section(section) for name, section in program.sections()}
    durations, host, exchanged, copied, takes, frees, issue = zip(*estimator.classes, strict=True)
    host_ps, earliest_ps, is_awaited = (np.array(column) for column in zip(*issue, strict=True))
    route_offsets, route_links, num_links = estimator.routes.table()
    return ProgramCosts(
        duration_ps=np.array(durations, np.int64),
        host_ps=np.array(host, np.int64),
        exchanged_ps=np.array(exchanged, np.int64) if any(exchanged) else None,
        copied_ps=np.array(copied, np.int64) if any(copied) else None,
        issue=IssueCosts(host_ps, earliest_ps, is_awaited) if estimator.has_hosts else None,
        allocate_bytes=np.stack(takes),
        free_bytes=np.stack(frees),
        memory_parts=MEMORY_PARTS,
        resident_bytes=np.stack([estimator.resident_bytes(*item) for item in enumerate(compute_orders(program))]),
        route_offsets=route_offsets,
        route_links=route_links,
        num_links=num_links,
        link_names=estimator.routes.names(),
        prologue=sections["prologue"],
        body=sections["body"],
        epilogue=sections["epilogue"],
    )


def exchanged_buckets(plan: Plan | Placement, graph: Graph, fold: Fold | None) -> tuple[Bucket, ...]:
    """Return the gradient buckets that a plan sums; () if replicas average parameters instead (``every_steps`` > 1)."""
    if isinstance(plan, Plan) and plan.exchange.every_steps > 1:
        return ()
    return folded_buckets(fold, graph) if fold else gradient_buckets(graph, plan)


class _Estimator:
    """Holds the costs of the stages, and collects cost classes and routes section by section."""

    def __init__(
        self, program: Program, plan: Plan | Placement, graph: Graph, cost: CostModel, fold: Fold | None
    ) -> None:
        self._program, self._cost = program, cost
        graph = as_computed(graph, plan.workload.numbers)
        stages = slice_stages(graph, plan)
        all_buckets = exchanged_buckets(plan, graph, fold)
        held: list[list[Bucket]] = [[] for _ in stages]
        for item in all_buckets:
            for stage in item.stages:
                held[stage].append(item)
        self._algorithm = _named_algorithm(plan)
        self._known_axes, self._part_axes = _axes_of_parts(plan, graph, fold)
        self._device_of = fold.ranks if fold else tuple(range(program.num_ranks))
        self._members = fold.members() if fold else tuple((rank,) for rank in range(program.num_ranks))
        self._collected: dict[int, tuple[int, ...]] = {}
        devices = [cost.cluster.device_kind(rank) for rank in self._device_of]
        factors = [cost.host_factor(rank) for rank in self._device_of]
        machines = {(kind.name, factor): kind for kind, factor in zip(devices, factors, strict=True)}
        self._kinds = kinds = list(machines.values())
        numbers = {machine: number for number, machine in enumerate(machines)}
        self._kind_of_rank = np.array(
            [numbers[kind.name, factor] for kind, factor in zip(devices, factors, strict=True)], np.int64
        )
        whole = fold.whole if fold else plan
        shards = [find_shards(whole, stage.index, cost.cluster) for stage in stages]
        pieces = host_pieces(graph, plan, all_buckets) if isinstance(plan, Plan) and steps_on_host(plan) else ()
        self._costs: list[list[StageCosts]] = [
            [stage_costs(graph, plan, stage, tuple(buckets), kind, cost, shared, own) for kind in kinds]
            for stage, buckets, shared, own in zip(
                stages,
                held,
                shards,
                [tuple(piece for piece in pieces if piece.stage == stage.index) for stage in stages],
                strict=True,
            )
        ]
        # Time factor of the asynchronous host of each kind of device; 0 where there is no such host.
        self._factors = [
            factor if costs.ops.issue else 0.0 for (_, factor), costs in zip(machines, self._costs[0], strict=True)
        ]
        self.has_hosts = any(self._factors)
        self._bytes: list[list[StageBytes]] = [
            [stage_bytes(graph, plan, stage, tuple(buckets), kind, cost, shared) for kind in kinds]
            for stage, buckets, shared in zip(stages, held, shards, strict=True)
        ]
        self._copies = EstimatedCopies(graph, plan, stages, kinds, [shared.ranks for shared in shards], cost)
        self._plan, self._graph, self._stages = plan, graph, stages
        self._served_bytes = served_bytes(program)
        self._hosts = HostCosts(cost, whole.num_ranks)
        self._placed = PlacedRanks(plan, graph, stages) if isinstance(plan, Placement) else None
        self.routes = Routes(cost.cluster)
        # Per class: duration, host time, waits for collectives and copies in ps, bytes taken and freed, `IssueCosts`.
        self.classes: list[tuple[int, int, int, int, Bytes, Bytes, tuple[int, int, bool]]] = []
        self._parts: dict[tuple[int, ...], tuple[SpanParts, IssuedParts]] = {}

    def resident_bytes(self, rank: int, order: NDArray[np.int64]) -> Bytes:
        """Return the bytes that a rank holds all the time; ``order`` as in `compute_orders`."""
        kind = int(self._kind_of_rank[rank])
        trains = self._plan.workload.kind == "training"
        libraries = library_workspaces(backend_of(self._kinds[kind]), trains=trains)
        total = by_part({BUCKETS: self._served_bytes[rank], BUFFERS: sum(libraries)})
        for index in self._plan.stages_of(rank):
            stage, own = self._stages[index], self._bytes[index][kind]
            total += own.resident + by_part(
                {
                    RECEIVED: receive_buffer_bytes(self._graph, self._plan, stage, order),
                    SENT: sent_gradient_bytes(self._graph, self._plan, stage, order, own.microbatch_bytes),
                }
            )
        return total - self._placed.shared_bytes(rank) if self._placed else total

    def estimate_section(self, section: Section) -> SectionCosts:
        """Return classes, routes and mark offsets of one section."""
        kind = np.repeat(self._kind_of_rank[rank_of_streams(self._program)], np.diff(section.stream_offsets))
        place = place_of_backward(section)
        if self.has_hosts and isinstance(self._plan, Plan) and self._plan.scales_loss:
            place[first_updates(section.stream_offsets, section.opcode)] = FIRST
        is_compute = _IS_COMPUTE[section.opcode]
        compute, transfers = np.flatnonzero(is_compute), np.flatnonzero(~is_compute)
        _check_groups(self._program, section, transfers)
        cost_class = np.empty(section.num_instructions, np.int32)
        route = np.full(section.num_instructions, -1, np.int32)
        computing = (section.stage, kind, place, section.opcode)
        cost_class[compute] = _per_distinct([column[compute] for column in computing], self._computation)[0]
        adding = np.where(section.opcode == Opcode.SUM, kind, -1)
        moved = self._copies.moved_bytes(section, kind)
        moving: list[NDArray[np.integer]] = [section.group, section.opcode, moved, adding]
        moving += [self._axes_of(section)] if len(self._part_axes) else []
        cost_class[transfers], route[transfers] = _per_distinct(
            [column[transfers] for column in moving], self._transfer
        )
        raising = section.mark_instruction
        offsets, earliest = _per_distinct([*(column[raising] for column in computing), section.mark_index], self._mark)
        return SectionCosts(
            cost_class=cost_class,
            route=route,
            mark_offset_ps=offsets,
            mark_earliest_ps=earliest if self.has_hosts else None,
        )

    def _computation(self, stage: int, kind: int, place: int, opcode: int) -> tuple[int, int]:
        costs, in_use = self._costs[stage][kind], self._bytes[stage][kind]
        placed, step = self._placed, costs.issue or StepIssue(0.0, 0.0)
        match INSTRUCTIONS[Opcode(opcode)].kind:
            case "forward":
                in_forward = placed.keep_handed_on(stage, in_use.forward) if placed else in_use.forward
                added = self._add(costs.forward_s, 0.0, in_forward, costs.exchanged_s[0], costs.copied_s[0])
            case "backward" if opcode == Opcode.BACKWARD_INPUT:
                exchanged_s = costs.exchanged_s[1] - costs.exchanged_s[2]
                added = self._add(costs.inputs_s, 0.0, in_use.inputs, exchanged_s)
            case "backward":
                is_whole = opcode == Opcode.BACKWARD
                part = costs.backward if is_whole else costs.weights
                seconds = part.seconds if place & FIRST else part.later_s
                bytes_in_use = (in_use.backwards if is_whole else in_use.weights)[place & FIRST]
                exchanged_s = costs.exchanged_s[1 if is_whole else 2]
                if place & LAST:
                    seconds += costs.last_s
                    exchanged_s += costs.last_s
                added = self._add(seconds, 0.0, bytes_in_use, exchanged_s, costs.copied_s[1])
            case "stash" if opcode == Opcode.STASH:
                return self._add_pass(costs.stash_s, (in_use.stash, by_part({})), step.copy_s, kind), -1
            case "stash":
                return self._add(0.0, 0.0, (by_part({}), in_use.stash)), -1
            case "update" if opcode == Opcode.MERGE:
                return self._add_pass(costs.merge_s, (by_part({}), by_part({})), 2 * step.copy_s, kind), -1
            case "update":
                seconds, host_s, takes = costs.optimizer_s, step.optimizer_s, in_use.optimizer
                if placed is not None:
                    seconds, host_s, stages = placed.optimizer_step(stage, self._cost)
                    taken, freed = zip(*(self._bytes[index][kind].optimizer for index in stages), strict=True)
                    takes = np.sum(taken, axis=0), np.sum(freed, axis=0)
                return self._add_pass(seconds, takes, host_s, kind, is_awaited=bool(place & FIRST)), -1
            case "message" | "collective" | "server" | "load" | "copy" | "host" | "drives" as other:
                raise ProgramError(
                    f"An instruction of kind {other!r} cannot be estimated as a computation. This is a defect; please "
                    "report it."
                )
            case missing:
                assert_never(missing)
        if self._factors[kind]:
            parts = list_parts(costs.ops, Opcode(opcode), place)
            issued = issue_parts(parts, self.classes[added][0], self._factors[kind])
            self._parts[stage, kind, place, opcode] = parts, issued
            row = int(issued.issued_ps[-1]), int(issued.earliest_ps[-1]), False
            self.classes[added] = (*self.classes[added][:-1], row)
        return added, -1

    def _add_pass(
        self, seconds: float, in_use: tuple[Bytes, Bytes], host_s: float, kind: int, *, is_awaited: bool = False
    ) -> int:
        """Add a pass over all weights, which starts on the device when its host has issued it."""
        added = self._add(seconds, 0.0, in_use)
        if self._factors[kind]:
            host_ps = to_picoseconds(host_s * self._factors[kind])
            row = host_ps, host_ps + self.classes[added][0], is_awaited
            self.classes[added] = (*self.classes[added][:-1], row)
        return added

    def _axes_of(self, section: Section) -> NDArray[np.int64]:
        """Return the index of the axes over which each instruction's part is summed; -1 for other instructions."""
        summed = np.isin(section.opcode, COLLECTIVES) & (section.peer < len(self._part_axes))
        return np.where(summed, np.append(self._part_axes, -1)[np.where(summed, section.peer, -1)], -1)

    def _transfer(self, group: int, opcode: int, num_bytes: int, kind: int, axes: int = -1) -> tuple[int, int]:
        in_use = transfer_bytes(opcode, num_bytes)
        match INSTRUCTIONS[Opcode(opcode)].kind:
            case "message" if opcode in RECEIVES:
                return self._add(0.0, 0.0, in_use), -1
            case "server" if opcode == Opcode.SUM:
                # Each rank's part but the first is read with the sum so far, which is written.
                accesses = _ACCESSES_PER_SUM * (len(self._program.groups[group]) - 1)
                return self._add(accesses * num_bytes / self._kinds[kind].memory_bandwidth_bytes_per_s, 0.0, in_use), -1
            case "message" | "server":
                source, target = ranks = tuple(self._device_of[rank] for rank in self._program.groups[group])
                seconds = self._cost.collective_seconds("send", ranks, num_bytes)
                host_s = self._cost.collective_host_seconds("send", ranks, num_bytes)
                return self._add(max(seconds, SHORTEST_S), host_s, in_use), self.routes.send(source, target)
            case "collective":
                return self._collective(group, Opcode(opcode), num_bytes, in_use, self._known_axes[axes])
            case "load":
                return self._add(_load_seconds(self._plan), 0.0, in_use), -1
            case "copy":
                return self._add(self._cost.host_transfer_seconds(self._host_of(group), num_bytes), 0.0, in_use), -1
            case "host":
                cost = self._hosts.estimate_step(self._host_of(group), num_bytes, self._plan.workload.optimizer)
            case "drives":
                is_read = opcode == Opcode.READ_STATES
                cost = (self._hosts.estimate_read if is_read else self._hosts.estimate_write)(
                    self._host_of(group), num_bytes
                )
            case "forward" | "backward" | "update" | "stash" as other:
                raise ProgramError(
                    f"An instruction of kind {other!r} cannot be estimated as a transfer. This is a defect; please "
                    "report it."
                )
            case missing:
                assert_never(missing)
        return self._add(cost.at(self._cost.end), 0.0, in_use), -1

    def _collective(
        self, group: int, opcode: Opcode, num_bytes: int, in_use: tuple[Bytes, Bytes], axes: Axes
    ) -> tuple[int, int]:
        if not num_bytes:
            # No data: its ranks only synchronise.
            return self._add(SHORTEST_S, 0.0, in_use), -1
        ranks, op = self._all_members(group), _COLLECTIVE_OPS[opcode]
        host_s = self._cost.collective_host_seconds(op, ranks, num_bytes, axes=axes)
        way = self._algorithm if opcode == Opcode.ALL_REDUCE else None
        seconds = self._cost.collective_seconds(op, ranks, num_bytes, algorithm=way, axes=axes)
        route = self.routes.tree(ranks) if way == "tree" else self.routes.ring(ranks)
        return self._add(max(seconds, SHORTEST_S), host_s, in_use), route

    def _host_of(self, group: int) -> int:
        """Return the device whose host does the work of a group."""
        return self._device_of[self._program.groups[group][0]]

    def _all_members(self, group: int) -> tuple[int, ...]:
        """Return the devices that take part in the collectives of a group, ascending."""
        if group not in self._collected:
            ranks = self._program.groups[group]
            self._collected[group] = tuple(sorted(member for rank in ranks for member in self._members[rank]))
        return self._collected[group]

    def _mark(self, stage: int, kind: int, place: int, opcode: int, bucket: int) -> tuple[int, int]:
        costs = self._costs[stage][kind]
        if self._factors[kind]:
            parts, issued = self._parts[stage, kind, place, opcode]
            at = parts.filled[bucket] if bucket >= 0 else self._copies.find_part(parts, stage, kind, opcode, bucket)
            return int(issued.done_ps[at]), int(issued.earliest_ps[at])
        if bucket < 0:
            parts = list_parts(costs.ops, Opcode(opcode), place)
            return to_picoseconds(parts.done_s[self._copies.find_part(parts, stage, kind, opcode, bucket)]), 0
        part = costs.backward if opcode == Opcode.BACKWARD else costs.weights
        ready, whole = (part.ready_s, part.seconds) if place & FIRST else (part.later_ready_s, part.later_s)
        return min(to_picoseconds(ready[bucket]), to_picoseconds(whole)), 0

    def _add(self, seconds: float, host_s: float, in_use: tuple[Bytes, Bytes], *inside_s: float) -> int:
        exchanged_s, copied_s = (*inside_s, 0.0, 0.0)[:2]
        row = to_picoseconds(seconds), to_picoseconds(host_s), to_picoseconds(exchanged_s), to_picoseconds(copied_s)
        self.classes.append((*row, *in_use, (0, 0, False)))
        return len(self.classes) - 1


def _axes_of_parts(plan: Plan | Placement, graph: Graph, fold: Fold | None) -> tuple[list[Axes], NDArray[np.int64]]:
    """Return the axes over which teams sum gradients, and their index for each part of an exchange."""
    if isinstance(plan, Placement) or not graph.collectives:
        return [REPLICATING], np.zeros(0, np.int64)
    buckets = folded_buckets(fold, graph) if fold else gradient_buckets(graph, plan)
    known = list(dict.fromkeys(bucket.axes for bucket in buckets))
    numbers = np.array([known.index(bucket.axes) for bucket in buckets], np.int64)
    return [*known, REPLICATING], numbers[cut_parts(buckets, plan.exchange).bucket]


def _named_algorithm(plan: Plan | Placement) -> Algorithm | None:
    """Return the algorithm of all-reduces if the plan names one; each of a hierarchy's three uses the fastest."""
    named = plan.exchange.algorithm if isinstance(plan, Plan) else "auto"
    return named if named in ("ring", "tree") else None


def _load_seconds(plan: Plan | Placement) -> float:
    loader = plan.workload.loader
    return loader.seconds_per_sample * plan.microbatch_size if loader else 0.0


def _per_distinct(
    columns: Sequence[NDArray[np.integer]], cost: Callable[..., tuple[int, int]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Call ``cost`` once for all equal rows; return its two numbers as columns."""
    keys = np.stack(columns).astype(np.int64, copy=False)
    if not keys.shape[1]:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    number, first = find_distinct(keys)
    order = np.lexsort(keys[:, first])
    table = np.empty((2, len(first)), np.int64)
    table[:, order] = np.array([cost(*keys[:, row].tolist()) for row in first[order]], np.int64).T
    return table[0].take(number), table[1].take(number)


def place_of_backward(section: Section) -> NDArray[np.int64]:
    """Return, by instruction, whether it is the `FIRST` or `LAST` backward of its stage before an update (`alike`).

    Other instructions get 0. A backward in two parts is marked at its part for weights. A stage may be updated once or
    several times per step.
    """
    num_stages = int(section.stage.max(initial=0)) + 1
    return mark_backwards(section.stream_offsets, section.opcode, section.stage, num_stages)


def _check_groups(program: Program, section: Section, transfers: NDArray[np.int64]) -> None:
    """Raise ProgramError unless every transfer names the ranks that take part."""
    for i in transfers[section.group[transfers] < 0][:1].tolist():
        raise ProgramError(
            f"{section.instruction(i)} has no group of ranks, so it has no cost; expected `group` = (source, target) "
            "for a transfer and all members for a collective. Give `group` when the instruction is appended."
        )
    pairs = np.zeros(len(program.groups), np.bool_)
    others = (*COLLECTIVES, *OFFLOADING, Opcode.SUM, Opcode.LOAD)
    pairs[section.group[transfers[~np.isin(section.opcode[transfers], others)]]] = True
    for group in np.flatnonzero(pairs).tolist():
        if len(program.groups[group]) != 2:
            raise ProgramError(
                f"A send or receive has the group {program.groups[group]}; expected the pair (source, target). Give "
                "that pair as `group` when the instruction is appended."
            )
