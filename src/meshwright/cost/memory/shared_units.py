"""Units of parameters that replicas share: gathered for the ops that read them, and scattered as gradients.

As torch's FSDP2 has it (torch/distributed/fsdp/_fully_shard): a unit is gathered before its first op and let go after
its last one; while a unit or the root computes its backward, the unit behind it in that order is gathered ahead. On
GPUs the host runs ahead in forwards, too. When the backward of a unit is done, its gradients are copied into the input
of the reduce-scatter, which is there until the next unit's is made, and a rank keeps its part of the sums. The root's
parameters are gathered all the time, its gradients whole until the end of the backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from meshwright.spec.memory import GRADIENTS, PARAMETERS, WORKSPACE

if TYPE_CHECKING:
    from meshwright.cost.memory.backward import Backend
    from meshwright.cost.memory.ledger import Ledger


class SharedUnit(NamedTuple):
    """Ops from ``first`` to ``last`` read some parameters: bytes of all when gathered, and of their gradients.

    ``scattered_bytes``: in the type in which gradients are summed. ``own_bytes``: what a rank keeps of the sums.
    """

    first: int
    last: int
    parameters: tuple[int, ...]
    gathered_bytes: int
    scattered_bytes: int
    own_bytes: int


class SharedUnits(NamedTuple):
    """The root, and the units in the order of their ops. ``stay_gathered``: units are let go at no time (ZeRO 2)."""

    root: SharedUnit
    units: tuple[SharedUnit, ...]
    stay_gathered: bool

    @property
    def likeness(self) -> tuple[object, ...]:
        """Equal for stages that are alike but for the names of their ops and parameters (`alike`)."""
        sizes = ((unit.gathered_bytes, unit.scattered_bytes, unit.own_bytes) for unit in (self.root, *self.units))
        return (self.stay_gathered, *sizes)


NOTHING_SHARED = SharedUnits(root=SharedUnit(0, 0, (), 0, 0, 0), units=(), stay_gathered=True)


class UnitMemory:
    """What a walk takes and frees for units; `StageWalk` says when ops begin and end."""

    def __init__(self, shared: SharedUnits, ledger: Ledger, device: Backend) -> None:
        self._shared, self._ledger, self._device = shared, ledger, device
        self.parameters = frozenset(i for unit in (shared.root, *shared.units) for i in unit.parameters)
        self._by_first = {unit.first: place for place, unit in enumerate(shared.units)}
        self._by_last = {unit.last: place for place, unit in enumerate(shared.units)}
        self._gathered: dict[int, int] = {}
        self._scattered: int | None = None
        # Blocks of what a rank has of the sums of a step, by the parameters of the unit.
        self.own: dict[tuple[int, ...], int] = {}

    def before_forward(self, op: int) -> None:
        """An op is about to compute."""
        place = self._by_first.get(op)
        if place is not None:
            self._gather(place)
            if self._device == "cuda":
                self._gather(place + 1)

    def after_forward(self, op: int) -> None:
        """An op has computed."""
        self._let_go(self._by_last.get(op))

    def begin_backward(self) -> None:
        """The backward of the root begins."""
        self._gather(len(self._shared.units) - 1)

    def before_backward(self, op: int) -> None:
        """The backward of an op is about to compute."""
        place = self._by_last.get(op)
        if place is not None:
            self._gather(place)
            self._gather(place - 1)

    def unit_done(self, op: int) -> SharedUnit | None:
        """The unit whose backward ends with that of an op."""
        place = self._by_first.get(op)
        self._let_go(place)
        return None if place is None else self._shared.units[place]

    @property
    def root(self) -> SharedUnit:
        """The unit of all other parameters."""
        return self._shared.root

    def copy_in(self, unit: SharedUnit) -> None:
        """The input of a reduce-scatter is made; that of the unit before goes."""
        self._drop_input()
        if unit.scattered_bytes:
            self._scattered = self._ledger.take(unit.scattered_bytes, WORKSPACE)

    def scatter(self, unit: SharedUnit) -> None:
        """A rank gets its part of the sums, and adds it to what it has of this step."""
        if not unit.scattered_bytes:
            return
        if unit.own_bytes and unit.parameters not in self.own:
            self.own[unit.parameters] = self._ledger.take(unit.own_bytes, GRADIENTS)
        elif unit.own_bytes:
            self._ledger.free(self._ledger.take(unit.own_bytes, WORKSPACE))

    def end_backward(self) -> None:
        """Nothing is under way."""
        self._drop_input()

    def end_step(self) -> None:
        """Gradients are set to none."""
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
