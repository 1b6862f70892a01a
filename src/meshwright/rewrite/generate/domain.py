"""The domain of the rule generator: the tensors, sizes and operators (with attributes) from which terms are built.

Sizes are named, and each name has a number. Sizes of different meaning have different numbers, so that few terms are
equal by accident. Terms that are equal for one set of numbers but not for another do not become a rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from meshwright.rewrite.expressions import parse_attribute
from meshwright.rewrite.operators import OPERATORS
from meshwright.spec import RewriteError, suggest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class OperatorStep:
    """One way to build a term: an operator with fixed attributes (which may be formulas in named sizes).

    ``takes``: for each operand, the kinds of tensors that it may be (`Domain.kind`). ``commutes``: True if the order of
    the operands does not matter.
    """

    operator: str
    takes: tuple[frozenset[str], ...]
    attributes: tuple[tuple[str, Any], ...] = ()
    commutes: bool = False

    @property
    def num_operands(self) -> int:
        """The number of operands of the operator."""
        return len(self.takes)


@dataclass(frozen=True, slots=True)
class Domain:
    """The domain of an enumeration.

    ``sizes``: (name, number) pairs. ``tensors``: (name, shape) pairs; a shape consists of names of sizes and of
    numbers. ``steps``: the operators with attributes that build terms.
    """

    sizes: tuple[tuple[str, int], ...]
    tensors: tuple[tuple[str, tuple[str | int, ...]], ...]
    steps: tuple[OperatorStep, ...]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor ``name``, in numbers."""
        sizes = dict(self.sizes)
        return tuple(sizes[size] if isinstance(size, str) else size for size in dict(self.tensors)[name])

    def kind(self, shape: tuple[int, ...]) -> str:
        """Return the kind of a tensor by its shape: "number", "vector", "matrix", "image", "kernel" or "other".

        Of tensors with 4 dims, those whose first size is a multiple of ``sizes["c"]`` are kernels, others are images.
        """
        if len(shape) == 4:
            return "kernel" if shape[0] % dict(self.sizes)["c"] == 0 else "image"
        return ("number", "vector", "matrix", "other")[min(len(shape), 3)]


_ANY = "number vector matrix image kernel"
_LARGE = "matrix image kernel"


def _step(operator: str, *takes: str, commutes: bool = False, **attributes: str) -> OperatorStep:
    return _parsed(operator, takes, attributes, commutes=commutes)


def _parsed(
    operator: str, takes: Sequence[str], attributes: Mapping[str, str], *, commutes: bool = False
) -> OperatorStep:
    parsed = tuple((name, parse_attribute(text)) for name, text in attributes.items())
    return OperatorStep(operator, tuple(frozenset(kinds.split()) for kinds in takes), parsed, commutes)


def _conv(padding: str) -> OperatorStep:
    return _step("conv2d", "image", "kernel", stride="(1, 1)", padding=padding, dilation="(1, 1)", groups="1")


def usual_domain(*more: OperatorStep, **sizes: int) -> Domain:
    """Return the domain of the shipped rules: operators over matrices, a number, images and kernels.

    ``more``: additional steps. ``sizes``: numbers that replace the default sizes: m rows, k inner size, n columns, c
    channels, h height and width.
    """
    numbers = {"m": 2, "k": 3, "n": 5, "c": 3, "h": 4, **sizes}
    return Domain(
        sizes=tuple(numbers.items()),
        tensors=(
            *((name, ("m", "k")) for name in ("x", "y", "z")),
            *((name, ("k", "n")) for name in ("v", "w")),
            ("u", ("n", "m")),
            ("s", ()),
            *((name, (1, "c", "h", "h")) for name in ("a", "b")),
            *((name, ("c", "c", 3, 3)) for name in ("e", "f")),
            ("g", ("c", "c", 1, 1)),
        ),
        steps=(
            _step("add", _ANY, _ANY, commutes=True),
            _step("sub", _ANY, _ANY),
            _step("mul", _ANY, _ANY, commutes=True),
            _step("maximum", _ANY, _ANY, commutes=True),
            _step("neg", _ANY),
            _step("relu", _ANY),
            _step("tanh", _ANY),
            _step("square", _ANY),
            _step("matmul", "matrix", "matrix"),
            _step("transpose", "matrix", order="(1, 0)"),
            _step("concat", _LARGE, _LARGE, axis="0"),
            _step("concat", _LARGE, _LARGE, axis="1"),
            _step("slice", "matrix", axis="0", start="0", stop="m"),
            _step("slice", "matrix", axis="0", start="m", stop="m + m"),
            _step("slice", "matrix", axis="1", start="0", stop="k"),
            _step("slice", "matrix", axis="1", start="k", stop="k + k"),
            _step("sum", "matrix", axis="1", keep="False"),
            _step("softmax", "matrix", axis="1"),
            _step("broadcast", "number vector matrix", shape="(m, k)"),
            _step("broadcast", "number vector matrix", shape="(m, n)"),
            _conv("(1, 1)"),
            _conv("(0, 0)"),
            _step("avg_pool2d", "image", kernel="(3, 3)", stride="(1, 1)", padding="(1, 1)"),
            _step("max_pool2d", "image", kernel="(3, 3)", stride="(1, 1)", padding="(1, 1)"),
            _step("pad", "kernel", low="(0, 0, 1, 1)", high="(0, 0, 1, 1)"),
            *more,
        ),
    )


# Default values of attributes: dims of a matrix, and the usual choices.
_USUAL_ATTRIBUTES = {"axis": ("0", "1"), "keep": ("False",), "order": ("(1, 0)",)}


def steps_for(name: str, attributes: Mapping[str, str] | None = None) -> list[OperatorStep]:
    """Return steps that apply a declared operator to matrices (an elementwise operator: to tensors of any kind).

    ``attributes``: values of attributes, as texts; axis, keep and order have default values. Raises RewriteError for an
    undeclared operator and for missing or unknown attributes.
    """
    if name not in OPERATORS:
        raise RewriteError(
            f"No operator {name!r} is declared{suggest(name, OPERATORS)}. Declare it, or give another name."
        )
    known, given = OPERATORS[name], dict(attributes or {})
    unknown = set(given) - set(known.attributes)
    missing = set(known.attributes) - set(given) - set(_USUAL_ATTRIBUTES)
    if unknown or missing:
        raise RewriteError(
            f"{name} has the attributes {list(known.attributes)}; {sorted(given)} were given, and {sorted(missing)} "
            "have no default value. Give exactly these attributes, as name=value."
        )
    options = [[given[item]] if item in given else list(_USUAL_ATTRIBUTES[item]) for item in known.attributes]
    kinds = _ANY if not known.attributes and known.fewest < 3 else "matrix"
    return [
        _parsed(name, [kinds] * max(1, known.fewest), dict(zip(known.attributes, chosen, strict=True)))
        for chosen in product(*options)
    ]
