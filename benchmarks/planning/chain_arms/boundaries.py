"""Arm 1: every boundary is a distribution over its places (softmax or Gumbel-softmax), annealed.

Boundary j of k - 1 may lie behind layers j .. j + L - k; with w = 0 .. L - k counted from there,

    p_j = softmax((a_j + g) / T)       g = 0, or Gumbel noise drawn anew in each step, fading out
    E_j = Σ_w p_j(w) before[j + 1 + w]                    expected compute before it
    S_s = E_s - E_{s-1}                                   expected stages
    cost = (B - 1) · t log Σ_s exp(S_s / t)  +  Σ_j Σ_w p_j(w) cut_costs[j + w, j]

Both temperatures fall by equal ratios: t keeps the maximum smooth, T lets a boundary lie between places; towards the
end neither does. The cost of a mixture is not that of any cutting (a mixture balances stages perfectly), which
annealing has to undo. Several starts descend together; in each step one of them is rounded at its most likely places
and repaired, and the best of all these is the answer.

Source: Jang, Gu and Poole, "Categorical Reparameterization with Gumbel-Softmax" (ICLR 2017), section 2.
"""

from __future__ import annotations

import numpy as np
from planning.chain import ChainProblem, Cutting, Floats
from planning.chain_arms.repair import Repaired

from meshwright.planner.methods.differentiable.relaxed import anneal, descend, softmax, softmax_gradient

NUM_STARTS, NUM_STEPS, RATE = 8, 300, 0.1
# Temperature of the places (logits are of the order of one), and of the maximum over the mean stage.
HOT, COLD = 3.0, 0.3
SMOOTH, SHARP = 0.1, 0.05
# How far a start's boundaries may lie from even compute, in mean stages.
SPREAD = 0.5


def relax_boundaries(problem: ChainProblem, random: np.random.Generator, *, gumbel: bool) -> Cutting:
    """The best cutting that the starts lead to."""
    repaired = Repaired(problem)
    before, num_cuts = problem.before(), problem.num_stages - 1
    first = np.arange(num_cuts)
    places = first[:, None] + np.arange(problem.num_layers - num_cuts)
    compute, cut_costs = before[places + 1], problem.cut_costs[places, first[:, None]]
    mean = before[-1] / problem.num_stages or 1.0

    def keep(shares: Floats) -> None:
        repaired.keep(np.concatenate([[0], first + shares.argmax(axis=-1) + 1, [problem.num_layers]]))

    def gradient_at(logits: Floats, progress: float) -> Floats:
        heat = anneal(HOT, COLD, progress)
        noise = random.gumbel(size=logits.shape) * (1 - progress) if gumbel else 0.0
        shares = softmax((logits + noise) / heat)
        keep(shares[repaired.count % NUM_STARTS])
        smooth = anneal(SMOOTH, SHARP, progress) * mean
        by_edge = _slowest_by_edge((shares * compute).sum(axis=-1), before[-1], smooth)
        gradient = problem.rounds * by_edge[..., None] * compute + cut_costs
        return softmax_gradient(shares, gradient) / heat

    wanted = mean * (first + 1 + SPREAD * random.uniform(-1, 1, (NUM_STARTS, num_cuts)))
    for logits in descend(gradient_at, -(((compute - wanted[..., None]) / mean) ** 2), NUM_STEPS, RATE):
        keep(logits)
    return repaired.best


def _slowest_by_edge(expected: Floats, total: float, temperature: float) -> Floats:
    """The gradient of the smooth maximum of the stages by the compute before each boundary, (starts, k - 1)."""
    ends = np.zeros((len(expected), 1))
    stages = np.diff(np.concatenate([ends, expected, ends + total], axis=1), axis=1)
    shares = softmax(stages / temperature)
    by_edge: Floats = shares[:, :-1] - shares[:, 1:]
    return by_edge
