"""Update what stages pass to each other when one of them moves to another rank: `placed_slices`, incrementally.

A move does not change which stages need a tensor, with one exception: some ops are computed wherever they are needed,
by the first stage of each rank that needs them, which then needs their inputs. So only the old and the new rank are
examined, and there only the tensors that the stage reads or makes, and those that these are computed
from. Gradients are followed from the channels that changed towards the inputs, as far as they change.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable

from meshwright.spec.graph import Graph
from meshwright.spec.placed_slices import flowing_ops
from meshwright.spec.placement import Placement, check_placement
from meshwright.spec.slices import Channel, StageSlice

Pair = tuple[int, int]

_GIVEN = ("parameter", "buffer", "constant", "input")


class MovableStages:
    """The slices of a placement (`slice_of`), whose stages can `move`. Raises PlanError if it does not match the graph.

    ``carried``: for each pair of stages (source, target) the tensors that pass, also within a rank; ``gradients``:
    those whose gradients return; ``differentiated``: the stages that have a backward.
    """

    def __init__(self, graph: Graph, placement: Placement) -> None:
        check_placement(placement, graph)
        self._graph = graph
        self.ranks = [stage.rank for stage in placement.stages]
        self.carried: dict[Pair, set[int]] = defaultdict(set)
        self.gradients: dict[Pair, frozenset[int]] = {}
        self.differentiated: set[int] = set()
        self._leaving: dict[int, set[int]] = defaultdict(set)
        self._arriving: dict[int, set[int]] = defaultdict(set)
        self._read_graph(placement)
        # For each rank: the stage that computes each op which is computed wherever it is needed, and the reverse.
        self._first: dict[int, dict[int, int]] = defaultdict(dict)
        self._extra: dict[int, set[int]] = defaultdict(set)
        # The pairs that carry a tensor to stages of a rank.
        self._pairs: dict[Pair, set[Pair]] = {}
        for rank in sorted(set(self.ranks)):
            self._follow(rank, range(len(graph.ops)))
        self._return_gradients(range(len(self.ranks)))

    def move(self, stage: int, rank: int) -> set[int]:
        """Move a stage to another rank; return the stages whose slices may differ."""
        left, self.ranks[stage] = self.ranks[stage], rank
        ops = {self._producer[tensor] for tensor in self._reads[stage]}.union(self._ops[stage])
        changed = {stage}
        for place in (left, rank):
            changed |= self._follow(place, ops)
        return changed | self._return_gradients(changed)

    def slice_of(self, index: int) -> StageSlice:
        """Return what a stage computes, reads and passes on now."""
        tensors, ops = self._graph.tensors, self.ops_of(index)
        outputs = self._outputs[index]
        read = {i for op in ops for i in self._graph.ops[op].inputs}.union(outputs)
        given = {role: tuple(sorted(i for i in read if tensors[i].role == role)) for role in _GIVEN}
        return StageSlice(
            index=index,
            ops=ops,
            parameters=given["parameter"],
            buffers=given["buffer"],
            inputs=given["input"],
            outputs=outputs,
            incoming=tuple(self.channel((source, index)) for source in sorted(self._arriving[index])),
            outgoing=tuple(self.channel((index, target)) for target in sorted(self._leaving[index])),
            draws_random=index in self._random,
            has_backward=index in self.differentiated,
        )

    def channel(self, pair: Pair) -> Channel:
        """Return what passes between two stages."""
        return Channel(
            source=pair[0],
            target=pair[1],
            tensors=tuple(sorted(self.carried[pair])),
            gradients=tuple(sorted(self.gradients.get(pair, ()))),
            carries_rng=pair in self._rng,
        )

    def pairs_of(self, stage: int) -> list[Pair]:
        """Return the channels from and to a stage."""
        arriving = [(source, stage) for source in self._arriving[stage]]
        return arriving + [(stage, target) for target in self._leaving[stage]]

    def ops_of(self, stage: int) -> tuple[int, ...]:
        """Return the ops of a stage, ascending, with those that it computes because it is the first to need them."""
        return tuple(sorted({*self._ops[stage], *self._extra[stage]}))

    def _read_graph(self, placement: Placement) -> None:
        """Record producers and readers of tensors: everything that no move changes."""
        graph = self._graph
        self._ops = [stage.ops for stage in placement.stages]
        self._producer = {tensor: op for op, item in enumerate(graph.ops) for tensor in item.outputs}
        self._stage_of = {op: index for index, ops in enumerate(self._ops) for op in ops}
        outputs: list[list[int]] = [[] for _ in self._ops]
        for tensor in dict.fromkeys(graph.outputs):
            outputs[self._stage_of.get(self._producer.get(tensor, -1), -1)].append(tensor)
        self._outputs = [tuple(tensors) for tensors in outputs]
        self._reads = [
            {i for op in ops for i in graph.ops[op].inputs}.union(made).intersection(self._producer)
            for ops, made in zip(self._ops, outputs, strict=True)
        ]
        self._readers: dict[int, list[int]] = defaultdict(list)
        for index, tensors in enumerate(self._reads):
            for tensor in tensors:
                self._readers[tensor].append(index)
        self._free_readers: dict[int, list[int]] = defaultdict(list)
        for op in (op for op in range(len(graph.ops)) if op not in self._stage_of):
            for tensor in set(graph.ops[op].inputs).intersection(self._producer):
                self._free_readers[tensor].append(op)
        self._random = [index for index, ops in enumerate(self._ops) if any(graph.ops[op].random for op in ops)]
        self._rng = set(itertools.pairwise(self._random))
        for pair in self._rng:
            self._connect(pair)
        self._flowing = flowing_ops(graph) if graph.mode == "training" else set()
        self._loss = graph.outputs[0] if graph.has_loss and graph.tensors[graph.outputs[0]].requires_grad else None

    def _needers(self, rank: int, tensor: int) -> list[int]:
        """Return the stages of a rank that read a tensor."""
        direct = {index for index in self._readers[tensor] if self.ranks[index] == rank}
        first = self._first[rank]
        return sorted(direct.union(first[op] for op in self._free_readers[tensor] if op in first))

    def _follow(self, rank: int, ops: Iterable[int]) -> set[int]:
        """Update how the outputs of these ops reach the stages of a rank; return the stages that changed."""
        changed: set[int] = set()
        # Later ops first, so that the readers of their inputs are known.
        waiting = [-op for op in set(ops)]
        heapq.heapify(waiting)
        done = -1
        while waiting:
            op = -heapq.heappop(waiting)
            if op == done:
                continue
            done = op
            needers = {tensor: self._needers(rank, tensor) for tensor in self._graph.ops[op].outputs}
            maker, is_here = self._stage_of.get(op), True
            if maker is None:
                maker = min((stages[0] for stages in needers.values() if stages), default=None)
                if self._compute(rank, op, maker):
                    changed |= {stage for stage in (maker,) if stage is not None}
                    waiting += [-self._producer[i] for i in self._graph.ops[op].inputs if i in self._producer]
                    heapq.heapify(waiting)
            else:
                is_here = self.ranks[maker] == rank
            for tensor, stages in needers.items():
                source = maker
                pairs: set[Pair] = set()
                if stages and not is_here and maker is not None:
                    pairs.add((maker, stages[0]))
                    source = stages[0]
                if source is not None:
                    pairs.update((source, target) for target in stages if target != source)
                changed |= self._carry(rank, tensor, pairs)
        return changed

    def _compute(self, rank: int, op: int, stage: int | None) -> bool:
        """Assign an op that any stage may compute to a stage of a rank; return whether that changed."""
        before = self._first[rank].get(op)
        if before == stage:
            return False
        if before is not None:
            self._extra[before].discard(op)
            del self._first[rank][op]
        if stage is not None:
            self._extra[stage].add(op)
            self._first[rank][op] = stage
        return True

    def _carry(self, rank: int, tensor: int, pairs: set[Pair]) -> set[int]:
        """Set the pairs that carry a tensor to the stages of a rank; return the stages of pairs that changed."""
        before = self._pairs.get((rank, tensor), set())
        self._pairs[rank, tensor] = pairs
        for pair in before - pairs:
            self.carried[pair].discard(tensor)
            if not self.carried[pair] and pair not in self._rng:
                del self.carried[pair]
                self.gradients.pop(pair, None)
                self._leaving[pair[0]].discard(pair[1])
                self._arriving[pair[1]].discard(pair[0])
        for pair in pairs - before:
            self._connect(pair)
            self.carried[pair].add(tensor)
        return {stage for pair in before ^ pairs for stage in pair}

    def _connect(self, pair: Pair) -> None:
        self._leaving[pair[0]].add(pair[1])
        self._arriving[pair[1]].add(pair[0])

    def _return_gradients(self, stages: Iterable[int]) -> set[int]:
        """Update the gradients that these stages and those before them return; return the stages that changed."""
        if self._graph.mode != "training":
            return set()
        changed: set[int] = set()
        waiting = {-stage for stage in stages}
        queue = sorted(waiting)
        while queue:
            index = -heapq.heappop(queue)
            waiting.discard(-index)
            returned = {i for target in self._leaving[index] for i in self.gradients.get((index, target), ())}
            has_backward = bool(returned) or self._loss in self._outputs[index]
            if has_backward != (index in self.differentiated):
                self.differentiated ^= {index}
                changed.add(index)
            wanted = returned.union(
                i for op in self.ops_of(index) if op in self._flowing for i in self._graph.ops[op].inputs
            )
            for source in self._arriving[index]:
                pair = source, index
                here = self.carried[pair] & wanted if has_backward else set()
                found = frozenset(i for i in here if self._graph.tensors[i].requires_grad)
                if found != self.gradients.get(pair, frozenset()):
                    self.gradients[pair] = found
                    changed |= {source, index}
                    if -source not in waiting:
                        waiting.add(-source)
                        heapq.heappush(queue, -source)
        return changed
