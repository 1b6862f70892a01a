"""What a walk through a stage frees and takes where activations go to the host until the backward (`away`)."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

from meshwright.cost.memory.away import Away, find_away
from meshwright.spec.memory import SAVED

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from meshwright.cost.memory.away import AwayValue
    from meshwright.cost.memory.backward import Backend
    from meshwright.cost.memory.ledger import Ledger
    from meshwright.cost.memory.lifetimes import Lifetimes
    from meshwright.spec import Graph, StageSlice, Workload


def follow_away(
    graph: Graph,
    stage: StageSlice,
    batch_size: int,
    workload: Workload,
    lives: Lifetimes,
    sizes: Sequence[int],
    device: Backend,
    *,
    leaves: bool,
) -> AwayBlocks:
    """The blocks of a stage that go and come; none unless something ``leaves``. ``sizes`` in bytes by storage."""
    away = Away(units=(), values=(), needed={})
    if leaves and workload.kind == "training":
        away = find_away(graph, stage, batch_size, workload.float_bytes, device)
    return AwayBlocks(away, lives, sizes, stage.ops)


class AwayBlocks:
    """Blocks of one stage's values that go and come."""

    def __init__(self, away: Away, lives: Lifetimes, sizes: Sequence[int], ops: tuple[int, ...]) -> None:
        self._lives, self._sizes = lives, sizes
        self._kept: set[int] = set()
        # By unit, what has left the device when it begins; by op, where units begin forward and backward.
        self._gone: defaultdict[int, list[int]] = defaultdict(list)
        self._up: defaultdict[int, list[AwayValue]] = defaultdict(list)
        self._last: defaultdict[int, list[AwayValue]] = defaultdict(list)
        self._needed: defaultdict[int, list[int]] = defaultdict(list)
        final = {value.storage: value for value in away.values}
        for value in away.values:
            self._up[value.up].append(value)
            self._last[value.last].append(value)
            if value is final[value.storage] and value.storage not in away.needed:
                self._gone[value.down + 2].append(value.storage)
        for storage in final:
            if storage in away.needed:
                self._needed[away.needed[storage]].append(storage)
        starts = [min(ops, default=0), *(unit.start for unit in away.units[1:])]
        self._begins = {start: number for number, start in enumerate(starts)}
        self._end = len(away.units)
        # A unit goes back from its last op on: what comes up then is for the next unit that anything comes for.
        coming = away.coming
        self._first_up = coming[0] if coming else -1
        own = sorted(ops)
        self._comes = {max(op for op in own if op < away.units[unit].stop): after for unit, after in pairwise(coming)}
        self._last_use = {storage: op for op, storages in lives.last_used.items() for storage in storages}
        self._there: dict[tuple[int, int], int] = {}

    def begin_forward(self) -> Set[int]:
        """A microbatch begins; what outlives its ops, less in the course of it."""
        self._kept = set(self._lives.kept)
        return self._kept

    def forward(self, op: int, values: dict[int, int], ledger: Ledger) -> None:
        """An op is next: where a unit begins with it, copies of earlier ones have ended."""
        if op in self._begins:
            self._leave(self._begins[op], op, values, ledger)

    def end_forward(self, values: dict[int, int], ledger: Ledger) -> None:
        """All ops were computed, and all copies have ended."""
        self._leave(self._end, 1 << 62, values, ledger)

    def begin_backward(self, ledger: Ledger) -> None:
        """The backward of a microbatch begins, and with it the first copies up."""
        self._take(self._first_up, ledger)

    def backward(self, op: int, ledger: Ledger) -> None:
        """The backward of an op is next."""
        if op in self._comes:
            self._take(self._comes[op], ledger)

    def hand_back(self, start: int, stop: int, values: dict[int, int]) -> None:
        """A range runs again, and takes the results that it kept."""
        for op in (op for op in self._lives.results if start <= op < stop):
            for key in [key for key in self._there if key[0] in self._lives.results[op] and key[0] not in values]:
                values[key[0]] = self._there.pop(key)

    def release(self, op: int, values: dict[int, int], ledger: Ledger) -> None:
        """The backward of an op was the last to read some values."""
        for value in self._last.get(op, ()):
            if (value.storage, value.down) in self._there:
                ledger.free(self._there.pop((value.storage, value.down)))
        for storage in self._needed.get(op, ()):
            if storage in values:
                ledger.free(values.pop(storage))

    def _leave(self, unit: int, op: int, values: dict[int, int], ledger: Ledger) -> None:
        for storage in self._gone.get(unit, ()):
            self._kept.discard(storage)
            if self._last_use.get(storage, -1) < op and storage in values:
                ledger.free(values.pop(storage))

    def _take(self, unit: int, ledger: Ledger) -> None:
        for value in self._up.get(unit, ()):
            self._there[value.storage, value.down] = ledger.take(self._sizes[value.storage], SAVED)
