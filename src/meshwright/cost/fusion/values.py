"""The values of a compiled unit, each made from others, and those that leave the unit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

Shape = tuple[int, ...]
Device = Literal["cuda", "cpu"]
# The order in which a view reads memory; empty if it is the memory's own order.
Turn = tuple[object, ...]

# The sorts of values, as named in the table of rules; "given" comes from outside.
VIEWS = frozenset({"view", "turned"})
REDUCTIONS = frozenset({"rows", "channels", "groups", "pixels", "all", "to", "reduced"})
EXTERNS = frozenset({"extern", "several", "random", "part"})
# A copy in another order that autograd does not see: the copy is kept instead of the input.
ORDERED = "ordered"
# Tensors of images, which inductor keeps with channels last.
IMAGE_DIMS = 4


@dataclass(slots=True, kw_only=True, eq=False)
class FusedValue:
    """A value: the op and pass that make it (``op`` -1: none), how, from what, and its size.

    ``shape`` has elements of ``width`` bytes; ``ops`` counts the operations per element; ``heavy`` ones are not
    repeated on CPUs.
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
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The number of bytes."""
        return self.elements * self.width


@dataclass(slots=True, kw_only=True, eq=False)
class Written:
    """The values of a unit in order, first ``num_forward`` of the forward, and those that leave each pass."""

    values: list[FusedValue] = field(default_factory=list)
    num_forward: int = 0
    forward_yields: list[int] = field(default_factory=list)
    backward_yields: list[int] = field(default_factory=list)

    def is_late(self) -> list[bool]:
        """Return, for every value, whether it depends on gradients that enter the unit."""
        late: list[bool] = []
        for value in self.values:
            given = value.sort == "given" and value.backward
            late.append(given or any(late[i] for i in value.inputs))
        return late
