"""Search by gradients: choices relaxed to shares, descended along a smooth cost, rounded, repaired by single moves.

Arms for a chain of layers (`methods.chain`, pipeDejavu's problem):

- ``softmax``, ``gumbel``: every boundary is a distribution over its places (`boundaries`);
- ``recursion``: differentiable dynamic programming (`recursion`);
- ``literal``: one loss L(θ, A) with a matrix A of layers to stages, by alternating steps (`assignment`).

All of them end in `repair`, which moves one boundary at a time.

And for whole problems the method `differentiable` (`method`): boundaries, replicas and devices of stages as shares
(`stage_arrays`, `relaxed`, `layouts`), rounded and repaired by moving one boundary or swapping two devices
(`stage_repair`); settings, microbatch sizes, schedules and numbers of stages by a softmax over options.

Where a step can only be measured, with noise, a distribution over layouts moves by scores (`measured`).

Neither repair may reach a dynamic program (a contract of the import linter).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from meshwright.planner.methods.chain.problem import ChainProblem, Cutting
from meshwright.planner.methods.differentiable.assignment import alternate
from meshwright.planner.methods.differentiable.boundaries import relax_boundaries
from meshwright.planner.methods.differentiable.method import differentiable
from meshwright.planner.methods.differentiable.recursion import descend_recursion

ChainArm = Callable[[ChainProblem, np.random.Generator], Cutting]

CHAIN_ARMS: dict[str, ChainArm] = {
    "softmax": partial(relax_boundaries, gumbel=False),
    "gumbel": partial(relax_boundaries, gumbel=True),
    "recursion": descend_recursion,
    "literal": alternate,
}

__all__ = ["CHAIN_ARMS", "ChainArm", "differentiable"]
