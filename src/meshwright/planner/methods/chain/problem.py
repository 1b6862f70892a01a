"""A chain of L layers to cut into k stages, one device each, for B microbatches.

    cost(e) = (B - 1) · max_s Σ layer_costs[e_s : e_s+1]  +  Σ_s cut_costs[e_s - 1, s - 1]

for edges 0 = e_0 < e_1 < … < e_k = L. The sum of all layers is the same for every cutting and is left out. What a cut
costs depends on where it is and on which of the k - 1 cuts it is: devices and links may be unequal.

Source: the notebook of pipeDejavu (explcre, 2023), ``pipe_dp``, which extends Alpa's
``playground/pipeline/auto_pipeline_slicing_dp.ipynb``. Its instances have B = 3; layers of 1 and cuts of 2
(homogeneous), or whole numbers from 5 to 9 for both (heterogeneous).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from meshwright.spec import PlanError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainProblem:
    """What is to be cut: ``layer_costs`` (L,), ``cut_costs`` (L - 1, k - 1), finite and not negative.

    ``cut_costs[i, j]`` is that of the j-th cut if it lies behind layer i. Raises PlanError for shapes or values that
    mean nothing.
    """

    layer_costs: Floats
    cut_costs: Floats
    num_microbatches: int

    def __post_init__(self) -> None:
        layers, cuts = np.asarray(self.layer_costs, np.float64), np.asarray(self.cut_costs, np.float64)
        object.__setattr__(self, "layer_costs", layers)
        object.__setattr__(self, "cut_costs", cuts)
        if layers.ndim != 1 or cuts.ndim != 2 or not len(layers) or len(cuts) != len(layers) - 1:
            raise PlanError(
                f"Got layer costs of shape {layers.shape} and cut costs of shape {cuts.shape}; expected (L,) and "
                "(L - 1, k - 1) for L layers and k stages."
            )
        if cuts.shape[1] >= len(layers) > 1:
            raise PlanError(
                f"{len(layers)} layers cannot be cut into {cuts.shape[1] + 1} stages; ask for at most {len(layers)}."
            )
        if not all(np.isfinite(costs).all() and (costs >= 0).all() for costs in (layers, cuts)):
            raise PlanError("Costs of layers and cuts must be finite and not negative.")
        if self.num_microbatches < 1:
            raise PlanError(f"Got {self.num_microbatches} microbatches; a step has at least one.")

    @property
    def num_layers(self) -> int:
        """The layers, L."""
        return len(self.layer_costs)

    @property
    def num_stages(self) -> int:
        """The stages, k."""
        return int(self.cut_costs.shape[1]) + 1

    @property
    def rounds(self) -> int:
        """B - 1: how often the slowest stage counts."""
        return self.num_microbatches - 1

    def before(self) -> Floats:
        """The cost of all layers before each boundary 0..L, (L + 1,)."""
        return np.concatenate([[0.0], np.cumsum(self.layer_costs)])

    def cut_at(self, edges: Sequence[int]) -> Cutting:
        """The cutting with these edges 0 = e_0 < … < e_k = L. Raises PlanError if they are none."""
        if len(edges) != self.num_stages + 1 or edges[0] != 0 or edges[-1] != self.num_layers:
            raise PlanError(f"Edges {tuple(edges)} do not cut {self.num_layers} layers into {self.num_stages} stages.")
        if any(stop <= start for start, stop in pairwise(edges)):
            raise PlanError(f"Edges {tuple(edges)} leave a stage empty; they must ascend.")
        before = self.before()
        slowest = max(float(before[stop] - before[start]) for start, stop in pairwise(edges))
        cuts = sum(float(self.cut_costs[edge - 1, cut]) for cut, edge in enumerate(edges[1:-1]))
        return Cutting(edges=tuple(edges), cost=self.rounds * slowest + cuts, slowest=slowest)

    def cut_evenly(self) -> Cutting:
        """The notebook's ``uniform_split``: as many layers in each stage, the remainder in the last."""
        each = self.num_layers // self.num_stages
        return self.cut_at((*range(0, each * self.num_stages, each), self.num_layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """Stages ``edges[s]:edges[s + 1]``, what they cost, and the compute of the slowest."""

    edges: tuple[int, ...]
    cost: float
    slowest: float
