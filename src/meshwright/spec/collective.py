"""The collectives among the ranks of a mesh axis while they compute an op of their local graph."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from meshwright.spec.units import DTYPE_BYTES, FLOAT_DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwright.spec.graph import Graph

Axis = Literal["tensor", "context", "expert"]
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
Phase = Literal["forward", "backward"]
_LOSS = "aten.cross_entropy_loss.default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective among the ranks of ``axis`` at op ``at`` of their local graph.

    In the forward pass it is (part of) what that op does, and ends before the op's output is available; in the backward
    pass likewise for the gradients of the op's inputs. The backward runs ops in descending order. Collectives of one
    op and phase run in the order of the list. In phase "step" the gradient of parameter ``tensor``, which op ``at``
    reads first, is summed once before the optimizer.

    Its size is that of the **full** tensor in the group (the output of an all-gather, the input of a reduce-scatter,
    what all ranks together pass to an all-to-all): ``copies`` times tensor ``tensor`` of the local graph. A "send" goes
    to the next rank of the axis while another comes from the rank before, ``count`` times one after the other.
    """

    kind: CollectiveKind
    axis: Axis
    phase: Literal["forward", "backward", "step"]
    at: int
    tensor: int
    copies: int = 1
    count: int = 1

    def num_bytes(self, graph: Graph, batch_size: int, float_bytes: int | None = None) -> int:
        """Bytes of the full tensor, for one of ``count`` (``float_bytes``: see `Tensor.num_bytes`)."""
        tensor = graph.tensors[self.tensor]
        if graph.ops[self.at].kind == _LOSS and tensor.dtype in FLOAT_DTYPES:
            # Sums of exponentials are never in half precision.
            float_bytes = max(float_bytes or DTYPE_BYTES[tensor.dtype], DTYPE_BYTES["float32"])
        return self.copies * tensor.num_bytes(batch_size, float_bytes)


@lru_cache(maxsize=16)
def summing_axes(graph: Graph) -> Mapping[int, tuple[Axis, ...]]:
    """By parameter, the axes whose ranks hold copies of it and have gradients of other samples or tokens; else ().

    Their gradients are summed together with those of replicas. The tensor axis is not among them if its ranks have
    parts of the gradients of the same tokens.
    """
    found: dict[int, tuple[Axis, ...]] = {}
    for item in graph.collectives:
        if item.phase == "step" and item.axis != "tensor":
            found[item.tensor] = tuple(sorted({*found.get(item.tensor, ()), item.axis}))
    return found
