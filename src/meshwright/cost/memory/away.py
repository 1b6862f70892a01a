"""Activation offload: which values go to host memory until their backward (`find_away`); their blocks (`AwayBlocks`).

A stage's layers are units, in order; layers with a boundary inside a recomputed range are one unit. Everything that a
unit keeps, except the last one, with which the backward starts, is copied down when the unit's forward ends:

    goes     what autograd saved (`Op.saved`); for a recomputed range what it reads, and what it keeps
             (`Graph.keeps`); each storage whole
    stays    parameters and buffers; inputs of the stage, received values and values that leave it, which are on the
             device until the backward anyway; storages of less than `LEAST_BYTES`

    forward     a unit starts, and the stage's forward ends, when the copies of the unit two before have ended. A
                storage that the next unit saves, too, is copied once; one that a later unit saves is copied again
    backward    the values of a unit come up during the backward of the unit behind it (with any values); the first of
                them when the stage's backward starts

so that at most two units, besides the last one, are on the device. Values saved by two consecutive units are needed by
the later one first, and come up for it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

from meshwright.cost.memory.kept import Backend, measure_tensors
from meshwright.cost.memory.ledger import Ledger, Lifetimes, kept_results
from meshwright.spec import Graph, StageSlice, Workload, read_from_outside
from meshwright.spec.memory import SAVED
from meshwright.spec.recompute import kept_within

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence, Set


# As in torchtune (torchtune/training/_activation_offloading.py: min_offload_size): copying smaller values gains
# nothing.
LEAST_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class AwayUnit:
    """Layers of the graph from ``layer`` on with the ops ``start:stop``, and bytes of their copies down and up."""

    layer: int
    start: int
    stop: int
    down_bytes: int
    up_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AwayValue:
    """A storage that is copied down with unit ``down`` and back for unit ``up``; op ``last`` is its last reader."""

    storage: int
    down: int
    up: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Away:
    """The units of a stage and their offloaded values. ``needed``: storages also saved by the last unit, by its op."""

    units: tuple[AwayUnit, ...]
    values: tuple[AwayValue, ...]
    needed: dict[int, int] = field(hash=False)

    @property
    def leaving(self) -> list[int]:
        """The units that copy values down, ascending."""
        return [number for number, unit in enumerate(self.units) if unit.down_bytes]

    @property
    def coming(self) -> list[int]:
        """The units whose activations are copied back, in the order of the backward: descending."""
        return [number for number in reversed(range(len(self.units))) if self.units[number].up_bytes]

    @property
    def num_bytes(self) -> int:
        """Bytes of a microbatch in host memory."""
        return sum(unit.down_bytes for unit in self.units)


@lru_cache(maxsize=256)
def find_away(graph: Graph, stage: StageSlice, batch_size: int, float_bytes: int | None, device: Backend) -> Away:
    """Return the offload of a stage for microbatches of ``batch_size`` samples; the graph is one `as_kept`.

    ``device``: the device type, whose library workspaces are offloaded, too.
    """
    spans = _find_units(graph, stage)
    if not stage.has_backward or graph.mode != "training":
        return Away(units=_weigh((), spans, ()), values=(), needed={})
    sizes, _ = measure_tensors(graph, batch_size, float_bytes, device)
    staying = _staying(graph, stage)
    saves: dict[int, list[tuple[int, int]]] = {}
    for unit, op, storages in _saves(graph, stage, spans):
        for storage in storages - staying:
            if graph.tensors[storage].role in ("activation", "saved") and sizes[storage] >= LEAST_BYTES:
                saves.setdefault(storage, []).append((unit, op))
    values, needed, final = list[AwayValue](), dict[int, int](), len(spans) - 1
    for storage, ops in saves.items():
        runs: list[list[tuple[int, int]]] = []
        for unit, op in ops:
            if unit == final:
                needed.setdefault(storage, op)
            elif runs and unit <= runs[-1][0][0] + 1:
                runs[-1].append((unit, op))
            else:
                runs.append([(unit, op)])
        values += [AwayValue(storage=storage, down=run[0][0], up=run[-1][0], last=run[0][1]) for run in runs]
    return Away(units=_weigh(sizes, spans, values), values=tuple(values), needed=needed)


def _weigh(
    sizes: Sequence[int], spans: Sequence[tuple[int, int, int]], values: Iterable[AwayValue]
) -> tuple[AwayUnit, ...]:
    down, up = [0] * len(spans), [0] * len(spans)
    for value in values:
        down[value.down] += sizes[value.storage]
        up[value.up] += sizes[value.storage]
    return tuple(
        AwayUnit(layer=layer, start=start, stop=stop, down_bytes=down[number], up_bytes=up[number])
        for number, (layer, start, stop) in enumerate(spans)
    )


def _find_units(graph: Graph, stage: StageSlice) -> list[tuple[int, int, int]]:
    """Return first layer, first op and end of each unit of a stage. Ops shared with earlier stages are in the first."""
    own = {op for op in stage.ops if not graph.ops[op].replicable}
    inside = {op for start, stop in graph.recompute for op in range(start + 1, stop)}
    spans: list[tuple[int, int, int]] = []
    for number, layer in enumerate(graph.layers):
        if own.isdisjoint(range(layer.start, layer.stop)):
            continue
        if spans and layer.start in inside:
            spans[-1] = (*spans[-1][:2], layer.stop)
        else:
            spans.append((number, layer.start, layer.stop))
    return spans


def _staying(graph: Graph, stage: StageSlice) -> set[int]:
    """Return storages that are on the device until the backward anyway."""
    brought = {i for channel in stage.incoming for i in channel.tensors} | {*stage.inputs}
    leaving = {i for channel in stage.outgoing for i in channel.tensors} | {*stage.outputs}
    return {graph.tensors[i].storage for i in brought | leaving}


def _saves(
    graph: Graph, stage: StageSlice, spans: Sequence[tuple[int, int, int]]
) -> Iterable[tuple[int, int, set[int]]]:
    """Yield unit, op and storages of the values saved during a forward."""
    again = dict(graph.recompute)
    own, skipped, unit = set(stage.ops), -1, 0
    for op in stage.ops:
        while unit + 1 < len(spans) and op >= spans[unit + 1][1]:
            unit += 1
        if op < skipped:
            continue
        if op in again and own.issuperset(range(op, again[op])):
            skipped = again[op]
            yield unit, op, read_from_outside(graph, op, again[op])
            for keeping in kept_within(graph, op, again[op]):
                yield unit, op, set(kept_results(graph, keeping))
        else:
            yield unit, op, {graph.tensors[i].storage for i in graph.ops[op].saved}


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
        """Start a microbatch's forward.

        Return the set of values that are kept after their last use; values are removed from this set as they leave the
        device.
        """
        self._kept = set(self._lives.kept)
        return self._kept

    def forward(self, op: int, values: dict[int, int], ledger: Ledger) -> None:
        """Free activations of earlier units, whose copies have ended, if a unit starts with this op."""
        if op in self._begins:
            self._leave(self._begins[op], op, values, ledger)

    def end_forward(self, values: dict[int, int], ledger: Ledger) -> None:
        """Free the activations whose copies end with the forward."""
        self._leave(self._end, 1 << 62, values, ledger)

    def begin_backward(self, ledger: Ledger) -> None:
        """Start the backward of a microbatch and the first copies back to the device."""
        self._take(self._first_up, ledger)

    def backward(self, op: int, ledger: Ledger) -> None:
        """Allocate the activations whose copies back start before the backward of this op."""
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
