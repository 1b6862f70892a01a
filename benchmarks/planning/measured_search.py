"""Two levels: what a plan takes can only be measured, with noise.

The lower level is the descent of `layouts` along the smooth closed form, which ends in a layout. The upper level moves
a distribution q over layouts (each boundary by a softmax over its places, each rank over its stages, independently)
from there to less *measured* time. A measurement has no gradient; that of its mean has, by scores:

    ∇ E_q[log y]  =  E_q[log y ∇ log q]                                         scores alone
                  =  E_q[(log y - log c) ∇ log q]  +  ∇ E_q[log c]              guided

y measured, c the closed form of the layout drawn. The expectation of scores is estimated by draws, less their mean.
Guided, it has no noise but that of the measurement where the closed form is right, and the second term is the gradient
of the smooth closed form; where the closed form is wrong, that one pulls back to it (docs/methods/differentiable.md has
the figures). At the end the layouts that measured best are
measured again, and the best mean is the answer: the least of many noisy figures is too good to be true.

Sources: Williams, REINFORCE (1992); Grathwohl et al., "Backpropagation through the Void" (ICLR 2018), section 2, for
such a control variate.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from meshwright.planner.methods.differentiable.differentiable_method import (
    StageLayout,
    logits_of,
    valid_layout,
)
from meshwright.planner.methods.differentiable.relaxed import Logits, Smooth, softmax
from meshwright.planner.methods.differentiable.stage_arrays import StageSpace
from meshwright.planner.methods.differentiable.stage_repair import layout_cost
from meshwright.spec import PlanError

Measure = Callable[[StageLayout], float]

# Steps along the gradients; the sharpness of the first distribution over that of a start of `layouts`.
RATE, SHARPNESS = 0.5, 1.0
SMOOTH, PENALTY = 0.05, 10.0
# How the last measurements are shared out: finalists, times each.
NUM_FINALISTS, NUM_AGAIN = 4, 4


def refine_measured(
    space: StageSpace,
    start: StageLayout,
    measure: Measure,
    random: np.random.Generator,
    *,
    num_measurements: int = 100,
    guided: bool = False,
) -> StageLayout:
    """A layout that measures better than ``start``, or ``start``; ``measure`` gives noisy seconds of one that fits.

    Layouts that the closed form says exceed memory are not measured. Raises PlanError for fewer measurements than
    the finalists need.
    """
    num_draws = num_measurements - NUM_FINALISTS * NUM_AGAIN - 1
    if num_draws < 1:
        raise PlanError(
            f"{num_measurements} measurements were given; expected at least {NUM_FINALISTS * NUM_AGAIN + 2}: the "
            "best layouts are measured again."
        )
    known = {_key(start): (start, measure(start))}
    smooth = Smooth(space, len(start.edges) - 1)
    logits = Logits(*(SHARPNESS * part for part in logits_of(space, start, random)))
    level = math.log(known[_key(start)][1] / (start.seconds if guided else 1.0))
    for draw in range(num_draws):
        layout = _draw(space, logits, random)
        if layout.excess > 0:
            continue
        seconds = measure(layout)
        known.setdefault(_key(layout), (layout, seconds))
        error = math.log(seconds / (layout.seconds if guided else 1.0)) - level
        level += error / (draw + 2)
        gradient = [error * part for part in _score(logits, layout)]
        if guided:
            _, along = smooth.gradient(logits, 1.0, SMOOTH, PENALTY)
            gradient = [part + more / layout.seconds for part, more in zip(gradient, along, strict=True)]
        logits = Logits(*(part - RATE * slope for part, slope in zip(logits, gradient, strict=True)))
    finalists = sorted(known.values(), key=lambda item: item[1])[:NUM_FINALISTS]
    means = [np.mean([measure(layout) for _ in range(NUM_AGAIN)]) for layout, _ in finalists]
    return finalists[int(np.argmin(means))][0]


def with_noise(seconds_of: Measure, random: np.random.Generator, share: float) -> Measure:
    """Measurements that scatter by this share (lognormal, the true seconds their median)."""
    return lambda layout: seconds_of(layout) * math.exp(share * random.normal())


def _draw(space: StageSpace, logits: Logits, random: np.random.Generator) -> StageLayout:
    noisy = Logits(*(part + random.gumbel(size=part.shape) for part in logits))
    edges, stage_of = valid_layout(space, noisy)
    seconds, excess = layout_cost(space, edges, stage_of)
    return StageLayout(edges=edges, stage_of=stage_of, seconds=seconds, excess=excess)


def _score(logits: Logits, layout: StageLayout) -> Logits:
    """The gradient of the logarithm of the layout's probability."""
    edges, ranks = (np.eye(part.shape[1]) for part in logits)
    return Logits(edges[layout.edges[1:-1] - 1] - softmax(logits.edges), ranks[layout.stage_of] - softmax(logits.ranks))


def _key(layout: StageLayout) -> tuple[bytes, bytes]:
    return layout.edges.tobytes(), layout.stage_of.tobytes()
