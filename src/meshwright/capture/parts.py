"""`part(captured, feeds, fetches)`: the runnable torch module that some tensors need, and nothing else.

The part holds the user's own Parameter and buffer objects under the user's names. All sizes are whole numbers for one
batch size, so a part needs no values only to know their shape. In-place writes to buffers that nobody fetches belong to
the part whose ``ops`` name them.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from meshwright.capture.devices import CPU, bind_call, bind_graph
from meshwright.capture.trace import target_of
from meshwright.capture.values import Slot
from meshwright.capture.walk import walk_trace
from meshwright.spec import GraphError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.capture.captured import Captured


def part(
    captured: Captured,
    feeds: Sequence[int],
    fetches: Sequence[int],
    *,
    batch_size: int,
    ops: Sequence[int] | None = None,
    device: torch.device = CPU,
) -> fx.GraphModule:
    """Cut out the module that computes ``fetches`` from ``feeds`` (tensor ids) for ``batch_size`` samples.

    Args:
        captured: the captured model.
        feeds: tensors that are given, in the order of the part's arguments; parameters and buffers are never fed.
        fetches: tensors that are returned, as a tuple in this order.
        batch_size: samples per call; the part is valid for this size only.
        ops: ops to run, as a `StageSlice` lists them, effects on buffers included. None: what the fetches need, with
            all writes to the memory that they live in.
        device: where the part makes tensors of its own; its feeds and its state are to be there when it is called.

    Returns:
        A module whose ``forward(*feeds)`` returns the tuple of fetches. Its parameters and buffers are the user's own
        objects.

    Raises:
        GraphError: a value is needed that is neither fed nor computed by ``ops``, or the batch size does not fit the
            graph.
    """
    captured.graph.check_batch_size(batch_size)
    chosen = _needed_ops(captured, feeds, fetches) if ops is None else sorted(set(ops))
    builder = _PartBuilder(captured, batch_size, device)
    for i in feeds:
        builder.feed(i)
    for op in chosen:
        builder.run(op)
    builder.fetch(fetches)
    return builder.module()


def strides_of(captured: Captured, batch_size: int) -> dict[int, tuple[int, ...]]:
    """The strides of tensors, by id, for ``batch_size`` samples; those of what only backwards read are not among them.

    Raises GraphError for a batch size that does not fit the graph.
    """
    captured.graph.check_batch_size(batch_size)
    env = walk_trace(captured.trace, batch_size).env
    slots = ((tensor, env.get(node)) for node, tensor in captured.table.of_node.items())
    return {tensor: slot.value.stride for tensor, slot in slots if isinstance(slot, Slot)}


def _needed_ops(captured: Captured, feeds: Sequence[int], fetches: Sequence[int]) -> list[int]:
    table, groups = captured.table, captured.legality.groups
    producer = {i: op for op, row in enumerate(table.ops) for i in row.outputs}
    writers: dict[int, list[int]] = {}
    for op, row in enumerate(table.ops):
        for group in {groups[i] for i in row.written}:
            writers.setdefault(group, []).append(op)
    given, needed, todo = set(feeds), set(), list(fetches)
    seen: set[int] = set()
    while todo:
        tensor = todo.pop()
        if tensor in given or tensor in seen:
            continue
        seen.add(tensor)
        wanted = [producer[tensor]] if tensor in producer else []
        if table.tensors[tensor].role == "activation":
            wanted += writers.get(groups[tensor], [])
        for op in wanted:
            if op not in needed:
                needed.add(op)
                todo += table.ops[op].inputs
    return sorted(needed)


class _PartBuilder:
    def __init__(self, captured: Captured, batch_size: int, device: torch.device) -> None:
        self._device = device
        self._trace, self._table = captured.trace, captured.table
        self._tensors, self._ops = captured.graph.tensors, captured.graph.ops
        self._env = walk_trace(captured.trace, batch_size).env
        self._graph = fx.Graph()
        self._made: dict[int, fx.Node] = {}
        self._held: dict[str, fx.Node] = {}

    def feed(self, tensor: int) -> None:
        self._made[tensor] = self._graph.placeholder(_identifier(self._tensors[tensor].name))

    def run(self, op: int) -> None:
        row = self._table.ops[op]
        args, kwargs = fx.node.map_arg((row.node.args, row.node.kwargs), self._operand)
        # Nodes are named like the graph's ops, so that timings of a part can be assigned to ops.
        target = target_of(row.node)
        args, kwargs = bind_call(target, args, kwargs, self._device)
        node = self._graph.create_node("call_function", target, args, kwargs, name=self._ops[op].name)
        single = self._is_single(row.node)
        for position, tensor in enumerate(row.results):
            if tensor is not None and tensor not in self._made:
                self._made[tensor] = node if single else self._graph.call_function(operator.getitem, (node, position))

    def fetch(self, tensors: Sequence[int]) -> None:
        self._graph.output(tuple(self._value(i) for i in tensors))
        # Elements of tuples that nobody uses.
        for node in reversed(list(self._graph.nodes)):
            if node.target is operator.getitem and not node.users:
                self._graph.erase_node(node)

    def module(self) -> fx.GraphModule:
        root = {name: self._attribute(name) for name in self._held}
        made = fx.GraphModule(root, self._graph, class_name="Part")
        made.meta.clear()
        for name in self._held:
            if name in self._trace.constants or (name in self._trace.state and name not in self._trace.persistent):
                owner, _, leaf = name.rpartition(".")
                if leaf in (holder := made.get_submodule(owner))._buffers:
                    holder._non_persistent_buffers_set.add(leaf)
        return made

    def _attribute(self, name: str) -> Any:
        held = self._trace.attribute(name)
        return bind_graph(held, self._device) if isinstance(held, fx.GraphModule) else held

    def _operand(self, node: fx.Node) -> Any:
        if node in self._table.of_node:
            return self._value(self._table.of_node[node])
        return self._get_attribute(target_of(node)) if node.op == "get_attr" else self._env[node]

    def _value(self, tensor: int) -> fx.Node:
        if tensor in self._made:
            return self._made[tensor]
        row = self._table.tensors[tensor]
        if row.role in ("parameter", "buffer", "constant"):
            return self._get_attribute(row.name)
        raise GraphError(
            f"The part needs tensor {tensor} ({self._tensors[tensor].name!r}), which is neither among its feeds nor "
            "computed by its ops. Feed it, or take feeds and ops from `slice_graph`."
        )

    def _get_attribute(self, name: str) -> fx.Node:
        if name not in self._held:
            # State is read where it is first used, behind the placeholders.
            self._held[name] = self._graph.create_node("get_attr", name, name=_identifier(name))
        return self._held[name]

    def _is_single(self, node: fx.Node) -> bool:
        return not isinstance(self._env[node], list | tuple)


def _identifier(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)
