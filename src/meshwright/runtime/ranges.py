"""Move ranges of ops of a stage's module into submodules, which its graph calls instead."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence

import torch
from torch import fx

# The key of a node's first and last op in its metadata.
_OPS = "meshwright_ops"


def note_ops(module: fx.GraphModule, ops: Sequence[int]) -> None:
    """Write the number of its op into the metadata of each call of a stage's module.

    The module has one call per op of ``ops``, in order. A node that takes an element of a result gets the op of the
    result.
    """
    left = iter(sorted(ops))
    for node in module.graph.nodes:
        if node.op not in ("call_function", "call_module"):
            continue
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and _OPS in source.meta:
            node.meta[_OPS] = source.meta[_OPS]
        else:
            op = next(left)
            node.meta[_OPS] = op, op


def find_ops(node: fx.Node) -> tuple[int, int] | None:
    """Return the numbers of the first and the last op of a node; None for inputs, parameters and outputs."""
    found: tuple[int, int] | None = node.meta.get(_OPS)
    return found


def enclose(
    module: fx.GraphModule,
    name: str,
    nodes: Sequence[fx.Node],
    wrap: Callable[[fx.GraphModule], torch.nn.Module],
    own: Collection[str],
) -> None:
    """Move ``nodes`` into a submodule ``wrap(body)`` with this name.

    Parameters and buffers named in ``own`` move into it, too; others become its arguments.
    """
    inside = set(nodes)
    read = dict.fromkeys(item for node in nodes for item in node.all_input_nodes if item not in inside)
    held = [item for item in read if item.op == "get_attr" and str(item.target) in own]
    given = [item for item in read if item not in held]
    made = [node for node in nodes if any(user not in inside for user in node.users)]
    body = fx.Graph()
    copies = {item: body.placeholder(item.name) for item in given}
    copies |= {item: body.node_copy(item) for item in held}
    for node in nodes:
        copies[node] = body.node_copy(node, copies.__getitem__)
    body.output(tuple(copies[node] for node in made))
    targets = [str(node.target) for node in (*held, *nodes) if node.op in ("get_attr", "call_module")]
    root = {target: operator.attrgetter(target)(module) for target in targets}
    module.add_submodule(name, wrap(fx.GraphModule(root, body, class_name="Body")))
    ops = [found for node in nodes if (found := find_ops(node)) is not None]
    span = min(first for first, _ in ops), max(last for _, last in ops)
    with module.graph.inserting_after(nodes[-1]):
        call = module.graph.call_module(name, tuple(given))
    call.meta[_OPS] = span
    anchor = call
    for place, node in enumerate(made):
        with module.graph.inserting_after(anchor):
            anchor = module.graph.call_function(operator.getitem, (call, place))
        anchor.meta[_OPS] = span
        for user in [user for user in node.users if user not in inside]:
            user.replace_input_with(node, anchor)
    for node in reversed(nodes):
        module.graph.erase_node(node)
    module.graph.lint()
    module.recompile()
