"""Keys that are equal for stages with equal memory needs, so that the memory of only one of them is computed.

Two stages have equal keys if their layers have the same blocks (`Layer.block`: operators, sizes and wiring inside a
layer), connected to each other and to outside values in the same way. In the key, a value made in the stage is named by
the distance of its layer from the first one and its position in the layer; a value from outside by its order of
appearance.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from meshwright.spec import Graph, StageSlice


def likeness(graph: Graph, stage: StageSlice) -> Hashable:
    """Return a key that is equal for stages of the graph that need the same memory."""
    home, layer_of, borrowed = _wiring(graph)
    mine = set(stage.ops)
    layers = sorted({layer_of[op] for op in stage.ops if not graph.ops[op].replicable})
    inside = {op for layer in layers for op in range(graph.layers[layer].start, graph.layers[layer].stop)}
    # Ops of earlier layers that are computed here too, the same ones in every stage.
    again = tuple(op for op in stage.ops if op not in inside)
    made_again = {tensor for op in again for tensor in graph.ops[op].outputs}
    first = layers[0] if layers else 0
    numbers: dict[int, int] = {}

    def name(tensor: int) -> tuple[int, int]:
        if tensor in made_again:
            return -2, tensor
        layer, place = home.get(tensor, (-1, 0))
        return (layer - first, place) if layer >= first else (-1, numbers.setdefault(tensor, len(numbers)))

    def names(tensors: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        return tuple(name(tensor) for tensor in tensors)

    return (
        again,
        tuple(op - graph.layers[first].start for op in sorted(inside - mine)),
        tuple((graph.layers[layer].block or graph.layers[layer].name, names(borrowed[layer])) for layer in layers),
        tuple((names(channel.tensors), names(channel.gradients)) for channel in (*stage.incoming, *stage.outgoing)),
        len(stage.incoming),
        names(stage.inputs),
        names(stage.outputs),
        stage.has_backward,
        # State that no op of the layers reads, or that replicated ops read.
        names(stage.parameters + stage.buffers),
    )


@lru_cache(maxsize=32)
def _wiring(graph: Graph) -> tuple[dict[int, tuple[int, int]], list[int], tuple[tuple[int, ...], ...]]:
    """Return each value's layer and place in it, the layer of each op, and the values that each layer uses of others.

    The owners of storages are among the used values.
    """
    home: dict[int, tuple[int, int]] = {}
    layer_of: list[int] = []
    borrowed = []
    for index, layer in enumerate(graph.layers):
        ops = graph.ops[layer.start : layer.stop]
        layer_of += [index] * len(ops)
        made = dict.fromkeys(
            i for op in ops for i in (*op.outputs, *(j for j in op.saved if graph.tensors[j].role == "saved"))
        )
        home.update((tensor, (index, place)) for place, tensor in enumerate(made))
        used = dict.fromkeys(chain.from_iterable((*op.inputs, *op.saved, *op.outputs) for op in ops))
        owners = [graph.tensors[tensor].storage for tensor in used]
        borrowed.append(tuple(i for i in (*used, *owners) if i not in made))
    return home, layer_of, tuple(borrowed)
