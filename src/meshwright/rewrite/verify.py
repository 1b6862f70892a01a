"""`verify`: decide whether both sides of a rule compute the same tensors.

The verdict on a rule is one of: proved for all sizes, refuted by a counter-example, only tested, or never applicable.
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
    """The verdict on a rule; ``why`` gives the reason in words.

    ``status``: "proved": proved for all sizes. "refuted": ``counter_example`` shows that the sides differ. "tested":
    no trial found a difference, but there is no proof. "never fits": no sizes exist at which both sides are well
    typed, or only sizes too large for a trial. ``num_agreed``: the number of trials in which both sides were equal.
    """

    rule: Rule
    status: Status
    why: str
    proof: Proof
    num_agreed: int
    counter_example: CounterExample | None = None


def verify(rule: Rule, *, num_sizes: int = 8, seed: int = 0, most_dims: int = MOST_DIMS) -> Verdict:
    """Return the verdict on a rule: try to prove it, and try to refute it by trials on random tensors.

    ``num_sizes``: the number of trials, each with other sizes, per choice of ranks and dims. ``most_dims``: the most
    dims of a tensor.
    """
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
        status, why = "never fits", "all sizes at which both sides are well typed are too large for a trial"
    elif proof.ranks and not fitting:
        status, why = "proved", _ranks_text(proof)
    elif fitting:
        status, why = "tested", f"{describe_sizes(fitting[0].instance.shapes)}: {fitting[0].why}"
    else:
        status, why = "never fits", open_[0].why if open_ else "there are no sizes at which the left side is well typed"
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
