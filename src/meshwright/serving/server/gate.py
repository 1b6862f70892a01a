"""The gate of a frontend: it passes requests to the scheduler and receives their outcomes.

For each request, a frontend reserves one slot of shared memory per sample (`Gate.reserve`), writes the tensors into the
model's slab, and submits the request with a deadline (`Gate.submit`). When the outcomes of all its samples are known,
``reply`` is called with the outcome (`Fate`). The slots stay reserved until the frontend frees them (`Gate.release`).
Requests and cancellations of one turn of the event loop are sent in one message.

A gate connects to the scheduler, and reconnects after the scheduler was restarted; requests that were under way get the
outcome `LOST`. Slabs are made for each connection, so that a worker that uses older slabs cannot write to slots in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.serving.policies.pool import CANCELLED, CROWDED, FULL, LATE, LEVEL_BIT, SACRIFICED
from meshwright.serving.server.channel import MOST_CELLS, Closed, Kind, MessageChannel, connect
from meshwright.serving.server.recording import Recording
from meshwright.serving.server.slabs import Slab, slab_path, slot_layout
from meshwright.spec import ServingError, TensorSpec

_AGAIN_S = 0.02
# The most slots of a model in a frontend; memory limits them before, unless samples are tiny.
_MOST_SLOTS = 2**16
# Answers that are given before newly arrived requests are read: the time of a request counts from then. With fewer,
# batches of tiny models are smaller, and requests cost more.
_AT_ONCE = 64
# Samples of the lateness of answers that are sent to the scheduler in one message.
_MANY = 32
# Memory that slots take at a time when none are left.
_GROWTH_BYTES = 2**16


class Fate(enum.IntEnum):
    """The outcome of a request. Up to ``CANCELLED``, they are a policy's reasons for dropping the request.

    LATE: its deadline cannot be met. FULL: the queue is full. CROWDED: the work ahead takes too long. SACRIFICED:
    dropped in favour of others. CANCELLED: its client disconnected. DONE: computed. FAILED: the model raised an
    exception. LOST: a process was restarted. FORGOTTEN: no outcome was known until long after the deadline.
    """

    LATE, FULL, CROWDED, SACRIFICED, CANCELLED = LATE, FULL, CROWDED, SACRIFICED, CANCELLED
    DONE = 16
    FAILED = 17
    LOST = 18
    FORGOTTEN = 19


_DONE = Fate.DONE


class ModelFacts:
    """A model as a frontend sees it: name, inputs and outputs of one sample, and the slab with tensors of requests.

    ``most`` is the largest batch. ``idle`` are the free slots that have memory; ``tickets`` are the requests by slot.
    """

    def __init__(self, document: dict[str, Any], folder: Path, epoch: int, channel: int, tensor_bytes: int) -> None:
        self.number: int = document["number"]
        self.channel = channel
        self.name: str = document["name"]
        self.version: str = document["version"]
        self.platform: str = document["platform"]
        self.slo_ns: int = document["slo_ns"]
        self.most: int = document["most"]
        self.inputs = tuple(TensorSpec(**{**item, "shape": tuple(item["shape"])}) for item in document["inputs"])
        self.outputs = tuple(TensorSpec(**{**item, "shape": tuple(item["shape"])}) for item in document["outputs"])
        size = slot_layout(self.inputs, self.outputs).itemsize
        slots = max(min(tensor_bytes // size, _MOST_SLOTS), 1)
        self.slab = Slab(slab_path(folder, epoch, channel, self.number), self.inputs, self.outputs, slots)
        # Idle slots that have memory (`grow`); the last used ones are used first, so that the memory stays small.
        self.idle: list[int] = []
        self.tickets: list[Ticket | None] = []

    def grow(self, least: int) -> bool:
        """Allocate memory for at least ``least`` more slots; return False if there is not enough."""
        first, slots = len(self.tickets), len(self.slab)
        count = min(max(least, _GROWTH_BYTES // self.slab.slots.itemsize), slots - first)
        if count < least or not self.slab.allocate(first, count):
            return False
        self.idle[:0] = range(first + count - 1, first - 1, -1)
        self.tickets += [None] * count
        return True


class Ticket:
    """A request that is under way: its slots, its outcome ``fate``, and the callback ``reply``.

    ``left`` is the number of its samples without an outcome. ``reply`` is None after the request was cancelled.
    """

    __slots__ = ("deadline_ns", "fate", "left", "model", "reply", "slots")

    def __init__(
        self, model: ModelFacts, slots: list[int], deadline_ns: int, reply: Callable[[Ticket], None] | None
    ) -> None:
        self.model, self.slots, self.deadline_ns, self.reply = model, slots, deadline_ns, reply
        self.left = len(slots)
        self.fate = _DONE


class _Known:
    """Requests with a known outcome, some of them still to be answered; ``end`` is that of their batch, or 0.

    The batch is planned for the deadline of the first one, ``first_due``.
    """

    __slots__ = ("end", "fate", "first_due", "model", "num_told", "slots")

    def __init__(self, model: ModelFacts, slots: list[int], fate: int, end: int) -> None:
        self.model, self.slots, self.fate, self.end = model, slots, fate, end
        self.num_told = self.first_due = 0

    def lateness(self, due: int, now: int) -> int:
        """Return how late (ns) a request is answered after the end, less what it is due later than the first one."""
        self.first_due = self.first_due or due
        return now - (due - self.first_due) - self.end


class Gate:
    """Passes requests to the scheduler and receives their outcomes.

    ``models`` has the models by name, each in its newest version. ``changed`` is called when the models have changed.
    """

    def __init__(self, folder: Path, tensor_bytes: int) -> None:
        self.changed: Callable[[], None] | None = None
        self.models: dict[str, ModelFacts] = {}
        self.is_ready = False
        self.recording: Recording | None = None
        self._folder, self._tensor_bytes = folder, tensor_bytes
        self._channel: MessageChannel | None = None
        self._number = 0  # of the connection, assigned by the scheduler
        self._by_number: dict[int, ModelFacts] = {}
        self._submitted: list[int] = []
        self._cancelled: list[int] = []
        self._late: list[int] = []
        self._flushing = False
        self._known: deque[_Known] = deque()

    async def keep_connected(self) -> None:
        """Connect to the scheduler, and reconnect whenever the connection ends; never returns.

        Raises ServingError if the slabs of models cannot be made.
        """
        loop = asyncio.get_running_loop()
        while True:
            channel = connect(self._folder / "scheduler.sock")
            if channel is not None:
                closed: asyncio.Future[None] = loop.create_future()
                self._channel = channel
                loop.add_reader(channel.fileno(), self._receive, closed)
                try:
                    channel.send_text({"front": True})
                    await closed
                except Closed:
                    pass
                finally:
                    loop.remove_reader(channel.fileno())
                    loop.remove_writer(channel.fileno())
                    self._disconnect()
            await asyncio.sleep(_AGAIN_S)

    def reserve(self, model: ModelFacts, count: int) -> list[int] | None:
        """Reserve and return slots for ``count`` samples; return None if there is no memory for them."""
        idle = model.idle
        if count == 1 and idle:
            return [idle.pop()]
        if count > len(idle) and not model.grow(count - len(idle)):
            return None
        taken = idle[len(idle) - count :]
        del idle[len(idle) - count :]
        return taken

    def submit(
        self,
        model: ModelFacts,
        slots: list[int],
        deadline_ns: int,
        reply: Callable[[Ticket], None],
        level: int = 0,
    ) -> Ticket:
        """Submit a request; ``reply`` is called with its outcome, never before this returns.

        ``deadline_ns`` is a time of `time.monotonic_ns`. Requests of a lower ``level`` (`policies.ordering`) are more
        important.
        """
        ticket = Ticket(model, slots, deadline_ns, reply)
        tickets, number, submitted = model.tickets, model.number, self._submitted
        for slot in slots:
            tickets[slot] = ticket
            submitted += (number, slot | level << LEVEL_BIT, deadline_ns)
        if not self._flushing:
            self._flush_soon()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request whose client has disconnected: ``reply`` is not called, and its slots are freed later."""
        if ticket.reply is not None:
            ticket.reply = None
            self._withdraw(ticket)

    def give_up_forgotten(self, due_ns: int, place: int, step: int) -> None:
        """Answer requests with deadlines up to ``due_ns`` that still have no outcome, as `FORGOTTEN`.

        One call checks every ``step``-th model, starting with number ``place``. The slots are freed only after the
        scheduler's answer, as a worker may still write to them.
        """
        for model in list(self._by_number.values())[place::step]:
            if len(model.idle) == len(model.tickets):
                continue
            for ticket in model.tickets:
                if ticket is not None and ticket.deadline_ns <= due_ns and (reply := ticket.reply) is not None:
                    self.cancel(ticket)
                    told = Ticket(model, [], ticket.deadline_ns, None)
                    told.fate = Fate.FORGOTTEN
                    reply(told)

    def release(self, ticket: Ticket) -> None:
        """Free the slots of a request, after its outputs were read."""
        ticket.model.idle += ticket.slots

    def _withdraw(self, ticket: Ticket) -> None:
        """Ask the scheduler to drop the waiting samples of a request; the others are answered as usual."""
        for slot in ticket.slots:
            if ticket.model.tickets[slot] is ticket:
                self._cancelled += (ticket.model.number, slot, ticket.deadline_ns)
        if not self._flushing:
            self._flush_soon()

    def _flush_soon(self) -> None:
        self._flushing = True
        asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        rows = {Kind.SUBMIT: self._submitted, Kind.CANCEL: self._cancelled}
        self._submitted, self._cancelled = [], []
        channel = self._channel
        if channel is None:
            return  # all pending requests have got their outcome
        if self.recording is not None:
            self.recording.rows_of_flush(self._number, rows[Kind.SUBMIT])
        with contextlib.suppress(Closed):  # the reader notices it, too
            for kind, cells in rows.items():
                for place in range(0, len(cells), MOST_CELLS - 3):
                    channel.send(np.array([kind, *cells[place : place + MOST_CELLS - 3]], np.int64))
            self._watch_room(channel)

    def _watch_room(self, channel: MessageChannel) -> None:
        loop = asyncio.get_running_loop()
        if channel.is_waiting:
            loop.add_writer(channel.fileno(), self._write_more, channel)

    def _write_more(self, channel: MessageChannel) -> None:
        with contextlib.suppress(Closed):
            channel.flush()
        if not channel.is_waiting:
            asyncio.get_running_loop().remove_writer(channel.fileno())

    def _receive(self, closed: asyncio.Future[None]) -> None:
        channel = self._channel
        if channel is None or closed.done():
            return
        is_telling = bool(self._known)
        try:
            for kind, content in channel.receive():
                if kind == Kind.ANSWER:
                    number, fate, end, *slots = content.tolist()
                    model = self._by_number.get(number)
                    if model is not None:
                        self._known.append(_Known(model, slots, fate, end))
                elif kind == Kind.TEXT:
                    self._tell_all()
                    self._learn(content)
        except Closed:
            closed.set_result(None)
        except ServingError as error:
            closed.set_exception(error)
        if not is_telling:
            self._tell_some()

    def _tell_some(self) -> None:
        """Answer some requests with a known outcome; then the event loop reads new requests, and continues here."""
        left = _AT_ONCE
        while self._known and left > 0:
            left -= self._tell_of_batch(left)
        if self._known:
            asyncio.get_running_loop().call_soon(self._tell_some)

    def _tell_all(self) -> None:
        """Answer all requests with a known outcome."""
        while self._known:
            self._tell_of_batch(MOST_CELLS)

    def _tell_of_batch(self, most: int) -> int:
        """Answer up to ``most`` requests of the first batch; return their number."""
        known = self._known[0]
        model = known.model
        part = known.slots[known.num_told : known.num_told + most]
        known.num_told += len(part)
        first, last = model.tickets[part[0]], model.tickets[part[-1]]
        begin = time.monotonic_ns()
        self._settle(model, part, known.fate)
        now = time.monotonic_ns()
        if known.num_told == len(known.slots):
            self._known.popleft()
        # Samples that were not computed, or failed, are answered first, and are not a measure of lateness.
        if known.end and known.fate == _DONE and first is not None and last is not None:
            early = known.lateness(first.deadline_ns, begin + (now - begin) // len(part))
            self._note_late(max(early, known.lateness(last.deadline_ns, now)))
        return len(part)

    def _note_late(self, late: int) -> None:
        """Record how late answers are, and send many such samples to the scheduler at once."""
        self._late.append(late)
        channel = self._channel
        if channel is not None and len(self._late) >= _MANY:
            told, self._late = self._late, []
            with contextlib.suppress(Closed):  # the reader notices it, too
                channel.send(np.array([Kind.LATE, *told], np.int64))
                self._watch_room(channel)

    def _settle(self, model: ModelFacts, slots: list[int], fate: int) -> None:
        """Answer requests whose last sample this was; return the slots of cancelled ones."""
        tickets, is_done = model.tickets, fate == _DONE
        lost: list[Ticket] = []
        for slot in slots:
            ticket = tickets[slot]
            if ticket is None:
                continue
            tickets[slot] = None
            ticket.left -= 1
            if not is_done and ticket.fate is _DONE:
                ticket.fate = Fate(fate)
                lost.append(ticket)
            if ticket.left == 0:
                if ticket.reply is None:
                    self.release(ticket)
                else:
                    ticket.reply(ticket)
        for ticket in lost:
            # The remaining samples would be computed in vain.
            if ticket.left and ticket.reply is not None:
                self._withdraw(ticket)

    def _learn(self, document: dict[str, Any]) -> None:
        """Take the scheduler's list of all models."""
        self._number = document["channel"]
        facts = {item["number"]: item for item in document["models"]}
        for number in [number for number in self._by_number if number not in facts]:
            self._by_number.pop(number).slab.remove()
        staying = sorted(number for number, item in facts.items() if not item["leaving"])
        for number in staying:
            if number not in self._by_number:
                self._by_number[number] = ModelFacts(
                    facts[number], self._folder, document["epoch"], document["channel"], self._tensor_bytes
                )
        self.models = {self._by_number[number].name: self._by_number[number] for number in staying}
        self.is_ready = bool(document["ready"])
        # After the last request that a leaving model gets from here.
        self._flush()
        if self._channel is not None:
            self._channel.send_text({"known": document["generation"]})
            self._watch_room(self._channel)
        if self.changed is not None:
            self.changed()

    def _disconnect(self) -> None:
        """Handle the loss of the scheduler: all submitted requests are lost."""
        self._tell_all()
        self.is_ready = False
        if self._channel is not None:
            self._channel.close()
        self._channel = None
        models, self._by_number, self.models = self._by_number, {}, {}
        self._submitted, self._cancelled, self._late = [], [], []
        for model in models.values():
            model.slab.remove()
            self._settle(model, [slot for slot, ticket in enumerate(model.tickets) if ticket is not None], Fate.LOST)
        if models and self.changed is not None:
            self.changed()
