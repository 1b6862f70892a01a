"""Sums over all intervals of layers at once: the items that a stage i:j holds, for every i and j.

An item (an op, a parameter, a saved tensor) belongs to the stages i:j of a few rectangles i0 <= i < i1, j0 <= j < j1 of
the (i, j) plane. The weight of all items of every stage is then a two-dimensional prefix sum over the corners of the
rectangles: O(items + L²) for a graph of L layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rectangles:
    """Rectangles as columns: the item, i0, i1, j0, j1 (shape (R, 5)), over a graph of ``num_layers`` layers."""

    num_layers: int
    rows: Integers

    def table(self, weights: Integers) -> Integers:
        """Return the total weight of the items of stage i:j, shape (L, L + 1); ``weights`` has one entry per item.

        Exact.
        """
        edges = np.zeros((self.num_layers + 1, self.num_layers + 2), np.int64)
        item, i0, i1, j0, j1 = self.rows.T
        weight = weights[item]
        for i, j, sign in ((i0, j0, 1), (i1, j0, -1), (i0, j1, -1), (i1, j1, 1)):
            np.add.at(edges, (i, j), sign * weight)
        return edges.cumsum(axis=0).cumsum(axis=1)[:-1, :-1]


def rectangles(num_layers: int, rows: Iterable[tuple[int, int, int, int, int]]) -> Rectangles:
    """Collect rows (item, i0, i1, j0, j1)."""
    return Rectangles(num_layers=num_layers, rows=np.array(list(rows), np.int64).reshape(-1, 5))


def users(num_layers: int, layers_of: Iterable[Iterable[int]]) -> Rectangles:
    """Return items that a stage holds once if any of the item's layers is in it; entry k lists the layers of item k."""
    return rectangles(
        num_layers, (row for item, layers in enumerate(layers_of) for row in _covers(num_layers, item, layers))
    )


def _covers(num_layers: int, item: int, layers: Iterable[int]) -> Iterable[tuple[int, int, int, int, int]]:
    """The first layer of the item at or after i is p for i in (previous, p]; the stage reaches it for j > p."""
    previous = -1
    for layer in sorted(set(layers)):
        yield item, previous + 1, layer + 1, layer + 1, num_layers + 1
        previous = layer
