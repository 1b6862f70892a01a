"""Arm 2: differentiable dynamic programming, the exact recursion with smooth minima and a smooth maximum, annealed.

A smooth maximum of the stages is itself a minimum, over a threshold θ,

    t log Σ_s exp(S_s / t)  =  min over θ of  θ - t + t Σ_s exp((S_s - θ) / t)

whose terms add up over stages: for one θ a cutting is a path, and the recursion over cuts in order with soft minima

    V[s, j] = - g log Σ_i exp(-(V[s - 1, i] + cut_costs[i - 1, s - 2] + w(i:j)) / g)
    w(i:j)  = (B - 1) t exp((S_ij - θ) / t)

gives  G(θ) = (B - 1)(θ - t) + V[k, L].  Its gradient goes backwards through the recursion: the derivative by V[s, j] is
the probability that boundary s lies at j in the Gibbs distribution over all cuttings, and

    dG / dθ = (B - 1)(1 - E Σ_s exp((S_s - θ) / t))

Several θ descend together along it while t and g fall by equal ratios. The probabilities are rounded at each boundary's
most likely place; nothing else is read from the recursion. Two equally cheap cuttings would be mixed up by that, so
each start sees cut costs with a little noise of its own.

Sources: Mensch and Blondel, "Differentiable Dynamic Programming for Structured Prediction and Attention" (ICML 2018),
sections 2 and 3; the threshold form of log-sum-exp is the conjugate of the entropy.
"""

from __future__ import annotations

import numpy as np
from planning.chain import ChainProblem, Cutting, Floats, Integers
from planning.chain_arms.repair import Repaired

from meshwright.compiled import compiled
from meshwright.planner.methods.differentiable.relaxed import anneal, descend

NUM_STARTS, NUM_STEPS, RATE = 16, 30, 0.05
# Temperature t of the maximum, over the mean stage, and g of the minima, over the mean cut cost.
SMOOTH, SHARP = 0.2, 0.01
WARM, COLD = 0.5, 0.02
# Thresholds start between the mean stage (or the largest layer) and this multiple of it.
HIGHEST = 2.5
NOISE = 0.05
# A stage this far above the threshold, in temperatures, costs more than any other way round it.
_FARTHEST = 12.0


def descend_recursion(problem: ChainProblem, random: np.random.Generator) -> Cutting:
    """The best cutting that the thresholds lead to."""
    repaired = Repaired(problem)
    mean = problem.before()[-1] / problem.num_stages or 1.0
    lowest = max(mean, float(problem.layer_costs.max()))
    scale = float(problem.cut_costs.mean()) if problem.num_stages > 1 else 1.0
    for share in (np.arange(NUM_STARTS) + random.uniform(0, 1)) / NUM_STARTS:
        cut_costs = problem.cut_costs + NOISE * scale * random.uniform(0, 1, problem.cut_costs.shape)
        marginals = _descend_threshold(problem, cut_costs, scale or 1.0, lowest * HIGHEST**share, mean)
        repaired.keep(marginals.argmax(axis=1))
    return repaired.best


def _descend_threshold(problem: ChainProblem, cut_costs: Floats, scale: float, theta: float, mean: float) -> Floats:
    """The probability of each boundary at each place, (k + 1, L + 1), where one threshold ends up."""
    before, rounds = problem.before(), float(problem.rounds)
    marginals = np.zeros((problem.num_stages + 1, problem.num_layers + 1))

    def gradient_at(means: Floats, progress: float) -> Floats:
        smooth, warm = anneal(SMOOTH, SHARP, progress) * mean, anneal(WARM, COLD, progress) * scale
        return np.array([_slope(before, cut_costs, rounds, float(means[0]) * mean, smooth, warm, marginals)])

    descend(gradient_at, np.array([theta / mean]), NUM_STEPS, RATE)
    return marginals


@compiled
def _slope(
    before: Floats, cut_costs: Floats, rounds: float, theta: float, smooth: float, warm: float, marginals: Floats
) -> float:
    """The slope dG / dθ; fills ``marginals`` (k + 1, L + 1) with the probability of each boundary at each place."""
    num_stages, num_layers = marginals.shape[0] - 1, marginals.shape[1] - 1
    values = np.full(marginals.shape, np.inf)
    values[0, 0] = 0.0
    first = np.zeros(num_layers + 1, np.int64)
    weights = np.zeros((num_layers + 1, num_layers + 1))
    for stop in range(1, num_layers + 1):
        first[stop] = stop - 1
        for start in range(stop - 1, -1, -1):
            over = (before[stop] - before[start] - theta) / smooth
            if over > _FARTHEST and start < stop - 1:
                break
            first[stop] = start
            weights[start, stop] = rounds * smooth * np.exp(min(over, 50.0))
    for stage in range(1, num_stages + 1):
        for stop in range(stage, num_layers - num_stages + stage + 1):
            least = np.inf
            for start in range(max(first[stop], stage - 1), stop):
                least = min(least, _value(values, cut_costs, weights, stage, start, stop))
            if least == np.inf:
                continue
            total = 0.0
            for start in range(max(first[stop], stage - 1), stop):
                total += np.exp((least - _value(values, cut_costs, weights, stage, start, stop)) / warm)
            values[stage, stop] = least - warm * np.log(total)
    return _backwards(values, cut_costs, weights, first, rounds, smooth, warm, marginals)


@compiled
def _backwards(
    values: Floats,
    cut_costs: Floats,
    weights: Floats,
    first: Integers,
    rounds: float,
    smooth: float,
    warm: float,
    marginals: Floats,
) -> float:
    """The derivatives of V[k, L] by every state, and dG / dθ; the filled recursion is walked from its end."""
    num_stages, num_layers = marginals.shape[0] - 1, marginals.shape[1] - 1
    marginals.fill(0.0)
    if values[num_stages, num_layers] == np.inf:
        return -rounds
    marginals[num_stages, num_layers] = 1.0
    expected = 0.0
    for stage in range(num_stages, 0, -1):
        for stop in range(stage, num_layers - num_stages + stage + 1):
            if marginals[stage, stop] == 0.0:
                continue
            for start in range(max(first[stop], stage - 1), stop):
                value = _value(values, cut_costs, weights, stage, start, stop)
                share = marginals[stage, stop] * np.exp((values[stage, stop] - value) / warm)
                marginals[stage - 1, start] += share
                expected += share * weights[start, stop] / smooth
    return rounds - expected


@compiled
def _value(values: Floats, cut_costs: Floats, weights: Floats, stage: int, start: int, stop: int) -> float:
    """The cost of reaching a state from one of those before it."""
    cut = cut_costs[start - 1, stage - 2] if stage > 1 else 0.0
    return float(values[stage - 1, start] + cut + weights[start, stop])
