"""Rewriting: rules of others and our own proved or refuted, the search over graphs, and the speed of what it finds.

Seconds are of the process's CPU. Rules of others are read from where the tests have them; the list of XLA's rules was
written down with its sources before the first proof, and stays whole.
"""

from __future__ import annotations

import gzip
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from harness import Row, make_row, publish_sections
from rewrite_search import search, speed

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from meshwright.rewrite.fuzz import try_rule
from meshwright.rewrite.generate.domain import usual_domain
from meshwright.rewrite.generate.enumerate import enumerate_terms, hold_elsewhere
from meshwright.rewrite.generate.generate import (
    ELSEWHERE,
    follows,
    prove_candidates,
    rule_of_candidate,
    unique_candidates,
)
from meshwright.rewrite.importing import read_taso, read_unity
from meshwright.rewrite.proofs import prove
from meshwright.rewrite.rulebook import shipped_rule_book
from meshwright.rewrite.rules import read_rules
from meshwright.rewrite.verify import verify

ROOT = Path(__file__).resolve().parent.parent
OTHERS = ROOT / "tests/rewrite/others"


def others(_quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        unity = Path(folder) / "unity.json"
        unity.write_bytes(gzip.decompress((OTHERS / "graph_subst_3_v2.json.gz").read_bytes()))
        rows = []
        for name, rules, proved in (
            ("TASO", read_taso(OTHERS / "taso_graph_subst.pb"), 129),
            ("Unity", read_unity(unity), 600),
        ):
            start = time.process_time()
            counts = Counter(_decided(rule) for rule in rules)
            seconds = time.process_time() - start
            decided = counts["proved"] + counts["refuted"]
            rows += [
                make_row(f"{name}: rules that are proved", counts["proved"], "rules", baseline=proved),
                make_row(f"{name}: refuted, each with a counter-example", counts["refuted"], "rules"),
                make_row(f"{name}: neither", len(rules) - decided, "rules", target=0 if name == "TASO" else 40),
                make_row(f"{name}: seconds", seconds, "s", target=3.0 if name == "TASO" else None),
            ]
    return rows


def _decided(rule) -> str:
    """By proof, or by trials without a proof."""
    if prove(rule).status == "proved":
        return "proved"
    return verify(rule).status


def xla(quick: bool) -> list[Row]:
    rules = read_rules(ROOT / "src/meshwright/rewrite/rulebook/xla.toml")
    start = time.process_time()
    counts = Counter(prove(rule, 2 if quick else 4).status for rule in rules)
    missing = 90 - counts["proved"]
    return [
        make_row("XLA: rules that are listed", len(rules), "rules"),
        make_row("XLA: proved for all sizes" + (", 2 dims" if quick else ""), counts["proved"], "rules", baseline=90),
        make_row("XLA: proved rules missing of 90", missing, "rules", target=0),
        make_row("XLA: seconds", time.process_time() - start, "s"),
    ]


def terms(quick: bool) -> list[Row]:
    rows = []
    domain = usual_domain()
    most = 3 if quick else 4
    start = time.process_time()
    found = enumerate_terms(domain, most)
    rows.append(make_row(f"terms of up to {most} operators: seconds", time.process_time() - start, "s", target=120.0))
    operators = len({step.operator for step in domain.steps})
    rows.append(make_row("operators that are enumerated", operators, "operators", baseline=16))
    rows.append(make_row(f"terms of up to {most} operators", found.num_terms, "terms"))
    start = time.process_time()
    holds = hold_elsewhere(found, usual_domain(**ELSEWHERE[0]), seed=1)
    holds &= hold_elsewhere(found, usual_domain(**ELSEWHERE[1]), seed=2)
    rows.append(make_row("pairs of equal terms", len(found.pairs), "pairs"))
    rows.append(make_row("of these equal at two other sets of sizes", int(holds.sum()), "pairs"))
    rows.append(make_row("comparing them there: seconds", time.process_time() - start, "s"))
    start = time.process_time()
    candidates = [item for item in unique_candidates(found, holds) if max(item.size) == most]
    basis = [entry.rule for entry in shipped_rule_book().basis]
    derived = follows(found, candidates, basis)
    seconds = time.process_time() - start
    rows += [
        make_row(f"candidates with {most} operators on a side", len(candidates), "candidates"),
        make_row("of these derived from the basis that ships", sum(derived), "candidates"),
        make_row("finding candidates and deriving them: seconds", seconds, "s", target=600.0),
    ]
    left = [item for item, known in zip(candidates, derived, strict=True) if not known]
    some = random.Random(0).sample(left, min(100, len(left)))
    rules = [rule_of_candidate(found, item, str(number)) for number, item in enumerate(some)]
    proved = sum(rule is not None for rule in prove_candidates(rules, domain))
    rows.append(make_row("proved of 100 of the others, drawn at random", proved, "candidates"))
    return rows


def book(quick: bool) -> list[Row]:
    """The rule book that ships: its basis proved again, and tried."""
    rules = shipped_rule_book()
    basis = [entry.rule for entry in rules.basis]
    start = time.process_time()
    proved = sum(prove(rule).status == "proved" for rule in basis)
    seconds = time.process_time() - start
    wanted = 2_000 if quick else 20_000
    each = -(-wanted // len(rules.rules))
    trials = [try_rule(entry.rule, num_sizes=each, seed=7) for entry in rules.rules]
    return [
        make_row("rules of the book", len(rules.rules), "rules", baseline=1000),
        make_row("rules of its basis", len(basis), "rules", target=200),
        make_row("rules of the basis that are not proved", len(basis) - proved, "rules", target=0),
        make_row("proving the basis: seconds", seconds, "s", target=60.0),
        make_row("trials", sum(trial.num_agreed for trial in trials), "trials", baseline=wanted),
        make_row("false rules", sum(trial.counter_example is not None for trial in trials), "rules", target=0),
    ]


RUN = {"others": others, "xla": xla, "terms": terms, "book": book, "search": search, "speed": speed}


if __name__ == "__main__":
    sys.exit(publish_sections("rewrite", __doc__, RUN))
