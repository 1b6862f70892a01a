"""A front's gate, and what happens to it when a scheduler or the system lets it down."""

import asyncio
import contextlib
import errno
import os
import resource
import socket
import subprocess
import tracemalloc

import numpy as np
import pytest

from meshwright.serving.server import channel, front_process
from meshwright.serving.server.channel import Kind, MessageChannel, connect, listen
from meshwright.serving.server.gate import Fate, Gate, ModelFacts, Ticket
from meshwright.spec import Server, ServingError
from tests.serving.server.fakes import facts


class Scheduled:
    """A gate, and the scheduler's end of its connection."""

    def __init__(self, folder, model):
        self.gate, self.model, self.told = Gate(folder, 2**16), model, []
        self.connect()

    def connect(self):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.gate._channel, self.scheduler = MessageChannel(ours), MessageChannel(theirs)
        self.gate._by_number = {0: self.model}

    def answer(self, count):
        for slot in range(count):
            self.model.tickets[slot] = Ticket(self.model, [slot], 10**15, self.told.append)
            self.scheduler.send(np.array([Kind.ANSWER, 0, Fate.DONE, 1, slot], np.int64))

    def receive(self):
        closed = asyncio.get_running_loop().create_future()
        self.gate._receive(closed)
        return closed.done()


def test_what_a_scheduler_answered_before_it_died_is_told_and_the_next_one_hears_how_late_batches_are(tmp_path):
    async def main():
        it = Scheduled(tmp_path, facts(tmp_path))
        it.answer(40)
        it.scheduler.close()
        assert it.receive()
        it.gate._disconnect()
        assert [ticket.fate for ticket in it.told] == [Fate.DONE] * 40
        it.connect()
        for _ in range(4):
            it.answer(30)
            assert not it.receive()
            await asyncio.sleep(0.01)
        late = [cells for kind, cells in it.scheduler.receive() if kind == Kind.LATE]
        assert [len(cells) for cells in late] == [32] * 3
        it.gate._disconnect()
        it.scheduler.close()

    asyncio.run(main())


@pytest.mark.parametrize("ends", ["with the next one", "with its scheduler", "when all is told"])
def test_what_has_come_is_read_between_the_answers_of_a_large_batch(tmp_path, ends):
    async def main():
        it = Scheduled(tmp_path, facts(tmp_path))
        for slot in range(100):
            it.model.tickets[slot] = Ticket(it.model, [slot], 10**15 - slot, it.told.append)
        it.scheduler.send(np.array([Kind.ANSWER, 0, Fate.DONE, 1, *range(90)], np.int64))
        assert not it.receive()
        told = [len(it.told)]
        assert 0 < told[0] < 90
        if ends == "with its scheduler":
            it.gate._disconnect()
            assert len(it.told) == 100
            assert [ticket.fate for ticket in it.told] == [Fate.DONE] * 90 + [Fate.LOST] * 10
        else:
            if ends == "with the next one":
                it.scheduler.send(np.array([Kind.ANSWER, 0, Fate.LATE, 0, *range(90, 100)], np.int64))
                assert not it.receive()
            while len(it.told) < (100 if ends == "with the next one" else 90):
                await asyncio.sleep(0)
                told.append(len(it.told))
            assert max(np.diff(told)) < 90
            it.gate._disconnect()
        assert [ticket.slots for ticket in it.told] == [[slot] for slot in range(100)]
        it.scheduler.close()

    asyncio.run(main())


def test_what_was_forgotten_is_told_and_its_slots_wait_for_the_scheduler(tmp_path):
    async def main():
        it = Scheduled(tmp_path, facts(tmp_path))
        gate, model = it.gate, it.model
        late, timely = (
            gate.submit(model, gate.reserve(model, count), deadline, it.told.append)
            for count, deadline in ((3, 1000), (1, 1001))
        )
        slots = list(late.slots)
        for place in (1, 2, 3):
            gate.give_up_forgotten(1000, place, 4)
        assert not it.told
        for _ in range(2):
            gate.give_up_forgotten(1000, 0, 4)
            await asyncio.sleep(0)
        assert [ticket.fate for ticket in it.told] == [Fate.FORGOTTEN]
        gate.release(it.told[0])
        assert not set(slots) & set(model.idle)
        cancelled = [cells.reshape(-1, 3).tolist() for kind, cells in it.scheduler.receive() if kind == Kind.CANCEL]
        assert cancelled == [[[0, slot, 1000] for slot in slots]]
        it.scheduler.send(np.array([Kind.ANSWER, 0, Fate.CANCELLED, 0, *slots], np.int64))
        it.receive()
        assert len(it.told) == 1
        assert sorted(model.idle) == sorted(set(range(len(model.tickets))) - set(timely.slots))
        it.gate._disconnect()
        it.scheduler.close()
        assert it.told == [it.told[0], timely]

    asyncio.run(main())


def test_a_front_that_cannot_have_its_memory_fails_so_that_another_one_is_started(tmp_path):
    async def main():
        gate = Gate(tmp_path, 2**16)
        with listen(tmp_path / "scheduler.sock") as listener:
            connecting = asyncio.create_task(gate.keep_connected())
            while True:
                await asyncio.sleep(0.01)
                with contextlib.suppress(BlockingIOError):
                    scheduler = MessageChannel(listener.accept()[0])
                    break
            gate._folder = tmp_path / "gone"  # where no slab can be made
            model = {"number": 0, "name": "m", "version": "1", "platform": "", "slo_ns": 1, "most": 1, "inputs": []}
            scheduler.send_text(
                {
                    "channel": 1,
                    "epoch": 0,
                    "generation": 1,
                    "ready": True,
                    "models": [model | {"outputs": [], "leaving": False}],
                }
            )
            with pytest.raises(ServingError):
                await asyncio.wait_for(connecting, 10)
            scheduler.close()
        assert not gate.is_ready

    asyncio.run(main())


def lazy(folder, slots, slot_bytes=128, number=0):
    """A model whose slots are made as they are needed."""
    document = {"number": number, "name": "m", "version": "1", "platform": "", "slo_ns": 1, "most": 1, "outputs": []}
    inputs = [{"name": "x", "datatype": "UINT8", "shape": [slot_bytes]}]
    return ModelFacts({**document, "inputs": inputs}, folder, 0, 0, slots * slot_bytes)


def allocated_bytes(model):
    return model.slab.path.stat().st_blocks * 512


def test_a_model_that_nobody_asks_takes_next_to_no_memory(tmp_path):
    lazy(tmp_path, 2**16, number=500)
    tracemalloc.start()
    models = [lazy(tmp_path, 2**16, number=number) for number in range(20)]
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size < 20 * 10_000
    assert sum(map(allocated_bytes, models)) == 0


@pytest.mark.parametrize("count", [1, 7, 1000])
def test_slots_are_made_as_they_are_needed_and_have_memory_then(tmp_path, count):
    gate, model = Gate(tmp_path, 0), lazy(tmp_path, 3000)
    taken = []
    while (slots := gate.reserve(model, count)) is not None:
        taken.append(slots)
        assert len(slots) == count
        assert allocated_bytes(model) >= 128 * (1 + max(map(max, taken)))
    numbers = [slot for slots in taken for slot in slots]
    assert len(set(numbers)) == len(numbers) == 3000 // count * count
    assert set(numbers) <= set(range(3000))
    # The last that was used is the first to be used again.
    model.idle += taken[-1]
    assert gate.reserve(model, count) == taken[-1]
    model.idle += taken[0]
    assert gate.reserve(model, count) == taken[0]


def test_few_requests_at_a_time_use_the_same_slots(tmp_path):
    gate, model = Gate(tmp_path, 0), lazy(tmp_path, 2**16)
    for _ in range(5000):
        slots = gate.reserve(model, 3)
        model.idle += slots
    assert allocated_bytes(model) <= 2**17


def test_where_shared_memory_is_full_there_is_no_room_until_there_is(tmp_path, monkeypatch):
    gate, model = Gate(tmp_path, 0), lazy(tmp_path, 100, slot_bytes=2**16)
    first = gate.reserve(model, 2)

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", fail)
        assert gate.reserve(model, 1) is None
        model.idle += first
        assert gate.reserve(model, 3) is None
        assert gate.reserve(model, 2) == first
    assert gate.reserve(model, 98) is not None
    assert gate.reserve(model, 1) is None


@pytest.mark.root
def test_a_small_file_system_is_filled_without_harm(tmp_path):
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mount is not allowed here")
    try:
        gate, model = Gate(tmp_path, 0), lazy(tmp_path, 4096, slot_bytes=1024)
        while (slots := gate.reserve(model, 3)) is not None:
            model.slab.inputs[0][slots] = 7
        assert 900 < len(model.tickets) <= 1024
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_where_no_file_can_be_opened_there_is_no_connection(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(channel.socket, "socket", fail)
    assert connect(tmp_path / "scheduler.sock") is None


@pytest.mark.parametrize(
    ("hard", "soft", "connections", "raised"),
    [
        (resource.RLIM_INFINITY, 1024, 16_384, 16_384 + 2048 + 1024),
        (100_000, 50_000, 16_384, None),
        (10_240, 1024, 8192, 10_240),
        (1024, 1024, 227, None),
    ],
)
def test_there_are_no_more_connections_than_files(monkeypatch, capsys, hard, soft, connections, raised):
    wanted = []
    monkeypatch.setattr(front_process.resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(front_process.resource, "setrlimit", lambda _, limits: wanted.append(limits[0]))
    settings = front_process._open_enough(Server())
    assert settings.connections == connections
    assert wanted == ([] if raised is None else [raised])
    assert ("limited" in capsys.readouterr().out) == (connections < 16_384)
