"""Read an fx graph of ATen calls as `Terms` (`read_graph`); convert convolutions to channels last (`channels_last`).

Calls of undeclared operators become opaque nodes. An in-place write is read as a pure operator if the difference cannot
be observed: the memory is neither an input's nor an attribute's, and later calls read only the written value. All other
calls that write, that touch written memory, or that draw random numbers keep their order by a token.
"""

from __future__ import annotations

import copy
import math
import operator
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from meshwright.capture.call_facts import draws_random, written_and_aliased
from meshwright.rewrite.calculus import IllTypedError
from meshwright.rewrite.fx.aten_in import CONVERTERS, IN_PLACE, expected_type
from meshwright.rewrite.terms import TOKEN, InputKind, TensorType, Terms
from meshwright.spec import RewriteError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


aten = torch.ops.aten


# In channels last, the channels of a point are adjacent in memory, the preferred layout of oneDNN's kernels. Which
# layout is faster depends on the sizes, so that a graph is written in both and timed. Grappler's layout pass puts
# transposes around each operator and cancels pairs of them; torch keeps the layout in strides, so that only inputs of
# convolutions are converted, without a copy if they already have it.
def channels_last(module: fx.GraphModule) -> fx.GraphModule | None:
    """Return a copy of a module whose 2-d convolutions run in channels last; None if there are no such convolutions.

    Outputs stay contiguous. The convolutions read copies of their weights, so the weights must be frozen (inference).
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


_FLOATS = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadGraph:
    """An fx graph that was read as terms.

    ``calls``: by key of an opaque node, its call. ``holders``: by name, the parameters, buffers and other attributes
    that the graph reads. ``effects``: the term of the last token (the order of writes and random draws), which a
    written graph has to keep; None if there are no such calls. ``fresh``: for each output, True if no input, attribute
    or other output shares its memory.
    """

    terms: Terms
    calls: Mapping[str, fx.Node]
    holders: Mapping[str, Any]
    effects: int | None
    fresh: tuple[bool, ...]


class Reader:
    """What a converter receives besides the call's arguments: the terms read so far, and the types of torch's results.

    ``name``: the ATen operator of the call. ``results``: the types of its results.
    """

    def __init__(self, *, training: bool) -> None:
        self.terms = Terms()
        self.training = training
        self.name = ""
        self.results: tuple[TensorType, ...] = ()

    @property
    def result(self) -> TensorType:
        """The type of the call's first result."""
        return self.results[0]

    def shape(self, term: int) -> tuple[int, ...]:
        """Return the shape of a term."""
        return self.terms.types[term].shape

    def dtype(self, term: int) -> str:
        """Return the dtype of a term, as a name without "torch."."""
        return self.terms.types[term].dtype

    def is_float(self, term: int) -> bool:
        """Return whether a term's dtype is a floating-point dtype."""
        return self.dtype(term) in _FLOATS

    def given(self, *terms: int | None) -> tuple[int, ...]:
        """Return the optional operands that precede the first missing (None) one."""
        found = []
        for term in terms:
            if term is None:
                break
            found.append(term)
        return tuple(found)

    def full(self, type_: TensorType, value: float) -> int | None:
        """Return a float32 tensor in which every element is ``value``; None for other dtypes and for -0.0.

        With tensors of another dtype, torch does not round a scalar to float32 (0.1 with float64 is another number) or
        to the tensor's dtype (bfloat16), so no term is equivalent. -0.0 compares equal to 0.0 but is a different value.
        """
        if type_.dtype != "float32" or (value == 0 and math.copysign(1.0, value) < 0):
            return None
        return self.terms.apply("full", shape=type_.shape, value=float(value))

    def broadcast(self, term: int, shape: Sequence[int]) -> int:
        """Return the term broadcast to a shape."""
        shape = tuple(shape)
        return term if self.shape(term) == shape else self.terms.apply("broadcast", term, shape=shape)

    def reshape(self, term: int, shape: Sequence[int]) -> int:
        """Return the term reshaped to a shape."""
        shape = tuple(shape)
        return term if self.shape(term) == shape else self.terms.apply("reshape", term, shape=shape)

    def cut(self, term: int, axis: int, start: int, stop: int) -> int:
        """Return the slice ``start <= index < stop`` of dim ``axis``."""
        whole = (start, stop) == (0, self.shape(term)[axis])
        return term if whole else self.terms.apply("slice", term, axis=axis, start=start, stop=stop)

    def together(self, one: Any, two: Any) -> tuple[int, int] | None:
        """Return two floating-point operands, one of which may be a number, broadcast to their common shape.

        Returns None if an operand is not floating-point, the dtypes differ, or the number has no equivalent (`full`).
        """
        terms = [item for item in (one, two) if isinstance(item, _Term)]
        if not terms or not all(self.is_float(term) for term in terms):
            return None
        if len(terms) == 1:
            number = two if terms[0] is one else one
            if isinstance(number, bool) or not isinstance(number, int | float):
                return None
            constant = self.full(self.terms.types[terms[0]], number)
            if constant is None:
                return None
            return (one, constant) if terms[0] is one else (constant, two)
        if self.dtype(one) != self.dtype(two):
            return None
        shape = torch.broadcast_shapes(self.shape(one), self.shape(two))
        return self.broadcast(one, shape), self.broadcast(two, shape)


class _Term(int):
    """A term among a call's arguments, which may also be whole numbers."""


def read_graph(module: fx.GraphModule, *, training: bool, kinds: Mapping[str, InputKind] | None = None) -> ReadGraph:
    """Read a graph of ATen calls as terms; each node needs a fake tensor in ``meta["val"]``.

    ``training``: keep calls that only affect gradients. ``kinds``: by attribute name, "parameter", "buffer" or
    "constant" (the default). Raises RewriteError for symbolic sizes, for nodes that are not ATen calls, and for outputs
    that are not tensors.
    """
    kept: set[fx.Node] = set()
    while True:
        try:
            return _Reading(module, training, kinds or {}, kept).run()
        except _AgainError as again:
            kept.add(again.node)


class _AgainError(Exception):
    """The graph must be read again, with a call kept as it is."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(node.name)
        self.node = node


# Calls that are omitted, because they only move numbers in memory.
_COPIES = ("aten.contiguous.default", "aten.clone.default")


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


class _Reading:
    def __init__(
        self, module: fx.GraphModule, training: bool, kinds: Mapping[str, InputKind], kept: set[fx.Node]
    ) -> None:
        self._module, self._kinds, self._kept = module, kinds, kept
        # By memory: omitted calls whose results are that memory or views of it.
        self._copies: dict[fx.Node, list[fx.Node]] = {}
        self._reader = Reader(training=training)
        self._env: dict[fx.Node, Any] = {}
        self._calls: dict[str, fx.Node] = {}
        self._holders: dict[str, Any] = {}
        self._token: int | None = None
        self._memory = _Memory(module.graph, kept)

    def run(self) -> ReadGraph:
        for node in self._module.graph.nodes:
            if node.op == "placeholder":
                self._env[node] = self._input(node, node.name, "batch")
            elif node.op == "get_attr":
                self._env[node] = self._attribute(node)
            elif node.op == "call_function":
                self._env[node] = self._call(node)
            elif node.op == "output":
                self._reader.terms.outputs = tuple(self._output(leaf) for leaf in node.args[0])
            else:
                raise RewriteError(
                    f"The graph has a node {node.name!r} of op {node.op!r}; expected only inputs, attributes and calls "
                    "of ATen operators."
                )
        return ReadGraph(
            terms=self._reader.terms,
            calls=self._calls,
            holders=self._holders,
            effects=self._token,
            fresh=self._memory.fresh_outputs(),
        )

    def _input(self, node: fx.Node, name: str, kind: InputKind) -> Any:
        return _Term(self._reader.terms.input(name, expected_type(_look(node)), kind))

    def _attribute(self, node: fx.Node) -> Any:
        name = str(node.target)
        held: Any = self._module
        for part in name.split("."):
            held = getattr(held, part)
        self._holders[name] = held
        return self._input(node, name, self._kinds.get(name, "constant")) if isinstance(held, torch.Tensor) else name

    def _output(self, leaf: Any) -> int:
        value = self._env.get(leaf) if isinstance(leaf, fx.Node) else None
        if not isinstance(value, _Term):
            raise RewriteError(f"The graph returns {leaf!r}; expected only tensors as outputs.")
        return value

    def _call(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            source, place = node.args
            return self._env[source][place]  # type: ignore[index]
        looks = _looks(node)
        pinned = self._memory.is_pinned(node)
        if looks is not None and not pinned and node not in self._kept:
            found = self._converted(node, tuple(map(expected_type, looks)))
            if found is not None:
                return found
        if not pinned and _writes(node):
            # It was read as a separate value, but has no equivalent here: all that it touches keeps its order.
            raise _AgainError(node)
        for operand in node.all_input_nodes:
            # An unknown call may depend on the memory layout of its operands.
            for copied in self._copies.get(self._memory.root(operand), ()):
                raise _AgainError(copied)
        return self._opaque(node, looks, pinned)

    def _converted(self, node: fx.Node, types: tuple[TensorType, ...]) -> Any:
        name = str(node.target)
        converter = CONVERTERS.get(IN_PLACE.get(name, name))
        if converter is None:
            return None
        reader = self._reader
        reader.name, reader.results = name, types
        try:
            found = converter(reader, self._arguments(node))
        except (
            IllTypedError,
            RuntimeError,
            KeyError,
            IndexError,
            TypeError,
            ValueError,
            AssertionError,
            ArithmeticError,
        ):
            found = None
        if found is None:
            return None
        results = found if isinstance(found, tuple) else (found,)
        if tuple(reader.terms.types[term] for term in results) != types:
            return None
        several = isinstance(found, tuple)
        if name in _COPIES:
            self._copies.setdefault(self._memory.root(node), []).append(node)
        made = tuple(_Term(term) for term in results)
        self._memory.rename(node, made[0] if not several else None, self._env)
        return made if several else made[0]

    def _arguments(self, node: fx.Node) -> dict[str, Any]:
        schema = node.target._schema  # type: ignore[union-attr]
        values = fx.node.map_arg((node.args, node.kwargs), self._env.__getitem__)
        named = {argument.name: value for argument, value in zip(schema.arguments, values[0], strict=False)}
        return {**named, **values[1]}

    def _opaque(self, node: fx.Node, looks: Sequence[torch.Tensor] | None, pinned: bool) -> Any:
        """The call as it is; its tensors are operands, in order of its arguments."""
        key = node.name
        self._calls[key] = node
        operands: list[int] = []

        def collect(leaf: fx.Node) -> fx.Node:
            values = self._env[leaf]
            operands.extend(
                item for item in (values if isinstance(values, tuple) else (values,)) if isinstance(item, _Term)
            )
            return leaf

        fx.node.map_arg((node.args, node.kwargs), collect)
        terms = self._reader.terms
        types = [expected_type(look) for look in looks or ()]
        if pinned:
            operands += () if self._token is None else (self._token,)
            types = [*types, TOKEN]
        several = isinstance(node.meta["val"], tuple | list)
        made = terms.opaque(key, operands, types or [TOKEN], several=several)
        if pinned:
            self._token = made[-1]
            made = made[:-1]
        results = tuple(_Term(term) for term in made)
        return results if several or not results else results[0]


class _Memory:
    """Which nodes share memory, and which of them are written in a way that makes order matter."""

    def __init__(self, graph: fx.Graph, kept: set[fx.Node]) -> None:
        """``kept``: calls without an equivalent, kept as torch's calls."""
        self._kept = kept
        self._group: dict[fx.Node, fx.Node] = {}
        self._made_in: dict[fx.Node, int] = {}
        self._pinned: set[fx.Node] = set()
        nodes = list(graph.nodes)
        self._place = {node: i for i, node in enumerate(nodes)}
        writes: dict[fx.Node, list[tuple[fx.Node, fx.Node]]] = {}
        for node in nodes:
            self._group[node] = node
            if node.op != "call_function":
                continue
            if node.target is operator.getitem:
                self._join(node, node.args[0])
                continue
            written, aliased = written_and_aliased(node.target, node.args, node.kwargs, fx.Node)
            for other in aliased:
                self._join(node, other)
            for other in written:
                writes.setdefault(other, []).append((node, other))
            if draws_random(node.target, node.args, node.kwargs):
                self._pinned.add(node)
        groups: dict[fx.Node, list[tuple[fx.Node, fx.Node]]] = {}
        for pairs in writes.values():
            for pair in pairs:
                groups.setdefault(self.root(pair[1]), []).append(pair)
        for root, pairs in groups.items():
            if not self._is_private(root, pairs):
                self._pinned.update(
                    node
                    for node in nodes
                    if node.op == "call_function"
                    and any(self.root(item) is root for item in (node, *node.all_input_nodes))
                )

    def fresh_outputs(self) -> tuple[bool, ...]:
        """For each output, whether no input, attribute or other output shares its memory."""
        nodes = list(self._group)
        given = {self.root(node) for node in nodes if node.op in ("placeholder", "get_attr")}
        (output,) = (node for node in nodes if node.op == "output")
        roots = [self.root(leaf) if isinstance(leaf, fx.Node) else None for leaf in output.args[0]]  # type: ignore[union-attr]
        return tuple(root is not None and root not in given and roots.count(root) == 1 for root in roots)

    def is_pinned(self, node: fx.Node) -> bool:
        """Whether the call must keep its position."""
        return node in self._pinned

    def rename(self, node: fx.Node, result: Any, env: dict[fx.Node, Any]) -> None:
        """Let later readers of a value that is written in place read the result of the write."""
        if result is not None and str(node.target) in IN_PLACE:
            env[node.args[0]] = result  # type: ignore[index]

    def _is_private(self, root: fx.Node, pairs: list[tuple[fx.Node, fx.Node]]) -> bool:
        """Whether in-place writes to a group of values are indistinguishable from creating new values."""
        members = [node for node in self._group if self.root(node) is root]
        if any(node.op in ("placeholder", "get_attr") for node in members):
            return False
        for writer, written in pairs:
            if writer in self._kept or str(writer.target) not in IN_PLACE or writer.args[0] is not written:
                return False
            place = self._place[writer]
            for member in members:
                old_view = self._place[member] < place and member is not written and member is not root
                stale = member is root and written is not root
                if (old_view or stale) and any(self._place[user] > place for user in member.users):
                    return False
        return True

    def _join(self, node: fx.Node, other: Any) -> None:
        if isinstance(other, fx.Node):
            self._group[self.root(node)] = self.root(other)

    def root(self, node: fx.Node) -> fx.Node:
        """The representative of all nodes that share the node's memory."""
        while self._group[node] is not node:
            node = self._group[node]
        return node


def _look(node: fx.Node) -> torch.Tensor:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise RewriteError(f"Node {node.name!r} has no fake tensor in meta['val']; run FakeTensorProp on the graph.")
    return value


def _looks(node: fx.Node) -> list[torch.Tensor] | None:
    """Fake values of the call's results; None if one of them is not a tensor."""
    value = node.meta.get("val")
    every = list(value) if isinstance(value, tuple | list) else [value]
    leaves = [leaf for leaf in every if isinstance(leaf, torch.Tensor)]
    if any(not isinstance(size, int) for leaf in leaves for size in leaf.shape):
        raise RewriteError(
            f"Node {node.name!r} of the graph has sizes that depend on the batch "
            f"({[tuple(leaf.shape) for leaf in leaves]}); rewriting needs fixed sizes. Give an example batch of the "
            "size for which the model is rewritten."
        )
    return leaves if len(leaves) == len(every) else None
