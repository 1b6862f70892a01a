"""The token of a server's requests, sent as ``Authorization: Bearer TOKEN``: printable ASCII in one line."""

from __future__ import annotations

import hmac
from pathlib import Path

from meshwright.spec import ServingError, read_regular

# Tokens are short; a longer file is not a token file.
_MOST_BYTES = 2**14


def read_token(path: Path) -> str:
    """Return the token in a file. Raises ServingError."""
    content = read_regular(path, _MOST_BYTES + 1, ServingError)
    token = content.decode("ascii", errors="replace").strip()
    if len(content) > _MOST_BYTES or not is_token(token):
        raise ServingError(
            f"{path}: expected a token, one line of ASCII without spaces. Write one; requests must send it."
        )
    return token


def is_token(text: str) -> bool:
    """Return whether a string is a valid token."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


def is_bearer(given: bytes, token: bytes) -> bool:
    """Return whether an ``Authorization`` header contains this token."""
    scheme, _, found = given.partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(found.strip(), token)
