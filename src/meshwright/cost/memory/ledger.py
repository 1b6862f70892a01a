"""Allocations and frees of a step as one list of events (`Ledger`), their peak (`find_peak`), and lifetimes of values.

- in use after event e: Σ bytes of the events up to e, frees negative
- peak: its maximum, with the bytes by part (`meshwright.spec.memory`) at that moment
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.cost.autocast import kept_copies
from meshwright.cost.traits import family_of
from meshwright.spec import Graph, Op, StageSlice, read_from_outside
from meshwright.spec.memory import MEMORY_PARTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


# Indices of the computations in a row of bytes.
FORWARD, BACKWARD_FIRST, BACKWARD_LATER, STEP = range(4)
NUM_MOMENTS = 4


# The formula holds for one stage and for all. With at most k of n microbatches in flight, each keeping a, gradients g
# that accumulate outside of buckets, and `Phase.most` of each computation,
#
#     forward                (k - 1)·a + F        + g if a backward came before it (n > k)
#     first of n backwards   k·a + B
#     a later one            k·a + g + B          k - 1 if all are in flight at once (n = k)
#     optimizer              g + O
#
# the largest of them is in use in addition to static memory. Transfers in flight are added separately.
@compiled
def fullest(
    most: NDArray[np.float64], each: float, gradients: float, num_in_flight: int, num_microbatches: int
) -> float:
    """Return the bytes at the peak of a step of one stage; ``most`` (4,): the memory that each computation adds."""
    goes_on = num_microbatches > num_in_flight
    peak = max(
        (num_in_flight - 1) * each + most[FORWARD] + (gradients if goes_on else 0.0),
        num_in_flight * each + most[BACKWARD_FIRST],
        gradients + most[STEP],
    )
    if num_microbatches > 1:
        held = num_in_flight if goes_on else num_in_flight - 1
        peak = max(peak, held * each + gradients + most[BACKWARD_LATER])
    return float(peak)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """Lifetimes of the storages of a graph.

    ``kept`` outlive the forward; ``sent`` are those of them that are kept only because they are sent or yielded.
    ``last_used[op]`` are those whose last reader (their maker, if they have no reader) is the op, ``released[op]``
    those that no backward after that of the op reads; ``released_again[op]`` likewise, for recomputed values.
    ``starts[stop]`` is the start of the range of ops that ends before ``stop``, ``recomputed`` are all ops of such
    ranges, ``results`` kept storages among them by the op that makes them.
    """

    kept: frozenset[int]
    sent: frozenset[int]
    last_used: Mapping[int, Sequence[int]]
    released: Mapping[int, Sequence[int]]
    released_again: Mapping[int, Sequence[int]]
    starts: Mapping[int, int]
    recomputed: frozenset[int]
    results: Mapping[int, frozenset[int]]


def find_lifetimes(graph: Graph, stage: StageSlice, *, trains: bool = True) -> Lifetimes:
    """Return lifetimes in a stage: until the last use of a value, or until the backward that reads it.

    Sent values are kept; received ones stay until their backward is done. A recomputed range of ops keeps what it reads
    from outside, and the results of ops that are kept. Nothing is saved unless it ``trains``.
    """
    mine = set(stage.ops)
    ranges = [item for item in graph.recompute if item[0] in mine]
    tensors = graph.tensors
    range_of = {op: start for start, stop in ranges for op in range(start, stop)}
    makers = _makers(graph) if ranges else {}
    last_use: dict[int, int] = {}
    needed: dict[int, int] = {}
    needed_again: dict[int, int] = {}
    received = {tensors[i].storage for channel in stage.incoming for i in channel.tensors}
    kept = {tensors[i].storage for channel in stage.outgoing for i in channel.tensors}
    kept |= {tensors[i].storage for i in stage.outputs} | received
    sent = kept - received
    for index in stage.ops:
        op = graph.ops[index]
        last_use.update((tensors[i].storage, index) for i in (*op.outputs, *op.inputs))
        for storage in {tensors[i].storage for i in op.saved} if trains else ():
            is_again = index in range_of and range_of.get(makers.get(storage, -1)) == range_of[index]
            (needed_again if is_again else needed).setdefault(storage, index)
            if index not in range_of:
                kept.add(storage)
    for start, stop in ranges:
        for storage in read_from_outside(graph, start, stop):
            needed[storage] = min(needed.get(storage, start), start)
            kept.add(storage)
    results = {op: kept_results(graph, op) for op in graph.keeps if op in range_of}
    for index, storages in results.items():
        for storage in storages:
            # A recomputation takes them; all are gone when the backward of the range's first op ends.
            needed[storage] = min(needed.get(storage, range_of[index]), range_of[index])
            kept.add(storage)
    return Lifetimes(
        kept=frozenset(kept),
        sent=frozenset(sent.difference(needed)),
        last_used=_by_op(last_use),
        released=_by_op({storage: op for storage, op in needed.items() if storage not in received}),
        released_again=_by_op(needed_again),
        starts={stop: start for start, stop in ranges},
        recomputed=frozenset(range_of),
        results=results,
    )


def kept_results(graph: Graph, op: int) -> frozenset[int]:
    """Return the storages that are kept with an op's result: its outputs, and what its kernel makes for its backward.

    Copies of inputs, cast or in another layout, are made again.
    """
    item = graph.ops[op]
    made = [i for i in item.saved if graph.tensors[i].role == "saved"] if _makes_statistics(item) else []
    copies = kept_copies(graph, item)
    found = [*item.outputs, *(i for i in made if i not in copies)]
    return frozenset(i for i in found if graph.tensors[i].storage == i)


def _makes_statistics(op: Op) -> bool:
    """Return whether an op makes values for its backward; products and convolutions only copy inputs."""
    return family_of(op) not in ("product", "convolution")


def _makers(graph: Graph) -> dict[int, int]:
    """Return the op that first writes each storage."""
    makers: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        for i in (*op.outputs, *op.saved):
            if graph.tensors[i].role in ("activation", "saved"):
                makers.setdefault(graph.tensors[i].storage, index)
    return makers


def _by_op(ops: dict[int, int]) -> dict[int, list[int]]:
    storages: dict[int, list[int]] = defaultdict(list)
    for storage, op in ops.items():
        storages[op].append(storage)
    return dict(storages)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryEvents:
    """Events in order: ``block`` (E,) is the number of the block, ``num_bytes`` (E,) is negative if it is freed.

    ``part`` (E,) indexes `MEMORY_PARTS`; ``moment`` (E,) indexes ``moments``, the names of computations.
    """

    block: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    part: NDArray[np.int64]
    moment: NDArray[np.int64]
    moments: tuple[str, ...]

    def in_use(self) -> NDArray[np.int64]:
        """Return the bytes in use after each event, shape (E,)."""
        return np.cumsum(self.num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The largest number of bytes in use, their parts, and the moment."""

    num_bytes: int
    parts: dict[str, int]
    moment: str

    @property
    def owner(self) -> str:
        """The largest part."""
        return max(self.parts, key=self.parts.__getitem__)


def find_peak(events: MemoryEvents) -> Peak:
    """Return the first moment at which the most bytes are in use."""
    in_use = events.in_use()
    at = int(in_use.argmax())
    sums = np.zeros(len(MEMORY_PARTS), np.int64)
    np.add.at(sums, events.part[: at + 1], events.num_bytes[: at + 1])
    return Peak(
        num_bytes=int(in_use[at]),
        parts=dict(zip(MEMORY_PARTS, sums.tolist(), strict=True)),
        moment=events.moments[int(events.moment[at])],
    )


class LedgerStretch(NamedTuple):
    """Events ``start:stop`` of a ledger; they allocate the blocks ``first:last``.

    ``live`` are those of the blocks that are in use at the end, as (block, (bytes, part)). ``others`` are blocks that
    were allocated before the stretch and are freed in it.
    """

    start: int
    stop: int
    first: int
    last: int
    live: tuple[tuple[int, tuple[int, int]], ...]
    others: tuple[int, ...]


class Ledger:
    """Writes events: `take` returns the number of a block, which `free` accepts."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, int]] = []
        self._live: dict[int, tuple[int, int]] = {}
        self._count = 0
        self._moments: list[str] = ["start"]

    @property
    def num_events(self) -> int:
        """The number of events written so far."""
        return len(self._rows)

    def begin(self, moment: str) -> None:
        """Name the computation that follows."""
        self._moments.append(moment)

    def take(self, num_bytes: int, part: int) -> int:
        """Allocate a block; return its number."""
        block, self._count = self._count, self._count + 1
        self._live[block] = (num_bytes, part)
        self._note(block, num_bytes, part)
        return block

    def free(self, block: int) -> None:
        """Free a block."""
        num_bytes, part = self._live.pop(block)
        self._note(block, -num_bytes, part)

    def mark(self) -> tuple[int, int]:
        """Return the start of a stretch: the numbers of events and of blocks so far."""
        return len(self._rows), self._count

    def since(self, mark: tuple[int, int]) -> LedgerStretch:
        """Return the events since a mark."""
        start, first = mark
        live = tuple((block, self._live[block]) for block in range(first, self._count) if block in self._live)
        others = tuple(row[0] for row in self._rows[start:] if row[0] < first)
        return LedgerStretch(start, len(self._rows), first, self._count, live, others)

    def repeat(self, stretch: LedgerStretch, instead: Mapping[int, int] | None = None) -> int:
        """Write a stretch again, with new blocks; return the increase of their numbers.

        ``instead`` has, for each earlier block that the stretch frees, the block that is freed this time.
        """
        shift, found = self._count - stretch.first, instead or {}
        self._rows += [
            (block + shift if block >= stretch.first else found[block], num_bytes, part, moment)
            for block, num_bytes, part, moment in self._rows[stretch.start : stretch.stop]
        ]
        for block in stretch.others:
            del self._live[found[block]]
        for block, what in stretch.live:
            self._live[block + shift] = what
        self._count += stretch.last - stretch.first
        return shift

    def events(self) -> MemoryEvents:
        """Return all written events."""
        columns = np.array(self._rows, np.int64).reshape(-1, 4).T
        return MemoryEvents(
            block=columns[0],
            num_bytes=columns[1],
            part=columns[2],
            moment=columns[3],
            moments=tuple(self._moments),
        )

    def _note(self, block: int, num_bytes: int, part: int) -> None:
        self._rows.append((block, num_bytes, part, len(self._moments) - 1))
