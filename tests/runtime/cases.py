"""The layouts that every model is trained under: replicas per stage, schedule, optimizer.

A stage whose replicas have shares of the microbatches stands as those shares, as in ``((4, 2),)``.
"""

from __future__ import annotations

from itertools import product

MICROBATCH_SIZE = 3
NUM_MICROBATCHES = 6
NUM_STEPS = 3
RUN_SEED = 11

_LAYOUTS = {
    2: [
        ((2,), "gpipe"),
        ((2,), "1f1b"),
        ((1, 1), "gpipe"),
        ((1, 1), "1f1b"),
        ((1, 1), "own-swapped"),
        (((4, 2),), "1f1b"),
    ],
    4: [
        ((4,), "gpipe"),
        ((4,), "1f1b"),
        ((1, 1, 1, 1), "gpipe"),
        ((1, 1, 1, 1), "1f1b"),
        ((2, 2), "gpipe"),
        ((2, 2), "1f1b"),
        ((3, 1), "1f1b"),
        ((1, 3), "1f1b"),
        ((1, 2, 1), "gpipe"),
        ((1, 2, 1), "own-swapped"),
        ((2, 2), "own-eager"),
        (((1, 5), (4, 2)), "1f1b"),
        ((1, (1, 3, 2)), "gpipe"),
    ],
}


def name_replicas(replicas):
    """``2``, or ``4+2`` for shares."""
    return str(replicas) if isinstance(replicas, int) else "+".join(map(str, replicas))


# world size -> (key, replicas per stage, schedule, optimizer)
CASES = {
    world: [
        (f"{'-'.join(map(name_replicas, layout))}/{schedule}/{optimizer}", layout, schedule, optimizer)
        for (layout, schedule), optimizer in product(layouts, ("sgd", "adamw"))
    ]
    for world, layouts in _LAYOUTS.items()
}
