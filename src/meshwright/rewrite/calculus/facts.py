"""Known bounds of letters (symbolic sizes and indices), and the inequalities that follow from them.

A **guard** is a polynomial g that stands for the inequality g >= 0. Most questions are answered by inserting bounds for
letters, or by an example among a few hundred random sizes and indices. z3 (an SMT solver) decides the rest for all
sizes at once. If z3 finds no answer, a guard counts as not implied, and a set of guards as possible, so that nothing
false is proved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import z3

from meshwright.rewrite.calculus.whole import Guard, Guards, Letter, Polynomial

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray


_Z3_MS = 200
# A proof that needs more z3 questions than this is given up.
MOST_QUESTIONS = 400
_NUM_EXAMPLES = 256
# Sizes of examples exceed their minimum by less than this.
_EXAMPLE_SPREAD = 6


class LetterBounds:
    """Bounds of letters, and assumptions on them. Letters are only added, so that answers can be cached.

    ``questions``: the most queries to z3; further questions count as unanswered.
    """

    def __init__(self, questions: int = MOST_QUESTIONS) -> None:
        self._bounds: dict[Letter, tuple[Polynomial, Polynomial | None]] = {}
        self._order: dict[Letter, int] = {}
        self._kept: dict[tuple[Guards, Guard | None], bool] = {}
        self._constants: dict[Letter, z3.ArithRef] = {}
        self._assumed: list[Guard] = []
        self._zeros: list[Polynomial] = []
        self._rng = np.random.default_rng(0)
        self._examples: dict[Letter, NDArray[np.int64]] = {}
        self._sound = np.ones(_NUM_EXAMPLES, bool)
        self._quotients: dict[tuple[Polynomial, Polynomial], Polynomial] = {}
        self.questions_left = questions

    def declare(self, letter: Letter, low: int | Polynomial, high: int | Polynomial | None = None) -> Polynomial:
        """Declare that ``low <= letter < high`` (None: no upper bound); return the letter as a polynomial.

        A letter that is declared already keeps its bounds.
        """
        if letter not in self._bounds:
            self._bounds[letter] = (Polynomial.of(low), None if high is None else Polynomial.of(high))
            self._order[letter] = len(self._order)
            self._draw(letter)
        return Polynomial.letter(letter)

    def fresh(self, prefix: str, low: int | Polynomial, high: int | Polynomial | None = None) -> Polynomial:
        """Declare a new letter whose name starts with ``prefix``; return it as a polynomial."""
        return self.declare(f"{prefix}{len(self._order)}", low, high)

    def assume(self, guard: Guard) -> None:
        """Assume that guard >= 0 for all sizes and indices."""
        if not self._at_least_0(guard):
            self._assumed.append(guard)
            self._sound &= self._values(guard) >= 0
            self._kept.clear()

    def allows(self, values: Mapping[Letter, Polynomial]) -> bool:
        """Return whether all assumptions hold that become numbers when ``values`` replace letters."""
        for guard in self._assumed:
            number = guard.substitute(values).constant
            if number is not None and number < 0:
                return False
        return True

    def assume_equal(self, one: Polynomial, other: Polynomial) -> None:
        """Assume that two polynomials are equal for all sizes and indices."""
        difference = self._reduced(one - other)
        if difference.terms:
            self._zeros.append(difference)
            self.assume(difference)
            self.assume(-difference)

    def are_equal(self, one: Polynomial, other: Polynomial) -> bool:
        """Return whether the equality of two polynomials follows from bounds and assumptions."""
        difference = self._reduced(one - other)
        if not difference.terms:
            return True
        return bool(self._assumed) and self.implies(frozenset(), difference) and self.implies(frozenset(), -difference)

    def _reduced(self, number: Polynomial) -> Polynomial:
        """The number reduced by the assumed equations, each of which removes its last monomial."""
        for zero in self._zeros:
            last, factor = zero.terms[-1]
            here = dict(number.terms).get(last, 0)
            if here and here % factor == 0:
                number = number - zero * (here // factor)
        return number

    def floored(self, number: Polynomial, by: Polynomial) -> Polynomial:
        """Return a letter that stands for number / by, rounded down; equal arguments give the same letter."""
        if (number, by) not in self._quotients:
            quotient = self.fresh("f", 0)
            self._quotients[number, by] = quotient
            self.assume(number - quotient * by)
            self.assume(quotient * by + by - 1 - number)
        return self._quotients[number, by]

    def least(self, letter: Letter) -> Polynomial:
        """Return the lower bound of a letter (inclusive)."""
        return self._bounds[letter][0]

    def is_positive(self, letter: Letter) -> bool:
        """Return whether the lower bound of a letter is a number of at least 1."""
        low = self._bounds[letter][0].constant
        return low is not None and low >= 1

    def extent(self, letter: Letter) -> Polynomial | None:
        """Return the upper bound of a letter (exclusive); None if it has none, as sizes do."""
        return self._bounds[letter][1] if letter in self._bounds else None

    def implies(self, given: Guards, guard: Guard) -> bool:
        """Return whether guard >= 0 is shown wherever all guards of ``given`` hold; False if unknown."""
        number = guard.constant
        if number is not None:
            return number >= 0
        if guard in given or guard in self._assumed or self._at_least_0(guard):
            return True
        key = (given, guard)
        if key not in self._kept:
            exception = (*given, -guard - 1)
            self._kept[key] = not self._exemplified(exception) and self._impossible(exception)
        return self._kept[key]

    def possible(self, guards: Guards) -> bool:
        """Return whether some sizes and indices satisfy all guards; True if unknown."""
        for guard in guards:
            number = guard.constant
            if (number is not None and number < 0) or -guard - 1 in guards or self._at_least_0(-guard - 1):
                return False
        left = frozenset(guard for guard in guards if guard.constant is None and not self._at_least_0(guard))
        if not left and not self._assumed:
            return True
        key = (left, None)
        if key not in self._kept:
            self._kept[key] = self._exemplified(left) or not self._impossible(left)
        return self._kept[key]

    def _at_least_0(self, guard: Guard) -> bool:
        """Whether bounds alone show it: each index is replaced by the end that minimizes the polynomial."""
        self._ensure(guard)
        for letter in sorted(set(guard.letters()), key=lambda item: -self._order[item]):
            low, high = self._bounds[letter]
            factor = guard.factor_of(letter)
            if letter in factor.letters():
                return False
            if self._never_negative(factor):
                # A letter without upper bound stays; it is at least its lower bound.
                guard = guard + factor * (low - Polynomial.letter(letter)) if high is not None else guard
            elif high is not None and self._never_negative(-factor):
                guard = guard + factor * (high - 1 - Polynomial.letter(letter))
            else:
                return False
        return self._never_negative(guard)

    def _never_negative(self, number: Polynomial) -> bool:
        """Whether a polynomial has no negative coefficient when written in the excess of sizes over their minimum."""
        letters = set(number.letters())
        if any(self._bounds[letter][1] is not None or self._bounds[letter][0].constant is None for letter in letters):
            return False
        moved = number.substitute({letter: Polynomial.letter(letter) + self._bounds[letter][0] for letter in letters})
        return all(factor >= 0 for _, factor in moved.terms)

    def _ensure(self, number: Polynomial) -> None:
        """Give bounds to letters made by renaming: at least 0."""
        for letter in number.letters():
            if letter not in self._bounds:
                self.declare(letter, 0)

    def _draw(self, letter: Letter) -> None:
        """Draw examples of a letter between its bounds; examples with an empty range become invalid."""
        low, high = self._bounds[letter]
        first = self._values(low)
        room = np.full(_NUM_EXAMPLES, _EXAMPLE_SPREAD) if high is None else self._values(high) - first
        self._sound &= room > 0
        self._examples[letter] = first + self._rng.integers(0, np.maximum(room, 1))

    def _values(self, number: Polynomial) -> NDArray[np.int64]:
        self._ensure(number)
        total = np.zeros(_NUM_EXAMPLES, np.int64)
        for monomial, factor in number.terms:
            product = np.full(_NUM_EXAMPLES, factor, np.int64)
            for letter in monomial:
                product = product * self._examples[letter]
            total += product
        return total

    def _exemplified(self, guards: Iterable[Guard]) -> bool:
        """Whether an example satisfies all guards."""
        sound = self._sound
        for guard in guards:
            sound = sound & (self._values(guard) >= 0)
        return bool(sound.any())

    def _impossible(self, guards: Iterable[Guard]) -> bool:
        """Whether z3 shows that no sizes and indices satisfy all guards."""
        if self.questions_left == 0:
            return False
        self.questions_left -= 1
        asked = (*guards, *self._assumed)
        linear = all(len(monomial) < 2 for guard in asked for monomial, _ in guard.terms)
        solver = z3.Solver() if linear else z3.SolverFor("QF_NIA")
        solver.set("timeout", _Z3_MS)
        todo: list[Letter] = []
        for guard in asked:
            solver.add(self._in_z3(guard) >= 0)
            todo += guard.letters()
        seen: set[Letter] = set()
        while todo:
            letter = todo.pop()
            if letter in seen:
                continue
            seen.add(letter)
            low, high = self._bounds[letter]
            constant = self._in_z3(Polynomial.letter(letter))
            solver.add(constant >= self._in_z3(low))
            todo += low.letters()
            if high is not None:
                solver.add(constant < self._in_z3(high))
                todo += high.letters()
        return bool(solver.check() == z3.unsat)

    def _in_z3(self, number: Polynomial) -> z3.ArithRef:
        total = z3.IntVal(0)
        for monomial, factor in number.terms:
            product = z3.IntVal(factor)
            for letter in monomial:
                product = product * self._constants.setdefault(letter, z3.Int(letter))
            total = total + product
        return total
