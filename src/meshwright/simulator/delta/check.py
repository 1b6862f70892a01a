"""Can rows be what instructions become? Asked before any is written: compiled code does not look where it writes."""

from __future__ import annotations

import numpy as np

from meshwright.simulator.delta.graph import NOWHERE
from meshwright.simulator.delta.rewire import StreamRows
from meshwright.spec import ProgramError

# Instructions and waits are numbered in 32 bits.
_MOST = np.iinfo(np.int32).max


def check_rows(rows: StreamRows, num_streams: int, room: int) -> None:
    """Raise ProgramError for rows that are no rows of so many streams; there is room for instructions below ``room``.

    Whether what they wait for is there then, and comes before them, is found when they are written.
    """
    _check_columns(rows)
    if not len(rows.instruction):
        return
    ids, waits, last = rows.instruction, rows.waits, max(room - 1, int(rows.instruction.max()))
    if ids.min() < 0 or last >= _MOST:
        raise ProgramError(
            f"Instructions {ids.min()} to {ids.max()} were given; expected numbers from 0 to {_MOST - 1}."
        )
    ordered = np.sort(ids)
    again = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(again):
        raise ProgramError(f"Instruction {ordered[again[0]]} was given twice; give each once, as it is to be.")
    wrong = np.flatnonzero((rows.stream < NOWHERE) | (rows.stream >= num_streams))
    if len(wrong):
        raise ProgramError(
            f"Instruction {ids[wrong[0]]} was put into stream {rows.stream[wrong[0]]}; expected 0 to "
            f"{num_streams - 1}, or -1 to take it out."
        )
    wrong = np.flatnonzero(rows.duration_ps < 0)
    if len(wrong):
        raise ProgramError(
            f"Instruction {ids[wrong[0]]} was to take {rows.duration_ps[wrong[0]]} ps; expected 0 or more."
        )
    if len(waits) and (waits.min() < 0 or waits.max() > last):
        number = waits.min() if waits.min() < 0 else waits.max()
        raise ProgramError(
            f"An instruction waits for instruction {number}, which is not there. Change all that belong together at "
            "once."
        )


def _check_columns(rows: StreamRows) -> None:
    """All are whole numbers, one for each instruction, and the waits lie between their offsets."""
    for name in rows._fields:
        column = getattr(rows, name)
        if column.ndim != 1 or column.dtype.kind != "i":
            raise ProgramError(f"Column {name!r} of rows is {column.dtype} {column.shape}; expected (k,) integers.")
    count, offsets = len(rows.instruction), rows.wait_offsets
    lengths = [len(column) for column in (rows.stream, rows.key, rows.duration_ps)]
    if lengths != [count] * 3 or len(offsets) != count + 1:
        raise ProgramError(
            f"{count} instructions have {lengths[0]} streams, {lengths[1]} keys, {lengths[2]} durations and "
            f"{len(offsets)} offsets of waits; expected one of each for each, and one offset more."
        )
    if offsets[0] != 0 or offsets[-1] != len(rows.waits) or (offsets[1:] < offsets[:-1]).any():
        raise ProgramError(
            f"Offsets of waits go from {offsets[0]} to {offsets[-1]}; expected them to rise from 0 to the number of "
            f"waits, {len(rows.waits)}."
        )
