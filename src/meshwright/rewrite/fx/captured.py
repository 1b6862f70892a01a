"""A captured model as terms, for one batch, and terms as a module again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from meshwright.capture import flatten_batch, part
from meshwright.rewrite.fx.branches import settle_branches
from meshwright.rewrite.fx.read import read_graph

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.capture import Captured
    from meshwright.rewrite.fx.read import ReadGraph
    from meshwright.rewrite.terms import InputKind


class _Propagation(FakeTensorProp):
    """Fake tensors in place of parameters and buffers, too: a graph that writes to them must not do so here."""

    def fetch_attr(self, target: str) -> Any:
        """A fake of what a `get_attr` node names."""
        held = super().fetch_attr(target)
        return self._mode.from_tensor(held) if isinstance(held, torch.Tensor) else held


def whole_graph(captured: Captured, tensors: Sequence[torch.Tensor]) -> fx.GraphModule:
    """All of a captured model as one graph, for batches of these sizes."""
    graph = captured.graph
    batch_size = next((tensor.shape[0] for tensor in tensors if tensor.ndim), 1)
    made = part(captured, graph.inputs, graph.outputs, batch_size=batch_size, ops=range(len(graph.ops)))
    assert isinstance(made, fx.GraphModule)
    return made


def read_captured(captured: Captured, inputs: Any, targets: Any = ()) -> ReadGraph:
    """The graph of a captured model for batches of the size of ``inputs``, including the loss.

    Raises CaptureError for a batch with another structure than the captured one, RewriteError for an unreadable graph.
    """
    tensors = flatten_batch(captured, inputs, targets)
    graph, module = captured.graph, whole_graph(captured, tensors)
    roles: dict[str, InputKind] = {}
    for tensor in graph.tensors:
        if tensor.role in ("parameter", "buffer", "constant"):
            roles[tensor.name] = tensor.role
    training = graph.mode == "training"
    # In training, buffers may change before the next step.
    fixed = {name for name, role in roles.items() if role == "constant" or not training}
    settle_branches(module, fixed)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        _Propagation(module, mode).propagate(*tensors)
    return read_graph(module, training=training, kinds=roles)
