"""Units of sharded parameters: gathered for the ops that read them, and scattered as gradients.

As in torch's FSDP2 (torch/distributed/fsdp/_fully_shard): a unit is gathered before its first op and resharded after
its last one; during the backward of a unit or the root, the next unit in that order is prefetched. On GPUs the host
prefetches in forwards, too. When the backward of a unit is done, its gradients are copied into the input of the
reduce-scatter, which exists until the next unit's is made, and a rank keeps its part of the sums. The root's
parameters are gathered all the time, its gradients whole until the end of the backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from meshwright.spec.memory import GRADIENTS, PARAMETERS, WORKSPACE

if TYPE_CHECKING:
    from meshwright.cost.memory.kept import Backend
    from meshwright.cost.memory.ledger import Ledger


class SharedUnit(NamedTuple):
    """A unit of sharded parameters, which ops from ``first`` to ``last`` read.

    ``gathered_bytes``: of all its parameters when gathered. ``scattered_bytes``: of their gradients, in the type in
    which they are reduced. ``own_bytes``: bytes that a rank keeps of the sums.
    """

    first: int
    last: int
    parameters: tuple[int, ...]
    gathered_bytes: int
    scattered_bytes: int
    own_bytes: int


class SharedUnits(NamedTuple):
    """FSDP units of a stage in the order of their ops; the root unit has the parameters outside all of them.

    ``stay_gathered``: units are never resharded (ZeRO 2).
    """

    root: SharedUnit
    units: tuple[SharedUnit, ...]
    stay_gathered: bool

    @property
    def likeness(self) -> tuple[object, ...]:
        """A key, equal for stages that differ only in names of ops and parameters (`memory_likeness`)."""
        sizes = ((unit.gathered_bytes, unit.scattered_bytes, unit.own_bytes) for unit in (self.root, *self.units))
        return (self.stay_gathered, *sizes)


NOTHING_SHARED = SharedUnits(root=SharedUnit(0, 0, (), 0, 0, 0), units=(), stay_gathered=True)


class UnitMemory:
    """The allocations and frees of sharded units; `StageWalk` calls its methods when ops start and end."""

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
        """Gather the unit whose first op this is; on CUDA also the following unit (prefetch)."""
        place = self._by_first.get(op)
        if place is not None:
            self._gather(place)
            if self._device == "cuda":
                self._gather(place + 1)

    def after_forward(self, op: int) -> None:
        """Free the gathered parameters of the unit whose last op this is."""
        self._let_go(self._by_last.get(op))

    def begin_backward(self) -> None:
        """Gather the last unit."""
        self._gather(len(self._shared.units) - 1)

    def before_backward(self, op: int) -> None:
        """Gather the unit whose last op this is, and the unit before it (prefetch)."""
        place = self._by_last.get(op)
        if place is not None:
            self._gather(place)
            self._gather(place - 1)

    def unit_done(self, op: int) -> SharedUnit | None:
        """Return the unit whose backward ends with that of an op, and free its gathered parameters."""
        place = self._by_first.get(op)
        self._let_go(place)
        return None if place is None else self._shared.units[place]

    @property
    def root(self) -> SharedUnit:
        """The unit of all other parameters."""
        return self._shared.root

    def copy_in(self, unit: SharedUnit) -> None:
        """Allocate the input of a reduce-scatter; free that of the unit before."""
        self._drop_input()
        if unit.scattered_bytes:
            self._scattered = self._ledger.take(unit.scattered_bytes, WORKSPACE)

    def scatter(self, unit: SharedUnit) -> None:
        """Add a rank's part of the sums to its part of this step."""
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
        """Free the gradients at the end of a step (set_to_none)."""
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
