"""Make the values of one operator by its rule (``rules.toml``)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from meshwright.cost.fusion.values import REDUCTIONS, VIEWS, FusedValue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.cost.fusion.rules import RuleValue, Steps
    from meshwright.cost.fusion.values import Shape, Turn

# Sums of statistics are float32 whatever the type of their input.
_STATISTICS = frozenset({"rows", "channels", "groups", "all"})
_SINGLE_BYTES = 4
# The number of groups of channels in a group norm (its default in diffusion models).
_GROUPS = 32
# Rules use these sorts for values with the shape of their first input.
_OF_FIRST = frozenset({"scatter", "adding"})


class Maker:
    """A growing list of values, made for one op and pass after the other."""

    def __init__(self) -> None:
        self.values: list[FusedValue] = []
        self.op, self.backward = -1, False
        # Shapes and widths that rules name before a value exists: outputs, and what an op keeps.
        self.shapes: dict[str, tuple[Shape, int]] = {}

    def run(self, steps: Steps, names: dict[str, int]) -> None:
        """Make the values of a rule, adding to ``names``; values whose inputs are missing are skipped."""
        for name, made in steps:
            value = self._make(made, names)
            if value is not None:
                names[name] = value
                if name in self.shapes and self.values[value].op == self.op:
                    self.values[value].width = self.shapes[name][1]

    def _make(self, made: RuleValue, names: dict[str, int]) -> int | None:
        found = [names.get(item) if isinstance(item, str) else self._make(item, names) for item in made.inputs]
        inputs = tuple(value for value in found if value is not None)
        if (not inputs and made.sort != "fill") or (made.like and made.like not in names.keys() | self.shapes.keys()):
            return None
        if made.sort in ("to", "beside") and len(inputs) < len(made.inputs):
            return None
        shape, width = self._sizes(made, inputs, names)
        if made.sort in REDUCTIONS:
            return self.reduce(made.sort, inputs[0], shape, width if made.sort == "reduced" else 0)
        sort = "view" if made.sort in ("beside", "spread") else made.sort
        return self.add(sort, inputs, shape, width, ops=made.ops, heavy=made.heavy)

    def _sizes(self, made: RuleValue, inputs: Sequence[int], names: dict[str, int]) -> tuple[Shape, int]:
        """Return the shape and width of a rule's value."""
        given = [self.values[i] for i in inputs]
        if made.sort == "to":
            return given[1].shape, given[0].width
        if made.sort == "beside":
            return (1, given[0].elements, *(1 for _ in given[1].shape[2:])), given[0].width
        if made.sort in _OF_FIRST:
            return given[0].shape, given[0].width
        shape, width = _broadcast(given)
        if made.sort in REDUCTIONS:
            shape = _summed_to(made.sort, given[0].shape)
        if made.like:
            like = self.values[names[made.like]] if made.like in names else None
            shape, width = (like.shape, like.width) if like is not None else self.shapes[made.like]
        elif made.sort == "view":
            shape = given[0].shape
        return shape, made.num_bytes or width

    def reduce(self, sort: str, value: int, shape: Shape, width: int = 0) -> int:
        """Return a value summed to a shape; the value itself if it has that size already."""
        given = self.values[value]
        if math.prod(shape) == given.elements:
            return value if given.shape == shape else self.add("view", (value,), shape, given.width)
        statistic = max(given.width, _SINGLE_BYTES) if sort in _STATISTICS else given.width
        return self.add(sort, (value,), shape, width or statistic)

    def add(
        self,
        sort: str,
        inputs: tuple[int, ...],
        shape: Shape,
        width: int,
        *,
        ops: int = 1,
        heavy: bool = False,
        turn: Turn = (),
    ) -> int:
        """Add a value of the present op and pass; return its number."""
        value = FusedValue(
            op=self.op,
            backward=self.backward,
            sort=sort,
            inputs=inputs,
            shape=shape,
            width=width,
            ops=ops,
            heavy=heavy,
            turn=turn,
        )
        self.values.append(value)
        return len(self.values) - 1

    def as_wide(self, value: int, width: int) -> int:
        """Return the value in a type of ``width`` bytes: itself, or converted."""
        given = self.values[value]
        return value if given.width == width else self.add("point", (value,), given.shape, width)

    def view(self, value: int, shape: Shape, turn: Turn = ()) -> int:
        """Return a view of a value, in another order if there is a turn."""
        return self.add("turned" if turn else "view", (value,), shape, self.values[value].width, turn=turn)

    def turns_of(self, value: int) -> list[Turn]:
        """Return the turns of a value's views of views; equal neighbours cancel out."""
        chain = [value]
        while self.values[chain[-1]].sort in VIEWS:
            chain.append(self.values[chain[-1]].inputs[0])
        turns: list[Turn] = []
        for index in reversed(chain):
            turn = self.values[index].turn
            if turn and turns and turns[-1] == turn:
                turns.pop()
            elif turn:
                turns.append(turn)
        return turns

    def base(self, value: int) -> int:
        """Return the value that a view is based on."""
        while self.values[value].sort in VIEWS:
            value = self.values[value].inputs[0]
        return value


def _summed_to(sort: str, shape: Shape) -> Shape:
    """Return the shape after a sum of a sort."""
    beside = (1,) * (len(shape) - 2)
    match sort:
        case "rows":
            return (*shape[:-1], 1)
        case "channels":
            return (1, shape[1], *beside)
        case "groups":
            return (shape[0], min(_GROUPS, shape[1]), *beside)
        case "pixels":
            return (*shape[:2], *beside)
        case _:
            return ()


def _broadcast(values: Sequence[FusedValue]) -> tuple[Shape, int]:
    """Return the shape and width of an element-wise result of some values."""
    if not values:
        return (), _SINGLE_BYTES
    rank = max(len(value.shape) for value in values)
    padded = [(1,) * (rank - len(value.shape)) + value.shape for value in values]
    # Among floats, int64 indices do not widen the result.
    widths = [value.width for value in values]
    narrow = [width for width in widths if width <= _SINGLE_BYTES]
    return tuple(max(sizes) for sizes in zip(*padded, strict=True)), max(narrow or widths)
