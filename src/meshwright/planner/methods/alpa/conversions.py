"""Costs of converting a tensor from its layout to the layout that a reader needs, for all pairs at once.

On one axis the table of placements gives the collectives forward and for the gradient (`find_conversion`). Over two
axes a tensor is converted along one and then along the other, in the cheaper order: the second collective moves what
the first has left of the tensor,

    R[h, w] = min( c₀(h₀ → w₀; N / |h₁|) + c₁(h₁ → w₁; N / |w₀|),  the same with the axes swapped )

with N the bytes of the tensor and |l| the number of ranks over which a layout splits it, 1 if it is whole or a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.methods.alpa.groups import Want
from meshwright.planner.methods.alpa.mesh import AXES, Floats, LogicalMesh
from meshwright.program.sharding.propagate import Place
from meshwright.program.sharding.table import find_conversion
from meshwright.spec.collective import CollectiveKind
from meshwright.spec.graph import Extent
from meshwright.spec.sharding import Layout, Partial, Replicate, Shard

Integers = NDArray[np.int64]


class Have(NamedTuple):
    """A tensor's layout on one axis: split at a place or whole; or, if ``sums``, a sum over the ranks.

    For a parameter, ``sums`` is about its gradient.
    """

    place: Place
    sums: bool = False


class ConversionCosts:
    """Seconds of collectives along the axes of a mesh, each computed once."""

    def __init__(self, mesh: LogicalMesh) -> None:
        self.mesh = mesh
        self._kept: dict[tuple[int, CollectiveKind, float], float] = {}

    def seconds(self, axis: int, kind: CollectiveKind | None, num_bytes: float) -> float:
        """Return the seconds of one collective; 0 for no collective, no bytes or one rank."""
        if kind is None or num_bytes == 0 or self.mesh.shape[axis] == 1:
            return 0.0
        key = axis, kind, num_bytes
        if key not in self._kept:
            self._kept[key] = float(self.mesh.costs[axis].seconds(kind, np.array([num_bytes], np.float64))[0])
        return self._kept[key]

    def all_reduce(self, axes: Sequence[int], num_bytes: float) -> float:
        """Return the seconds to all-reduce over axes.

        Over two axes: scatter along one, reduce along the other, gather along the first.
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
        """Return the seconds for one pair of layouts, with whole gradients."""
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
        """Return the seconds from each layout to each, forward and backward, shape (haves, wants)."""
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
