"""One stage of a plan: its layers, its ranks, and which of them computes which microbatch.

Replicas compute microbatches in turn: replica m mod R computes microbatch m. If they have ``shares``, replica r
computes ``shares[r]`` of a step's M microbatches, and its k-th comes when k + 1/2 of its share is due,

    at (k + 1/2) / shares[r]  of the step; among several at one place the first replica comes first

so that a replica with a larger share takes turns more often. Equal shares are the same as none if R divides M.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from meshwright.spec.errors import PlanError

if TYPE_CHECKING:
    from meshwright.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Layers ``start:stop`` on ``ranks``, one replica per rank.

    ``feeds``: the stages that receive this one's values, if stages form parallel branches; empty in a chain.
    ``shares``: the number of microbatches of a step for each replica; empty if they take turns.
    """

    start: int
    stop: int
    ranks: tuple[int, ...]
    feeds: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.shares and (len(self.shares) != len(self.ranks) or min(self.shares) < 1):
            raise PlanError(
                f"The shares {list(self.shares)} were given for the ranks {list(self.ranks)}; expected a number of "
                "microbatches, at least 1, for each of them."
            )

    @property
    def turns(self) -> tuple[int, ...]:
        """The replica of each microbatch in turn; the sequence repeats."""
        return _deal(self.shares) if self.shares else tuple(range(len(self.ranks)))

    def rank_of(self, microbatch: int) -> int:
        """The rank whose replica computes this microbatch."""
        if not self.shares:
            return self.ranks[microbatch % len(self.ranks)]
        turns = self.turns
        return self.ranks[turns[microbatch % len(turns)]]

    def counts(self, num_microbatches: int) -> tuple[int, ...]:
        """How many of a step's microbatches each replica computes."""
        if self.shares:
            return self.shares
        count, rest = divmod(num_microbatches, len(self.ranks))
        return tuple(count + (replica < rest) for replica in range(len(self.ranks)))

    def microbatches_of(self, replica: int, num_microbatches: int) -> range | tuple[int, ...]:
        """The microbatches of a step that a replica computes, in order."""
        if not self.shares:
            return range(replica, num_microbatches, len(self.ranks))
        return tuple(microbatch for microbatch, own in enumerate(self.turns) if own == replica)

    def describe(self) -> str:
        """``0:4 ×2``, or ``0:4 ×2 (3 + 1)`` where shares differ."""
        alike = len(set(self.shares)) < 2
        shares = "" if alike else f" ({' + '.join(map(str, self.shares))})"
        return f"{self.start}:{self.stop} ×{len(self.ranks)}{shares}"


@lru_cache(maxsize=256)
def _deal(shares: tuple[int, ...]) -> tuple[int, ...]:
    """The replica of each microbatch of a step."""
    replica = np.repeat(np.arange(len(shares)), shares)
    place = np.concatenate([(np.arange(share) + 0.5) / share for share in shares])
    return tuple(replica[np.lexsort((replica, place))].tolist())


def check_shares(plan: Plan, index: int) -> None:
    """Raise PlanError unless the shares of a stage add up and the plan may have unequal shares."""
    stage = plan.stages[index]
    if sum(stage.shares) != plan.num_microbatches:
        raise PlanError(
            f"The replicas of stage {index} have shares of {' + '.join(map(str, stage.shares))} microbatches; expected "
            f"the {plan.num_microbatches} of a step in all."
        )
    if plan.is_asynchronous or plan.exchange.every_steps > 1:
        what = f"the schedule {plan.schedule}" if plan.is_asynchronous else "sums that are not of every step"
        raise PlanError(
            f"Shares of microbatches were given for stage {index} and {what}, where replicas update weights by "
            "themselves; expected equal shares. Leave them out, or choose another."
        )


def takes_part_alike(num_replicas: int, num_microbatches: int, zero: int) -> bool:
    """Whether replicas that take turns may shard states: with ZeRO 2 and 3 all gather and scatter in every pass."""
    return zero < 2 or num_microbatches % num_replicas == 0


def check_counts(plan: Plan) -> None:
    """Raise PlanError if replicas gather and scatter in every pass, but have unequal numbers of passes."""
    for index, stage in enumerate(plan.stages) if plan.exchange.zero >= 2 else ():
        counts = sorted(set(stage.counts(plan.num_microbatches)))
        if len(counts) > 1:
            raise PlanError(
                f"The replicas of stage {index} compute {' and '.join(map(str, counts))} microbatches, while all of "
                f"them gather and scatter in every one (ZeRO {plan.exchange.zero}). Choose a number of microbatches "
                f"that {len(stage.ranks)} divides, or plan with --zero 1 or 0."
            )
