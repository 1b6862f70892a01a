"""Two optional repairs of training with delayed gradients under an asynchronous plan.

A gradient that was computed with version v of a stage's weights makes version v + 1 + d: its staleness is d updates.

    predict     read w + d (w - w') in place of w, with w' the version before: where the weights will be when the
                gradient arrives, if each update is like the last one. For SGD with momentum that is SpecTrain's
                prediction, for Adam that of XPipe.
    discount    update with 1 / d ** p of the learning rate, where d > 1; p falls from 1 to 0 in ``fade_updates``
                updates, or stays 1. That is PipeMare's first technique.

Sources: Chen, Yang, Cheng, "Efficient and Robust Parallel DNN Training through Model Parallelism on Multi-GPU Platform"
(1809.02839, section 3.3); Guan et al., "XPipe" (1911.04610, section 3); Yang et al., "PipeMare" (1910.05124, section
3.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from meshwright.runtime.rank_program import RankProgram
from meshwright.spec.errors import PlanError, suggest
from meshwright.spec.instructions import Backward, OptimizerStep
from meshwright.spec.placement import Placement
from meshwright.spec.plan import Plan

RepairKind = Literal["predict", "discount"]
REPAIRS: tuple[RepairKind, ...] = get_args(RepairKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """The remedy for staleness; ``fade_updates`` is for a discount, 0 if it does not fade."""

    kind: RepairKind
    fade_updates: int = 0

    def __post_init__(self) -> None:
        if self.kind not in REPAIRS:
            raise PlanError(
                f"The repair {self.kind!r} was given{suggest(self.kind, REPAIRS)}; expected {' or '.join(REPAIRS)}."
            )
        if self.fade_updates < 0 or (self.fade_updates and self.kind != "discount"):
            raise PlanError(
                f"{self.fade_updates} updates until the repair {self.kind} has faded were given; expected 0 or more "
                "for a discount, and 0 for others."
            )

    def rate(self, staleness: int, num_updates: int) -> float:
        """The factor of the learning rate after ``num_updates`` updates."""
        if self.kind != "discount" or staleness <= 1:
            return 1.0
        faded = min(num_updates / self.fade_updates, 1.0) if self.fade_updates else 0.0
        return float(staleness ** (faded - 1.0))


def check_repair(plan: Plan | Placement, repair: Repair | None) -> None:
    """Raise PlanError if a repair was given for a synchronous plan."""
    if repair is not None and not (isinstance(plan, Plan) and plan.is_asynchronous):
        what = f"the schedule {plan.schedule}" if isinstance(plan, Plan) else "a placement"
        raise PlanError(
            f"The repair {repair.kind} was given for {what}, which is synchronous: no gradient is stale. Leave it out."
        )


def find_staleness(body: RankProgram) -> dict[int, int]:
    """By stage, the largest number of updates between reading the weights of a gradient and applying it."""
    found: dict[int, int] = {}
    used: dict[int, list[int]] = {}
    for item in body.computations:
        match item.instruction:
            case Backward(stage=stage, version=version):
                used.setdefault(stage, []).append(version)
            case OptimizerStep(stage=stage, version=version):
                stale = version - min(used.pop(stage, [version]))
                found[stage] = max(found.get(stage, 0), stale)
            case _:
                pass
    return found
