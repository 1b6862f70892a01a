"""Responses as bytes: parse them, match them to requests, and decode their tensors.

An answer of status 200 belongs to a request if both have the same ``id``. The caller looks for this id in the answer's
bytes, and parses the JSON only if the id is not found.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.serving.datatypes import NUMPY_TYPES

# The largest head and body of a response that are accepted.
_MOST_HEAD_BYTES = 2**16
_MOST_BODY_BYTES = 2**31
# Bytes that are read of an answer with an error, and characters of its reason that are shown.
MOST_REASON_BYTES, _SHOWN = 2**12, 300
_IN_JSON: dict[str, Any] = {**NUMPY_TYPES, "BF16": np.float32, "BYTES": object}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMetadata:
    """Name, datatype and shape of an input or output, from a server's metadata; a size of -1 is open."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class ResponseHead(NamedTuple):
    """Status and headers of a response.

    ``length`` is the length of the body in bytes, -1 if the body ends with the connection. ``json_length`` is the
    number of bytes of JSON in the body if binary data follow, else None. ``closes``: the server closes the connection.
    """

    status: int
    length: int
    json_length: int | None
    is_chunked: bool
    closes: bool


class Response(NamedTuple):
    """A complete HTTP response."""

    head: ResponseHead
    body: bytes

    @property
    def text(self) -> bytes:
        """The JSON part of the body."""
        return self.body if self.head.json_length is None else self.body[: self.head.json_length]


class MalformedError(Exception):
    """The bytes are not a valid response."""


def read_answer(data: bytes, *, ended: bool = False) -> Response | None:
    """Return the response in ``data``; None if it is incomplete.

    ``ended``: the connection has ended after these bytes. Raises MalformedError, also for more than one response.
    """
    end = data.find(b"\r\n\r\n")
    if end < 0:
        if len(data) > _MOST_HEAD_BYTES or data[:7] != b"HTTP/1."[: len(data)]:
            raise MalformedError("not the head of a response")
        return None
    head = parse_head(data[:end])
    start = end + 4
    if 100 <= head.status < 200:
        return read_answer(data[start:], ended=ended) if len(data) > start else None
    if head.is_chunked:
        body = _join_chunks(data, start)
        return None if body is None else Response(head, body)
    if head.length < 0:
        return Response(head, data[start:]) if ended else None
    missing = start + head.length - len(data)
    if missing > 0:
        return None
    if missing < 0:
        raise MalformedError("more than one response to a request")
    return Response(head, data[start:])


@lru_cache(maxsize=4096)
def parse_head(head: bytes) -> ResponseHead:
    """Parse status line and headers. Raises MalformedError."""
    lines = head.split(b"\r\n")
    words = lines[0].split(b" ", 2)
    if len(words) < 2 or words[0] not in (b"HTTP/1.1", b"HTTP/1.0") or len(words[1]) != 3 or not words[1].isdigit():
        raise MalformedError("no status line")
    headers = {}
    for line in lines[1:]:
        name, separator, value = line.partition(b":")
        if not separator:
            raise MalformedError("a header without a colon")
        headers[name.strip().lower()] = value.strip().lower()
    connection = headers.get(b"connection", b"")
    status = int(words[1])
    is_chunked = headers.get(b"transfer-encoding", b"").endswith(b"chunked")
    length = _parse_size(headers.get(b"content-length"))
    if length is None:
        length = 0 if status in (204, 304) else -1
    return ResponseHead(
        status=status,
        length=length,
        json_length=_parse_size(headers.get(b"inference-header-content-length")),
        is_chunked=is_chunked,
        closes=connection == b"close" or (words[0] == b"HTTP/1.0" and connection != b"keep-alive"),
    )


def _parse_size(value: bytes | None) -> int | None:
    if value is None:
        return None
    if not value.isdigit() or len(value) > 10 or int(value) > _MOST_BODY_BYTES:
        raise MalformedError("a length that is not a number")
    return int(value)


def _join_chunks(data: bytes, place: int) -> bytes | None:
    parts: list[bytes] = []
    while True:
        end = data.find(b"\r\n", place)
        if end < 0:
            if len(data) - place > 1024:
                raise MalformedError("a chunk without a size")
            return None
        try:
            size = int(data[place:end].split(b";", 1)[0], 16)
        except ValueError:
            raise MalformedError("a chunk without a size") from None
        place = end + 2
        if not 0 <= size <= _MOST_BODY_BYTES:
            raise MalformedError("a chunk without a size")
        if size == 0:
            # Trailers end with an empty line, as does a body without them.
            end = data.find(b"\r\n\r\n", end)
            if end < 0:
                return None
            if end + 4 != len(data):
                raise MalformedError("more than one response to a request")
            return b"".join(parts)
        if len(data) < place + size + 2:
            return None
        if data[place + size : place + size + 2] != b"\r\n":
            raise MalformedError("a chunk of another size than it says")
        parts.append(data[place : place + size])
        place += size + 2


def is_for_another(answer: Response, request_id: str) -> bool:
    """Return whether an answer of status 200 has another id than ``request_id``; without any id it is malformed."""
    try:
        found = json.loads(answer.text)["id"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return False
    return bool(found != request_id)


def reason_of(body: bytes) -> str:
    """Return the reason in the body of an error answer: its ``error``, or else the start of the body."""
    try:
        text = str(json.loads(body)["error"])
    except (KeyError, TypeError, ValueError, RecursionError):
        text = body.decode(errors="replace")
    return printable(text).rstrip(".") or "without a reason"


def printable(text: str) -> str:
    """Return a received string shortened to 300 characters, without characters that control a terminal."""
    words = "".join(sign if sign.isprintable() else " " for sign in text).split()
    shown = " ".join(words)
    return shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "…"


def decode_outputs(answer: Response) -> dict[str, NDArray[Any]]:
    """Return the tensors of an answer by name, from JSON or binary data. Raises ValueError for an invalid answer."""
    try:
        outputs, place, found = json.loads(answer.text)["outputs"], len(answer.text), {}
        for output in outputs:
            shape, kind = tuple(output["shape"]), output["datatype"]
            size = output.get("parameters", {}).get("binary_data_size")
            if size is None:
                values: NDArray[Any] = np.array(output["data"], dtype=_IN_JSON.get(kind, np.float32))
            else:
                values = _decode_binary(answer.body[place : place + size], kind)
                place += size
            found[output["name"]] = values.reshape(shape)
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"no outputs of the Open Inference Protocol: {type(error).__name__}: {error}") from None
    return found


def _decode_binary(content: bytes, kind: str) -> NDArray[Any]:
    if kind == "BF16":
        # BF16 is the upper half of a float32.
        return (np.frombuffer(content, "<u2").astype(np.uint32) << 16).view(np.float32)
    if kind != "BYTES":
        return np.frombuffer(content, np.dtype(NUMPY_TYPES[kind]).newbyteorder("<"))
    values: list[str] = []
    place = 0
    while place < len(content):
        size = int.from_bytes(content[place : place + 4], "little")
        values.append(content[place + 4 : place + 4 + size].decode(errors="replace"))
        place += 4 + size
    return np.array(values, dtype=object)
