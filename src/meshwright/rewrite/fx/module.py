"""`Rewritten`: a rewritten graph as a module with the interface of the original."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from meshwright.capture.trace import Returned
from meshwright.capture.values import Slot
from meshwright.capture.walk import walk_trace
from meshwright.spec import RewriteError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.capture import Captured
    from meshwright.capture.inputs import BatchLayout


def _returned(captured: Captured, sizes: Sequence[torch.Size]) -> Returned:
    """How the model's output is assembled; returned sizes of the batch are those of this batch."""
    trace = captured.trace
    if trace.returned is None:
        raise RewriteError("The structure of the model's output is unknown; return tensors, in tuples or dicts.")
    batch_size = next((size[0] for size in sizes if len(size)), 1)
    env = walk_trace(trace, batch_size).env
    output = next(node for node in trace.graph.nodes if node.op == "output")
    numbers = iter(range(len(captured.graph.outputs)))
    leaves = []
    for is_output, value in trace.returned.leaves:
        held = env[output.args[0][value]] if is_output else value
        leaves.append((True, next(numbers)) if isinstance(held, Slot) else (False, held))
    return Returned(trace.returned.spec, tuple(leaves))


class Rewritten(nn.Module):
    """Calls a graph with the original module's arguments and returns what that returns.

    Parameters and buffers that the graph still reads are the user's own objects, under their names. It takes batches
    of the sizes, and the mode, that it was rewritten for; any other raises RewriteError.
    """

    # For `capture_model`.
    takes_one_size = True

    def __init__(
        self, graph: fx.GraphModule, captured: Captured, sizes: Sequence[torch.Size], *, training: bool
    ) -> None:
        super().__init__()
        returned = _returned(captured, sizes)
        self.graph_module = graph
        self._layout: BatchLayout = captured.trace.layout
        self._returned: Returned = returned
        self._sizes = tuple(sizes)
        self._for_training = training
        self.train(training)
        # Tensors in, one tensor out: no structure to flatten.
        positional = pytree.tree_structure(((0,) * len(self._sizes), {}, ()))
        self._plain = self._layout.spec == positional and returned.spec.is_leaf() and returned.leaves == ((True, 0),)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original module's output."""
        if self.training != self._for_training:
            names = ("evaluation", "training")
            raise RewriteError(
                f"The rewritten model is in {names[self.training]} mode, and was made for {names[self._for_training]}: "
                "dropout and batch norms differ. Call .train() or .eval() as it was, or rewrite the model in this mode."
            )
        if self._plain and not kwargs and tuple(getattr(item, "shape", None) for item in args) == self._sizes:
            return self.graph_module(*args)[0]
        leaves, spec = pytree.tree_flatten((args, kwargs, ()))
        if spec != self._layout.spec:
            raise RewriteError(
                f"The rewritten model was called with {spec}; it was made for {self._layout.spec}. Call it like the "
                "batch that it was rewritten for, or rewrite it anew."
            )
        tensors = [leaves[position] for position in self._layout.positions]
        for name, tensor, size in zip(self._layout.names, tensors, self._sizes, strict=True):
            if tensor.shape != size:
                raise RewriteError(
                    f"The rewritten model takes {name!r} of the sizes {tuple(size)}, and {tuple(tensor.shape)} were "
                    "given. It is made for one size of batch; rewrite the model for this one, too."
                )
        for position, value in self._layout.fixed:
            if leaves[position] != value:
                raise RewriteError(
                    f"The rewritten model was made with the argument {value!r}, and {leaves[position]!r} was given. "
                    "Rewrite the model for this one, too."
                )
        return self._returned.rebuild(self.graph_module(*tensors))
