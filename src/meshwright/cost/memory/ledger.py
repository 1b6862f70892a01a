"""Allocations and frees in the course of a step, as one list of events, and its peak.

- in use after event e: Σ bytes of the events up to e, frees negative
- peak: its maximum, with the bytes by part (`meshwright.spec.memory`) at that moment
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.spec.memory import MEMORY_PARTS

if TYPE_CHECKING:
    from collections.abc import Mapping


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
