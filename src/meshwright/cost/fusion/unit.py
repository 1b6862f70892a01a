"""A unit of ops that are compiled together: its kernels, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.cost.fusion.groups import FusedKernel, fuse
from meshwright.cost.fusion.lowering import lower
from meshwright.cost.fusion.partition import kept_values
from meshwright.cost.fusion.values import ORDERED
from meshwright.cost.fusion.written import write_unit

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from meshwright.cost.fusion.values import Device, FusedValue
    from meshwright.cost.widths import Widths
    from meshwright.spec import Graph
    from meshwright.spec.precision import Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedUnit:
    """The kernels of a unit in launch order, forward and backward."""

    forward: tuple[FusedKernel, ...]
    backward: tuple[FusedKernel, ...]


def fuse_unit(
    graph: Graph,
    start: int,
    stop: int,
    batch_size: int,
    numbers: Numbers,
    widths: Widths,
    later: frozenset[int],
    device: Device = "cuda",
) -> FusedUnit:
    """Return the kernels of ops ``start:stop`` compiled together. ``later``: their tensors that other ops read."""
    written = write_unit(graph, start, stop, batch_size, numbers, widths, later, device)
    values, late, leaving = written.values, written.is_late(), written.forward_yields
    kept = kept_values(written) if written.backward_yields else set()
    kept |= {i for i, value in enumerate(values) if value.sort == ORDERED and value.inputs[0] in kept and not late[i]}
    given = {i for i, value in enumerate(values) if value.sort == "given"}
    own = [i for i in sorted(kept - given) if i < written.num_forward or values[i].sort != ORDERED]
    yields = list(dict.fromkeys([*leaving, *own]))
    order = _order(values, yields, given, range(written.num_forward))
    forward = fuse(values, *lower(values, order, given, yields, device, leaving), start, device, backward=False)
    held, yields = given | set(own), list(dict.fromkeys(written.backward_yields))
    order = _order(values, yields, held, [i for i, is_late in enumerate(late) if is_late])
    backward = fuse(values, *lower(values, order, held, yields, device), start, device, backward=True)
    return FusedUnit(forward=forward, backward=backward)


def _order(
    values: Sequence[FusedValue], wanted: Sequence[int], held: Collection[int], first: Sequence[int]
) -> list[int]:
    """Return the values to make for the wanted ones: those of ``first`` in order, each right before it is needed."""
    needed: set[int] = set()
    todo = [i for i in wanted if i not in held]
    while todo:
        index = todo.pop()
        if index not in needed:
            needed.add(index)
            todo += [i for i in values[index].inputs if i not in held]
    found: dict[int, None] = {}
    for index in (*(i for i in first if i in needed), *sorted(needed)):
        todo = [index]
        while todo:
            missing = [i for i in values[todo[-1]].inputs if i in needed and i not in found]
            if missing:
                todo += reversed(missing)
            else:
                found.setdefault(todo.pop())
    return list(found)
