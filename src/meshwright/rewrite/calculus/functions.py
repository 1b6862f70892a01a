"""Functions of numbers (exp, maximum, …): their values over floats and a prime field, and their known properties.

In the prime field, a function like exp is replaced by a random function with the known properties, so that a trial
finds only laws that follow from these properties. Elements of the field are ordered from -p/2 to p/2, so that laws of
order (maximum, greater, …) hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import erf
from typing import Any

import numpy as np

from meshwright.rewrite.calculus.sums import Applied, Total, named_alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function of numbers and its known properties.

    ``compute``: the function on float64 arrays. ``in_field``: the function on field elements from -p/2 to p/2; None: a
    random function is used. ``odd``: f(-x) = -f(x). ``even``: f(-x) = f(x). ``idempotent``: f(f(x)) = f(x). ``at_0``:
    f(0) if it is a whole number, else None. ``commutative``: f(x, y) = f(y, x).
    """

    compute: Callable[..., Any]
    in_field: Callable[..., Any] | None = None
    odd: bool = False
    even: bool = False
    idempotent: bool = False
    at_0: int | None = None
    commutative: bool = False


def _erf(x: Any) -> Any:
    return np.vectorize(erf, otypes=[np.float64])(x)


def _sigmoid(x: Any) -> Any:
    return 0.5 * (1 + np.tanh(0.5 * x))


FUNCTIONS: dict[str, Function] = {
    "exp": Function(compute=np.exp, at_0=1),
    "log": Function(compute=np.log),
    "sqrt": Function(compute=np.sqrt, at_0=0),
    "reciprocal": Function(compute=lambda x: 1 / x, odd=True),
    "tanh": Function(compute=np.tanh, odd=True, at_0=0),
    "erf": Function(compute=_erf, odd=True, at_0=0),
    "sin": Function(compute=np.sin, odd=True, at_0=0),
    "cos": Function(compute=np.cos, even=True, at_0=1),
    "sigmoid": Function(compute=_sigmoid),
    "sign": Function(compute=np.sign, in_field=np.sign, odd=True, idempotent=True, at_0=0),
    "floor": Function(compute=np.floor, idempotent=True, at_0=0),
    "ceil": Function(compute=np.ceil, idempotent=True, at_0=0),
    "round": Function(compute=np.round, idempotent=True, odd=True, at_0=0),
    "greater": Function(compute=lambda x, y: (x > y) * 1.0, in_field=lambda x, y: (x > y).astype(np.int64)),
    # For NaN, neither "greater" nor "less or equal" is true.
    "less_equal": Function(compute=lambda x, y: (x <= y) * 1.0, in_field=lambda x, y: (x <= y).astype(np.int64)),
    "equal": Function(
        compute=lambda x, y: (x == y) * 1.0, in_field=lambda x, y: (x == y).astype(np.int64), commutative=True
    ),
    "power": Function(compute=np.power),
    "bitcast": Function(compute=lambda x: x),
    # Rounding to a grid: the only known property of a cast is idempotence.
    "cast": Function(compute=lambda x: x, idempotent=True),
    "maximum": Function(compute=np.maximum, in_field=np.maximum, commutative=True),
}


def function_of(name: str) -> Function:
    """Return the function of a name. A name like ``cast:int8`` has the properties of ``cast``.

    Casts to different dtypes are different functions.
    """
    return FUNCTIONS[name.partition(":")[0]]


def salt_of(name: str) -> int:
    """Return a hash of a name, which selects the random function that replaces the named one in the field."""
    mixed = 0
    for letter in name:
        mixed = (mixed * 131 + ord(letter)) % 2**61
    return mixed


def known_value(name: str, arguments: Sequence[Total]) -> Total:
    """Return the normal form of a function applied to normal forms, simplified by the function's known properties."""
    function = function_of(name)
    first = arguments[0]
    if len(arguments) == 1:
        if function.at_0 is not None and not first.items:
            return Total.number(function.at_0)
        inner = first.only_atom
        if function.idempotent and isinstance(inner, Applied) and inner.function == name:
            return first
        if (function.odd or function.even) and _is_negative(first):
            turned = Total.atom(Applied(name, (first.scaled(-1),)))
            return turned.scaled(-1) if function.odd else turned
    if name == "less_equal":
        return Total.number(1) + Total.atom(Applied("greater", tuple(arguments))).scaled(-1)
    if name == "exp":
        return _exp(first)
    if name == "reciprocal":
        return _reciprocal(first)
    if function.commutative:
        arguments = sorted(arguments, key=_text)
    return Total.atom(Applied(name, tuple(arguments)))


def _is_negative(total: Total) -> bool:
    """Whether the first product, ordered by text, has a negative factor: true for exactly one of x and -x."""
    items = [(_text(Total({key: Fraction(1)})), factor) for key, factor in total.items]
    return bool(items) and min(items)[1] < 0


def _text(total: Total) -> str:
    return repr(named_alike(total))


def _exp(argument: Total) -> Total:
    """exp(a + b) = exp(a) · exp(b)."""
    result = Total.number(1)
    for key, factor in argument.items:
        whole = factor if factor.denominator == 1 and 0 < factor <= 4 else Fraction(1)
        item = Total({key: factor / whole})
        result = result * Total.atom(Applied("exp", (item,)), int(whole))
    return result


def _reciprocal(argument: Total) -> Total:
    """1/(a·b) = 1/a · 1/b, and 1/(1/a) = a."""
    if len(argument.items) != 1:
        return Total.atom(Applied("reciprocal", (argument,)))
    ((key, factor),) = argument.items
    if key.binders or key.guards:
        return Total.atom(Applied("reciprocal", (argument,)))
    result = Total.number(1 / factor)
    for atom, power in key.powers:
        if power < 0:
            # Only sizes have negative powers.
            part = Total.atom(atom)
        elif isinstance(atom, Applied) and atom.function == "reciprocal":
            part = atom.arguments[0]
        else:
            part = Total.atom(Applied("reciprocal", (Total.atom(atom),)))
        for _ in range(abs(power)):
            result = result * part
    return result
