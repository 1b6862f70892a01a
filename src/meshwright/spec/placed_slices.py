"""The stages of a placement and the values between them, as the same `StageSlice`s that cut layers have.

Rules, in addition to those of `slices`:

- A tensor is sent to another rank once, from its maker to the first stage there that reads it. That stage passes it to
  later ones of its rank, which costs nothing; gradients return the same way, so they are summed on each rank before
  they are sent.
- A replicable op is computed by the first stage of every rank that needs it, and passed on.
- A gradient passes to each value on which the loss depends in a way that autograd follows, and only from stages that
  have a backward themselves.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from meshwright.spec.placement import Placement, check_placement
from meshwright.spec.slices import Channel, StageSlice, slice_graph

if TYPE_CHECKING:
    from meshwright.spec.graph import Graph
    from meshwright.spec.plan import Plan

_Pair = tuple[int, int]


def slice_stages(graph: Graph, plan: Plan | Placement) -> tuple[StageSlice, ...]:
    """The stages of a plan or of a placement. Raises PlanError if it does not match the graph."""
    return slice_placement(graph, plan) if isinstance(plan, Placement) else slice_graph(graph, plan.bounds)


@lru_cache(maxsize=64)
def slice_placement(graph: Graph, placement: Placement) -> tuple[StageSlice, ...]:
    """The ops, inputs and outputs of each stage of a placement. Raises PlanError if it does not match the graph."""
    check_placement(placement, graph)
    needs, carried = _Walk(graph, placement).run()
    random_stages = [index for index, need in enumerate(needs) if any(graph.ops[op].random for op in need.ops)]
    rng = set(itertools.pairwise(random_stages))
    for pair in rng:
        carried.setdefault(pair, [])
    gradients, differentiated = _gradients(graph, needs, carried)
    channels = [
        Channel(
            source=source,
            target=target,
            tensors=tuple(sorted(tensors)),
            gradients=tuple(sorted(gradients[source, target])),
            carries_rng=(source, target) in rng,
        )
        for (source, target), tensors in sorted(carried.items())
    ]
    incoming, outgoing = defaultdict(list), defaultdict(list)
    for channel in channels:
        incoming[channel.target].append(channel)
        outgoing[channel.source].append(channel)
    return tuple(
        StageSlice(
            index=index,
            ops=tuple(sorted(need.ops)),
            parameters=_of_role(graph, need, "parameter"),
            buffers=_of_role(graph, need, "buffer"),
            inputs=tuple(sorted(need.inputs)),
            outputs=tuple(need.outputs),
            incoming=tuple(incoming[index]),
            outgoing=tuple(outgoing[index]),
            draws_random=index in random_stages,
            has_backward=index in differentiated,
        )
        for index, need in enumerate(needs)
    )


@dataclass(slots=True)
class _Need:
    ops: set[int]
    state: set[int] = field(default_factory=set)
    inputs: set[int] = field(default_factory=set)
    outputs: list[int] = field(default_factory=list)


class _Walk:
    """Visits the stages in order and notes where each gets the values that it reads."""

    def __init__(self, graph: Graph, placement: Placement) -> None:
        self._graph = graph
        self._stages = placement.stages
        self._producer = {tensor: op for op, item in enumerate(graph.ops) for tensor in item.outputs}
        self._maker = {
            tensor: index
            for index, stage in enumerate(placement.stages)
            for op in stage.ops
            for tensor in graph.ops[op].outputs
        }
        # For each rank: the first stage that has a tensor, made there or received.
        self._held: dict[int, dict[int, int]] = defaultdict(dict)

    def run(self) -> tuple[list[_Need], dict[_Pair, list[int]]]:
        """The needs of all stages, and the tensors that pass between each two."""
        needs = [_Need(ops=set(stage.ops)) for stage in self._stages]
        carried: dict[_Pair, list[int]] = defaultdict(list)
        for tensor in dict.fromkeys(self._graph.outputs):
            # Outputs that no stage makes (inputs, state, replicable results) are yielded by the last stage.
            needs[self._maker.get(tensor, len(needs) - 1)].outputs.append(tensor)
        for index, need in enumerate(needs):
            todo = [*(i for op in sorted(need.ops) for i in self._graph.ops[op].inputs), *need.outputs]
            self._find(index, need, todo, carried)
        return needs, carried

    def _find(self, index: int, need: _Need, todo: list[int], carried: dict[_Pair, list[int]]) -> None:
        held, seen = self._held[self._stages[index].rank], set()
        for tensor in (i for op in need.ops for i in self._graph.ops[op].outputs):
            held[tensor] = index
        while todo:
            tensor = todo.pop()
            if tensor in seen:
                continue
            seen.add(tensor)
            role = self._graph.tensors[tensor].role
            if role in ("parameter", "buffer", "constant"):
                need.state.add(tensor)
            elif role == "input":
                need.inputs.add(tensor)
            elif tensor in held:
                if held[tensor] != index:
                    carried[held[tensor], index].append(tensor)
            elif tensor in self._maker:
                carried[self._maker[tensor], index].append(tensor)
                held[tensor] = index
            else:
                op = self._producer[tensor]
                need.ops.add(op)
                held.update(dict.fromkeys(self._graph.ops[op].outputs, index))
                todo += self._graph.ops[op].inputs


def _gradients(
    graph: Graph, needs: list[_Need], carried: dict[_Pair, list[int]]
) -> tuple[dict[_Pair, list[int]], set[int]]:
    """The tensors whose gradients return between each two stages, and the stages that have a backward."""
    found: dict[_Pair, list[int]] = defaultdict(list)
    differentiated: set[int] = set()
    if graph.mode != "training":
        return found, differentiated
    flowing = flowing_ops(graph)
    leaving: dict[int, list[int]] = defaultdict(list)
    arriving: dict[int, list[int]] = defaultdict(list)
    for source, target in carried:
        leaving[source].append(target)
        arriving[target].append(source)
    loss = graph.outputs[0] if graph.has_loss else None
    for index in reversed(range(len(needs))):
        returned = {tensor for target in leaving[index] for tensor in found[index, target]}
        yields_loss = loss in needs[index].outputs and graph.tensors[graph.outputs[0]].requires_grad
        if not returned and not yields_loss:
            continue
        differentiated.add(index)
        wanted = returned | {i for op in needs[index].ops if op in flowing for i in graph.ops[op].inputs}
        for source in arriving[index]:
            here = [i for i in carried[source, index] if i in wanted and graph.tensors[i].requires_grad]
            found[source, index] += here
    return found, differentiated


def flowing_ops(graph: Graph) -> set[int]:
    """The ops through which a gradient of the loss may pass.

    The storage counts, not the tensor: a tensor written in place carries the gradient of the written value.
    """
    tensors, flowing = graph.tensors, set()
    reached = {tensors[graph.outputs[0]].storage} if graph.has_loss and graph.outputs else set()
    for index in reversed(range(len(graph.ops))):
        op = graph.ops[index]
        if any(tensors[i].requires_grad and tensors[i].storage in reached for i in op.outputs):
            flowing.add(index)
            reached.update(tensors[i].storage for i in op.inputs if tensors[i].requires_grad)
    return flowing


def _of_role(graph: Graph, need: _Need, role: str) -> tuple[int, ...]:
    return tuple(tensor for tensor in sorted(need.state) if graph.tensors[tensor].role == role)
