"""Proofs that both sides of a rule have the same elements, for all sizes.

A rule claims that both sides are equal wherever both are well typed. For each `Instance` of the left side, restricted
to sizes at which the right side is well typed, too, the proof checks two things: both sides have the same shape, and
their elements at a symbolic index have the same normal form (`calculus.sums`). There is no search over axioms. A rule
that is not proved here may still be true.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from meshwright.rewrite.calculus import IllTypedError, Indexed
from meshwright.rewrite.calculus.facts import MOST_QUESTIONS
from meshwright.rewrite.calculus.pruning import simplified
from meshwright.rewrite.calculus.sums import TooLargeError
from meshwright.rewrite.calculus.symbols import RefineError, SizesDifferError, Symbols, Value
from meshwright.rewrite.calculus.whole import NotExpressibleError, Polynomial
from meshwright.rewrite.instances import MOST_DIMS, Instance, instances

if TYPE_CHECKING:
    from meshwright.rewrite.rules import Rule

ILL_TYPED = "the right side is ill typed"
_MOST_REFINEMENTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The result of the proof for one instance; ``why`` is the reason if it is not proved, else ""."""

    instance: Instance
    proved: bool
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The results of the proof of a rule, one attempt per instance.

    ``status``: "proved" if all instances are proved, "partly" if only some are, "unproved" if no instance is, "empty"
    if the rule has no instances.
    """

    rule: Rule
    status: Literal["proved", "partly", "unproved", "empty"]
    attempts: tuple[Attempt, ...]

    @property
    def ranks(self) -> tuple[dict[str, int], ...]:
        """Combinations of ranks (number of dims by tensor name) of the proved instances, each once."""
        found = [
            {name: len(shape) for name, shape in each.instance.shapes.items()} for each in self.attempts if each.proved
        ]
        return tuple(dict(item) for item in dict.fromkeys(tuple(entry.items()) for entry in found))


def prove(rule: Rule, most_dims: int = MOST_DIMS, questions: int = MOST_QUESTIONS) -> Proof:
    """Try to prove a rule for all sizes at all ranks up to ``most_dims``.

    ``questions``: the most z3 queries per instance.
    """
    attempts = []
    for instance in instances(rule, most_dims, questions):
        why = _failure(rule, instance)
        attempts.append(Attempt(instance=instance, proved=why is None, why=why or ""))
    good = sum(attempt.proved for attempt in attempts)
    if not attempts:
        return Proof(rule=rule, status="empty", attempts=())
    status: Any = "proved" if good == len(attempts) else "partly" if good else "unproved"
    return Proof(rule=rule, status=status, attempts=tuple(attempts))


def _failure(rule: Rule, instance: Instance) -> str | None:
    """Why the rule is not shown to hold for an instance; None if it is."""
    if instance.unsettled:
        return f"not expressible: {instance.unsettled}"
    try:
        if rule.left == rule.right:
            return None
        fit_right(rule, instance)
        lefts, rights = instance.results(rule.left), instance.results(rule.right)
        for left, right in zip(lefts, rights, strict=True):
            found = _difference(instance.machine, left, right)
            if found is not None:
                return found
    except (IllTypedError, IndexError, ValueError) as error:
        return f"{ILL_TYPED}: {error}"
    except UnlikeError as unlike:
        return f"left and right side have {unlike}"
    except SizesDifferError as differ:
        return f"the two sides have different sizes: {differ}"
    except NotExpressibleError as error:
        return f"not expressible: {error}"
    except TooLargeError:
        return "the normal form has too many products"
    return None


def fit_right(rule: Rule, instance: Instance) -> None:
    """Restrict an instance, in place, to sizes at which the right side is well typed and has the shapes of the left.

    Letters that occur only on the right side are chosen so that the shapes of both sides agree. Raises UnlikeError or
    SizesDifferError if the shapes of the two sides differ, IllTypedError if the right side is well typed for no sizes,
    NotExpressibleError if no values of letters are found or they are out of range for some sizes.
    """
    machine = instance.machine
    new = [name for name, _ in rule.letters if name not in instance.letters]
    if not new:
        instance.solve(rule.right)
        _check_shapes(machine, instance.results(rule.left), instance.results(rule.right))
        return
    instance.letters.update({name: machine.facts.declare(f"${name}", 0) for name in new})
    chosen = {f"${name}" for name in new}
    instance.free |= chosen
    for _ in range(_MOST_REFINEMENTS):
        machine.owed = []
        try:
            rights = instance.results(rule.right)
            owed, machine.owed = machine.owed, None
        except SizesDifferError as differ:
            machine.owed = None
            instance.demand(differ)
            continue
        try:
            _check_shapes(machine, instance.results(rule.left), rights)
        except SizesDifferError as differ:
            if not instance.make_equal(differ.one, differ.other, differ.why, among=chosen.__contains__):
                raise
            continue
        if not all(machine.facts.implies(frozenset(), guard) for guard in owed):
            raise NotExpressibleError("the attributes that the right side needs are out of range for some sizes")
        return
    raise NotExpressibleError("no attributes were found that give the right side the shapes of the left side")


class UnlikeError(Exception):
    """Both sides are well typed but have different shapes."""


def _check_shapes(machine: Symbols, lefts: list[Indexed], rights: list[Indexed]) -> None:
    for left, right in zip(lefts, rights, strict=True):
        if left.rank != right.rank:
            raise UnlikeError(f"{left.rank} and {right.rank} dims")
        for one, two in zip(left.shape, right.shape, strict=True):
            if (Polynomial.of(one) - two).constant not in (None, 0):
                raise UnlikeError(f"sizes of {one} and {two}")
            machine.same(one, two, "sizes of the two sides")


def _difference(machine: Symbols, left: Indexed, right: Indexed) -> str | None:
    index = [machine.index(size) for size in left.shape]
    for _ in range(_MOST_REFINEMENTS):
        try:
            known = len(machine.inverted)
            found = machine.equal(left.at(*index), right.at(*index))
            if len(machine.inverted) > known:
                # One side divides by a letter, so it is not 0, on the other side either.
                continue
        except RefineError as refine:
            index = _refined(machine, index, refine)
            continue
        if found is None:
            return None
        where = f"where {sorted(map(str, found[0]))} ≥ 0, " if found[0] else ""
        return f"{where}they differ by {found[1]}"
    return f"an index would have to be divided more than {_MOST_REFINEMENTS} times"


def number_at(rule: Rule, instance: Instance, output: int) -> tuple[list[str], list[str]]:
    """Return (index, lines) for output ``output`` of a proved instance.

    ``index``: a symbolic index, one text per dim. ``lines``: the normal form of the element there, one line per case,
    with the case's condition.
    """
    (tensor,) = instance.results([rule.left[output]])
    machine = instance.machine
    index = [machine.index(size) for size in tensor.shape]
    lines = []
    for given, total in _value_at(machine, tensor, index).cases:
        where = f"  where {', '.join(sorted(f'{guard} ≥ 0' for guard in given))}" if given else ""
        lines.append(f"{simplified(machine.facts, total, given)}{where}")
    return [str(place) for place in index], lines


def _value_at(machine: Symbols, tensor: Indexed, index: list[Polynomial]) -> Value:
    for _ in range(_MOST_REFINEMENTS):
        try:
            value: Value = tensor.at(*index)
            return value
        except RefineError as refine:
            index[:] = _refined(machine, index, refine)
    raise NotExpressibleError(f"an index would have to be divided more than {_MOST_REFINEMENTS} times")


def _refined(machine: Symbols, index: list[Polynomial], refine: RefineError) -> list[Polynomial]:
    outer = machine.facts.fresh("i", 0, refine.quotient)
    inner = machine.facts.fresh("i", 0, refine.by)
    change = {refine.letter: outer * refine.by + inner}
    return [place.substitute(change) for place in index]


def describe_sizes(shapes: dict[str, tuple[Polynomial, ...]]) -> str:
    """Return symbolic shapes as text, for example "x: (x.0, x.1), y: (x.1, y.1)"."""
    return ", ".join(f"{name}: ({', '.join(map(str, shape))})" for name, shape in shapes.items())
