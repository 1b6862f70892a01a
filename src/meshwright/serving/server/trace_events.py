"""Make the events of a trace for https://ui.perfetto.dev, and their JSON. `report.perfetto` describes the format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from meshwright.report.perfetto import metadata_event

Event = dict[str, Any]
# Events that are encoded at once.
_CHUNK = 4096


class TraceEvents:
    """Makes events, and numbers processes and threads; times are given in ns, and written in us after ``zero_ns``."""

    def __init__(self, zero_ns: int) -> None:
        self._zero_ns = zero_ns
        self._pids = 0
        # Above those of all processes: a thread with its process's number would be its main thread.
        self._tids = 1_000_000
        self._separator = b""

    def text(self, events: Iterator[Event]) -> Iterator[bytes]:
        """Yield the events as JSON, one line each, many lines at a time."""
        lines: list[bytes] = []
        for event in events:
            lines.append(msgspec.json.encode(event))
            if len(lines) == _CHUNK:
                yield self._join(lines)
                lines = []
        if lines:
            yield self._join(lines)

    def process(self, name: str) -> tuple[int, list[Event]]:
        """Return the number of a new process, shown below earlier ones, and the events that name it."""
        self._pids += 1
        named = metadata_event("process_name", self._pids, name=name)
        return self._pids, [named, metadata_event("process_sort_index", self._pids, sort_index=self._pids)]

    def thread(self, pid: int, name: str) -> tuple[int, list[Event]]:
        """Return the number of a new thread of a process, shown below earlier ones, and the events that name it."""
        self._tids += 1
        named = metadata_event("thread_name", pid, self._tids, name=name)
        return self._tids, [named, metadata_event("thread_sort_index", pid, self._tids, sort_index=self._tids)]

    def span(self, place: tuple[int, int], name: str, kind: str, begin: int, end: int, args: Event) -> Event:
        """Return a span from ``begin`` to ``end`` (ns); ``place`` is (process, thread)."""
        return {**self._event("X", place, name, kind, begin), "dur": (end - begin) / 1e3, "args": args}

    def instant(self, place: tuple[int, int], name: str, kind: str, moment: int, args: Event) -> Event:
        """Return an instant event at ``moment`` (ns); ``place`` is (process, thread)."""
        return {**self._event("i", place, name, kind, moment), "s": "t", "args": args}

    def arrow(self, part: str, number: int, place: tuple[int, int], moment: int) -> Event:
        """Return the start ("s"), middle ("t") or end ("f") of an arrow, at the span of ``place`` at ``moment`` (ns).

        The parts of an arrow have the same ``number``.
        """
        event = {**self._event(part, place, "request", "request", moment), "id": number}
        return event if part == "s" else {**event, "bp": "e"}

    def _event(self, part: str, place: tuple[int, int], name: str, kind: str, moment: int) -> Event:
        at = (moment - self._zero_ns) / 1e3
        return {"ph": part, "name": name, "cat": kind, "pid": place[0], "tid": place[1], "ts": at}

    def _join(self, lines: list[bytes]) -> bytes:
        separator, self._separator = self._separator, b",\n"
        return separator + b",\n".join(lines)
