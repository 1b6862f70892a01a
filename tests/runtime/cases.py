"""The layouts that every model is trained under: replicas per stage, schedule, optimizer.

A stage whose replicas have shares of the microbatches stands as those shares, as in ``((4, 2),)``; one that lies on
ranks that have another one, too, as ``on((1, 2))``.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

MICROBATCH_SIZE = 3
NUM_STEPS = 3
RUN_SEED = 11


class on(NamedTuple):  # noqa: N801 - reads like a word in the lists below
    """A stage whose replicas lie on these ranks, which have other stages, too."""

    ranks: tuple[int, ...]


_THERE_AND_BACK = (on((0,)), on((1,)), on((1,)), on((0,)))
_IN_TURN = (on((0,)), on((1,))) * 2
_TWO_IN_TURN = (on((0, 1)), on((2, 3))) * 2
_TWO_THERE_AND_BACK = (on((0, 1)), on((2, 3)), on((2, 3)), on((0, 1)))

_LAYOUTS = {
    2: [
        ((2,), "gpipe"),
        ((2,), "1f1b"),
        ((1, 1), "gpipe"),
        ((1, 1), "1f1b"),
        ((1, 1), "own-swapped"),
        (((4, 2),), "1f1b"),
        ((1, 1), "zb-h1"),
        ((1, 1), "zb-h2"),
        (_IN_TURN, "interleaved"),
        (_IN_TURN, "looped-bfs"),
        (_THERE_AND_BACK, "zb-v"),
        (_THERE_AND_BACK, "dualpipe-v"),
        ((on((0, 1)), on((1, 0))), "dualpipe"),
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
        ((2, 2), "zb-h1"),
        ((1, 1, 1, 1), "zb-h2"),
        (_TWO_IN_TURN, "interleaved"),
        (_TWO_IN_TURN, "looped-bfs"),
        (_TWO_THERE_AND_BACK, "zb-v"),
        (_TWO_THERE_AND_BACK, "dualpipe-v"),
        ((on((0, 3)), on((1, 2)), on((2, 1)), on((3, 0))), "dualpipe"),
    ],
}


def name_replicas(replicas):
    """``2``, or ``4+2`` for shares; ``@0+3`` for ranks."""
    if isinstance(replicas, on):
        return f"@{name_replicas(replicas.ranks)}"
    return str(replicas) if isinstance(replicas, int) else "+".join(map(str, replicas))


class Layout(NamedTuple):
    """How a model is trained: stages with replicas, shares or ranks, schedule, optimizer, what is computed again."""

    stages: tuple
    schedule: str
    optimizer: str
    again: str = "none"

    @property
    def key(self):
        """``1-1/1f1b/sgd``, and ``/op`` where something is computed again."""
        again = f"/{self.again}" if self.again != "none" else ""
        return f"{'-'.join(map(name_replicas, self.stages))}/{self.schedule}/{self.optimizer}{again}"

    @property
    def num_microbatches(self):
        """Pipelines that run both ways take more of them to fill."""
        return 8 if self.schedule.startswith("dualpipe") else 6


OPTIMIZERS = ("sgd", "adamw")
# World size -> layouts.
CASES = {
    world: [Layout(*layout, optimizer) for layout, optimizer in product(layouts, OPTIMIZERS)]
    for world, layouts in _LAYOUTS.items()
}
# Of the tests that CI runs: each layout has one of these models with one of the optimizers, the other models have few.
MAIN_MODELS = ("gpt-tied", "u-net")
_FEW = ("1-1/1f1b/adamw", "2-2/1f1b/sgd")


# The model whose layouts on two ranks `make test` tries.
FEW = MAIN_MODELS[:1]


def main_cases(model, world):
    """The layouts of a model that CI tries."""
    if model not in MAIN_MODELS:
        return [case for case in CASES[world] if case.key in _FEW]
    return one_each(CASES[world], MAIN_MODELS.index(model))


def one_each(cases, model):
    """Half of the layouts, each with one optimizer: pairs of layouts go to models 0 and 1 in turn.

    ``cases`` has each layout with both optimizers, one after the other.
    """
    return [case for place, case in enumerate(cases) if place // 4 % 2 == model and place % 2 == place // 2 % 2]


def all_cases(model, world):
    """All layouts."""
    return CASES[world]
