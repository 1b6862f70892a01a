"""Activation offload: values that are copied to host memory until their backward (`find_away`), and their memory.

Each layer of a stage is a unit; layers whose boundary is inside a recomputed range form one unit. When the forward of a
unit ends, the values that it saved for its backward are copied to the host ("down"). The last unit is not offloaded,
because the backward starts with it.

    offloaded   values that autograd saved (`Op.saved`); for a recomputed range, the values that it reads and keeps
                (`Graph.keeps`); always whole storages
    stays       parameters and buffers; inputs of the stage, and received and sent values, which are on the device until
                the backward anyway; storages of less than `LEAST_BYTES`

    forward     a unit starts when the copies of the unit two before it have ended; the same holds for the end of the
                stage's forward. A storage that the next unit saves, too, is copied once; a storage that a later unit
                saves is copied again
    backward    the values of a unit are copied back ("up") during the backward of the following unit that has offloaded
                values; the first of them when the stage's backward starts

So the values of at most two units, besides the last unit, are on the device. Values that two consecutive units saved
are copied back for the later unit, whose backward comes first.
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
    """One or more layers of a stage whose saved values are offloaded together.

    ``layer``: index of the first layer. ``start:stop``: the ops. ``down_bytes``, ``up_bytes``: bytes copied to the host
    after the unit's forward, and back before its backward, per microbatch.
    """

    layer: int
    start: int
    stop: int
    down_bytes: int
    up_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AwayValue:
    """A storage that is copied to the host after unit ``down`` and back for the backward of unit ``up``.

    ``last``: the op whose backward is the last to read the storage.
    """

    storage: int
    down: int
    up: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Away:
    """The activation offload of a stage: its units and offloaded values.

    ``needed``: storages that the last unit saves, too, with the first of its ops that saves them.
    """

    units: tuple[AwayUnit, ...]
    values: tuple[AwayValue, ...]
    needed: dict[int, int] = field(hash=False)

    @property
    def leaving(self) -> list[int]:
        """Numbers of the units that copy values to the host, ascending."""
        return [number for number, unit in enumerate(self.units) if unit.down_bytes]

    @property
    def coming(self) -> list[int]:
        """Numbers of the units whose values are copied back, in the order of the backward (descending)."""
        return [number for number in reversed(range(len(self.units))) if self.units[number].up_bytes]

    @property
    def num_bytes(self) -> int:
        """Bytes of one microbatch's values in host memory."""
        return sum(unit.down_bytes for unit in self.units)


@lru_cache(maxsize=256)
def find_away(graph: Graph, stage: StageSlice, batch_size: int, float_bytes: int | None, device: Backend) -> Away:
    """Return the activation offload of a stage for microbatches of ``batch_size`` samples.

    ``graph``: a result of `as_kept`. ``float_bytes``: bytes of a floating-point element, None under autocast.
    ``device``: "cpu" or "cuda"; library workspaces depend on it and are offloaded, too.
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
    """Return the offload of a stage, as a follower of its memory blocks; without ``leaves``, nothing is offloaded.

    ``lives``: lifetimes of the stage's values. ``sizes``: bytes of each storage.
    """
    away = Away(units=(), values=(), needed={})
    if leaves and workload.kind == "training":
        away = find_away(graph, stage, batch_size, workload.float_bytes, device)
    return AwayBlocks(away, lives, sizes, stage.ops)


class AwayBlocks:
    """The memory blocks of one stage's offloaded values: methods free and allocate them as the copies end and start.

    Arguments ``values``: blocks of the values on the device by storage; ``ledger``: the ledger of allocations.
    """

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
        """Start a microbatch's forward and return the storages that stay on the device after their last use.

        Later calls remove storages from this set when they have been copied to the host.
        """
        self._kept = set(self._lives.kept)
        return self._kept

    def forward(self, op: int, values: dict[int, int], ledger: Ledger) -> None:
        """If a unit starts with this op, free the values of earlier units whose copies have ended."""
        if op in self._begins:
            self._leave(self._begins[op], op, values, ledger)

    def end_forward(self, values: dict[int, int], ledger: Ledger) -> None:
        """Free the values whose copies end with the stage's forward."""
        self._leave(self._end, 1 << 62, values, ledger)

    def begin_backward(self, ledger: Ledger) -> None:
        """Start the backward of a microbatch: allocate the first values that are copied back."""
        self._take(self._first_up, ledger)

    def backward(self, op: int, ledger: Ledger) -> None:
        """Allocate the values whose copies back to the device start before the backward of this op."""
        if op in self._comes:
            self._take(self._comes[op], ledger)

    def hand_back(self, start: int, stop: int, values: dict[int, int]) -> None:
        """Add the offloaded kept results of the recomputed range ``start:stop`` to ``values``."""
        for op in (op for op in self._lives.results if start <= op < stop):
            for key in [key for key in self._there if key[0] in self._lives.results[op] and key[0] not in values]:
                values[key[0]] = self._there.pop(key)

    def release(self, op: int, values: dict[int, int], ledger: Ledger) -> None:
        """Free the values whose last reader was the backward of this op."""
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
