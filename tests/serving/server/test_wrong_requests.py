"""What is said of requests that are wrong in ways that the parsers of others do not tell, or take as right."""

import json

import pytest

from tests.serving.server.fakes import FakeGate, post, request, run

GOOD = json.dumps(request()).encode()


def answer_of(tmp_path, message):
    """Status, sentence, and whether the connection is kept."""

    async def scenario(server, connect):
        status, headers, body = await (await connect()).ask(message)
        return status, json.loads(body).get("error"), headers.get("connection") != "close"

    return run("asyncio", FakeGate(tmp_path), scenario)


@pytest.mark.parametrize("more", [0, 1, 10**12])
def test_json_is_no_longer_than_the_body(tmp_path, more):
    size = len(GOOD)
    message = post(GOOD, headers=f"Inference-Header-Content-Length: {size + more}\r\n")
    status, sentence, is_kept = answer_of(tmp_path, message)
    assert (status, is_kept) == (400 if more else 200, True)
    if more:
        assert f"of {size + more} bytes, as Inference-Header-Content-Length says: the body has {size} bytes" in sentence


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (rb"\ud800" + b'"}', "surrogate pair"),
        (rb"\uDbFF12345" + b'"}\n', "surrogate pair"),
        (rb"\ud800" + b'", "parameters": {}}', "surrogate pair"),
        (rb"\ud800", "truncated"),
        (rb"\ud83d\ude00", "truncated"),
    ],
)
def test_half_a_character_is_told_from_a_request_that_was_cut_off(tmp_path, end, words):
    status, sentence, is_kept = answer_of(tmp_path, post(GOOD[:-1] + b', "id": "' + end))
    assert (status, is_kept) == (400, True)
    assert words in sentence


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ("Transfer-Encoding: gzip, chunked\r\n", "gzip, chunked"),
        ("Transfer-Encoding: deflate\r\nTransfer-Encoding: chunked\r\n", "deflate, chunked"),
        ("Transfer-Encoding: Chunked \r\n", None),
    ],
)
def test_only_chunks_are_a_transfer_encoding(tmp_path, headers, told):
    head = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: h\r\n{headers}\r\n".encode()
    message = head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD), GOOD)
    status, sentence, is_kept = answer_of(tmp_path, message)
    if told is None:
        assert (status, is_kept) == (200, True)
    else:
        assert (status, is_kept) == (501, False)
        assert f"Transfer-Encoding is '{told}'; expected chunked" in sentence
