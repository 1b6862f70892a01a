"""Write the rule books that ship anew.

.venv/bin/python scripts/renew_rules.py [--processes N] [BOOK ...]

generated: all rules between terms of up to three operators, in some minutes. torch, xla: what is proved of the rules in
the file of that name, in two minutes.
"""

import argparse
import gzip
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from meshwright import __version__
from meshwright.rewrite.generate.generate import generate_rules
from meshwright.rewrite.rulebook import BookRule, RuleBook, write_rule_book
from meshwright.rewrite.rules import Rule, read_rules
from meshwright.rewrite.special import special_numbers
from meshwright.rewrite.verify import verify

SECONDS = 60
FOLDER = Path(__file__).resolve().parent.parent / "src/meshwright/rewrite/rulebook"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("books", nargs="*", default=["generated", "torch", "xla"])
    options = parser.parse_args()
    for name in options.books:
        if name == "generated":
            book = generate_rules(3, processes=options.processes)
        else:
            book = prove_file(FOLDER / f"{name}.toml", options.processes)
        place = FOLDER / f"{name}.json.gz"
        with TemporaryDirectory() as folder:
            made = Path(folder) / "rules.json"
            write_rule_book(book, made)
            # No time and no name in the header: the same rules are the same bytes.
            place.write_bytes(gzip.compress(made.read_bytes(), mtime=0))
        print(f"{len(book.rules):,} rules, {len(book.basis)} of them a basis, in {place}")


def prove_file(path: Path, processes: int | None) -> RuleBook:
    rules = read_rules(path)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        entries = [entry for entry in pool.map(prove_one, rules) if entry is not None]
    provenance = {"file": path.name, "prover": f"meshwright {__version__}", "num_rules": len(rules)}
    return RuleBook(rules=tuple(entries), provenance=provenance)


def prove_one(rule: Rule) -> BookRule | None:
    """A rule with its proof; None if it has none, or is not tried through in a minute of processor time."""
    signal.signal(signal.SIGVTALRM, lambda *_: (_ for _ in ()).throw(TimeoutError))
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        return _proved(rule)
    except TimeoutError:
        print(f"left out after {SECONDS} s: {rule.name}", flush=True)
        return None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _proved(rule: Rule) -> BookRule | None:
    # Many choices of ranks and sizes of 1, each at two sets of sizes: more than eight for nearly every rule.
    verdict = verify(rule, num_sizes=2)
    if verdict.num_agreed < 8:
        verdict = verify(rule)
    if verdict.status != "proved" or not verdict.num_agreed:
        return None
    ranks = tuple(tuple(each[name] for name in rule.names) for each in verdict.proof.ranks)
    return BookRule(rule=rule, ranks=ranks, special=special_numbers(rule))


if __name__ == "__main__":
    main()
