"""Enumerate all terms up to a number of operators, and find terms with equal values: candidates for rules.

Terms are built bottom up and evaluated on random elements of a prime field. All terms of one operator and one pair of
operand shapes are computed at once. Among terms with equal values, the first represents the others, and only
representatives become operands of larger terms (as in Ruler: Nandi et al., OOPSLA 2021). Nothing is lost: an equality
of terms with other operands follows from smaller equalities.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.rewrite.calculus import Arrays, IllTypedError, PrimeField
from meshwright.rewrite.expressions import Call, Expression, Name, value_of
from meshwright.rewrite.operators import OPERATORS
from meshwright.spec import EventSink, NullSink

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from meshwright.rewrite.generate.domain import Domain, OperatorStep

_CHUNK_ELEMENTS = 2**21
_MOST_ELEMENTS = 192
# Odd constants of a mixing function (splitmix64: Steele, Lea and Flood, 2014).
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)


@dataclass(slots=True)
class Enumeration:
    """Enumerated terms, as arrays with one entry per term.

    ``steps``: the index of the term's step in the domain; -1 for a tensor of the domain, whose index is then in
    ``first``. ``first`` and ``second``: the operands, as numbers of terms (``second`` is -1 for one operand).
    ``pairs``: shape (pairs, 2): each term that is not a representative, with the representative of equal value.
    """

    domain: Domain
    steps: NDArray[np.int16]
    first: NDArray[np.int32]
    second: NDArray[np.int32]
    num_terms: int
    pairs: NDArray[np.int32]

    def expression(self, term: int) -> Expression:
        """Return a term as an expression."""
        step = int(self.steps[term])
        if step < 0:
            return Name(self.domain.tensors[int(self.first[term])][0])
        chosen = self.domain.steps[step]
        operands = [int(self.first[term]), int(self.second[term])][: chosen.num_operands]
        known = OPERATORS[chosen.operator].attributes
        values = dict(chosen.attributes)
        return Call(
            chosen.operator, tuple(map(self.expression, operands)), tuple((name, values[name]) for name in known)
        )


@dataclass(slots=True)
class _Batch:
    """Terms of one shape: their numbers, and their values (terms, sizes...)."""

    ids: list[NDArray[np.int32]] = field(default_factory=list)
    values: list[NDArray[np.int64]] = field(default_factory=list)

    def joined(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        return np.concatenate(self.ids), np.concatenate(self.values)


def enumerate_terms(
    domain: Domain, most_operators: int, *, seed: int = 0, events: EventSink | None = None
) -> Enumeration:
    """Return all terms of up to ``most_operators`` operators over a domain, and the pairs with equal values."""
    return _Enumerating(domain, most_operators, seed, events or NullSink()).run()


def hold_elsewhere(found: Enumeration, domain: Domain, *, seed: int = 1) -> NDArray[np.bool_]:
    """Return, for each of ``found.pairs``, whether both terms are well typed and equal in ``domain``.

    ``domain``: a domain with the same steps and tensors, and other sizes.
    """
    keys = _Evaluating(found, domain, seed).keys()
    one, two = keys[found.pairs[:, 0]], keys[found.pairs[:, 1]]
    return np.asarray((one == two) & (one != 0))


def concrete(domain: Domain, step: OperatorStep) -> dict[str, Any]:
    """Return a step's attributes with the domain's numbers in place of named sizes."""
    sizes = dict(domain.sizes)
    return {name: value_of(value, {}, sizes) for name, value in step.attributes}


class _Enumerating:
    def __init__(self, domain: Domain, most_operators: int, seed: int, events: EventSink) -> None:
        self._domain, self._last, self._events = domain, most_operators, events
        self._rng = np.random.default_rng(seed)
        self._machine = Arrays(PrimeField(seed))
        self._attributes = [concrete(domain, step) for step in domain.steps]
        self._weights: dict[tuple[int, ...], NDArray[np.uint64]] = {}
        self._shapes: dict[tuple[int, tuple[tuple[int, ...], ...]], tuple[int, ...] | None] = {}
        self._banks: list[dict[tuple[int, ...], tuple[NDArray[np.int32], NDArray[np.int64]]]] = []
        self._steps: list[NDArray[np.int16]] = []
        self._first: list[NDArray[np.int32]] = []
        self._second: list[NDArray[np.int32]] = []
        self._keys = np.empty(0, np.uint64)
        self._owners = np.empty(0, np.int32)
        self._pairs: list[NDArray[np.int32]] = []
        self._count = 0

    def run(self) -> Enumeration:
        self._given()
        for size in range(1, self._last + 1):
            self._level(size)
            self._events.progress("enumerate terms, by operators", size, self._last)
        pairs = np.concatenate(self._pairs) if self._pairs else np.empty((0, 2), np.int32)
        return Enumeration(
            domain=self._domain,
            steps=np.concatenate(self._steps),
            first=np.concatenate(self._first),
            second=np.concatenate(self._second),
            num_terms=self._count,
            pairs=pairs,
        )

    def _given(self) -> None:
        made = []
        for place, (name, _) in enumerate(self._domain.tensors):
            values = self._machine.numbers.random(self._rng, (1, *self._domain.shape(name)))
            made.append((-1, np.array([place], np.int32), np.array([-1], np.int32), values))
        self._take(made, keep=True)

    def _level(self, size: int) -> None:
        made: list[tuple[int, Any, Any, Any]] = []
        for number, step in enumerate(self._domain.steps):
            if step.num_operands == 1:
                made += self._unary(number, step, size - 1)
            else:
                for left in range(size):
                    right = size - 1 - left
                    if not (step.commutes and left > right):
                        made += self._binary(number, step, left, right)
        self._take(made, keep=size < self._last)

    def _unary(self, number: int, step: OperatorStep, level: int) -> Iterator[tuple[int, Any, Any, Any]]:
        for shape, (ids, values) in self._banks[level].items():
            if self._result(number, step, shape) is None:
                continue
            for start in range(0, len(ids), self._chunk(number, step, shape)):
                some = slice(start, start + self._chunk(number, step, shape))
                yield number, ids[some], np.full(len(ids[some]), -1, np.int32), self._run(number, step, values[some])

    def _binary(self, number: int, step: OperatorStep, left: int, right: int) -> Iterator[tuple[int, Any, Any, Any]]:
        for one, (ids, values) in self._banks[left].items():
            for two, (others, more) in self._banks[right].items():
                if self._result(number, step, one, two) is None:
                    continue
                rows = max(1, self._chunk(number, step, one, two) // len(others))
                for start in range(0, len(ids), rows):
                    some = ids[start : start + rows]
                    i = np.repeat(np.arange(len(some)), len(others))
                    j = np.tile(np.arange(len(others)), len(some))
                    if step.commutes and left == right:
                        ordered = some[i] <= others[j]
                        i, j = i[ordered], j[ordered]
                    if len(i):
                        result = self._run(number, step, values[start : start + rows][i], more[j])
                        yield number, some[i], others[j], result

    def _run(self, number: int, step: OperatorStep, *values: NDArray[np.int64]) -> NDArray[np.int64]:
        operands = [self._machine.operand(value) for value in values]
        define = OPERATORS[step.operator].define
        return self._machine.compute(define(self._machine, *operands, **self._attributes[number]))

    def _result(self, number: int, step: OperatorStep, *shapes: tuple[int, ...]) -> tuple[int, ...] | None:
        if not all(self._domain.kind(shape) in kinds for shape, kinds in zip(shapes, step.takes, strict=True)):
            return None
        if (number, shapes) not in self._shapes:
            self._shapes[number, shapes] = self._tried(number, step, *shapes)
        return self._shapes[number, shapes]

    def _tried(self, number: int, step: OperatorStep, *shapes: tuple[int, ...]) -> tuple[int, ...] | None:
        """The result's sizes; None for operands that do not fit, also if only computing the result shows it."""
        operands = [self._machine.operand(np.zeros((1, *shape), np.int64)) for shape in shapes]
        try:
            self._run(number, step, *(np.zeros((1, *shape), np.int64) for shape in shapes))
            shape = OPERATORS[step.operator].define(self._machine, *operands, **self._attributes[number]).shape
        except (IllTypedError, IndexError, ValueError, TypeError):
            return None
        size = tuple(map(int, shape))
        return size if int(np.prod(size)) <= _MOST_ELEMENTS else None

    def _chunk(self, number: int, step: OperatorStep, *shapes: tuple[int, ...]) -> int:
        """Number of terms to compute at once: sums inside of a result need more memory than the result."""
        inner = int(np.prod(shapes[-1])) if step.num_operands == 2 else 9
        result = self._result(number, step, *shapes) or ()
        return max(1, _CHUNK_ELEMENTS // max(1, int(np.prod(result)) * inner))

    def _take(self, made: list[tuple[int, Any, Any, Any]], *, keep: bool) -> None:
        """Number new terms, find those with a known value, and keep the others as representatives."""
        if not made:
            self._banks.append({})
            return
        keys = np.concatenate([self._key(values) for _, _, _, values in made])
        sizes = [len(values) for _, _, _, values in made]
        numbers = np.arange(self._count, self._count + len(keys), dtype=np.int32)
        self._steps.append(np.repeat(np.array([step for step, *_ in made], np.int16), sizes))
        self._first.append(np.concatenate([one for _, one, _, _ in made]).astype(np.int32))
        self._second.append(np.concatenate([two for _, _, two, _ in made]).astype(np.int32))
        # The first of equal keys; known keys come before new ones.
        every, owners = np.concatenate([self._keys, keys]), np.concatenate([self._owners, numbers])
        known, place, back = np.unique(every, return_index=True, return_inverse=True)
        owner = owners[place][back[len(self._keys) :]]
        fresh = owner == numbers
        self._keys, self._owners = known, owners[place]
        self._pairs.append(np.stack([numbers[~fresh], owner[~fresh]], axis=1))
        self._count += len(keys)
        banks: dict[tuple[int, ...], _Batch] = {}
        start = 0
        for (_, _, _, values), count in zip(made, sizes, strict=True):
            new = fresh[start : start + count]
            if keep and new.any():
                bank = banks.setdefault(values.shape[1:], _Batch())
                bank.ids.append(numbers[start : start + count][new])
                bank.values.append(values[new])
            start += count
        self._banks.append({shape: bank.joined() for shape, bank in banks.items()})

    def _key(self, values: NDArray[np.int64]) -> NDArray[np.uint64]:
        """64 bits of a value and its shape."""
        shape = values.shape[1:]
        if shape not in self._weights:
            drawn = self._rng.integers(1, 2**63, max(1, int(np.prod(shape))), dtype=np.uint64)
            self._weights[shape] = drawn | np.uint64(1)
        mixed = values.reshape(len(values), -1).astype(np.uint64) * self._weights[shape]
        mixed ^= mixed >> np.uint64(31)
        mixed *= np.uint64(_MIX[0])
        mixed ^= mixed >> np.uint64(29)
        return np.asarray((mixed * np.uint64(_MIX[1])).sum(axis=1, dtype=np.uint64))


class _Evaluating(_Enumerating):
    """Evaluates the terms of an enumeration at other sizes: a key per value, 0 for a term without a value."""

    def __init__(self, found: Enumeration, domain: Domain, seed: int) -> None:
        super().__init__(domain, 0, seed, NullSink())
        self._found = found
        self._of_term = np.zeros(found.num_terms, np.uint64)
        # By term that is an operand: the group of its shape, and its row there.
        self._group = np.full(found.num_terms, -1, np.int32)
        self._row = np.zeros(found.num_terms, np.int64)
        self._groups: list[NDArray[np.int64]] = []

    def keys(self) -> NDArray[np.uint64]:
        """By term, the key of its value."""
        found = self._found
        used = np.zeros(found.num_terms, bool)
        used[found.first[found.steps >= 0]] = True
        used[found.second[found.second >= 0]] = True
        for place, (name, _) in enumerate(self._domain.tensors):
            self._keep(np.array([place]), self._numbers(self._domain.shape(name)), used)
        start = len(self._domain.tensors)
        while start < found.num_terms:
            # Terms up to the first that reads one of them can be computed together.
            stop = self._independent(start)
            self._compute(np.arange(start, stop), used)
            start = stop
        return self._of_term

    def _numbers(self, shape: tuple[int, ...]) -> NDArray[np.int64]:
        return self._machine.numbers.random(self._rng, (1, *shape))

    def _independent(self, start: int) -> int:
        found = self._found
        reads = np.maximum(found.first[start:], found.second[start:]) >= start
        return start + int(np.argmax(reads)) if reads.any() else found.num_terms

    def _compute(self, terms: NDArray[np.int64], used: NDArray[np.bool_]) -> None:
        found = self._found
        steps = found.steps[terms]
        one = self._group[found.first[terms]]
        two = np.where(found.second[terms] >= 0, self._group[found.second[terms]], -1)
        order = np.lexsort((two, one, steps))
        marks = np.stack([steps[order], one[order], two[order]], axis=1)
        cuts = np.flatnonzero(np.any(np.diff(marks, axis=0), axis=1)) + 1
        for part in np.split(order, cuts):
            number, left, right = int(steps[part[0]]), int(one[part[0]]), int(two[part[0]])
            step = self._domain.steps[number]
            if left < 0 or (step.num_operands == 2 and right < 0):
                continue
            groups = [self._groups[left], *([self._groups[right]] if step.num_operands == 2 else [])]
            shapes = [group.shape[1:] for group in groups]
            if self._result(number, step, *shapes) is None:
                continue
            chunk = self._chunk(number, step, *shapes)
            for begin in range(0, len(part), chunk):
                some = terms[part[begin : begin + chunk]]
                rows = [found.first[some], found.second[some]]
                values = [group[self._row[row]] for group, row in zip(groups, rows, strict=False)]
                self._keep(some, self._run(number, step, *values), used)

    def _keep(self, terms: NDArray[np.int64], values: NDArray[np.int64], used: NDArray[np.bool_]) -> None:
        self._of_term[terms] = self._key(values)
        wanted = used[terms]
        if not wanted.any():
            return
        shape = values.shape[1:]
        group = next((i for i, held in enumerate(self._groups) if held.shape[1:] == shape), None)
        if group is None:
            group = len(self._groups)
            self._groups.append(np.empty((0, *shape), np.int64))
        before = len(self._groups[group])
        self._groups[group] = np.concatenate([self._groups[group], values[wanted]])
        self._group[terms[wanted]] = group
        self._row[terms[wanted]] = np.arange(before, before + int(wanted.sum()))
