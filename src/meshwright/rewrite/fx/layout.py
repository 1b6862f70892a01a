"""Channels last: images with the channels of a point adjacent in memory, the preferred layout of oneDNN's kernels.

Which layout is faster depends on the sizes, so that a graph is written in both and timed. Grappler's layout pass puts
transposes around each operator and cancels pairs of them; torch keeps the layout in strides, so that only inputs of
convolutions are converted, without a copy if they already have it.
"""

from __future__ import annotations

import copy
from operator import attrgetter

import torch
from torch import fx

aten = torch.ops.aten


def channels_last(module: fx.GraphModule) -> fx.GraphModule | None:
    """The same module with convolutions in channels last, for frozen weights; None if it has no convolutions.

    Outputs keep their layout. Weights in another layout are stored a second time.
    """
    graph = copy.deepcopy(module.graph)
    # Opaque calls may have three dims.
    convolutions = [node for node in graph.nodes if node.target is aten.conv2d.default and node.meta.get("declared")]
    if not convolutions:
        return None
    moved: dict[str, torch.Tensor] = {}
    for node in convolutions:
        image, weight, *others = node.args
        with graph.inserting_before(node):
            if weight.op == "get_attr":
                name = f"{weight.target}_channels_last"
                held = attrgetter(str(weight.target))(module).detach()
                moved[name] = held.contiguous(memory_format=torch.channels_last)
                weight = graph.create_node("get_attr", name)
            image = graph.call_function(aten.contiguous.default, (image,), {"memory_format": torch.channels_last})
        node.args = (image, weight, *others)
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        output.args = (tuple(graph.call_function(aten.contiguous.default, (value,)) for value in output.args[0]),)
    for node in graph.find_nodes(op="get_attr"):
        if not node.users:
            graph.erase_node(node)
    names = {str(node.target) for node in graph.find_nodes(op="get_attr")}
    root = {name: moved[name] if name in moved else attrgetter(name)(module) for name in names}
    return fx.GraphModule(root, graph, class_name="Rewritten")
