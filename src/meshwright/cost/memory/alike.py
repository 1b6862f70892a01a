"""When do two stages of a graph need the same memory, so that one walk tells both?

When their layers have the same blocks (`Layer.block`: operators, sizes and wiring inside a layer), wired to each other
and to what comes from outside in the same way. Values made in the stage are named by their layer's distance and their
place in it, values from outside by the order in which they appear.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from meshwright.spec import Graph, StageSlice


def likeness(graph: Graph, stage: StageSlice) -> Hashable:
    """Equal for stages of the graph that need the same memory."""
    home, borrowed = _wiring(graph)
    layers = _layers_of(graph, stage)
    if not layers:
        # It computes ops of other layers again, or leaves out its own: like no other.
        return stage
    first = layers[0]
    numbers: dict[int, int] = {}

    def name(tensor: int) -> tuple[int, int]:
        layer, place = home.get(tensor, (-1, 0))
        return (layer - first, place) if layer >= first else (-1, numbers.setdefault(tensor, len(numbers)))

    def names(tensors: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        return tuple(name(tensor) for tensor in tensors)

    return (
        tuple((graph.layers[layer].block or graph.layers[layer].name, names(borrowed[layer])) for layer in layers),
        tuple((names(channel.tensors), names(channel.gradients)) for channel in (*stage.incoming, *stage.outgoing)),
        tuple(channel.carries_rng for channel in stage.incoming),
        len(stage.incoming),
        names(stage.inputs),
        names(stage.outputs),
        stage.has_backward,
    )


def _layers_of(graph: Graph, stage: StageSlice) -> range:
    """The layers of a stage, none unless its ops are exactly theirs."""
    if not stage.ops:
        return range(0)
    start, stop = stage.ops[0], stage.ops[-1] + 1
    held = [index for index, layer in enumerate(graph.layers) if layer.start >= start and layer.stop <= stop]
    num_ops = sum(graph.layers[index].stop - graph.layers[index].start for index in held)
    return range(held[0], held[-1] + 1) if held and num_ops == len(stage.ops) == stop - start else range(0)


@lru_cache(maxsize=32)
def _wiring(graph: Graph) -> tuple[dict[int, tuple[int, int]], tuple[tuple[int, ...], ...]]:
    """Of each value: its layer and place in it. Of each layer: what it uses of others, with the owners of storages."""
    home: dict[int, tuple[int, int]] = {}
    borrowed = []
    for index, layer in enumerate(graph.layers):
        ops = graph.ops[layer.start : layer.stop]
        made = dict.fromkeys(
            i for op in ops for i in (*op.outputs, *(j for j in op.saved if graph.tensors[j].role == "saved"))
        )
        home.update((tensor, (index, place)) for place, tensor in enumerate(made))
        used = dict.fromkeys(chain.from_iterable((*op.inputs, *op.saved, *op.outputs) for op in ops))
        owners = [graph.tensors[tensor].storage for tensor in used]
        borrowed.append(tuple(i for i in (*used, *owners) if i not in made))
    return home, tuple(borrowed)
