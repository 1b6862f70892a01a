"""Responses as bytes, in whatever pieces they come."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.serving.load import Response, decode_outputs
from meshwright.serving.load.responses import MalformedError, is_for_another, read_answer

BODIES = st.binary(max_size=300)


def chunked(parts, trailer=b""):
    chunks = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(part), part) for part in parts if part)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n" + trailer + b"\r\n"


def check_prefixes(data, status, body):
    for end in range(len(data)):
        assert read_answer(data[:end]) is None
    found = read_answer(data)
    assert (found.head.status, found.body) == (status, body)
    with pytest.raises(MalformedError):
        read_answer(data + b"x")


@given(BODIES, st.sampled_from([200, 404, 503]))
def test_a_response_with_a_length_is_read_when_it_is_whole(body, status):
    check_prefixes(b"HTTP/1.1 %d X\r\nA: b\r\ncontent-LENGTH:  %d\r\n\r\n" % (status, len(body)) + body, status, body)


@given(st.lists(BODIES, max_size=4), st.sampled_from([b"", b"A: b\r\n"]))
def test_a_response_in_chunks_is_read_when_it_is_whole(parts, trailer):
    check_prefixes(chunked(parts, trailer), 200, b"".join(parts))


def test_a_response_that_ends_with_its_connection():
    data = b"HTTP/1.0 200 OK\r\n\r\nall of it"
    assert read_answer(data) is None
    assert read_answer(data, ended=True).body == b"all of it"
    assert read_answer(data, ended=True).head.closes


def test_what_comes_before_the_response_is_left_out():
    assert read_answer(b"HTTP/1.1 100 Continue\r\n\r\n") is None
    assert read_answer(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No\r\n\r\n").head.status == 204


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 2000,
        b"HTTP/1.1 " + b"x" * 70_000,
    ],
)
def test_what_is_no_response(data):
    with pytest.raises(MalformedError):
        read_answer(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_response_or_not(data):
    for prefix in (b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"):
        try:
            found = read_answer(prefix + data, ended=True)
        except MalformedError:
            continue
        assert found is None or isinstance(found, Response)


def answer(body, headers=b""):
    return read_answer(b"HTTP/1.1 200 OK\r\n%bContent-Length: %d\r\n\r\n%b" % (headers, len(body), body))


def test_outputs_from_json_and_binary_data():
    text = b'{"id":"1","outputs":[{"name":"y","datatype":"FP32","shape":[1,2],"data":[0.5,-1]}]}'
    assert decode_outputs(answer(text))["y"].tolist() == [[0.5, -1.0]]
    text = (
        b'{"outputs":[{"name":"y","datatype":"INT64","shape":[2],"parameters":{"binary_data_size":16}},'
        b'{"name":"b","datatype":"BF16","shape":[1],"parameters":{"binary_data_size":2}},'
        b'{"name":"t","datatype":"BYTES","shape":[2],"parameters":{"binary_data_size":10}}]}'
    )
    data = np.array([7, -7], "<i8").tobytes() + b"\x80\x3f" + b"\1\0\0\0a\1\0\0\0b"
    found = decode_outputs(answer(text + data, b"Inference-Header-Content-Length: %d\r\n" % len(text)))
    assert {name: values.tolist() for name, values in found.items()} == {"y": [7, -7], "b": [1.0], "t": ["a", "b"]}


@pytest.mark.parametrize("body", [b"[]", b"{}", b'{"outputs":[{"name":"y"}]}', b"\xff", b'{"outputs":3}'])
def test_what_has_no_outputs(body):
    with pytest.raises(ValueError, match=r"no outputs|decode"):
        decode_outputs(answer(body))


def test_an_id_of_another_is_told_from_none():
    assert is_for_another(answer(b'{"id":"2"}'), "1")
    assert not is_for_another(answer(b'{"id":"1"}'), "1")
    assert not is_for_another(answer(b"{}"), "1")
    assert not is_for_another(answer(b"<html>"), "1")
