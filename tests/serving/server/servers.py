"""Servers of real processes, as the command line starts them, and what tests ask of them."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

from tests.serving.server.fakes import Client, get, post

# Processes report each second: what they say so long after something has happened, they say of the time after it.
REPORTED_S = 1.5
EMULATED = """
schema = "meshwright/deployment/1"
devices = 2
policy = "eager"

[[models]]
name = "m"
slo = "5 s"
latency = { alpha = "20 us", beta = "1 ms", largest = 64 }
inputs = [{ name = "x", datatype = "INT64", shape = [3] }]
outputs = [{ name = "y", datatype = "INT64", shape = [3] }]
"""


class Served:
    """A server; ``lines`` is what it has written on stderr."""

    def __init__(self, process):
        self.process, self.lines = process, []
        self.port = self.admin = self.grpc = None
        self.is_ready = threading.Event()
        self.reading = threading.Thread(target=self._read, daemon=True)
        self.reading.start()

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.search(
                r"Ready: .*at http://[^:]*:(\d+)/v2(?: and grpc://[^:]*:(\d+))?; metrics at http://127.0.0.1:(\d+)/",
                line,
            )
            if found:
                self.port, self.grpc, self.admin = (None if port is None else int(port) for port in found.groups())
                self.is_ready.set()
        self.is_ready.set()

    @property
    def text(self):
        return "".join(self.lines)

    def status(self):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/status", timeout=10) as answer:
            return json.load(answer)

    def process_of(self, name):
        return next((each for each in self.status()["processes"] if each["name"] == name), None)

    def pid(self, name):
        return self.process_of(name)["pid"]

    def pids(self):
        return {each["name"]: each["pid"] for each in self.status()["processes"]}

    def folder(self):
        return next(Path("/dev/shm").glob(f"meshwright-serve-{self.process.pid}-*"))

    def kill(self, name, number=signal.SIGKILL):
        pid = self.pid(name)
        os.kill(pid, number)
        return pid

    def wait_for(self, condition, limit_s=30.0):
        """Wait until a status is as expected; that status."""
        end = time.monotonic() + limit_s
        while True:
            status = self.status()
            if condition(status):
                return status
            assert time.monotonic() < end, (status, self.text)
            time.sleep(0.02)

    def wait_without(self, *pids, condition=lambda status: status["ready"] and status["up"] == 2, limit_s=60.0):
        """Wait until processes have gone, and what has been reported after that is as expected; that status."""
        self.wait_for(lambda status: not {each["pid"] for each in status["processes"]} & set(pids), limit_s)
        since_s = time.monotonic() + REPORTED_S
        return self.wait_for(
            lambda status: min(status["scheduler_time_s"], status["fronts_time_s"]) > since_s and condition(status),
            limit_s,
        )

    def wait_for_another(self, name, pid):
        """Wait until another process has taken the place of one that was killed."""
        self.wait_for(
            lambda status: [each for each in status["processes"] if each["name"] == name and each["pid"] != pid]
        )

    def end(self, number=signal.SIGTERM, limit_s=45):
        """The exit code; no process and no file are left."""
        pids = {}
        if self.process.poll() is None and self.admin is not None:
            with contextlib.suppress(OSError):  # it is ending already
                pids = self.pids()
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(limit_s)
        self.reading.join(10)
        wait_until_gone(pids.values())
        assert not list(Path("/dev/shm").glob(f"meshwright-serve-{self.process.pid}-*"))
        return code


@contextlib.contextmanager
def serving(folder, text=EMULATED, *options, is_ready=True, environment=None):
    """A server of a deployment; whatever happens, its processes end."""
    path = folder / "deployment.toml"
    path.write_text(text)
    ports = [word for name in ("port", "grpc-port", "admin-port") for word in (f"--{name}", "0")]
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright", "serve", str(path), *ports, *options],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200", **(environment or {})},
    )
    server = Served(process)
    try:
        if is_ready:
            assert server.is_ready.wait(100), server.text
            assert server.port, server.text
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        server.reading.join(10)
        process.stderr.close()


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until_gone(pids, limit_s=10.0):
    end = time.monotonic() + limit_s
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < end, left
        time.sleep(0.02)


def infer(values, name="m", headers="", datatype="INT64", **more):
    """Bytes of a request of rows of integers, and the answer's data."""
    rows = [list(row) for row in values]
    data = [value for row in rows for value in row]
    body = {"inputs": [{"name": "x", "shape": [len(rows), len(rows[0])], "datatype": datatype, "data": data}], **more}
    return post(body, f"/v2/models/{name}/infer", headers), data


async def connect(server):
    return Client(*await asyncio.wait_for(asyncio.open_connection("127.0.0.1", server.port), 10))


async def begin(client, data):
    """Send a request, and return when the server has begun it: what came with it, and before it, is answered."""
    status, _, _ = await client.ask(get("/v2/health/live") + data)
    assert status == 200


async def ask(client, data, limit_s=10):
    """Status and document."""
    await client.send(data)
    status, _, body = await client.answer(limit_s=limit_s)
    return status, json.loads(body)


def ask_once(server, data):
    async def main():
        client = await connect(server)
        try:
            return await ask(client, data)
        finally:
            client.close()

    return asyncio.run(asyncio.wait_for(main(), 30))


class Load:
    """Connections that ask one after the other, each question another one: what became of each is counted.

    ``wrong`` has what must never be: another answer than the question's, or none on a connection that stays.
    """

    def __init__(self, server, connections=32, rows=1, name="m", first=0, limit_s=10):
        self.server, self.connections, self.rows, self.name = server, connections, rows, name
        self.counts, self.wrong, self.sentences = {}, [], {}
        self.longest_s = 0.0
        self.done_at = []
        self._next, self._is_over, self._limit_s = first, False, limit_s

    def stop(self):
        self._is_over = True

    async def run(self, seconds=None, requests=None):
        self._left = requests
        if seconds is not None:
            asyncio.get_running_loop().call_later(seconds, self.stop)
        await asyncio.gather(*(self._ask() for _ in range(self.connections)))

    def note(self, what):
        self.counts[what] = self.counts.get(what, 0) + 1

    async def _ask(self):
        client = None
        try:
            while not self._is_over and self._left != 0:
                if self._left is not None:
                    self._left -= 1
                if client is None:
                    try:
                        client = await connect(self.server)
                    except OSError:
                        self.note("refused")
                        await asyncio.sleep(0.02)
                        continue
                self._next += 1
                question, expected = infer([(self._next, row, -self._next) for row in range(self.rows)], self.name)
                begin = time.monotonic()
                try:
                    status, document = await ask(client, question, self._limit_s)
                except (asyncio.IncompleteReadError, ConnectionError):
                    self.note("closed")
                    client.close()
                    client = None
                    continue
                except TimeoutError:
                    self.wrong.append(("no answer", question))
                    return
                self.longest_s = max(self.longest_s, time.monotonic() - begin)
                self.note(status)
                if status == 200:
                    self.done_at.append(time.monotonic())
                    if document["outputs"][0]["data"] != expected:
                        self.wrong.append((expected, document))
                else:
                    self.sentences[document["error"]] = self.sentences.get(document["error"], 0) + 1
                    await asyncio.sleep(0.005)
        finally:
            if client is not None:
                client.close()
