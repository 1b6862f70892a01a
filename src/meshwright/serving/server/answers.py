"""Build HTTP answers as bytes, head and body in one piece; compress and decompress bodies."""

from __future__ import annotations

import zlib
from email.utils import formatdate
from http import HTTPStatus

import msgspec

JSON = b"application/json"
BINARY = b"application/octet-stream"
# Smaller answers are sent uncompressed even if the client accepts compressed ones: they fit into a packet.
_LEAST_COMPRESSED = 1024
# zlib's window sizes: with a gzip header, or with that of zlib, which HTTP calls deflate.
_WINDOWS = {b"gzip": 31, b"deflate": 15}
# Fast compression: the frontend's core serves other requests, too.
_LEVEL = 1
RETRY = b"Retry-After: 1\r\n"


class TooLarge(Exception):  # noqa: N818 - it is not an error of ours
    """A decompressed body is larger than allowed."""


class NotCompressed(Exception):  # noqa: N818 - it is not an error of ours
    """A body is not compressed as declared; the message says why."""


class ResponseWriter:
    """Builds HTTP answers; call `tick` about once a second to renew their Date header."""

    def __init__(self) -> None:
        self._statuses = {each.value: f"HTTP/1.1 {each.value} {each.phrase}\r\n".encode() for each in HTTPStatus}
        self._date = self._done = b""
        self.tick()

    def tick(self) -> None:
        """Renew the Date header."""
        date = f"Date: {formatdate(usegmt=True)}\r\nContent-Type: ".encode()
        if date != self._date:
            self._date = date
            self._done = self._statuses[200] + date + JSON + b"\r\nContent-Length: "

    def done(self, body: bytes, fields: bytes = b"") -> bytes:
        """Return an answer of status 200 with JSON; ``fields`` are further header lines, each ending with CR LF."""
        return b"%b%d\r\n%b\r\n%b" % (self._done, len(body), fields, body)

    def make(self, status: int, body: bytes, fields: bytes = b"", kind: bytes = JSON) -> bytes:
        """Return an answer of any status; ``kind`` is its content type."""
        return b"%b%b%b\r\nContent-Length: %d\r\n%b\r\n%b" % (
            self._statuses[status],
            self._date,
            kind,
            len(body),
            fields,
            body,
        )

    def error(self, status: int, sentence: str, fields: bytes = b"") -> bytes:
        """Return an answer whose JSON body is ``{"error": sentence}``."""
        return self.make(status, error_body(sentence), fields)


def error_body(sentence: str) -> bytes:
    """Return the JSON body of an error answer: ``{"error": sentence}``."""
    return msgspec.json.encode({"error": sentence.encode(errors="replace").decode()})


def compress(body: bytes, accepted: bytes | None) -> tuple[bytes, bytes]:
    """Compress a body of 1 KiB or more if the client accepts gzip or deflate.

    ``accepted`` is the request's ``Accept-Encoding``. Returns the body and its ``Content-Encoding`` header line, which
    is empty for a body that is not compressed.
    """
    if accepted is None or len(body) < _LEAST_COMPRESSED:
        return body, b""
    for part in accepted.lower().split(b","):
        name, _, quality = part.partition(b";")
        name = name.strip()
        if name in _WINDOWS and quality.replace(b" ", b"").rstrip(b".0") not in (b"q=", b"q"):
            packer = zlib.compressobj(_LEVEL, wbits=_WINDOWS[name])
            return packer.compress(body) + packer.flush(), b"Content-Encoding: " + name + b"\r\n"
    return body, b""


def decompress(body: bytes, coding: bytes, most: int) -> bytes:
    """Decompress a body; ``coding`` is its ``Content-Encoding``.

    Raises TooLarge if the result has more than ``most`` bytes, NotCompressed if the body is damaged, and KeyError for
    an unknown coding.
    """
    name = coding.strip().lower()
    if name == b"identity":
        return body
    unpacker = zlib.decompressobj(_WINDOWS[name])
    try:
        plain = unpacker.decompress(body, most + 1)
    except zlib.error as error:
        raise NotCompressed(str(error)) from None
    if len(plain) > most:
        raise TooLarge
    if not unpacker.eof or unpacker.unused_data:
        raise NotCompressed("it ends too early" if not unpacker.eof else "something follows its end")
    return plain
