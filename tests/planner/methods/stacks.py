"""Graphs for the tests of Alpa: chains of products, and the shipped Llama-3-8B with fewer blocks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from meshwright.spec import Extent, Graph, Layer, Op, Tensor, load_shipped_graph

BATCH = Extent(0, 1)


def product_chain(widths: tuple[int, ...], *, tied: bool = False) -> Graph:
    """Products one behind the other: (b, widths[0]) → (b, widths[1]) → ...; ``tied``: all have one weight."""
    tensors = [Tensor(name="x", shape=(BATCH, Extent(widths[0])), dtype="float32", role="input", storage=0)]
    ops, last, weight = [], 0, -1
    for at, (inner, outer) in enumerate(pairwise(widths)):
        if weight < 0 or not tied:
            weight = len(tensors)
            shape = (Extent(outer), Extent(inner))
            tensors.append(
                Tensor(
                    name=f"w{at}", shape=shape, dtype="float32", role="parameter", storage=weight, requires_grad=True
                )
            )
        made = len(tensors)
        shape = (BATCH, Extent(outer))
        tensors.append(
            Tensor(name=f"y{at}", shape=shape, dtype="float32", role="activation", storage=made, requires_grad=True)
        )
        flops = Extent(0, 2 * inner * outer)
        ops.append(
            Op(
                name=f"linear_{at}",
                kind="aten.linear.default",
                inputs=(last, weight),
                outputs=(made,),
                flops=flops,
                backward_flops=Extent(0, 2 * flops.per_sample),
                saved=(last,),
            )
        )
        last = made
    layers = tuple(Layer(name=f"layers.{i}", start=i, stop=i + 1, block=ops[i].kind) for i in range(len(ops)))
    return Graph(name="chain", tensors=tuple(tensors), ops=tuple(ops), layers=layers, inputs=(0,), outputs=(last,))


def short_stack(name: str, num_blocks: int) -> Graph:
    """A shipped graph with its first blocks alone; what stands behind reads the last of them."""
    graph = load_shipped_graph(name)
    counts = {layer.block: 0 for layer in graph.layers}
    for layer in graph.layers:
        counts[layer.block] += 1
    blocks = [layer for layer in graph.layers if counts[layer.block] > num_blocks]
    kept, dropped = blocks[num_blocks - 1], blocks[-1]
    instead = {
        old: new
        for a, b in zip(graph.ops[dropped.start : dropped.stop], graph.ops[kept.start : kept.stop], strict=True)
        for old, new in zip(a.outputs, b.outputs, strict=True)
    }
    removed = dropped.stop - kept.stop
    behind = [
        replace(op, **{what: tuple(instead.get(i, i) for i in getattr(op, what)) for what in ("inputs", "saved")})
        for op in graph.ops[dropped.stop :]
    ]
    gone = {op for layer in blocks[num_blocks:] for op in range(layer.start, layer.stop)}
    lost = {i for op in gone for i in (*graph.ops[op].outputs, *graph.ops[op].saved, *graph.ops[op].inputs)}
    ops = (*graph.ops[: kept.stop], *behind)
    used = {i for op in ops for i in (*op.inputs, *op.outputs, *op.saved)}
    number = {old: new for new, old in enumerate(i for i in range(len(graph.tensors)) if i in used or i not in lost)}

    def renumber(op: Op) -> Op:
        return replace(
            op, **{what: tuple(number[i] for i in getattr(op, what)) for what in ("inputs", "outputs", "saved")}
        )

    tensors = [
        replace(graph.tensors[i], storage=number[instead.get(graph.tensors[i].storage, graph.tensors[i].storage)])
        for i in number
    ]
    layers = [layer for layer in graph.layers if layer not in blocks[num_blocks:]]
    layers = [
        replace(x, start=x.start - removed, stop=x.stop - removed) if x.start >= dropped.stop else x for x in layers
    ]
    return replace(
        graph,
        name=f"{name}-{num_blocks}",
        tensors=tuple(tensors),
        ops=tuple(map(renumber, ops)),
        layers=tuple(layers),
        inputs=tuple(number[i] for i in graph.inputs),
        outputs=tuple(number[i] for i in graph.outputs),
    )
