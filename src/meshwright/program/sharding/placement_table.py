"""The table ``placements.toml``: how each operator can be split, and how tensors are converted between layouts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

from meshwright.spec import Partial, Replicate, Shard
from meshwright.spec.codec import decode
from meshwright.spec.exchange import CollectiveKind
from meshwright.spec.parsing import read_data
from meshwright.spec.sharding import Layout

Lies = Literal["shard", "replicate", "partial"]
ConversionKind = Literal["all_reduce", "reduce_scatter", "all_gather", "copy", "shard", "all_to_all", "ring"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """One row of ``placements.toml``: operators that are split in the same way.

    The comment at the head of that file describes the fields.
    """

    names: str
    equation: str = ""
    dims: str = ""
    reads: int = 9
    product: bool = False
    exchanges: tuple[CollectiveKind, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """How a tensor is converted from layout ``have`` to layout ``want``: the inserted op and its collectives.

    ``forward`` and ``backward`` are the collectives of the two phases, None for no collective. ``gradient``: whether
    the readers of the converted tensor give partial sums or the whole of its gradient.
    """

    kind: ConversionKind
    have: Lies
    want: Lies
    gradient: Literal["partial", "whole"] = "whole"
    forward: CollectiveKind | None = None
    backward: CollectiveKind | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    operators: tuple[OperatorRow, ...]
    conversions: tuple[Conversion, ...]


@cache
def _table() -> _Table:
    text = resources.files("meshwright.program.sharding").joinpath("placements.toml")
    with resources.as_file(text) as path:
        return decode(_Table, read_data(path), "placements.toml")


@cache
def operator_rows() -> dict[str, OperatorRow]:
    """Return, by operator name, the operator's row of ``placements.toml``."""
    return {name: row for row in _table().operators for name in row.names.split()}


def conversions() -> tuple[Conversion, ...]:
    """Return all conversions of ``placements.toml``."""
    return _table().conversions


def operator_name(kind: str) -> str:
    """Return the operator's name in an op's kind: ``relu_`` for ``aten.relu_.default``."""
    parts = kind.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


@cache
def find_conversion(have: Layout, want: Layout, *, partial_gradient: bool) -> Conversion | None:
    """Return the conversion of a tensor from layout ``have`` to ``want``; None if no conversion is needed.

    ``partial_gradient``: the readers give partial sums of the tensor's gradient.
    """
    if have == want and not (isinstance(have, Replicate) and partial_gradient):
        return None
    lies = _lies(have), _lies(want)
    rows = [row for row in _table().conversions if (row.have, row.want) == lies]
    gradient = "partial" if partial_gradient else "whole"
    return next((row for row in rows if row.gradient == gradient), rows[0] if rows else None)


def _lies(layout: Layout) -> Lies:
    match layout:
        case Shard():
            return "shard"
        case Replicate():
            return "replicate"
        case Partial():
            return "partial"
