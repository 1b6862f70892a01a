"""Trials: compute both sides of a rule on random tensors of random sizes, and compare them.

Trials use arithmetic modulo a prime, where equality is exact: one number of two unequal sides agrees by chance once in
268 million. Functions with few known laws are random functions there, so a rule that needs another law of a function,
such as exp(a + b) = exp(a) exp(b), fails. A rule that fails is tried again over doubles (float64), and counts as
refuted only if it fails there, too.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.rewrite.calculus import Arrays, Doubles, IllTypedError, Indexed, NumberField, PrimeField
from meshwright.rewrite.calculus.symbols import SizesDifferError
from meshwright.rewrite.calculus.whole import NotExpressibleError, Polynomial
from meshwright.rewrite.expressions import Condition, Expression, letters_of, run
from meshwright.rewrite.instances import MOST_DIMS, Instance, instances
from meshwright.rewrite.proofs import UnlikeError, fit_right

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from meshwright.rewrite.rules import Rule

_MOST_DRAWS = 300
_MOST_ELEMENTS = 4096
_SPREAD = 4
_TOLERANCE = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterExample:
    """Tensors' shapes and values of letters for which the two sides of a rule differ.

    The element of output ``output`` (counted from 0) at ``index`` is ``left`` on one side and ``right`` on the other.
    ``unlike``: the two shapes of that output if the shapes differ; then ``index`` is empty and both numbers are NaN.
    """

    shapes: Mapping[str, tuple[int, ...]]
    letters: Mapping[str, Any]
    output: int
    index: tuple[int, ...]
    left: float
    right: float
    unlike: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} of {_sizes(shape)}" for name, shape in self.shapes.items())
        letters = "".join(f", {name} = {value}" for name, value in self.letters.items())
        if self.unlike is not None:
            return (
                f"{sizes}{letters}: output {self.output} is of {_sizes(self.unlike[0])} and of {_sizes(self.unlike[1])}"
            )
        return f"{sizes}{letters}: output {self.output} at {self.index} is {self.left:g} and {self.right:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """The result of trials: the number in which both sides were equal, and the first counter-example, if any."""

    num_agreed: int
    counter_example: CounterExample | None = None


def try_rule(
    rule: Rule,
    *,
    num_sizes: int = 8,
    seed: int = 0,
    most_dims: int = MOST_DIMS,
    among: Iterable[Instance] | None = None,
) -> Trials:
    """Compare both sides of a rule on random tensors, at ``num_sizes`` random sets of sizes per instance.

    An `Instance` is one choice of ranks, dims and orders of dims. ``among``: the instances to try; by default all with
    at most ``most_dims`` dims. Stops at the first counter-example.
    """
    rng = np.random.default_rng(seed)
    total = 0
    for instance in fitted_instances(rule, most_dims) if among is None else among:
        agreed = 0
        for shapes, letters in draw_sizes(rule, instance, rng):
            found = _compare(rule, shapes, letters, PrimeField(seed), rng)
            if isinstance(found, CounterExample):
                found = _compare(rule, shapes, letters, Doubles(), rng)
            if isinstance(found, CounterExample):
                return Trials(num_agreed=total + agreed, counter_example=found)
            agreed += found is None
            if agreed == num_sizes:
                break
        total += agreed
    return Trials(num_agreed=total)


def fitted_instances(rule: Rule, most_dims: int) -> Iterator[Instance]:
    """Yield the instances of a rule, restricted to sizes at which the right side is well typed, too, if possible."""
    for instance in instances(rule, most_dims):
        if instance.unsettled:
            continue
        with suppress(SizesDifferError, UnlikeError, IllTypedError, NotExpressibleError, IndexError, ValueError):
            fit_right(rule, instance)
        yield instance


def draw_sizes(
    rule: Rule, instance: Instance, rng: np.random.Generator
) -> Iterator[tuple[dict[str, tuple[int, ...]], dict[str, Any]]]:
    """Yield random (shapes by tensor, values by letter) for which the left side of an instance is well typed.

    Sets of sizes with empty tensors, or with tensors of more than 4096 elements, are skipped.
    """
    names = sorted(set(_letters(instance)))
    for draw in range(_MOST_DRAWS if names else 1):
        # Small sizes satisfy equations more often.
        spread = 2 if instance.equations and draw % 2 else _SPREAD
        values = {
            letter: Polynomial.of(int(rng.integers(0, spread)) + _number(instance.machine.facts.least(letter)))
            for letter in names
        }
        if not instance.machine.facts.allows(values):
            continue
        shapes = {name: tuple(_number(size, values) for size in shape) for name, shape in instance.shapes.items()}
        letters = {name: _plain(held, values) for name, held in instance.letters.items()}
        small = all(np.prod(shape, dtype=np.float64) <= _MOST_ELEMENTS for shape in shapes.values())
        if small and all(min(shape, default=1) >= 1 for shape in shapes.values()):
            if any(_number(one, values) != _number(two, values) for one, two in instance.equations):
                continue
            if not all(_holds(condition, shapes, letters) for condition in rule.when):
                continue
            yield shapes, letters


def _compare(
    rule: Rule, shapes: Mapping[str, tuple[int, ...]], letters: Mapping[str, Any], numbers: NumberField, rng: Any
) -> CounterExample | str | None:
    """None if both sides agree; why they cannot be compared."""
    arrays = {name: numbers.random(rng, (1, *shape)) for name, shape in shapes.items()}
    try:
        lefts = compute(rule.left, arrays, letters, numbers)
        known = {**letters, **_right_letters(rule, letters, [left.shape[1:] for left in lefts], arrays, numbers)}
        rights = compute(rule.right, arrays, known, numbers)
    except (IllTypedError, IndexError, ValueError) as error:
        return str(error)
    for output, (left, right) in enumerate(zip(lefts, rights, strict=True)):
        if left.shape != right.shape:
            unlike = left.shape[1:], right.shape[1:]
            return CounterExample(
                shapes=shapes, letters=known, output=output, index=(), left=np.nan, right=np.nan, unlike=unlike
            )
        wrong = _differ(left, right, numbers)
        if wrong.any():
            place = tuple(map(int, np.argwhere(wrong)[0]))
            values = float(left[place]), float(right[place])
            return CounterExample(
                shapes=shapes, letters=known, output=output, index=place[1:], left=values[0], right=values[1]
            )
    return None


def compute(
    sides: Sequence[Expression], arrays: Mapping[str, NDArray[Any]], letters: Mapping[str, Any], numbers: NumberField
) -> list[NDArray[Any]]:
    """Return the values of expressions, one array of shape (draws, sizes...) for each.

    ``arrays``: the operands by name, of the same layout; axis 0 counts independent draws. Raises IllTypedError if an
    operator does not accept its operands.
    """
    machine = Arrays(numbers)
    tensors = {name: machine.operand(array) for name, array in arrays.items()}
    made: dict[Expression, Indexed] = {}

    def keep(result: Indexed) -> Indexed:
        return machine.operand(machine.compute(result))

    results = [run(side, machine, tensors, letters, made, keep) for side in sides]
    return [machine.compute(result) for result in results]


def _right_letters(
    rule: Rule,
    letters: Mapping[str, Any],
    shapes: list[tuple[int, ...]],
    arrays: Mapping[str, Any],
    numbers: NumberField,
) -> dict[str, Any]:
    """Values of the letters that only the right side has, such that its shapes equal those of the left."""
    missing = [name for name, _ in rule.letters if name not in letters]
    if not missing:
        return {}
    most = max((sum(array.shape) for array in arrays.values()), default=1)
    return next(_searched(rule, letters, missing, shapes, arrays, numbers, most), {})


def _searched(
    rule: Rule,
    letters: Mapping[str, Any],
    missing: list[str],
    shapes: list[tuple[int, ...]],
    arrays: Mapping[str, Any],
    numbers: NumberField,
    most: int,
) -> Iterator[dict[str, Any]]:
    if not missing:
        try:
            found = [result.shape[1:] for result in compute(rule.right, arrays, letters, numbers)]
        except (IllTypedError, IndexError, ValueError):
            return
        if found == shapes:
            yield {}
        return
    name, *others = missing
    for value in range(most + 1):
        more = {**letters, name: value}
        for output, side in enumerate(rule.right):
            # One output is enough to settle a letter, if it has all that it needs.
            used = [letter for _, letter in letters_of(side)]
            if name in used and all(letter in more for letter in used):
                try:
                    (result,) = compute([side], arrays, more, numbers)
                except (IllTypedError, IndexError, ValueError):
                    break
                if result.shape[1:] != shapes[output]:
                    break
        else:
            for rest in _searched(rule, more, others, shapes, arrays, numbers, most):
                yield {name: value, **rest}


def _sizes(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "one number"


def _holds(condition: Condition, shapes: Mapping[str, tuple[int, ...]], letters: Mapping[str, Any]) -> bool:
    tensors = {name: Indexed(shape, lambda *_: None) for name, shape in shapes.items()}
    return condition.holds(tensors, letters)


def _differ(left: NDArray[Any], right: NDArray[Any], numbers: NumberField) -> NDArray[np.bool_]:
    if numbers.dtype is not np.float64:
        return np.asarray(left != right)
    with np.errstate(invalid="ignore"):
        scale = np.maximum(np.abs(left), np.abs(right)) + 1
        close = np.abs(left - right) <= _TOLERANCE * scale
    return np.asarray(~close & (left != right) & ~(np.isnan(left) & np.isnan(right)))


def _letters(instance: Instance) -> Iterator[Any]:
    for shape in instance.shapes.values():
        for size in shape:
            yield from size.letters()
    for held in instance.letters.values():
        for item in held if isinstance(held, tuple) else (held,):
            if isinstance(item, Polynomial):
                yield from item.letters()
    for one, two in instance.equations:
        yield from one.letters()
        yield from two.letters()


def _number(size: Polynomial, values: Mapping[Any, Polynomial] | None = None) -> int:
    number = size.substitute(values or {}).constant
    if number is None:
        raise ValueError(f"{size} has letters without values")
    return number


def _plain(held: Any, values: Mapping[Any, Polynomial]) -> Any:
    if isinstance(held, tuple):
        return tuple(_plain(item, values) for item in held)
    return _number(held, values) if isinstance(held, Polynomial) else held
