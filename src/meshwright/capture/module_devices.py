"""Devices in traced calls: replace the CPU of a captured graph by the device of a part.

Factories (``arange``, ``zeros``, ``full``), conversions (``to``) and subgraphs of `torch.cond` name a device. In a
captured graph it is always the CPU; `part` and `rebuild` replace it by the stage's device.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")


def bind_call(target: Callable[..., Any], args: Any, kwargs: Any, device: torch.device) -> tuple[Any, dict[str, Any]]:
    """Return the (args, kwargs) of a call with ``device`` in place of every device.

    A factory that names no device gets the keyword argument ``device``.
    """
    args, kwargs = fx.node.map_aggregate(
        (args, kwargs), lambda item: device if isinstance(item, torch.device) else item
    )
    if _is_factory(target) and kwargs.get("device") is None:
        kwargs = {**kwargs, "device": device}
    return args, kwargs


def takes_device(target: Callable[..., Any]) -> bool:
    """Return whether a call must name a device: a factory, or an operator whose argument ``device`` has no default."""
    schema = getattr(target, "_schema", None)
    named = () if schema is None else (item for item in schema.arguments if item.name == "device")
    return _is_factory(target) or any(not item.has_default_value() for item in named)


def bind_graph(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Return a copy of a subgraph, nested subgraphs included, whose calls name ``device``; ``module`` is unchanged."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    held: dict[str, Any] = {}
    for node in module.graph.nodes:
        made[node] = copied = graph.node_copy(node, made.__getitem__)
        if node.op == "call_function":
            copied.args, copied.kwargs = bind_call(node.target, copied.args, copied.kwargs, device)
        elif node.op in ("get_attr", "call_module"):
            value = attrgetter(node.target)(module)
            held[node.target] = bind_graph(value, device) if isinstance(value, fx.GraphModule) else value
    return fx.GraphModule(held, graph)


def _is_factory(target: Callable[..., Any]) -> bool:
    """Whether a call makes tensors from numbers alone (an argument ``device``, and none that is a tensor)."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return False
    names = {item.name for item in schema.arguments}
    return "device" in names and not any("Tensor" in str(item.type) for item in schema.arguments)
