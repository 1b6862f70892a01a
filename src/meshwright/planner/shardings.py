"""Sizes of mesh axes, combined."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from meshwright.spec.sharding import AXES, OpPlacement, Sharding


def list_shardings(
    *,
    tensor: Sequence[int] = (1,),
    context: Sequence[int] = (1,),
    expert: Sequence[int] = (1,),
    sequence_parallel: bool = False,
    placements: tuple[OpPlacement, ...] = (),
) -> tuple[Sharding, ...]:
    """All combinations of the sizes of axes; where there are several, what an axis of size 1 cannot have is left out.

    Raises PlanError for an axis whose only size does not allow what is asked of it.
    """
    sizes = list(product(dict.fromkeys(tensor), dict.fromkeys(context), dict.fromkeys(expert)))
    found = []
    for each in sizes:
        of_axis = dict(zip(AXES, each, strict=True))
        kept = tuple(item for item in placements if len(sizes) == 1 or of_axis[item.axis] > 1)
        apart = sequence_parallel and (len(sizes) == 1 or of_axis["tensor"] > 1)
        found.append(
            Sharding(tensor=each[0], context=each[1], expert=each[2], sequence_parallel=apart, placements=kept)
        )
    return tuple(found)
