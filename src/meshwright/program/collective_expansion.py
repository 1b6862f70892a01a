"""Expand instructions of a program into the collectives that run inside them (`Expansion`), each with its bytes.

A forward, a backward or an update is one instruction, but collectives run inside it: those of a team (tensor, context
or expert parallelism), described by the local graph's `Graph.collectives`, and those of replicas that shard parameters
(`sharding.zero`). The simulator counts them as a part of the instruction's time; here they are listed one by one, in
the order in which they are issued.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from meshwright.program.buckets import cut_pieces, gradient_buckets
from meshwright.program.sharding.zero import find_units, padded_bytes
from meshwright.spec import (
    Backward,
    BackwardInput,
    Forward,
    Graph,
    Instruction,
    OptimizerStep,
    Plan,
    StageSlice,
    computed_again,
)
from meshwright.spec.exchange import Axis, Phase

_ROOT = -1


class SizedCollective(NamedTuple):
    """One collective: its kind, the ranks that take part, and the bytes of the full tensor.

    ``axis`` is a mesh axis of a team, "replicas" for the replicas of a stage that shard states among themselves, or
    "across" for the ranks that hold the same shard in each such group of replicas.
    """

    kind: str
    axis: Axis | Literal["replicas", "across"]
    num_bytes: int


class _Event(NamedTuple):
    """A collective with its sort key: ``place`` in its pass, then ``turn``; equal keys stay in the order listed."""

    place: int
    turn: int
    item: SizedCollective


# The order at one place: gather parameters, recompute what is missing, run the op itself, scatter gradients, and sum
# them across groups.
_GATHER, _AGAIN, _OWN, _SCATTER, _ACROSS = range(5)


class Expansion:
    """Lists the collectives inside the instructions of one rank; call `expand` in the order of issue.

    ``plan`` and ``graph`` are lowered (`plan_lowering`), ``stages`` are those of the rank. The order matters, because
    parameters that were gathered for one microbatch also serve the others in flight, until a backward frees them.
    """

    def __init__(self, plan: Plan, graph: Graph, stages: Sequence[StageSlice], rank: int) -> None:
        self._plan, self._graph = plan, graph
        self._stages = {stage.index: stage for stage in stages}
        buckets = gradient_buckets(graph, plan)
        kept = {i for bucket in buckets for i in bucket.parameters}
        # Elements of parameters that the rank updates, if each rank updates its shard of every bucket.
        self._pieces: dict[int, int] = {}
        for bucket in buckets if plan.exchange.shard_optimizer else ():
            if rank in bucket.ranks:
                sizes = [graph.tensors[i].num_elements(0) for i in bucket.parameters]
                sharing = plan.exchange.shard_group_of(rank, bucket.ranks)
                own = cut_pieces(sizes, sharing.index(rank), len(sharing))
                self._pieces |= {i: len(piece) for i, piece in zip(bucket.parameters, own, strict=True)}
        shares_out = plan.exchange.zero >= 2
        self._units = {
            stage.index: find_units(graph, stage, kept)
            for stage in stages
            if shares_out and len(plan.stages[stage.index].ranks) > 1
        }
        self._gathered: set[tuple[int, int]] = set()
        # Number of replicas that shard the states of a stage, and of such groups.
        shared = {index: plan.exchange.shard_groups(plan.stages[index].ranks) for index in self._units}
        self._sharing = {index: (len(groups[0]), len(groups)) for index, groups in shared.items()}
        # The rank's backwards per step, and those done: groups sum in the last one.
        self._num_backwards = {
            index: plan.stages[index].counts(plan.num_microbatches)[plan.stages[index].ranks.index(rank)]
            for index in self._units
        }
        self._done = dict.fromkeys(self._units, 0)

    def expand(self, instruction: Instruction) -> list[SizedCollective]:
        """Return the collectives inside a forward, backward or optimizer step, in order; [] for other instructions."""
        match instruction:
            case Forward(stage=stage):
                return _in_order([*self._inside(stage, "forward"), *self._gathers(stage)])
            case Backward(stage=stage) | BackwardInput(stage=stage):
                return _in_order([*self._again(stage), *self._inside(stage, "backward"), *self._scatters(stage)])
            case OptimizerStep(stage=stage):
                held = self._stages[stage].parameters
                summed = [item for item in self._graph.collectives if item.phase == "step" and item.tensor in held]
                found = [
                    SizedCollective(item.kind, item.axis, self._gradient_bytes(item.tensor, stage)) for item in summed
                ]
                return [item for item in found if item.num_bytes]
            case _:
                return []

    def _inside(self, stage: int, phase: Phase) -> list[_Event]:
        """Return the collectives of the team in a pass."""
        ops, size = set(self._stages[stage].ops), self._plan.microbatch_size
        sign = 1 if phase == "forward" else -1
        return [
            _Event(sign * item.at, _OWN, SizedCollective(item.kind, item.axis, item.num_bytes(self._graph, size)))
            for item in self._graph.collectives
            if item.phase == phase and item.at in ops
            for _ in range(item.count)
        ]

    def _again(self, stage: int) -> list[_Event]:
        """Return the collectives of recomputed ranges, when the backward of an op first reads a saved value."""
        graph, ops, size = self._graph, set(self._stages[stage].ops), self._plan.microbatch_size
        found = []
        for start, stop in graph.recompute:
            asking = max((op for op in range(start, stop) if graph.ops[op].saved), default=start)
            again = ops.intersection(computed_again(graph, start, stop))
            found += [
                _Event(-asking, _AGAIN, SizedCollective(item.kind, item.axis, item.num_bytes(graph, size)))
                for item in graph.collectives
                if item.phase == "forward" and item.at in again
                for _ in range(item.count)
            ]
        return found

    def _gathers(self, stage: int) -> list[_Event]:
        """Return the gathers of parameters in a forward, those of the root unit first."""
        if stage not in self._units:
            return []
        ops, (root, units) = self._stages[stage].ops, self._units[stage]
        found = []
        for number, unit in ((_ROOT, root), *enumerate(units)):
            if unit.parameters and (stage, number) not in self._gathered:
                place = -1 if number == _ROOT else ops[unit.first]
                found.append(_Event(place, _GATHER, self._flat("all_gather", stage, unit.parameters)))
                if number == _ROOT or self._plan.exchange.zero == 2:
                    self._gathered.add((stage, number))
        return found

    def _scatters(self, stage: int) -> list[_Event]:
        """Return the gathers of a backward, with prefetch of the unit before each, and the scatters of gradients."""
        if stage not in self._units:
            return []
        ops, (root, units) = self._stages[stage].ops, self._units[stage]
        order = [(number, unit) for number, unit in reversed([*enumerate(units)]) if unit.parameters]
        # FSDP enters a unit in backward when a gradient first reaches one of its values: for the stage's last value,
        # the unit that made it comes before the root.
        met = [*order]
        met.insert(int(bool(order) and order[0][1].last == root.last), (_ROOT, root))
        found, there = [], {number for held, number in self._gathered if held == stage}
        self._done[stage] += 1
        is_last = self._done[stage] % self._num_backwards[stage] == 0
        for number, unit in met:
            following = 0 if number == _ROOT else order.index((number, unit)) + 1
            ahead = order[following : following + 1] if self._plan.exchange.zero == 3 else []
            for other, held in [(number, unit), *ahead]:
                if other not in there and held.parameters:
                    there.add(other)
                    found.append(_Event(-ops[unit.last], _GATHER, self._flat("all_gather", stage, held.parameters)))
            trained = [i for i in unit.parameters if self._graph.tensors[i].requires_grad]
            if trained:
                first = -1 if number == _ROOT else ops[unit.first]
                scattered = self._flat("reduce_scatter", stage, trained)
                found.append(_Event(-first, _SCATTER, scattered))
                if is_last and self._sharing[stage][1] > 1:
                    own_bytes = scattered.num_bytes // self._sharing[stage][0]
                    found.append(_Event(-first, _ACROSS, SizedCollective("all_reduce", "across", own_bytes)))
        self._gathered -= {(held, number) for held, number in self._gathered if held == stage}
        return found

    def _flat(self, kind: str, stage: int, parameters: Sequence[int]) -> SizedCollective:
        count = self._sharing[stage][0]
        numbers = self._plan.workload.numbers
        width = numbers.gradient_bytes if kind == "reduce_scatter" else numbers.value_bytes
        return SizedCollective(kind, "replicas", padded_bytes(self._graph, parameters, count, width))

    def _gradient_bytes(self, parameter: int, stage: int) -> int:
        """Return the bytes of a gradient summed before an update: of the part that this rank updates."""
        facts = self._graph.tensors[parameter]
        numbers = self._plan.workload.numbers
        if parameter in self._pieces:
            return self._pieces[parameter] * numbers.gradient_bytes
        if stage in self._units:
            # The shard of a sum that a rank keeps has the type of its shard of the weights.
            kept, count = numbers.master_bytes or numbers.gradient_bytes, self._sharing[stage][0]
            return padded_bytes(self._graph, (parameter,), count, kept) // count
        return self._plan.workload.gradient_bytes(facts)


def _in_order(events: list[_Event]) -> list[SizedCollective]:
    return [event.item for event in sorted(events, key=lambda event: event[:2])]
