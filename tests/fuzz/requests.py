"""Requests to the playground's server: links, bodies and headers, sound ones and spoiled ones, as bytes on a socket."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial
from urllib.parse import parse_qsl, urlencode

from hypothesis import strategies as st

from meshwright.playground import Controls, OfferedModel, PlaygroundServer, Service, Workbench, to_query
from meshwright.spec import load_shipped_graph
from tests.fuzz.mutations import HOSTILE_NUMBERS, HOSTILE_WORDS, any_of, spoil_bytes

_START = Controls(model="gpt-tiny", kind="cpu", num_nodes=1, devices_per_node=4, num_stages=2, global_batch=16)
_FINE = ("0", "1", "2", "3", "4", "8", "1,1", "2,1", "1f1b", "gpipe", "float32", "H100", "cpu", "0.5", "sgd", "adamw")
_PATHS = ("/", "/options", "/plan.json", "/trace.json", "/report.html", "/playground.js", "/../state.py", "/%2e%2e/x")
_POSTS = ("/answer", "/answer", "/answer", "/answer", "/progress", "/stop", "/nothing")


@cache
def shared_server() -> PlaygroundServer:
    """A server with the smallest model; its connections are handed to it one by one, nobody listens."""
    graph = load_shipped_graph("gpt-tiny")
    models = {"gpt-tiny": OfferedModel(open=partial(lambda value: lambda _: value, graph))}
    return PlaygroundServer(Service(Workbench(models), _START))


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """One request, with its state and its bytes perhaps spoiled."""
    port = shared_server().server_port
    state = replace(_START, num_stages=draw(st.sampled_from((1, 2, 4))))
    pairs = dict(parse_qsl(to_query(state), keep_blank_values=True))
    for _ in range(draw(st.integers(0, 3))):
        value = st.sampled_from(_FINE) | any_of(HOSTILE_WORDS) | any_of(HOSTILE_NUMBERS[:-1]).map(str)
        pairs[draw(st.sampled_from(sorted(pairs)))] = draw(value)[:2000]
    query = urlencode(pairs, errors="replace")
    if draw(st.booleans()):
        path = draw(st.sampled_from(_PATHS))
        content = f"GET {path}?{query} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode()
    else:
        numbers = st.sampled_from((1, 2, 2**52, -1, None, "1", 1.5, [])) | any_of(HOSTILE_NUMBERS[:-1])
        page = draw(st.sampled_from(("p", "q")))
        data = {"query": query, "page": page, "number": draw(numbers), "job": draw(numbers)}
        if draw(st.booleans()):
            data["pinned"] = draw(st.sampled_from((query, "m=x", "\ud800", 3, "stages=99")))
        body = json.dumps(data).encode()
        if draw(st.integers(0, 3)) == 0:
            body = spoil_bytes(draw, body)
        head = (
            f"POST {draw(st.sampled_from(_POSTS))} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
            f"Origin: http://127.0.0.1:{port}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        content = head.encode() + body
    return spoil_bytes(draw, content) if draw(st.integers(0, 3)) == 0 else content
