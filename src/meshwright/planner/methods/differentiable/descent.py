"""Gradient descent: Adam on one array, which passes the progress of annealing to the function.

Source: Kingma and Ba, "Adam" (ICLR 2015), algorithm 1, with its constants except the rate.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_FIRST, _SECOND, _TINY = 0.9, 0.999, 1e-8


def descend(gradient_at: Callable[[Floats, float], Floats], start: Floats, num_steps: int, rate: float) -> Floats:
    """Return the point after ``num_steps`` steps from ``start``.

    ``gradient_at(point, progress)`` returns the gradient, with progress from 0 to 1.
    """
    point, mean, square = start.copy(), np.zeros_like(start), np.zeros_like(start)
    for step in range(num_steps):
        gradient = gradient_at(point, step / max(num_steps - 1, 1))
        mean += (1 - _FIRST) * (gradient - mean)
        square += (1 - _SECOND) * (gradient**2 - square)
        unbiased = np.sqrt(square / (1 - _SECOND ** (step + 1))) + _TINY
        point -= rate * mean / (1 - _FIRST ** (step + 1)) / unbiased
    return point


def anneal(start: float, end: float, progress: float) -> float:
    """Return the value between ``start`` and ``end`` at a progress from 0 to 1, in equal ratios."""
    return float(start * (end / start) ** progress)


def softmax(logits: Floats) -> Floats:
    """Return shares along the last axis."""
    shares: Floats = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return shares


def softmax_gradient(shares: Floats, gradient: Floats) -> Floats:
    """Return the gradient by the logits, from that by the shares."""
    centred: Floats = shares * (gradient - (shares * gradient).sum(axis=-1, keepdims=True))
    return centred
