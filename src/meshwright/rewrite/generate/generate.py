"""`generate_rules`: find rewrite rules by enumerating terms.

1. Terms are enumerated, and pairs with equal values are compared at two other sets of sizes.
2. Equal pairs become candidates (`unique_candidates`). A candidate's attributes can be generalised in several ways
   (`readings`); the most general reading that trials do not refute and that is proved becomes the rule
   (`prove_candidates`).
3. `find_basis` chooses a basis, from which the other rules follow.
4. Rules about adjacent slices of one term are combined into rules of two outputs. If ``slice(t, start, cut) = a`` and
   ``slice(t, cut, stop) = b`` are rules, a and b can both be computed from one t: two products of one input are the
   halves of one product with concatenated weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from meshwright import __version__
from meshwright.rewrite.egraph import EGraph
from meshwright.rewrite.expressions import Attribute, Call, Expression, Formula, Name, letters_of, value_of
from meshwright.rewrite.fuzz import try_rule
from meshwright.rewrite.generate.domain import Domain, OperatorStep, usual_domain
from meshwright.rewrite.generate.enumerate import Enumeration, enumerate_terms, hold_elsewhere
from meshwright.rewrite.matching import SaturationLimits, directions, saturate
from meshwright.rewrite.proofs import prove
from meshwright.rewrite.rulebook import BookRule, RuleBook
from meshwright.rewrite.rules import Rule, rule_of
from meshwright.rewrite.special import special_numbers
from meshwright.rewrite.terms import INPUT, TensorType, TermNode
from meshwright.spec import EventSink, NullSink

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# A term in prefix order: numbers of steps, with given tensors below 0.
Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RuleCandidate:
    """Two terms that were equal at all tested sizes; ``size``: the number of operators of each."""

    left: int
    right: int
    size: tuple[int, int]


def unique_candidates(found: Enumeration, holds: NDArray[np.bool_]) -> list[RuleCandidate]:
    """Return the pairs for which ``holds`` is True as candidates without duplicates, those with few operators first.

    Pairs that differ only in names of tensors, in the order of commuting operands or in shapes become one candidate.
    A pair is dropped if its right side has a tensor that the left side lacks, or if it is a special case of another
    pair, with one tensor in place of several.
    """
    writer = _Writer(found)
    groups: dict[tuple[Tokens, Tokens], dict[Tokens, RuleCandidate]] = defaultdict(dict)
    for left, right in found.pairs[holds].tolist():
        sides = writer.named(left, right)
        if sides is None:
            continue
        one, two = sides
        skeleton = tuple(max(t, -1) for t in one), tuple(max(t, -1) for t in two)
        naming = tuple(t for t in (*one, *two) if t < 0)
        size = sum(t >= 0 for t in one), sum(t >= 0 for t in two)
        groups[skeleton].setdefault(naming, RuleCandidate(left, right, size))
    kept: list[RuleCandidate] = []
    for namings in groups.values():
        general: list[Tokens] = []
        for naming in sorted(namings, key=lambda names: -len(set(names))):
            if not any(_is_instance(other, naming) for other in general):
                general.append(naming)
                kept.append(namings[naming])
    return sorted(kept, key=lambda c: (sum(c.size), c.size, c.left))


def rule_of_candidate(found: Enumeration, candidate: RuleCandidate, name: str) -> Rule:
    """Return a candidate as a rule that is restricted to the ranks of its tensors."""
    left, right = found.expression(candidate.left), found.expression(candidate.right)
    rule = Rule(name=name, left=(left,), right=(right,), source="generated")
    ranks = tuple((tensor, len(found.domain.shape(tensor))) for tensor in rule.names)
    return Rule(name=name, left=(left,), right=(right,), ranks=ranks, source="generated")


class _Writer:
    """Writes terms as tokens, operands that commute in a fixed order."""

    def __init__(self, found: Enumeration) -> None:
        self._found = found
        self._known: dict[int, Tokens] = {}

    def named(self, left: int, right: int) -> tuple[Tokens, Tokens] | None:
        """Both sides with tensors numbered by first use; None if the right has one that the left lacks."""
        one, two = self._tokens(left), self._tokens(right)
        names: dict[int, int] = {}
        renamed = tuple(t if t >= 0 else names.setdefault(t, -1 - len(names)) for t in one)
        if any(t < 0 and t not in names for t in two):
            return None
        return renamed, tuple(t if t >= 0 else names[t] for t in two)

    def _tokens(self, term: int) -> Tokens:
        known = self._known.get(term)
        if known is not None:
            return known
        found = self._found
        step = int(found.steps[term])
        if step < 0:
            tokens: Tokens = (-1 - int(found.first[term]),)
        else:
            chosen = found.domain.steps[step]
            parts = [self._tokens(int(found.first[term]))]
            if chosen.num_operands == 2:
                parts.append(self._tokens(int(found.second[term])))
                if chosen.commutes:
                    parts.sort(key=lambda part: tuple(max(t, -1) for t in part))
            tokens = (step, *(t for part in parts for t in part))
        self._known[term] = tokens
        return tokens


def _is_instance(general: Tokens, special: Tokens) -> bool:
    named: dict[int, int] = {}
    return all(named.setdefault(one, two) == two for one, two in zip(general, special, strict=True))


# Attributes that are equal in all convolutions and pools of a rule, and may then have any value.
_WINDOWS = ("stride", "padding", "dilation", "kernel", "groups", "low", "high")
_MOST_READINGS = 40


# An enumerated term cuts a tensor at ``m``, because some tensor has m rows. The rule behind an equality may hold for
# every position of the cut, or only for the rows of one of its tensors; both are tried, and the first that is proved is
# taken.
def readings(rule: Rule, domain: Domain) -> Iterator[Rule]:
    """Yield generalisations of a rule, the most general first, at most 40.

    Sizes and shapes in attributes, and the parameters of convolutions and pools, are replaced by letters (any value) or
    by sizes of the rule's tensors.
    """
    found = [part for side in (*rule.left, *rule.right) for part in _attributes(side)]
    slots = list(dict.fromkeys(found))
    options = [list(_options(name, value, rule, domain, slots)) for name, value in slots]
    for number, chosen in enumerate(product(*options)):
        if number == _MOST_READINGS:
            break
        values = dict(zip(slots, chosen, strict=True))
        sides = [tuple(_replaced(side, values) for side in sides) for sides in (rule.left, rule.right)]
        bound, used = ({letter for side in part for _, letter in letters_of(side)} for part in sides)
        if used <= bound:
            yield replace(rule, left=sides[0], right=sides[1])


def _options(
    name: str, value: Attribute, rule: Rule, domain: Domain, slots: list[tuple[str, Attribute]]
) -> Iterator[Attribute]:
    place = slots.index((name, value))
    if name in _WINDOWS:
        yield Formula("", (f"{name}{place}",)) if name != "groups" else value
        if name != "groups":
            yield value
    elif name == "shape":
        yield Formula("", (f"shape{place}",))
        for tensor in rule.names:
            if domain.shape(tensor) == _numbers(value, domain):
                yield Formula("shape", (Formula("", (tensor,)),))
    elif name in ("start", "stop") and not isinstance(value, int):
        yield Formula("", (f"cut{_cut_readings(value, slots)}",))
        yield from _sizes(value, rule, domain)
    else:
        yield value


def _cut_readings(value: Attribute, slots: list[tuple[str, Attribute]]) -> int:
    """Equal cut positions are one letter, whether something starts or stops there."""
    return next(i for i, (name, held) in enumerate(slots) if name in ("start", "stop") and held == value)


def _sizes(value: Attribute, rule: Rule, domain: Domain) -> Iterator[Attribute]:
    if isinstance(value, Formula) and value.function == "+":
        for one, two in product(*(list(_sizes(part, rule, domain)) for part in value.arguments)):
            yield Formula("+", (one, two))
        return
    shapes = dict(domain.tensors)
    for tensor in rule.names:
        for dim, size in enumerate(shapes[tensor]):
            if isinstance(value, Formula) and not value.function and size == value.arguments[0]:
                yield Formula("size", (Formula("", (tensor,)), dim))


def _numbers(value: Attribute, domain: Domain) -> Any:
    return value_of(value, {}, dict(domain.sizes))


def _attributes(side: Expression) -> Iterator[tuple[str, Attribute]]:
    if isinstance(side, Name):
        return
    for operand in side.operands:
        yield from _attributes(operand)
    yield from side.attributes


def _replaced(side: Expression, values: dict[tuple[str, Attribute], Attribute]) -> Expression:
    if isinstance(side, Name):
        return side
    operands = tuple(_replaced(operand, values) for operand in side.operands)
    return Call(side.operator, operands, tuple((name, values[name, value]) for name, value in side.attributes))


_AT_ONCE = 60
# No time limit, so that every machine finds the same rules.
_SHORT = SaturationLimits(rounds=3, nodes=60_000, seconds=600.0, matches=20_000)
_LIMITS = SaturationLimits(rounds=4, nodes=60_000, seconds=600.0, matches=20_000)


@dataclass(frozen=True, slots=True)
class Proved:
    """A candidate and the rule that was proved for it."""

    candidate: RuleCandidate
    rule: Rule


# A basis is a small subset of the true rules from which the others follow. Rules are taken in order of size. Both sides
# of many rules are put into one e-graph, which the current basis saturates; the first rule whose sides are not found
# equal joins the basis, and saturation continues. Sides found equal are derived from proved rules, and so proved, too.
def find_basis(
    found: Enumeration, proved: Sequence[Proved], events: EventSink | None = None
) -> tuple[list[Proved], list[Proved]]:
    """Divide proved rules into (basis, rules that follow from the basis); ``proved`` is in order of size."""
    sink = events or NullSink()
    basis: list[Proved] = []
    derived: list[Proved] = []
    rules = [way for rule in commuting(found.domain) for way in directions(rule)]
    for start in range(0, len(proved), _AT_ONCE):
        waiting = list(proved[start : start + _AT_ONCE])
        graph = EGraph()
        sides = {id(item): _sides(graph, found, item.candidate) for item in waiting}
        saturate(graph, rules, _LIMITS)
        while waiting:
            left = [item for item in waiting if graph.find(sides[id(item)][0]) != graph.find(sides[id(item)][1])]
            derived += [item for item in waiting if not any(item is other for other in left)]
            waiting = left
            if waiting:
                first = waiting.pop(0)
                basis.append(first)
                added = directions(first.rule)
                rules += added
                graph.merge(*sides[id(first)])
                graph.rebuild()
                saturate(graph, added, _LIMITS)
        sink.progress("find a basis", min(start + _AT_ONCE, len(proved)), len(proved))
    return basis, derived


def follows(found: Enumeration, candidates: Sequence[RuleCandidate], rules: Sequence[Rule]) -> list[bool]:
    """Return for each candidate whether an e-graph with these rules shows its two terms to be equal."""
    ways = [way for rule in rules for way in directions(rule)]
    answers = []
    for start in range(0, len(candidates), _AT_ONCE):
        graph = EGraph()
        sides = [_sides(graph, found, item) for item in candidates[start : start + _AT_ONCE]]
        saturate(graph, ways, _SHORT)
        answers += [graph.find(one) == graph.find(two) for one, two in sides]
    return answers


def commuting(domain: Domain) -> list[Rule]:
    """Return the commutativity rules of a domain's commuting operators, whose operands are enumerated in one order."""
    return [
        rule_of(f"{step.operator} commutes", f"{step.operator}(x, y)", f"{step.operator}(y, x)", source="enumeration")
        for step in domain.steps
        if step.commutes
    ]


def _sides(graph: EGraph, found: Enumeration, candidate: RuleCandidate) -> tuple[int, int]:
    sizes = dict(found.domain.sizes)

    def build(side: Expression) -> int:
        if isinstance(side, Name):
            type_ = TensorType(found.domain.shape(side.name), "float32")
            return graph.add(TermNode(INPUT, (), (("name", side.name), ("kind", "batch"))), type_)
        operands = tuple(map(build, side.operands))
        attributes = tuple((name, value_of(value, {}, sizes)) for name, value in side.attributes)
        return graph.add(TermNode(side.operator, operands, attributes))

    return build(found.expression(candidate.left)), build(found.expression(candidate.right))


# Two other sets of sizes: terms that are equal at one set by accident are hardly ever equal at three.
ELSEWHERE = ({"m": 3, "k": 4, "n": 2, "c": 5, "h": 5}, {"m": 5, "k": 2, "n": 3, "c": 4, "h": 3})


def generate_rules(
    most_operators: int = 3,
    *,
    steps: Sequence[OperatorStep] = (),
    processes: int = 1,
    seed: int = 0,
    events: EventSink | None = None,
) -> RuleBook:
    """Return rules between terms of up to ``most_operators`` operators, each proved for all sizes.

    ``steps``: additional operators; if given, only rules that contain one of them are kept. ``processes``: the number
    of processes for proofs. ``seed``: seed of random numbers. ``events``: receives progress events.
    """
    sink = events or NullSink()
    domain = usual_domain(*steps)
    found = enumerate_terms(domain, most_operators, seed=seed, events=sink)
    holds = hold_elsewhere(found, usual_domain(*steps, **ELSEWHERE[0]), seed=seed + 1)
    holds &= hold_elsewhere(found, usual_domain(*steps, **ELSEWHERE[1]), seed=seed + 2)
    candidates = unique_candidates(found, holds)
    new = {step.operator for step in steps}
    rules = [rule_of_candidate(found, item, f"rule {number}") for number, item in enumerate(candidates, 1)]
    wanted = [(item, rule) for item, rule in zip(candidates, rules, strict=True) if not new or _uses(rule, new)]
    proved = []
    for done, (reading, (item, _)) in enumerate(
        zip(prove_candidates([rule for _, rule in wanted], domain, processes), wanted, strict=True), 1
    ):
        if reading is not None:
            proved.append(Proved(item, reading))
        sink.progress("prove candidates", done, len(wanted))
    basis, derived = find_basis(found, proved, sink)
    chosen = {id(item) for item in basis}
    texts: set[str] = set()
    entries = [_entry(rule, basis=True) for rule in commuting(domain) if not new or _uses(rule, new)]
    for each in sorted((*basis, *derived), key=lambda one: int(one.rule.name.split()[1])):
        # Two candidates may have the same reading.
        if str(each.rule) not in texts:
            texts.add(str(each.rule))
            entries.append(_entry(each.rule, basis=id(each) in chosen))
    several = joined_rules([entry.rule for entry in entries])
    entries += [_entry(rule, basis=False) for rule in several if prove(rule).status == "proved"]
    return RuleBook(
        rules=tuple(entries),
        provenance={
            "generator": f"meshwright {__version__}",
            "operators": sorted({step.operator for step in domain.steps}),
            "most_operators": most_operators,
            "seed": seed,
            "num_terms": found.num_terms,
            "num_equal": len(found.pairs),
            "num_equal_elsewhere": int(holds.sum()),
            "num_candidates": len(wanted),
            "num_proved": len(proved),
        },
    )


def _uses(rule: Rule, operators: set[str]) -> bool:
    return any(f"{operator}(" in str(rule) for operator in operators)


def _entry(rule: Rule, *, basis: bool) -> BookRule:
    source = f"generated, {rule.name}" if rule.source == "generated" else rule.source
    named = replace(rule, source=source)
    ranks = tuple(tuple(each[name] for name in rule.names) for each in prove(rule).ranks)
    return BookRule(rule=named, ranks=ranks, special=special_numbers(rule), basis=basis)


def joined_rules(rules: Sequence[Rule]) -> Iterator[Rule]:
    """Yield rules of two outputs, each from two rules about adjacent slices of one term."""
    firsts: dict[tuple[Expression, object, object], list[Rule]] = {}
    for rule in rules:
        cut = _cut(rule)
        if cut is not None and cut["start"] == 0:
            firsts.setdefault((_whole(rule), cut["axis"], cut["stop"]), []).append(rule)
    for rule in rules:
        cut = _cut(rule)
        if cut is None or cut["start"] == 0:
            continue
        for first in firsts.get((_whole(rule), cut["axis"], cut["start"]), ()):
            # Slicing two tensors out of their own concatenation gains nothing.
            calls = isinstance(first.right[0], Call) and isinstance(rule.right[0], Call)
            if calls and first.right != rule.right:
                yield Rule(
                    name=f"{first.name} and {rule.name}",
                    left=(first.right[0], rule.right[0]),
                    right=(first.left[0], rule.left[0]),
                    ranks=tuple(dict((*first.ranks, *rule.ranks)).items()),
                    source=first.source,
                )


def _cut(rule: Rule) -> dict[str, object] | None:
    """The attributes of the slice on a rule's left side."""
    left = rule.left[0]
    if len(rule.left) > 1 or not isinstance(left, Call) or left.operator != "slice":
        return None
    return dict(left.attributes)


def _whole(rule: Rule) -> Expression:
    left = rule.left[0]
    assert isinstance(left, Call)
    return left.operands[0]


# Most true candidates need fewer z3 questions; most false ones need many.
_QUESTIONS = 20
_TOGETHER = 16


def prove_candidates(rules: Sequence[Rule], domain: Domain, processes: int = 1) -> Iterator[Rule | None]:
    """Yield, for each rule of a candidate, in order, its most general proved reading; None if no reading is proved."""
    work = partial(proved_reading, domain=domain)
    if processes == 1:
        yield from map(work, rules)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(work, rules, chunksize=_TOGETHER)


def proved_reading(rule: Rule, domain: Domain) -> Rule | None:
    """Return the first reading that trials do not refute and that is proved; None if there is no such reading."""
    for reading in readings(rule, domain):
        likely = try_rule(reading, num_sizes=2).counter_example is None
        if likely and prove(reading, questions=_QUESTIONS).status == "proved":
            return reading
    return None
