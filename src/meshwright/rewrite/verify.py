"""`verify`: decide whether a rule is true.

A rule is proved for all sizes, refuted by an example, only tested, or never applicable, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.rewrite.fuzz import CounterExample, try_rule
from meshwright.rewrite.instances import MOST_DIMS
from meshwright.rewrite.proofs import ILL_TYPED, Proof, describe_sizes, prove
from meshwright.rewrite.rules import Rule, conflict

Status = Literal["proved", "refuted", "tested", "never fits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict on a rule, and ``why``.

    ``status``: "proved" for all sizes; "refuted"; "tested": no trial of ``num_agreed`` disagreed, but no proof was
    found; "never fits": both sides are well typed for no sizes, or only for some that no trial can hold.
    """

    rule: Rule
    status: Status
    why: str
    proof: Proof
    num_agreed: int
    counter_example: CounterExample | None = None


def verify(rule: Rule, *, num_sizes: int = 8, seed: int = 0, most_dims: int = MOST_DIMS) -> Verdict:
    """Try to prove the rule, and to refute it by trials at ``num_sizes`` sets of sizes per choice of ranks and dims."""
    proof = prove(rule, most_dims)
    tried = [attempt.instance for attempt in proof.attempts]
    trials = try_rule(rule, num_sizes=num_sizes, seed=seed, among=tried)
    open_ = [attempt for attempt in proof.attempts if not attempt.proved]
    fitting = [attempt for attempt in open_ if not attempt.why.startswith(ILL_TYPED)]
    status: Status
    unlike = conflict(rule)
    if unlike is not None:
        status, why = "never fits", unlike
    elif trials.counter_example is not None:
        status, why = "refuted", str(trials.counter_example)
    elif proof.ranks and not fitting and not trials.num_agreed:
        # A proof counts only after its definitions were tested by trials.
        status, why = "never fits", "its sizes are too large for any trial"
    elif proof.ranks and not fitting:
        status, why = "proved", _ranks_text(proof)
    elif fitting:
        status, why = "tested", f"{describe_sizes(fitting[0].instance.shapes)}: {fitting[0].why}"
    else:
        status, why = "never fits", open_[0].why if open_ else "the left side is well typed for no sizes"
    return Verdict(
        rule=rule,
        status=status,
        why=why,
        proof=proof,
        num_agreed=trials.num_agreed,
        counter_example=trials.counter_example,
    )


def _ranks_text(proof: Proof) -> str:
    dims = sorted({tuple(entry.values()) for entry in proof.ranks})
    names = ", ".join(proof.ranks[0])
    listed = " or ".join(", ".join(map(str, entry)) for entry in dims[:6])
    more = f" and {len(dims) - 6} more" if len(dims) > 6 else ""
    return f"for all sizes of {names} with {listed} dims{more}"
