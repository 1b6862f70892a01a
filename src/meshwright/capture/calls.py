"""`capture_calls`: single ATen calls as one graph, so that they are estimated and timed like the ops of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx
from torch.utils import _pytree as pytree

from meshwright.capture.capture import Captured
from meshwright.capture.describe import describe_trace
from meshwright.capture.export import BatchLayout
from meshwright.capture.graph_walk import FlatTrace
from meshwright.capture.layer_division import Range
from meshwright.capture.value_looks import ValueLooks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshwright.spec import Op


def capture_calls(
    graph: fx.Graph, inputs: Sequence[torch.Tensor], parameters: Mapping[str, torch.Tensor], *, training: bool
) -> Captured:
    """Return a captured graph of separate ATen calls, each in its own layer, for the given sizes only.

    The calls may be independent of each other. ``inputs``: example values of the placeholders (on any device, "meta"
    too), in order; ``parameters``: values of the `get_attr` nodes, by name. In training, gradients of ``inputs`` that
    require them are counted.
    """
    for node in graph.nodes:
        node.meta = {"module": "", "where": ""}
    names = tuple(node.name for node in graph.nodes if node.op == "placeholder")
    trace = FlatTrace(
        graph=graph,
        layout=BatchLayout(
            spec=pytree.tree_structure(((tuple(inputs),), {}, ())),
            names=names,
            positions=tuple(range(len(inputs))),
            fixed=(),
        ),
        state=dict(parameters),
        aliases={},
        persistent=frozenset(parameters),
        constants={},
        branches={},
        values=tuple(ValueLooks.of(tensor) for tensor in inputs),
        batched=(False,) * len(inputs),
        batch_size=1,
        training=training,
        has_loss=False,
    )
    described = describe_trace(trace, "calls", _one_by_one)
    return Captured(graph=described.graph, trace=trace, table=described.table, legality=described.legality)


def _one_by_one(ops: Sequence[Op], _tensors: object, _nodes: object) -> tuple[Range, ...]:
    return tuple(Range(name=op.name, start=i, stop=i + 1) for i, op in enumerate(ops))
