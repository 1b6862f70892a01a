"""Logical meshes: n x m devices in two axes, with the costs of collectives along each axis and of layout conversions.

The costs come from Alpa's closed forms (Zheng et al., OSDI 2022, and its `LogicalDeviceMesh`), for k devices, α seconds
and β seconds per byte; Alpa's small constants, which only break ties, are left out:

    all-gather, reduce-scatter    α + β · bytes · (k - 1) / k
    all-reduce                    α + 2 β · bytes · (k - 1) / k
    all-to-all                    α + β · bytes · (k - 1) / k² · k / 2

or from the cost model, for the ranks of a cluster: axis 1 has neighbouring ranks, and all groups along an axis
communicate at the same time. Bytes are always those of the full tensor, as in `spec.exchange`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.cost import CostModel
from meshwright.planner.methods.alpa.op_groups import Want
from meshwright.program.sharding.placement_table import find_conversion
from meshwright.program.sharding.propagate import Place
from meshwright.spec import Extent, Partial, PlanError, Replicate, Shard
from meshwright.spec.exchange import CollectiveKind
from meshwright.spec.sharding import Layout

Floats = NDArray[np.float64]
# The axes of a mesh, outer and inner.
AXES = (0, 1)


class AxisCosts(Protocol):
    """Interface: the costs of collectives along one axis of a mesh."""

    def seconds(self, kind: CollectiveKind, num_bytes: Floats) -> Floats:
        """Return the seconds of a collective for each of n sizes of the full tensor in bytes, shape (n,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalMesh:
    """Devices in a grid of ``shape`` (outer, inner), with the costs of both axes; an axis of size 1 needs none."""

    shape: tuple[int, int]
    costs: tuple[AxisCosts, AxisCosts]

    def __post_init__(self) -> None:
        if min(self.shape) < 1:
            raise PlanError(f"A mesh of {self.shape} devices was given; expected at least one device along each axis.")

    @property
    def num_devices(self) -> int:
        """Number of devices of the mesh."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlphaBeta:
    """Alpa's closed forms for one axis: latency ``alpha_s`` and seconds per byte ``beta_s_per_byte``."""

    num_devices: int
    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, kind: CollectiveKind, num_bytes: Floats) -> Floats:
        """Return the seconds of a collective for each of n sizes of the full tensor in bytes, shape (n,)."""
        passed = num_bytes * ((self.num_devices - 1) / self.num_devices)
        rounds = {"all_reduce": 2.0, "all_to_all": 0.5}.get(kind, 1.0)
        return self.alpha_s + self.beta_s_per_byte * rounds * passed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelCosts:
    """Collective costs from a cost model for one group of ranks along an axis.

    ``beside`` are the other groups along the same axis; they communicate at the same time.
    """

    cost: CostModel
    ranks: tuple[int, ...]
    beside: tuple[tuple[int, ...], ...]

    def seconds(self, kind: CollectiveKind, num_bytes: Floats) -> Floats:
        """Return the seconds of a collective for each of n sizes of the full tensor in bytes, shape (n,)."""
        return self.cost.predict_collective(kind, self.ranks, num_bytes, self.beside).seconds


def closed_form_mesh(shape: tuple[int, int], alpha_s: Sequence[float], beta_s_per_byte: Sequence[float]) -> LogicalMesh:
    """Return a mesh whose costs are Alpa's closed forms; ``alpha_s``, ``beta_s_per_byte``: one value per axis."""
    outer, inner = (
        AlphaBeta(num_devices=size, alpha_s=alpha, beta_s_per_byte=beta)
        for size, alpha, beta in zip(shape, alpha_s, beta_s_per_byte, strict=True)
    )
    return LogicalMesh(shape=shape, costs=(outer, inner))


def mesh_of_cluster(cost: CostModel, shape: tuple[int, int], first_rank: int = 0) -> LogicalMesh:
    """Return the mesh of the ranks from ``first_rank`` on, with the costs of the cost model.

    Neighbouring ranks lie along axis 1. Raises PlanError if the cluster has too few ranks.
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


Integers = NDArray[np.int64]


class Have(NamedTuple):
    """The layout that a tensor has on one mesh axis: split along a dim, whole, or a partial sum on each rank.

    ``place``: the dim that is split and the number of equal blocks in it, each of which is split over the axis; None if
    no dim is split. ``sums``: each rank has a partial sum; for a parameter, of its gradient.
    """

    place: Place
    sums: bool = False


# A tensor is converted from its layout to the layout that a reader needs. On one axis the table of placements gives the
# collectives forward and for the gradient (`find_conversion`). Over two axes a tensor is converted along one and then
# along the other, in the cheaper order: the second collective moves what the first has left of the tensor,
#
#     R[h, w] = min( c₀(h₀ → w₀; N / |h₁|) + c₁(h₁ → w₁; N / |w₀|),  the same with the axes swapped )
#
# with N the bytes of the tensor and |l| the number of ranks over which a layout splits it, 1 if it is whole or a sum.
class ConversionCosts:
    """The seconds of collectives and of layout conversions on a mesh; results are cached."""

    def __init__(self, mesh: LogicalMesh) -> None:
        self.mesh = mesh
        self._kept: dict[tuple[int, CollectiveKind, float], float] = {}

    def seconds(self, axis: int, kind: CollectiveKind | None, num_bytes: float) -> float:
        """Return the seconds of one collective along an axis; 0 if ``kind`` is None, for 0 bytes and for one rank."""
        if kind is None or num_bytes == 0 or self.mesh.shape[axis] == 1:
            return 0.0
        key = axis, kind, num_bytes
        if key not in self._kept:
            self._kept[key] = float(self.mesh.costs[axis].seconds(kind, np.array([num_bytes], np.float64))[0])
        return self._kept[key]

    def all_reduce(self, axes: Sequence[int], num_bytes: float) -> float:
        """Return the seconds to all-reduce a tensor over no axis (0), one axis or both.

        Over both: reduce-scatter along one, all-reduce the shards along the other, all-gather along the first, in the
        cheaper order of the axes.
        """
        if len(axes) == 1:
            return self.seconds(axes[0], "all_reduce", num_bytes)
        pairs = ((0, 1), (1, 0)) if axes else ()
        sums = (
            self.seconds(first, "all_reduce", num_bytes)
            + self.seconds(second, "all_reduce", num_bytes / self.mesh.shape[first])
            for first, second in pairs
        )
        return min(sums, default=0.0)

    def convert_one(
        self, have: tuple[Have, Have], want: tuple[Have, Have], num_bytes: float, *, with_gradient: bool
    ) -> float:
        """Return the seconds to convert a tensor from layout ``have`` to ``want``, each a pair for both axes.

        ``with_gradient`` adds the conversion of the gradient, which is a full sum for the reader.
        """
        wants = Want(want[0].place), Want(want[1].place)
        return float(self.convert([have], [wants], num_bytes, with_gradient=with_gradient)[0, 0])

    def convert(
        self,
        haves: Sequence[tuple[Have, Have]],
        wants: Sequence[tuple[Want, Want]],
        num_bytes: float,
        *,
        with_gradient: bool,
    ) -> Floats:
        """Return the seconds to convert a tensor of ``num_bytes`` from each layout to each, shape (haves, wants).

        ``with_gradient`` adds the conversion of the gradient in the backward.
        """
        tables, have_at, want_at = [], [], []
        for axis in AXES:
            have = list(dict.fromkeys(item[axis] for item in haves))
            want = list(dict.fromkeys(item[axis] for item in wants))
            tables.append(self._axis_table(axis, have, want, num_bytes, with_gradient=with_gradient))
            have_at.append(np.array([have.index(item[axis]) for item in haves])[:, None])
            want_at.append(np.array([want.index(item[axis]) for item in wants])[None, :])
        orders = []
        for first, second in ((0, 1), (1, 0)):
            # Index 1 if the other axis has split the tensor by then.
            before = np.array([item[second].place is not None for item in haves], np.int64)[:, None]
            behind = np.array([item[first].place is not None for item in wants], np.int64)[None, :]
            orders.append(
                tables[first][before, have_at[first], want_at[first]]
                + tables[second][behind, have_at[second], want_at[second]]
            )
        seconds: Floats = np.minimum(*orders)
        return seconds

    def _axis_table(
        self, axis: int, haves: Sequence[Have], wants: Sequence[Want], num_bytes: float, *, with_gradient: bool
    ) -> Floats:
        """Return seconds along one axis, shape (2, haves, wants).

        Entry 0 is for the whole tensor, entry 1 for its part if the other axis splits it.
        """
        sizes = num_bytes, num_bytes / self.mesh.shape[1 - axis]
        table = np.zeros((2, len(haves), len(wants)))
        for i, have in enumerate(haves):
            for j, want in enumerate(wants):
                found = find_conversion(_layout(have), _layout(Have(want.place)), partial_gradient=want.sums)
                if found is not None:
                    kinds = (found.forward, found.backward if with_gradient else None)
                    table[:, i, j] = [sum(self.seconds(axis, kind, size) for kind in kinds) for size in sizes]
        return table


def _layout(have: Have) -> Layout:
    if have.sums:
        return Partial()
    return Replicate() if have.place is None else Shard(have.place[0], Extent(have.place[1]))
