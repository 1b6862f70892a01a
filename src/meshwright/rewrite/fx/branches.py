"""Replace ``torch.cond`` by the branch taken, if its predicate is constant."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.capture.writes import draws_random, written_and_aliased

if TYPE_CHECKING:
    from collections.abc import Set

_COND = torch.ops.higher_order.cond
# A predicate is computed from few numbers; a larger tensor is not a flag.
_MOST_ELEMENTS = 64


class _UnknownError(Exception):
    """A value that is not known before the model runs."""


def settle_branches(module: fx.GraphModule, fixed: Set[str]) -> fx.GraphModule:
    """Replace, in place, each ``torch.cond`` whose predicate follows from the ``fixed`` attributes.

    A predicate is unknown if something writes to its inputs, or while tensors are fake.
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
