"""Own schedules that are run for real: ranks that run ahead, and ranks that disagree about the order."""

from __future__ import annotations

from meshwright.program import Backward, Forward, in_turn, local_microbatches, num_active


def eager(plan, stage, replica):
    """1F1B with twice the forwards ahead."""
    return in_turn(plan, stage, replica, at_most=2 * num_active(plan, stage) - 1)


def swapped(plan, stage, replica):
    """All forwards, then backwards: in order, from the last, or neighbours swapped, by the rank."""
    mine = list(local_microbatches(plan, stage, replica))
    for microbatch in mine:
        yield Forward(stage=stage, microbatch=microbatch)
    match (stage + replica) % 3:
        case 0:
            backwards = [mine[place ^ 1] for place in range(len(mine)) if place ^ 1 < len(mine)]
            backwards += [microbatch for microbatch in mine if microbatch not in backwards]
        case 1:
            backwards = mine[::-1]
        case _:
            backwards = mine
    for microbatch in backwards:
        yield Backward(stage=stage, microbatch=microbatch)


def crossed(plan, stage, replica):
    """The forwards too: odd stages take microbatches from the last, and never hold more than one."""
    mine = local_microbatches(plan, stage, replica)
    if stage % 2:
        for microbatch in reversed(mine):
            yield Forward(stage=stage, microbatch=microbatch)
            yield Backward(stage=stage, microbatch=microbatch)
        return
    yield from (Forward(stage=stage, microbatch=microbatch) for microbatch in mine)
    yield from (Backward(stage=stage, microbatch=microbatch) for microbatch in mine)


def stuck(plan, stage, replica):
    """Both stages hold one microbatch, and want different ones."""
    mine = local_microbatches(plan, stage, replica)
    for microbatch in mine if stage == 0 else reversed(mine):
        yield Forward(stage=stage, microbatch=microbatch)
        yield Backward(stage=stage, microbatch=microbatch)
