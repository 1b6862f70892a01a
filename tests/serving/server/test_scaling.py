"""A server starts workers when more arrives, and hands them back when less does; no request is lost by that."""

import asyncio
import json
import tomllib

import numpy as np
import pytest

from meshwright.serving.server.fleet import DeviceFleet
from meshwright.serving.server.replay import replay_log
from meshwright.spec import Deployment, decode_document
from tests.serving.server.servers import EMULATED, Load, ask_once, infer, is_alive, serving

# A device answers some 100 requests a second in batches of one.
SLOW = EMULATED.replace('alpha = "20 us", beta = "1 ms", largest = 64', 'alpha = "10 ms", beta = "1 us", largest = 1')
SCALED = SLOW.replace("devices = 2", "devices = 3").replace('slo = "5 s"', 'slo = "1 s"')
SCALED += '\n[scaling]\nevery = "100 ms"\ncalm = "1 s"\n'
# Whatever arrives, no worker is handed back while a test runs.
KEPT = SCALED.replace('calm = "1 s"', 'calm = "10 min"')


def workers(server):
    return {name: pid for name, pid in server.pids().items() if name.startswith("worker-")}


async def rise_and_fall(server):
    load = Load(server, connections=40)
    loading = asyncio.create_task(load.run(seconds=80))
    await asyncio.to_thread(server.wait_for, lambda status: status["up"] > 1 and load.counts.get(200, 0) > 100)
    held = workers(server)
    load.stop()
    await loading
    return load, held


@pytest.mark.long
def test_workers_come_with_the_load_and_go_after_it(tmp_path):
    log = tmp_path / "log"
    with serving(tmp_path, SCALED, "--policy", "adaptive", "--log", str(log)) as server:
        assert list(workers(server)) == ["worker-0"]
        load, held = asyncio.run(asyncio.wait_for(rise_and_fall(server), 90))
        assert not load.wrong
        assert load.counts[200] > 100
        assert set(load.counts) <= {200, 503}
        assert len(held) > 1
        server.wait_for(lambda status: status["up"] == 1)
        server.wait_for(lambda _: len(workers(server)) == 1)
        (left,) = workers(server).values()
        assert not [pid for pid in held.values() if pid != left and is_alive(pid)]
        assert "is started, because the load grows" in server.text
        assert "is handed back, because the load falls" in server.text
        assert "it is started again" not in server.text
        assert ask_once(server, infer([(1, 2, 3)])[0])[0] == 200
        assert server.end() == 0
    events, decisions = replay_log(log)
    assert events > 100
    assert decisions > 100


@pytest.mark.long
def test_a_scheduler_that_is_started_again_keeps_the_workers_that_there_are(tmp_path):
    with serving(tmp_path, KEPT, "--policy", "eager") as server:

        async def scenario():
            load = Load(server, connections=40)
            loading = asyncio.create_task(load.run(seconds=60))
            await asyncio.to_thread(server.wait_for, lambda status: status["up"] > 1)
            held = workers(server)
            killed = server.kill("scheduler")
            await asyncio.to_thread(server.wait_without, killed, condition=lambda status: status["up"] > 1)
            assert workers(server).items() >= held.items()
            # What fails is not handed back.
            killed = server.kill("worker-1")
            await asyncio.to_thread(server.wait_for_another, "worker-1", killed)
            load.stop()
            await loading
            assert not load.wrong

        asyncio.run(asyncio.wait_for(scenario(), 120))


def reported(capsys):
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line]
    return [(line["kind"], line["device"]) for line in lines]


def test_a_fleet_hires_and_hands_back(capsys):
    given = decode_document(Deployment, tomllib.loads(SCALED), "scaled")
    fleet = DeviceFleet(given)
    # The supervisor of a scheduler before this one may have kept others.
    assert reported(capsys) == [("hire", 0)]
    fleet.meet(2)
    assert reported(capsys) == [("hire", 2)]
    assert fleet.wanted == 2
    fleet.wanted = 1
    pool = np.zeros(0, np.int64)
    assert fleet.step({0}, pool) is None
    assert reported(capsys) == [("release", 2)]
    # It had started, and comes before it hears that it is not wanted.
    fleet.meet(2)
    assert (fleet.hired, reported(capsys)) == ({0}, [])
    fleet.wanted = 3
    fleet.step({0}, pool)
    assert fleet.hired == {0, 1, 2}
    fleet.meet(2)
    assert reported(capsys) == [("hire", 1), ("hire", 2)]


@pytest.mark.long
def test_nexus_plans_for_all_devices(tmp_path):
    with serving(tmp_path, SCALED, "--policy", "nexus", is_ready=False) as server:
        assert server.process.wait(60) == 1
        server.reading.join(10)
        assert "nexus plans for all devices" in server.text
