"""The scheduler among fronts and workers that come and go: every request has one answer, and no other."""

import asyncio
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict

import numpy as np
import pytest

from meshwright.serving.policies.pool import GUARD, NUM_QUEUED
from meshwright.serving.server.channel import Closed, Kind, connect
from meshwright.serving.server.gate import Fate, Gate
from meshwright.serving.server.scheduler import Scheduler
from meshwright.serving.server.served import served_models, write_models
from meshwright.serving.server.slabs import Slab, slab_path
from meshwright.spec import Deployment, Latency, ServedModel, TensorSpec
from meshwright.spec.units import Seconds

SPECS = {"inputs": (TensorSpec(name="x", shape=(2,)),), "outputs": (TensorSpec(name="y", shape=(2,)),)}
LIMIT_S = 30.0


def deployment(devices=1, policy="eager", slo=5.0, largest=64):
    model = ServedModel(
        name="m", slo=Seconds(slo), latency=Latency(alpha=Seconds(1e-6), beta=Seconds(1e-4), largest=largest), **SPECS
    )
    return Deployment(models=(model,), devices=devices, policy=policy)


@contextmanager
def scheduling(folder, given):
    write_models(served_models(given), folder)
    scheduler, stop = Scheduler(folder, given), threading.Event()

    def turn():
        while not stop.is_set():
            scheduler.turn()

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield scheduler
    finally:
        stop.set()
        thread.join(LIMIT_S)
        scheduler.close()
        assert not thread.is_alive()


MADE = []


def loaded(number):
    tensors = {key: [asdict(tensor) for tensor in tensors] for key, tensors in SPECS.items()}
    return {"number": number, **tensors, "platform": "fake", "largest": 64, "points": []}


class FakeWorker:
    """A worker that computes y = 2 x when the test lets it; pings it answers at once."""

    def __init__(self, folder, device, held=(0,)):
        MADE.append(self)
        self.folder = folder
        self.channel = connect(folder / "scheduler.sock")
        self.channel.send_text({"worker": device, "pid": 0, "models": [loaded(number) for number in held]})
        self.epoch, self.given, self.asked, self.forgotten = None, [], [], []

    def look(self):
        for kind, content in self.channel.receive():
            if kind == Kind.TEXT:
                self.epoch = content.get("epoch", self.epoch)
                self.asked += [item["number"] for item in content.get("load", [])]
                self.forgotten += content.get("forget", [])
            elif content[0] < 0:
                now = time.monotonic_ns()
                self.channel.send(np.array([Kind.RAN, content[0], now, now, 0, content[2]], np.int64))
            else:
                self.given.append(content.copy())

    def compute(self, late=(), failed=()):
        cells = self.given.pop(0)
        requests, places = cells[4 : 4 + cells[3]], np.arange(cells[3])
        done = ~np.isin(places, [*late, *failed])
        for request in requests[done].tolist():
            slab = Slab(slab_path(self.folder, self.epoch, request >> 32, int(cells[1])), *SPECS.values(), 0)
            slab.outputs[0][request & 0xFFFFFFFF] = 2 * slab.inputs[0][request & 0xFFFFFFFF]
        now = time.monotonic_ns()
        self.channel.send(np.array([Kind.RAN, cells[0], now, now, len(late), *late, *failed], np.int64))


@pytest.fixture(autouse=True)
def no_worker_stays():
    yield
    while MADE:
        MADE.pop().channel.close()


class Client:
    """A gate, and the fates that it was told, with what stood in the slots then."""

    def __init__(self, folder, scheduler=None):
        self.gate, self.scheduler = Gate(folder, 2**16), scheduler
        self.told = {}

    def num_queued(self):
        """How many samples wait in the scheduler's queues."""
        return int(self.scheduler._live.pool[NUM_QUEUED])

    def ask(self, number, timeout_s=5.0, count=1):
        model = self.gate.models["m"]
        slots = self.gate.reserve(model, count)
        for slot in slots:
            model.slab.inputs[0][slot] = number
        deadline = time.monotonic_ns() + round(timeout_s * 1e9)
        return self.gate.submit(model, slots, deadline, lambda ticket: self.hear(number, ticket))

    def hear(self, number, ticket):
        assert number not in self.told
        self.told[number] = (ticket.fate, ticket.model.slab.outputs[0][ticket.slots].tolist())
        self.gate.release(ticket)


async def until(condition, *workers):
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        for worker in workers:
            worker.look()
        await asyncio.sleep(0.002)


def run_with(folder, given, scenario):
    async def main(scheduler):
        client = Client(folder, scheduler)
        connecting = asyncio.create_task(client.gate.keep_connected())
        try:
            await scenario(client)
        finally:
            connecting.cancel()

    with scheduling(folder, given) as scheduler:
        asyncio.run(main(scheduler))


def scheduled(**given):
    """Make a test of a scenario (client, folder) beside a scheduler for such a `deployment`."""

    def make_test(scenario):
        def test(tmp_path):
            run_with(tmp_path, deployment(**given), lambda client: scenario(client, tmp_path))

        test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
        return test

    return make_test


async def answer_all(client, worker, number):
    """Let a worker compute until so many requests have been answered; returns the sizes of its batches."""
    sizes = []
    while len(client.told) < number:
        await until(lambda: worker.given or len(client.told) == number, worker)
        if worker.given:
            sizes.append(worker.given[0][3])
            worker.compute()
    return sizes


async def ready_worker(client, folder):
    worker = FakeWorker(folder, 0)
    await until(lambda: client.gate.is_ready, worker)
    return worker


@scheduled()
async def test_requests_are_answered_with_what_their_own_slots_hold(client, tmp_path):
    worker = await ready_worker(client, tmp_path)
    for number in range(40):
        client.ask(number)
    client.ask(40, count=3)
    await answer_all(client, worker, 41)
    assert all(client.told[number] == (Fate.DONE, [[2 * number] * 2]) for number in range(40))
    assert client.told[40] == (Fate.DONE, [[80, 80]] * 3)
    assert sorted(client.gate.models["m"].idle) == list(range(512))


@pytest.mark.parametrize(("slo", "guard_ns"), [(5.0, 1_000_000), (0.0021, 499_750)])
def test_before_timers_have_fired_some_time_is_left_before_them(tmp_path, slo, guard_ns):
    """As far as the tightest request has it: a quarter of what is left beside its computation of 0.101 ms."""

    async def scenario(client):
        await ready_worker(client, tmp_path)
        assert client.scheduler._live.pool[GUARD] >= guard_ns  # more if one was late already

    run_with(tmp_path, deployment(slo=slo), scenario)


@scheduled(devices=2)
async def test_what_a_lost_worker_had_is_done_by_another(client, tmp_path):
    first, second = FakeWorker(tmp_path, 0), FakeWorker(tmp_path, 1)
    await until(lambda: client.gate.is_ready and first.epoch and second.epoch, first, second)
    for number in range(10):
        client.ask(number)
        await asyncio.sleep(0.01)
    await until(lambda: first.given and second.given, first, second)
    first.channel.close()
    await answer_all(client, second, 10)
    assert client.told == {number: (Fate.DONE, [[2 * number] * 2]) for number in range(10)}


@scheduled()
async def test_a_request_that_loses_two_workers_has_failed(client, tmp_path):
    first = FakeWorker(tmp_path, 0)
    await until(lambda: client.gate.is_ready, first)
    client.ask(1)
    await until(lambda: first.given, first)
    first.channel.close()
    await until(lambda: not client.gate.is_ready)
    second = FakeWorker(tmp_path, 0)
    await until(lambda: second.given, second)
    second.channel.close()
    await until(lambda: client.told)
    assert client.told[1][0] == Fate.FAILED


@scheduled()
async def test_what_cannot_be_in_time_is_refused_and_what_was_late_or_failed_is_told(client, tmp_path):
    worker = await ready_worker(client, tmp_path)
    client.ask(0, timeout_s=0.0)
    await until(lambda: client.told, worker)
    assert client.told[0][0] == Fate.LATE
    assert not worker.given
    client.ask(1)
    await until(lambda: worker.given, worker)
    for number in (2, 3, 4):
        client.ask(number)
    await until(lambda: client.num_queued() == 3)
    worker.compute()
    await until(lambda: worker.given, worker)
    worker.compute(late=[0], failed=[2])
    await until(lambda: len(client.told) == 5)
    assert [client.told[number][0] for number in range(5)] == [
        Fate.LATE,
        Fate.DONE,
        Fate.LATE,
        Fate.DONE,
        Fate.FAILED,
    ]


@scheduled()
async def test_a_cancelled_request_is_not_computed_and_gives_its_slot_back(client, tmp_path):
    worker = await ready_worker(client, tmp_path)
    client.ask(0)
    await until(lambda: worker.given, worker)
    ticket = client.ask(1)
    client.ask(2)
    await until(lambda: client.num_queued() == 2)
    client.gate.cancel(ticket)
    client.gate.cancel(ticket)
    await until(lambda: len(client.gate.models["m"].idle) == 510)
    worker.compute()
    await until(lambda: worker.given, worker)
    assert worker.given[0][3] == 1
    worker.compute()
    await until(lambda: len(client.told) == 2)
    assert client.told.keys() == {0, 2}
    assert len(client.gate.models["m"].idle) == 512


@scheduled(largest=2)
async def test_what_is_left_of_a_request_that_is_lost_is_not_computed(client, tmp_path):
    """The first of its samples fails alone, when a batch of two has been decided and two wait."""
    worker = await ready_worker(client, tmp_path)
    client.ask(0, count=5)
    await until(lambda: worker.given, worker)
    client.ask(1, count=2)
    await until(lambda: client.num_queued() == 6)
    assert worker.given[0][3] == 1
    worker.compute(failed=[0])
    await until(lambda: worker.given, worker)
    await until(lambda: client.num_queued() == 2)
    assert not client.told
    assert sum(await answer_all(client, worker, 2)) == 2 + 2
    assert client.told[0][0] == Fate.FAILED
    assert client.told[1] == (Fate.DONE, [[2, 2]] * 2)
    idle = client.gate.models["m"].idle
    assert len(set(idle)) == len(idle) == 512


@scheduled()
async def test_a_front_that_has_gone_takes_its_requests_with_it(client, tmp_path):
    other = Client(tmp_path)
    connecting = asyncio.create_task(other.gate.keep_connected())
    worker = FakeWorker(tmp_path, 0)
    await until(lambda: client.gate.is_ready and other.gate.is_ready, worker)
    other.ask(0)
    await until(lambda: worker.given, worker)
    other.ask(1)
    client.ask(2)
    await until(lambda: client.num_queued() == 2)
    paths = [client.gate.models["m"].slab.path, other.gate.models["m"].slab.path]
    connecting.cancel()
    await until(lambda: not paths[1].exists() and client.num_queued() == 1)
    worker.given[0][3] = 0  # whoever asked has gone, with its memory
    worker.compute()
    await until(lambda: worker.given, worker)
    assert worker.given[0][3] == 1
    worker.compute()
    await until(lambda: client.told)
    assert client.told == {2: (Fate.DONE, [[4, 4]])}
    assert paths[0].exists()
    assert other.told[1][0] == Fate.LOST


def test_without_a_scheduler_requests_are_lost_and_a_new_one_is_found(tmp_path):
    async def main():
        client = Client(tmp_path)
        connecting = asyncio.create_task(client.gate.keep_connected())
        with scheduling(tmp_path, deployment()):
            worker = await ready_worker(client, tmp_path)
            client.ask(0)
            before = client.gate.models["m"].slab.path
            await until(lambda: worker.given, worker)
        await until(lambda: client.told)
        assert client.told[0][0] == Fate.LOST
        assert not client.gate.is_ready
        assert not before.exists()
        with pytest.raises(Closed):
            await until(lambda: False, worker)
        with scheduling(tmp_path, deployment()):
            worker = await ready_worker(client, tmp_path)
            client.ask(1)
            await until(lambda: worker.given, worker)
            worker.compute()
            await until(lambda: len(client.told) == 2)
            assert client.told[1] == (Fate.DONE, [[2, 2]])
            assert client.gate.models["m"].slab.path != before
        connecting.cancel()

    asyncio.run(main())
