"""Own schedules that are run for real: ranks that run ahead, and ranks that disagree about the order."""

from meshwright.program import Backward, Forward, local_microbatches, num_active


def in_turn(plan, rank, at_most):
    stage = plan.stages_of(rank)[0]
    mine = local_microbatches(plan, stage, rank)
    at_most = min(at_most, len(mine))
    yield from (Forward(stage=stage, microbatch=m) for m in mine[:at_most])
    for done, m in enumerate(mine):
        yield Backward(stage=stage, microbatch=m)
        if at_most + done < len(mine):
            yield Forward(stage=stage, microbatch=mine[at_most + done])


def eager(plan, rank):
    """1F1B with twice the forwards ahead."""
    (stage,) = plan.stages_of(rank)
    return in_turn(plan, rank, at_most=2 * num_active(plan, stage) - 1)


def swapped(plan, rank):
    """All forwards, then backwards: in order, from the last, or neighbours swapped, by the rank."""
    (stage,) = plan.stages_of(rank)
    mine = list(local_microbatches(plan, stage, rank))
    for microbatch in mine:
        yield Forward(stage=stage, microbatch=microbatch)
    match rank % 3:
        case 0:
            backwards = [mine[place ^ 1] for place in range(len(mine)) if place ^ 1 < len(mine)]
            backwards += [microbatch for microbatch in mine if microbatch not in backwards]
        case 1:
            backwards = mine[::-1]
        case _:
            backwards = mine
    for microbatch in backwards:
        yield Backward(stage=stage, microbatch=microbatch)


def crossed(plan, rank):
    """The forwards too: odd stages take microbatches from the last, and never hold more than one."""
    (stage,) = plan.stages_of(rank)
    mine = local_microbatches(plan, stage, rank)
    if stage % 2:
        for microbatch in reversed(mine):
            yield Forward(stage=stage, microbatch=microbatch)
            yield Backward(stage=stage, microbatch=microbatch)
        return
    yield from (Forward(stage=stage, microbatch=microbatch) for microbatch in mine)
    yield from (Backward(stage=stage, microbatch=microbatch) for microbatch in mine)


def stuck(plan, rank):
    """Both stages hold one microbatch, and want different ones."""
    (stage,) = plan.stages_of(rank)
    mine = local_microbatches(plan, stage, rank)
    for microbatch in mine if stage == 0 else reversed(mine):
        yield Forward(stage=stage, microbatch=microbatch)
        yield Backward(stage=stage, microbatch=microbatch)
