"""Arm 3: the literal form L(θ, A), a |V| × N softmax matrix A of layers to stages, by alternating steps.

pipeDejavu proposes to train a model and to place it by one loss, as DARTS trains and chooses its ops. With shares
A = softmax(a / T) of every layer v over the stages n, a layer computes the mixture of what it computes on each stage:

    h_v+1 = Σ_n A_vn f_v(h_v; θ_v)          loss(θ, A) = |h_L - y|² / 2
    S_n   = Σ_v A_vn layer_costs[v]
    cost(A) = (B - 1) t log Σ_n exp(S_n / t) + Σ_v Σ_n A_vn A_v+1,n+1 cut_costs[v, n]
              + λ Σ_v (1 - Σ_n A_vn (A_v+1,n + A_v+1,n+1))                                neighbours, in order
    L(θ, A) = loss(θ, A) + cost(A)

Steps on θ and on A alternate. Every stage computes the same f_v, and rows of A sum to one: h does not depend on A, the
gradient of the loss by A is zero, and that of the cost by θ too. The two descents never meet, though
the arm steps as if they could; docs/methods/differentiable.md says where they would.

Source: Liu, Simonyan and Yang, "DARTS" (ICLR 2019), algorithm 1 (first order).
"""

from __future__ import annotations

import numpy as np
from planning.chain import ChainProblem, Cutting, Floats
from planning.chain_arms.repair import Repaired

from meshwright.planner.methods.differentiable.relaxed import anneal, descend, softmax, softmax_gradient

NUM_STARTS, NUM_STEPS, RATE = 8, 300, 0.1
HOT, COLD = 1.0, 0.2
# Temperature of the maximum over the mean stage; λ over the mean cut cost.
SMOOTH, SHARP = 0.1, 0.05
LOOSE, STRICT = 0.3, 10.0
SPREAD = 0.5


def alternate(problem: ChainProblem, random: np.random.Generator) -> Cutting:
    """The best cutting that the starts lead to."""
    repaired = Repaired(problem)
    before, num_stages = problem.before(), problem.num_stages
    mean = before[-1] / num_stages or 1.0
    cut_mean = float(problem.cut_costs.mean()) if num_stages > 1 else 1.0
    weights = random.normal(0, 0.1, problem.num_layers)

    def gradient_at(logits: Floats, progress: float) -> Floats:
        nonlocal weights
        heat = anneal(HOT, COLD, progress)
        shares = softmax(logits / heat)
        start = repaired.count % NUM_STARTS
        repaired.keep(np.concatenate([[0.0], shares[start].sum(axis=0).cumsum()]))
        weights = weights - RATE * loss_gradients(weights, shares[start])[0]
        smooth, strict = anneal(SMOOTH, SHARP, progress) * mean, anneal(LOOSE, STRICT, progress) * cut_mean
        gradient = _cost_by_shares(problem, shares, smooth, strict)
        gradient[start] += loss_gradients(weights, shares[start])[1]
        return softmax_gradient(shares, gradient) / heat

    middles = (before[:-1] + before[1:]) / 2 / mean - 0.5
    moved = SPREAD * random.uniform(-1, 1, (NUM_STARTS, 1, num_stages))
    start = -4 * (middles[:, None] - np.arange(num_stages) + moved) ** 2
    descend(gradient_at, start, NUM_STEPS, RATE)
    return repaired.best


def loss_gradients(weights: Floats, shares: Floats) -> tuple[Floats, Floats]:
    """Those by θ (L,) and by A (L, k); f_v(h; θ_v) = h + θ_v tanh h, from h_0 = 1 towards y = 2."""
    values, totals = [1.0], shares.sum(axis=1)
    for weight, total in zip(weights, totals, strict=True):
        values.append(total * _layer(values[-1], weight))
    by_value = values[-1] - 2.0
    by_weights, by_shares = np.empty_like(weights), np.empty_like(shares)
    for layer in range(len(weights) - 1, -1, -1):
        value = values[layer]
        by_weights[layer] = by_value * totals[layer] * np.tanh(value)
        by_shares[layer] = by_value * _layer(value, weights[layer])
        by_value *= totals[layer] * (1 + weights[layer] / np.cosh(value) ** 2)
    return by_weights, by_shares


def _layer(value: float, weight: float) -> float:
    return float(value + weight * np.tanh(value))


def _cost_by_shares(problem: ChainProblem, shares: Floats, smooth: float, strict: float) -> Floats:
    """The gradient of the cost by A, (starts, L, k)."""
    slowest = softmax(np.einsum("avn,v->an", shares, problem.layer_costs) / smooth)
    gradient = problem.rounds * slowest[:, None, :] * problem.layer_costs[None, :, None]
    cost = problem.cut_costs - strict
    gradient[:, :-1, :-1] += shares[:, 1:, 1:] * cost
    gradient[:, 1:, 1:] += shares[:, :-1, :-1] * cost
    gradient[:, :-1] -= strict * shares[:, 1:]
    gradient[:, 1:] -= strict * shares[:, :-1]
    return np.asarray(gradient)
