"""`flatten_export` turns an exported program into one flat fx graph with the model's own names.

It removes nodes that only the export needs (assertions, arithmetic on unused sizes, `detach_` of new constants), merges
the names of tied parameters, and replaces devices by the CPU (`module_devices`). Repeated blocks, which were traced
once, are written out (`find_regions`). A write to a re-bound buffer moves from the graph's end to the position behind
its last reader, so that it does not forbid all cuts in between (`hoist_buffer_writes`).
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from meshwright.capture.graph_walk import LOSS_MODULE, Returned, args_of, target_of
from meshwright.capture.module_devices import CPU, bind_call, bind_graph
from meshwright.capture.refusals import user_place
from meshwright.capture.repeats import ENTER, LEAVE, REPEAT, NotRepeatableError
from meshwright.spec import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


aten = torch.ops.aten
# Larger constants made in a block are not compared by value.
_COMPARED_ELEMENTS = 64


@dataclass(frozen=True, slots=True)
class Region:
    """The nodes of one traced block, between the `ENTER` and `LEAVE` marks in the exported graph.

    ``name``: the module path. ``inputs`` and ``outputs``: the tensors that enter and leave the block.
    """

    name: str
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    nodes: list[fx.Node]


# A region is the code between the marks of one traced block. The two traced blocks of a group are equal if they run the
# same operators on the same local numbering of values, with the same attributes inside the block and the same ones
# outside. A block is not repeated if it reads a value from outside beside its arguments and sizes, or if its buffers
# are written elsewhere.
def find_regions(
    nodes: list[fx.Node], pairs: Sequence[tuple[str, str]], attribute: Callable[[fx.Node], tuple[str, str]]
) -> dict[str, Region]:
    """Return the traced blocks, by module path.

    ``pairs``: for each group of repeated blocks, the paths of the two blocks that were traced. ``attribute``: returns
    (kind, name) of a `get_attr` node. Raises NotRepeatableError if the two blocks of a pair differ, or if a copy would
    not compute the same.
    """
    regions: dict[str, Region] = {}
    start: dict[str, int] = {}
    for position, node in enumerate(nodes):
        if node.target is ENTER:
            start[args_of(node)[1]] = position
        elif node.target is LEAVE:
            outputs, name = args_of(node)
            inside = [item for item in nodes[start[name] + 1 : position] if item.op == "call_function"]
            regions[name] = Region(name, list(args_of(nodes[start[name]])[0]), list(outputs), inside)
    for first, template in pairs:
        if _signature(regions[first], attribute) != _signature(regions[template], attribute):
            raise NotRepeatableError(template)
        _check_writes(nodes, regions[template], attribute)
    return regions


def _signature(region: Region, attribute: Callable[[fx.Node], tuple[str, str]]) -> list[Any]:
    """Operators with local numbering of values: equal for blocks that compute the same.

    Raises NotRepeatableError if the block reads a value from outside.
    """
    numbers: dict[fx.Node, Any] = {}
    for i, node in enumerate(region.inputs):
        numbers.setdefault(node, ("input", i))

    def describe(node: fx.Node) -> Any:
        if node in numbers:
            return numbers[node]
        if node.op == "get_attr":
            kind, name = attribute(node)
            if kind == "state":
                inside = name.startswith(region.name + ".")
                return kind, name[len(region.name) :] if inside else ("outside", name)
            held = held_by(node.graph.owning_module, target_of(node))
            return kind, _subgraph_text(held) if kind == "branch" else _constant_text(held)
        if isinstance(node.meta.get("val"), torch.Tensor) or node.op == "placeholder":
            raise NotRepeatableError(f"{region.name} reads {node.name} from outside")
        return "size", str(node.meta.get("val"))

    signature: list[Any] = []
    # A later block may use sizes that an earlier one computed. Sizes are compared by value, where they are read.
    for i, node in enumerate(node for node in region.nodes if not isinstance(node.meta.get("val"), torch.SymInt)):
        signature.append(
            (str(node.target), str(fx.node.map_arg((node.args, node.kwargs), lambda item: _Text(describe(item)))))
        )
        numbers[node] = ("node", i)
    signature.append([describe(node) for node in region.outputs])
    return signature


class _Text(str):
    """A description standing in for a node (fx maps nodes to anything)."""

    __slots__ = ()

    def __new__(cls, value: Any) -> _Text:
        return super().__new__(cls, repr(value))


def _subgraph_text(branch: fx.GraphModule) -> str:
    return re.sub(r"#.*", "", branch.code)


def _constant_text(held: Any) -> Any:
    real = getattr(held, "constant", None) if hasattr(held, "fake_mode") else held
    if not isinstance(real, torch.Tensor) or real.numel() > _COMPARED_ELEMENTS:
        return id(held)
    return str(real.dtype), tuple(real.shape), tuple(real.flatten().tolist())


def _check_writes(nodes: list[fx.Node], region: Region, attribute: Callable[[fx.Node], tuple[str, str]]) -> None:
    """A re-bound buffer of the template is written outside the block, at the graph's end: it cannot be repeated."""
    inside = set(region.nodes)
    for node in nodes:
        if node.target is aten.copy_.default and node not in inside and args_of(node)[0].op == "get_attr":
            kind, name = attribute(args_of(node)[0])
            if kind == "state" and name.startswith(region.name + "."):
                raise NotRepeatableError(name)


def held_by(module: Any, target: str) -> Any:
    """Return the attribute of ``module`` that the dotted name ``target`` refers to."""
    for part in target.split("."):
        module = getattr(module, part)
    return module


_MODEL = "model."
_SUBGRAPH_OPERATORS = {"cond", "wrap_with_set_grad_enabled"}
_DROPPED = ("aten._assert", "aten.sym_constrain", "aten._assert_tensor_metadata")


@dataclass(slots=True)
class Flat:
    """A flat graph, and the objects beside parameters and buffers to which its `get_attr` nodes refer.

    ``constants``: tensors made in forward. ``branches``: subgraphs, such as those of `torch.cond`. ``returned``: the
    structure of the outputs.
    """

    graph: fx.Graph
    returned: Returned | None = None
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    branches: dict[str, fx.GraphModule] = field(default_factory=dict)


def flatten_export(module: fx.GraphModule, first_name: dict[str, str], pairs: Sequence[tuple[str, str]]) -> Flat:
    """Return the flat graph of an exported module.

    ``first_name``: maps each name of a parameter or buffer to the first name of the same tensor. ``pairs``: for each
    group of repeated blocks, the paths of the two blocks that were traced; the second is copied for the others. Raises
    NotRepeatableError if the two blocks of a group differ, CaptureError for operators that a graph cannot contain.
    """
    flattener = _Flattener(module, first_name, pairs)
    flat = flattener.run()
    _drop_unused_sizes(flat.graph)
    hoist_buffer_writes(flat.graph, frozenset(first_name.values()))
    flat.graph.lint()
    return flat


class _Flattener:
    def __init__(self, module: fx.GraphModule, first_name: dict[str, str], pairs: Sequence[tuple[str, str]]) -> None:
        self._module = module
        self._pairs = pairs
        self._first_name = first_name
        self._flat = Flat(fx.Graph())
        self._attributes: dict[str, fx.Node] = {}
        self._regions: dict[str, Region] = {}
        self._env: dict[fx.Node, Any] = {}
        self._shared: dict[int, str] = {}

    def run(self) -> Flat:
        nodes = list(self._module.graph.nodes)
        self._regions = find_regions(nodes, self._pairs, self._attribute)
        for node in nodes:
            if node.op == "placeholder":
                self._env[node] = self._flat.graph.placeholder(node.name)
            elif node.op == "get_attr":
                continue
            elif node.op == "call_function":
                self._copy(node, self._env, lambda name: name)
            elif node.op == "output":
                self._output(node)
            else:
                raise CaptureError(
                    f"The exported graph has a node of the kind {node.op!r} ({node.target}), which a captured graph "
                    "cannot contain; expected only calls of operators."
                )
        return self._flat

    def _output(self, node: fx.Node) -> None:
        spec = getattr(self._module, "_out_spec", None)
        leaves = node.args[0] if isinstance(node.args[0], list | tuple) else [node.args[0]]
        if spec is not None and len(leaves) == spec.num_leaves:
            numbers = iter(range(len(leaves)))
            kinds = tuple((True, next(numbers)) if isinstance(leaf, fx.Node) else (False, leaf) for leaf in leaves)
            self._flat.returned = Returned(spec, kinds)
        kept = tuple(self._operand(item, self._env, lambda name: name) for item in _leaves(node.args[0]))
        self._flat.graph.output(kept)

    def _copy(self, node: fx.Node, env: dict[fx.Node, Any], rename: Callable[[str], str]) -> None:
        target, given = target_of(node), args_of(node)
        if target in (ENTER, LEAVE) or str(target).startswith(_DROPPED):
            return
        if target is REPEAT:
            env[node] = self._expand(node, env)
            return
        if target is operator.getitem and isinstance(env.get(given[0]), list):
            env[node] = env[given[0]][given[1]]
            return
        if target is aten.detach_.default and given[0].target is aten.lift_fresh_copy.default:
            env[node] = env[given[0]]
            return
        where = user_place(node.meta.get("stack_trace") or "") or self._inner_place(node)
        self._refuse_subgraph(node, where)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda item: self._operand(item, env, rename))
        copied = self._flat.graph.call_function(target, *bind_call(target, args, kwargs, CPU))
        copied.meta = {"module": rename(_module_path(node)), "where": where}
        env[node] = copied

    def _refuse_subgraph(self, node: fx.Node, where: str) -> None:
        if not isinstance(node.target, torch._ops.HigherOrderOperator):
            return
        if node.target.name() == "wrap_with_autocast":
            raise CaptureError(
                f"{where or _module_path(node) or 'the model'}: forward enters torch.autocast; a captured model cannot "
                "be cut into stages inside that context. Enter autocast around the whole model instead, or convert the "
                "module's weights and inputs."
            )
        if node.target.name() not in _SUBGRAPH_OPERATORS:
            raise CaptureError(
                f"{where or _module_path(node) or 'the model'}: the operator {node.target.name()!r} with subgraphs is "
                "not supported; only torch.cond is. Write this part with plain operators, or with torch.cond."
            )

    def _inner_place(self, node: fx.Node) -> str:
        for item in node.all_input_nodes:
            if item.op == "get_attr":
                held = held_by(self._module, target_of(item))
                if isinstance(held, fx.GraphModule):
                    for inner in held.graph.nodes:
                        if place := user_place(inner.meta.get("stack_trace") or ""):
                            return place
        return ""

    def _operand(self, node: fx.Node, env: dict[fx.Node, Any], rename: Callable[[str], str]) -> Any:
        if node.op != "get_attr":
            return env[node] if node in env else self._env[node]
        kind, name = self._attribute(node)
        if kind == "state":
            return self._get_attribute(self._first_name[rename(name)])
        held = held_by(self._module, target_of(node))
        if kind == "branch":
            return self._add_branch(held)
        return self._add_constant(held, node, env)

    def _attribute(self, node: fx.Node) -> tuple[str, str]:
        """("state", user's name), ("branch", target) or ("constant", target)."""
        target = target_of(node)
        name = target.removeprefix(_MODEL)
        if name in self._first_name and target.startswith(_MODEL):
            return "state", name
        held = held_by(self._module, target)
        return ("branch" if isinstance(held, fx.GraphModule) else "constant"), target

    def _get_attribute(self, name: str) -> fx.Node:
        if name not in self._attributes:
            self._attributes[name] = self._flat.graph.create_node("get_attr", name, name=_identifier(name))
        return self._attributes[name]

    def _add_branch(self, held: fx.GraphModule) -> fx.Node:
        name = self._shared.get(id(held))
        if name is None:
            name = self._shared[id(held)] = f"branch_{len(self._flat.branches)}"
            self._flat.branches[name] = bind_graph(held, CPU)
        return self._get_attribute(name)

    def _add_constant(self, held: torch.Tensor, node: fx.Node, env: dict[fx.Node, Any]) -> fx.Node:
        # A tensor made in forward is a new constant wherever the block is written out; an attribute of a module is one.
        if node in env:
            return env[node]
        name = f"constant_{len(self._flat.constants)}"
        self._flat.constants[name] = held.to(CPU)
        made = self._get_attribute(name)
        (self._env if target_of(node).startswith(_MODEL) else env)[node] = made
        return made

    def _expand(self, node: fx.Node, env: dict[fx.Node, Any]) -> list[Any]:
        """Write out the template for one repeat; returns the block's fresh outputs."""
        inputs, _, block, name = args_of(node)
        template = self._regions[name]
        local: dict[fx.Node, Any] = {
            mine: self._operand(theirs, env, lambda name: name)
            for mine, theirs in zip(template.inputs, inputs, strict=True)
        }

        def rename(name: str) -> str:
            return block + name[len(template.name) :] if (name + ".").startswith(template.name + ".") else name

        for inner in template.nodes:
            self._copy(inner, local, rename)
        return [self._operand(item, local, rename) for item in template.outputs]


def hoist_buffer_writes(graph: fx.Graph, state: frozenset[str]) -> None:
    """Move each ``copy_(buffer, value)`` at the graph's end behind the buffer's last reader and the value's node.

    ``state``: names of parameters and buffers.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in reversed(list(graph.nodes)):
        if node.target is not aten.copy_.default or node.users or node.args[0].op != "get_attr":
            continue
        buffer, value = node.args[:2]
        if value.target is aten.detach.default and len(value.users) == 1 and value.args[0].op == "call_function":
            value.args[0].append(value)
            position[value] = position[value.args[0]]
        readers = [reader for reader in _views_and_readers(buffer) if position[reader] < position[node]]
        last = max([value, *readers], key=position.__getitem__)
        if last.op == "call_function" and buffer.target in state:
            last.append(node)


def _views_and_readers(buffer: fx.Node) -> set[fx.Node]:
    """Nodes that read the buffer, or a value that may be a view of it."""
    found: set[fx.Node] = set()
    todo = [buffer]
    while todo:
        for user in todo.pop().users:
            if user.op == "call_function" and user not in found:
                found.add(user)
                schema = getattr(user.target, "_schema", None)
                if schema is None or any(argument.alias_info is not None for argument in schema.arguments):
                    todo.append(user)
    return found


def _drop_unused_sizes(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        sizes = node.target is aten.sym_size.int or not isinstance(
            node.target, torch._ops.OpOverload | torch._ops.HigherOrderOperator
        )
        if node.op == "call_function" and sizes and not node.users:
            graph.erase_node(node)


def _module_path(node: fx.Node) -> str:
    """The user's path of the module that ran the op; "" is the model itself, `LOSS_MODULE` the loss."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    path = re.sub(r"@\d+", "", path)
    if path == "model" or not path or path.startswith("_empty"):
        return "" if path else LOSS_MODULE
    return path.removeprefix(_MODEL)


def _leaves(value: Any) -> list[fx.Node]:
    if isinstance(value, fx.Node):
        return [value]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    return []


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)
