"""Why a rule holds, in words: the sizes that fit both sides, and the number that both are at an index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.rewrite.instances import MOST_DIMS
from meshwright.rewrite.proofs import describe_sizes, number_at
from meshwright.rewrite.verify import verify

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshwright.rewrite.proofs import Attempt
    from meshwright.rewrite.rules import Rule

_MOST_CHARACTERS = 2000


def explain_rule(rule: Rule, most_dims: int = MOST_DIMS) -> Iterator[str]:
    """Lines that explain a rule's verdict, with the proof at the first ranks for which there is one."""
    verdict = verify(rule, most_dims=most_dims)
    yield f"{rule.name}: {rule}"
    if rule.source:
        yield f"source: {rule.source}"
    yield f"{verdict.status}: {verdict.why}"
    yield f"{verdict.num_agreed} trials over a prime field agreed"
    proved = [attempt for attempt in verdict.proof.attempts if attempt.proved]
    if proved:
        # The last instance has the most dims, and shows the most.
        yield from _shown(rule, proved[-1])


def _shown(rule: Rule, attempt: Attempt) -> Iterator[str]:
    instance = attempt.instance
    yield f"with {describe_sizes(instance.shapes)}"
    letters = {name: value for name, value in instance.letters.items() if not str(value).startswith("$")}
    if letters:
        yield f"and {', '.join(f'{name} = {value}' for name, value in letters.items())}"
    for output in range(len(rule.left)):
        index, lines = number_at(rule, instance, output)
        yield f"both sides of output {output} at ({', '.join(index)}) are"
        for line in lines:
            yield f"  {line[:_MOST_CHARACTERS]}{' …' if len(line) > _MOST_CHARACTERS else ''}"
