"""Memory of FSDP units: sharded parameters that are gathered for the ops that read them.

As in torch's FSDP2 (torch/distributed/fsdp/_fully_shard), a unit is gathered before its first op and resharded after
its last op. During the backward of a unit or of the root, the unit whose backward comes next is prefetched. On GPUs the
host prefetches in forwards, too. When the backward of a unit is done, its gradients are copied into the input of the
reduce-scatter. This input exists until that of the next unit is made. A rank keeps its shard of the summed gradients.
The parameters of the root are always gathered, and its gradients are whole until the end of the backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from meshwright.spec.memory import GRADIENTS, PARAMETERS, WORKSPACE

if TYPE_CHECKING:
    from meshwright.cost.memory.kept import Backend
    from meshwright.cost.memory.ledger import Ledger


class SharedUnit(NamedTuple):
    """One FSDP unit: sharded parameters that the ops from ``first`` to ``last`` read.

    ``gathered_bytes``: bytes of all parameters when gathered. ``scattered_bytes``: bytes of their gradients, in the
    type in which they are reduced. ``own_bytes``: bytes of a rank's shard of the summed gradients.
    """

    first: int
    last: int
    parameters: tuple[int, ...]
    gathered_bytes: int
    scattered_bytes: int
    own_bytes: int


class SharedUnits(NamedTuple):
    """The FSDP units of a stage in the order of their ops; ``root`` has the parameters that no other unit contains.

    ``stay_gathered``: whether the parameters of units are never resharded (ZeRO 2).
    """

    root: SharedUnit
    units: tuple[SharedUnit, ...]
    stay_gathered: bool

    @property
    def likeness(self) -> tuple[object, ...]:
        """A key that is equal for stages which differ only in the names of ops and parameters (`memory_likeness`)."""
        sizes = ((unit.gathered_bytes, unit.scattered_bytes, unit.own_bytes) for unit in (self.root, *self.units))
        return (self.stay_gathered, *sizes)


NOTHING_SHARED = SharedUnits(root=SharedUnit(0, 0, (), 0, 0, 0), units=(), stay_gathered=True)


class UnitMemory:
    """The allocations and frees of FSDP units; `StageWalk` calls the methods when ops start and end."""

    def __init__(self, shared: SharedUnits, ledger: Ledger, device: Backend) -> None:
        self._shared, self._ledger, self._device = shared, ledger, device
        self.parameters = frozenset(i for unit in (shared.root, *shared.units) for i in unit.parameters)
        self._by_first = {unit.first: place for place, unit in enumerate(shared.units)}
        self._by_last = {unit.last: place for place, unit in enumerate(shared.units)}
        self._gathered: dict[int, int] = {}
        self._scattered: int | None = None
        # Blocks of a rank's part of a step's sums, by the parameters of the unit.
        self.own: dict[tuple[int, ...], int] = {}

    def before_forward(self, op: int) -> None:
        """Gather the unit that starts with this op; on CUDA devices gather the next unit, too (prefetch)."""
        place = self._by_first.get(op)
        if place is not None:
            self._gather(place)
            if self._device == "cuda":
                self._gather(place + 1)

    def after_forward(self, op: int) -> None:
        """Free the gathered parameters of the unit that ends with this op."""
        self._let_go(self._by_last.get(op))

    def begin_backward(self) -> None:
        """Gather the last unit, whose backward comes first."""
        self._gather(len(self._shared.units) - 1)

    def before_backward(self, op: int) -> None:
        """Gather the unit that ends with this op, and the unit before it (prefetch)."""
        place = self._by_last.get(op)
        if place is not None:
            self._gather(place)
            self._gather(place - 1)

    def unit_done(self, op: int) -> SharedUnit | None:
        """Free the gathered parameters of the unit whose backward ends with that of this op.

        Returns the unit, or None if no unit ends here.
        """
        place = self._by_first.get(op)
        self._let_go(place)
        return None if place is None else self._shared.units[place]

    @property
    def root(self) -> SharedUnit:
        """The root unit: the parameters that no other unit contains."""
        return self._shared.root

    def copy_in(self, unit: SharedUnit) -> None:
        """Allocate the input of a unit's reduce-scatter, and free that of the previous unit."""
        self._drop_input()
        if unit.scattered_bytes:
            self._scattered = self._ledger.take(unit.scattered_bytes, WORKSPACE)

    def scatter(self, unit: SharedUnit) -> None:
        """Run a unit's reduce-scatter: allocate the rank's shard of the gradients, or add to it in later backwards."""
        if not unit.scattered_bytes:
            return
        if unit.own_bytes and unit.parameters not in self.own:
            self.own[unit.parameters] = self._ledger.take(unit.own_bytes, GRADIENTS)
        elif unit.own_bytes:
            self._ledger.free(self._ledger.take(unit.own_bytes, WORKSPACE))

    def end_backward(self) -> None:
        """Free the input of the last reduce-scatter."""
        self._drop_input()

    def end_step(self) -> None:
        """Free the shards of the gradients at the end of a step (set_to_none)."""
        for block in self.own.values():
            self._ledger.free(block)
        self.own.clear()

    def _gather(self, place: int) -> None:
        if 0 <= place < len(self._shared.units) and place not in self._gathered and not self._shared.stay_gathered:
            self._gathered[place] = self._ledger.take(self._shared.units[place].gathered_bytes, PARAMETERS)

    def _let_go(self, place: int | None) -> None:
        if place is not None and place in self._gathered:
            self._ledger.free(self._gathered.pop(place))

    def _drop_input(self) -> None:
        if self._scattered is not None:
            self._ledger.free(self._scattered)
            self._scattered = None
