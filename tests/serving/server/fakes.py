"""A gate that tests decide for, and a client that sends what it is told to."""

import asyncio
import inspect
import json
import time
from dataclasses import asdict

import uvloop

from meshwright.serving.server.gate import Fate, Gate, ModelFacts, Ticket
from meshwright.serving.server.http import serve_http
from meshwright.spec import Server, TensorSpec

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
SLO_NS = 10_000_000_000
X = TensorSpec(name="x", shape=(4,))
Y = TensorSpec(name="y", shape=(2, 2))


def facts(folder, inputs=(X,), outputs=(Y,), name="m", number=0, tensor_bytes=2**16, **more):
    document = {"number": number, "name": name, "version": "1", "platform": "meshwright", "slo_ns": SLO_NS, "most": 8}
    document |= {"inputs": [asdict(each) for each in inputs], "outputs": [asdict(each) for each in outputs]}
    model = ModelFacts(document | more, folder, 0, 0, tensor_bytes)
    # All of it, so that a test can take it away.
    assert model.grow(len(model.slab))
    return model


def copy_inputs(ticket):
    """The model of tests: outputs are inputs, in bytes."""
    slab = ticket.model.slab
    for given, wanted in zip(slab.inputs, slab.outputs, strict=True):
        for slot in ticket.slots:
            wanted[slot] = given[slot].reshape(wanted.shape[1:])
    return Fate.DONE


class FakeGate(Gate):
    """``decide`` says what becomes of a request, None if nothing does until `tell`."""

    def __init__(self, folder, *models, decide=copy_inputs):
        super().__init__(folder, 2**16)
        self.models = {model.name: model for model in models or (facts(folder),)}
        self.is_ready = True
        self.decide, self.submitted, self.cancelled = decide, [], []

    def submit(self, model, slots, deadline_ns, reply, level=0):
        ticket = Ticket(model, slots, deadline_ns, reply)
        self.submitted.append(ticket)
        asyncio.get_running_loop().call_soon(self._decide, ticket)
        return ticket

    def _decide(self, ticket):
        fate = self.decide(ticket)
        if fate is not None:
            self.tell(ticket, fate)

    def tell(self, ticket, fate):
        ticket.fate = fate
        if ticket.reply is None:
            self.release(ticket)
        else:
            ticket.reply(ticket)

    def cancel(self, ticket):
        self.cancelled.append(ticket)
        ticket.reply = None
        self.release(ticket)


async def until(condition, limit_s=30.0):
    """Wait until something is so, however long that takes on a busy machine; what it was then."""
    end = time.monotonic() + limit_s
    while True:
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < end, condition
        await asyncio.sleep(0.01)


class Client:
    """A connection, and the answers on it one by one."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    async def send(self, data):
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, is_head=False, limit_s=10):
        """Status, headers by lower-case name, body."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), limit_s)
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        assert len(headers) == len(lines)
        length = int(headers.get("content-length", 0))
        return int(first.split()[1]), headers, b"" if is_head else await self.reader.readexactly(length)

    async def ask(self, data, is_head=False):
        await self.send(data)
        return await self.answer(is_head)

    async def at_end(self, limit_s=10):
        return await asyncio.wait_for(self.reader.read(), limit_s) == b""

    def close(self):
        self.writer.close()


def run(loop, gate, scenario, token=None, **limits):
    """Run a scenario (server, connect) with a server on a free port; returns what it returns."""

    async def main():
        server = await serve_http(gate, Server(**limits), token=token, port=0)
        address = server.sockets[0].getsockname()[:2]
        clients = []

        async def connect():
            client = Client(*await asyncio.open_connection(*address))
            clients.append(client)
            return client

        try:
            return await scenario(server, connect)
        finally:
            for client in clients:
                client.close()
            await server.drain(0.0)

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        return runner.run(main())


def post(body, path="/v2/models/m/infer", headers="", length=None):
    body = json.dumps(body).encode() if isinstance(body, dict) else body
    head = (
        f"POST {path} HTTP/1.1\r\nHost: h\r\n{headers}Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


def get(path, headers="", method="GET"):
    return f"{method} {path} HTTP/1.1\r\nHost: h\r\n{headers}\r\n".encode()


def request(values=(1, 2, 3, 4), count=1, **more):
    data = {"name": "x", "shape": [count, 4], "datatype": "FP32", "data": list(values) * count}
    return {"inputs": [data], **more}
