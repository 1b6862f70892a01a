"""Read a captured model as terms, for batches of one size (`read_captured`); `Rewritten`: a rewritten graph's module.

`settle_branches` replaces each ``torch.cond`` whose predicate is constant by the branch that is taken.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree as pytree

from meshwright.capture import Captured, flatten_batch, part
from meshwright.capture.call_facts import draws_random, written_and_aliased
from meshwright.capture.graph_walk import Returned, walk_trace
from meshwright.capture.value_looks import Slot
from meshwright.rewrite.fx.reading import ReadGraph, read_graph
from meshwright.spec import RewriteError

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from meshwright.capture.export import BatchLayout
    from meshwright.rewrite.terms import InputKind


def _returned(captured: Captured, sizes: Sequence[torch.Size]) -> Returned:
    """How the model's output is assembled; returned sizes of the batch are those of this batch."""
    trace = captured.trace
    if trace.returned is None:
        raise RewriteError(
            "The structure of the model's output is unknown; return a tensor, or tensors in tuples, lists or dicts."
        )
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
    """A rewritten graph as a module with the arguments and the output structure of the original module.

    Parameters and buffers that the graph still reads are those of the original module, under the same names. A call
    raises RewriteError if the batch's sizes, the values of other arguments, or the mode (training or evaluation) differ
    from those for which the graph was rewritten.
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
        """Return the output that the original module has for these arguments."""
        if self.training != self._for_training:
            names = ("evaluation", "training")
            raise RewriteError(
                f"The rewritten model is in {names[self.training]} mode, but was made for {names[self._for_training]}, "
                "in which dropout and batch norms differ. Call .train() or .eval() to return to that mode, or rewrite "
                "the model in the new mode."
            )
        if self._plain and not kwargs and tuple(getattr(item, "shape", None) for item in args) == self._sizes:
            return self.graph_module(*args)[0]
        leaves, spec = pytree.tree_flatten((args, kwargs, ()))
        if spec != self._layout.spec:
            raise RewriteError(
                f"The rewritten model was called with arguments of the structure {spec}, but was made for "
                f"{self._layout.spec}. Call it with arguments like the example batch, or rewrite it again."
            )
        tensors = [leaves[position] for position in self._layout.positions]
        for name, tensor, size in zip(self._layout.names, tensors, self._sizes, strict=True):
            if tensor.shape != size:
                raise RewriteError(
                    f"The rewritten model takes {name!r} of the shape {tuple(size)}, but {tuple(tensor.shape)} was "
                    "given. It is made for one batch size; rewrite the model for this batch size, too."
                )
        for position, value in self._layout.fixed:
            if leaves[position] != value:
                raise RewriteError(
                    f"The rewritten model was made for the argument {value!r}, but {leaves[position]!r} was given. "
                    "Rewrite the model for this argument, too."
                )
        return self._returned.rebuild(self.graph_module(*tensors))


_COND = torch.ops.higher_order.cond
# A predicate is computed from few numbers; a larger tensor is not a flag.
_MOST_ELEMENTS = 64


class _UnknownError(Exception):
    """A value that is not known before the model runs."""


def settle_branches(module: fx.GraphModule, fixed: Set[str]) -> fx.GraphModule:
    """Replace each ``torch.cond`` whose predicate is known by the branch that it takes, in place; return ``module``.

    A predicate is known if it can be computed from the attributes named in ``fixed`` alone, which must be real tensors
    (not fake) to which no call writes.
    """
    while (found := _settled(module, fixed)) is not None:
        node, taken = found
        results = _inlined(module, node, str(taken.target), node.args[3])
        for user in list(node.users):
            # Results are fetched by position.
            user.replace_all_uses_with(results[user.args[1]])
            module.graph.erase_node(user)
        module.graph.erase_node(node)
    module.recompile()
    return module


def _settled(module: fx.GraphModule, fixed: Set[str]) -> tuple[fx.Node, Any] | None:
    """A condition with a known predicate, and the branch that it takes."""
    for node in module.graph.find_nodes(op="call_function", target=_COND):
        predicate, *branches, _ = node.args
        try:
            value = predicate if isinstance(predicate, bool) else bool(_known(module, predicate, fixed))
        except _UnknownError:
            continue
        return node, branches[0 if value else 1]
    return None


def _known(module: fx.GraphModule, value: Any, fixed: Set[str]) -> Any:
    """The value of a node, if it does not depend on the batch. Raises _UnknownError."""
    if not isinstance(value, fx.Node):
        return value
    if value.op == "get_attr" and str(value.target) in fixed and not _is_written(module, value):
        held = attrgetter(str(value.target))(module)
        if isinstance(held, torch.Tensor) and not isinstance(held, FakeTensor) and held.numel() <= _MOST_ELEMENTS:
            return held
    elif (
        isinstance(value.target, OpOverload)
        and value.all_input_nodes
        and not value.target._schema.is_mutable
        and not draws_random(value.target, value.args, value.kwargs)
    ):
        args, kwargs = fx.node.map_arg((value.args, value.kwargs), lambda item: _known(module, item, fixed))
        with torch.no_grad():
            return value.target(*args, **kwargs)
    raise _UnknownError


def _is_written(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a call writes to an attribute's memory, or might do so through a view."""
    for other in module.graph.find_nodes(op="get_attr"):
        for user in other.users if other.target == node.target else ():
            written, aliased = written_and_aliased(user.target, user.args, user.kwargs, fx.Node)
            if other in written or (other in aliased and user.target is not _COND):
                return True
    return False


def _inlined(module: fx.GraphModule, place: fx.Node, name: str, operands: Any) -> Any:
    """Copy a branch's nodes in front of a node; return the branch's results."""
    branch = attrgetter(name)(module)
    copies: dict[fx.Node, Any] = dict(zip(branch.graph.find_nodes(op="placeholder"), operands, strict=True))
    with module.graph.inserting_before(place):
        for node in branch.graph.nodes:
            if node.op == "output":
                return fx.node.map_arg(node.args[0], copies.__getitem__)
            if node.op != "placeholder":
                copies[node] = module.graph.node_copy(node, copies.__getitem__)
            if node.op == "get_attr":
                copies[node].target = f"{name}.{node.target}"
    raise AssertionError("a graph ends with its output")


class _Propagation(FakeTensorProp):
    """Fake tensors in place of parameters and buffers, too: a graph that writes to them must not do so here."""

    def fetch_attr(self, target: str) -> Any:
        """A fake of what a `get_attr` node names."""
        held = super().fetch_attr(target)
        return self._mode.from_tensor(held) if isinstance(held, torch.Tensor) else held


def whole_graph(captured: Captured, tensors: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Return a captured model as one graph; ``tensors`` are the flattened inputs, of which only sizes are read."""
    graph = captured.graph
    batch_size = next((tensor.shape[0] for tensor in tensors if tensor.ndim), 1)
    made = part(captured, graph.inputs, graph.outputs, batch_size=batch_size, ops=range(len(graph.ops)))
    assert isinstance(made, fx.GraphModule)
    return made


def read_captured(captured: Captured, inputs: Any, targets: Any = ()) -> ReadGraph:
    """Return the graph of a captured model, including its loss, for batches of the size of ``inputs``.

    Raises CaptureError if the batch has another structure than the captured one, RewriteError if the graph contains
    anything that `read_graph` does not support.
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
