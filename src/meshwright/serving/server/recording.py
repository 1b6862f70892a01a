"""What a process of a server notes while a timeline is recorded: rows of integers, as long as it is told to.

The supervisor's orders (`reports.Orders`) are

    {"record": MOST}      note, MOST rows of each table at most
    {"deliver": PATH}     write all that was noted to a file, which appears whole, and note nothing more

A part that has something to note has an attribute ``recording``, which is None nearly always: that is all that it costs
then. Moments are those of `time.monotonic_ns`, which all processes of a machine have in common.

    fronts      requests    begun, answered, status, fate (-1: never submitted), model, channel, deadline, samples, text
                slots       those of the requests, one after the other
                flushes     moment, channel, samples: a message to the scheduler
                flushed     model, slot, deadline, of the samples of these messages
    scheduler   events      as `live` has them
                decisions   moment, kind, target, model, samples: as `live` has them
                chosen      requests of the decisions, one after the other
    workers     batches     number, model, expected ns, begin, end, samples
                samples     request, deadline, 0 done or 1 passed over or 2 failed: of the batches, one after the other
                runs        begin, end: the model at work, without the ways of tensors
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from meshwright.serving.policies.pool import CANCELLED, Ints

if TYPE_CHECKING:
    from meshwright.serving.server.exchange import InboundRequest
    from meshwright.serving.server.gate import Ticket
    from meshwright.serving.server.trace_context import TraceContext

WIDTHS = {
    "requests": 9,
    "slots": 1,
    "flushes": 3,
    "flushed": 3,
    "events": 6,
    "decisions": 5,
    "chosen": 1,
    "batches": 6,
    "samples": 3,
    "runs": 2,
}
# Cells of a table for each of ``most``: samples have tables of their own, with room for four of each.
CELLS = {
    name: width * (4 if name in ("slots", "flushed", "chosen", "samples") else 1) for name, width in WIDTHS.items()
}


class Recording:
    """What was noted; what would be more than ``most`` rows of a table, or a few times so many samples, is left out."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.tables: dict[str, array[int]] = {}
        self.texts: list[bytes] = []
        self.is_cut = False

    def rows_of_request(self, call: InboundRequest, ticket: Ticket | None, status: int, now: int) -> None:
        """A request was answered, with ``status`` 0 if its client has gone; ``ticket`` if it was submitted."""
        served = call.served
        if served is None:
            return
        text = -1
        if call.trace is not None and len(self.texts) < self._most:
            text = len(self.texts)
            self.texts.append(_described(call.trace))
        model = served.model
        slots: list[int] = [] if ticket is None else ticket.slots
        fate, deadline = (-1, 0) if ticket is None else (int(ticket.fate), ticket.deadline_ns)
        if not status:
            fate = CANCELLED
        row = (call.begun_ns, now, status, fate, model.number, model.channel, deadline, len(slots), text)
        self._note({"requests": row, "slots": slots})

    def rows_of_flush(self, channel: int, cells: list[int]) -> None:
        """Samples were submitted: rows of model, slot, deadline."""
        if cells:
            self._note({"flushes": (time.monotonic_ns(), channel, len(cells) // 3), "flushed": cells})

    def rows_of_decisions(self, events: Ints, taken: list[tuple[Ints, Ints]], model_of: Callable[[int], int]) -> None:
        """A policy has seen events and decided."""
        now, decisions, chosen = time.monotonic_ns(), array("q"), array("q")
        for rows, requests in taken:
            for kind, target, queue, first, count, _ in rows.tolist():
                decisions.extend((now, kind, target, model_of(queue), count))
                chosen.extend(requests[first : first + count].tolist())
        self._note({"events": events.ravel().tolist()})
        self._note({"decisions": decisions, "chosen": chosen})

    def rows_of_batch(self, batch: tuple[int, int, int, int, int], cells: Ints, late: Ints, failed: Ints) -> None:
        """A worker has done a batch (number, model, expected ns, begin, end); ``cells``: requests, then deadlines."""
        count = len(cells) // 2
        samples = np.zeros((count, 3), np.int64)
        samples[:, 0], samples[:, 1] = cells[:count], cells[count:]
        samples[late, 2], samples[failed, 2] = 1, 2
        self._note({"batches": (*batch, count), "samples": samples.ravel().tolist()})

    def row_of_run(self, begin: int, end: int) -> None:
        """A model has run."""
        self._note({"runs": (begin, end)})

    def write(self, path: Path) -> None:
        """Write all to a file that `read_recorded` reads; it appears whole."""
        begun = path.with_suffix(".part")
        tables: dict[str, Any] = {
            name: np.frombuffer(cells, np.int64).reshape(-1, WIDTHS[name]) for name, cells in self.tables.items()
        }
        with begun.open("wb") as file:
            np.savez(
                file, **tables, texts=np.frombuffer(b"\n".join(self.texts), np.uint8), is_cut=np.array(self.is_cut)
            )
        begun.rename(path)

    def _note(self, rows: dict[str, Iterable[int]]) -> None:
        """Rows that belong together: all of them, or none."""
        tables = {name: self.tables.setdefault(name, array("q")) for name in rows}
        if any(len(cells) >= self._most * CELLS[name] for name, cells in tables.items()):
            self.is_cut = True
            return
        for name, cells in rows.items():
            tables[name].extend(cells)


class Recordable(Protocol):
    """A part that notes what it does."""

    recording: Recording | None


class RecordingControl:
    """Does what the supervisor's orders say about recording; ``parts`` are those that note, None for what is not."""

    def __init__(self, parts: Callable[[], Iterable[Recordable | None]]) -> None:
        self._parts = parts
        self._recording: Recording | None = None

    def obey(self, orders: list[dict[str, Any]]) -> None:
        """Begin to record, or deliver; other orders are for others."""
        for order in orders:
            if "record" in order:
                self._set(Recording(order["record"]))
            elif "deliver" in order:
                recording = self._recording or Recording(0)
                self._set(None)
                # The folder goes with the supervisor.
                with contextlib.suppress(OSError):
                    recording.write(Path(order["deliver"]))

    def _set(self, recording: Recording | None) -> None:
        self._recording = recording
        for part in self._parts():
            if part is not None:
                part.recording = recording


class Recorded:
    """What `Recording.write` wrote; a table that nothing was noted in is empty."""

    def __init__(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as file:
            self._tables: dict[str, Ints] = {name: file[name] for name in file.files}
        texts = self._tables["texts"].tobytes()
        self.texts = texts.split(b"\n") if texts else []
        self.is_cut = bool(self._tables["is_cut"])

    def __getitem__(self, name: str) -> Ints:
        return self._tables.get(name, np.zeros((0, WIDTHS[name]), np.int64))


def _described(context: TraceContext) -> bytes:
    """Trace, parent, span, flags and state with spaces between them; no line in it."""
    state = context.state.replace(b"\n", b"")
    return b"%b %b %b %d %b" % (context.trace, context.parent, context.span, context.flags, state)
