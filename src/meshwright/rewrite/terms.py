"""`Terms`: the graph that is rewritten, as a list of nodes (an operator applied to operands).

A term is the index of a node in that list. Equal nodes are stored once, so common subexpressions cannot occur twice.
Beside the declared operators there are three special ones: ``input`` (an input or weight of the graph), ``opaque`` (an
undeclared torch call, kept unchanged) and ``item`` (one of several results of an opaque node). Opaque nodes that draw
random numbers or write to memory keep their order by a token: each reads the token of the previous one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from meshwright.rewrite.calculus import Arrays, Doubles, IllTypedError, Indexed
from meshwright.rewrite.operators import OPERATORS, Operator
from meshwright.rewrite.rules import kind_of
from meshwright.spec import RewriteError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


INPUT, OPAQUE, ITEM = "input", "opaque", "item"
InputKind = Literal["batch", "parameter", "buffer", "constant"]
TOKEN_DTYPE = "token"


class TensorType(NamedTuple):
    """Shape and dtype of a tensor; ``dtype`` is a torch dtype's name without "torch.", or "token"."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{'x'.join(map(str, self.shape))}]"


TOKEN = TensorType((), TOKEN_DTYPE)


class TermNode(NamedTuple):
    """An operator applied to terms; ``attributes`` has (name, value) pairs in the operator's order."""

    operator: str
    operands: tuple[int, ...] = ()
    attributes: tuple[tuple[str, Any], ...] = ()

    def attribute(self, name: str) -> Any:
        """Return the value of the attribute ``name``."""
        return dict(self.attributes)[name]


@dataclass(slots=True, eq=False)
class Terms:
    """A graph of terms: ``types[i]`` is the type of the result of ``nodes[i]``; ``outputs`` are the graph's outputs."""

    nodes: list[TermNode] = field(default_factory=list)
    types: list[TensorType] = field(default_factory=list)
    outputs: tuple[int, ...] = ()
    _known: dict[TermNode, int] = field(default_factory=dict)

    def input(self, name: str, type_: TensorType, kind: InputKind) -> int:
        """Add an input tensor or a stored tensor (parameter, buffer, constant); return its term."""
        return self.add(TermNode(INPUT, (), (("name", name), ("kind", kind))), type_)

    def apply(self, operator: str, *operands: int, **attributes: Any) -> int:
        """Apply a declared operator to terms; return the result's term.

        Raises IllTypedError if the operator does not accept operands of these shapes or dtypes.
        """
        declared = OPERATORS[operator]
        node = TermNode(operator, operands, tuple((name, attributes[name]) for name in declared.attributes))
        if node in self._known:
            return self._known[node]
        return self.add(node, type_of(node, [self.types[i] for i in operands]))

    def opaque(
        self, key: str, operands: Iterable[int], types: Sequence[TensorType], *, several: bool = False
    ) -> tuple[int, ...]:
        """Add an undeclared torch call whose results have the given types; return one term for each result.

        ``key`` identifies the call when the graph is written. ``several``: the call returns a tuple, even if it has
        only one result.
        """
        node = TermNode(OPAQUE, tuple(operands), (("key", key),))
        if len(types) == 1 and not several:
            return (self.add(node, types[0]),)
        whole = self.add(node, TOKEN)
        return tuple(
            self.add(TermNode(ITEM, (whole,), (("place", place),)), type_) for place, type_ in enumerate(types)
        )

    def needed(self, outputs: Iterable[int] | None = None) -> list[int]:
        """Return the terms from which ``outputs`` are computed, operands first; by default those of the graph."""
        marked = set()
        todo = list(self.outputs if outputs is None else outputs)
        while todo:
            term = todo.pop()
            if term not in marked:
                marked.add(term)
                todo += self.nodes[term].operands
        return sorted(marked)

    def inputs(self) -> Iterator[int]:
        """Yield the terms of input nodes (inputs of the model and stored tensors), in order."""
        return (i for i, node in enumerate(self.nodes) if node.operator == INPUT)

    def add(self, node: TermNode, type_: TensorType) -> int:
        """Add a node whose result has the type ``type_``; return its term, which may exist already."""
        if node in self._known:
            return self._known[node]
        if any(size < 0 for size in type_.shape):
            raise RewriteError(f"{node.operator} would have the sizes {type_.shape}; sizes must be at least 0.")
        self._known[node] = len(self.nodes)
        self.nodes.append(node)
        self.types.append(type_)
        return len(self.nodes) - 1


def type_of(node: TermNode, operands: Sequence[TensorType]) -> TensorType:
    """Return the type of a declared operator's result for operands of these types.

    Raises IllTypedError if the operator does not accept them.
    """
    return _typed(node.operator, tuple(operands), node.attributes)


@cache
def _typed(operator: str, operands: tuple[TensorType, ...], attributes: tuple[tuple[str, Any], ...]) -> TensorType:
    declared = OPERATORS[operator]
    values = dict(attributes)
    declared.check(len(operands), values)
    tensors = [Indexed(type_.shape, _unread) for type_ in operands]
    _check_kinds(declared, operands)
    try:
        result = declared.define(Arrays(Doubles()), *tensors, **values)
    except (IndexError, ValueError, TypeError) as error:
        raise IllTypedError(f"{operator}: {error}") from error
    dtype = {"bool": "bool", "attribute": values.get("dtype", "")}.get(declared.dtype)
    if dtype is None:
        dtype = operands[_DTYPE_FROM.get(operator, 0)].dtype if operands else "float32"
    return TensorType(tuple(int(size) for size in result.shape), dtype)


# The operand that has the result's dtype, if not the first.
_DTYPE_FROM = {"where": 1}


def _check_kinds(declared: Operator, operands: tuple[TensorType, ...]) -> None:
    """Raise IllTypedError for operands of a kind that the operator does not accept."""
    kinds = [kind_of(type_.dtype) for type_ in operands]
    if declared.name == "where":
        fits = kinds[0] == kind_of("bool") and operands[1].dtype == operands[2].dtype
    elif declared.name == "embedding":
        fits = kinds[1] == kind_of("int64")
    elif declared.takes == "any":
        fits = len({type_.dtype for type_ in operands}) < 2
    else:
        wanted = kind_of("float32" if declared.takes == "number" else "bool")
        fits = all(kind == wanted for kind in kinds) and len({type_.dtype for type_ in operands}) < 2
    if not fits:
        raise IllTypedError(f"{declared.name} cannot take the dtypes {', '.join(type_.dtype for type_ in operands)}")


def _unread(*_: Any) -> Any:
    raise AssertionError("a shape needs no numbers")
