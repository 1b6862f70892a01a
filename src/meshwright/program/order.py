"""The order of one rank's computations, and the position of each in the user's own file."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.program.schedules import OrderColumns
from meshwright.spec.instructions import Backward, BackwardInput, BackwardWeight, Computation, Forward, Opcode
from meshwright.spec.own_code import order_file, split_reference
from meshwright.spec.plan import Plan

KINDS: dict[int, type[Computation]] = {
    Opcode.FORWARD: Forward,
    Opcode.BACKWARD: Backward,
    Opcode.BACKWARD_INPUT: BackwardInput,
    Opcode.BACKWARD_WEIGHT: BackwardWeight,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The computations of one rank, in order.

    ``lines`` are the lines of the user's file where each is (empty for named schedules), ``places`` the number of the
    action in its line of a file of orders, from 1.
    """

    rank: int
    columns: OrderColumns
    lines: tuple[int, ...] = ()
    places: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.columns)

    def item(self, place: int) -> Computation:
        """Return the typed view of one computation."""
        columns = self.columns
        kind = KINDS[int(columns.opcode[place])]
        return kind(stage=int(columns.stage[place]), microbatch=int(columns.microbatch[place]))

    @property
    def items(self) -> tuple[Computation, ...]:
        """All computations, typed."""
        return tuple(self.item(place) for place in range(len(self)))

    def where(self, plan: Plan, place: int) -> str:
        """Return the position of an item in the user's file, for messages; '' for named schedules."""
        if not self.lines or not self.lines[place]:
            return ""
        parts = split_reference(plan.schedule)
        path = parts[0] if parts else order_file(plan.schedule)
        action = f", action {self.places[place]}" if self.places else ""
        return f" ({path}:{self.lines[place]}{action})"
