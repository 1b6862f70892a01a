"""Unity's operators that distribute a tensor over devices, by their effect on numbers.

A tensor on several devices is written as one tensor, with the parts adjacent in one dim: `partition` and `combine`
change placement but no number; `replicate` adds copies; `reduce` adds the parts up.
"""

from __future__ import annotations

from typing import Any

from meshwright.rewrite.calculus import Arithmetic, Indexed
from meshwright.rewrite.operators.elementwise import operator
from meshwright.rewrite.operators.layout import check_axis, replaced


@operator(takes="any")
def partition(a: Arithmetic, x: Indexed, *, axis: int, degree: Any) -> Indexed:
    """Return the parts of one dim on ``degree`` devices."""
    check_axis(x, axis)
    a.quotient(x.shape[axis], degree, "a dim of equal parts")
    return x


@operator(takes="any")
def combine(a: Arithmetic, x: Indexed, *, axis: int, degree: Any) -> Indexed:
    """Return the parts of one dim brought together (an all-gather)."""
    check_axis(x, axis)
    a.quotient(x.shape[axis], degree, "a dim of equal parts")
    return x


@operator(takes="any")
def replicate(a: Arithmetic, x: Indexed, *, axis: int, degree: Any) -> Indexed:
    """Return copies on ``degree`` devices."""
    check_axis(x, axis)
    size = x.shape[axis]
    return Indexed(replaced(x.shape, axis, size * degree), lambda *i: x[replaced(i, axis, a.divided(i[axis], size)[1])])


@operator
def reduce(a: Arithmetic, x: Indexed, *, axis: int, degree: Any) -> Indexed:
    """Return the sum of the devices' parts (an all-reduce)."""
    check_axis(x, axis)
    part = a.quotient(x.shape[axis], degree, "a dim of equal parts")
    return Indexed(
        replaced(x.shape, axis, part),
        lambda *i: a.total(degree, lambda k: x[replaced(i, axis, k * part + i[axis])]),
    )
