"""What the ranks of a mesh axis exchange while they compute an op of their local graph."""

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
    """What the ranks of ``axis`` exchange when they come to op ``at`` of their local graph.

    In the forward pass it is (part of) what that op does, and ends before the op's output is there; in the backward
    pass likewise with the gradients of the op's inputs. The backward runs ops in descending order. Collectives of one
    op and phase run in the order in which they are listed. In phase "step" the gradient of parameter ``tensor``, which
    op ``at`` is the first to read, is summed once before the optimizer.

    Its size is that of the **full** tensor in the group (what an all-gather yields, what a reduce-scatter takes in,
    what all ranks together hand to an all-to-all): ``copies`` times tensor ``tensor`` of the local graph. A "send" is
    one to the next rank of the axis while another comes from the one before, ``count`` times one after the other.
    """

    kind: CollectiveKind
    axis: Axis
    phase: Literal["forward", "backward", "step"]
    at: int
    tensor: int
    copies: int = 1
    count: int = 1

    def num_bytes(self, graph: Graph, batch_size: int, float_bytes: int | None = None) -> int:
        """Bytes of the full tensor, of one of ``count`` (``float_bytes``: see `Tensor.num_bytes`)."""
        tensor = graph.tensors[self.tensor]
        if graph.ops[self.at].kind == _LOSS and tensor.dtype in FLOAT_DTYPES:
            # Sums of exponentials are never in half precision.
            float_bytes = max(float_bytes or DTYPE_BYTES[tensor.dtype], DTYPE_BYTES["float32"])
        return self.copies * tensor.num_bytes(batch_size, float_bytes)


@lru_cache(maxsize=16)
def summing_axes(graph: Graph) -> Mapping[int, tuple[Axis, ...]]:
    """By parameter, the axes whose ranks hold it alike and have gradients of other samples or tokens; none: ().

    Their gradients are summed together with those of replicas; not so where ranks of the tensor axis have parts of the
    same tokens' gradients.
    """
    found: dict[int, tuple[Axis, ...]] = {}
    for item in graph.collectives:
        if item.phase == "step" and item.axis != "tensor":
            found[item.tensor] = tuple(sorted({*found.get(item.tensor, ()), item.axis}))
    return found
