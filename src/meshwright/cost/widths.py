"""Bytes of an element of a tensor in a model's precision.

Under autocast the types of the graph hold. Otherwise parameters were converted to the type of the values, and with them
everything computed from them. Tensors that a forward makes from integers stay float32, torch's default: positions times
frequencies, their sines and cosines, and by type promotion products with them, until something casts the result back
(`type_as`) or a layer with parameters follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.cost.traits import family_of, operator_name
from meshwright.spec.units import DTYPE_BYTES, FLOAT_DTYPES

if TYPE_CHECKING:
    from meshwright.spec import Graph

_SINGLE = "float32"
# Families whose outputs have the widest type of their inputs.
_PROMOTING = frozenset({"pointwise", "reduction", "copy", "view"})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Widths:
    """Element sizes of tensors.

    ``values``: bytes of a floating element, None under autocast; ``single``: tensors of `stays_single`.
    """

    graph: Graph
    values: int | None
    single: frozenset[int]

    def of(self, tensor: int) -> int:
        """Return the bytes of an element of a tensor."""
        dtype = self.graph.tensors[tensor].dtype
        if self.values is None or dtype not in FLOAT_DTYPES or tensor in self.single:
            return DTYPE_BYTES[dtype]
        return self.values


def stays_single(graph: Graph) -> frozenset[int]:
    """Return the tensors that are float32 whatever type the parameters are converted to."""
    found: set[int] = set()
    for op in graph.ops:
        floats = [i for i in op.inputs if graph.tensors[i].dtype in FLOAT_DTYPES]
        if not floats:
            # Other ops that make tensors from nothing are mostly written to follow the values.
            single = bool(op.inputs) or operator_name(op) == "arange"
        elif operator_name(op) == "type_as":
            single = op.inputs[-1] in found
        else:
            # Tensors without dims do not widen others.
            widening = [i for i in floats if graph.tensors[i].shape] or floats
            single = (any if family_of(op) in _PROMOTING else all)(i in found for i in widening)
        if single:
            found.update(i for i in op.outputs if graph.tensors[i].dtype == _SINGLE)
    return frozenset(found)
