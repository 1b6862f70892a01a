"""Small graphs made by hand, for tests of packages that never see torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from meshwright.spec import Extent, GradientExchange, Graph, Layer, Op, Plan, StagePlan, Tensor, Workload

B = Extent(0, 1)


def chain_graph(
    num_layers: int,
    *,
    width: int = 4,
    tied: bool = False,
    skips: tuple[tuple[int, int], ...] = (),
    frozen: int = 0,
    random: tuple[int, ...] = (),
    reads: Mapping[int, int] | None = None,
) -> Graph:
    """One linear op per layer, ending in a loss.

    ``tied``: first and last layer share their weight. ``skips``: (from, to) pairs; layer ``to`` also reads the output
    of layer
    ``from``. ``frozen``: so many first layers have no trainable weight. ``random``: layers that draw random numbers.
    ``reads``: layers that read the output of another one than the one before.
    """
    tensors = [Tensor(name="x", shape=(B, Extent(width)), dtype="float32", role="input", storage=0)]
    ops, outputs, weights = [], [], []
    previous = 0
    for layer in range(num_layers):
        if tied and layer == num_layers - 1:
            weight = weights[0]
        else:
            weight = len(tensors)
            tensors.append(
                Tensor(
                    name=f"layer{layer}.weight",
                    shape=(Extent(width), Extent(width)),
                    dtype="float32",
                    role="parameter",
                    storage=weight,
                    requires_grad=layer >= frozen,
                    aliases=("head.weight",) if tied and layer == 0 else (),
                )
            )
        weights.append(weight)
        previous = outputs[reads[layer]] if reads and layer in reads else previous
        out = len(tensors)
        last = layer == num_layers - 1
        tensors.append(
            Tensor(
                name=f"y{layer}",
                shape=() if last else (B, Extent(width)),
                dtype="float32",
                role="activation",
                storage=out,
                requires_grad=layer >= frozen,
            )
        )
        extra = tuple(outputs[source] for source, target in skips if target == layer)
        ops.append(
            Op(
                name=f"linear{layer}",
                kind="aten.linear.default",
                inputs=(previous, weight, *extra),
                outputs=(out,),
                flops=Extent(0, 2 * width * width),
                backward_flops=Extent(0, 4 * width * width),
                saved=(previous,),
                random=layer in random,
                module=f"layers.{layer}",
            )
        )
        outputs.append(out)
        previous = out
    layers = tuple(Layer(name=f"layers.{i}", start=i, stop=i + 1, block="linear") for i in range(num_layers))
    return Graph(
        name="chain",
        tensors=tuple(tensors),
        ops=tuple(ops),
        layers=layers,
        inputs=(0,),
        outputs=(previous,),
        has_loss=True,
    )


def make_plan(
    graph: Graph,
    bounds: list[tuple[int, int]],
    replicas: list[int],
    num_microbatches: int,
    *,
    schedule: str = "1f1b",
    microbatch_size: int = 2,
    exchange: GradientExchange | None = None,
) -> Plan:
    """A plan with ranks counted up stage by stage."""
    stages, rank = [], 0
    for (start, stop), count in zip(bounds, replicas, strict=True):
        stages.append(StagePlan(start=start, stop=stop, ranks=tuple(range(rank, rank + count))))
        rank += count
    return Plan(
        model="chain",
        graph_hash=graph.content_hash,
        cluster="test",
        workload=Workload(global_batch=num_microbatches * microbatch_size),
        stages=tuple(stages),
        num_microbatches=num_microbatches,
        schedule=schedule,
        exchange=exchange or GradientExchange(),
    )


def even_bounds(num_layers: int, num_stages: int) -> list[tuple[int, int]]:
    """Stages of nearly equal numbers of layers."""
    edges = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    return list(itertools.pairwise(edges))
