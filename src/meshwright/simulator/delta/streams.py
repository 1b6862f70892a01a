"""What moves when instructions change their place? Streams into which they are put and out of which they are taken.

The model is that of `durations`, for streams without marks, collectives and joins: an instruction ends when it has
taken its time after the one before it in its stream and all that it waits for. A change is a set of rows (`rewire`); it
is carried to what needs it, and can be taken back. No links are shared: what a transfer takes is its duration.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.simulator.delta.carry import SWEEP, carry, empty_log, take_back
from meshwright.simulator.delta.check import check_rows
from meshwright.simulator.delta.graph import NOWHERE, STREAM, empty_graph
from meshwright.simulator.delta.rewire import StreamRows, read_rows, rewire
from meshwright.simulator.waiters import Ids, Times
from meshwright.spec import ProgramError


class _Change(NamedTuple):
    """How to take a change back: the rows of before with their ends, and ``noted`` entries of the log."""

    rows: StreamRows
    end_ps: Times
    noted: int


class DeltaStreams:
    """Instructions in ``num_streams`` streams; ``end_ps`` are always those of a full simulation of them.

    An instruction is any number from 0 on; ``end_ps`` is -1 for those that are not there.
    """

    def __init__(self, num_streams: int) -> None:
        self._num_streams, self._next_wait, self._log = num_streams, 0, empty_log(0)
        self._resize(0, 0)
        self._last: _Change | None = None

    @property
    def end_ps(self) -> Times:
        """When each instruction ends, in ps: what stands there now, to be read only."""
        seen = self._graph.end_ps[: self._room]
        seen.setflags(write=False)
        return seen

    @property
    def is_there(self) -> NDArray[np.bool_]:
        """Whether each instruction is in a stream."""
        return self._graph.node[: self._room, STREAM] >= 0

    def change(self, rows: StreamRows) -> None:
        """Make instructions what the rows say, and simulate what moves.

        The waits of a row are for instructions that are there afterwards, with smaller keys; a stream is in the order
        of its keys, no two of which are equal. Raises ProgramError, and changes nothing, where that is not so; then the
        change before can still be taken back.
        """
        check_rows(rows, self._num_streams, self._room)
        self._make_room(rows)
        before = read_rows(self._graph, rows.instruction)
        ends = self._graph.end_ps[rows.instruction]
        touched, wrong = self._rewire(rows)
        if wrong >= 0:
            self._put_back(before, ends)
            raise ProgramError(
                f"Instruction {wrong} would wait for one that is not there, or that does not come before it, or have "
                "the key of another one of its stream. Change all that belong together at once."
            )
        limit = int(SWEEP * self._graph.used.sum())
        noted = carry(self._graph, touched, limit, True, self._log)
        self._last = _Change(before, ends, noted)

    def undo(self) -> None:
        """Take the last change back. Raises ProgramError if there is none that was not taken back yet."""
        if self._last is None:
            raise ProgramError("No change is left to take back: only the last one can be, once.")
        rows, ends, noted = self._last
        # A change that was refused may have packed the waits anew.
        self._make_room(rows)
        take_back(self._graph, self._log, noted)
        self._put_back(rows, ends)
        self._last = None

    def rows(self) -> StreamRows:
        """All that are there, stream by stream, each in its order."""
        there = np.flatnonzero(self.is_there)
        stream, key = self._graph.node[there, STREAM], self._graph.key[there]
        return read_rows(self._graph, there[np.lexsort((key, stream))])

    def _rewire(self, rows: StreamRows) -> tuple[Ids, int]:
        touched, self._next_wait, wrong = rewire(self._graph, rows, self._num_streams, self._next_wait)
        return touched, wrong

    def _put_back(self, rows: StreamRows, end_ps: Times) -> None:
        self._rewire(rows)
        self._graph.end_ps[rows.instruction] = end_ps

    def _make_room(self, rows: StreamRows) -> None:
        """Room for the instructions, and for the waits of the rows and of what they replace."""
        room, waits = 1 + int(rows.instruction.max(initial=NOWHERE)), self._next_wait + len(rows.waits)
        if room > self._room or waits > len(self._graph.waits):
            kept, ends = (self.rows(), self.end_ps) if self._room else (None, None)
            self._resize(max(room, self._room), 2 * ((len(kept.waits) if kept else 0) + len(rows.waits)) + 64)
            if kept is not None and ends is not None:
                self._put_back(kept, ends[kept.instruction])

    def _resize(self, room: int, num_waits: int) -> None:
        """Start with nothing but the log of the last change; half as much room again, so that growing is rare."""
        room += room // 2
        graph, log = empty_graph(room, self._num_streams, num_waits), empty_log(room)
        graph.end_ps[:room] = NOWHERE
        kept = len(self._log.instruction)
        log.instruction[:kept], log.end_ps[:kept], log.request_ps[:kept] = self._log
        self._room, self._next_wait, self._graph, self._log = room, 0, graph, log
