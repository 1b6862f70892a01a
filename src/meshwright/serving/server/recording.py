"""Records of a server's process for a timeline: rows of integers, written while recording is on.

The supervisor's orders (`reports.Orders`) are

    {"record": MOST}      record, at most MOST rows of each table
    {"deliver": PATH}     write all records to a file, which appears complete, and stop recording

An object that can record has an attribute ``recording``; while it is None, nothing is recorded, and recording costs
nothing. Times are those of `time.monotonic_ns` (ns), common to all processes of a machine. The tables of each kind of
process, with their columns:

    frontends   requests    begun, answered, status, outcome (`gate.Fate`; -1: never submitted), model, channel,
                            deadline, number of samples, index of the trace context (-1: no context)
                texts       trace contexts, one per line
                slots       slot of each sample of the requests, one request after the other
                flushes     time, channel, number of samples: a message to the scheduler
                flushed     model, slot, deadline of each sample of these messages
    scheduler   events      as in `live`
                decisions   time, kind, target, model, number of samples: as in `live`
                chosen      requests of the decisions, one decision after the other
    workers     batches     number, model, expected ns, begin, end, number of samples
                samples     request, deadline, 0 done or 1 skipped or 2 failed: one batch after the other
                runs        begin, end: execution of the model, without copying of tensors
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
# Cells of a table for each of ``most`` rows: samples have separate tables, with room for four of each.
CELLS = {
    name: width * (4 if name in ("slots", "flushed", "chosen", "samples") else 1) for name, width in WIDTHS.items()
}


class Recording:
    """Recorded tables; rows beyond ``most`` of a table are omitted (4 x ``most`` for tables of samples).

    ``is_cut`` is set when rows are omitted.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.tables: dict[str, array[int]] = {}
        self.texts: list[bytes] = []
        self.is_cut = False

    def rows_of_request(self, call: InboundRequest, ticket: Ticket | None, status: int, now: int) -> None:
        """Record a request that was answered at ``now`` (ns) with an HTTP ``status``, 0 if its client disconnected.

        ``ticket`` is None if the request was never submitted to the scheduler.
        """
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
        """Record samples that were submitted in one message: model, slot and deadline of each, one after the other."""
        if cells:
            self._note({"flushes": (time.monotonic_ns(), channel, len(cells) // 3), "flushed": cells})

    def rows_of_decisions(self, events: Ints, taken: list[tuple[Ints, Ints]], model_of: Callable[[int], int]) -> None:
        """Record a policy's events and decisions; ``model_of`` returns the model number of a queue."""
        now, decisions, chosen = time.monotonic_ns(), array("q"), array("q")
        for rows, requests in taken:
            for kind, target, queue, first, count, _ in rows.tolist():
                decisions.extend((now, kind, target, model_of(queue), count))
                chosen.extend(requests[first : first + count].tolist())
        self._note({"events": events.ravel().tolist()})
        self._note({"decisions": decisions, "chosen": chosen})

    def rows_of_batch(self, batch: tuple[int, int, int, int, int], cells: Ints, late: Ints, failed: Ints) -> None:
        """Record a worker's batch: (number, model, expected ns, begin ns, end ns).

        The first half of ``cells`` has the numbers of its requests, the second half their deadlines (ns). ``late`` and
        ``failed`` are positions in the batch of the requests that were skipped, and that failed.
        """
        count = len(cells) // 2
        samples = np.zeros((count, 3), np.int64)
        samples[:, 0], samples[:, 1] = cells[:count], cells[count:]
        samples[late, 2], samples[failed, 2] = 1, 2
        self._note({"batches": (*batch, count), "samples": samples.ravel().tolist()})

    def row_of_run(self, begin: int, end: int) -> None:
        """Record an execution of a model, from ``begin`` to ``end`` (ns)."""
        self._note({"runs": (begin, end)})

    def write(self, path: Path) -> None:
        """Write all tables to a file that `Recorded` reads; the file gets its name when it is complete."""
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
        """Add rows that belong together: all of them, or none."""
        tables = {name: self.tables.setdefault(name, array("q")) for name in rows}
        if any(len(cells) >= self._most * CELLS[name] for name, cells in tables.items()):
            self.is_cut = True
            return
        for name, cells in rows.items():
            tables[name].extend(cells)


class Recordable(Protocol):
    """An object that can record. While ``recording`` is not None, the object adds rows to it."""

    recording: Recording | None


class RecordingControl:
    """Carries out the supervisor's orders about recording.

    ``parts`` returns the objects that record; entries that are None are skipped.
    """

    def __init__(self, parts: Callable[[], Iterable[Recordable | None]]) -> None:
        self._parts = parts
        self._recording: Recording | None = None

    def obey(self, orders: list[dict[str, Any]]) -> None:
        """Start recording, or write the records and stop, as the orders say; ignore other orders."""
        for order in orders:
            if "record" in order:
                self._set(Recording(order["record"]))
            elif "deliver" in order:
                recording = self._recording or Recording(0)
                self._set(None)
                # The folder may be gone, together with the supervisor.
                with contextlib.suppress(OSError):
                    recording.write(Path(order["deliver"]))

    def _set(self, recording: Recording | None) -> None:
        self._recording = recording
        for part in self._parts():
            if part is not None:
                part.recording = recording


class Recorded:
    """The tables in a file of `Recording.write`, by name; a table without records has 0 rows."""

    def __init__(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as file:
            self._tables: dict[str, Ints] = {name: file[name] for name in file.files}
        texts = self._tables["texts"].tobytes()
        self.texts = texts.split(b"\n") if texts else []
        self.is_cut = bool(self._tables["is_cut"])

    def __getitem__(self, name: str) -> Ints:
        return self._tables.get(name, np.zeros((0, WIDTHS[name]), np.int64))


def _described(context: TraceContext) -> bytes:
    """Return trace, parent, span, flags and state, separated by spaces, without line breaks."""
    state = context.state.replace(b"\n", b"")
    return b"%b %b %b %d %b" % (context.trace, context.parent, context.span, context.flags, state)
