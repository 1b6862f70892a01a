"""Cut a graph into stages at layer boundaries: the ops and state of each stage, and the values sent between stages.

Only this module computes cuts: programs send the tensors listed here, the cost model counts their bytes, and the
runtime passes exactly these inputs and outputs to `capture.part`.

Rules: results of `replicable` ops are computed in each stage that needs them instead of sent. A value that several
later stages read is sent directly from its producer to each of them. The state of the random number generator is sent
along the stages that draw random numbers, so that dropout depends neither on the cut nor on the schedule.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from meshwright.spec.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.spec.graph import Graph

# Bytes of the generator state that is sent with an activation: `torch.get_rng_state()` of the CPU's Mersenne Twister
# (CUDA's has 16).
RNG_STATE_BYTES = 5056


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """The ``tensors`` (ids) that stage ``source`` sends to the later stage ``target`` for each microbatch.

    ``gradients`` are the tensors among them whose gradients ``target`` sends back. ``carries_rng``: the state of the
    random number generator is sent with the tensors.
    """

    source: int
    target: int
    tensors: tuple[int, ...]
    gradients: tuple[int, ...]
    carries_rng: bool = False

    def forward_bytes(self, graph: Graph, batch_size: int, float_bytes: int | None = None) -> int:
        """Return the bytes that one microbatch sends forward, for a microbatch of ``batch_size`` samples.

        ``float_bytes`` is as in `Tensor.num_bytes`.
        """
        values = sum(graph.tensors[i].num_bytes(batch_size, float_bytes) for i in self.tensors)
        return values + (RNG_STATE_BYTES if self.carries_rng else 0)

    def backward_bytes(self, graph: Graph, batch_size: int, float_bytes: int | None = None) -> int:
        """Return the bytes of gradients that one microbatch sends back; arguments as in `forward_bytes`."""
        return sum(graph.tensors[i].num_bytes(batch_size, float_bytes) for i in self.gradients)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSlice:
    """One stage of a cut graph: its ops, its parameters and buffers, and the tensors that it reads and makes.

    ``ops`` are ids in graph order, including `replicable` ops that other stages compute as well. ``inputs`` are the
    graph inputs that the stage reads, ``outputs`` the graph outputs that it makes. ``incoming`` and ``outgoing`` are
    its channels from and to other stages. ``draws_random``: an op of the stage draws random numbers. ``has_backward``:
    a tensor of the stage requires a gradient.
    """

    index: int
    ops: tuple[int, ...]
    parameters: tuple[int, ...]
    buffers: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    incoming: tuple[Channel, ...]
    outgoing: tuple[Channel, ...]
    draws_random: bool
    has_backward: bool


def slice_graph(graph: Graph, bounds: Sequence[tuple[int, int]]) -> tuple[StageSlice, ...]:
    """Cut ``graph`` into stages; ``bounds`` are the layers (start, stop) of each.

    Raises PlanError unless the bounds cover all layers in order.
    """
    return _slice_graph(graph, tuple(bounds))


@lru_cache(maxsize=256)
def _slice_graph(graph: Graph, bounds: tuple[tuple[int, int], ...]) -> tuple[StageSlice, ...]:
    check_bounds(graph, bounds)
    home = {
        op: stage
        for stage, (start, stop) in enumerate(bounds)
        for op in range(graph.layers[start].start, graph.layers[stop - 1].stop)
    }
    producer = {tensor: op for op, item in enumerate(graph.ops) for tensor in item.outputs}
    needs = [_stage_needs(graph, stage, home, producer, len(bounds)) for stage in range(len(bounds))]
    channels = _channels(graph, needs, home, producer)
    return tuple(_stage_slice(graph, stage, need, channels, len(bounds)) for stage, need in enumerate(needs))


def check_bounds(graph: Graph, bounds: Sequence[tuple[int, int]]) -> None:
    """Raise PlanError unless ``bounds``, the layers (start, stop) of each stage, are valid.

    They have to be non-empty and contiguous, cover every layer, and not cut through a recomputed range.
    """
    position = 0
    for stage, (start, stop) in enumerate(bounds):
        if start != position or stop <= start or stop > len(graph.layers):
            raise PlanError(
                f"Stage {stage} holds layers {start}:{stop}; expected it to start at layer {position} and to hold at "
                f"least one of the graph's {len(graph.layers)} layers. "
                f"A model of {len(graph.layers)} layers takes at most {len(graph.layers)} stages."
            )
        position = stop
    if position != len(graph.layers):
        raise PlanError(
            f"The stages hold layers 0:{position}, but the graph has {len(graph.layers)} layers; "
            "every layer needs a stage."
        )
    for stage, (layer, _) in enumerate(bounds):
        cut = graph.layers[layer].start
        for start, stop in graph.recompute:
            if start < cut < stop:
                raise PlanError(
                    f"Stage {stage} starts with layer {layer}, inside the range of ops {start}:{stop}, which is "
                    "recomputed as a whole. Cut elsewhere, or recompute layers one by one."
                )


@dataclass(frozen=True, slots=True)
class _Needs:
    ops: tuple[int, ...]
    state: tuple[int, ...]
    inputs: tuple[int, ...]
    received: tuple[int, ...]


def _stage_needs(graph: Graph, stage: int, home: dict[int, int], producer: dict[int, int], num_stages: int) -> _Needs:
    """Walk back from the stage's own ops; replicable ops join it, all other values are received."""
    ops = {op for op, where in home.items() if where == stage and not graph.ops[op].replicable}
    todo = [tensor for op in ops for tensor in graph.ops[op].inputs]
    if stage == num_stages - 1:
        todo += graph.outputs
    seen: set[int] = set()
    state, inputs, received = set(), set(), set()
    while todo:
        tensor = todo.pop()
        if tensor in seen:
            continue
        seen.add(tensor)
        role = graph.tensors[tensor].role
        if role in ("parameter", "buffer", "constant"):
            state.add(tensor)
        elif role == "input":
            inputs.add(tensor)
        elif producer[tensor] in ops:
            continue
        elif graph.ops[producer[tensor]].replicable:
            ops.add(producer[tensor])
            todo += graph.ops[producer[tensor]].inputs
        else:
            received.add(tensor)
    return _Needs(tuple(sorted(ops)), tuple(sorted(state)), tuple(sorted(inputs)), tuple(sorted(received)))


def _channels(graph: Graph, needs: list[_Needs], home: dict[int, int], producer: dict[int, int]) -> tuple[Channel, ...]:
    carried: dict[tuple[int, int], list[int]] = {}
    for target, need in enumerate(needs):
        for tensor in need.received:
            carried.setdefault((home[producer[tensor]], target), []).append(tensor)
    random_stages = [stage for stage, need in enumerate(needs) if any(graph.ops[op].random for op in need.ops)]
    rng = set(itertools.pairwise(random_stages))
    for pair in rng:
        carried.setdefault(pair, [])
    return tuple(
        Channel(
            source=source,
            target=target,
            tensors=tuple(tensors),
            gradients=tuple(i for i in tensors if graph.tensors[i].requires_grad) if graph.mode == "training" else (),
            carries_rng=(source, target) in rng,
        )
        for (source, target), tensors in sorted(carried.items())
    )


def _stage_slice(
    graph: Graph,
    stage: int,
    need: _Needs,
    channels: tuple[Channel, ...],
    num_stages: int,
) -> StageSlice:
    ops = [graph.ops[op] for op in need.ops]
    roles = {tensor: graph.tensors[tensor].role for tensor in need.state}
    return StageSlice(
        index=stage,
        ops=need.ops,
        parameters=tuple(tensor for tensor, role in roles.items() if role == "parameter"),
        buffers=tuple(tensor for tensor, role in roles.items() if role == "buffer"),
        inputs=need.inputs,
        outputs=graph.outputs if stage == num_stages - 1 else (),
        incoming=tuple(channel for channel in channels if channel.target == stage),
        outgoing=tuple(channel for channel in channels if channel.source == stage),
        draws_random=any(op.random for op in ops),
        has_backward=graph.mode == "training"
        and any(graph.tensors[tensor].requires_grad for op in ops for tensor in op.outputs),
    )
