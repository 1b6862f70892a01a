"""Allocations and frees of a step as one list of events (`Ledger`), their peak (`find_peak`), and lifetimes of values.

- bytes in use after event e: Σ bytes of the events up to e, frees negative
- peak: the maximum of the bytes in use, with the bytes of each part (`meshwright.spec.memory`) at that moment
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
    """Return the bytes at the peak of a step of one stage, in addition to its static memory.

    ``most``, shape (4,): bytes that each computation adds at its own peak (forward, first backward, later backward,
    optimizer step). ``each``: bytes that a microbatch in flight keeps. ``gradients``: bytes of accumulated gradients.
    """
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

    ``kept``: storages that live after the forward; ``sent``: those that live only because they are sent or are outputs.
    ``last_used[op]``: storages whose last reader in the forward is the op (without a reader, the op that makes them).
    ``released[op]``: storages that are freed after the backward of the op, which is the last to read them;
    ``released_again[op]``: the same for recomputed storages. ``starts[stop]``: start of the recomputed range
    ``start:stop``. ``recomputed``: all ops of such ranges. ``results[op]``: storages made in such ranges that are kept.
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
    """Return the lifetimes of a stage's storages: until their last use, or until the backward that reads them.

    Sent values are kept; received values live until the stage's backward is done. A recomputed range of ops keeps the
    values that it reads from outside, and the results named by `Graph.keeps`. Without ``trains``, nothing is saved.
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
    """Return the storages kept with an op's result: its outputs, and values that its kernel makes for its backward.

    Copies of inputs, cast or in another layout, are not kept: the recomputation makes them.
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
    """Allocations and frees in order, in arrays of shape (events,).

    ``block``: number of the memory block. ``num_bytes``: its bytes, negative if it is freed. ``part``: index in
    `MEMORY_PARTS`. ``moment``: index in ``moments``, the names of the computations, such as "forward of linear".
    """

    block: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    part: NDArray[np.int64]
    moment: NDArray[np.int64]
    moments: tuple[str, ...]

    def in_use(self) -> NDArray[np.int64]:
        """Return the bytes in use after each event, shape (events,)."""
        return np.cumsum(self.num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The largest number of bytes in use, the bytes of each part, and the name of the computation at that moment."""

    num_bytes: int
    parts: dict[str, int]
    moment: str

    @property
    def owner(self) -> str:
        """Name of the part with the most bytes."""
        return max(self.parts, key=self.parts.__getitem__)


def find_peak(events: MemoryEvents) -> Peak:
    """Return the peak: the first moment at which the most bytes are in use."""
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
    """The events ``start:stop`` of a ledger, which allocate the blocks ``first:last``.

    ``live``: the blocks that are in use at the end, as (block, (bytes, part)). ``others``: blocks that were allocated
    before these events and are freed by them.
    """

    start: int
    stop: int
    first: int
    last: int
    live: tuple[tuple[int, tuple[int, int]], ...]
    others: tuple[int, ...]


class Ledger:
    """A recorder of memory events: `take` allocates a block and returns its number, `free` frees it."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, int]] = []
        self._live: dict[int, tuple[int, int]] = {}
        self._count = 0
        self._moments: list[str] = ["start"]

    @property
    def num_events(self) -> int:
        """Number of events recorded so far."""
        return len(self._rows)

    def begin(self, moment: str) -> None:
        """Start a computation; ``moment`` names it in the events that follow."""
        self._moments.append(moment)

    def take(self, num_bytes: int, part: int) -> int:
        """Allocate a block and return its number; ``part``: index in `MEMORY_PARTS`."""
        block, self._count = self._count, self._count + 1
        self._live[block] = (num_bytes, part)
        self._note(block, num_bytes, part)
        return block

    def free(self, block: int) -> None:
        """Free the block with this number."""
        num_bytes, part = self._live.pop(block)
        self._note(block, -num_bytes, part)

    def mark(self) -> tuple[int, int]:
        """Return a mark for `since`: the numbers of events and of blocks so far."""
        return len(self._rows), self._count

    def since(self, mark: tuple[int, int]) -> LedgerStretch:
        """Return the events recorded since a mark."""
        start, first = mark
        live = tuple((block, self._live[block]) for block in range(first, self._count) if block in self._live)
        others = tuple(row[0] for row in self._rows[start:] if row[0] < first)
        return LedgerStretch(start, len(self._rows), first, self._count, live, others)

    def repeat(self, stretch: LedgerStretch, instead: Mapping[int, int] | None = None) -> int:
        """Record the events of a stretch once more, with new blocks; return the increase of the blocks' numbers.

        ``instead``: for each of ``stretch.others``, the block that is freed this time.
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
        """Return all recorded events."""
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
