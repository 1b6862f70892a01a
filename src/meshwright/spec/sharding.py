"""Sharding: how the ops of a stage are split over the ranks of its mesh axes, in the words of DTensor.

    tensor    products by columns, then by rows; heads of attention; the vocabulary (Shoeybi et al., Megatron-LM, 2019)
    context   the tokens of every sequence; attention exchanges keys and values (Liu et al., Ring Attention, 2023)
    expert    the experts; their tokens travel to them and back (Lepikhin et al., GShard, 2020)

One replica of a stage is tensor · context ranks. Experts are laid out over ranks that hold different data: ``expert``
divides the number of replicas times context, and no rank is added for it. What sums gradients of replicas ("data") is
no axis here.

A `Layout` says how one tensor lies on one axis. `Collective` is what the ranks of an axis exchange at one op.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from meshwright.spec.errors import PlanError
from meshwright.spec.graph import Extent

if TYPE_CHECKING:
    from meshwright.spec.graph import Graph, Phase

Axis = Literal["tensor", "context", "expert"]
AXES: tuple[Axis, ...] = get_args(Axis)
ONE = Extent(1)
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
ContextMethod = Literal["ring", "all_gather"]


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank has a part of dim ``dim``, in the order of the ranks.

    ``parts`` other than 1: the dim is cut into so many equal parts first, and each rank has its share of every part, as
    the columns of a product that makes queries, keys and values at once, or tokens beside the samples in one dim
    (DTensor's ``_StridedShard``).
    """

    dim: int
    parts: Extent = ONE


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank has the whole tensor."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank has a tensor of full size; the value is their sum."""


Layout = Shard | Replicate | Partial


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPlacement:
    """A choice of one's own for the ops whose name or module matches ``op`` (``*`` and ``?`` as in file names).

    On ``axis`` they are split along dim ``output_dim`` of their first output, or along dim ``input_dim`` of their first
    input, which is summed over; whole if neither is given.
    """

    op: str
    axis: Axis = "tensor"
    output_dim: int | None = None
    input_dim: int | None = None

    def __post_init__(self) -> None:
        if self.output_dim is not None and self.input_dim is not None:
            raise PlanError(
                f"The placement of {self.op!r} gives output_dim {self.output_dim} and input_dim {self.input_dim}; "
                "expected one of them, or none for whole ops. Leave one out."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Sizes of the mesh axes of a plan's stages, and what they split.

    ``sequence_parallel``: between the split products, tokens are split over the tensor axis (Korthikanti et al., MLSys
    2023). ``regather``: what such a product reads is kept split and gathered again in the backward, as Megatron-LM
    does; torch keeps it whole. ``context_method``: keys and values travel round the ranks, or are gathered.
    ``placements``: choices that go before the rules; of several that match an op, the last one counts.
    """

    tensor: int = 1
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = False
    regather: bool = False
    context_method: ContextMethod = "ring"
    placements: tuple[OpPlacement, ...] = ()

    def __post_init__(self) -> None:
        for axis in AXES:
            if self.size(axis) < 1:
                raise PlanError(
                    f"The {axis} axis has size {self.size(axis)}; expected at least 1. Give 1 to not split."
                )
        if self.sequence_parallel and self.tensor == 1:
            raise PlanError(
                "Sequence parallelism splits tokens over the tensor axis, which has size 1; expected tensor > 1. "
                "Give the axis a size, or leave out sequence_parallel."
            )
        if self.regather and not self.sequence_parallel:
            raise PlanError(
                "regather = true gathers again what sequence parallelism split, but sequence_parallel is false. "
                "Give both, or neither."
            )
        for placement in self.placements:
            if self.size(placement.axis) == 1:
                raise PlanError(
                    f"A placement of {placement.op!r} is given for the {placement.axis} axis, which has size 1; "
                    "expected a size above 1. Give the axis a size, or leave the placement out."
                )

    @property
    def width(self) -> int:
        """Ranks of one replica of a stage."""
        return self.tensor * self.context

    @property
    def is_whole(self) -> bool:
        """Whether nothing is split."""
        return self.tensor == self.context == self.expert == 1

    def size(self, axis: Axis) -> int:
        """The size of an axis."""
        return {"tensor": self.tensor, "context": self.context, "expert": self.expert}[axis]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """What the ranks of ``axis`` exchange when they come to op ``at`` of their local graph.

    In the forward pass it is (part of) what that op does, and ends before the op's output is there; in the backward
    pass likewise with the gradients of the op's inputs. The backward runs ops in descending order. Collectives of one
    op and phase run in the order in which they are listed.

    Its size is that of the **full** tensor in the group (what an all-gather yields, what a reduce-scatter takes in,
    what all ranks together hand to an all-to-all): ``copies`` times tensor ``tensor`` of the local graph. A "send" is
    one to the next rank of the axis while another comes from the one before, ``count`` times one after the other.
    """

    kind: CollectiveKind
    axis: Axis
    phase: Phase
    at: int
    tensor: int
    copies: int = 1
    count: int = 1

    def num_bytes(self, graph: Graph, batch_size: int, float_bytes: int | None = None) -> int:
        """Bytes of the full tensor, of one of ``count`` (``float_bytes``: see `Tensor.num_bytes`)."""
        return self.copies * graph.tensors[self.tensor].num_bytes(batch_size, float_bytes)
