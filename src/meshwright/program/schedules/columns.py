"""The computations of ranks, in order, as columns: kind, stage and microbatch of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OrderColumns:
    """Computations in order, each column of shape (n,); ``opcode`` is one of `spec.program.COMPUTATIONS`.

    ``joint``: runs together with the next one. Neither begins before both can, and their results are sent when both are
    done.
    """

    opcode: NDArray[np.int8]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    joint: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.opcode)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OrderColumns) and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__
        )

    __hash__ = None  # type: ignore[assignment]

    def table(self) -> NDArray[np.int32]:
        """Return rows of opcode, stage and microbatch, shape (n, 3)."""
        return np.stack([self.opcode.astype(np.int32), self.stage, self.microbatch], axis=1)

    def select(self, places: NDArray[np.int64] | NDArray[np.bool_] | slice) -> OrderColumns:
        """Return the computations at the given places, or where a mask is true."""
        return OrderColumns(**{name: getattr(self, name)[places] for name in self.__dataclass_fields__})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankOrders:
    """The computations of all ranks, concatenated: rank r has ``offsets[r]:offsets[r + 1]`` of ``columns``."""

    offsets: NDArray[np.int64]
    columns: OrderColumns

    def split(self) -> tuple[OrderColumns, ...]:
        """Return the order of each rank."""
        return tuple(self.columns.select(slice(*ends)) for ends in pairwise(self.offsets.tolist()))

    def later(self, shift: int) -> RankOrders:
        """Return the same orders with microbatches numbered from ``shift`` on."""
        if not shift:
            return self
        return replace(self, columns=replace(self.columns, microbatch=self.columns.microbatch + np.int32(shift)))

    def select(self, kept: NDArray[np.bool_]) -> RankOrders:
        """Return the computations where a mask is true."""
        offsets = np.concatenate([[0], np.cumsum(kept)])[self.offsets]
        return RankOrders(offsets=offsets, columns=self.columns.select(kept))


def make_columns(opcode: ArrayLike, stage: ArrayLike, microbatch: ArrayLike, joint: ArrayLike = False) -> OrderColumns:
    """Return columns of the right types; a single ``stage`` or ``joint`` is used for all rows."""
    kinds = np.asarray(opcode, np.int8)
    return OrderColumns(
        opcode=kinds,
        stage=np.broadcast_to(np.asarray(stage, np.int32), kinds.shape),
        microbatch=np.asarray(microbatch, np.int32),
        joint=np.broadcast_to(np.asarray(joint, np.bool_), kinds.shape),
    )


def gather_columns(rows: Iterable[tuple[int, ...]]) -> OrderColumns:
    """Return columns of rows (opcode, stage, microbatch), optionally with a fourth number: joint or not."""
    table = np.array(list(rows), np.int32)
    return make_columns(*table.reshape(len(table), -1).T) if len(table) else make_columns((), (), ())


def join_ranks(orders: Iterable[OrderColumns]) -> RankOrders:
    """Concatenate the orders of all ranks."""
    given = tuple(orders)
    columns = OrderColumns(
        **{
            name: np.concatenate([getattr(order, name) for order in given])
            for name in OrderColumns.__dataclass_fields__
        }
    )
    return RankOrders(offsets=np.cumsum([0, *map(len, given)]), columns=columns)
