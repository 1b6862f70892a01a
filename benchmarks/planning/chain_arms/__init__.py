"""Search by gradients on a chain of layers (`planning.chain`, pipeDejavu's problem), four arms:

- ``softmax``, ``gumbel``: every boundary is a distribution over its places (`boundaries`);
- ``recursion``: differentiable dynamic programming (`recursion`);
- ``literal``: one loss L(θ, A) with a matrix A of layers to stages, by alternating steps (`assignment`).

All of them end in a repair (`repair`) that moves one boundary at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from planning.chain import ChainProblem, Cutting
from planning.chain_arms.assignment import alternate
from planning.chain_arms.boundaries import relax_boundaries
from planning.chain_arms.recursion import descend_recursion

ChainArm = Callable[[ChainProblem, np.random.Generator], Cutting]

CHAIN_ARMS: dict[str, ChainArm] = {
    "softmax": partial(relax_boundaries, gumbel=False),
    "gumbel": partial(relax_boundaries, gumbel=True),
    "recursion": descend_recursion,
    "literal": alternate,
}
