"""Classes of ops with equal costs, so that the cost of each class is estimated once.

Ops of a class have equal kind, attributes, shapes and roles of tensors, for every batch size. The ops of a large model
with 80 equal layers form a few dozen classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.autocast import stays_single

if TYPE_CHECKING:
    from collections.abc import Hashable

    from numpy.typing import NDArray

    from meshwright.spec import Graph, Op


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpClasses:
    """The classes of the ops of a graph.

    ``class_of[i]``: class of op i, shape (ops,). ``representatives[c]``: first op of class c. ``added[c]``: positions
    of the inputs of class c whose gradient is added to an existing gradient of the same tensor. ``single``: ids of the
    tensors that are float32 in every precision (`stays_single`).
    """

    class_of: NDArray[np.int64]
    representatives: tuple[int, ...]
    added: tuple[tuple[int, ...], ...]
    single: frozenset[int]


# Cost models of several clusters estimate the same graph.
@lru_cache(maxsize=8)
def classify_ops(graph: Graph) -> OpClasses:
    """Return the classes of a graph's ops: ops are in one class if all properties that affect their cost are equal."""
    single = stays_single(graph)
    sorts = _tensor_sorts(graph, single)
    known: dict[Hashable, int] = {}
    representatives: list[int] = []
    added: list[tuple[int, ...]] = []
    class_of = np.empty(len(graph.ops), np.int64)
    read: set[int] = set()
    for index, op in enumerate(graph.ops):
        again = _read_again(graph, op, read)
        found = known.setdefault((_signature(op, sorts), again), len(known))
        if found == len(representatives):
            representatives.append(index)
            added.append(again)
        class_of[index] = found
    class_of.setflags(write=False)
    return OpClasses(class_of=class_of, representatives=tuple(representatives), added=tuple(added), single=single)


def _read_again(graph: Graph, op: Op, read: set[int]) -> tuple[int, ...]:
    """Return places of inputs with an additional gradient of a tensor; adds to ``read``, the tensors that had one.

    Autograd adds it to the existing gradient when the ops run backward (torch, InputBuffer::add).
    """
    if not any(graph.tensors[i].requires_grad for i in op.outputs):
        return ()
    wanted = [place for place, i in enumerate(op.inputs) if graph.tensors[i].requires_grad]
    again = tuple(place for place in wanted if op.inputs[place] in read)
    read.update(op.inputs[place] for place in wanted)
    return again


def _tensor_sorts(graph: Graph, single: frozenset[int]) -> list[int]:
    """Return one number per tensor, equal for tensors that a cost does not distinguish."""
    known: dict[Hashable, int] = {}
    return [
        known.setdefault(
            (
                tensor.shape,
                tensor.dtype,
                tensor.requires_grad,
                tensor.storage == index,
                tensor.role == "parameter",
                index in single,
            ),
            len(known),
        )
        for index, tensor in enumerate(graph.tensors)
    ]


def _signature(op: Op, sorts: list[int]) -> Hashable:
    # A tensor read twice is read from memory once, so the pattern of repetition belongs to the class.
    pattern = tuple(op.inputs.index(i) for i in op.inputs) if len(set(op.inputs)) < len(op.inputs) else ()
    return (
        op.kind,
        op.attributes,
        tuple(sorts[i] for i in op.inputs),
        pattern,
        tuple(sorts[i] for i in op.outputs),
        tuple(sorts[i] for i in dict.fromkeys(op.saved)),
        op.flops,
        op.backward_flops,
        op.phase,
    )
