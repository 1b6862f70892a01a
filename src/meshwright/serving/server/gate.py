"""The gate of a front: requests go through it to the scheduler, and come back with their fate.

A front reserves slots for a request's samples (`Gate.reserve`), writes its tensors into the model's slab, and submits
it with a deadline (`Gate.submit`); a request of several samples is answered when all of them are. What it is told then,
in ``reply``, is the `Fate`. The slots are its own until it gives them back (`Gate.release`). Requests and cancellations
of one turn of the event loop travel in one message.

A gate connects to the scheduler, and connects again when that was started anew; requests that it had then are `LOST`.
Slabs are made for each connection, so that a worker of former times cannot write to what is used now.
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
# Slots of a model that a front makes at most; memory bounds it before, if samples are not tiny.
_MOST_SLOTS = 2**16
# Answers that are given before requests that have come meanwhile are read: those count from when they are. With less,
# batches of tiny models are smaller, and cost more.
_AT_ONCE = 64
# Of so many times so many answers, the scheduler is told together how late they were.
_MANY = 32
# Memory that slots take at a time when there are none left.
_GROWTH_BYTES = 2**16


class Fate(enum.IntEnum):
    """What became of a request. Those up to ``CANCELLED`` are reasons of a policy for dropping it."""

    LATE, FULL, CROWDED, SACRIFICED, CANCELLED = LATE, FULL, CROWDED, SACRIFICED, CANCELLED
    DONE = 16
    FAILED = 17
    LOST = 18
    FORGOTTEN = 19


_DONE = Fate.DONE


class ModelFacts:
    """What a front knows of a model: how it is called, what it takes and gives (of one sample), and where that lies."""

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
        # Of slots that there is memory for (`grow`); those that were used last are used first, so that it stays small.
        self.idle: list[int] = []
        self.tickets: list[Ticket | None] = []

    def grow(self, least: int) -> bool:
        """Have so many more slots, or some more than that; False if there is no room for them."""
        first, slots = len(self.tickets), len(self.slab)
        count = min(max(least, _GROWTH_BYTES // self.slab.slots.itemsize), slots - first)
        if count < least or not self.slab.allocate(first, count):
            return False
        self.idle[:0] = range(first + count - 1, first - 1, -1)
        self.tickets += [None] * count
        return True


class Ticket:
    """A request that is under way: its slots, what became of it, and whom to tell."""

    __slots__ = ("deadline_ns", "fate", "left", "model", "reply", "slots")

    def __init__(
        self, model: ModelFacts, slots: list[int], deadline_ns: int, reply: Callable[[Ticket], None] | None
    ) -> None:
        self.model, self.slots, self.deadline_ns, self.reply = model, slots, deadline_ns, reply
        self.left = len(slots)
        self.fate = _DONE


class _Known:
    """Requests whose fate is known, of which some have been told so; ``end`` is that of their batch, 0 without one.

    The batch is planned for the deadline of the first one, ``first_due``.
    """

    __slots__ = ("end", "fate", "first_due", "model", "num_told", "slots")

    def __init__(self, model: ModelFacts, slots: list[int], fate: int, end: int) -> None:
        self.model, self.slots, self.fate, self.end = model, slots, fate, end
        self.num_told = self.first_due = 0

    def lateness(self, due: int, now: int) -> int:
        """How long after the end a request is answered now; it may be as much later as it is due after the first."""
        self.first_due = self.first_due or due
        return now - (due - self.first_due) - self.end


class Gate:
    """See the module's docstring. ``models`` has those that can be asked, by name; the newest version of each.

    ``changed`` is called when others are there, or none.
    """

    def __init__(self, folder: Path, tensor_bytes: int) -> None:
        self.changed: Callable[[], None] | None = None
        self.models: dict[str, ModelFacts] = {}
        self.is_ready = False
        self.recording: Recording | None = None
        self._folder, self._tensor_bytes = folder, tensor_bytes
        self._channel: MessageChannel | None = None
        self._number = 0  # of the connection, as the scheduler counts
        self._by_number: dict[int, ModelFacts] = {}
        self._submitted: list[int] = []
        self._cancelled: list[int] = []
        self._late: list[int] = []
        self._flushing = False
        self._known: deque[_Known] = deque()

    async def keep_connected(self) -> None:
        """Connect to the scheduler, again and again; never returns.

        Raises what is wrong where models cannot be asked, as their slabs cannot be made.
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
        """Slots for so many samples; None if there is no room for them."""
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
        """Ask for an answer by a moment of `time.monotonic_ns`; ``reply`` is told, never before this returns.

        Requests of a lower ``level`` (`policies.ordering`) are more important.
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
        """Nobody wants the answer any more; ``reply`` is not told, and the slots are given back in time."""
        if ticket.reply is not None:
            ticket.reply = None
            self._withdraw(ticket)

    def give_up_forgotten(self, due_ns: int, place: int, step: int) -> None:
        """Tell those that were due by a moment that nothing was decided for them; of every ``step``-th model.

        Their slots are given back only when the scheduler has answered, as it may still have a worker write to them.
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
        """Give slots back, after the answer was read."""
        ticket.model.idle += ticket.slots

    def _withdraw(self, ticket: Ticket) -> None:
        """Have the scheduler drop what waits of a request; what has been decided already is answered as ever."""
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
            return  # all that was under way has been told so
        if self.recording is not None:
            self.recording.rows_of_flush(self._number, rows[Kind.SUBMIT])
        with contextlib.suppress(Closed):  # seen by the reader, too
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
        """Tell some of those whose fate is known; the loop reads what has come, and goes on."""
        left = _AT_ONCE
        while self._known and left > 0:
            left -= self._tell_of_batch(left)
        if self._known:
            asyncio.get_running_loop().call_soon(self._tell_some)

    def _tell_all(self) -> None:
        """Tell all whose fate is known."""
        while self._known:
            self._tell_of_batch(MOST_CELLS)

    def _tell_of_batch(self, most: int) -> int:
        """Tell so many requests of a batch what became of them; how many there were."""
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
        # What was not computed, or failed, is answered first, and tells nothing.
        if known.end and known.fate == _DONE and first is not None and last is not None:
            early = known.lateness(first.deadline_ns, begin + (now - begin) // len(part))
            self._note_late(max(early, known.lateness(last.deadline_ns, now)))
        return len(part)

    def _note_late(self, late: int) -> None:
        """The scheduler is told how late answers are, of many at once."""
        self._late.append(late)
        channel = self._channel
        if channel is not None and len(self._late) >= _MANY:
            told, self._late = self._late, []
            with contextlib.suppress(Closed):  # seen by the reader, too
                channel.send(np.array([Kind.LATE, *told], np.int64))
                self._watch_room(channel)

    def _settle(self, model: ModelFacts, slots: list[int], fate: int) -> None:
        """Requests whose last sample this was are told; slots that nobody waits for are given back."""
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
            # The rest would be computed for nobody.
            if ticket.left and ticket.reply is not None:
                self._withdraw(ticket)

    def _learn(self, document: dict[str, Any]) -> None:
        """The scheduler tells what models there are: all of them, each time."""
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
        # Behind the last request that a model which leaves gets from here.
        self._flush()
        if self._channel is not None:
            self._channel.send_text({"known": document["generation"]})
            self._watch_room(self._channel)
        if self.changed is not None:
            self.changed()

    def _disconnect(self) -> None:
        """The scheduler has gone: nothing is known any more of what was submitted, nor will it be."""
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
