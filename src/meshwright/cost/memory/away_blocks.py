"""Allocations of a walk through a stage whose activations are in host memory until the backward (`away`)."""

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
    """Return the stage's blocks that move to the host and back, if it ``leaves``. ``sizes``: bytes by storage."""
    away = Away(units=(), values=(), needed={})
    if leaves and workload.kind == "training":
        away = find_away(graph, stage, batch_size, workload.float_bytes, device)
    return AwayBlocks(away, lives, sizes, stage.ops)


class AwayBlocks:
    """Blocks of one stage's values that move to the host and back."""

    def __init__(self, away: Away, lives: Lifetimes, sizes: Sequence[int], ops: tuple[int, ...]) -> None:
        self._lives, self._sizes = lives, sizes
        self._kept: set[int] = set()
        # By unit, values that have left the device when it starts; by op, where units start forward and backward.
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
        # A unit's backward starts at its last op: what comes up then is for the next unit with offloaded values.
        coming = away.coming
        self._first_up = coming[0] if coming else -1
        own = sorted(ops)
        self._comes = {max(op for op in own if op < away.units[unit].stop): after for unit, after in pairwise(coming)}
        self._last_use = {storage: op for op, storages in lives.last_used.items() for storage in storages}
        self._there: dict[tuple[int, int], int] = {}

    def begin_forward(self) -> Set[int]:
        """Start a microbatch; return the values that outlive its ops, which shrink during the forward."""
        self._kept = set(self._lives.kept)
        return self._kept

    def forward(self, op: int, values: dict[int, int], ledger: Ledger) -> None:
        """Before an op: if a unit starts with it, copies of earlier ones have ended."""
        if op in self._begins:
            self._leave(self._begins[op], op, values, ledger)

    def end_forward(self, values: dict[int, int], ledger: Ledger) -> None:
        """All ops were computed, and all copies have ended."""
        self._leave(self._end, 1 << 62, values, ledger)

    def begin_backward(self, ledger: Ledger) -> None:
        """Start the backward of a microbatch, and with it the first copies up."""
        self._take(self._first_up, ledger)

    def backward(self, op: int, ledger: Ledger) -> None:
        """Before the backward of an op."""
        if op in self._comes:
            self._take(self._comes[op], ledger)

    def hand_back(self, start: int, stop: int, values: dict[int, int]) -> None:
        """Pass the kept results of a range to its recomputation."""
        for op in (op for op in self._lives.results if start <= op < stop):
            for key in [key for key in self._there if key[0] in self._lives.results[op] and key[0] not in values]:
                values[key[0]] = self._there.pop(key)

    def release(self, op: int, values: dict[int, int], ledger: Ledger) -> None:
        """Free values whose last reader was the backward of an op."""
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
