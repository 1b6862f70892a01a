"""The operators of Unity that distribute a tensor over devices, defined by their effect on its elements.

A tensor on several devices is written as one tensor whose shards are adjacent in one dim. `partition` and `combine`
change the placement but no element; `replicate` adds copies; `reduce` sums the shards.
"""

from __future__ import annotations

from typing import Any

from meshwright.rewrite.calculus import Arithmetic, Indexed
from meshwright.rewrite.operators.elementwise import operator
from meshwright.rewrite.operators.layout import check_axis, replaced


@operator(takes="any")
def partition(a: Arithmetic, x: Indexed, *, axis: int, degree: Any) -> Indexed:
    """Return x, with dim ``axis`` sharded over ``degree`` devices (no element changes)."""
    check_axis(x, axis)
    a.quotient(x.shape[axis], degree, "a dim of equal parts")
    return x


@operator(takes="any")
def combine(a: Arithmetic, x: Indexed, *, axis: int, degree: Any) -> Indexed:
    """Return x, with the ``degree`` shards of dim ``axis`` gathered (an all-gather; no element changes)."""
    check_axis(x, axis)
    a.quotient(x.shape[axis], degree, "a dim of equal parts")
    return x


@operator(takes="any")
def replicate(a: Arithmetic, x: Indexed, *, axis: int, degree: Any) -> Indexed:
    """Return ``degree`` copies of x, one per device, adjacent in dim ``axis``."""
    check_axis(x, axis)
    size = x.shape[axis]
    return Indexed(replaced(x.shape, axis, size * degree), lambda *i: x[replaced(i, axis, a.divided(i[axis], size)[1])])


@operator
def reduce(a: Arithmetic, x: Indexed, *, axis: int, degree: Any) -> Indexed:
    """Return the sum of the ``degree`` shards of dim ``axis`` (an all-reduce)."""
    check_axis(x, axis)
    part = a.quotient(x.shape[axis], degree, "a dim of equal parts")
    return Indexed(
        replaced(x.shape, axis, part),
        lambda *i: a.total(degree, lambda k: x[replaced(i, axis, k * part + i[axis])]),
    )
