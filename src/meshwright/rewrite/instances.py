"""Instances: the most general sizes for which the left side of a rule is well typed.

A rule does not state sizes, but its operators restrict them: ``matmul(x, y)`` requires equal inner sizes. `instances`
tries all ranks, dims and orders of dims that the left side allows. For each, every size starts as a letter (a symbol),
and an equation that an operator requires is solved by replacing a letter (unification).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import permutations, product
from typing import TYPE_CHECKING, Any

from meshwright.rewrite.calculus import IllTypedError, Indexed
from meshwright.rewrite.calculus.facts import MOST_QUESTIONS
from meshwright.rewrite.calculus.symbols import SizesDifferError, Symbols
from meshwright.rewrite.calculus.whole import NotExpressibleError, Polynomial
from meshwright.rewrite.expressions import COMPARISONS, Call, Expression, letters_of, names_of, run, value_of
from meshwright.spec import RewriteError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from meshwright.rewrite.rules import Rule

MOST_DIMS = 4
_MOST_STEPS = 200

# Kinds of attributes by name; all others are numbers of at least 0, and these of at least 1.
_POSITIVE = {"stride", "dilation", "kernel", "groups", "degree", "stop"}
_DIMS = {"axis"}
_ORDERS = {"order"}
_TUPLES = {"shape": None, "stride": 2, "padding": 2, "dilation": 2, "kernel": 2, "low": None, "high": None}
_NUMBERS = {"clamp.low", "clamp.high"}
_LINES = {"conv1d.stride", "conv1d.padding", "conv1d.dilation"}
_FLAGS = {"keep", "causal"}
_TEXTS = {"dtype"}


@dataclass(slots=True)
class Instance:
    """One choice of ranks, dims and orders of dims, with symbolic sizes at which the left side is well typed.

    ``machine``: the symbolic arithmetic, with the bounds of letters. ``shapes``: by tensor, sizes as polynomials in
    letters. ``letters``: the values of the rule's letters. ``free``: letters that may still be replaced. ``equations``:
    equations that are assumed because no replacement of a letter solves them. ``ones``: for each size that may be
    broadcast, in order of occurrence, whether it is 1. ``unsettled``: the reason if the instance cannot be decided,
    else "".
    """

    machine: Symbols
    shapes: dict[str, tuple[Polynomial, ...]]
    letters: dict[str, Any]
    free: set[Any] = field(default_factory=set)
    equations: list[tuple[Polynomial, Polynomial]] = field(default_factory=list)
    ones: list[bool] = field(default_factory=list)
    unsettled: str = ""
    _asked: int = 0

    def tensors(self) -> dict[str, Indexed]:
        """Return the rule's operands by name, as symbolic tensors of these shapes."""
        return {name: Indexed(shape, self.machine.read(name, shape)) for name, shape in self.shapes.items()}

    def results(self, sides: Sequence[Expression]) -> list[Indexed]:
        """Return the symbolic tensors of the expressions.

        Raises SizesDifferError if two sizes must be equal and are not known to be, IllTypedError if they cannot be.
        """
        made: dict[Expression, Indexed] = {}
        tensors = self.tensors()
        return [run(side, self.machine, tensors, self.letters, made) for side in sides]

    def solve(self, sides: Sequence[Expression]) -> list[Indexed]:
        """Return `results` after free letters were replaced, or equations assumed, until all operators accept them.

        Raises IllTypedError if that is impossible, NotExpressibleError if it takes too many steps.
        """
        for _ in range(_MOST_STEPS):
            try:
                return self.results(sides)
            except SizesDifferError as differ:
                self.demand(differ)
        raise NotExpressibleError(f"no sizes that satisfy all operators were found in {_MOST_STEPS} steps")

    def suppose(self, rule: Rule) -> bool:
        """Restrict the sizes to those that satisfy the rule's conditions; return False if that is impossible.

        Raises RewriteError for a condition of an unsupported form, NotExpressibleError if no such sizes are found.
        """
        for condition in rule.when:
            held: bool | None = None
            for _ in range(_MOST_STEPS):
                values = [value_of(side, self.tensors(), self.letters) for side in (condition.left, condition.right)]
                held = self._supposed(condition.sign, *values)
                if held is not None:
                    break
            if held is None:
                raise NotExpressibleError(f"no sizes that satisfy the condition {condition} were found")
            if not held:
                return False
            # New requirements on sizes change those of the left side's operators.
            self.solve(rule.left)
        return self.machine.facts.possible(frozenset())

    def _supposed(self, sign: str, left: Any, right: Any) -> bool | None:
        """Whether a comparison holds now; None if a letter was replaced, so that the values changed."""
        if isinstance(left, tuple) or isinstance(right, tuple):
            return self._supposed_tuples(sign, left, right)
        if not isinstance(left, Polynomial) and not isinstance(right, Polynomial):
            return bool(COMPARISONS[sign](left, right))
        one, other = Polynomial.of(left), Polynomial.of(right)
        if sign == "==":
            if self.machine.facts.are_equal(one, other):
                return True
            self.demand(SizesDifferError(one, other, "a condition"))
            return None
        if sign == "!=":
            least = next((low for low in (one, other) if low.constant is not None), None)
            size = other if least is one else one
            letter = size.single
            if least is None or letter is None or self.machine.facts.least(letter) != least:
                raise RewriteError(
                    f"The condition {one} != {other} is not supported: != may only compare one size with its lowest "
                    "possible value, as in size(x, 0) != 1. Write the condition with <."
                )
            one, other, sign = least, size, "<"
        self.machine.facts.assume(other - one - (sign == "<"))
        return True

    def _supposed_tuples(self, sign: str, left: Any, right: Any) -> bool | None:
        if not isinstance(left, tuple) or not isinstance(right, tuple) or sign not in ("==", "!="):
            raise RewriteError(
                f"The condition {left} {sign} {right} is not supported: a tuple can only be compared with a tuple, by "
                "== or !=."
            )
        if len(left) != len(right) or sign == "!=":
            pairs = [Polynomial.of(one) - other for one, other in zip(left, right, strict=False)]
            known = [pair.constant for pair in pairs]
            if len(left) == len(right) and any(one is None for one in known) and not any(known):
                raise NotExpressibleError(f"whether {left} {sign} {right} depends on sizes")
            return (len(left) != len(right) or any(known)) == (sign == "!=")
        for one, other in zip(left, right, strict=True):
            if not self.machine.facts.are_equal(Polynomial.of(one), Polynomial.of(other)):
                self.demand(SizesDifferError(Polynomial.of(one), Polynomial.of(other), "a condition"))
                return None
        return True

    def demand(self, differ: SizesDifferError) -> None:
        """Make the two sizes of the exception equal: replace a letter, or assume the equation if that is impossible.

        Raises IllTypedError if the sizes can never be equal.
        """
        if differ.or_one and self._is_one():
            differ = SizesDifferError(differ.one, Polynomial.of(1), differ.why)
        if not self.make_equal(differ.one, differ.other, differ.why):
            self.machine.facts.assume_equal(differ.one, differ.other)
            self.equations.append((differ.one, differ.other))
            return
        # Equations that could not be solved before may be solvable now.
        for one, other in tuple(self.equations):
            if one != other and self.make_equal(one, other, differ.why):
                self.equations = [pair for pair in self.equations if pair[0] != pair[1]]

    def _is_one(self) -> bool:
        """Whether a size that may be 1 or another size is 1: as decided before, at first not."""
        place = self._asked
        self._asked += 1
        if place == len(self.ones):
            self.ones.append(False)
        return self.ones[place]

    def make_equal(
        self, one: Polynomial, other: Polynomial, why: str, among: Callable[[str], bool] | None = None
    ) -> bool:
        """Replace one letter so that two sizes become equal; return False if no replacement solves the equation.

        ``among``: whether a letter may be replaced; by default the free letters, and those that stand for a quotient
        or a remainder. ``why`` is quoted in errors. Raises IllTypedError if the sizes are different numbers.
        """
        difference = one - other
        if all(self.machine.facts.is_positive(letter) for letter in difference.letters()):
            difference = difference.primitive()
        if difference.constant is not None:
            raise IllTypedError(f"{why}: {one} and {other}")
        may = among or (lambda letter: letter in self.free or is_made(letter))
        names = set(difference.letters())
        for letter in sorted(names, key=lambda name: (not is_made(name), name)):
            factor = difference.factor_of(letter).constant
            if factor in (1, -1) and may(letter):
                self._replace(letter, difference.substitute({letter: Polynomial.of(0)}) * -factor)
                return True
        return False

    def _replace(self, letter: str, value: Polynomial) -> None:
        change: dict[Any, Polynomial] = {letter: value}
        facts = self.machine.facts
        facts.assume(value - facts.least(letter))
        self.free.discard(letter)
        # A letter that the machine made becomes one of the sizes with its first use.
        self.free.update(filter(is_made, value.letters()))
        self.shapes = {name: tuple(size.substitute(change) for size in shape) for name, shape in self.shapes.items()}
        self.letters = {name: _substituted(held, change) for name, held in self.letters.items()}
        self.equations = [(first.substitute(change), second.substitute(change)) for first, second in self.equations]


def instances(rule: Rule, most_dims: int = MOST_DIMS, questions: int = MOST_QUESTIONS) -> Iterator[Instance]:
    """Yield each choice of ranks, dims and orders for which the left side is well typed, with its most general sizes.

    A size that may be broadcast gives two instances: one in which it is 1, and one in which it equals the other size.
    Such sizes of the right side are found while the caller works with an instance, which adds instances after it.
    ``most_dims``: the most dims of a tensor. ``questions``: the most z3 queries per instance.
    """
    left = {letter for side in rule.left for _, letter in letters_of(side)}
    choices = {
        letter: list(_choices(letter, place, most_dims))
        for letter, place in rule.letters
        # Sizes that only the right side has are found by `proofs.fit_right`.
        if letter in left or not _is_number(place)
    }
    for ranks in _ranks(rule, dict(rule.ranks), most_dims, choices):
        for chosen in product(*choices.values()):
            waiting: list[list[bool]] = [[]]
            while waiting:
                decided = waiting.pop()
                instance = _instance(rule, ranks, dict(zip(choices, chosen, strict=True)), questions)
                instance.ones = list(decided)
                try:
                    instance.solve(rule.left)
                    fits = instance.suppose(rule)
                except (IllTypedError, IndexError, ValueError):
                    fits = False
                except NotExpressibleError as error:
                    fits, instance.unsettled = True, str(error)
                if fits:
                    yield instance
                waiting += [[*instance.ones[:place], True] for place in range(len(decided), len(instance.ones))]


def is_made(letter: str) -> bool:
    """Return whether a letter stands for a quotient or a remainder that the symbolic arithmetic introduced.

    The names of these start with q or r and have no dot; letters of sizes and attributes contain a dot or a $.
    """
    return letter[0] in "qr" and "." not in letter


def _instance(
    rule: Rule, ranks: Mapping[str, int], chosen: Mapping[str, Any], questions: int = MOST_QUESTIONS
) -> Instance:
    machine = Symbols(questions)
    shapes = {
        name: tuple(machine.facts.declare(f"{name}.{dim}", 1) for dim in range(rank)) for name, rank in ranks.items()
    }
    letters: dict[str, Any] = {}
    free: set[Any] = {letter.single for shape in shapes.values() for letter in shape}
    for name, place in rule.letters:
        if name in chosen:
            letters[name] = _letter(machine, free, name, place, chosen[name])
    return Instance(machine, shapes, letters, free)


def _letter(machine: Symbols, free: set[Any], name: str, place: str, choice: Any) -> Any:
    """The value of an attribute's letter: the choice that was made, or letters for numbers."""
    if not (isinstance(choice, tuple) and choice and choice[0] == "letters"):
        return choice
    least = 1 if place.partition(".")[2] in _POSITIVE else 0
    if choice[1] is None:
        free.add(f"${name}")
        return machine.facts.declare(f"${name}", least)
    names = [f"${name}.{number}" for number in range(choice[1])]
    free.update(names)
    return tuple(machine.facts.declare(item, least) for item in names)


def _is_number(place: str) -> bool:
    attribute = place.partition(".")[2]
    return place in _NUMBERS or attribute not in {*_DIMS, *_ORDERS, *_FLAGS, *_TEXTS, *_TUPLES}


def _choices(letter: str, place: str, most_dims: int) -> Iterator[Any]:
    attribute = place.partition(".")[2]
    if _is_number(place):
        yield ("letters", None)
    elif attribute in _DIMS:
        yield from range(most_dims)
    elif attribute in _ORDERS:
        for rank in range(1, most_dims + 1):
            yield from permutations(range(rank))
    elif attribute in _FLAGS:
        yield from (True, False)
    elif attribute in _TEXTS:
        # Strings are arbitrary; what holds for different strings also holds for equal ones.
        yield f"text {letter}"
    else:
        size = 1 if place in _LINES else _TUPLES[attribute]
        for count in (size,) if size is not None else range(1, most_dims + 1):
            yield ("letters", count)


def _ranks(
    rule: Rule, fixed: Mapping[str, int], most_dims: int, choices: Mapping[str, list[Any]]
) -> Iterator[dict[str, int]]:
    """Ranks of the given tensors for which every part of the left side is well typed by itself."""
    parts = [part for side in rule.left for part in _parts(side)]
    known: dict[tuple[Any, ...], bool] = {}

    def fits(part: Call, ranks: dict[str, int]) -> bool:
        names = tuple(dict.fromkeys(names_of(part)))
        key = (part, *(ranks[name] for name in names))
        if key not in known:
            known[key] = _is_typed(rule, part, {name: ranks[name] for name in names}, choices)
        return known[key]

    def extended(ranks: dict[str, int], left: tuple[str, ...]) -> Iterator[dict[str, int]]:
        if not left:
            yield ranks
            return
        name, *others = left
        for rank in (fixed[name],) if name in fixed else range(most_dims + 1):
            more = {**ranks, name: rank}
            ready = [part for part in parts if name in names_of(part) and all(item in more for item in names_of(part))]
            if all(fits(part, more) for part in ready):
                yield from extended(more, tuple(others))

    yield from extended({}, rule.names)


def _parts(side: Expression) -> Iterator[Call]:
    if isinstance(side, Call):
        for operand in side.operands:
            yield from _parts(operand)
        yield side


def _is_typed(rule: Rule, part: Call, ranks: Mapping[str, int], choices: Mapping[str, list[Any]]) -> bool:
    used = {letter for _, letter in letters_of(part)}
    some = {letter: held for letter, held in choices.items() if letter in used}
    for chosen in product(*some.values()):
        instance = _instance(rule, ranks, dict(zip(some, chosen, strict=True)))
        try:
            instance.solve([part])
        except (IllTypedError, IndexError, ValueError):
            continue
        except NotExpressibleError:
            return True
        return True
    return False


def _substituted(held: Any, change: Mapping[Any, Polynomial]) -> Any:
    if isinstance(held, Polynomial):
        return held.substitute(change)
    return tuple(_substituted(item, change) for item in held) if isinstance(held, tuple) else held
