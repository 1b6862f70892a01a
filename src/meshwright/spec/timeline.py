"""Timeline: start and end of every instruction, predicted by the simulator or measured by the runtime.

Predicted and measured timelines have the same tracks and span names. Times are int64 picoseconds from the start of the
first step. The columns ``memory_*`` hold the bytes in use on a rank at every change.

`OpSpans` lists the ops inside the computations of a timeline.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.spec.errors import DocumentError
from meshwright.spec.html import Printer, html_table
from meshwright.spec.instructions import Opcode, instruction_name
from meshwright.spec.program import MAX_IDLE_RANKS, Stream
from meshwright.spec.units import format_bytes, format_seconds, to_seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """The spans of instructions, as columns; one track for each stream of a rank.

    Span i is on the track ``tracks[track[i]]``, from ``start_ps[i]`` to ``end_ps[i]``. ``opcode``, ``stage``,
    ``microbatch``, ``peer`` and ``num_bytes`` are as in a `Program`. ``step`` numbers the repetitions of the program's
    body. ``peak_memory_bytes`` has one entry per rank; it is empty if unknown. So is ``reserved_memory_bytes``, the
    bytes that a GPU's allocator reserved on the device. Raises DocumentError if the columns contradict each other.
    """

    origin: Literal["predicted", "measured"]
    num_ranks: int
    tracks: tuple[Stream, ...]
    track: NDArray[np.int32]
    opcode: NDArray[np.int8]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    peer: NDArray[np.int32]
    step: NDArray[np.int32]
    num_bytes: NDArray[np.int64]
    start_ps: NDArray[np.int64]
    end_ps: NDArray[np.int64]
    memory_rank: NDArray[np.int32]
    memory_time_ps: NDArray[np.int64]
    memory_bytes: NDArray[np.int64]
    peak_memory_bytes: tuple[int, ...] = ()
    reserved_memory_bytes: tuple[int, ...] = ()

    SCHEMA_VERSION: ClassVar[int] = 1

    def __post_init__(self) -> None:
        for names in (
            ("track", "opcode", "stage", "microbatch", "peer", "step", "num_bytes", "start_ps", "end_ps"),
            ("memory_rank", "memory_time_ps", "memory_bytes"),
        ):
            if len({len(getattr(self, name)) for name in names}) != 1:
                raise DocumentError(
                    f"The timeline's columns {', '.join(names)} differ in length; write the timeline again."
                )
        if not 1 <= self.num_ranks <= len(self.tracks) + MAX_IDLE_RANKS:
            raise DocumentError(
                f"The timeline is of {self.num_ranks} ranks, but has {len(self.tracks)} tracks; "
                "write the timeline again."
            )
        if any(not 0 <= stream.rank < self.num_ranks for stream in self.tracks):
            raise DocumentError(
                f"The timeline is of {self.num_ranks} ranks, but has tracks of other ranks; write the timeline again."
            )
        for what, known in (("memory peaks", self.peak_memory_bytes), ("reserved sizes", self.reserved_memory_bytes)):
            if len(known) not in (0, self.num_ranks):
                raise DocumentError(
                    f"The timeline has {len(known)} {what} for {self.num_ranks} ranks; write the timeline again."
                )
        for name, high in (
            ("track", len(self.tracks)),
            ("opcode", len(Opcode)),
            ("step", np.iinfo(np.int32).max),
            ("memory_rank", self.num_ranks),
        ):
            values = getattr(self, name)
            if len(values) and not (values.min() >= 0 and values.max() < high):
                raise DocumentError(
                    f"The timeline's column {name} has values outside 0..{high - 1}; write the timeline again."
                )
        if bool((self.end_ps < self.start_ps).any()):
            raise DocumentError("The timeline has spans that end before they start; write the timeline again.")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Timeline):
            return NotImplemented
        pairs = ((getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__)
        return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]

    @property
    def num_spans(self) -> int:
        """Number of spans of the timeline."""
        return len(self.track)

    @property
    def duration_s(self) -> float:
        """Seconds from time 0 to the end of the last span."""
        return to_seconds(int(self.end_ps.max())) if self.num_spans else 0.0

    def name(self, index: int) -> str:
        """Return the name of span number ``index``, such as ``F0.3``."""
        return instruction_name(
            int(self.opcode[index]), int(self.stage[index]), int(self.microbatch[index]), int(self.peer[index])
        )

    def _repr_html_(self) -> str:
        rows = ((*self._place(i), self.name(i), *self._times(i)) for i in range(self.num_spans))
        return html_table(
            self._summary(), ("rank", "stream", "span", "step", "start", "duration", "bytes"), rows, self.num_spans
        )

    def _repr_pretty_(self, printer: Printer, cycle: bool) -> None:  # noqa: ARG002 - IPython's signature
        printer.text(self._summary())

    def _place(self, index: int) -> tuple[int, str]:
        stream = self.tracks[int(self.track[index])]
        return stream.rank, stream.name

    def _times(self, index: int) -> tuple[int, str, str, str]:
        start, end, moved = int(self.start_ps[index]), int(self.end_ps[index]), int(self.num_bytes[index])
        return (
            int(self.step[index]),
            format_seconds(to_seconds(start)),
            format_seconds(to_seconds(end - start)),
            format_bytes(moved) if moved else "",
        )

    def _summary(self) -> str:
        return (
            f"Timeline, {self.origin}: {self.num_spans:,} spans of {self.num_ranks:,} ranks over "
            f"{format_seconds(self.duration_s)}"
        )

    def between(self, first: int, stop: int) -> Timeline:
        """Return the spans of the steps from ``first`` to before ``stop``, renumbered from 0.

        Time 0 is the end of the last span of earlier steps. The samples of memory are kept.
        """
        taken = self.until(stop)
        begin_ps = int(self.end_ps[self.step < first].max(initial=0))
        chosen = taken.step >= first
        columns = ("track", "opcode", "stage", "microbatch", "peer", "step", "num_bytes", "start_ps", "end_ps")
        found = replace(taken, **{name: getattr(taken, name)[chosen] for name in columns})
        # A span that began earlier is shown from the start on.
        start_ps = np.maximum(found.start_ps - begin_ps, 0)
        return replace(found, step=found.step - np.int32(first), start_ps=start_ps, end_ps=found.end_ps - begin_ps)

    def until(self, step: int) -> Timeline:
        """Return the spans of all steps before ``step``; the samples of memory are kept."""
        chosen = self.step < step
        columns = ("track", "opcode", "stage", "microbatch", "peer", "step", "num_bytes", "start_ps", "end_ps")
        return replace(self, **{name: getattr(self, name)[chosen] for name in columns})

    def step_seconds(self) -> NDArray[np.float64]:
        """Return the seconds of each step, shape (num_steps,).

        A step lasts from the end of the previous step (time 0 for the first) to the end of its last span on any rank.
        """
        if not self.num_spans:
            return np.zeros(0)
        ends = np.zeros(int(self.step.max()) + 1, np.int64)
        np.maximum.at(ends, self.step, self.end_ps)
        return np.diff(ends, prepend=0) / 1e12

    def busy_seconds(self) -> NDArray[np.float64]:
        """Return the seconds in which each rank's compute stream is busy, shape (num_ranks,)."""
        ranks = np.array([stream.rank for stream in self.tracks], np.int64)
        compute = np.array([stream.name == "compute" for stream in self.tracks], bool)
        mine = compute[self.track]
        busy = np.zeros(self.num_ranks)
        np.add.at(busy, ranks[self.track[mine]], (self.end_ps - self.start_ps)[mine] / 1e12)
        return busy

    def bubble_fraction(self) -> float:
        """Return the share (0..1) of all ranks' time in which their compute streams are idle."""
        total = self.duration_s * self.num_ranks
        return max(1.0 - float(self.busy_seconds().sum()) / total, 0.0) if total else 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpSpans:
    """The ops inside spans of a timeline, in the order of spans and of time; each column has the shape (num_parts,).

    Part i is an op called ``names[op[i]]`` inside span ``span[i]`` of the timeline. The parts of a span follow each
    other without gaps and fill the span.
    """

    span: NDArray[np.int64]
    op: NDArray[np.int32]
    start_ps: NDArray[np.int64]
    end_ps: NDArray[np.int64]
    names: tuple[str, ...]

    @property
    def num_parts(self) -> int:
        """Number of parts of all spans."""
        return len(self.span)

    def name(self, index: int) -> str:
        """Return the name of part number ``index``."""
        return self.names[int(self.op[index])]
