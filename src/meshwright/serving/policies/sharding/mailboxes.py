"""Mailboxes: send rows of integers from one thread or process to another, in order, without locks.

A mailbox is an array of int64, which can be in shared memory; an array of zeros is an empty one. It is a ring of rows
with two counts: rows written, which only the writer changes, and rows read, which only the reader changes. A count is
stored with **release** and loaded with **acquire** order: a reader that sees the new count also sees the rows, and a
writer may overwrite the rows that are counted as read, on any processor and however the compiler reorders instructions.
The counts are two cache lines apart, as processors fetch neighbouring lines in pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from meshwright.compiled import compiled

Ints = NDArray[np.int64]

WIDTH = 8
# Cells of the counts, and the start of the rows.
_READ, _WRITTEN, _ROWS = 0, 16, 32


def cells_of_mailbox(size: int) -> int:
    """Return the number of cells of a mailbox for ``size`` rows."""
    return _ROWS + size * WIDTH


@compiled
def room_in(box: Ints) -> int:
    """Return how many rows the writer can send now; the reader may make more room at any time."""
    return (len(box) - _ROWS) // WIDTH - (box[_WRITTEN] - load_acquire(box, _READ))


@compiled
def send(
    box: Ints, kind: int, now: int, first: int, second: int, third: int, fourth: int, fifth: int, last: int
) -> None:
    """Write a row. Raises RuntimeError if the mailbox is full; the writer must check this first (`room_in`)."""
    if room_in(box) <= 0:
        raise RuntimeError("A mailbox between two parts of the sharded scheduler is full.")
    written = box[_WRITTEN]
    at = _ROWS + written % ((len(box) - _ROWS) // WIDTH) * WIDTH
    box[at] = kind
    box[at + 1] = now
    box[at + 2] = first
    box[at + 3] = second
    box[at + 4] = third
    box[at + 5] = fourth
    box[at + 6] = fifth
    box[at + 7] = last
    store_release(box, _WRITTEN, written + 1)


@compiled
def receive(box: Ints, row: Ints) -> bool:
    """Read the next row into ``row``; return False if no row is available."""
    read = box[_READ]
    if read == load_acquire(box, _WRITTEN):
        return False
    at = _ROWS + read % ((len(box) - _ROWS) // WIDTH) * WIDTH
    for cell in range(WIDTH):
        row[cell] = box[at + cell]
    store_release(box, _READ, read + 1)
    return True


def _address(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """Return the address of a cell of an int64 array."""
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(array.data, [context.cast(builder, arguments[1], signature.args[1], types.intp)])


def _load_acquire(typing: Any, array: Any, place: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_address(context, builder, signature, arguments), "acquire", 8)

    return types.int64(array, place), generate


def _store_release(typing: Any, array: Any, place: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        whole = context.cast(builder, arguments[2], signature.args[2], types.int64)
        builder.store_atomic(whole, _address(context, builder, signature, arguments), "release", 8)
        return context.get_dummy_value()

    return types.none(array, place, value), generate


# For compiled code: load a cell before anything that follows is read, and store a cell after everything before it is
# written.
load_acquire: Any = intrinsic(_load_acquire)
store_release: Any = intrinsic(_store_release)
