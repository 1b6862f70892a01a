"""Expressions: the two sides of a rule, in the syntax of Python calls; they are parsed, never executed as Python.

    matmul(x, concat(y, z, axis=1))

Positional arguments are tensors: names or calls. Keyword arguments are attributes: numbers, strings, ``True``,
``False``, tuples, names, formulas with ``+ - * //``, and the functions of `ATTRIBUTE_FUNCTIONS` and
`SHAPE_FUNCTIONS`. A name in an attribute is a **letter**: a symbol that stands for any value.
"""

from __future__ import annotations

import ast
import math
import operator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias

from meshwright.rewrite.calculus import Arithmetic, IllTypedError, Indexed
from meshwright.rewrite.calculus.whole import Inverse, Polynomial
from meshwright.rewrite.operators import OPERATORS
from meshwright.spec import RewriteError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


_MOST_CHARACTERS = 4096
_MOST_OPERATORS = 64
_MOST_LEVELS = 128
_LARGEST = 2**40


@dataclass(frozen=True, slots=True)
class Name:
    """An operand of a rule: a tensor, by its name."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Call:
    """An operator applied to operands; ``attributes`` has (name, value) pairs in the operator's order."""

    operator: str
    operands: tuple[Expression, ...]
    attributes: tuple[tuple[str, Attribute], ...] = ()

    def __str__(self) -> str:
        named = [f"{name}={_attribute_text(value)}" for name, value in self.attributes]
        return f"{self.operator}({', '.join([*map(str, self.operands), *named])})"


@dataclass(frozen=True, slots=True)
class Formula:
    """A symbolic attribute: a letter, or a function of attributes.

    For a letter, ``function`` is "" and ``arguments`` holds its name. Else ``function`` is a sign of ``+ - * //`` or a
    function's name.
    """

    function: str
    arguments: tuple[Any, ...]

    def __str__(self) -> str:
        if not self.function:
            return str(self.arguments[0])
        texts = [_attribute_text(argument) for argument in self.arguments]
        if self.function in _SIGNS and len(texts) == 2:
            return f"({texts[0]} {self.function} {texts[1]})"
        return f"{self.function}({', '.join(texts)})"


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison of two attributes; ``sign`` is one of ``== != <= <``."""

    left: Attribute
    sign: str
    right: Attribute

    def holds(self, tensors: Mapping[str, Indexed], letters: Mapping[str, Any]) -> bool:
        """Return whether the condition holds for these tensors (only shapes are read) and values of letters."""
        sides = value_of(self.left, tensors, letters), value_of(self.right, tensors, letters)
        return bool(COMPARISONS[self.sign](*sides))

    def __str__(self) -> str:
        return f"{_attribute_text(self.left)} {self.sign} {_attribute_text(self.right)}"


Expression: TypeAlias = "Name | Call"
Attribute: TypeAlias = "int | float | str | bool | Formula | tuple[Attribute, ...]"

_SIGNS: dict[str, Callable[..., Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
}


COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def _undo(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(dim) for dim in range(len(order)))


def _compose(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    """The order of transposing by the first and then by the second."""
    return tuple(first[dim] for dim in second)


def _swap_last(rank: int) -> tuple[int, ...]:
    return (*range(rank - 2), rank - 1, rank - 2)


def _inverse(number: Any) -> Any:
    """One divided by a number that is not 0."""
    if isinstance(number, Polynomial):
        return Inverse(number)
    if not number or not math.isfinite(number):
        raise IllTypedError(f"1 / {number} is not a finite number")
    found = Fraction(1, number) if isinstance(number, int) else 1 / number
    if not math.isfinite(found):
        raise IllTypedError(f"1 / {number} is not a finite number")
    return found


ATTRIBUTE_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **_SIGNS,
    "undo": _undo,
    "compose": _compose,
    "swap_last": _swap_last,
    "place": lambda order, dim: order.index(dim),
    "at": lambda values, dim: values[dim],
    "put": lambda values, dim, value: (*values[:dim], value, *values[dim + 1 :]),
    "permuted": lambda values, order: tuple(values[dim] for dim in order),
    "join": lambda one, other: (*one, *other),
    "without": lambda values, dim: (*values[:dim], *values[dim + 1 :]),
    "added": lambda one, other: tuple(a + b for a, b in zip(one, other, strict=True)),
    "zeros": lambda count: (0,) * count,
    "inverse": _inverse,
}

# Functions of tensors' shapes; attributes refer to the tensors by name.
SHAPE_FUNCTIONS = ("shape", "rank", "size")


def names_of(expression: Expression) -> Iterator[str]:
    """Yield the names of an expression's tensors, possibly repeated; first operands, then those in shape functions."""
    yield from given_names(expression)
    yield from shape_names(expression)


def given_names(expression: Expression) -> Iterator[str]:
    """Yield the names of the tensors that are operands in an expression, in order, possibly repeated."""
    if isinstance(expression, Name):
        yield expression.name
        return
    for operand in expression.operands:
        yield from given_names(operand)


def shape_names(expression: Expression) -> Iterator[str]:
    """Yield the names of the tensors whose shapes the attributes of an expression read, possibly repeated."""
    if isinstance(expression, Name):
        return
    for operand in expression.operands:
        yield from shape_names(operand)
    for _, value in expression.attributes:
        yield from _read_names(value)


def letters_of(expression: Expression) -> Iterator[tuple[str, str]]:
    """Yield (role, name) for each occurrence of a letter in the attributes of an expression.

    The role is "operator.attribute" if the letter is the whole attribute, and "" if the letter is a number inside a
    tuple or a formula.
    """
    if isinstance(expression, Name):
        return
    for operand in expression.operands:
        yield from letters_of(operand)
    for attribute, value in expression.attributes:
        whole = isinstance(value, Formula) and not value.function
        for name in _formula_names(value):
            yield f"{expression.operator}.{attribute}" if whole else "", name


def num_operators(expression: Expression) -> int:
    """Return the number of distinct operator calls in an expression."""
    return len(set(_calls(expression)))


def run(
    expression: Expression,
    machine: Arithmetic,
    tensors: Mapping[str, Indexed],
    letters: Mapping[str, Any],
    made: dict[Expression, Indexed] | None = None,
    keep: Callable[[Indexed], Indexed] = lambda result: result,
) -> Indexed:
    """Evaluate an expression with the arithmetic ``machine`` (such as `Arrays`), tensors by name, and letters' values.

    ``made`` caches the results of calls by expression. ``keep`` is applied to each call's result before it is cached.
    Raises IllTypedError if an operator does not accept its operands; a symbolic machine may raise SizesDifferError,
    RefineError or NotExpressibleError instead.
    """
    made = {} if made is None else made
    if isinstance(expression, Name):
        return tensors[expression.name]
    if expression not in made:
        operands = [run(operand, machine, tensors, letters, made, keep) for operand in expression.operands]
        declared = OPERATORS[expression.operator]
        try:
            attributes = {name: value_of(value, tensors, letters) for name, value in expression.attributes}
            declared.check(len(operands), attributes)
            made[expression] = keep(declared.define(machine, *operands, **attributes))
        except (TypeError, AttributeError, LookupError, ArithmeticError, ValueError) as error:
            # An attribute of the wrong type: a string for a number, one number for two.
            raise IllTypedError(f"{expression}: {error}") from error
    return made[expression]


def value_of(attribute: Attribute, tensors: Mapping[str, Indexed], letters: Mapping[str, Any]) -> Any:
    """Return the value of an attribute, for given tensors (only their shapes are read) and values of letters."""
    if isinstance(attribute, tuple):
        return tuple(value_of(item, tensors, letters) for item in attribute)
    if not isinstance(attribute, Formula):
        return attribute
    if not attribute.function:
        return letters[attribute.arguments[0]]
    if attribute.function in SHAPE_FUNCTIONS:
        tensor = tensors[attribute.arguments[0].arguments[0]]
        if attribute.function == "shape":
            return tensor.shape
        if attribute.function == "rank":
            return tensor.rank
        return tensor.shape[value_of(attribute.arguments[1], tensors, letters)]
    values = [value_of(item, tensors, letters) for item in attribute.arguments]
    return ATTRIBUTE_FUNCTIONS[attribute.function](*values)


def parse(text: str) -> Expression:
    """Return the expression that ``text`` describes. Raises RewriteError, with the reason, for an invalid text."""
    found = _read(_tree(text), text)
    if num_operators(found) > _MOST_OPERATORS:
        raise RewriteError(f"{text!r} has more than {_MOST_OPERATORS} operators, the most that a rule's side may have.")
    return found


_COMPARISONS: dict[type[ast.cmpop], tuple[str, bool]] = {
    ast.Eq: ("==", False),
    ast.NotEq: ("!=", False),
    ast.LtE: ("<=", False),
    ast.Lt: ("<", False),
    ast.GtE: ("<=", True),
    ast.Gt: ("<", True),
}


def parse_attribute(text: str) -> Attribute:
    """Return the attribute that ``text`` describes. Raises RewriteError, with the reason, for an invalid text."""
    return _read_attribute(_tree(text), text)


def parse_condition(text: str) -> Condition:
    """Return the condition (a comparison of attributes) that ``text`` describes.

    ``>`` and ``>=`` become ``<`` and ``<=`` with exchanged sides. Raises RewriteError, with the reason, for an invalid
    text.
    """
    tree = _tree(text)
    if not (isinstance(tree, ast.Compare) and len(tree.ops) == 1 and type(tree.ops[0]) in _COMPARISONS):
        raise RewriteError(f"{text!r} is not a condition; write it like size(x, 0) == 1, with one of == != <= < >= >.")
    left, right = _read_attribute(tree.left, text), _read_attribute(tree.comparators[0], text)
    sign, turned = _COMPARISONS[type(tree.ops[0])]
    return Condition(right, sign, left) if turned else Condition(left, sign, right)


def condition_names(condition: Condition) -> tuple[set[str], set[str]]:
    """Return two sets of names: the tensors whose shapes a condition reads, and the letters that it contains."""
    sides = (condition.left, condition.right)
    return {n for side in sides for n in _read_names(side)}, {n for side in sides for n in _formula_names(side)}


def _tree(text: str) -> ast.expr:
    if len(text) > _MOST_CHARACTERS:
        raise RewriteError(f"An expression has {len(text)} characters; expected at most {_MOST_CHARACTERS}.")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RewriteError(f"{text!r} is not an expression ({error}); write it like matmul(x, relu(y)).") from error
    # The reader and the hashes of its results recurse. Python's recursion limit does not bound that: other libraries
    # raise it.
    level: list[ast.AST] = [tree]
    for _ in range(_MOST_LEVELS):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return tree
    raise RewriteError(f"{text[:80]!r}… is nested more than {_MOST_LEVELS} levels deep, the most that is allowed.")


def _read(tree: ast.expr, text: str) -> Expression:
    if isinstance(tree, ast.Name):
        return Name(tree.id)
    if not (isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name)):
        raise RewriteError(
            f"{ast.unparse(tree)!r} in {text!r} is not a tensor; write a name like x, or a call like relu(x)."
        )
    name = tree.func.id
    if name not in OPERATORS:
        raise RewriteError(f"{text!r} uses the operator {name!r}, which is not declared; known: {sorted(OPERATORS)}.")
    known = OPERATORS[name]
    attributes = {item.arg or "": _read_attribute(item.value, text) for item in tree.keywords}
    if set(attributes) != set(known.attributes) or len(attributes) != len(tree.keywords):
        raise RewriteError(
            f"{ast.unparse(tree)!r} gives {name} the attributes {sorted(attributes)}; expected exactly "
            f"{list(known.attributes)}."
        )
    count = len(tree.args)
    if count < known.fewest or (known.most is not None and count > known.most):
        raise RewriteError(f"{ast.unparse(tree)!r} gives {name} {count} operands; expected {_counts(known)}.")
    return Call(
        name, tuple(_read(item, text) for item in tree.args), tuple((key, attributes[key]) for key in known.attributes)
    )


def _counts(known: Any) -> str:
    most = "or more" if known.most is None else f"to {known.most}"
    return str(known.fewest) if known.fewest == known.most else f"{known.fewest} {most}"


_BINARY = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//"}


def _read_attribute(tree: ast.expr, text: str) -> Attribute:
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int | float | str):
        if not isinstance(tree.value, str) and not abs(tree.value) <= _LARGEST:
            raise RewriteError(
                f"{text[:80]!r} has the number {ast.unparse(tree)}; expected a finite number from -2^40 to 2^40."
            )
        return tree.value
    if isinstance(tree, ast.Name):
        return Formula("", (tree.id,))
    if isinstance(tree, ast.Tuple):
        return tuple(_read_attribute(item, text) for item in tree.elts)
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        value = _read_attribute(tree.operand, text)
        return -value if isinstance(value, int | float) else Formula("-", (0, value))
    if isinstance(tree, ast.BinOp) and type(tree.op) in _BINARY:
        sides = (_read_attribute(tree.left, text), _read_attribute(tree.right, text))
        return Formula(_BINARY[type(tree.op)], sides)
    if (
        isinstance(tree, ast.Call)
        and isinstance(tree.func, ast.Name)
        and (tree.func.id in ATTRIBUTE_FUNCTIONS or tree.func.id in SHAPE_FUNCTIONS)
        and not tree.keywords
    ):
        return Formula(tree.func.id, tuple(_read_attribute(item, text) for item in tree.args))
    raise RewriteError(
        f"{ast.unparse(tree)!r} in {text!r} is not an attribute; expected a number, a name, a string, a tuple, "
        "a formula with + - * //, or a call of "
        f"{', '.join(sorted({*ATTRIBUTE_FUNCTIONS, *SHAPE_FUNCTIONS} - {*_SIGNS}))}."
    )


def _attribute_text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_attribute_text, value))}{',' if len(value) == 1 else ''})"
    return str(value) if isinstance(value, Formula) else repr(value)


def _formula_names(value: Attribute) -> Iterator[str]:
    if isinstance(value, tuple):
        for item in value:
            yield from _formula_names(item)
    elif isinstance(value, Formula):
        if not value.function:
            yield value.arguments[0]
        else:
            # The first argument of a function of shapes is a tensor's name.
            for item in value.arguments[value.function in SHAPE_FUNCTIONS :]:
                yield from _formula_names(item)


def _read_names(value: Attribute) -> Iterator[str]:
    for item in value if isinstance(value, tuple) else value.arguments if isinstance(value, Formula) else ():
        yield from _read_names(item)
    if isinstance(value, Formula) and value.function in SHAPE_FUNCTIONS:
        tensor = value.arguments[0] if value.arguments else None
        if not isinstance(tensor, Formula) or tensor.function:
            raise RewriteError(
                f"The first argument of {value} is not a tensor's name; expected a name, like {value.function}(x)."
            )
        yield tensor.arguments[0]


def _calls(expression: Expression) -> Iterator[Call]:
    if isinstance(expression, Call):
        yield expression
        for operand in expression.operands:
            yield from _calls(operand)
