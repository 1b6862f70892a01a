"""Models that come and go while a server answers requests."""

import asyncio
import http.client
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

import pytest
import tritonclient.http

from meshwright.serving.server.replay import replay_log
from tests.marks import left_to_ci
from tests.serving.server.fakes import until
from tests.serving.server.servers import EMULATED, Load, ask_once, infer, serving

LATER = """
[[models]]
name = "later"
slo = "5 s"
latency = { alpha = "20 us", beta = "2 ms", largest = 64 }
inputs = [{ name = "x", datatype = "INT64", shape = [3] }]
outputs = [{ name = "y", datatype = "INT64", shape = [3] }]
"""
OWN = """
[[models]]
name = "own"
slo = "5 s"
model = "own.py:make"
inputs = [{ name = "x", datatype = "FP32", shape = [3] }]
outputs = [{ name = "y", datatype = "FP32", shape = [3] }]
"""
TIMES = """
import torch

class Times(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor({factor}))

    def forward(self, x):
        return x * self.factor

def make():
    return Times(), torch.ones(1, 3)
"""

SLOWLY = """
import time
from pathlib import Path

Path({begun!r}).touch()
while not Path({may_end!r}).exists():
    time.sleep(0.05)
"""


def post(server, path, headers=None, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.admin, timeout=60)
    try:
        connection.request("POST", f"/v2/repository/{path}", body=body, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def versions(rows):
    return {row["name"]: row["version"] for row in rows}


def write(folder, text):
    (folder / "deployment.toml").write_text(text)


def status_of(server, name):
    status, document = ask_once(server, infer([(1, 2, 3)], name)[0])
    assert status in (200, 404), (document, server.text)
    return status


async def change_under_load(server, *steps):
    """What a load had while models came and went."""
    load = Load(server, connections=16)
    loading = asyncio.create_task(load.run(seconds=60))
    told = []
    for step in steps:
        await asyncio.sleep(0.2)
        told.append(await asyncio.to_thread(step))
    await asyncio.sleep(0.2)
    load.stop()
    await asyncio.wait_for(loading, 60)
    return load, told


@pytest.mark.long
def test_models_come_and_go_and_no_request_is_lost(tmp_path):
    log = tmp_path / "log"
    with serving(tmp_path, EMULATED, "--log", str(log), "--policy", "adaptive") as server:
        assert status_of(server, "later") == 404
        write(tmp_path, EMULATED + LATER)
        load, told = asyncio.run(
            change_under_load(
                server,
                lambda: post(server, "models/later/load"),
                lambda: status_of(server, "later"),
                lambda: post(server, "models/m/load"),
                lambda: post(server, "models/m/load"),
                lambda: post(server, "models/later/unload"),
                lambda: status_of(server, "later"),
            )
        )
        assert [status for status, _ in (told[0], *told[2:5])] == [200] * 4
        assert told[1] == 200
        assert told[5] == 404
        assert versions(told[4][1]) == {"m": "3"}
        assert set(load.counts) == {200}, load.sentences
        assert load.counts[200] > 100
        assert not load.wrong
        status, document = ask_once(server, infer([(1, 2, 3)])[0])
        assert (status, document["model_version"]) == (200, "3")
        assert status_of(server, "m/versions/1") == 404
        # What former versions had is not lost to metrics, and not in memory any more.
        fates = server.wait_for(lambda status: status["models"][0]["fates"].get("done", 0) > load.counts[200])
        assert fates["models"][0]["version"] == "3"
        server.wait_for(lambda _: len(list(server.folder().glob("slab-*"))) == 1)
        assert server.end() == 0
    events, decisions = replay_log(log)
    assert events > 100
    assert decisions > 50


@pytest.mark.long
def test_a_model_that_is_loaded_again_answers_by_its_new_file_and_all_workers_know_it(tmp_path):
    (tmp_path / "own.py").write_text(TIMES.format(factor=2.0))
    with serving(tmp_path, EMULATED + OWN) as server:

        def answer():
            status, document = ask_once(server, infer([(1.0, 2.0, 4.0)], "own", datatype="FP32")[0])
            assert status == 200, (document, server.text)
            return document["outputs"][0]["data"]

        assert answer() == [2.0, 4.0, 8.0]
        (tmp_path / "own.py").write_text(TIMES.format(factor=3.0))
        load, told = asyncio.run(change_under_load(server, lambda: post(server, "models/own/load")))
        assert told[0][0] == 200, told
        assert set(load.counts) == {200}, load.sentences
        assert all(answer() == [3.0, 6.0, 12.0] for _ in range(8))
        # Workers that are started again have it, too.
        for worker in ("worker-0", "worker-1"):
            server.wait_without(server.kill(worker))
        assert answer() == [3.0, 6.0, 12.0]
        # And so has a scheduler.
        server.wait_without(server.kill("scheduler"))
        assert answer() == [3.0, 6.0, 12.0]
        assert server.status()["models"][1]["version"] == "2"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("def make():\n    raise ValueError('no weights')\n", "no weights"),
        *left_to_ci(
            ("import os\ndef make():\n    os._exit(7)\n", "The worker that was the first to load own has ended"),
            ("def make(:\n", "own.py"),
            ("def make():\n    raise KeyboardInterrupt\n", "KeyboardInterrupt"),
            (None, "own.py"),
        ),
    ],
)
@pytest.mark.long
def test_what_cannot_be_loaded_changes_nothing(tmp_path, content, sentence):
    with serving(tmp_path, EMULATED) as server:
        write(tmp_path, EMULATED + OWN)
        if content is not None:
            (tmp_path / "own.py").write_text(content)
        status, document = post(server, "models/own/load")
        assert status == 400
        assert sentence in document["error"]
        assert versions(post(server, "index")[1]) == {"m": "1"}
        assert status_of(server, "m") == 200
        assert status_of(server, "own") == 404
        # And the next change can be made.
        write(tmp_path, EMULATED + LATER)
        assert versions(post(server, "update")[1]) == {"m": "1", "later": "1"}


@pytest.mark.long
def test_an_update_serves_what_the_file_has_now(tmp_path):
    with serving(tmp_path, EMULATED + LATER) as server:
        changed = EMULATED.replace('beta = "1 ms"', 'beta = "3 ms"').replace("[[models]]", "[[models]]\ncopies = 2")
        write(tmp_path, changed)
        assert versions(post(server, "update")[1]) == {"m-0": "1", "m-1": "1"}
        assert status_of(server, "m-1") == 200
        assert status_of(server, "m") == 404
        assert versions(post(server, "update")[1]) == {"m-0": "1", "m-1": "1"}
        # A copy's name is its family's.
        assert versions(post(server, "models/m-1/load")[1]) == {"m-0": "2", "m-1": "2"}
        write(tmp_path, "devices = ")
        status, document = post(server, "update")
        assert status == 400
        assert "deployment.toml" in document["error"]


@pytest.mark.long
def test_requests_for_other_models_are_looked_at(tmp_path):
    token = tmp_path / "token"
    token.write_text("secret\n")
    with serving(tmp_path, EMULATED, "--token-file", str(token)) as server:
        ours = {"Authorization": "Bearer secret"}
        assert post(server, "index", {})[0] == 401
        assert post(server, "index", {"Authorization": "Bearer wrong"})[0] == 401
        assert post(server, "index", ours)[0] == 200
        assert post(server, "index", ours | {"Origin": "http://stranger"})[0] == 403
        assert post(server, "index", ours | {"Sec-Fetch-Site": "cross-site"})[0] == 403
        assert post(server, "index", ours | {"Host": "stranger:80"})[0] == 403
        assert post(server, "index", ours, b"x" * 70_000)[0] == 413
        for path, body, sentence in (
            ("models/m/load", b"[", "not a JSON object"),
            ("models/m/load", b'{"parameters": {"config": "{}"}}', "'config'"),
            ("models/n/load", b"", "no model 'n'"),
            ("models/n/unload", b"", "No model 'n'"),
            ("models/m/unload", b"", "No model would be left"),
        ):
            status, document = post(server, path, ours, body)
            assert status == 400
            assert sentence in document["error"]
        assert post(server, "nothing", ours)[0] == 404


@pytest.mark.long
def test_names_of_all_signs_can_be_asked_for_and_versions_go_on(tmp_path):
    odd = LATER.replace('"later"', '"a/b %41 é"')
    with serving(tmp_path, EMULATED + odd) as server:
        path = f"models/{quote('a/b %41 é', safe='')}"
        assert versions(post(server, f"{path}/load")[1]) == {"m": "1", "a/b %41 é": "2"}
        assert versions(post(server, f"{path}/unload")[1]) == {"m": "1"}
        assert versions(post(server, f"{path}/load")[1]) == {"m": "1", "a/b %41 é": "3"}
        # Half a request changes nothing, and is not being carried out when the next one comes.
        with socket.create_connection(("127.0.0.1", server.admin), 30) as half:
            half.sendall(f"POST /v2/repository/{path}/unload HTTP/1.1\r\nHost: localhost\r\n".encode())
            half.sendall(b"Content-Length: 50\r\n\r\n{")
            half.shutdown(socket.SHUT_WR)
            while half.recv(4096):  # until it is closed
                pass
        assert versions(post(server, "index")[1]) == {"m": "1", "a/b %41 é": "3"}
        assert versions(post(server, "models/m/load")[1]) == {"m": "2", "a/b %41 é": "3"}


@pytest.mark.long
def test_models_are_loaded_once_by_each_process(tmp_path):
    (tmp_path / "own.py").write_text(
        TIMES.format(factor=2.0).replace("def make():", "def make():\n    open('loads', 'a').write('x')")
    )
    loads = tmp_path / "loads"
    code = (tmp_path / "own.py").read_text().replace("'loads'", repr(str(loads)))
    (tmp_path / "own.py").write_text(code)
    with serving(tmp_path, EMULATED + OWN + LATER + OWN.replace('"own"', '"again"')) as server:
        server.wait_for(lambda status: status["up"] == 2)
        assert len(loads.read_text()) == 4
        server.wait_without(server.kill("scheduler"))
        assert post(server, "models/later/load")[0] == 200
        assert len(loads.read_text()) == 4
        assert post(server, "models/again/load")[0] == 200
        assert len(loads.read_text()) == 6


@pytest.mark.long
def test_clients_of_triton_and_the_command_line_load_and_unload(tmp_path):
    with serving(tmp_path, EMULATED) as server:
        write(tmp_path, EMULATED + LATER)
        client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.admin}")
        client.load_model("later")
        assert versions(client.get_model_repository_index()) == {"m": "1", "later": "1"}
        client.unload_model("later")
        with pytest.raises(tritonclient.http.InferenceServerException, match="no model 'latr'"):
            client.load_model("latr")
        client.close()

        def command(*options, code=0):
            url = f"http://127.0.0.1:{server.admin}"
            done = subprocess.run(
                [sys.executable, "-m", "meshwright", "serve", "models", url, *options],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == code, done.stderr
            return done.stdout + done.stderr

        assert "later" not in command()
        assert "later" in command("--load", "later")
        assert versions(json.loads(command("--update", "--json"))["models"]) == {"m": "1", "later": "2"}
        assert "later" not in command("--unload", "later")
        assert "latr" in command("--load", "latr", code=1)


@pytest.mark.long
def test_a_change_in_which_the_scheduler_ends_is_refused(tmp_path):
    begun, may_end = tmp_path / "begun", tmp_path / "may_end"
    (tmp_path / "own.py").write_text(SLOWLY.format(begun=str(begun), may_end=str(may_end)) + TIMES.format(factor=2.0))
    with serving(tmp_path, EMULATED) as server:
        write(tmp_path, EMULATED + OWN)

        async def scenario():
            asking = asyncio.create_task(asyncio.to_thread(post, server, "models/own/load"))
            await until(lambda: begun.exists() or asking.done())
            server.kill("scheduler")
            return await asyncio.wait_for(asking, 60)

        status, document = asyncio.run(scenario())
        assert status == 400
        assert "scheduler ended" in document["error"]
        may_end.touch()
        server.wait_for(lambda status: status["ready"])
        end = time.monotonic() + 60
        while post(server, "models/own/load")[0] != 200:
            assert time.monotonic() < end
        assert versions(post(server, "index")[1]) == {"m": "1", "own": "1"}
        assert Path(f"/proc/{server.pid('worker-0')}").exists()
