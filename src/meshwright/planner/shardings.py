"""Combinations of mesh-axis sizes as shardings."""

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
    """Return all combinations of axis sizes.

    With several combinations, options that need an axis of a size above 1 are dropped where it has size 1. Raises
    PlanError if an axis's only size does not allow a requested option.
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
