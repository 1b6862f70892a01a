"""`part`: the module that computes given tensors of a captured model; `rebuild`: the same from a graph alone.

A part holds the model's own Parameter and buffer objects, under the model's names. A part is made for one batch size;
all sizes in it are numbers. In-place writes to buffers belong to the part whose ``ops`` contain them, even if the part
does not return the buffers. `strides_of` returns the strides of captured tensors.
"""

from __future__ import annotations

import operator
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from meshwright.capture.graph_walk import target_of, walk_trace
from meshwright.capture.module_devices import CPU, bind_call, bind_graph, takes_device
from meshwright.capture.value_looks import Slot
from meshwright.spec import DTYPE_BYTES, Extent, Graph, GraphError, Op

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from meshwright.capture.capture import Captured


# Operators whose optional tensors are given from the first one on: a weight, then a bias.
_IN_ORDER = ("layer_norm", "group_norm", "native_layer_norm", "native_group_norm", "rms_norm")
# The tensors of lists that are not an operator's last ones: an LSTM's hidden and cell states come before its weights.
_LISTS = {("lstm", "hx"): 2}
_NUMBER = re.compile(r"-?\d+")
_LIST = re.compile(r"\[(.*)\]")


# The local graph of a sharding has no module that computes it. To run its ops, a module is made from their operators,
# attributes and shapes. Parameters and buffers are given, or left unallocated (on device "meta"); then the caller sets
# their values.
def rebuild(
    graph: Graph,
    feeds: Sequence[int],
    fetches: Sequence[int],
    ops: Sequence[int],
    *,
    batch_size: int,
    converters: Mapping[str, Callable[..., torch.Tensor]],
    modules: Mapping[int, nn.Module] | None = None,
    state: Callable[[int], torch.Tensor] | None = None,
    device: torch.device = CPU,
) -> fx.GraphModule:
    """Return a module that computes the tensors ``fetches`` from the tensors ``feeds`` with given ops of a graph.

    Args:
        graph: a graph whose ops are torch operators (kinds like ``aten.add.Tensor``) or have a converter.
        feeds: ids of the tensors that are the module's arguments, in order.
        fetches: ids of the tensors that the module returns, as a tuple in this order.
        ops: ids of the ops to run, ascending; the module's nodes have the ops' names.
        batch_size: samples per call; the module accepts only this number.
        converters: by op kind, a function of (input, output shape) that computes an op that torch does not have.
        modules: by op id, a module that is called in place of the op; it returns a tuple if the op has several outputs.
        state: a function from a tensor id to the parameter, buffer or constant that the module holds under the tensor's
            name. None: unallocated tensors on device "meta".
        device: the device on which the module's factories (such as ``zeros``) make tensors.

    Raises GraphError if an op cannot be called by its kind, attributes and inputs, or if an input is neither fed nor
    computed.
    """
    graph.check_batch_size(batch_size)
    builder = _Builder(graph, batch_size, converters, modules or {}, state, device)
    for i in feeds:
        builder.feed(i)
    for index in ops:
        builder.run(index)
    return builder.module(fetches)


class _Builder:
    def __init__(
        self,
        graph: Graph,
        batch_size: int,
        converters: Mapping[str, Callable[..., torch.Tensor]],
        modules: Mapping[int, nn.Module],
        state: Callable[[int], torch.Tensor] | None,
        device: torch.device,
    ) -> None:
        self._given, self._batch_size, self._converters = graph, batch_size, converters
        self._modules, self._held, self._device = modules, state or self._unallocated, device
        self._graph = fx.Graph()
        self._made: dict[int, fx.Node] = {}
        self._root: dict[str, Any] = {}

    def feed(self, tensor: int) -> None:
        self._made[tensor] = self._graph.placeholder(f"feed_{tensor}")

    def run(self, index: int) -> None:
        op = self._given.ops[index]
        inputs = [self._value(i) for i in op.inputs]
        if index in self._modules:
            self._root[f"op_{index}"] = self._modules[index]
            node = self._graph.create_node("call_module", f"op_{index}", tuple(inputs), {}, name=op.name)
            self._results(op, node, is_single=len(op.outputs) == 1)
            return
        if op.kind in self._converters:
            shape = self._shape(op.outputs[0])
            target: Callable[..., Any] = self._converters[op.kind]
            node = self._graph.create_node("call_function", target, (inputs[0], shape), {}, name=op.name)
            self._made[op.outputs[0]] = node
            return
        function = _operator(op)
        arguments = self._arguments(op, function, inputs)
        if takes_device(function):
            arguments["device"] = self._device
        node = self._graph.create_node("call_function", function, (), arguments, name=op.name)
        is_single = len(function._schema.returns) == 1 and "List" not in str(function._schema.returns[0].type)
        self._results(op, node, is_single=is_single)

    def _results(self, op: Op, node: fx.Node, *, is_single: bool) -> None:
        for position, tensor in enumerate(op.outputs):
            item = node if is_single else self._graph.call_function(operator.getitem, (node, position))
            self._made[tensor] = item

    def module(self, fetches: Sequence[int]) -> fx.GraphModule:
        self._graph.output(tuple(self._value(i) for i in fetches))
        return fx.GraphModule(self._root, self._graph, class_name="Rebuilt")

    def _value(self, tensor: int) -> fx.Node:
        if tensor not in self._made:
            self._made[tensor] = self._state(tensor)
        return self._made[tensor]

    def _state(self, tensor: int) -> fx.Node:
        held = self._given.tensors[tensor]
        if held.role not in ("parameter", "buffer", "constant"):
            raise GraphError(
                f"The ops need tensor {tensor} ({held.name!r}), which is neither among the feeds nor computed by them. "
                "Feed it, or take feeds and ops from `slice_graph`."
            )
        self._root[held.name] = self._held(tensor)
        return self._graph.create_node("get_attr", held.name, name=f"state_{tensor}")

    def _unallocated(self, tensor: int) -> torch.Tensor:
        held = self._given.tensors[tensor]
        value = torch.empty(self._shape(tensor), dtype=getattr(torch, held.dtype), device="meta")
        return nn.Parameter(value, requires_grad=held.requires_grad) if held.role == "parameter" else value

    def _shape(self, tensor: int) -> tuple[int, ...]:
        return tuple(extent.at(self._batch_size) for extent in self._given.tensors[tensor].shape)

    def _arguments(self, op: Op, function: Any, inputs: list[fx.Node]) -> dict[str, Any]:
        """Inputs go to the arguments that are tensors, in order; those that must be given come first."""
        attributes, given = dict(op.attributes), list(inputs)
        tensors = [item for item in function._schema.arguments if _is_tensor(item) and item.name not in attributes]
        needed = sum(not item.has_default_value() for item in tensors)
        self._check_optional(op, len(tensors) - needed, len(inputs) - needed)
        found: dict[str, Any] = {}
        for item in function._schema.arguments:
            kind = str(item.type)
            if item.name in attributes:
                found[item.name] = _parse(attributes.pop(item.name), self._batch_size)
            elif kind.startswith("Optional") and not item.has_default_value() and not _is_tensor(item):
                found[item.name] = None
            elif kind == "List[Optional[Tensor]]":
                # What is put there comes last.
                count = len(given) - sum(map(_is_tensor, function._schema.arguments[len(found) + 1 :]))
                first = self._first_indexed(op, op.inputs[1 : 1 + count])
                found[item.name], given = [*[None] * first, *given[:count]], given[count:]
            elif kind == "List[Tensor]":
                count = _LISTS.get((op.kind.split(".")[1], item.name), len(given))
                found[item.name], given = given[:count], given[count:]
            elif _is_tensor(item):
                must = not item.has_default_value()
                if must or len(given) > needed:
                    if not given:
                        raise _cannot_call(op, f"its argument {item.name} has no input")
                    found[item.name] = given.pop(0)
                needed -= must
        if given or attributes:
            raise _cannot_call(op, f"{len(given)} inputs and the attributes {sorted(attributes)} have no argument")
        return found

    def _check_optional(self, op: Op, optional: int, given: int) -> None:
        """Raise GraphError if some optional tensors are left out and it is unknown which ones."""
        if 0 < given < optional and op.kind.split(".")[1] not in _IN_ORDER:
            raise _cannot_call(op, "some of its optional tensors are missing, and the graph does not say which")

    def _first_indexed(self, op: Op, chosen_by: Sequence[int]) -> int:
        """The first dim of the indexed tensor that has an index; the other dims follow from what is picked or put."""
        is_put = len(op.inputs) > 1 + len(chosen_by)
        whole, made = list(self._shape(op.inputs[0])), list(self._shape(op.inputs[-1] if is_put else op.outputs[0]))
        indices = [self._shape(i) for i in chosen_by]
        chosen = list(torch.broadcast_shapes(*indices))
        places = range(len(whole) - len(indices) + 1)
        fitting = [k for k in places if whole[:k] + chosen + whole[k + len(indices) :] == made]
        if not fitting:
            raise _cannot_call(op, "the dims that its index tensors select from do not follow from the shapes")
        return fitting[0]


def _is_tensor(argument: Any) -> bool:
    return str(argument.type) in ("Tensor", "Optional[Tensor]")


def _operator(op: Op) -> Any:
    space, _, rest = op.kind.partition(".")
    name, _, overload = rest.partition(".")
    found = getattr(getattr(getattr(torch.ops, space), name, None), overload or "default", None)
    if found is None:
        raise _cannot_call(op, "torch has no such operator")
    return found


def _cannot_call(op: Op, why: str) -> GraphError:
    return GraphError(
        f"Op {op.name!r} of kind {op.kind!r} cannot be called with the inputs and attributes in the graph: {why}. "
        "Expected an operator of torch with all of its arguments. Time the model itself instead (`meshwright measure "
        "MODEL`)."
    )


def _parse(text: str, batch_size: int) -> Any:
    """An attribute's value: a number, a size that may grow with the batch, a truth value, a dtype, a list, a word."""
    found = _LIST.fullmatch(text)
    if found:
        return [_parse(item.strip(), batch_size) for item in found[1].split(",") if item.strip()]
    if text in ("True", "False"):
        return text == "True"
    if _NUMBER.fullmatch(text):
        return int(text)
    if text in DTYPE_BYTES:
        return getattr(torch, text)
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return Extent.decode_scalar(text).at(batch_size)
    except ValueError:
        return text


def part(
    captured: Captured,
    feeds: Sequence[int],
    fetches: Sequence[int],
    *,
    batch_size: int,
    ops: Sequence[int] | None = None,
    device: torch.device = CPU,
) -> fx.GraphModule:
    """Return the module that computes the tensors ``fetches`` from the tensors ``feeds``, for ``batch_size`` samples.

    Args:
        captured: the captured model.
        feeds: ids of the tensors that are the module's arguments, in order; parameters and buffers cannot be fed.
        fetches: ids of the tensors that the module returns, as a tuple in this order.
        batch_size: samples per call; the module accepts only this number.
        ops: ids of the ops to run, including those that only write buffers, as in `StageSlice`. None: the ops that the
            fetches need, including all writes to the memory of the tensors on the way.
        device: the device of tensors that the module makes itself; feeds, parameters and buffers must be on it, too,
            when the module is called.

    Returns:
        A module whose ``forward(*feeds)`` returns the tuple of fetches. Its parameters and buffers are the model's own
        objects.

    Raises:
        GraphError: a tensor is needed that is neither fed nor computed by ``ops``, or the graph is for another batch
            size only.
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
    """Return the strides (in elements) of a captured model's tensors, by tensor id, for ``batch_size`` samples.

    Tensors that only the backward pass reads are missing. Raises GraphError if the graph is for another batch size
    only.
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
