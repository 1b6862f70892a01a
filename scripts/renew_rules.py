"""Write the rule book that ships anew: all rules between terms of up to three operators, in some minutes.

.venv/bin/python scripts/renew_rules.py [--processes N]
"""

import argparse
import gzip
import os
from pathlib import Path
from tempfile import TemporaryDirectory

from meshwright.rewrite.generate.generate import generate_rules
from meshwright.rewrite.rulebook import write_rule_book

PLACE = Path(__file__).resolve().parent.parent / "src/meshwright/rewrite/rulebook/generated.json.gz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    book = generate_rules(3, processes=parser.parse_args().processes)
    with TemporaryDirectory() as folder:
        made = Path(folder) / "rules.json"
        write_rule_book(book, made)
        # No time and no name in the header: the same rules are the same bytes.
        PLACE.write_bytes(gzip.compress(made.read_bytes(), mtime=0))
    print(f"{len(book.rules):,} rules, {len(book.basis)} of them the basis, in {PLACE}")


if __name__ == "__main__":
    main()
