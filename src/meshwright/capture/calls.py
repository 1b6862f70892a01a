"""`capture_calls`: make a graph of separate ATen calls, which can be estimated and timed like the ops of a model."""

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
    """Return a captured graph of the ATen calls in ``graph``, each call in its own layer, for one size of inputs.

    The calls need not depend on each other. ``inputs``: example values of the placeholders, in order, on any device
    ("meta", too). ``parameters``: values of the `get_attr` nodes, by name. In training, the backward pass includes
    gradients of those ``inputs`` that require them.
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
