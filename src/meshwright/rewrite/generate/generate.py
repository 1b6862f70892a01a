"""`generate_rules`: enumerate, compare elsewhere, prove, find a basis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright import __version__
from meshwright.rewrite.generate.basis import Proved, commuting, find_basis
from meshwright.rewrite.generate.candidates import rule_of_candidate, unique_candidates
from meshwright.rewrite.generate.domain import usual_domain
from meshwright.rewrite.generate.enumerate import enumerate_terms, hold_elsewhere
from meshwright.rewrite.generate.joined import joined_rules
from meshwright.rewrite.generate.prove import prove_candidates
from meshwright.rewrite.proofs import prove
from meshwright.rewrite.rulebook import BookRule, RuleBook
from meshwright.rewrite.special import special_numbers
from meshwright.spec import EventSink, NullSink

if TYPE_CHECKING:
    from meshwright.rewrite.generate.domain import Step
    from meshwright.rewrite.rules import Rule

# Two other sets of sizes: what is equal at one set by accident is hardly so at three.
ELSEWHERE = ({"m": 3, "k": 4, "n": 2, "c": 5, "h": 5}, {"m": 5, "k": 2, "n": 3, "c": 4, "h": 3})


def generate_rules(
    most_operators: int = 3,
    *,
    steps: Sequence[Step] = (),
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
        # Two candidates may have one reading.
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
