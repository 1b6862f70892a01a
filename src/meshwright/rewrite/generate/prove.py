"""Candidates → proved rules: of each, the most general reading that trials do not refute and that is proved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING

from meshwright.rewrite.fuzz import try_rule
from meshwright.rewrite.generate.readings import readings
from meshwright.rewrite.proofs import prove

if TYPE_CHECKING:
    from meshwright.rewrite.generate.domain import Domain
    from meshwright.rewrite.rules import Rule

# Most candidates that are true are proved with fewer questions to z3, most that are not take many.
_QUESTIONS = 20
_TOGETHER = 16


def prove_candidates(rules: Sequence[Rule], domain: Domain, processes: int = 1) -> Iterator[Rule | None]:
    """For each rule of a candidate, in order, the reading of it that was proved, or None."""
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
