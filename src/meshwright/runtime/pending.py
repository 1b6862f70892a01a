"""What was issued and not waited for yet: sends, receives and sums, by where in the run they were issued."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from meshwright.runtime.rank_program import SectionName
from meshwright.runtime.recorder import Moment, Recorder


class Work(Protocol):
    """What goes on beside the computations."""

    def wait(self) -> object:
        """Come back when it is done."""


@runtime_checkable
class Timed(Protocol):
    """Work whose maker knows when it was done."""

    span: tuple[int, int] | None


class WaitedOnce:
    """Work that several wait for: gloo copies a scattered sum into its place again with every wait.

    ``ended`` is when the first of them saw it done, by this process's clock.
    """

    def __init__(self, work: Work) -> None:
        self._work: Work | None = work
        self.ended: int | None = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Come back when it is done."""
        with self._lock:
            if self._work is not None:
                self._work.wait()
                self._work, self.ended = None, time.perf_counter_ns()


class Key(NamedTuple):
    """A place among the sections that run, and an instruction of the section there."""

    place: int
    instruction: int


class Pending:
    """Waits for what was issued, each once, and records when it was seen done."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._works: dict[Key, tuple[Sequence[Work], Moment]] = {}
        self._sections: dict[int, SectionName] = {}

    def begin(self, place: int, section: SectionName) -> None:
        """A section begins at a place."""
        self._sections[place] = section

    def section_at(self, place: int) -> SectionName | None:
        """The section at a place; None if everything of it has been waited for."""
        return self._sections.get(place)

    def add(self, key: Key, works: Sequence[Work], start: Moment) -> None:
        """Something was issued, at a moment of the recorder's."""
        self._works[key] = works, start

    def works(self, key: Key) -> Sequence[Work]:
        """What was issued and may be under way; nothing of what was waited for."""
        return self._works[key][0] if key in self._works else ()

    def wait(self, key: Key) -> None:
        """Wait for something; at once if that was done before."""
        if key in self._works:
            works, start = self._works.pop(key)
            for work in works:
                work.wait()
            if self._recorder.active:
                # Of what is made beside, the maker knows when.
                known = next((work.span for work in works if isinstance(work, Timed)), None)
                ended = next((work.ended for work in works if isinstance(work, WaitedOnce)), None)
                self.record(key, *(known or (start, ended)))

    def record(self, key: Key, start: Moment, end: Moment | None = None) -> None:
        """A span from ``start`` to ``end``, or to now. Steps are repetitions of the body; other sections have none."""
        if self._sections[key.place] == "body":
            self._recorder.add(key.instruction, key.place, start, self._recorder.now() if end is None else end)

    def settle(self, place: int | None = None, but: Collection[int] = ()) -> None:
        """Wait for everything, or for what was issued up to a place; ``but`` for some instructions."""
        for key in [key for key in self._works if place is None or key.place <= place]:
            if key.instruction not in but:
                self.wait(key)
        under_way = {key.place for key in self._works}
        for passed in [other for other in self._sections if place is None or other <= place]:
            if passed not in under_way:
                del self._sections[passed]
