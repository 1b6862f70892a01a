"""A front's connections, by real sockets, with a gate that tests decide for."""

import asyncio
import gzip
import json
import socket
import struct
import time
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.serving.server.answers import compress, decompress
from meshwright.serving.server.counters import NUM_BUCKETS, bucket_begin, bucket_of
from meshwright.serving.server.gate import Fate
from meshwright.spec import TensorSpec
from tests.marks import examples, left_to_ci
from tests.serving.server.fakes import SLO_NS, FakeGate, copy_inputs, facts, get, post, request, run, until

GOOD = post(request())
INDEX = "/v2/repository/index"


@pytest.fixture(params=["uvloop", *left_to_ci("asyncio")])
def loop(request):
    return request.param


def run_one(loop, gate, scenario, token=None, **limits):
    """Run a scenario (client, server) of one connection; returns what it returns."""

    async def connected(server, connect):
        return await scenario(await connect(), server)

    return run(loop, gate, connected, token, **limits)


def asked(loop, gate, *messages, token=None, **limits):
    """Answers to messages, one after the other on one connection."""

    async def scenario(client, server):
        return [await client.ask(message) for message in messages]

    return run_one(loop, gate, scenario, token, **limits)


def told(answer):
    status, headers, body = answer
    assert headers["content-type"] == "application/json"
    document = json.loads(body)
    assert list(document) == ["error"]
    return status, document["error"]


# --- what is answered -----------------------------------------------------------------------------


def test_pages(loop, tmp_path):
    gate = FakeGate(tmp_path, facts(tmp_path), facts(tmp_path, name="ö/ü", number=1))
    tensors = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 2, 2]}],
    }
    model = {"name": "m", "versions": ["1"], "platform": "meshwright", **tensors}
    index = [{"name": name, "version": "1", "state": "READY", "reason": ""} for name in ("m", "ö/ü")]
    pages = {
        get("/v2/health/live"): {"live": True},
        get("/v2/health/ready"): {"ready": True},
        get("/v2/models/m"): model,
        get("/v2/models/m/versions/1?x=y"): model,
        get("http://h/v2/models/m/ready"): {"name": "m", "ready": True},
        get("/v2/models/%C3%B6%2F%C3%BC/versions/1/ready"): {"name": "ö/ü", "ready": True},
        post(b"", INDEX): index,
        post(b'{"ready": true}', INDEX): index,
    }
    for (status, headers, body), expected in zip(asked(loop, gate, *pages), pages.values(), strict=True):
        assert (status, json.loads(body)) == (200, expected)
        assert headers["content-type"] == "application/json"
        assert headers["date"].endswith(" GMT")
    (metadata, openapi) = asked(loop, gate, get("/v2"), get("/openapi.json"))
    assert json.loads(metadata[2])["extensions"] == ["binary_tensor_data"]
    paths = json.loads(openapi[2])["paths"]
    assert len(paths) == 11


def test_a_head_has_the_length_of_what_is_left_out(loop, tmp_path):
    async def scenario(client, server):
        first = await client.ask(get("/v2", method="HEAD"), is_head=True)
        return first, await client.ask(get("/v2"))

    (_, head, _), (_, whole, body) = run_one(loop, FakeGate(tmp_path), scenario)
    assert head["content-length"] == whole["content-length"] == str(len(body))


@pytest.mark.parametrize(
    ("message", "status", "sentence", "header"),
    [
        (get("/"), 404, "There is no path '/'", None),
        (get("/v2/models"), 404, "There is no path", None),
        (get("/v2/models/m/else"), 404, "There is no path", None),
        (get("/v2/models/m/versions"), 404, "There is no path", None),
        (get("/v2/models/z"), 404, "no model 'z'", None),
        (get("/v2/models/m/versions/7"), 404, "no version '7'; expected '1'", None),
        (post(request(), "/v2/models/z/infer"), 404, "no model 'z'", None),
        (post(b"", "/v2"), 405, "POST is not possible", ("allow", "GET, HEAD")),
        (get("/v2/models/m/infer"), 405, "GET is not possible", ("allow", "POST")),
        (get(INDEX, method="DELETE"), 405, "DELETE is not possible", ("allow", "POST")),
        (get("/v2/repository/models/m/load", method="POST"), 404, "at the admin address", None),
        (get("*", method="OPTIONS"), 404, "There is no path", None),
        (post(b"[]", INDEX), 400, "not an index request", None),
        (post(b"x"), 400, "not JSON", None),
        (post(request(), headers="Inference-Header-Content-Length: x\r\n"), 400, "is 'x'; expected an integer", None),
        (post(request(), headers="Inference-Header-Content-Length: -1\r\n"), 400, "is '-1'", None),
        (post(request(), headers="X-Request-Timeout-Ms: 0\r\n"), 400, "is '0'; expected an integer, at least 1", None),
        (post(request(), headers="X-Request-Timeout-Ms: 1e3\r\n"), 400, "is '1e3'", None),
        (post(request(), headers="X-Request-Timeout-Ms: 60001\r\n"), 400, "60.001 s; expected 60 s at most", None),
        (post(request(parameters={"timeout": 10**8})), 400, "100 s; expected 60 s", None),
        (post(request(), headers="Content-Encoding: br\r\n"), 415, "'br'; expected gzip", None),
        (post(b"x", headers="Content-Encoding: gzip\r\n"), 400, "not compressed as gzip", None),
        (post(zlib.compress(b"x")[:-1], headers="Content-Encoding: deflate\r\n"), 400, "it ends too early", None),
        (post(zlib.compress(b"x") + b"y", headers="Content-Encoding: deflate\r\n"), 400, "something follows", None),
        (post(gzip.compress(bytes(2**20), mtime=0), headers="Content-Encoding: gzip\r\n"), 413, "decompressed", None),
    ],
)
def test_what_is_wrong_is_told_and_the_connection_goes_on(loop, tmp_path, message, status, sentence, header):
    gate = FakeGate(tmp_path)
    wrong, after = asked(loop, gate, message, GOOD, body_bytes=2**16)
    assert told(wrong)[0] == status
    assert sentence in told(wrong)[1]
    if header is not None:
        assert wrong[1][header[0]] == header[1]
    assert after[0] == 200
    assert len(gate.models["m"].idle) == len(gate.models["m"].slab)


def test_inference(loop, tmp_path):
    gate = FakeGate(tmp_path)
    before = time.monotonic_ns()
    first, second = asked(loop, gate, GOOD, post(request(range(4), 3, id="a"), "/v2/models/m/versions/1/infer"))
    assert first[0] == 200
    output = {"name": "y", "datatype": "FP32", "shape": [1, 2, 2], "data": [1.0, 2.0, 3.0, 4.0]}
    assert json.loads(first[2]) == {"model_name": "m", "model_version": "1", "outputs": [output]}
    output |= {"shape": [3, 2, 2], "data": [0.0, 1.0, 2.0, 3.0] * 3}
    assert json.loads(second[2]) == {"model_name": "m", "model_version": "1", "id": "a", "outputs": [output]}
    assert all(0 <= ticket.deadline_ns - SLO_NS - before < 5e9 for ticket in gate.submitted)
    assert len(gate.models["m"].idle) == len(gate.models["m"].slab)


def test_binary_inference(loop, tmp_path):
    item = {"name": "x", "shape": [2, 4], "datatype": "FP32", "parameters": {"binary_data_size": 32}}
    text = json.dumps({"inputs": [item], "parameters": {"binary_data_output": True}}).encode()
    block = np.arange(8, dtype=np.float32).tobytes()
    header = f"Inference-Header-Content-Length: {len(text)}\r\n"
    plain = post(text + block, headers=header)
    packed = post(gzip.compress(text + block), headers=header + "Content-Encoding: gzip\r\n")
    for status, headers, body in asked(loop, FakeGate(tmp_path), plain, packed):
        length = int(headers["inference-header-content-length"])
        assert (status, headers["content-type"]) == (200, "application/octet-stream")
        assert json.loads(body[:length])["outputs"][0]["parameters"] == {"binary_data_size": 32}
        assert body[length:] == block


@pytest.mark.parametrize("fate", [fate for fate in Fate if fate != Fate.DONE])
def test_fates(loop, tmp_path, fate):
    gate = FakeGate(tmp_path, decide=lambda ticket: fate)
    (answer,) = asked(loop, gate, GOOD)
    assert told(answer)[0] == (500 if fate == Fate.FAILED else 503)
    assert answer[1].get("retry-after") == (None if fate == Fate.FAILED else "1")
    assert len(gate.models["m"].idle) == len(gate.models["m"].slab)


def test_no_room_not_ready_and_not_finite(loop, tmp_path):
    def decide(ticket):
        ticket.model.slab.outputs[0][ticket.slots[0]] = np.inf
        return Fate.DONE

    gate = FakeGate(tmp_path, decide=decide)
    (answer,) = asked(loop, gate, GOOD)
    assert told(answer)[0] == 500
    assert "binary_data" in told(answer)[1]
    gate.models["m"].idle.clear()
    (answer,) = asked(loop, gate, GOOD)
    assert (told(answer)[0], answer[1]["retry-after"]) == (503, "1")
    gate.is_ready = False
    answers = asked(loop, gate, GOOD, get("/v2/health/ready"), get("/v2/models/m/ready"), get("/v2/models/z"))
    assert [answer[0] for answer in answers] == [503] * 4
    assert json.loads(answers[2][2]) == {"name": "m", "ready": False}
    every, ready = asked(loop, gate, post(b"{}", INDEX), post(b'{"ready":true}', INDEX))
    assert [[entry["state"] for entry in json.loads(body)] for _, _, body in (every, ready)] == [["UNAVAILABLE"], []]


def test_a_failure_of_ours_is_told_and_logged(loop, tmp_path, caplog):
    gate = FakeGate(tmp_path)
    gate.reserve = lambda model, count: 1 / 0
    wrong, after = asked(loop, gate, GOOD, get("/v2"))
    assert told(wrong) == (500, "The server failed on this request; its log says why.")
    assert after[0] == 200
    assert "ZeroDivisionError" in caplog.text


def test_models_come_and_go(loop, tmp_path):
    gate = FakeGate(tmp_path)

    async def scenario(client, server):
        first = await client.ask(GOOD)
        gate.models = {"n": facts(tmp_path, name="n", number=1)}
        second = await client.ask(GOOD)
        third = await client.ask(post(request(), "/v2/models/n/infer"))
        return first[0], second[0], third[0], server.front.counts

    *statuses, counts = run_one(loop, gate, scenario)
    assert statuses == [200, 404, 200]
    assert counts.models["m"].statuses == {200: 1}
    assert counts.models["n"].statuses == {200: 1}
    assert counts.others.statuses == {404: 1}
    assert sum(counts.models["n"].buckets) == 1


# --- what requests say besides --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "parameters", "expected_ms"),
    [
        ("", {"timeout": 5000}, 5),
        ("X-Request-Timeout-Ms: 7\r\n", {}, 7),
        ("x-request-timeout-ms: 7\r\n", {"timeout": 5000}, 5),
        ("X-REQUEST-TIMEOUT-MS: 7\r\n", {"timeout": 9000, "priority": 1}, 7),
    ],
)
def test_deadlines_that_are_asked_for(loop, tmp_path, headers, parameters, expected_ms):
    gate = FakeGate(tmp_path)
    before = time.monotonic_ns()
    asked(loop, gate, post(request(parameters=parameters), headers=headers))
    assert 0 <= gate.submitted[0].deadline_ns - before - expected_ms * 1e6 < 5e9


def test_a_deadline_counts_from_the_first_byte(loop, tmp_path):
    gate = FakeGate(tmp_path)

    async def scenario(client, server):
        before = time.monotonic_ns()
        # What is answered came together with the first part of the other request.
        await client.ask(get("/v2") + GOOD[:20])
        after = time.monotonic_ns()
        await asyncio.sleep(0.2)
        await client.ask(GOOD[20:])
        return before, after

    before, after = run_one(loop, gate, scenario)
    assert before <= gate.submitted[0].deadline_ns - SLO_NS <= after


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    ("trace", "is_valid"),
    [
        (TRACE, True),
        ("cc" + TRACE[2:] + "-more", True),
        (TRACE + "-more", False),
        ("ff" + TRACE[2:], False),
        (TRACE.upper(), False),
        (TRACE.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32), False),
        (TRACE.replace("00f067aa0ba902b7", "0" * 16), False),
        ("nonsense", False),
    ],
)
def test_traces(loop, tmp_path, trace, is_valid):
    header = f"traceparent: {trace}\r\n"
    state = "tracestate: a=1\r\ntracestate: b=2\r\n"
    requests = [post(request(), headers=header), get("/v2", header + state), get("/nothing", header)]
    spans = set()
    for _, headers, _ in asked(loop, FakeGate(tmp_path), *requests):
        assert not {"traceparent", "tracestate"} & headers.keys()
        if not is_valid:
            assert "traceresponse" not in headers
            continue
        version, given, span, flags = headers["traceresponse"].split("-")
        assert (version, given, flags) == ("00", TRACE.split("-")[1], "01")
        spans.add(span)
    assert len(spans) == 3 * is_valid
    assert TRACE.split("-")[2] not in spans


def test_tokens(loop, tmp_path):
    good = "Authorization: Bearer s3cret\r\n"
    wrong = [
        get("/v2"),
        get("/v2", "Authorization: Bearer other\r\n"),
        get("/v2", "Authorization: Basic s3cret\r\n"),
        get("/v2", "Authorization: Bearer é\r\n"),
        GOOD,
        get("/nothing"),
        get("/v2/healthy"),
    ]
    right = [get("/v2/health/live"), get("/v2/health/ready"), get("/v2", good), post(request(), headers=good)]
    answers = asked(loop, FakeGate(tmp_path), *wrong, *right, token="s3cret")
    assert [answer[0] for answer in answers] == [401] * len(wrong) + [200] * len(right)
    assert answers[0][1]["www-authenticate"].startswith("Bearer")
    assert "Authorization: Bearer TOKEN" in told(answers[0])[1]


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("br, GZIP;q=0.5", "gzip"),
        ("gzip;q=0, deflate", "deflate"),
        ("gzip; q=0.0", None),
        ("identity", None),
        ("", None),
    ],
)
def test_compressed_answers(loop, tmp_path, accepted, coding):
    big = post(request(range(4), 100), headers=f"Accept-Encoding: {accepted}\r\n")
    small = post(request(), headers=f"Accept-Encoding: {accepted}\r\n")
    (_, headers, body), (_, small_headers, _) = asked(loop, FakeGate(tmp_path), big, small)
    assert headers.get("content-encoding") == coding
    assert "content-encoding" not in small_headers
    plain = body if coding is None else (gzip if coding == "gzip" else zlib).decompress(body)
    assert json.loads(plain)["outputs"][0]["shape"] == [100, 2, 2]


@given(st.binary(max_size=3000), st.sampled_from([b"gzip", b"deflate"]))
def test_what_is_compressed_comes_back(body, coding):
    packed, field = compress(body, coding)
    assert (decompress(packed, coding, 3000) if field else packed) == body


# --- HTTP -----------------------------------------------------------------------------------------


def test_pipelined_requests_are_answered_in_order(loop, tmp_path):
    waiting = []
    gate = FakeGate(tmp_path, decide=waiting.append)

    async def scenario(client, server):
        await client.send(b"".join(post(request(id=str(number))) for number in range(5)) + get("/v2") + post(b"x"))
        await until(lambda: len(waiting) == 5)
        for ticket in reversed(waiting):
            copy_inputs(ticket)
            gate.tell(ticket, Fate.LATE if ticket is waiting[2] else Fate.DONE)
        return [await client.answer() for _ in range(7)]

    answers = run_one(loop, gate, scenario)
    assert [answer[0] for answer in answers] == [200, 200, 503, 200, 200, 200, 400]
    assert [json.loads(answers[place][2])["id"] for place in (0, 1, 3, 4)] == ["0", "1", "3", "4"]


def test_many_pipelined_requests(loop, tmp_path):
    """More than are taken at once, and more than the slab has room for."""
    number = 2000

    async def scenario(client, server):
        sending = asyncio.ensure_future(client.send(GOOD * number + get("/v2/models/m") * number))
        statuses = [(await client.answer())[0] for _ in range(2 * number)]
        await sending
        return statuses, server.front.counts

    statuses, counts = run_one(loop, FakeGate(tmp_path), scenario)
    assert statuses == [200] * 2 * number
    assert counts.models["m"].statuses[200] == number


def test_what_waits_behind_an_answer_can_have_its_slots(loop, tmp_path):
    """Each request takes the one slot there is, and its answer is all that a connection may have under way."""
    large = TensorSpec(name="y", datatype="UINT8", shape=(2**20,))
    model = facts(tmp_path, outputs=(large,), tensor_bytes=2**20 + 64)
    gate = FakeGate(tmp_path, model, decide=lambda ticket: Fate.DONE)
    assert len(model.slab) == 1

    async def scenario(client, server):
        await client.send(post(request(parameters={"binary_data_output": True})) * 3)
        return [(await client.answer())[0] for _ in range(3)]

    assert run_one(loop, gate, scenario) == [200] * 3


@pytest.mark.long
def test_a_client_that_does_not_read_is_not_read_from(loop, tmp_path):
    """What it could make the server hold is bounded; it is closed in the end."""

    async def scenario(server, connect):
        peer = socket.create_connection(server.sockets[0].getsockname()[:2])
        peer.setblocking(False)
        message, still = get("/openapi.json") * 1000, 0
        while still < 20:  # until nothing more is taken for 0.2 s
            try:
                peer.send(message)
                still = 0
            except BlockingIOError:
                still += 1
                await asyncio.sleep(0.01)
        answered = server.front.counts.others.statuses[200]
        await until(lambda: server.front.counts.connections == 0)
        peer.close()
        return answered

    # 25 kB an answer: kernels' buffers have some MB.
    assert run(loop, FakeGate(tmp_path), scenario, idle=2) < 1000


@pytest.mark.parametrize(("receives", "size"), [("chunked", 1), ("chunked", 1000), ("whole", 1), ("whole", 50_000)])
def test_bodies_in_pieces(loop, tmp_path, receives, size):
    """However a request is cut; pieces of one byte for the head, too."""
    body = json.dumps(request(range(4), 200)).encode()
    if receives == "chunked":
        chunks = [body[at : at + size] for at in range(0, len(body), size)]
        body = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\nTrailer: x\r\n\r\n"
        message = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + body
    else:
        message = post(body)

    async def scenario(client, server):
        for at in range(min(len(message), 200)):
            await client.send(message[at : at + 1])
            await asyncio.sleep(0)
        answers = [await client.ask(message[200:])]
        return [*answers, await client.ask(GOOD)], server.receiving_bytes

    answers, left = run_one(loop, FakeGate(tmp_path), scenario)
    assert [answer[0] for answer in answers] == [200, 200]
    assert left == 0


def test_larger_bodies_than_a_read(loop, tmp_path):
    one = TensorSpec(name="x", datatype="UINT8", shape=(3_000_000,))
    gate = FakeGate(tmp_path, facts(tmp_path, (one,), (TensorSpec(name="y", datatype="UINT8", shape=one.shape),)))
    parameters = {"binary_data_size": 3_000_000}
    item = {"name": "x", "shape": [1, 3_000_000], "datatype": "UINT8", "parameters": parameters}
    text = json.dumps({"inputs": [item], "parameters": {"binary_data_output": True}}).encode()
    block = np.random.default_rng(0).bytes(3_000_000)
    message = post(text + block, headers=f"Inference-Header-Content-Length: {len(text)}\r\n")
    for status, headers, body in asked(loop, gate, message, message):
        assert status == 200
        assert body[int(headers["inference-header-content-length"]) :] == block


def test_connections_are_kept_or_not(loop, tmp_path):
    async def scenario(server, connect):
        found = []
        for line, header in (
            ("HTTP/1.1", ""),
            ("HTTP/1.1", "Connection: close\r\n"),
            ("HTTP/1.1", "Connection: keep-alive\r\n"),
            ("HTTP/1.0", ""),
            ("HTTP/1.0", "Connection: keep-alive\r\n"),
        ):
            client = await connect()
            message = f"GET /v2 {line}\r\nHost: h\r\n{header}\r\n".encode()
            _, headers, _ = await client.ask(message)
            is_kept = headers.get("connection") != "close"
            if is_kept:
                await client.ask(get("/v2"))
            else:
                assert await client.at_end()
            found.append(headers.get("connection"))
        return found

    assert run(loop, FakeGate(tmp_path), scenario) == [None, "close", None, "close", "keep-alive"]


def test_what_follows_the_last_request_is_passed_over(loop, tmp_path):
    async def scenario(client, server):
        await client.send(post(request(), headers="Connection: close\r\n") + GOOD + b"\x00nonsense")
        return await client.answer(), await client.at_end()

    (status, headers, _), is_closed = run_one(loop, FakeGate(tmp_path), scenario)
    assert (status, headers["connection"], is_closed) == (200, "close", True)


def test_continue(loop, tmp_path):
    head, body = post(request(), headers="Expect: 100-continue\r\n").split(b"\r\n\r\n")

    async def scenario(client, server):
        first = await client.ask(head + b"\r\n\r\n")
        second = await client.ask(body)
        # Behind another request it is told only after that one's answer.
        third = await client.ask(GOOD + head + b"\r\n\r\n")
        fourth = await client.answer()
        fifth = await client.ask(body)
        sixth = await client.ask(head.replace(b"100-continue", b"something") + b"\r\n\r\n")
        return [answer[0] for answer in (first, second, third, fourth, fifth, sixth)]

    assert run_one(loop, FakeGate(tmp_path), scenario) == [100, 200, 200, 100, 200, 417]


def test_a_wish_for_another_protocol_is_passed_over(loop, tmp_path):
    wish = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"

    async def scenario(client, server):
        await client.send(get("/v2", wish) + get("/v2", wish) + get("/v2"))
        kept = [(await client.answer())[0] for _ in range(3)]
        with_body = await client.ask(post(request(), headers=wish))
        return kept, told(with_body), await client.at_end()

    kept, (status, sentence), is_closed = run_one(loop, FakeGate(tmp_path), scenario)
    assert kept == [200] * 3
    assert status == 400
    assert "another protocol" in sentence
    assert is_closed


@pytest.mark.parametrize(
    ("message", "status", "sentence"),
    [
        (b"\x16\x03\x01nonsense\r\n\r\n", 400, "not an HTTP/1.1 request"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "not an HTTP/1.1 request"),
        (b"GET /v2 HTTP/1.1\r\n\r\n", 400, "no Host header"),
        (b"GET /v2 HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "two headers host"),
        (b"GET /v2 HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n", 400, "not an HTTP/1.1 request"),
        (b"GET /v2 HTTP/1.1\r\nHost : a\r\n\r\n", 400, "not an HTTP/1.1 request"),
        (b"GET /v2 HTTP/1.1\nHost: a\n\n", 400, "not an HTTP/1.1 request"),
        (post(b"", headers="Transfer-Encoding: chunked\r\n"), 400, "not an HTTP/1.1 request"),
        (post(b"", headers="Content-Length: 5\r\n"), 400, "not an HTTP/1.1 request"),
        (post(b"", length="1x"), 400, "not an HTTP/1.1 request"),
        (post(b"", length="-1"), 400, "not an HTTP/1.1 request"),
        (post(b"", length=9**40), 400, "not an HTTP/1.1 request"),
        (post(b"", headers="Transfer-Encoding: gzip\r\n", length=0), 400, "not an HTTP/1.1 request"),
        (b"POST /v2 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "not an HTTP/1.1 request"),
        (post(b"", length=5000), 413, "has 5000 bytes; expected 4096"),
        (post(bytes(300_000)), 413, "has 300000 bytes"),
        (
            b"POST /v2 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + b"800\r\n%b\r\n" % bytes(2048) * 9,
            413,
            "more than 4096 bytes",
        ),
        (get("/v2", "a: " + 300 * "b" + "\r\n"), 431, "longer than 256 bytes"),
        (get("/v2", 60 * "a: b\r\n"), 431, "longer than 256 bytes"),
        (get("/v2" + 300 * "a"), 431, "longer than 256 bytes"),
        (b"GET /v2 HTTP/1.1\r\na: " + bytes(100_000).replace(b"\0", b"a"), 431, "longer than 256 bytes"),
        (b"GET /" + bytes(100_000).replace(b"\0", b"a"), 431, "longer than 256 bytes"),
        (b"\r\n" * 50_000, 431, "longer than 256 bytes"),
        (
            b"POST /v2 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\na: " + b"a" * 50_000,
            431,
            "longer than 256 bytes",
        ),
    ],
)
def test_what_is_no_request_is_told_and_closed(loop, tmp_path, message, status, sentence):
    async def scenario(client, server):
        answer = await client.ask(message)
        return told(answer), answer[1]["connection"], await client.at_end()

    (given_status, given_sentence), connection, is_closed = run_one(
        loop, FakeGate(tmp_path), scenario, header_bytes=256, body_bytes=4096
    )
    assert (given_status, connection, is_closed) == (status, "close", True)
    assert sentence in given_sentence


def test_what_was_asked_before_is_answered_before_a_refusal(loop, tmp_path):
    async def scenario(client, server):
        await client.send(GOOD * 3 + b"\x00\r\n\r\n")
        return [(await client.answer())[0] for _ in range(4)], await client.at_end()

    assert run_one(loop, FakeGate(tmp_path), scenario) == ([200, 200, 200, 400], True)


def test_memory_for_bodies_that_are_on_their_way(loop, tmp_path):
    async def scenario(server, connect):
        server.most_receiving_bytes = 100_000
        clients = [await connect() for _ in range(4)]
        for client, most in zip(clients, (28_000, 56_000, 84_000, 90_000), strict=True):
            await client.send(post(bytes(1000), length=60_000))
            while server.receiving_bytes < most:  # what is read first is not counted
                await client.send(bytes(1000))
                await asyncio.sleep(0.001)
        answer = await clients[-1].ask(bytes(30_000))
        for client in clients[:-1]:
            client.close()
        await until(lambda: server.receiving_bytes == 0)
        return told(answer)

    status, sentence = run(loop, FakeGate(tmp_path), scenario)
    assert status == 503
    assert "memory" in sentence


# --- time, and numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("part", [30, *left_to_ci(1, len(GOOD) - 1)])
def test_a_slow_request_is_told_and_closed(loop, tmp_path, part):
    async def scenario(client, server):
        await client.ask(GOOD)
        begin = time.monotonic()
        answer = await client.ask(GOOD[:part])
        return told(answer), time.monotonic() - begin, await client.at_end()

    (status, sentence), waited, is_closed = run_one(loop, FakeGate(tmp_path), scenario, receive=1)
    assert (status, is_closed) == (408, True)
    assert "within 1 s" in sentence
    assert 0.98 < waited < 10


def test_a_slow_request_is_not_saved_by_coming_bit_by_bit(loop, tmp_path):
    async def scenario(client, server):

        async def trickle():
            for at in range(len(GOOD) - 1):
                await client.send(GOOD[at : at + 1])
                await asyncio.sleep(0.02)

        sending = asyncio.ensure_future(trickle())
        answer = await client.answer()
        sending.cancel()
        return answer[0]

    assert run_one(loop, FakeGate(tmp_path), scenario, receive=0.3) == 408


@pytest.mark.long
def test_idle_connections_are_closed(loop, tmp_path):
    async def scenario(server, connect):
        begin = time.monotonic()
        new, used = await connect(), await connect()
        await used.ask(GOOD)
        assert await new.at_end()
        assert await used.at_end()
        return time.monotonic() - begin, server.front.counts.connections

    waited, left = run(loop, FakeGate(tmp_path), scenario, idle=1.5)
    assert 1.48 < waited < 15
    assert left == 0


def test_a_request_that_is_under_way_is_not_idle(loop, tmp_path):
    waiting = []
    gate = FakeGate(tmp_path, decide=waiting.append)

    async def scenario(client, server):
        await client.send(GOOD)
        await until(lambda: waiting)
        await asyncio.sleep(1.2)
        gate.tell(waiting[0], Fate.LATE)
        return (await client.answer())[0]

    assert run_one(loop, gate, scenario, idle=0.5, receive=0.5) == 503


@pytest.mark.parametrize("how", ["close", "reset"])
def test_who_goes_cancels(loop, tmp_path, how):
    gate = FakeGate(tmp_path, decide=lambda ticket: None)

    async def scenario(client, server):
        await client.send(GOOD * 2)
        await until(lambda: len(gate.submitted) >= 2)
        if how == "reset":
            peer = client.writer.get_extra_info("socket")
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.writer.transport.abort()
        else:
            client.close()
        await until(lambda: server.front.counts.connections == 0)
        return server.front.counts.cancelled

    assert run_one(loop, gate, scenario) == 2
    assert gate.cancelled == gate.submitted
    assert len(gate.models["m"].idle) == len(gate.models["m"].slab)


def test_no_more_connections_than_there_may_be(loop, tmp_path):
    async def scenario(server, connect):
        clients = [await connect() for _ in range(2)]
        assert [(await client.ask(GOOD))[0] for client in clients] == [200, 200]
        late = await connect()
        refused, is_closed = await late.ask(GOOD), await late.at_end()
        clients[0].close()
        late.close()
        await until(lambda: server.front.counts.connections <= 1)
        again = await (await connect()).ask(GOOD)
        return told(refused), refused[1]["retry-after"], is_closed, again[0], server.front.counts.refused

    (status, sentence), *rest = run(loop, FakeGate(tmp_path), scenario, connections=2)
    assert (status, sentence) == (503, "The server has 2 connections already, its limit. Try again later.")
    assert rest == ["1", True, 200, 1]


def test_an_end_answers_what_is_under_way(loop, tmp_path):
    waiting = []
    gate = FakeGate(tmp_path, decide=waiting.append)

    async def scenario(server, connect):
        idle, busy, half = await connect(), await connect(), await connect()
        await idle.ask(get("/v2"))
        await busy.send(GOOD * 2)
        await half.ask(get("/v2") + GOOD[:50])
        await until(lambda: len(waiting) >= 2)
        ending = asyncio.ensure_future(server.drain(10.0))
        assert await idle.at_end()

        async def is_refused():
            try:
                client = await connect()
                await asyncio.wait_for(client.reader.read(), 1)
            except TimeoutError:
                return False
            except OSError:  # refused or reset, as the system likes
                return True
            return False

        await until(is_refused)
        await half.send(GOOD[50:])
        await until(lambda: len(waiting) >= 3)
        for ticket in waiting:
            copy_inputs(ticket)
            gate.tell(ticket, Fate.DONE)
        answers = [await busy.answer(), await busy.answer(), await half.answer()]
        closed = [await busy.at_end(), await half.at_end()]
        await ending
        return [(status, headers.get("connection")) for status, headers, _ in answers], closed

    answers, closed = run(loop, gate, scenario)
    assert answers == [(200, None), (200, "close"), (200, "close")]
    assert closed == [True, True]


def test_an_end_does_not_wait_forever(loop, tmp_path):
    gate = FakeGate(tmp_path, decide=lambda ticket: None)

    async def scenario(client, server):
        await client.send(GOOD)
        await until(lambda: gate.submitted)
        await server.drain(0.1)
        return len(gate.cancelled), await client.at_end()

    assert run_one(loop, gate, scenario) == (1, True)


@given(st.integers(0, 2**50))
def test_buckets(latency_ns):
    bucket = bucket_of(latency_ns)
    assert bucket_begin(bucket) <= latency_ns
    if bucket < NUM_BUCKETS - 1 and latency_ns >= 4:
        assert latency_ns < bucket_begin(bucket + 1) <= 1.25 * bucket_begin(bucket)


# --- fuzzing --------------------------------------------------------------------------------------

ONCE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(60))


@ONCE
@given(st.lists(st.binary(max_size=80), min_size=1, max_size=6))
def test_bodies_that_mean_nothing_are_told(tmp_path_factory, bodies):
    gate = FakeGate(tmp_path_factory.mktemp("slab"))
    answers = asked("uvloop", gate, *[post(body) for body in bodies], GOOD)
    assert [answer[0] for answer in answers] == [400] * len(bodies) + [200]


def test_who_sends_on_after_the_last_answer_gets_to_see_it(tmp_path):
    """An old client that does not say how long its body is."""

    async def scenario(server, connect):
        client = await connect()
        await client.send(b"POST /v2/models/m/infer HTTP/1.0\r\n\r\n")
        for _ in range(20):
            await client.send(b"{}")
            await asyncio.sleep(0.005)
        client.writer.write_eof()
        return await asyncio.wait_for(client.reader.read(), 10)

    assert run("uvloop", FakeGate(tmp_path), scenario).startswith(b"HTTP/1.1 400 ")


@ONCE
@given(st.binary(max_size=300), st.integers(0, len(GOOD)), st.integers(0, 40), st.integers(1, 60))
def test_bytes_of_any_kind_do_no_harm(tmp_path_factory, noise, place, gone, size):
    """A request with something in its midst, in pieces: it is answered or waited for, and others are answered."""
    gate = FakeGate(tmp_path_factory.mktemp("slab"))
    message = GOOD[:place] + noise + GOOD[place + gone :]

    async def scenario(server, connect):
        client = await connect()
        for at in range(0, len(message), size):
            await client.send(message[at : at + size])
            await asyncio.sleep(0)
        client.writer.write_eof()
        received = await asyncio.wait_for(client.reader.read(), 10)
        return received, (await (await connect()).ask(GOOD))[0], server.front.counts

    received, after, counts = run("uvloop", gate, scenario, receive=0.5)
    assert received == b"" or received.startswith(b"HTTP/1.1 ")
    assert after == 200
    assert 500 not in counts.others.statuses
    assert 500 not in counts.models["m"].statuses
