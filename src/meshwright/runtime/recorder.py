"""Record measured spans, and merge those of all ranks into a Timeline on one clock.

The span of a computation runs from call to return. The span of a communication runs from issue to the moment when a
wait for it returned, so its end is an upper bound. On a GPU, CUDA events in the compute stream take these times, and
nothing waits for the events until the spans are read.

Clocks: rank r requests rank 0's time several times. The reply of the fastest round trip, assigned to the middle of that
trip, gives the offset (Cristian 1989). Its error is at most half of that round trip.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from meshwright.spec import Program, Section, Timeline

_CLOCK_ROUNDS = 20
_PICOSECONDS_PER_NANOSECOND = 1000
_NANOSECONDS_PER_MILLISECOND = 1e6


# A moment: nanoseconds of the host's clock, or an event on a GPU's stream that may not have happened yet.
Moment = int | torch.cuda.Event


class Recorder:
    """Collects the spans of one rank, as (instruction id, step, start, end) in ns of its own clock.

    Records nothing until `start`.
    """

    def __init__(self, device: torch.device) -> None:
        self.active = False
        self._device = device
        self._rows: list[tuple[int, int, Moment, Moment]] = []
        self._origin: tuple[int, torch.cuda.Event] | None = None
        self._first_step = 0
        self._end_step = sys.maxsize

    def start(self, first_step: int = 0) -> None:
        """Drop the recorded spans, and record the spans of ``first_step`` and later steps."""
        self._rows = []
        self._first_step, self._end_step = first_step, sys.maxsize
        if self._device.type == "cuda":
            event = _event()
            event.synchronize()
            self._origin = time.perf_counter_ns(), event
        self.active = True

    def stop(self, end_step: int) -> None:
        """Record no spans of ``end_step`` and later steps; unfinished spans of earlier steps are still recorded."""
        self._end_step = end_step

    def now(self) -> Moment:
        """Return the current moment; on a GPU, when all computations issued so far are done."""
        return _event() if self.active and self._device.type == "cuda" else time.perf_counter_ns()

    def add(self, index: int, step: int, start: Moment, end: Moment) -> None:
        """Record the span of one instruction, if its step is recorded."""
        if self._first_step <= step < self._end_step:
            self._rows.append((index, step, start, end))

    def rows(self) -> np.ndarray:
        """Return the recorded spans, shape (spans, 4): instruction id, step, start and end in ns. Waits for a GPU."""
        if self._origin is not None:
            torch.cuda.synchronize(self._device)
        rows = [(index, step, self._time(start), self._time(end)) for index, step, start, end in self._rows]
        return np.array(rows, np.int64).reshape(-1, 4)

    def _time(self, moment: Moment) -> int:
        if isinstance(moment, int):
            return moment
        assert self._origin is not None, "events are recorded after the first one"
        origin_ns, origin = self._origin
        return origin_ns + round(origin.elapsed_time(moment) * _NANOSECONDS_PER_MILLISECOND)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def measure_clock_offset() -> int:
    """Return the ns to add to this rank's clock to get the clock of rank 0. All ranks call it together."""
    rank, offset = dist.get_rank(), 0
    for other in range(1, dist.get_world_size()):
        if rank == 0:
            _answer_clock(other)
        elif rank == other:
            offset = _ask_clock()
    return offset


def _ask_clock() -> int:
    best: tuple[int, int] | None = None
    answer = torch.zeros(1, dtype=torch.int64)
    for _ in range(_CLOCK_ROUNDS):
        asked = time.perf_counter_ns()
        dist.send(answer, 0)
        dist.recv(answer, 0)
        heard = time.perf_counter_ns()
        trip = heard - asked
        if best is None or trip < best[0]:
            best = (trip, int(answer.item()) - (asked + heard) // 2)
    assert best is not None
    return best[1]


def _answer_clock(other: int) -> None:
    message = torch.zeros(1, dtype=torch.int64)
    for _ in range(_CLOCK_ROUNDS):
        dist.recv(message, other)
        message[0] = time.perf_counter_ns()
        dist.send(message, other)


class ProcessPeak(NamedTuple):
    """Peak device memory of a process in bytes: in use, and reserved by its allocator (0 without such an allocator)."""

    in_use: int
    reserved: int


def gather_timeline(
    program: Program, section: Section, rows: np.ndarray, clock_offset_ns: int, peak: ProcessPeak, width: int = 1
) -> Timeline | None:
    """Return the timeline of all processes on process 0, None on all others. All processes call it together.

    ``rows`` as from `Recorder.rows`, ``clock_offset_ns`` as from `measure_clock_offset`. Each rank of the program is a
    team of ``width`` processes: the timeline has the spans of the first one, and the largest memory of the team.
    """
    own = rows.copy()
    own[:, 2:] += clock_offset_ns
    gathered = [(own, peak)] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((own, peak), gathered)
    if gathered is None:
        return None
    teams = [[peak for _, peak in gathered[first : first + width]] for first in range(0, len(gathered), width)]
    fullest = [ProcessPeak(*map(max, zip(*team, strict=True))) for team in teams]
    return make_timeline(program, section, [item for item, _ in gathered[::width]], fullest)


def make_timeline(
    program: Program, section: Section, rows_per_rank: list[np.ndarray], peaks: Sequence[ProcessPeak]
) -> Timeline:
    """Return a measured timeline from each rank's rows (instruction id, step, start ns, end ns) on one clock.

    Time 0 is the earliest start. ``peaks``: peak memory by rank.
    """
    rows = np.concatenate(rows_per_rank)
    rows = rows[np.lexsort((rows[:, 0], rows[:, 2]))]
    index = rows[:, 0]
    track = np.searchsorted(section.stream_offsets, index, side="right") - 1
    origin = rows[:, 2].min() if len(rows) else 0
    steps = rows[:, 1] - rows[:, 1].min() if len(rows) else rows[:, 1]
    none = np.zeros(0, np.int64)
    return Timeline(
        origin="measured",
        num_ranks=program.num_ranks,
        tracks=program.streams,
        track=track.astype(np.int32),
        opcode=section.opcode[index],
        stage=section.stage[index],
        microbatch=section.microbatch[index],
        peer=section.peer[index],
        step=steps.astype(np.int32),
        num_bytes=section.num_bytes[index],
        start_ps=(rows[:, 2] - origin) * _PICOSECONDS_PER_NANOSECOND,
        end_ps=(rows[:, 3] - origin) * _PICOSECONDS_PER_NANOSECOND,
        memory_rank=none.astype(np.int32),
        memory_time_ps=none,
        memory_bytes=none,
        peak_memory_bytes=tuple(peak.in_use for peak in peaks),
        reserved_memory_bytes=tuple(peak.reserved for peak in peaks) if any(peak.reserved for peak in peaks) else (),
    )
