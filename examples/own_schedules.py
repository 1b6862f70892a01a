"""Two schedules of our own: functions (plan, rank) that yield a rank's forwards and backwards in order."""

from meshwright.program import Backward, Forward, local_microbatches, num_active


def eager(plan, rank):
    """1F1B that runs further ahead: while gradients are on their way, the next forwards are already done."""
    (stage,) = plan.stages_of(rank)
    yield from in_turn(plan, rank, at_most=2 * num_active(plan, stage) - 1)


def thrifty(plan, rank):
    """1F1B that never holds more than two microbatches, whatever the depth: less memory, more waiting."""
    (stage,) = plan.stages_of(rank)
    yield from in_turn(plan, rank, at_most=min(2, num_active(plan, stage)))


def in_turn(plan, rank, at_most):
    """Forwards until ``at_most`` microbatches are in flight, then one backward and one forward in turn."""
    (stage,) = plan.stages_of(rank)
    mine = local_microbatches(plan, stage, rank)
    at_most = min(at_most, len(mine))
    for microbatch in mine[:at_most]:
        yield Forward(stage=stage, microbatch=microbatch)
    for done, microbatch in enumerate(mine):
        yield Backward(stage=stage, microbatch=microbatch)
        if at_most + done < len(mine):
            yield Forward(stage=stage, microbatch=mine[at_most + done])
