"""Runs many cases and counts: ``python -m tests.fuzz.run --cases 10000 --seed 1``.

Prints one line of JSON: cases, seconds, the largest memory of the process, and each thing that went wrong with its
count and the first case that showed it (as soon as it is seen, on standard error). Exit code 1 if anything did.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.cases import Case, cases
from tests.fuzz.corpus import make_corpus
from tests.fuzz.outcome import try_case
from tests.processes import peak_rss_bytes

MAX_RSS_BYTES = 2 * 2**30


def fuzz(num_cases: int, random_seed: int) -> dict:
    """Try so many cases; nothing is raised for what goes wrong, it is counted."""
    wrong: dict[str, dict] = {}
    count = 0
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        corpus = make_corpus(Path(folder))

    @seed(random_seed)
    @settings(
        max_examples=num_cases,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(corpus))
    def run(case: Case) -> None:
        nonlocal count
        count += 1
        found = try_case(case)
        if found is not None and found not in wrong:
            wrong[found] = {
                "count": 0,
                "arguments": case.arguments,
                "files": _shown(case),
            }
            print(f"{count}: {found}: {' '.join(case.arguments)[:100]!r}", file=sys.stderr, flush=True)
        if found is not None:
            wrong[found]["count"] += 1

    run()
    return {
        "cases": count,
        "seed": random_seed,
        "seconds": round(time.monotonic() - start, 1),
        "max_rss_bytes": peak_rss_bytes(),
        "wrong": wrong,
    }


def _shown(case: Case) -> dict[str, str]:
    return {name: repr(content[:2000]) for name, content in {**case.files, "request": case.request}.items()}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    result = fuzz(options.cases, options.seed)
    print(json.dumps(result))
    return int(bool(result["wrong"]) or result["max_rss_bytes"] > MAX_RSS_BYTES)


if __name__ == "__main__":
    raise SystemExit(main())
