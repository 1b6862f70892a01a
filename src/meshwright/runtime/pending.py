"""Works that are issued and not yet waited for: sends, receives and sums, by the place of their section in the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from meshwright.runtime.rank_program import SectionName
from meshwright.runtime.recorder import Moment, Recorder


class Work(Protocol):
    """An asynchronous operation."""

    def wait(self) -> object:
        """Return when it is done."""


@runtime_checkable
class Timed(Protocol):
    """Work whose maker records when it was done."""

    span: tuple[int, int] | None


class WaitedOnce:
    """Work with several waiters: gloo would copy a scattered sum into its place again at every wait.

    ``ended`` is when the first of them found it done, by this process's clock.
    """

    def __init__(self, work: Work) -> None:
        self._work: Work | None = work
        self.ended: int | None = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Return when it is done."""
        with self._lock:
            if self._work is not None:
                self._work.wait()
                self._work, self.ended = None, time.perf_counter_ns()


class Key(NamedTuple):
    """The place of a section in the run, and an instruction of that section."""

    place: int
    instruction: int


class Pending:
    """Waits for each issued instruction once, and records when it was found done."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._works: dict[Key, tuple[Sequence[Work], Moment]] = {}
        self._sections: dict[int, SectionName] = {}

    def begin(self, place: int, section: SectionName) -> None:
        """Enter a section at a place."""
        self._sections[place] = section

    def section_at(self, place: int) -> SectionName | None:
        """The section at a place; None if everything of it has been waited for."""
        return self._sections.get(place)

    def add(self, key: Key, works: Sequence[Work], start: Moment) -> None:
        """Add the works of an issued instruction, with the recorder's start."""
        self._works[key] = works, start

    def works(self, key: Key) -> Sequence[Work]:
        """The works of an instruction that may be in progress; empty after they were waited for."""
        return self._works[key][0] if key in self._works else ()

    def wait(self, key: Key) -> None:
        """Wait for an instruction; returns at once if that was done before."""
        if key in self._works:
            works, start = self._works.pop(key)
            for work in works:
                work.wait()
            if self._recorder.active:
                # Some works record themselves when they were done.
                known = next((work.span for work in works if isinstance(work, Timed)), None)
                ended = next((work.ended for work in works if isinstance(work, WaitedOnce)), None)
                self.record(key, *(known or (start, ended)))

    def record(self, key: Key, start: Moment, end: Moment | None = None) -> None:
        """Record a span from ``start`` to ``end``, or to now, if it is in the body, whose repetitions are the steps."""
        if self._sections[key.place] == "body":
            self._recorder.add(key.instruction, key.place, start, self._recorder.now() if end is None else end)

    def settle(self, place: int | None = None, but: Collection[int] = ()) -> None:
        """Wait for all works, or for those issued up to a place; ``but`` excludes some instructions."""
        for key in [key for key in self._works if place is None or key.place <= place]:
            if key.instruction not in but:
                self.wait(key)
        under_way = {key.place for key in self._works}
        for passed in [other for other in self._sections if place is None or other <= place]:
            if passed not in under_way:
                del self._sections[passed]
