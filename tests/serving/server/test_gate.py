"""A front's gate, and what happens to it when a scheduler or the system lets it down."""

import asyncio
import contextlib
import resource
import socket

import numpy as np
import pytest

from meshwright.serving.server import channel, front_process
from meshwright.serving.server.channel import Channel, Kind, connect, listen
from meshwright.serving.server.gate import Fate, Gate, Ticket
from meshwright.spec import Server, ServingError
from tests.serving.server.fakes import facts


class Scheduled:
    """A gate, and the scheduler's end of its connection."""

    def __init__(self, folder, model):
        self.gate, self.model, self.told = Gate(folder, 2**16), model, []
        self.connect()

    def connect(self):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.gate._channel, self.scheduler = Channel(ours), Channel(theirs)
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
        assert 0 < told[0] < 45
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
            assert max(np.diff(told)) < 45
            it.gate._disconnect()
        assert [ticket.slots for ticket in it.told] == [[slot] for slot in range(100)]
        it.scheduler.close()

    asyncio.run(main())


def test_a_front_that_cannot_have_its_memory_fails_so_that_another_one_is_started(tmp_path):
    async def main():
        gate = Gate(tmp_path, 2**16)
        with listen(tmp_path / "scheduler.sock") as listener:
            connecting = asyncio.create_task(gate.keep_connected())
            while True:
                await asyncio.sleep(0.01)
                with contextlib.suppress(BlockingIOError):
                    scheduler = Channel(listener.accept()[0])
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
