"""Descend one option: start, gradients, rounding, repair."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np

from meshwright.planner.methods.differentiable.descent import anneal, descend
from meshwright.planner.methods.differentiable.relaxed import Logits, Smooth
from meshwright.planner.methods.differentiable.stage_arrays import Floats, Integers, StageSpace
from meshwright.planner.methods.differentiable.stage_repair import repair_layout, round_edges

NUM_STEPS, RATE, LOOK = 30, 0.2, 5
# Temperatures of shares and of maxima, and the penalty for missing memory relative to a mean step.
HOT, COLD = 1.0, 0.2
SMOOTH, SHARP = 0.2, 0.02
CHEAP, DEAR = 1.0, 30.0
# Logits of a start: for the initial stage of a rank, for edges one mean stage away from a boundary's initial edge, and
# noise.
LEANING, NEAR, NOISE = 2.0, 4.0, 0.3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageLayout:
    """Edges (S + 1,), the stage of each rank (D,), the closed form's seconds, and the excess bytes over memory."""

    edges: Integers
    stage_of: Integers
    seconds: float
    excess: float

    @property
    def key(self) -> tuple[float, float]:
        """The sort key, smaller is better: first fit, then be fast."""
        return self.excess, self.seconds


def start_logits(space: StageSpace, num_stages: int, random: np.random.Generator) -> Logits:
    """Return random start logits: ranks by kinds and nodes in random order, and boundaries by the speeds of the stages.

    Half of the starts give all stages the same number of ranks, the others random numbers.
    """
    speeds = 1 / space.seconds[space.kind_of, 0, -1]
    groups = space.node_of * len(space.seconds) + space.kind_of
    order = np.lexsort((np.arange(space.num_ranks), random.permutation(groups.max() + 1)[groups]))
    stage_of = np.empty(space.num_ranks, np.int64)
    stage_of[order] = np.arange(space.num_ranks) * num_stages // space.num_ranks
    if random.random() < 0.5:
        firsts = 1 + random.choice(space.num_ranks - 1, num_stages - 1, replace=False)
        stage_of[order] = np.searchsorted(np.sort(firsts), np.arange(space.num_ranks), side="right")
    ranks = LEANING * np.eye(num_stages)[stage_of]
    powers = np.bincount(stage_of, weights=speeds, minlength=num_stages).cumsum()
    layers = space.seconds.mean(axis=0)[0, 1:-1] / space.seconds.mean(axis=0)[0, -1]
    edges = -NEAR * (num_stages * (layers - (powers / powers[-1])[:-1, None])) ** 2
    return Logits(edges + NOISE * random.normal(size=edges.shape), ranks + NOISE * random.normal(size=ranks.shape))


def logits_of(space: StageSpace, layout: StageLayout, random: np.random.Generator) -> Logits:
    """Return a start that is close to a layout."""
    num_stages = len(layout.edges) - 1
    layers = np.arange(1, space.num_layers)
    edges = -NEAR * (num_stages / space.num_layers * (layers - layout.edges[1:-1, None])) ** 2
    ranks = LEANING * np.eye(num_stages)[layout.stage_of]
    return Logits(edges + NOISE * random.normal(size=edges.shape), ranks + NOISE * random.normal(size=ranks.shape))


def descend_logits(space: StageSpace, smooth: Smooth, start: Logits) -> StageLayout:
    """Return the best layout found while descending from a start, annealed."""
    steps, found = count(), [round_logits(space, start)]

    def gradient_at(flat: Floats, progress: float) -> Floats:
        logits = start.like(flat)
        if next(steps) % LOOK == LOOK - 1:
            found.append(round_logits(space, logits))
        heat, sharp = anneal(HOT, COLD, progress), anneal(SMOOTH, SHARP, progress)
        _, gradient = smooth.gradient(logits, heat, sharp, anneal(CHEAP, DEAR, progress))
        return gradient.flat() / smooth.step_s

    end = descend(gradient_at, start.flat(), NUM_STEPS, RATE)
    return min([*found, round_logits(space, start.like(end))], key=lambda layout: layout.key)


def round_logits(space: StageSpace, logits: Logits) -> StageLayout:
    """Return the most likely layout, made valid, and repaired."""
    edges, stage_of = valid_layout(space, logits)
    seconds, excess = repair_layout(space, edges, stage_of)
    return StageLayout(edges=edges, stage_of=stage_of, seconds=seconds, excess=excess)


def valid_layout(space: StageSpace, logits: Logits) -> tuple[Integers, Integers]:
    """Return the most likely distinct edges and stages of ranks, at least one rank per stage."""
    num_stages = logits.ranks.shape[1]
    places = np.array([0, *(1 + int(row.argmax()) for row in logits.edges), space.num_layers])
    edges, stage_of = round_edges(places, space.num_layers), logits.ranks.argmax(axis=1)
    for stage in range(num_stages):
        if not (stage_of == stage).any():
            # The rank with the highest logit for it, among those whose stage has another rank.
            spare = np.bincount(stage_of, minlength=num_stages)[stage_of] > 1
            stage_of[np.where(spare, logits.ranks[:, stage], -np.inf).argmax()] = stage
    return edges, stage_of
