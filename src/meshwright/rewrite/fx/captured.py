"""A captured model as terms, for one batch, and terms as a module again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from meshwright.capture import flatten_batch, part
from meshwright.rewrite.fx.branches import settle_branches
from meshwright.rewrite.fx.read import read_graph

if TYPE_CHECKING:
    from meshwright.capture import Captured
    from meshwright.rewrite.fx.read import Source
    from meshwright.rewrite.terms import InputKind


class _Propagation(FakeTensorProp):
    """Fake tensors in place of parameters and buffers, too: a graph that writes to them must not do so here."""

    def fetch_attr(self, target: str) -> Any:
        """A fake of what a `get_attr` node names."""
        held = super().fetch_attr(target)
        return self._mode.from_tensor(held) if isinstance(held, torch.Tensor) else held


def read_captured(captured: Captured, inputs: Any, targets: Any = ()) -> Source:
    """The graph of a captured model for batches of the size of ``inputs``, loss included.

    Raises CaptureError for a batch that is built unlike the captured one, RewriteError for what cannot be read.
    """
    tensors = flatten_batch(captured, inputs, targets)
    graph = captured.graph
    batch_size = next((tensor.shape[0] for tensor in tensors if tensor.ndim), 1)
    module = part(captured, graph.inputs, graph.outputs, batch_size=batch_size, ops=range(len(graph.ops)))
    roles: dict[str, InputKind] = {}
    for tensor in graph.tensors:
        if tensor.role in ("parameter", "buffer", "constant"):
            roles[tensor.name] = tensor.role
    training = graph.mode == "training"
    # In training, buffers may be another before the next step.
    fixed = {name for name, role in roles.items() if role == "constant" or not training}
    settle_branches(module, fixed)  # type: ignore[arg-type]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        _Propagation(module, mode).propagate(*tensors)  # type: ignore[arg-type]
    return read_graph(module, training=training, kinds=roles)  # type: ignore[arg-type]
