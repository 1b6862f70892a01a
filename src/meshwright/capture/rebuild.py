"""A runnable module of a graph alone: its operators, attributes and shapes, without the model that it came from.

The local graph of a sharding has no module that computes it; to run its ops, one is made. Parameters and buffers are
given, or left unallocated (on device "meta"), and the caller gives them values.
"""

from __future__ import annotations

import operator
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from meshwright.capture.devices import CPU, takes_device
from meshwright.spec import DTYPE_BYTES, Extent, Graph, GraphError, Op

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# Operators whose optional tensors are given from the first one on: a weight, then a bias.
_IN_ORDER = ("layer_norm", "group_norm", "native_layer_norm", "native_group_norm", "rms_norm")
# The tensors of lists that are not an operator's last ones: an LSTM's hidden and cell states come before its weights.
_LISTS = {("lstm", "hx"): 2}
_NUMBER = re.compile(r"-?\d+")
_LIST = re.compile(r"\[(.*)\]")


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
    """The module that computes ``fetches`` from ``feeds`` (tensor ids) by some ops of the graph.

    Args:
        graph: ops of kinds ``aten.*``, and others for which there are converters.
        feeds: tensors that are given, in the order of the module's arguments.
        fetches: tensors that are returned, as a tuple in this order.
        ops: ids of the ops to run, ascending; nodes are named like them.
        batch_size: samples per call.
        converters: by kind, what computes an op that torch does not have, from its input and its output's shape.
        modules: by op, what computes its output from its inputs instead; a tuple of them where it has several.
        state: the parameter, buffer or constant of a tensor id, which the module holds under the tensor's name.
        device: where the module makes tensors of its own.

    Raises GraphError for an op that cannot be called by its kind, attributes and inputs.
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
        """Raise GraphError where some tensors are left out, and it is not told which."""
        if 0 < given < optional and op.kind.split(".")[1] not in _IN_ORDER:
            raise _cannot_call(op, "some of its tensors are left out, and it is not told which")

    def _first_indexed(self, op: Op, chosen_by: Sequence[int]) -> int:
        """The first dim of the indexed tensor that has an index; the other dims follow from what is picked or put."""
        is_put = len(op.inputs) > 1 + len(chosen_by)
        whole, made = list(self._shape(op.inputs[0])), list(self._shape(op.inputs[-1] if is_put else op.outputs[0]))
        indices = [self._shape(i) for i in chosen_by]
        chosen = list(torch.broadcast_shapes(*indices))
        places = range(len(whole) - len(indices) + 1)
        fitting = [k for k in places if whole[:k] + chosen + whole[k + len(indices) :] == made]
        if not fitting:
            raise _cannot_call(op, "it is not told which dims its indices are of")
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
        f"Op {op.name!r} of kind {op.kind!r} cannot be called by what the graph says of it: {why}; expected an "
        "operator of torch with all of its arguments. Time the model itself instead (`meshwright measure MODEL`)."
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
