"""`generate_rules`: enumerate, compare elsewhere, prove, find a basis.

Rules of several outputs combine terms that are parts of one. If ``slice(t, start, cut) = a`` and ``slice(t, cut, stop)
= b`` are rules, a and b both follow from t, computed once: two products of one input are the halves of one product
with concatenated weights.

For each candidate, the most general reading is kept that is proved and not refuted by trials.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING

from meshwright import __version__
from meshwright.rewrite.expressions import Call, Expression
from meshwright.rewrite.fuzz import try_rule
from meshwright.rewrite.generate.basis import Proved, commuting, find_basis
from meshwright.rewrite.generate.candidates import rule_of_candidate, unique_candidates
from meshwright.rewrite.generate.domain import usual_domain
from meshwright.rewrite.generate.enumerate import enumerate_terms, hold_elsewhere
from meshwright.rewrite.generate.readings import readings
from meshwright.rewrite.proofs import prove
from meshwright.rewrite.rulebook import BookRule, RuleBook
from meshwright.rewrite.rules import Rule
from meshwright.rewrite.special import special_numbers
from meshwright.spec import EventSink, NullSink

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from meshwright.rewrite.generate.domain import Domain, OperatorStep
    from meshwright.rewrite.rules import Rule

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
    """Rules between terms of up to ``most_operators`` operators, each proved for all sizes.

    ``steps``: operators beside the usual ones; with some, only rules about them are kept.
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
    """Rules of two outputs, from pairs of rules about the parts of one term."""
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
    """For each rule of a candidate, in order, its proved reading, or None."""
    work = partial(proved_reading, domain=domain)
    if processes == 1:
        yield from map(work, rules)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(work, rules, chunksize=_TOGETHER)


def proved_reading(rule: Rule, domain: Domain) -> Rule | None:
    """The first reading that is proved."""
    for reading in readings(rule, domain):
        likely = try_rule(reading, num_sizes=2).counter_example is None
        if likely and prove(reading, questions=_QUESTIONS).status == "proved":
            return reading
    return None
