"""A small server of the Open Inference Protocol for tests, which answers as a test says. It shares no code with ours.

``Stub(answer)`` runs in a thread of its own; ``answer`` gets a `Request` and gives bytes, None to close the connection,
or (seconds, bytes) to answer later. As a program it runs until its input ends: ``python -m tests.serving.load.stub``.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import threading
import time
from dataclasses import dataclass, field

MODELS = {
    "cat": {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}],
    },
}
FORMATS = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}


@dataclass
class Request:
    number: int
    path: str
    headers: dict
    body: bytes
    at: float = field(default_factory=time.perf_counter)

    @property
    def model(self):
        return self.path.split("/")[3]

    @property
    def document(self):
        return json.loads(self.body[: int(self.headers.get("inference-header-content-length", len(self.body)))])

    @property
    def values(self):
        """Values of each input, flat, from JSON or binary data."""
        place, found = int(self.headers.get("inference-header-content-length", len(self.body))), {}
        for tensor in self.document["inputs"]:
            if "data" in tensor:
                found[tensor["name"]] = tensor["data"]
                continue
            size = tensor["parameters"]["binary_data_size"]
            found[tensor["name"]] = unpack(self.body[place : place + size], tensor["datatype"])
            place += size
        assert place == len(self.body)
        return found


def unpack(content, datatype):
    if datatype == "BYTES":
        values = []
        while content:
            (size,) = struct.unpack("<I", content[:4])
            values.append(content[4 : 4 + size].decode())
            content = content[4 + size :]
        return values
    if datatype == "BF16":
        return [struct.unpack("<f", b"\0\0" + content[i : i + 2])[0] for i in range(0, len(content), 2)]
    size = struct.calcsize(FORMATS[datatype])
    return list(struct.unpack(f"<{len(content) // size}{FORMATS[datatype]}", content))


def respond(status, document, *headers):
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    lines = [f"HTTP/1.1 {status} Some", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def double(request, request_id=None):
    """The right answer: twice the first input."""
    document, values = request.document, request.values
    tensor = document["inputs"][0]
    twice = [2 * value for value in values[tensor["name"]]]
    output = {"name": "y", "datatype": "FP32", "shape": tensor["shape"], "data": twice}
    return respond(200, {"model_name": request.model, "id": request_id or document["id"], "outputs": [output]})


def echo(request):
    """An answer at once, without a look at the values."""
    place = request.body.index(b'"id":"') + 6
    return respond(200, b'{"id":"%b","outputs":[]}' % request.body[place : place + 10])


class Last(bytes):
    """An answer after which the connection is closed."""


class Stub:
    def __init__(self, answer=echo, models=MODELS):
        self.answer, self.models = answer, models
        self.requests = []
        # What is answered to whatever comes, if not None.
        self.refusal = None
        self.port = 0
        self._connections = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *error):
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def start(self):
        """Listen, on the port of before if there was one."""
        self._call(self._listen())

    def stop(self):
        """Close all connections, and listen no more."""
        self._call(self._close())

    def _call(self, action):
        asyncio.run_coroutine_threadsafe(action, self._loop).result(10)

    async def _listen(self):
        self._server = await self._loop.create_server(
            lambda: _Connection(self), "127.0.0.1", self.port, reuse_address=True, backlog=512
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self):
        self._server.close()
        for connection in list(self._connections):
            connection.transport.abort()
        await asyncio.sleep(0)


class _Connection(asyncio.Protocol):
    def __init__(self, stub):
        self.stub, self.buffer = stub, b""

    def connection_made(self, transport):
        self.transport = transport
        self.stub._connections.add(self)

    def connection_lost(self, error):
        self.stub._connections.discard(self)

    def data_received(self, data):
        self.buffer += data
        head, end, rest = self.buffer.partition(b"\r\n\r\n")
        if not end:
            return
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        length = int(headers.get("content-length", 0))
        if len(rest) < length:
            return
        assert len(rest) == length, "more than one request at a time on a connection"
        self.buffer = b""
        method, path, _ = first.split(" ")
        self.reply(method, Request(len(self.stub.requests), path, headers, rest))

    def reply(self, method, request):
        name = request.path.split("/")[3] if request.path.startswith("/v2/models/") else None
        if self.stub.refusal is not None:
            found = self.stub.refusal
        elif request.path == "/v2/repository/index":
            found = respond(200, [{"name": name} for name in self.stub.models])
        elif name is None or name not in self.stub.models:
            found = respond(404, {"error": f"there is no {name}"})
        elif method == "GET":
            found = respond(200, {"name": name, "versions": ["1"], "platform": "stub", **self.stub.models[name]})
        else:
            self.stub.requests.append(request)
            found = self.stub.answer(request)
        if isinstance(found, tuple):
            self.stub._loop.call_later(found[0], self.send, found[1])
        else:
            self.send(found)

    def send(self, content):
        if content is None:
            self.transport.close()
        else:
            self.transport.write(content)
            if isinstance(content, Last):
                self.transport.close()


def main():
    with Stub() as stub:
        stub.requests = type("Forgetful", (list,), {"append": lambda self, item: None})()
        print(stub.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
