"""Find instructions of equal cost with compiled loops, so that `program_estimate` estimates each cost only once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.compiled import compiled
from meshwright.spec import Opcode
from meshwright.spec.instructions import UPDATES

Ids = NDArray[np.int64]

# Position of a backward among those of its stage before an update; a single one is both, one in the middle neither.
FIRST, LAST = 1, 2
_BACKWARD, _WEIGHT, _STEP = int(Opcode.BACKWARD), int(Opcode.BACKWARD_WEIGHT), int(Opcode.OPTIMIZER_STEP)
# Odd, with its bits well spread: 2^64 over the golden ratio, halved (Knuth, The Art of Computer Programming 3, 6.4).
_SPREAD = 0x4F1BBCDCBFA53E0B


def find_distinct(keys: Ids) -> tuple[Ids, Ids]:
    """Give equal columns of ``keys``, shape (rows, n), the same number, from 0 in order of first appearance.

    Returns the number of each column, shape (n,), and the index of the first column with each number.
    """
    size = 1024
    number, first = np.empty(keys.shape[1], np.int64), np.empty(0, np.int64)
    while (count := _number(keys, np.full(size, -1, np.int64), number, first := np.empty(size // 2, np.int64))) < 0:
        size *= 4
    return number, first[:count]


@compiled
def _number(keys: Ids, table: Ids, number: Ids, first: Ids) -> int:
    """Fill in ``number`` and ``first`` and return the count; -1 if it exceeds half of the table."""
    count, rows = 0, keys.shape[0]
    for i in range(keys.shape[1]):
        hashed = np.int64(0)
        for row in range(rows):
            hashed = (hashed ^ keys[row, i]) * np.int64(_SPREAD)
            hashed ^= hashed >> 29
        place = hashed & (len(table) - 1)
        while table[place] >= 0:
            known, row = first[table[place]], 0
            while row < rows and keys[row, known] == keys[row, i]:
                row += 1
            if row == rows:
                break
            place = (place + 1) & (len(table) - 1)
        if table[place] < 0:
            if count == len(first):
                return -1
            table[place], first[count] = count, i
            count += 1
        number[i] = table[place]
    return count


@compiled
def mark_backwards(stream_offsets: Ids, opcode: NDArray[np.int8], stage: NDArray[np.int32], num_stages: int) -> Ids:
    """Return, by instruction, FIRST or LAST (or both, added) for a stage's first or last backward before an update.

    All other instructions get 0. A backward in two parts is marked at its part for weights. A rank with several stages
    updates them together, after all their backwards.
    """
    place, latest = np.zeros(len(opcode), np.int64), np.full(num_stages, -1, np.int64)
    for stream in range(len(stream_offsets) - 1):
        begin = stream_offsets[stream]
        for i in range(begin, stream_offsets[stream + 1] + 1):
            if i == stream_offsets[stream + 1] or opcode[i] == _STEP:
                # Close the backwards since the last update; streams without backwards have nothing to close.
                for k in range(begin, i):
                    if (opcode[k] == _BACKWARD or opcode[k] == _WEIGHT) and latest[stage[k]] == k:
                        place[k] |= LAST
                        latest[stage[k]] = -1
                begin = i + 1
            elif opcode[i] == _BACKWARD or opcode[i] == _WEIGHT:
                if latest[stage[i]] < 0:
                    place[i] |= FIRST
                latest[stage[i]] = i
    return place


def first_updates(stream_offsets: Ids, opcode: NDArray[np.int8]) -> Ids:
    """Return the indices of the updates that do not directly follow another update in their stream."""
    updates = np.isin(opcode, UPDATES)
    follows = np.append(False, updates[:-1])
    begins = stream_offsets[:-1]
    follows[begins[begins < len(follows)]] = False
    return np.flatnonzero(updates & ~follows)
