"""Operators that copy, move or repeat elements without arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.rewrite.calculus import Arithmetic, IllTypedError, Indexed
from meshwright.rewrite.operators.elementwise import operator

if TYPE_CHECKING:
    from collections.abc import Sequence


def product_of(sizes: Sequence[Any]) -> Any:
    """Return the product of sizes; 1 if ``sizes`` is empty."""
    result: Any = 1
    for size in sizes:
        result = result * size
    return result


def check_axis(x: Indexed, axis: int) -> None:
    """Raise IllTypedError unless 0 <= axis < the tensor's rank."""
    if not 0 <= axis < x.rank:
        raise IllTypedError(f"dim {axis} does not exist in a tensor of {x.rank} dims")


def replaced(index: Sequence[Any], axis: int, place: Any) -> tuple[Any, ...]:
    """Return a copy of ``index`` (or a shape) in which the entry of dim ``axis`` is ``place``."""
    return (*index[:axis], place, *index[axis + 1 :])


@operator(takes="any")
def concat(a: Arithmetic, x: Indexed, *others: Indexed, axis: int) -> Indexed:
    check_axis(x, axis)
    for other in others:
        a.same(x.rank, other.rank, "ranks of concatenated tensors")
        for dim in range(x.rank):
            if dim != axis:
                a.same(x.shape[dim], other.shape[dim], "sizes of concatenated tensors in another dim")
    starts, end = [], x.shape[axis]
    for other in others:
        starts.append(end)
        end = end + other.shape[axis]

    def at(*i: Any) -> Any:
        value = x[i]
        for start, other in zip(starts, others, strict=True):
            later = other[replaced(i, axis, i[axis] - start)]
            value = a.choose(a.within(i[axis], start, end), later, value)
        return value

    return Indexed(replaced(x.shape, axis, end), at)


@operator(takes="any")
def slice_(a: Arithmetic, x: Indexed, *, axis: int, start: Any, stop: Any) -> Indexed:
    """Return the elements with ``start <= index < stop`` in dim ``axis``; at least one."""
    check_axis(x, axis)
    a.ordered(0, start, "start of a slice")
    a.ordered(start + 1, stop, "sizes of a slice")
    a.ordered(stop, x.shape[axis], "end of a slice")
    return Indexed(replaced(x.shape, axis, stop - start), lambda *i: x[replaced(i, axis, i[axis] + start)])


@operator(takes="any")
def transpose(a: Arithmetic, x: Indexed, *, order: tuple[int, ...]) -> Indexed:
    """Return the tensor with permuted dims: dim ``order[d]`` of x becomes dim d."""
    if sorted(order) != list(range(x.rank)):
        raise IllTypedError(f"{order} is not an order of {x.rank} dims")
    undone = [order.index(dim) for dim in range(x.rank)]
    return Indexed(tuple(x.shape[dim] for dim in order), lambda *i: x[tuple(i[place] for place in undone)])


@operator(takes="any")
def reshape(a: Arithmetic, x: Indexed, *, shape: tuple[Any, ...]) -> Indexed:
    a.same(product_of(x.shape), product_of(shape), "numbers of elements before and after a reshape")
    # Unchanged leading and trailing dims keep their indices: only the changed dims are renumbered.
    first = _num_alike(x.shape, shape)
    last = min(_num_alike(x.shape[::-1], shape[::-1]), min(x.rank, len(shape)) - first)
    inner, outer = x.shape[first : x.rank - last], shape[first : len(shape) - last]

    def at(*i: Any) -> Any:
        flat: Any = 0
        for place, size in zip(i[first : len(shape) - last], outer, strict=True):
            flat = flat * size + place
        places: list[Any] = []
        for size in inner[:0:-1]:
            flat, rest = a.divided(flat, size)
            places.insert(0, rest)
        head = (flat,) if inner else ()
        return x[(*i[:first], *head, *places, *i[len(shape) - last :])]

    return Indexed(tuple(shape), at)


@operator(takes="any")
def broadcast(a: Arithmetic, x: Indexed, *, shape: tuple[Any, ...]) -> Indexed:
    """Return x expanded to ``shape``: dims of size 1 and missing leading dims are repeated."""
    missing = len(shape) - x.rank
    if missing < 0:
        raise IllTypedError(f"a tensor of {x.rank} dims cannot be broadcast to {len(shape)} dims")
    pairs = zip(x.shape, shape[missing:], strict=True)
    repeated = [a.repeats(size, wanted, "sizes before and after broadcasting") for size, wanted in pairs]
    places = range(x.rank)
    return Indexed(tuple(shape), lambda *i: x[tuple(0 if repeated[p] else i[missing + p] for p in places)])


@operator
def pad(a: Arithmetic, x: Indexed, *, low: tuple[Any, ...], high: tuple[Any, ...]) -> Indexed:
    """Return x padded with zeros: in dim d, ``low[d]`` before and ``high[d]`` after its elements."""
    if len(low) != x.rank or len(high) != x.rank:
        raise IllTypedError(f"a tensor of {x.rank} dims has paddings of {len(low)} (low) and {len(high)} (high) dims")
    sizes = tuple(size + before + after for size, before, after in zip(x.shape, low, high, strict=True))

    def at(*i: Any) -> Any:
        inner = tuple(place - before for place, before in zip(i, low, strict=True))
        padded = [dim for dim in range(x.rank) if not (_is_zero(low[dim]) and _is_zero(high[dim]))]
        if not padded:
            return x[i]
        inside = a.both(*(a.within(inner[dim], 0, x.shape[dim]) for dim in padded))
        return a.choose(inside, x[inner], a.number(0))

    return Indexed(sizes, at)


@operator(takes="any")
def reverse(a: Arithmetic, x: Indexed, *, axis: int) -> Indexed:
    check_axis(x, axis)
    return Indexed(x.shape, lambda *i: x[replaced(i, axis, x.shape[axis] - 1 - i[axis])])


@operator(takes="any")
def embedding(a: Arithmetic, table: Indexed, ids: Indexed) -> Indexed:
    if table.rank != 2:
        raise IllTypedError(f"an embedding table has {table.rank} dims, expected 2")
    rank = ids.rank
    return Indexed(
        (*ids.shape, table.shape[1]),
        lambda *i: table[(a.looked_up(ids[i[:rank]], table.shape[0]), i[rank])],
    )


def _num_alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    count = 0
    for size, wanted in zip(one, other, strict=False):
        if not _alike(size, wanted):
            break
        count += 1
    return count


def _alike(one: Any, other: Any) -> bool:
    return bool(one == other)


def _is_zero(size: Any) -> bool:
    return _alike(size, 0)
