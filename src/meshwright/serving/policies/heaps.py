"""A heap of numbered items by key, in which an item can be moved and taken out.

It is three columns of one int64 array. Cell ``heap`` gives the start of the items' keys, ``heap + 1`` that of their
order (the number of items, then the items), and ``heap + 2`` that of each item's place in that order (-1: not in it).
Equal keys are ordered by number, so that the order does not depend on the history.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled

Ints = NDArray[np.int64]


@compiled
def cells_of_heap(size: int) -> int:
    """Return how many cells `lay_heap` takes."""
    return 3 + 3 * size + 1


@compiled
def lay_heap(array: Ints, at: int, size: int) -> None:
    """Lay out an empty heap at cell ``at``, for items from 0 to ``size`` - 1; ``at`` identifies it."""
    array[at], array[at + 1], array[at + 2] = at + 3, at + 3 + size, at + 3 + 2 * size + 1
    array[array[at + 1]] = 0
    array[array[at + 2] : array[at + 2] + size] = -1


@compiled
def size_of(array: Ints, heap: int) -> int:
    """Return the number of items."""
    return int(array[array[heap + 1]])


@compiled
def first_of(array: Ints, heap: int) -> int:
    """Return the item with the least key; the heap must not be empty."""
    return int(array[array[heap + 1] + 1])


@compiled
def least_of(array: Ints, heap: int, otherwise: int) -> int:
    """Return the least key, or ``otherwise`` if the heap is empty."""
    order = array[heap + 1]
    return array[array[heap] + array[order + 1]] if array[order] > 0 else otherwise


@compiled
def is_in(array: Ints, heap: int, number: int) -> bool:
    """Return whether an item is in the heap."""
    return bool(array[array[heap + 2] + number] >= 0)


@compiled
def put(array: Ints, heap: int, number: int, value: int) -> None:
    """Add an item, or change its key."""
    key, order, place = array[heap], array[heap + 1], array[heap + 2]
    at = array[place + number]
    if at < 0:
        at = array[order] + 1
        array[order] = at
        array[key + number] = value
        _rise(array, key, order, place, number, at)
    elif value < array[key + number]:
        array[key + number] = value
        _rise(array, key, order, place, number, at)
    elif value > array[key + number]:
        array[key + number] = value
        _sink(array, key, order, place, number, at)


@compiled
def take_out(array: Ints, heap: int, number: int) -> None:
    """Remove an item; do nothing if it is not in the heap."""
    key, order, place = array[heap], array[heap + 1], array[heap + 2]
    at = array[place + number]
    if at < 0:
        return
    array[place + number] = -1
    size = array[order]
    array[order] = size - 1
    if at == size:
        return
    last = array[order + size]
    if _before(array, key, last, number):
        _rise(array, key, order, place, last, at)
    else:
        _sink(array, key, order, place, last, at)


@compiled
def _before(array: Ints, key: int, one: int, other: int) -> bool:
    first, second = array[key + one], array[key + other]
    return bool(first < second or (first == second and one < other))


@compiled
def _rise(array: Ints, key: int, order: int, place: int, number: int, at: int) -> None:
    while at > 1:
        parent = array[order + (at >> 1)]
        if _before(array, key, parent, number):
            break
        array[order + at] = parent
        array[place + parent] = at
        at >>= 1
    array[order + at] = number
    array[place + number] = at


@compiled
def _sink(array: Ints, key: int, order: int, place: int, number: int, at: int) -> None:
    size = array[order]
    while 2 * at <= size:
        child = 2 * at
        if child < size and _before(array, key, array[order + child + 1], array[order + child]):
            child += 1
        least = array[order + child]
        if _before(array, key, number, least):
            break
        array[order + at] = least
        array[place + least] = at
        at = child
    array[order + at] = number
    array[place + number] = at
