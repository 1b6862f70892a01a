"""Parts of a stage that run again in the backward instead of keeping what it reads.

Each range of ops becomes a module of its own, called under torch's checkpoint: it keeps its inputs alone, and runs
again, with the random numbers that it drew, as soon as its backward asks for a value; it ends with the last one that is
asked for. Parameters are among its inputs, so that a backward meets the version that the forward read. Buffers are its
own, and running again leaves them as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from meshwright.cost.traits import is_in_place
from meshwright.spec.errors import PlanError
from meshwright.spec.graph import Graph


def checkpoint_ranges(module: torch.nn.Module, graph: Graph, ops: Sequence[int]) -> torch.nn.Module:
    """The module of a stage's ``ops``, with those in the graph's ranges computed again.

    Raises PlanError for a range that writes to what is made outside of it, or that reads what is written later.
    """
    assert isinstance(module, fx.GraphModule), "parts are cut as graphs"
    home = {op: number for number, (start, stop) in enumerate(graph.recompute) for op in range(start, stop)}
    if not any(op in home for op in ops):
        return module
    owner = _owners(module.graph, ops)
    chosen: dict[int, list[fx.Node]] = {}
    for node, op in owner.items():
        if op in home:
            chosen.setdefault(home[op], []).append(node)
    for number, nodes in chosen.items():
        _check_writes(graph, number, {owner[node] for node in nodes})
        _enclose(module, f"again_{number}", nodes)
    module.graph.lint()
    module.recompile()
    return module


class Again(torch.nn.Module):
    """A range of ops under checkpoint."""

    def __init__(self, body: fx.GraphModule) -> None:
        super().__init__()
        self.body = body

    def forward(self, *inputs: torch.Tensor) -> Any:
        """What the range makes."""
        if not torch.is_grad_enabled():
            return self.body(*inputs)
        return checkpoint(self.body, *inputs, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _untouched(list(self.body.buffers()))


@contextmanager
def _untouched(buffers: list[torch.Tensor]) -> Iterator[None]:
    """Buffers are afterwards as they were; past autograd, which has no part in them."""
    kept = [item.clone() for item in buffers]
    try:
        yield
    finally:
        for item, value in zip(buffers, kept, strict=True):
            item.data.copy_(value)


def _owners(graph: fx.Graph, ops: Sequence[int]) -> dict[fx.Node, int]:
    """The op that a node computes, or takes an element of; a part has one call for each of its ops, in order."""
    found: dict[fx.Node, int] = {}
    left = iter(sorted(ops))
    for node in graph.nodes:
        if node.op not in ("call_function", "call_module"):
            continue
        source = node.args[0] if node.target is operator.getitem else None
        found[node] = found[source] if isinstance(source, fx.Node) and source in found else next(left)
    return found


def _enclose(module: fx.GraphModule, name: str, nodes: list[fx.Node]) -> None:
    """Put nodes into a module of their own, which the graph calls in their place."""
    inside = set(nodes)
    read = dict.fromkeys(item for node in nodes for item in node.all_input_nodes if item not in inside)
    parameters = {key for key, _ in module.named_parameters(remove_duplicate=False)}
    own = [item for item in read if item.op == "get_attr" and str(item.target) not in parameters]
    given = [item for item in read if item not in own]
    made = [node for node in nodes if any(user not in inside for user in node.users)]
    body = fx.Graph()
    copies = {item: body.placeholder(item.name) for item in given}
    copies |= {item: body.node_copy(item) for item in own}
    for node in nodes:
        copies[node] = body.node_copy(node, copies.__getitem__)
    body.output(tuple(copies[node] for node in made))
    held = [str(node.target) for node in (*own, *nodes) if node.op in ("get_attr", "call_module")]
    root = {target: operator.attrgetter(target)(module) for target in held}
    module.add_submodule(name, Again(fx.GraphModule(root, body, class_name="Body")))
    with module.graph.inserting_after(nodes[-1]):
        call = module.graph.call_module(name, tuple(given))
    anchor = call
    for place, node in enumerate(made):
        with module.graph.inserting_after(anchor):
            anchor = module.graph.call_function(operator.getitem, (call, place))
        for user in [user for user in node.users if user not in inside]:
            user.replace_input_with(node, anchor)
    for node in reversed(nodes):
        module.graph.erase_node(node)


def _check_writes(graph: Graph, number: int, ops: set[int]) -> None:
    """Raise PlanError if running again would write twice, or read what was written since."""
    start, stop = graph.recompute[number]
    made = {graph.tensors[i].storage for op in ops for i in graph.ops[op].outputs if graph.tensors[i].storage == i}
    given = {graph.tensors[i].storage for op in ops for i in graph.ops[op].inputs} - made
    for op, item in enumerate(graph.ops):
        if not item.inputs or not is_in_place(item):
            continue
        storage = graph.tensors[item.inputs[0]].storage
        target = graph.tensors[storage]
        # Whole numbers are counters, which nothing is computed from.
        if storage not in given or (op not in ops and op < stop) or not target.dtype.startswith("float"):
            continue
        if op not in ops and target.role in ("buffer", "parameter"):
            continue
        raise PlanError(
            f"The plan computes ops {start}:{stop} again, of which some read {target.name!r}, which {item.name!r} "
            "writes in place: running them again would read what was written. Choose other ranges, or compute nothing "
            "again."
        )
