"""What was issued and not waited for yet: sends, receives and sums, by where in the run they were issued."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch.distributed as dist

from meshwright.runtime.rank_program import SectionName
from meshwright.runtime.recorder import Recorder


class Key(NamedTuple):
    """A place among the sections that run, and an instruction of the section there."""

    place: int
    instruction: int


class Pending:
    """Waits for what was issued, each once, and records when it was seen done."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._works: dict[Key, tuple[list[dist.Work], int]] = {}
        self._sections: dict[int, SectionName] = {}

    def begin(self, place: int, section: SectionName) -> None:
        """A section begins at a place."""
        self._sections[place] = section

    def section_at(self, place: int) -> SectionName | None:
        """The section at a place; None if everything of it has been waited for."""
        return self._sections.get(place)

    def add(self, key: Key, works: list[dist.Work], start: int) -> None:
        """Something was issued, at a time in nanoseconds."""
        self._works[key] = works, start

    def wait(self, key: Key) -> None:
        """Wait for something; at once if that was done before."""
        if key in self._works:
            works, start = self._works.pop(key)
            for work in works:
                work.wait()
            if self._recorder.active:
                self.record(key, start)

    def record(self, key: Key, start: int) -> None:
        """A span from ``start`` to now. Steps are repetitions of the body; what fills and empties belongs to none."""
        if self._sections[key.place] == "body":
            self._recorder.add(key.instruction, key.place, start, time.perf_counter_ns())

    def settle(self, place: int | None = None) -> None:
        """Wait for everything, or for what was issued up to a place."""
        for key in [key for key in self._works if place is None or key.place <= place]:
            self.wait(key)
        for passed in [other for other in self._sections if place is None or other <= place]:
            del self._sections[passed]
