"""Where each instruction of an unrolled program comes from. Computed when a report needs it.

Part p (prologue, a repetition of the body, or epilogue) of stream s begins at id ``begins[p, s]``, so instruction i of
a section gets the id ``begins[p, s] + i - stream_offsets[s]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.program import Repeated
from meshwright.simulator.matching import Matches
from meshwright.simulator.program_costs import SectionCosts
from meshwright.spec import Section

Ids = NDArray[np.int64]
Column = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionPart:
    """One section with everything needed to place it; all repetitions of the body share one object."""

    section: Section
    costs: SectionCosts
    matches: Matches
    wait_offsets: Ids
    waits: Ids


# Without slots, because derived columns are cached on the object.
@dataclass(frozen=True, kw_only=True, eq=False)
class SectionLayout:
    """The parts in order: ``made`` are prologue, body and epilogue, ``which`` gives the index into ``made`` of part p.

    ``begins`` (parts, streams) holds where they begin; ``stream_offsets`` (streams + 1,) is that of the network.
    ``joined``: set for asynchronous programs, whose repetitions are already one section (`unroll`).
    """

    made: tuple[SectionPart, SectionPart, SectionPart]
    which: tuple[int, ...]
    begins: Ids
    stream_offsets: Ids
    joined: Repeated | None = None

    @cached_property
    def only(self) -> SectionPart | None:
        """The part that contains all instructions, if one does: then they keep their ids."""
        filled = [part for part in self.parts if part.section.num_instructions]
        return filled[0] if len(filled) == 1 else None

    @property
    def parts(self) -> list[SectionPart]:
        """All parts in order; repetitions of the body are the same object."""
        return [self.made[k] for k in self.which]

    def shifts(self, p: int) -> Ids:
        """Return the offset between section ids and new ids in part p, by stream."""
        shifts: Ids = self.begins[p] - self.made[self.which[p]].section.stream_offsets[:-1]
        return shifts

    def new_ids(self, p: int) -> Ids:
        """Return the new ids of the instructions of part p, in the order of its section."""
        section = self.made[self.which[p]].section
        ids: Ids = np.arange(section.num_instructions)
        return ids if self.only is not None else ids + np.repeat(self.shifts(p), np.diff(section.stream_offsets))

    @cached_property
    def stream(self) -> Column:
        """The stream of each instruction, shape (n,)."""
        counts = np.diff(self.stream_offsets)
        return np.repeat(np.arange(len(counts), dtype=np.int32), counts)

    @cached_property
    def step(self) -> Column:
        """Repetition of the body (n,): the prologue counts as the first, the epilogue as the last."""
        if self.joined is not None:
            return self.joined.step
        num_steps = len(self.which) - 2
        if num_steps == 1:
            return np.zeros(int(self.stream_offsets[-1]), np.int32)
        step = np.empty(int(self.stream_offsets[-1]), np.int32)
        for p, number in enumerate((0, *range(num_steps), num_steps - 1)):
            step[self.new_ids(p)] = number
        return step

    @cached_property
    def source(self) -> Ids:
        """Row in the concatenated columns of prologue, body and epilogue, shape (n,)."""
        if self.joined is not None:
            return self.joined.source
        first = np.cumsum([0, *(part.section.num_instructions for part in self.made)])
        source = np.empty(int(self.stream_offsets[-1]), np.int64)
        for p, k in enumerate(self.which):
            source[self.new_ids(p)] = np.arange(first[k], first[k + 1])
        return source

    @cached_property
    def transfers(self) -> tuple[Ids, Ids]:
        """Ids of the receives, and of the sends that they wait for."""
        if self.only is not None:
            return self.only.matches.receives, self.only.matches.sends
        new = [(self.new_ids(p), self.made[k].matches) for p, k in enumerate(self.which)]
        receives = np.concatenate([ids[matches.receives] for ids, matches in new])
        return receives, np.concatenate([ids[matches.sends] for ids, matches in new])

    @cached_property
    def send_of(self) -> Ids:
        """The send that a receive waits for, else -1, shape (n,)."""
        send_of = np.full(int(self.stream_offsets[-1]), -1, np.int64)
        receives, sends = self.transfers
        send_of[receives] = sends
        return send_of
