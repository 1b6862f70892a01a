"""Prices of a plan's program from a cost model: which class, route and mark offset each instruction gets.

Instructions of equal cost are priced once: computations by (stage, device kind, first or last backward of its rank,
opcode), transfers and all-reduces by (group, opcode, bytes), marks by the computation and the bucket. Only these
distinct ones are touched one by one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import CostModel
from meshwright.cost.memory import FIRST, LAST
from meshwright.program import Bucket, Fold, folded_buckets, gradient_buckets
from meshwright.simulator.buffers import compute_order, receive_buffer_bytes, sent_gradient_bytes
from meshwright.simulator.matching import RECEIVES, rank_of_streams, stream_of_instructions
from meshwright.simulator.placed import PlacedRanks
from meshwright.simulator.prices import Prices, SectionPrices
from meshwright.simulator.routes import Routes
from meshwright.simulator.stage_costs import (
    Bytes,
    StageBytes,
    StageCosts,
    by_part,
    stage_bytes,
    stage_costs,
    transfer_bytes,
)
from meshwright.spec import (
    Graph,
    Opcode,
    Placement,
    Plan,
    Program,
    ProgramError,
    Section,
    slice_stages,
    to_picoseconds,
)
from meshwright.spec.instructions import COMPUTATIONS, STASHING
from meshwright.spec.memory import MEMORY_PARTS, RECEIVED, SENT

_COMPUTE = (*COMPUTATIONS, Opcode.OPTIMIZER_STEP, *STASHING)
# The engine needs time to pass while a link is held.
SHORTEST_S = 1e-12


def price_program(
    program: Program, plan: Plan | Placement, graph: Graph, cost: CostModel, *, fold: Fold | None = None
) -> Prices:
    """Price every instruction of a plan's program on the cost model's cluster; rank r is device r of the cluster.

    With a ``fold``, program and plan are those of ``fold.plan``, and rank r is on the device ``fold.ranks[r]``; a sum
    of gradients takes what it takes all members of the whole plan, on all their links.
    """
    pricer = _Pricer(program, plan, graph, cost, fold)
    sections = {name: pricer.price_section(section) for name, section in program.sections()}
    durations, host, takes, frees = zip(*pricer.classes, strict=True)
    route_offsets, route_links, num_links = pricer.routes.table()
    return Prices(
        duration_ps=np.array(durations, np.int64),
        host_ps=np.array(host, np.int64),
        allocate_bytes=np.stack(takes),
        free_bytes=np.stack(frees),
        memory_parts=MEMORY_PARTS,
        resident_bytes=np.stack([pricer.resident_bytes(rank) for rank in range(program.num_ranks)]),
        route_offsets=route_offsets,
        route_links=route_links,
        num_links=num_links,
        link_names=pricer.routes.names(),
        prologue=sections["prologue"],
        body=sections["body"],
        epilogue=sections["epilogue"],
    )


def exchanged_buckets(plan: Plan | Placement, graph: Graph, fold: Fold | None) -> tuple[Bucket, ...]:
    """The buckets that a plan sums; none of a placement, which has no replicas."""
    if isinstance(plan, Placement):
        return ()
    return folded_buckets(fold, graph) if fold else gradient_buckets(graph, plan)


class _Pricer:
    """Knows what the stages cost; collects cost classes and routes while it walks through the sections."""

    def __init__(
        self, program: Program, plan: Plan | Placement, graph: Graph, cost: CostModel, fold: Fold | None
    ) -> None:
        self._program, self._cost = program, cost
        stages = slice_stages(graph, plan)
        all_buckets = exchanged_buckets(plan, graph, fold)
        held: list[list[Bucket]] = [[] for _ in stages]
        for item in all_buckets:
            for stage in item.stages:
                held[stage].append(item)
        self._device_of = fold.ranks if fold else tuple(range(program.num_ranks))
        self._members = fold.members() if fold else tuple((rank,) for rank in range(program.num_ranks))
        self._collected: dict[int, tuple[int, ...]] = {}
        devices = [cost.cluster.device_kind(rank) for rank in self._device_of]
        kinds = list({kind.name: kind for kind in devices}.values())
        names = [kind.name for kind in kinds]
        self._kind_of_rank = np.array([names.index(kind.name) for kind in devices], np.int64)
        self._costs: list[list[StageCosts]] = [
            [stage_costs(graph, plan, stage, tuple(buckets), kind, cost) for kind in kinds]
            for stage, buckets in zip(stages, held, strict=True)
        ]
        self._bytes: list[list[StageBytes]] = [
            [stage_bytes(graph, plan, stage, tuple(buckets), kind, cost) for kind in kinds]
            for stage, buckets in zip(stages, held, strict=True)
        ]
        self._plan, self._graph, self._stages = plan, graph, stages
        self._placed = PlacedRanks(plan, graph, stages) if isinstance(plan, Placement) else None
        self.routes = Routes(cost.cluster)
        # Per class: duration and host time in ps, bytes taken and freed.
        self.classes: list[tuple[int, int, Bytes, Bytes]] = []

    def resident_bytes(self, rank: int) -> Bytes:
        """What a rank holds all the time."""
        kind, order = int(self._kind_of_rank[rank]), compute_order(self._program, rank)
        total = by_part({})
        for index in self._plan.stages_of(rank):
            stage, own = self._stages[index], self._bytes[index][kind]
            total += own.resident + by_part(
                {
                    RECEIVED: receive_buffer_bytes(self._graph, self._plan, stage, order),
                    SENT: sent_gradient_bytes(self._graph, self._plan, stage, order, own.microbatch_bytes),
                }
            )
        return total - self._placed.shared_bytes(rank) if self._placed else total

    def price_section(self, section: Section) -> SectionPrices:
        """Classes, routes and mark offsets of one section."""
        ranks = rank_of_streams(self._program)[stream_of_instructions(section)]
        where = np.stack([section.stage, self._kind_of_rank[ranks], place_of_backward(section)]).astype(np.int64)
        is_compute = np.isin(section.opcode, _COMPUTE)
        compute, transfers = np.flatnonzero(is_compute), np.flatnonzero(~is_compute)
        _check_groups(self._program, section, transfers)
        columns = (section.group, section.opcode, section.num_bytes)
        table = np.empty((2, section.num_instructions), np.int32)
        table[:, compute] = _per_distinct(np.stack([*where[:, compute], section.opcode[compute]]), self._computation)
        table[:, transfers] = _per_distinct(np.stack([column[transfers] for column in columns]), self._transfer)
        raising = section.mark_instruction
        marks = np.stack([*where[:, raising], section.opcode[raising], section.mark_index])
        offsets = _per_distinct(marks, self._mark)
        return SectionPrices(cost_class=table[0], route=table[1], mark_offset_ps=offsets[0])

    def _computation(self, stage: int, kind: int, place: int, opcode: int) -> tuple[int, int]:
        costs, in_use = self._costs[stage][kind], self._bytes[stage][kind]
        placed = self._placed
        match Opcode(opcode):
            case Opcode.FORWARD:
                in_forward = placed.keep_handed_on(stage, in_use.forward) if placed else in_use.forward
                return self._add(costs.forward_s, 0.0, in_forward), -1
            case Opcode.BACKWARD_INPUT:
                return self._add(costs.inputs_s, 0.0, in_use.inputs), -1
            case Opcode.BACKWARD | Opcode.BACKWARD_WEIGHT:
                is_whole = opcode == Opcode.BACKWARD
                part = costs.backward if is_whole else costs.weights
                seconds = part.seconds if place & FIRST else part.later_s
                bytes_in_use = (in_use.backwards if is_whole else in_use.weights)[place]
                return self._add(seconds + costs.fill_s * bool(place & LAST), 0.0, bytes_in_use), -1
            case Opcode.STASH:
                return self._add(costs.stash_s, 0.0, (in_use.stash, by_part({}))), -1
            case Opcode.DROP:
                return self._add(0.0, 0.0, (by_part({}), in_use.stash)), -1
            case _:
                if placed is None:
                    return self._add(costs.optimizer_s, 0.0, in_use.optimizer), -1
                seconds, stages = placed.optimizer_step(stage, self._cost)
                takes, frees = zip(*(self._bytes[index][kind].optimizer for index in stages), strict=True)
                return self._add(seconds, 0.0, (np.sum(takes, axis=0), np.sum(frees, axis=0))), -1

    def _transfer(self, group: int, opcode: int, num_bytes: int) -> tuple[int, int]:
        in_use = transfer_bytes(opcode, num_bytes)
        if opcode in RECEIVES:
            return self._add(0.0, 0.0, in_use), -1
        if opcode == Opcode.ALL_REDUCE:
            ranks = self._all_members(group)
            seconds = self._cost.collective_seconds("all_reduce", ranks, num_bytes)
            host_s = self._cost.collective_host_seconds("all_reduce", ranks, num_bytes)
            return self._add(max(seconds, SHORTEST_S), host_s, in_use), self.routes.ring(ranks)
        ranks = tuple(self._device_of[rank] for rank in self._program.groups[group])
        source, target = ranks
        seconds = self._cost.collective_seconds("send", ranks, num_bytes)
        host_s = self._cost.collective_host_seconds("send", ranks, num_bytes)
        return self._add(max(seconds, SHORTEST_S), host_s, in_use), self.routes.send(source, target)

    def _all_members(self, group: int) -> tuple[int, ...]:
        """The devices that take part in the collectives of a group, ascending."""
        if group not in self._collected:
            ranks = self._program.groups[group]
            self._collected[group] = tuple(sorted(member for rank in ranks for member in self._members[rank]))
        return self._collected[group]

    def _mark(self, stage: int, kind: int, place: int, opcode: int, bucket: int) -> tuple[int, int]:
        costs = self._costs[stage][kind]
        part = costs.backward if opcode == Opcode.BACKWARD else costs.weights
        ready, whole = (part.ready_s, part.seconds) if place & FIRST else (part.later_ready_s, part.later_s)
        return min(to_picoseconds(ready[bucket]), to_picoseconds(whole + costs.fill_s)), 0

    def _add(self, seconds: float, host_s: float, in_use: tuple[Bytes, Bytes]) -> int:
        self.classes.append((to_picoseconds(seconds), to_picoseconds(host_s), *in_use))
        return len(self.classes) - 1


def _per_distinct(keys: NDArray[np.int64], price: Callable[..., tuple[int, int]]) -> NDArray[np.int64]:
    """Call ``price`` once per distinct column of ``keys``; its two numbers for every column, shape (2, n)."""
    count = keys.shape[1]
    if not count:
        return np.zeros((2, 0), np.int64)
    order = np.lexsort(keys)
    is_new = np.concatenate([[True], (np.diff(keys[:, order]) != 0).any(axis=0)])
    priced = np.array([price(*keys[:, column].tolist()) for column in order[is_new]], np.int64)
    table = np.empty((2, count), np.int64)
    table[:, order] = priced[np.cumsum(is_new) - 1].T
    return table


def place_of_backward(section: Section) -> NDArray[np.int64]:
    """FIRST and LAST for the first and last backward before each update of each stage, 0 for every other instruction.

    Of a backward in two parts the one for weights counts. A stage is updated after its backwards, once a step or often.
    """
    backwards = np.flatnonzero(np.isin(section.opcode, (Opcode.BACKWARD, Opcode.BACKWARD_WEIGHT)))
    # A rank with several stages updates them together, behind all of their backwards.
    updates = np.cumsum(section.opcode == Opcode.OPTIMIZER_STEP)[backwards]
    num_stages, num_updates = int(section.stage.max(initial=0)) + 1, int(updates.max(initial=0)) + 1
    streams = stream_of_instructions(section)[backwards].astype(np.int64)
    keys = (streams * num_stages + section.stage[backwards]) * num_updates + updates
    _, first = np.unique(keys, return_index=True)
    _, last_reversed = np.unique(keys[::-1], return_index=True)
    place = np.zeros(section.num_instructions, np.int64)
    place[backwards[first]] |= FIRST
    place[backwards[::-1][last_reversed]] |= LAST
    return place


def _check_groups(program: Program, section: Section, transfers: NDArray[np.int64]) -> None:
    """Every transfer names the ranks that take part."""
    for i in transfers[section.group[transfers] < 0][:1].tolist():
        raise ProgramError(
            f"{section.instruction(i)} names no group of ranks, so it cannot be priced; expected (source, target) for "
            "a transfer and all members for an all-reduce. Give the group when the instruction is appended."
        )
    pairs = section.group[transfers[section.opcode[transfers] != Opcode.ALL_REDUCE]]
    for group in np.unique(pairs).tolist():
        if len(program.groups[group]) != 2:
            raise ProgramError(
                f"A send or receive names the ranks {program.groups[group]}; expected the pair (source, target). "
                "Give that pair when the instruction is appended."
            )
