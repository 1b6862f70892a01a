"""Sharding: how the ops of a stage are split over the ranks of its mesh axes; layouts are named as in DTensor.

    tensor    products by columns, then by rows; heads of attention; the vocabulary (Shoeybi et al., Megatron-LM, 2019)
    context   the tokens of every sequence; attention exchanges keys and values (Liu et al., Ring Attention, 2023)
    expert    the experts; tokens are sent to them and back (Lepikhin et al., GShard, 2020). With placements also
              embedding tables: by rows, whose sums are scattered, or by columns (Naumov et al., DLRM, 2019)

One replica of a stage is a team of tensor · context · expert neighbouring ranks, in this order. The ranks of the expert
axis have samples of their own, as replicas do (other software counts them as data-parallel: tensor · context · expert ·
replicas devices are tensor · context · data devices with data = expert · replicas); they belong to one team because
they wait for each other in every exchange of tokens. The data-parallel axis, over which gradients of replicas are
summed, is not an axis here.

A `Layout` says how one tensor lies on one axis: `Shard`, `Replicate` or `Partial`. The collectives between the ranks of
an axis are `spec.exchange.Collective`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast, get_args

from meshwright.spec.errors import PlanError
from meshwright.spec.exchange import Axis
from meshwright.spec.graph import Extent

AXES: tuple[Axis, ...] = get_args(Axis)
ONE = Extent(1)
ContextMethod = Literal["ring", "all_gather"]


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank holds an equal slice of dim ``dim``, in the order of the ranks.

    If ``parts`` is not 1, the dim is first cut into this number of equal parts, and each rank holds a slice of every
    part (DTensor's ``_StridedShard``). Examples: the columns of a product that computes queries, keys and values at
    once; a dim in which samples and tokens are flattened.
    """

    dim: int
    parts: Extent = ONE


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank holds the whole tensor."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds a tensor of full size; the value is the sum over the ranks."""


Layout = Shard | Replicate | Partial


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPlacement:
    """A user's choice of how ops are split: those whose name or module matches ``op`` (``*``, ``?`` as in file names).

    On ``axis``, these ops are split along dim ``output_dim`` of their first output, or along dim ``input_dim`` of their
    first input, over which they sum. If neither is given, they are not split.
    """

    op: str
    axis: Axis = "tensor"
    output_dim: int | None = None
    input_dim: int | None = None

    def __post_init__(self) -> None:
        if self.output_dim is not None and self.input_dim is not None:
            raise PlanError(
                f"The placement of {self.op!r} gives output_dim {self.output_dim} and input_dim {self.input_dim}; "
                "expected at most one of them (neither keeps the ops whole). Leave one out."
            )


_PLACEMENT = re.compile(r"(?P<op>.+)=(?P<axis>\w+)(:(?P<side>input|output)(?P<dim>-?\d+))?")


def read_placement(text: str) -> OpPlacement:
    """Parse a user's placement: ``embeddings.*=expert:output1``, or ``head=tensor`` for ops that are not split.

    Raises PlanError for any other text.
    """
    found = _PLACEMENT.fullmatch(text)
    if found is None or found["axis"] not in AXES:
        raise PlanError(
            f"The placement {text!r} was given; expected OP=AXIS:inputN or OP=AXIS:outputN, or OP=AXIS for ops that "
            f"are not split. OP is the name of an op or module, AXIS one of {', '.join(AXES)}, and N the dim of its "
            "first input or output, as in 'embeddings.*=expert:output1'."
        )
    dims = {f"{found['side']}_dim": int(found["dim"])} if found["side"] else {}
    return OpPlacement(op=found["op"], axis=cast("Axis", found["axis"]), **dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Sizes of the mesh axes of a plan's stages, and how ops are split over them; size 1: not split.

    ``sequence_parallel``: between the split matrix products, tokens are split over the tensor axis (Korthikanti et al.,
    MLSys 2023). ``regather``: the gathered input of such a product is not kept but gathered again in the backward, as
    in Megatron-LM; torch keeps the gathered input. ``context_method``: keys and values are passed round the ranks of
    the context axis ("ring"), or gathered. ``placements``: a user's choices, which override the rules; if several match
    an op, the last one counts.
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
                raise PlanError(f"The {axis} axis has size {self.size(axis)}; expected at least 1 (1: not split).")
        if self.sequence_parallel and self.tensor == 1:
            raise PlanError(
                "Sequence parallelism splits tokens over the tensor axis, which has size 1; expected tensor > 1. "
                "Give the axis a size, or leave out sequence_parallel."
            )
        if self.regather and not self.sequence_parallel:
            raise PlanError(
                "regather = true was given, but sequence_parallel is false; regather applies to inputs that sequence "
                "parallelism splits. Give both, or neither."
            )
        for placement in self.placements:
            if self.size(placement.axis) == 1:
                raise PlanError(
                    f"A placement of {placement.op!r} is given for the {placement.axis} axis, which has size 1; "
                    "expected a size above 1. Give the axis a size, or leave the placement out."
                )

    @property
    def width(self) -> int:
        """Number of devices of one replica of a stage: the product of the axis sizes."""
        return self.tensor * self.context * self.expert

    @property
    def is_whole(self) -> bool:
        """Whether no op is split: all axes have size 1."""
        return self.tensor == self.context == self.expert == 1

    def describe(self) -> str:
        """Return words for people: ``tensor 8 with sequence parallelism, context 2``; empty if nothing is split."""
        sizes = [f"{axis} {self.size(axis)}" for axis in AXES if self.size(axis) > 1]
        if self.sequence_parallel:
            sizes[0] += " with sequence parallelism"
        return ", ".join(sizes)

    def describe_teams(self) -> str:
        """Return a sentence about the devices that each rank of a plan stands for; empty if it is one device."""
        if self.width == 1:
            return ""
        own = ", each expert rank with samples of its own" if self.expert > 1 else ""
        return f"Every rank stands for {self.width} devices side by side, which split each op: {self.describe()}{own}."

    def stride(self, axis: Axis) -> int:
        """Return the distance between neighbours on an axis, in devices of a team."""
        return {"tensor": 1, "context": self.tensor, "expert": self.tensor * self.context}[axis]

    def size(self, axis: Axis) -> int:
        """Return the size of a mesh axis."""
        return {"tensor": self.tensor, "context": self.context, "expert": self.expert}[axis]


UNSHARDED = Sharding()
