"""What a server in Python cannot be cheaper than: one process that reads requests and writes answers, and no more.

It uses the libraries that our fronts use (uvloop, httptools, msgspec, orjson), for one request of the tiny model: no
deadlines, no queue, no model, no other process, and no checks beyond the types of the protocol.

Run as ``python benchmarks/bare_server.py PORT``; `serving_live` does, for its section ``overhead``.
"""

from __future__ import annotations

import asyncio
import struct
import sys
from typing import Any

import httptools
import msgspec
import numpy as np
import orjson
import uvloop

from meshwright.serving.server.tensors import WireRequest

_OUTPUT = np.linspace(0.01, 0.19, 10, dtype=np.float32)
_REQUESTS, _NUMBERS = msgspec.json.Decoder(WireRequest), msgspec.json.Decoder(list[float])
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: "
_BEGIN = b'{"model_name":"tiny","model_version":"1","outputs":[{"name":"y","datatype":"FP32","shape":[1,10],"data":'


class _Connection(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self._transport, self._parser, self._body = transport, httptools.HttpRequestParser(self), b""

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        (tensor,) = _REQUESTS.decode(self._body).inputs if self._body else ((),)
        if tensor:
            struct.pack("=16f", *_NUMBERS.decode(tensor.data))
        self._body = b""
        answer = b"%b%b}]}" % (_BEGIN, orjson.dumps(_OUTPUT, option=orjson.OPT_SERIALIZE_NUMPY))
        self._transport.write(b"%b%d\r\n\r\n%b" % (_HEAD, len(answer), answer))


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Connection, "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
