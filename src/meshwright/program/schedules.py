"""Schedules: in which order each rank computes. Policies that yield data; nothing is executed here.

A schedule is a function (plan, stage, replica) → the rank's forwards and backwards in order. Replica r of a stage
with R replicas has the microbatches r, r + R, r + 2R, … of the plan.

GPipe (Huang et al. 2019): all forwards, then all backwards, last microbatch first is not needed: they run in the
order of the forwards. 1F1B, PipeDream-Flush (Narayanan et al. 2021): at most k microbatches in flight, then one
forward, one backward. With replicated stages k = ceil(R_s + R_(s+1) + … / R_s), PipeDream's number of active
minibatches per replica; no order of such ranks can wait in a circle, because k_s R_s > (k_(s+1) - 1) R_(s+1).

A user's own schedules have the same form: `own_schedules` finds them, `orders` checks what they yield.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from meshwright.spec.plan import Plan
from meshwright.spec.program import Backward, Forward

Schedule = Callable[[Plan, int, int], Iterable[Forward | Backward]]


def gpipe(plan: Plan, stage: int, replica: int) -> Iterator[Forward | Backward]:
    """All forwards, then all backwards in the same order."""
    microbatches = local_microbatches(plan, stage, replica)
    for microbatch in microbatches:
        yield Forward(stage=stage, microbatch=microbatch)
    for microbatch in microbatches:
        yield Backward(stage=stage, microbatch=microbatch)


def one_forward_one_backward(plan: Plan, stage: int, replica: int) -> Iterator[Forward | Backward]:
    """Fill the pipeline, then alternate one forward and one backward, then drain."""
    return in_turn(plan, stage, replica, at_most=num_active(plan, stage))


SCHEDULES: dict[str, Schedule] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def in_turn(plan: Plan, stage: int, replica: int, at_most: int) -> Iterator[Forward | Backward]:
    """Forwards until ``at_most`` microbatches are in flight, then one backward and one forward in turn."""
    microbatches = local_microbatches(plan, stage, replica)
    at_most = min(at_most, len(microbatches))
    for microbatch in microbatches[:at_most]:
        yield Forward(stage=stage, microbatch=microbatch)
    for done, microbatch in enumerate(microbatches):
        yield Backward(stage=stage, microbatch=microbatch)
        if at_most + done < len(microbatches):
            yield Forward(stage=stage, microbatch=microbatches[at_most + done])


def local_microbatches(plan: Plan, stage: int, replica: int) -> range:
    """The microbatches of one replica of a stage, in order."""
    return range(replica, plan.num_microbatches, len(plan.stages[stage].ranks))


def num_active(plan: Plan, stage: int) -> int:
    """Microbatches that a replica of ``stage`` must have in flight so that nothing waits: PipeDream's number.

    ceil(R_s + R_(s+1) + … / R_s) for R_s replicas of stage s; p - s in a pipeline of p stages without replicas.
    """
    later = sum(len(item.ranks) for item in plan.stages[stage:])
    return -(-later // len(plan.stages[stage].ranks))
