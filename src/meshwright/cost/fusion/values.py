"""What a compiled unit is written out in: values, each made from others, and what leaves the unit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

Shape = tuple[int, ...]
Device = Literal["cuda", "cpu"]
# How a view looks at memory that is not in its order; empty where it is.
Turn = tuple[object, ...]

# The sorts of values, as the table of rules names them; "given" is what comes from outside.
VIEWS = frozenset({"view", "turned"})
REDUCTIONS = frozenset({"rows", "channels", "groups", "pixels", "all", "to", "reduced"})
EXTERNS = frozenset({"extern", "several", "random", "part"})
# A copy in another order that autograd does not see: what is kept of its input is the copy.
ORDERED = "ordered"
# Tensors of images, which inductor keeps with channels last.
IMAGE_DIMS = 4


@dataclass(slots=True, kw_only=True, eq=False)
class FusedValue:
    """A value: the op and pass that make it (``op`` -1: none), how, from what, and how large it is.

    ``shape`` in elements of ``width`` bytes; ``ops`` counts the operations of an element, of which ``heavy`` ones are
    not done twice on processors.
    """

    op: int
    backward: bool
    sort: str
    inputs: tuple[int, ...]
    shape: Shape
    width: int
    ops: int = 1
    heavy: bool = False
    turn: Turn = ()
    parameter: bool = False

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes."""
        return self.elements * self.width


@dataclass(slots=True, kw_only=True, eq=False)
class Written:
    """The values of a unit in order, first ``num_forward`` of the forward, and what leaves each pass."""

    values: list[FusedValue] = field(default_factory=list)
    num_forward: int = 0
    forward_yields: list[int] = field(default_factory=list)
    backward_yields: list[int] = field(default_factory=list)

    def is_late(self) -> list[bool]:
        """Of every value whether it is made from gradients that come into the unit."""
        late: list[bool] = []
        for value in self.values:
            given = value.sort == "given" and value.backward
            late.append(given or any(late[i] for i in value.inputs))
        return late
