"""A server of real processes under load, while its processes are killed; nothing is answered wrongly or not at all."""

import asyncio
import json
import os
import signal
import time

import numpy as np
import pytest

from tests.marks import left_to_ci
from tests.serving.server.fakes import get, post, until
from tests.serving.server.servers import (
    EMULATED,
    Load,
    ask,
    ask_once,
    begin,
    connect,
    infer,
    serving,
    wait_until_gone,
)

ALLOWED = {200, 503, "closed", "refused"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Two fronts and two workers; whoever kills something waits until it is there again."""
    with serving(tmp_path_factory.mktemp("server"), EMULATED, "--fronts", "2") as server:
        yield server
        assert server.end() == 0


def run(*parts, limit_s=60):
    async def main():
        return await asyncio.wait_for(asyncio.gather(*parts), limit_s)

    return asyncio.run(main())


def is_whole(status):
    return status["ready"] and status["up"] == 2 and len(status["processes"]) == 6


def check(load, allowed=ALLOWED):
    assert not load.wrong, load.wrong[:2]
    assert set(load.counts) <= allowed, (load.counts, load.sentences)
    assert load.counts[200]


def kill_at_once(server, *names):
    """Kill processes of which none does anything once another one has gone."""
    for name in names:
        server.kill(name, signal.SIGSTOP)
    return [server.kill(name) for name in names]


async def disturbed(load, disturb, before_s=0.5, after_s=1.0, condition=is_whole):
    """Load, something that happens meanwhile, and load until the server has been whole for a while.

    ``disturb`` says what it has killed.
    """
    running = asyncio.create_task(load.run())
    try:
        await asyncio.sleep(before_s)
        await until(lambda: load.counts.get(200))
        killed = await asyncio.to_thread(disturb)
        await asyncio.to_thread(load.server.wait_without, *killed, condition=condition)
        before = load.counts[200]
        await asyncio.sleep(after_s)
        await until(lambda: load.counts[200] > before)
    finally:
        load.stop()
        await running
    return killed


@pytest.mark.parametrize(("connections", "rows", "requests"), [(64, 1, 4000), (16, 7, 500), (1, 1, 50)])
def test_each_request_gets_its_own_answer(server, connections, rows, requests):
    load = Load(server, connections, rows)
    run(load.run(requests=requests))
    check(load, {200})
    assert load.counts[200] == requests


def test_json_and_binary_of_many_samples_at_once(server):
    async def one(place):
        client = await connect(server)
        values = np.arange(3 * 5, dtype=np.int64).reshape(5, 3) + 1000 * place
        head = {"inputs": [{"name": "x", "shape": [5, 3], "datatype": "INT64"}]}
        head["inputs"][0]["parameters"] = {"binary_data_size": values.nbytes}
        head["parameters"] = {"binary_data_output": True}
        for _ in range(10):
            text = json.dumps(head).encode()
            status, headers, body = await client.ask(
                post(text + values.tobytes(), headers=f"Inference-Header-Content-Length: {len(text)}\r\n")
            )
            assert status == 200, body
            length = int(headers["inference-header-content-length"])
            assert np.array_equal(np.frombuffer(body[length:], np.int64).reshape(5, 3), values)
            status, document = await ask(client, infer(values.tolist())[0])
            assert status == 200
            assert document["outputs"][0]["data"] == values.ravel().tolist()
        client.close()

    run(*(one(place) for place in range(20)))


def test_a_deadline_that_cannot_be_met_is_told_at_once(server):
    async def main():
        client = await connect(server)
        waited = []
        for place in range(20):
            asked = time.monotonic()
            status, document = await ask(client, infer([(place, 0, 0)], parameters={"timeout": 1})[0])
            waited.append(time.monotonic() - asked)
            assert status == 503, document
            assert "cannot be answered by its deadline" in document["error"]
        client.close()
        return waited

    before = server.wait_without(condition=is_whole)["models"][0]["num_batches"]
    # The machine may stall now and then.
    assert sorted(run(main())[0])[15] < 1.0
    assert server.wait_without(condition=is_whole)["models"][0]["num_batches"] == before


def test_many_requests_on_one_connection_are_answered_in_order(server):
    async def main():
        client = await connect(server)
        asked = [infer([(place, 5, -place)]) for place in range(300)]
        await client.send(b"".join(data for data, _ in asked))
        for _, expected in asked:
            status, _, body = await client.answer()
            assert status == 200
            assert json.loads(body)["outputs"][0]["data"] == expected
        client.close()

    run(main())


def test_a_worker_is_killed_under_load(server):
    load = Load(server, 48)
    (old,) = run(disturbed(load, lambda: [server.kill("worker-1")]))[0]
    check(load, {200, 503})
    assert server.pid("worker-1") != old
    # What was under way then.
    assert load.counts.get(503, 0) <= load.connections, (load.counts, load.sentences)


@pytest.mark.long
def test_all_workers_are_killed_at_once(server):
    load = Load(server, 48)
    run(disturbed(load, lambda: kill_at_once(server, "worker-0", "worker-1")))
    check(load, {200, 503})


@pytest.mark.long
def test_a_worker_that_is_stopped_for_a_while_goes_on(server):
    def disturb():
        pid = server.kill("worker-0", signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(pid, signal.SIGCONT)
        return []

    load = Load(server, 48)
    run(disturbed(load, disturb))
    check(load, {200, 503})


def test_a_front_is_killed_under_load_and_its_slabs_are_removed(server):
    load = Load(server, 48)
    run(disturbed(load, lambda: [server.kill("front-0")]))
    check(load)
    # One for each front.
    assert len(list(server.folder().glob("slab-*"))) == 2


def test_the_scheduler_is_killed_under_load(server):
    load = Load(server, 48)
    run(disturbed(load, lambda: [server.kill("scheduler")]), limit_s=100)
    check(load)
    assert len(list(server.folder().glob("slab-*"))) == 2


@pytest.mark.long
def test_the_scheduler_and_a_front_are_killed_at_once(server):
    load = Load(server, 16)
    run(disturbed(load, lambda: [server.kill(name) for name in ("scheduler", "front-1", "worker-0")]), limit_s=100)
    check(load)
    assert len(list(server.folder().glob("slab-*"))) == 2


@pytest.mark.long
def test_who_goes_away_is_not_computed_for_and_others_are_not_harmed(server):
    async def leaver(place):
        for _ in range(20):
            client = await connect(server)
            await client.send(infer([(place, 1, 1)])[0][: None if place % 2 else 120])
            client.close()

    load = Load(server, 16)
    run(load.run(seconds=2), *(leaver(place) for place in range(20)))
    check(load, {200})
    server.wait_for(lambda status: status["connections"] == 0 and status["queued"] == 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, *left_to_ci(signal.SIGINT)])
@pytest.mark.long
def test_a_server_that_ends_answers_what_it_has(tmp_path, number):
    # The first batch, of one or a few, takes so long that all are under way when it is told to end.
    text = EMULATED.replace('beta = "1 ms"', 'beta = "3 s"').replace('slo = "5 s"', 'slo = "60 s"')
    with serving(tmp_path, text, "--fronts", "2") as server:
        pids, have_begun = server.pids(), []

        async def one(place):
            client = await connect(server)
            data, expected = infer([(place, 0, 1)])
            await begin(client, data)
            have_begun.append(place)
            if len(have_begun) == 20:
                server.process.send_signal(number)
            status, headers, body = await client.answer(limit_s=30)
            assert (status, headers["connection"]) == (200, "close")
            assert json.loads(body)["outputs"][0]["data"] == expected
            assert await client.at_end()
            client.close()

        run(*(one(place) for place in range(20)))
        assert server.process.wait(20) == 0
        wait_until_gone(pids.values())
        assert server.end() == 0
    assert "error" not in server.text
    assert "started again" not in server.text


@pytest.mark.long
def test_a_second_signal_ends_it_at_once(tmp_path):
    # Without it, the end would take as long as the batch, or as fronts have to answer what is under way: 25 s.
    text = EMULATED.replace('beta = "1 ms"', 'beta = "40 s"').replace('slo = "5 s"', 'slo = "60 s"')
    text += "[server]\nfronts = 1\n"
    with serving(tmp_path, text) as server:

        async def main():
            client, idle = await connect(server), await connect(server)
            await begin(client, infer([(1, 2, 3)])[0])
            await begin(idle, b"")
            server.process.terminate()
            assert await idle.at_end(limit_s=30)  # it has heard the first one
            idle.close()
            assert server.process.poll() is None
            since = time.monotonic()
            assert await asyncio.to_thread(server.end) == 0
            client.close()
            return time.monotonic() - since

        assert run(main())[0] < 20


@pytest.mark.long
def test_without_its_supervisor_everything_ends(tmp_path):
    with serving(tmp_path) as server:
        pids, folder = server.pids(), server.folder()
        server.kill("supervisor")
        server.process.wait(10)
        wait_until_gone(pids.values())
        assert folder.exists()
    with serving(tmp_path) as server:
        assert not folder.exists()
        assert ask_once(server, infer([(1, 2, 3)])[0])[0] == 200


FORGETFUL = """
class Policy:
    def arrive(self, pool, now, queue, request, deadline):
        pool.enter(queue, request, deadline)

    def free(self, pool, now, device):
        pass
"""


@pytest.mark.long
def test_what_a_policy_keeps_for_ever_is_answered_all_the_same(tmp_path):
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    text = EMULATED.replace('"eager"', f'"{tmp_path}/forgetful.py:Policy"').replace("5 s", "300 ms")
    with serving(tmp_path, text + '[server]\nstuck = "500 ms"\n') as server:
        for rows in ([(1, 2, 3)], [(1, 2, 3)] * 4):
            since = time.monotonic()
            status, document = ask_once(server, infer(rows)[0])  # which waits for 10 s
            assert status == 503
            assert "The request got no answer until long after its deadline" in document["error"]
            assert time.monotonic() - since >= 1.3
        # It drops what it is told to, so that all slots are given back.
        server.wait_for(lambda status: status["queued"] == 0)


OWN = """
import os
import subprocess
import time
from pathlib import Path

import torch
from torch import nn


class Own(nn.Module):
    def forward(self, x):
        if (x == 666).any():
            os._exit(9)
        if (x == 777).any():
            time.sleep(1e6)
        return x


def model(batch_size=4):
    # A process of its own that holds the worker's output, and half a line there.
    other = subprocess.Popen(["sleep", "500"])
    with (Path(__file__).parent / "others").open("a") as others:
        others.write(f"{other.pid}\\n")
    print("no line", end="", flush=True)
    return Own(), (torch.zeros(batch_size, 3, dtype=torch.int64),)
"""
POISONED = """
schema = "meshwright/deployment/1"
devices = 2
policy = "eager"
server = { stuck = "4 s" }

[[models]]
name = "m"
model = "own.py:model"
slo = "40 s"
latency = { alpha = "1 ms", beta = "2 ms", largest = 16 }
inputs = [{ name = "x", datatype = "INT64", shape = [3] }]
"""


@pytest.mark.long
@pytest.mark.timeout(240)
def test_requests_that_kill_or_stop_workers_fail_and_no_others(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    with serving(tmp_path, POISONED) as server:
        starts = {name: server.process_of(name)["starts"] for name in ("worker-0", "worker-1")}

        async def poison(value):
            client = await connect(server)
            await client.send(infer([(value, 0, 1)])[0])
            status, _, body = await client.answer(limit_s=60)
            client.close()
            return status, json.loads(body)["error"]

        async def main(value, load):
            running = asyncio.create_task(load.run())
            await asyncio.sleep(0.5)
            answer = await poison(value)
            load.stop()
            await running
            return answer

        for value in (666, 777):
            load = Load(server, 12, first=1000, limit_s=60)
            assert run(main(value, load), limit_s=90)[0] == (500, "The model failed on this request.")
            check(load, {200})
            server.wait_without()
        again = sum(server.process_of(name)["starts"] for name in starts) - sum(starts.values())
        assert again >= 4  # a worker that the machine has starved is one more
        assert "ended with exit code 9" in server.text
        assert "has computed one batch for" in server.text
        assert server.end() == 0
    others = [int(line) for line in (tmp_path / "others").read_text().split()]
    assert len(others) == len(starts) + again
    wait_until_gone(others)


@pytest.mark.long
def test_a_torch_model_answers_what_it_computes(tmp_path):
    import torch
    from torch import nn

    (tmp_path / "own.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef model(batch_size=4):\n    torch.manual_seed(3)\n"
        "    return nn.Sequential(nn.Linear(16, 10), nn.Softmax(-1)), (torch.zeros(batch_size, 16),)\n"
    )
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(16, 10), nn.Softmax(-1))
    text = EMULATED[: EMULATED.index("[[models]]")]
    text += '[[models]]\nname = "m"\nslo = "20 s"\nmodel = "own.py:model"\ninputs = [{ name = "x", shape = [16] }]\n'
    values = torch.randn(50, 3, 16)
    with serving(tmp_path, text) as server:

        async def one(rows):
            client = await connect(server)
            status, document = await ask(client, infer(rows.tolist(), datatype="FP32")[0])
            client.close()
            assert status == 200, document
            return document["outputs"][0]["data"]

        found = np.array(run(*(one(rows) for rows in values))).reshape(50, 3, 10)
        assert np.allclose(found, module(values).detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_a_log_is_decided_again_after_kills(tmp_path):
    from meshwright.serving.server.replay import replay_log

    log, token = tmp_path / "log", tmp_path / "token"
    token.write_text("secret\n")
    with serving(tmp_path, EMULATED, "--log", str(log), "--policy", "adaptive") as server:
        load = Load(server, 32)
        run(disturbed(load, lambda: kill_at_once(server, "worker-0", "worker-1"), after_s=0.5,
                      condition=lambda status: status["up"] == 2))  # fmt: skip
        check(load, {200, 503})
        assert server.end() == 0
    events, decisions = replay_log(log)
    assert events > load.counts[200]
    assert decisions > 10


@pytest.mark.long
def test_a_token_is_asked_for(tmp_path):
    token = tmp_path / "token"
    token.write_text("secret\n")
    with serving(tmp_path, EMULATED, "--token-file", str(token), "--no-grpc") as server:
        assert server.grpc is None
        data = infer([(1, 2, 3)])[0]
        assert ask_once(server, data)[0] == 401
        for given, expected in (("wrong", 401), ("", 401), ("secret", 200)):
            headers = f"Authorization: Bearer {given}\r\n"
            assert ask_once(server, infer([(1, 2, 3)], headers=headers)[0])[0] == expected
        assert ask_once(server, get("/v2/health/ready"))[0] == 200


@pytest.mark.long
def test_a_log_of_a_scheduler_that_was_killed_is_kept(tmp_path):
    from meshwright.serving.server.replay import replay_log

    log = tmp_path / "log"
    with serving(tmp_path, EMULATED, "--log", str(log)) as server:
        load = Load(server, 16)
        run(disturbed(load, lambda: [server.kill("scheduler")], condition=lambda status: status["up"] == 2))
        check(load)
        assert server.end() == 0
    events = [replay_log(path)[0] for path in (log, tmp_path / "log.2")]
    assert min(events) > 100
