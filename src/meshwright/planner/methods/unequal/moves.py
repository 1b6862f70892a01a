"""Small changes of a plan on unequal devices: what a local search on the simulator tries next.

    order      two neighbouring stages change places, each with as many layers; or all stages stand in reverse
    boundary   a layer goes to the stage before or behind (`climbing`)
    swap       two unlike devices of different stages change places
    share      a microbatch goes from one replica of a stage to an unlike one

Where devices change places or layers go over, the microbatches of the stages that changed are shared out anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, combinations, permutations

from meshwright.planner.climbing import Stages, as_chain, moved_boundaries
from meshwright.planner.methods.unequal.assemble import share_stage
from meshwright.planner.space import Space
from meshwright.spec import Plan


def neighbours(space: Space, plan: Plan) -> Iterator[Plan]:
    """Plans that differ from one by one change."""
    plan = replace(plan, stages=as_chain(plan.stages))
    changed = (*_reordered(plan.stages), *moved_boundaries(plan.stages), *_swapped_devices(space, plan.stages))
    for stages in changed:
        yield replace(plan, stages=_shared_anew(space, plan, stages))
    for stages in _moved_shares(space, plan):
        yield replace(plan, stages=stages)


def _reordered(stages: Stages) -> Iterator[Stages]:
    if len(stages) > 2:
        yield _in_a_row(stages[::-1])
    for index in range(1, len(stages)):
        yield _in_a_row((*stages[: index - 1], stages[index], stages[index - 1], *stages[index + 1 :]))


def _in_a_row(stages: Stages) -> Stages:
    """The stages one behind the other, each with as many layers as it had."""
    stops = accumulate(stage.stop - stage.start for stage in stages)
    return tuple(
        replace(stage, start=stop - (stage.stop - stage.start), stop=stop)
        for stage, stop in zip(stages, stops, strict=True)
    )


def _swapped_devices(space: Space, stages: Stages) -> Iterator[Stages]:
    """One swap for each two stages and each two unlike classes of devices in them."""
    columns = space.cluster.columns()
    for first, second in combinations(range(len(stages)), 2):
        tried: set[tuple[tuple[int, int], tuple[int, int]]] = set()
        for a in stages[first].ranks:
            for b in stages[second].ranks:
                kinds = [(int(columns.node[rank]), int(columns.kind[rank])) for rank in (a, b)]
                if kinds[0] == kinds[1] or (kinds[0], kinds[1]) in tried:
                    continue
                tried.add((kinds[0], kinds[1]))
                changed = {a: b, b: a}
                yield tuple(
                    replace(stage, ranks=tuple(changed.get(rank, rank) for rank in stage.ranks)) for stage in stages
                )


def _moved_shares(space: Space, plan: Plan) -> Iterator[Stages]:
    """One microbatch for each stage and each two kinds of devices in it: from who has most to who has least."""
    for index, stage in enumerate(plan.stages):
        counts = stage.counts(plan.num_microbatches)
        members: dict[str, list[int]] = {}
        for replica, rank in enumerate(stage.ranks):
            members.setdefault(space.cluster.device_kind(rank).name, []).append(replica)
        for giving, taking in permutations(members.values(), 2):
            giver, taker = max(giving, key=lambda k: counts[k]), min(taking, key=lambda k: counts[k])
            if counts[giver] > 1:
                shares = tuple(count - (k == giver) + (k == taker) for k, count in enumerate(counts))
                yield (*plan.stages[:index], replace(stage, shares=shares), *plan.stages[index + 1 :])


def _shared_anew(space: Space, plan: Plan, stages: Stages) -> Stages:
    """The stages with the best shares by speed, where they changed."""
    return tuple(
        stage
        if stage in plan.stages
        else replace(stage, shares=share_stage(space, plan.microbatch_size, (stage.start, stage.stop), stage.ranks))
        for stage in stages
    )
