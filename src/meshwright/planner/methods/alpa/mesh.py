"""Logical meshes: n x m devices in two axes, and the costs of collectives along each axis.

By Alpa's closed forms (Zheng et al., OSDI 2022, and its `LogicalDeviceMesh`), for k devices, α seconds and β seconds
per byte; its small constants, which only break ties, are left out:

    all-gather, reduce-scatter    α + β · bytes · (k - 1) / k
    all-reduce                    α + 2 β · bytes · (k - 1) / k
    all-to-all                    α + β · bytes · (k - 1) / k² · k / 2

or by the cost model, for the ranks of a cluster: axis 1 has neighbouring ranks, and the other lines of the mesh
communicate at the same time. Bytes are those of the full tensor, as everywhere (`spec.collective`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import CostModel
from meshwright.spec import PlanError
from meshwright.spec.collective import CollectiveKind

Floats = NDArray[np.float64]
# The axes of a mesh, outer and inner.
AXES = (0, 1)


class AxisCosts(Protocol):
    """Costs of collectives along one axis."""

    def seconds(self, kind: CollectiveKind, num_bytes: Floats) -> Floats:
        """Return seconds for each size of the full tensor, shape (n,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalMesh:
    """``shape`` devices, and the costs of both axes; those of an axis of size 1 are not used."""

    shape: tuple[int, int]
    costs: tuple[AxisCosts, AxisCosts]

    def __post_init__(self) -> None:
        if min(self.shape) < 1:
            raise PlanError(f"A mesh of {self.shape} devices was given; expected at least one in each axis.")

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlphaBeta:
    """Alpa's closed forms for one axis."""

    num_devices: int
    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, kind: CollectiveKind, num_bytes: Floats) -> Floats:
        """See `AxisCosts`."""
        passed = num_bytes * ((self.num_devices - 1) / self.num_devices)
        rounds = {"all_reduce": 2.0, "all_to_all": 0.5}.get(kind, 1.0)
        return self.alpha_s + self.beta_s_per_byte * rounds * passed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelCosts:
    """Costs of a cluster's cost model for one line of ranks, while the other lines of its axis communicate too."""

    cost: CostModel
    ranks: tuple[int, ...]
    beside: tuple[tuple[int, ...], ...]

    def seconds(self, kind: CollectiveKind, num_bytes: Floats) -> Floats:
        """See `AxisCosts`."""
        return self.cost.predict_collective(kind, self.ranks, num_bytes, self.beside).seconds


def closed_form_mesh(shape: tuple[int, int], alpha_s: Sequence[float], beta_s_per_byte: Sequence[float]) -> LogicalMesh:
    """Return a mesh with Alpa's closed forms, with α and β of each axis."""
    outer, inner = (
        AlphaBeta(num_devices=size, alpha_s=alpha, beta_s_per_byte=beta)
        for size, alpha, beta in zip(shape, alpha_s, beta_s_per_byte, strict=True)
    )
    return LogicalMesh(shape=shape, costs=(outer, inner))


def mesh_of_cluster(cost: CostModel, shape: tuple[int, int], first_rank: int = 0) -> LogicalMesh:
    """Return the mesh of a cluster's ranks from ``first_rank``; axis 1 has neighbours.

    Raises PlanError for too few ranks.
    """
    num_outer, num_inner = shape
    if first_rank + num_outer * num_inner > cost.cluster.num_ranks:
        raise PlanError(
            f"A mesh of {num_outer} x {num_inner} devices from rank {first_rank} on was asked for, but cluster "
            f"{cost.cluster.name!r} has {cost.cluster.num_ranks} ranks. Choose a smaller mesh or a larger cluster."
        )
    grid = np.arange(first_rank, first_rank + num_outer * num_inner).reshape(shape)
    lines = [tuple(map(tuple, rows.tolist())) for rows in (grid.T, grid)]
    outer, inner = (ModelCosts(cost=cost, ranks=first, beside=tuple(rest)) for first, *rest in lines)
    return LogicalMesh(shape=shape, costs=(outer, inner))
