"""Which sum of a wave does a merge wait for that lies in another section, or another repetition of the body?

The prologue has P waves, the body one. A merge waits for the sum of D waves before its own, which is the i-th of the
section that stands at place x: x = r for repetition r of the body (i = 0), x = n for the epilogue behind n of them.
For i < D that sum is

    x + i >= D    the sum of the body, D - i repetitions before
    x + i < D     the sum of wave P + x + i - D of the prologue, which is x + 1 repetitions before

For each of these cases there is a late wait (`spec.program`). For i >= D the sum lies in the same section.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.program.schedules.endless import BODY, PROLOGUE
from meshwright.spec.instructions import Opcode
from meshwright.spec.program import Program

Ids = NDArray[np.int64]


class LateWaits(NamedTuple):
    """Who waits for whom, and how many repetitions before: ids of the program with the body once, shape (n,)."""

    waiting: Ids
    awaited: Ids
    lag: NDArray[np.int32]


def find_late_waits(program: Program, part: NDArray[np.int8], staleness: int) -> LateWaits:
    """The late waits of a program with the body once; ``part`` says in which section each instruction lies."""
    whole, found = program.body, [np.zeros((0, 3), np.int64)]
    compute: Ids = np.zeros(0, np.int64)
    for number, stream in enumerate(program.streams if staleness else ()):
        ids = np.array(whole.stream_range(number), np.int64)
        if stream.name == "compute":
            compute = ids
        elif stream.name == "exchange":
            merges = compute[(whole.opcode[compute] == Opcode.MERGE) & (part[compute] > PROLOGUE)]
            sums = ids.reshape(-1, int((part[ids] == BODY).sum()))
            found += _of_rank(merges, sums, int((part[sums[:, 0]] == PROLOGUE).sum()), staleness)
    waiting, awaited, lag = np.concatenate(found).T
    return LateWaits(waiting, awaited, lag.astype(np.int32))


def _of_rank(merges: Ids, sums: Ids, num_prologue: int, staleness: int) -> Iterator[Ids]:
    """Rows (waiting, awaited, lag) for the merges of body and epilogue; ``sums`` has shape (waves, buckets)."""
    for merge, i in zip(merges.tolist(), [0, *range(staleness)], strict=False):
        cases = [(num_prologue, staleness - i)] if i < staleness else []
        cases += [(num_prologue + place + i - staleness, place + 1) for place in range(staleness - i)]
        for wave, lag in cases:
            yield np.array([(merge, awaited, lag) for awaited in sums[wave].tolist()], np.int64)
